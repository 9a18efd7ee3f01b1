"""The evidence that a run under chaos leaves, and queries of it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from diloco.chaos.fault_log import FaultHistory, RunHistory
from diloco.chaos.plan import CORRUPTING, Kind
from diloco.chaos.tokens import Event, Send, sends_of, starts_of
from diloco.protocol.island.ledger import LocalMix

#: Faults after which an island is expected to start once more.
STARTING_AGAIN = frozenset({Kind.KILL, Kind.RESTART})


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
    """The evidence of one run.

    Args:
        history: The fault log.
        events: Island -> what all its ranks wrote, whole lines, in the order of the files.
        headers: Of the audit log and of the store, in any order; equal ones may be there twice.
        newest: Fragment -> its newest record.
        repaired: Fragment and version of what was lost and taken back from islands.
        recomputed: Retained versions.
        stored: Fragment -> its newest record in what another machine makes of the object store;
            None: the run has none.
        exit_codes: Island -> how its last supervisor ended; None: it lived when the run was over.
        problem: Why the run did not come to its end; empty: it did.
        local_mix: What merges keep of local values.
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
    stored: Mapping[int, Newest] | None = None
    local_mix: LocalMix = 0.0
    is_on_arrival: bool = False
    contribution_bytes: Mapping[int, int] = field(default_factory=dict)
    most_steps: int = 0

    def fired(self, *kinds: Kind) -> list[FaultHistory]:
        """Faults of these kinds that took effect."""
        return [f for f in self.history.faults if f.fired and f.fault.kind in kinds]

    @property
    def corrupted(self) -> set[str]:
        """Islands whose training was corrupted."""
        return {fault.fault.island for fault in self.fired(*CORRUPTING)}

    def ends_of(self, island: str) -> list[FaultHistory]:
        """Faults that ended an island, which is expected to start again."""
        return [f for f in self.fired(*STARTING_AGAIN) if f.fault.island == island]

    def returns_of(self, island: str) -> list[Event]:
        """Events of an island that found itself unsound and took what is published."""
        events = (event for start in starts_of(self.events[island]).values() for event in start)
        return [event for event in events if event["kind"] == "published_taken"]

    def sends(self) -> Iterator[Send]:
        """Contributions of all islands."""
        for island in self.events:
            yield from self.sends_of(island)

    def sends_of(self, island: str) -> Iterator[Send]:
        """Contributions of one island, start by start and fragment by fragment."""
        for start in starts_of(self.events[island]).values():
            for p in self.newest:
                yield from sends_of(start, p)

    def count(self, kind: str) -> int:
        """Count the events of a kind."""
        return sum(event["kind"] == kind for events in self.events.values() for event in events)

    def has_ended(self, sent: Event) -> bool:
        """Whether the start of an island that sent a contribution came to its end."""
        start = starts_of(self.events[sent["island"]])[sent["incarnation"]]
        return any(each["kind"] == "island_ended" for each in start)

    def was_away(self, island: str) -> bool:
        """Whether the run ended while an island was starting again that a fault had ended.

        Where islands merge on arrival the coordinator does not wait for it for ever, and
        `LocalRun`, which started it, ends it: it has no exit code of its own.
        """
        kills = self.ends_of(island)
        if not (self.is_on_arrival and kills) or self.problem:
            return False
        is_back = island_back_s(kills[-1], self.events[island]) is not None
        return self.exit_codes[island] is None and not is_back

    def versions_within(self, line: FaultHistory) -> int:
        """Count the versions that were published during a fault."""
        began_s, ended_s = line.span_s
        return sum(began_s <= at_s <= ended_s for at_s, *_ in self.history.published)

    def moved_around(self, line: FaultHistory) -> tuple[int, int]:
        """Bytes up between two records of them around a fault, and bytes of contributions sent.

        Zero where no start of the island wrote both records.
        """
        began, ended = line.unix_span_s
        for start in starts_of(self.events[line.fault.island]).values():
            notes = [event for event in start if event["kind"] == "bytes_moved"]
            first = [note for note in notes if note["unix_s"] <= began][-1:]
            last = [note for note in notes if note["unix_s"] >= ended][:1]
            if first and last:
                sent = sum(
                    self.contribution_bytes.get(event["fragment_id"], 0)
                    for event in start
                    if event["kind"] == "fragment_sent" and not event["declined"]
                    if first[0]["unix_s"] <= event["unix_s"] <= last[0]["unix_s"]
                )
                return last[0]["bytes_up"] - first[0]["bytes_up"], sent
        return 0, 0


def island_back_s(fault: FaultHistory, events: Sequence[Event]) -> float | None:
    """Seconds from an island's kill until its next start has made an inner step; None: never."""
    if fault.began_unix_s is None:
        return None
    began = fault.began_unix_s
    before = max((e["incarnation"] for e in _steps(events) if e["unix_s"] <= began), default=0)
    after = [e["unix_s"] - began for e in _steps(events) if e["incarnation"] > before]
    return min(after, default=None)


def _steps(events: Sequence[Event]) -> Iterator[Event]:
    return (event for event in events if event["kind"] == "inner_step")
