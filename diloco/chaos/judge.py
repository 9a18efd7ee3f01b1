"""Judges what a run under chaos left behind against the rules of a run.

Pure: evidence in, results out. No process is believed about itself: the islands' events, what the
syncer made durable (audit log, newest records) and what was done to them (fault log) are compared.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diloco.chaos.evidence import Evidence
from diloco.chaos.fault_log import FaultHistory
from diloco.chaos.plan import COORDINATOR, ENDING, Kind
from diloco.chaos.tokens import Headers, Send, TokenAccount, account, starts_of

#: Violations shown of one invariant.
_SHOWN = 3
#: Bytes that a thin line may move beyond those of contributions, as a share of them: what was under
#: way when a flipped bit broke its connection is sent again.
_SENT_AGAIN = 0.5
_OUTCOMES = frozenset({"included", "not_included", "refused", "declined", "expired", "unknown"})


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
        _check(
            "a version has one digest everywhere",
            [*clashes, *_digest_problems(evidence, headers)],
            f"{len(headers)} versions, {evidence.count('fragment_merged')} merges, "
            f"{evidence.count('fragment_staged')} versions hashed by who staged them, every "
            f"island's end",
        ),
        _check(
            "every version is published exactly once",
            [*_version_problems(evidence, headers)],
            ", ".join(f"fragment {p}: 0 to {new.version}" for p, new in evidence.newest.items()),
        ),
        _check(
            "what is published is in the object store",
            [*_stored_problems(evidence)],
            "no object store"
            if evidence.stored is None
            else f"another machine makes {len(evidence.stored)} fragments of it",
        ),
        _check(
            "an object store that takes nothing is said in the status",
            [f"{f.fault.text}: {f.note}" for f in evidence.history.faults if not f.is_told],
            "; ".join(
                f"{f.fault.kind} {f.note}"
                for f in evidence.history.faults
                if f.fired and (f.fault.takes_nothing or f.fault.kind is Kind.LOSE_OBJECT)
            )
            or "nothing of that",
        ),
        _check(
            "every contribution has exactly one outcome",
            [*_outcome_problems(evidence, headers)],
            _verdicts_text(evidence.sends()),
        ),
        _check(
            "every token is accounted for",
            [problem for each in accounts.values() for problem in each.problems],
            _tokens_text(accounts),
        ),
        _check(
            "no island ends unasked",
            [*_exit_problems(evidence)],
            ", ".join(
                f"{island} {len(starts_of(events))} starts"
                f"{', away at the end' if evidence.was_away(island) else ''}"
                for island, events in evidence.events.items()
            ),
        ),
        _check(
            "strangers end no process",
            [*_storm_problems(evidence)],
            f"{len(evidence.fired(Kind.CONNECT_STORM))} storms of connections",
        ),
        _check(
            "a thin line costs time alone",
            [*_thin_line_problems(evidence)],
            "; ".join(_thin_line_text(evidence, line) for line in evidence.fired(Kind.THIN_LINE))
            or "no thin lines",
        ),
        _check(
            "nobody is blamed for what he did not do",
            [*_blame_problems(evidence)],
            _blame_text(evidence),
        ),
        _check(
            "retained versions are recomputed to the bit",
            [
                f"fragment {each.fragment_id} version {each.version}: {each.problem}"
                for each in evidence.recomputed
                if each.problem
            ],
            f"{len(evidence.recomputed)} versions",
        ),
    )


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
    corrupted = {fault.fault.island for fault in evidence.fired(Kind.CORRUPT)}
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
    torn = evidence.fired(Kind.TORN_NEWEST)
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


def _stored_problems(evidence: Evidence) -> Iterator[str]:
    for p, newest in evidence.newest.items():
        if evidence.stored is not None and (there := evidence.stored.get(p)) != newest:
            what = "none" if there is None else f"{there.version} as {there.digest[:16]}"
            yield (
                f"fragment {p}: version {newest.version} was published as {newest.digest[:16]}, "
                f"in the object store the newest is {what}"
            )


def _outcome_problems(evidence: Evidence, headers: Headers) -> Iterator[str]:
    claimed: Counter[tuple[int, int, str]] = Counter()
    for (p, version), counting in headers.items():
        for contributor in counting["contributors"]:
            claimed[p, version, contributor["island"]] += 1
    for (p, version, island), times in claimed.items():
        if times > 1:
            yield f"fragment {p} version {version} counts {island} {times} times"
    for send in evidence.sends():
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
            if evidence.has_ended(event):
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
        if code != 0 and not evidence.was_away(island):
            yield f"{island} ended with exit code {code}"
        killed = evidence.ends_of(island)
        num_starts = len(starts_of(evidence.events[island]))
        # A corrupted one may have given up on itself.
        if num_starts > 1 + len(killed) and island not in evidence.corrupted:
            yield f"{island} started {num_starts} times, and was ended {len(killed)} times"


def _storm_problems(evidence: Evidence) -> Iterator[str]:
    for storm in evidence.fired(Kind.CONNECT_STORM):
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
    for line in evidence.fired(Kind.THIN_LINE):
        island, (began, ended) = line.fault.island, line.unix_span_s
        who, events = f"{island} on its thin line", evidence.events[island]
        within = [e for e in events if "incarnation" in e and began <= e["unix_s"] <= ended]
        is_met = any(line.meets(other) for other in evidence.history.faults)
        if len({event["incarnation"] for event in within}) > 1 and not is_met:
            yield f"{who} ended and started again"
        if any(event["kind"] == "round_expired" for event in within) and not is_met:
            yield f"{who} was waited for until a round expired"
        if not (evidence.versions_within(line) or is_met):
            yield f"{who} kept the run from every version for {ended - began:.1f} s"
        after = [s.verdict for s in evidence.sends_of(island) if s.event["unix_s"] > ended]
        if after and "included" not in after:
            yield f"{who}: none of its {len(after)} contributions afterwards was included"
        moved, sent = evidence.moved_around(line)
        if moved > (1 + _SENT_AGAIN) * sent + sum(evidence.contribution_bytes.values()):
            yield f"{who} moved {moved:,} bytes for {sent:,} of contributions"


def _thin_line_text(evidence: Evidence, line: FaultHistory) -> str:
    island, (began, ended) = line.fault.island, line.unix_span_s
    sends = [s for s in evidence.sends_of(island) if began <= s.event["unix_s"] <= ended]
    moved, sent = evidence.moved_around(line)
    return (
        f"{island}: {line.note}, {evidence.versions_within(line)} versions meanwhile, of its "
        f"contributions {_verdicts_text(sends)}; {moved:,} bytes moved for {sent:,} of them"
    )


def _blame_problems(evidence: Evidence) -> Iterator[str]:
    """Islands that found themselves unsound, and to which nothing was done."""
    for island in evidence.events.keys() - evidence.corrupted:
        for event in evidence.returns_of(island):
            yield f"{island} after inner step {event['inner_step']}: {event['reason']}"


def _blame_text(evidence: Evidence) -> str:
    returns = {name: len(evidence.returns_of(name)) for name in sorted(evidence.corrupted)}
    told = (f"{name} returned {number} times" for name, number in returns.items())
    return ", ".join(told) or "nobody was corrupted, nobody returned"


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


def _check(invariant: str, problems: Sequence[str], evidence: str) -> CheckResult:
    if not problems:
        return CheckResult(invariant, True, evidence)
    shown = "; ".join(problems[:_SHOWN])
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return CheckResult(invariant, False, shown + more)


def _verdicts_text(sends: Iterable[Send]) -> str:
    verdicts = Counter(send.verdict for send in sends)
    return ", ".join(f"{number} {verdict}" for verdict, number in sorted(verdicts.items()))


def _tokens_text(accounts: Mapping[tuple[str, int], TokenAccount]) -> str:
    whole = {name: sum(getattr(a, name) for a in accounts.values()) for name in _TOKENS}
    return ", ".join(f"{number:,} {name}" for name, number in whole.items())


_TOKENS = ("trained", "included", "dropped", "lost", "left")
