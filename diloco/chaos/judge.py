"""Judges what a run under chaos left behind against the rules of a run.

Pure: evidence in, findings out. Nobody's own word on what he holds is taken for more
than that: what islands told (events), what the syncer made durable (audit log, newest records) and
what was done to them (fault log) are held against each other.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from diloco.chaos.fault_log import FaultHistory, RunHistory
from diloco.chaos.plan import COORDINATOR, ENDING, SPOILING, Kind
from diloco.chaos.tokens import Event, Headers, Send, TokenAccount, account, sends_of, starts_of

#: Violations shown of one invariant.
_SHOWN = 3
#: Faults after which an island is expected to start once more.
STARTING_AGAIN = frozenset({Kind.KILL, Kind.RESTART})
#: Bytes that a thin line may move beyond those of contributions, as a share of them: what was under
#: way when a flipped bit broke its connection is sent again.
_SENT_AGAIN = 0.5
_OUTCOMES = frozenset({"included", "not_included", "refused", "declined", "expired", "unknown"})


@dataclass(frozen=True, slots=True)
class Newest:
    """A fragment's newest durable record."""

    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class Recomputed:
    """A retained version that was recomputed from its predecessor; empty: to the same bits."""

    fragment_id: int
    version: int
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is judged.

    Args:
        history: The fault log.
        events: Island -> what all its ranks wrote, whole lines, in the order of the files.
        headers: Of the audit log and of the store, in any order; equal ones may be there twice.
        newest: Fragment -> its newest record.
        repaired: Fragment and version of what was lost and taken back from islands.
        recomputed: Retained versions.
        exit_codes: Island -> how its last supervisor ended; None: it lived when the run was over.
        problem: Why the run did not come to its end; empty: it did.
        local_mix: alpha of the run.
        is_on_arrival: Whether islands merge on arrival and may jump over versions.
        contribution_bytes: Fragment -> what one contribution to it weighs on the line.
        most_steps: Inner steps that one contribution counts; 0: any number.
    """

    history: RunHistory
    events: Mapping[str, Sequence[dict[str, Any]]]
    headers: Sequence[Mapping[str, Any]]
    newest: Mapping[int, Newest]
    recomputed: Sequence[Recomputed]
    exit_codes: Mapping[str, int | None]
    repaired: Sequence[tuple[int, int]] = ()
    problem: str = ""
    local_mix: float = 0.0
    is_on_arrival: bool = False
    contribution_bytes: Mapping[int, int] = field(default_factory=dict)
    most_steps: int = 0


@dataclass(frozen=True, slots=True)
class CheckResult:
    """An invariant, and what speaks for or against it."""

    invariant: str
    holds: bool
    evidence: str

    @property
    def text(self) -> str:
        """Say it in a line."""
        return f"{'held' if self.holds else 'BROKEN'}: {self.invariant}: {self.evidence}"


def judge(evidence: Evidence) -> tuple[CheckResult, ...]:
    """Judge every invariant."""
    headers, clashes = headers_by_version(evidence.headers)
    accounts = accounts_of(evidence, headers)
    return (
        CheckResult(
            "the run comes to its end",
            not evidence.problem,
            evidence.problem or f"{len(evidence.newest)} fragments flushed",
        ),
        _finding(
            "a version has one digest everywhere",
            [*clashes, *_digest_problems(evidence, headers)],
            f"{len(headers)} versions, {_num(evidence, 'fragment_merged')} merges, "
            f"{_num(evidence, 'fragment_staged')} versions hashed by who staged them, every "
            f"island's end",
        ),
        _finding(
            "every version is published exactly once",
            [*_version_problems(evidence, headers)],
            ", ".join(f"fragment {p}: 0 to {new.version}" for p, new in evidence.newest.items()),
        ),
        _finding(
            "every contribution has exactly one outcome",
            [*_outcome_problems(evidence, headers)],
            _verdicts_text(_sends(evidence)),
        ),
        _finding(
            "every token is accounted for",
            [problem for each in accounts.values() for problem in each.problems],
            _tokens_text(accounts),
        ),
        _finding(
            "no island ends unasked",
            [*_exit_problems(evidence)],
            ", ".join(
                f"{island} {len(starts_of(events))} starts"
                f"{', away at the end' if _was_away(evidence, island) else ''}"
                for island, events in evidence.events.items()
            ),
        ),
        _finding(
            "strangers end no process",
            [*_storm_problems(evidence)],
            f"{len(_fired(evidence, Kind.CONNECT_STORM))} storms of connections",
        ),
        _finding(
            "a thin line costs time alone",
            [*_thin_line_problems(evidence)],
            "; ".join(_thin_line_text(evidence, line) for line in _fired(evidence, Kind.THIN_LINE))
            or "no thin lines",
        ),
        _finding(
            "nobody is blamed for what he did not do",
            [*_blame_problems(evidence)],
            _blame_text(evidence),
        ),
        _finding(
            "retained versions are recomputed to the bit",
            [
                f"fragment {each.fragment_id} version {each.version}: {each.problem}"
                for each in evidence.recomputed
                if each.problem
            ],
            f"{len(evidence.recomputed)} versions",
        ),
    )


def island_back_s(fault: FaultHistory, events: Sequence[Event]) -> float | None:
    """Seconds from an island's kill until its next start has made an inner step; None: never."""
    if fault.began_unix_s is None:
        return None
    began = fault.began_unix_s
    before = max((e["incarnation"] for e in _steps(events) if e["unix_s"] <= began), default=0)
    after = [e["unix_s"] - began for e in _steps(events) if e["incarnation"] > before]
    return min(after, default=None)


