"""How islands fared in a run under chaos, and how soon it went on after a fault: pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from diloco.chaos.fault_log import FaultHistory, RunHistory
from diloco.chaos.judge import (
    STARTING_AGAIN,
    Evidence,
    accounts_of,
    headers_by_version,
    island_back_s,
)
from diloco.chaos.plan import Kind
from diloco.chaos.tokens import Event, starts_of
from diloco.report.island_starts import effective, has_ended


@dataclass(frozen=True, slots=True)
class FaultFigures:
    """How an island fared; times in seconds.

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
