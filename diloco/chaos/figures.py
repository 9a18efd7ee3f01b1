"""Figures of the islands in a run under chaos, and of how soon it went on after a fault. Pure."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from diloco.chaos.evidence import STARTING_AGAIN, Evidence, island_back_s
from diloco.chaos.fault_log import FaultHistory, RunHistory
from diloco.chaos.judge import accounts_of, headers_by_version
from diloco.chaos.plan import Kind
from diloco.chaos.tokens import Event, starts_of
from diloco.report.island_starts import effective, has_ended


@dataclass(frozen=True, slots=True)
class FaultFigures:
    """Figures of one island; times in seconds.

    `goodput` is the share of wall time in inner steps that stand; `predicted` is that of the same
    run without faults, less the share of time for which faults kept islands from training: all
    islands, where each waits for the others; None: no such run was made.
    """

    island: str
    goodput: float
    predicted: float | None
    num_starts: int
    tokens: int
    dropped_tokens: int
    lost_tokens: int
    nats_per_byte: float | None


def island_figures(
    evidence: Evidence, undisturbed: Mapping[str, float] | None = None
) -> tuple[FaultFigures, ...]:
    """Compute how each island fared; `undisturbed` is their goodput in the run without faults."""
    headers, _ = headers_by_version(evidence.headers)
    accounts = accounts_of(evidence, headers)
    downtimes = {island: [*_downtimes(evidence, island)] for island in evidence.events}
    figures = []
    for island, events in evidence.events.items():
        steps = [e for e in events if e["kind"] == "inner_step"]
        stands = [e for e in effective([*events]) if e["kind"] == "inner_step"]
        told = [e["nats_per_byte"] for e in events if _is_published_loss(e)]
        began = min((e["unix_s"] - e["duration_s"] for e in steps), default=0.0)
        wall_s = max((e["unix_s"] for e in steps), default=0.0) - began
        others = downtimes if not evidence.is_on_arrival else {island: downtimes[island]}
        down_s = _union_s([span for spans in others.values() for span in spans])
        mine = [each for (name, _), each in accounts.items() if name == island]
        figures.append(
            FaultFigures(
                island=island,
                goodput=sum(e["duration_s"] for e in stands) / wall_s if wall_s else 0.0,
                predicted=(
                    undisturbed[island] * max(0.0, 1 - down_s / wall_s)
                    if undisturbed and wall_s
                    else None
                ),
                num_starts=len(starts_of(events)),
                tokens=sum(e["num_tokens"] for e in steps),
                dropped_tokens=max((each.dropped for each in mine), default=0),
                lost_tokens=max((each.lost for each in mine), default=0),
                nats_per_byte=told[-1] if told and has_ended(events) else None,
            )
        )
    return tuple(figures)


@dataclass(frozen=True, slots=True)
class AccidentFigures:
    """The cost of a kill, restart or freeze of an island, to the other islands and to itself.

    Figures of the others are the worst of them, from the fault until the island's contributions are
    included again. None: not known, for the run ended before.

    Attributes:
        kind: Of the fault.
        target: The island, or a rank of it.
        longest_step: Longest time from one inner step of another to its next, over 1.05 times the
            usual one and 20 ms.
        slower: By how much the time that a step takes rises on average, as a share.
        next_merge_s: From the fault to the next merge of every other island.
        num_expired: Rounds of the others that expired.
        back_s: From when the island may go on to its next inner step.
        own_steps: Inner steps that it then makes until a contribution is included.
    """

    kind: str
    target: str
    longest_step: float | None
    slower: float | None
    next_merge_s: float | None
    num_expired: int
    back_s: float | None
    own_steps: int | None


def accident_figures(evidence: Evidence) -> tuple[AccidentFigures, ...]:
    """Compute what every fault cost that kept an island from training."""
    return tuple(
        _accident(evidence, history, history.began_unix_s)
        for history in evidence.history.faults
        if history.fired and history.began_unix_s is not None and history.fault.island
        if history.fault.kind in (*STARTING_AGAIN, Kind.FREEZE)
    )


def _accident(evidence: Evidence, history: FaultHistory, began: float) -> AccidentFigures:
    fault, ready = history.fault, began + history.lasted_s
    mine = [event for event in evidence.events[fault.island] if event["island_rank"] == 0]
    if fault.kind in STARTING_AGAIN:
        was = max((e.get("incarnation", 0) for e in mine if e["unix_s"] <= began), default=0)
        mine = [event for event in mine if event.get("incarnation", 0) > was]
    own = _times(mine, "inner_step", after=ready)
    first = min(own, default=math.inf)
    included = _times(mine, "fragment_merged", after=first, outcome="included")
    until = min(included, default=math.inf)
    others = [events for island, events in evidence.events.items() if island != fault.island]
    slower, longest, usual = [], [], []
    for events in others:
        steps = _times(events, "inner_step")
        gaps = [(earlier, later - earlier) for earlier, later in itertools.pairwise(steps)]
        before = [gap for at, gap in gaps if at + gap <= began]
        during = [gap for at, gap in gaps if at + gap > began and at <= until]
        usual += before
        longest += during
        if before and during:
            slower.append(statistics.fmean(during) / statistics.fmean(before) - 1)
    merges = [min(_times(e, "fragment_merged", after=began), default=math.inf) for e in others]
    next_merge = max(merges, default=math.inf)
    return AccidentFigures(
        kind=fault.kind,
        target=fault.target,
        longest_step=(
            max(longest) / (1.05 * statistics.median(usual) + 0.020) if usual and longest else None
        ),
        slower=max(slower, default=None),
        next_merge_s=next_merge - began if math.isfinite(next_merge) else None,
        num_expired=sum(
            at <= until for e in others for at in _times(e, "round_expired", after=began)
        ),
        back_s=own[0] - ready if own else None,
        own_steps=sum(at <= until for at in own) if included else None,
    )


def _times(
    events: Sequence[Event], kind: str, *, after: float = 0.0, **values: object
) -> list[float]:
    """Give when a leader's events of a kind happened, ascending, in unix time."""
    return sorted(
        e["unix_s"]
        for e in events
        if e["kind"] == kind and e["island_rank"] == 0 and e["unix_s"] > after
        if all(e[name] == value for name, value in values.items())
    )


def next_publication_s(fault: FaultHistory, history: RunHistory) -> float | None:
    """Seconds from a fault's begin, and the time that it lasts, until all fragments have moved.

    Fragments that publish nothing more at all do not count; None: none does, or it never began.
    """
    if fault.began_s is None:
        return None
    since_s = fault.began_s + fault.lasted_s
    first: dict[int, float] = {}
    for at_s, fragment, _ in history.published:
        if at_s > since_s:
            first.setdefault(fragment, at_s - since_s)
    return max(first.values(), default=None)


def _is_published_loss(event: Event) -> bool:
    return bool(event["kind"] == "evaluated" and event["parameters"] == "published")


def _downtimes(evidence: Evidence, island: str) -> Iterator[tuple[float, float]]:
    """Spans of unix time in which faults kept an island from training."""
    for history in evidence.history.faults:
        if history.fault.island != island or not history.fired or history.began_unix_s is None:
            continue
        began = history.began_unix_s
        if history.fault.kind is Kind.FREEZE:
            yield began, began + history.fault.lasts_s
        elif history.fault.kind in STARTING_AGAIN:
            back_s = island_back_s(history, evidence.events[island])
            if back_s is not None:
                yield began, began + back_s


def _union_s(spans: Sequence[tuple[float, float]]) -> float:
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