# -- invariants ----------------------------------------------------------------------------------


def headers_by_version(headers: Sequence[Mapping[str, Any]]) -> tuple[Headers, list[str]]:
    """Give one header a version, and what two headers of a version differ in."""
    by_version: dict[tuple[int, int], Mapping[str, Any]] = {}
    clashes = []
    for each in headers:
        # One that was lost and taken back from an island is the same version.
        header = {name: value for name, value in each.items() if name != "repaired"}
        key = header["fragment_id"], header["version"]
        if (other := by_version.setdefault(key, header)) != header:
            clashes.append(
                f"fragment {key[0]} version {key[1]} was made twice: digests {other['digest'][:16]}"
                f" and {header['digest'][:16]}"
            )
    return by_version, clashes


def _digest_problems(evidence: Evidence, headers: Headers) -> Iterator[str]:
    corrupted = {
        history.fault.island
        for history in evidence.history.faults
        if history.fault.kind is Kind.CORRUPT and history.fired
    }
    newest = tuple(evidence.newest[p].digest for p in sorted(evidence.newest))
    last_with: dict[tuple[int, str], int] = {}  # fragment, digest -> newest version that has it
    for (p, version), header in headers.items():
        last_with[p, header["digest"]] = max(version, last_with.get((p, header["digest"]), -1))
    for island, events in evidence.events.items():
        for event in events:
            if event["kind"] == "fragment_merged" and event["digest"]:
                p, version, digest = event["fragment_id"], event["version"], event["digest"]
                made = headers.get((p, version), {}).get("digest", "no such version")
                # The syncer's newest word may be of a later version than what was merged.
                is_later = evidence.is_on_arrival and last_with.get((p, digest), -1) > version
                if digest != made and not is_later:
                    yield (
                        f"{island} merged fragment {p} version {version} as {digest[:16]}, the "
                        f"audit log has {made[:16]}"
                    )
            elif event["kind"] == "fragment_staged":
                key = event["fragment_id"], event["version"]
                if (made := headers.get(key, {}).get("digest", "none")) != event["digest"]:
                    yield (
                        f"{island} staged fragment {key[0]} version {key[1]} as "
                        f"{event['digest'][:16]} by its own hash, the audit log has {made[:16]}"
                    )
            elif event["kind"] == "island_ended" and tuple(event["digests"]) != newest:
                yield (
                    f"{island} rank {event['island_rank']} ended with other values than the "
                    f"newest records"
                )
            elif event["kind"] == "digest_mismatch" and island not in corrupted:
                yield (
                    f"{island} staged a damaged lane of fragment {event['fragment_id']} version "
                    f"{event['version']}, and no fault corrupted its links"
                )


def _version_problems(evidence: Evidence, headers: Headers) -> Iterator[str]:
    for p, newest in evidence.newest.items():
        versions = {version for fragment, version in headers if fragment == p}
        if missing := sorted(set(range(newest.version + 1)) - versions):
            yield f"fragment {p}: versions {missing} of 0 to {newest.version} were not indexed"
        if beyond := sorted(version for version in versions if version > newest.version):
            yield f"fragment {p}: versions {beyond} were published and are lost"
    torn = _fired(evidence, Kind.TORN_NEWEST)
    if len(torn) > len(evidence.repaired):
        yield (
            f"{len(torn)} newest versions were torn, {len(evidence.repaired)} were taken back from "
            f"islands: {list(evidence.repaired)}"
        )
    for island, events in evidence.events.items():
        for incarnation, start in starts_of(events).items():
            for p in evidence.newest:
                merged = [
                    e["version"]
                    for e in start
                    if e["kind"] == "fragment_merged" and e["fragment_id"] == p
                ]
                steps = [b - a for a, b in itertools.pairwise(merged)]
                if any(s < 1 or (s > 1 and not evidence.is_on_arrival) for s in steps):
                    yield (
                        f"{island} start {incarnation} merged fragment {p} in the order {merged}"
                    )


def _outcome_problems(evidence: Evidence, headers: Headers) -> Iterator[str]:
    claimed: Counter[tuple[int, int, str]] = Counter()
    for (p, version), counting in headers.items():
        for contributor in counting["contributors"]:
            claimed[p, version, contributor["island"]] += 1
    for (p, version, island), times in claimed.items():
        if times > 1:
            yield f"fragment {p} version {version} counts {island} {times} times"
    for send in _sends(evidence):
        event = send.event
        header = headers.get((event["fragment_id"], event["version"] + 1))
        is_counted = header is not None and any(
            (c["island"], c["incarnation"]) == (event["island"], event["incarnation"])
            and header["attempt"] == event["attempt"]
            for c in header["contributors"]
        )
        if send.verdict not in _OUTCOMES:
            yield f"{send.text}: outcome {send.verdict!r} is none"
        elif send.verdict == "unknown":
            if _has_ended(evidence, event):
                yield f"{send.text}: its island ended well and never heard its outcome"
        elif is_counted != (send.verdict == "included"):
            yield (
                f"{send.text}: {send.verdict}, but it is {'' if is_counted else 'not '}among the "
                f"contributors of version {event['version'] + 1}"
            )
        if is_counted and event["declined"]:
            yield f"{send.text}: declined, and counted"


def _exit_problems(evidence: Evidence) -> Iterator[str]:
    for island, code in evidence.exit_codes.items():
        if code != 0 and not _was_away(evidence, island):
            yield f"{island} ended with exit code {code}"
        killed = [history for history in evidence.history.faults if _starts_again(history, island)]
        num_starts = len(starts_of(evidence.events[island]))
        is_corrupted = any(history.fault.island == island for history in _corrupting(evidence))
        if num_starts > 1 + len(killed) and not is_corrupted:  # else it may have given up on itself
            yield f"{island} started {num_starts} times, and was ended {len(killed)} times"


def _fired(evidence: Evidence, *kinds: Kind) -> list[FaultHistory]:
    return [f for f in evidence.history.faults if f.fired and f.fault.kind in kinds]


def _storm_problems(evidence: Evidence) -> Iterator[str]:
    for storm in _fired(evidence, Kind.CONNECT_STORM):
        began_s, ended_s = storm.began_s or 0.0, storm.ended_s or float("inf")
        is_explained = any(
            other.began_s is not None
            and other.fault.kind in ENDING
            and other.fault.target in (storm.fault.target, COORDINATOR)
            and began_s <= other.began_s <= ended_s
            for other in evidence.history.faults
        )
        if not (storm.is_same or is_explained):
            yield f"{storm.fault.target} ended under a storm: {storm.note}"


def _thin_line_problems(evidence: Evidence) -> Iterator[str]:
    """What a thin line may not cost: a start, a round, the rest of the run, many bytes."""
    for line in _fired(evidence, Kind.THIN_LINE):
        island, (began, ended) = line.fault.island, line.unix_span_s
        who, events = f"{island} on its thin line", evidence.events[island]
        within = [e for e in events if "incarnation" in e and began <= e["unix_s"] <= ended]
        is_met = any(line.meets(other) for other in evidence.history.faults)
        if len({event["incarnation"] for event in within}) > 1 and not is_met:
            yield f"{who} ended and started again"
        if any(event["kind"] == "round_expired" for event in within) and not is_met:
            yield f"{who} was waited for until a round expired"
        if not (_versions_within(evidence, line) or is_met):
            yield f"{who} kept the run from every version for {ended - began:.1f} s"
        after = [s.verdict for s in _sends_of(evidence, island) if s.event["unix_s"] > ended]
        if after and "included" not in after:
            yield f"{who}: none of its {len(after)} contributions afterwards was included"
        moved, sent = _moved_around(evidence, line)
        if moved > (1 + _SENT_AGAIN) * sent + sum(evidence.contribution_bytes.values()):
            yield f"{who} moved {moved:,} bytes for {sent:,} of contributions"


def _thin_line_text(evidence: Evidence, line: FaultHistory) -> str:
    island, (began, ended) = line.fault.island, line.unix_span_s
    sends = [s for s in _sends_of(evidence, island) if began <= s.event["unix_s"] <= ended]
    moved, sent = _moved_around(evidence, line)
    return (
        f"{island}: {line.note}, {_versions_within(evidence, line)} versions meanwhile, of its "
        f"contributions {_verdicts_text(sends)}; {moved:,} bytes moved for {sent:,} of them"
    )


def _versions_within(evidence: Evidence, line: FaultHistory) -> int:
    began_s, ended_s = line.span_s
    return sum(began_s <= at_s <= ended_s for at_s, *_ in evidence.history.published)


def _moved_around(evidence: Evidence, line: FaultHistory) -> tuple[int, int]:
    """Bytes up between two notes of them around a fault, and what was sent between these weighs.

    Nothing where no start of the island wrote both.
    """
    began, ended = line.unix_span_s
    for start in starts_of(evidence.events[line.fault.island]).values():
        notes = [event for event in start if event["kind"] == "bytes_moved"]
        first = [note for note in notes if note["unix_s"] <= began][-1:]
        last = [note for note in notes if note["unix_s"] >= ended][:1]
        if first and last:
            sent = sum(
                evidence.contribution_bytes.get(event["fragment_id"], 0)
                for event in start
                if event["kind"] == "fragment_sent" and not event["declined"]
                if first[0]["unix_s"] <= event["unix_s"] <= last[0]["unix_s"]
            )
            return last[0]["bytes_up"] - first[0]["bytes_up"], sent
    return 0, 0


def _blame_problems(evidence: Evidence) -> Iterator[str]:
    """Islands that found themselves unsound, and to which nothing was done."""
    corrupted = {history.fault.island for history in _corrupting(evidence)}
    for island in evidence.events.keys() - corrupted:
        for event in _blaming(evidence, island):
            yield f"{island} after inner step {event['inner_step']}: {event['reason']}"


def _blame_text(evidence: Evidence) -> str:
    corrupted = sorted({history.fault.island for history in _corrupting(evidence)})
    told = (f"{name} returned {len(_blaming(evidence, name))} times" for name in corrupted)
    return ", ".join(told) or "nobody was corrupted, nobody returned"


def _corrupting(evidence: Evidence) -> list[FaultHistory]:
    return _fired(evidence, *SPOILING)


def _blaming(evidence: Evidence, island: str) -> list[Event]:
    events = (event for start in starts_of(evidence.events[island]).values() for event in start)
    return [event for event in events if event["kind"] == "published_taken"]


def _was_away(evidence: Evidence, island: str) -> bool:
    """Whether the run came to its end while an island was starting again that a fault had ended.

    Where nobody waits for anybody the coordinator does not wait for it for ever, and whoever
    started it ends it (`LocalRun`): it has no exit code of its own.
    """
    kills = [history for history in evidence.history.faults if _starts_again(history, island)]
    if not (evidence.is_on_arrival and kills) or evidence.problem:
        return False
    is_back = island_back_s(kills[-1], evidence.events[island]) is not None
    return evidence.exit_codes[island] is None and not is_back


def _starts_again(history: FaultHistory, island: str) -> bool:
    fault = history.fault
    return fault.island == island and history.fired and fault.kind in STARTING_AGAIN


def accounts_of(evidence: Evidence, headers: Headers) -> dict[tuple[str, int], TokenAccount]:
    """Recount every fragment of every island, by their names."""
    return {
        (island, p): account(
            island,
            p,
            events,
            headers,
            local_mix=evidence.local_mix,
            most_steps=evidence.most_steps,
        )
        for island, events in evidence.events.items()
        for p in evidence.newest
    }


# -- words ---------------------------------------------------------------------------------------


def _finding(invariant: str, problems: Sequence[str], evidence: str) -> CheckResult:
    if not problems:
        return CheckResult(invariant, True, evidence)
    shown = "; ".join(problems[:_SHOWN])
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return CheckResult(invariant, False, shown + more)


def _sends(evidence: Evidence) -> Iterator[Send]:
    for island in evidence.events:
        yield from _sends_of(evidence, island)


def _sends_of(evidence: Evidence, island: str) -> Iterator[Send]:
    for start in starts_of(evidence.events[island]).values():
        for p in evidence.newest:
            yield from sends_of(start, p)


def _has_ended(evidence: Evidence, event: Event) -> bool:
    start = starts_of(evidence.events[event["island"]])[event["incarnation"]]
    return any(each["kind"] == "island_ended" for each in start)


def _num(evidence: Evidence, kind: str) -> int:
    return sum(event["kind"] == kind for events in evidence.events.values() for event in events)


def _verdicts_text(sends: Iterable[Send]) -> str:
    verdicts = Counter(send.verdict for send in sends)
    return ", ".join(f"{number} {verdict}" for verdict, number in sorted(verdicts.items()))


def _tokens_text(accounts: Mapping[tuple[str, int], TokenAccount]) -> str:
    whole = {name: sum(getattr(a, name) for a in accounts.values()) for name in _TOKENS}
    return ", ".join(f"{number:,} {name}" for name, number in whole.items())


_TOKENS = ("trained", "included", "dropped", "lost", "left")


def _steps(events: Sequence[Event]) -> Iterator[Event]:
    return (event for event in events if event["kind"] == "inner_step")
