"""The members of a run: the lease of each island, drains, kicks and pauses.

A `Member` is one island as its coordinator remembers it, and is replaced, never changed. `Members`
are all of them. Every change is returned as entries and made by applying them; `generation` counts
the changes of who takes part.

    guests            islands that joined without being configured, in the order of their slots
    island/NAME       a `Member`
    generation, paused, timeline

Source: PROTOCOL.md, "Members", "A lease" and "Fencing".
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from diloco.protocol.rounds.terms import Roster
from diloco.protocol.run.admission import Entries
from diloco.protocol.run.leases import TRANSITIONS, Lease, LeaseEvent

#: Starts of one island that are remembered, the newest: an island that starts again and again does
#: not fill the journal. One that joins again after so many later ones counts as another start.
REMEMBERED_STARTS = 256


@dataclass(frozen=True, slots=True)
class MembershipRules:
    """What the configuration says of who may take part.

    Args:
        is_elastic: Whether islands come and go, and no round waits for one (outer.merge
            on_arrival); else the islands are fixed.
        is_open: Whether islands that are not configured may join.
        are_names_shared: Whether all sites must name the same islands.
        min_islands: Islands at work without which no round opens.
        max_islands: Most islands that the run can ever have.
        on_member_lost: What becomes of a run whose islands are fixed when one stays away.
        most_step_tokens: Largest batch that an island may declare; 0: any.
        total_tokens: That end the run, where it is elastic; 0: not known.
        most_lead_steps: Inner steps that an island can be ahead of all others; 0: any.
    """

    is_elastic: bool = False
    is_open: bool = False
    are_names_shared: bool = True
    min_islands: int = 1
    max_islands: int = 1
    on_member_lost: Literal["stop", "wait", "shrink"] = "stop"
    most_step_tokens: int = 0
    total_tokens: int = 0
    most_lead_steps: int = 0


@dataclass(frozen=True, slots=True)
class Member:
    """What is known of one island.

    Args:
        slot: Its island slot.
        incarnations: Incarnation of each of the newest starts, by start id; numbered from 1 as they
            joined.
        timeline: In which the newest start joined, or the lease last changed.
        exit_code: How the newest start ended; None while it is at work.
        is_stopped: Whether it ended in a graceful stop.
        lease: How it stands, in `timeline`.
        is_drained: Whether an operator asked it to leave.
        fenced_below: Least incarnation that counts.
        reason: Why it was kicked, in words.
        first_incarnation: Of the first start that joined in `timeline`.
    """

    slot: int
    incarnations: Mapping[str, int] = field(default_factory=dict)
    timeline: int = 0
    exit_code: int | None = None
    is_stopped: bool = False
    lease: Lease = Lease.ABSENT
    is_drained: bool = False
    fenced_below: int = 0
    reason: str = ""
    first_incarnation: int = 0

    @property
    def incarnation(self) -> int:
        """Incarnation of the newest start; 0 before the first."""
        return max(self.incarnations.values(), default=0)

    @property
    def has_finished(self) -> bool:
        """Whether its newest start ended well, and not because somebody asked it to end."""
        return self.exit_code == 0 and not (self.is_stopped or self.is_drained)

    def lease_in(self, timeline: int) -> Lease:
        """How it stands in a timeline; a resume begins with nobody, kicked or not."""
        return self.lease if self.timeline == timeline else Lease.ABSENT

    def after(self, event: LeaseEvent, timeline: int) -> Member:
        """Return the member after an event, itself where that changes nothing."""
        before = self.lease_in(timeline)
        lease = TRANSITIONS.get((before, event), before)
        if event is LeaseEvent.DRAINED and lease in (Lease.DRAINING, Lease.LEFT):
            return replace(self, lease=lease, is_drained=self.is_drained or before is not lease)
        return self if lease is before else replace(self, lease=lease, timeline=timeline)

    def started(self, start_id: str, incarnation: int, timeline: int) -> Member:
        """Return the member after a new start has joined."""
        lease = self.after(LeaseEvent.JOINED, timeline).lease
        oldest = incarnation - REMEMBERED_STARTS
        starts = {s: n for s, n in self.incarnations.items() if n > oldest}
        return Member(
            self.slot,
            {**starts, start_id: incarnation},
            timeline,
            lease=lease,
            is_drained=lease is Lease.DRAINING,
            fenced_below=self.fenced_below,
            first_incarnation=(
                self.first_incarnation if self.timeline == timeline else incarnation
            ),
        )

    def kicked(self, reason: str, timeline: int) -> Member:
        """Return the member after it was taken out: none of its starts so far counts any more."""
        return replace(
            self.after(LeaseEvent.KICKED, timeline),
            fenced_below=self.incarnation + 1,
            reason=reason,
            timeline=timeline,
        )


def member_entry(island: str, member: Member) -> tuple[str, str]:
    """Write a member as its journal entry; its slot follows from the configuration and the run."""
    saved = asdict(member)
    del saved["slot"]
    return f"island/{island}", json.dumps(saved)


def read_member(slot: int, value: str) -> Member:
    """Read what `member_entry` wrote."""
    saved = json.loads(value)
    return Member(slot, **{**saved, "lease": Lease(saved["lease"])})


class Members(Mapping[str, Member]):
    """The members of one run, by name; configured islands first, in the order of their slots.

    Args:
        configured: Configured island ids, sorted; the index is the island slot.

    Attributes:
        rules: Who may take part; may be replaced at any time.
        timeline: Counter of resumes.
        generation: Counter of changes of who takes part.
        is_paused: Whether no round opens.
        num_changes: Counter of what became of members, of which no durable word is kept.
    """

    def __init__(self, configured: tuple[str, ...]) -> None:
        """Give every configured island its slot."""
        self.configured = configured
        self.rules = MembershipRules()
        self.timeline = 0
        self.generation = 0
        self.is_paused = False
        self.num_changes = 0
        self._was_paused = False
        self._by_lease: dict[tuple[Lease, ...], tuple[str, ...]] = {}  # as it was asked for
        self._by_name = {island: Member(slot) for slot, island in enumerate(configured)}

    def __getitem__(self, island: str) -> Member:
        """Return a member."""
        return self._by_name[island]

    def __iter__(self) -> Iterator[str]:
        """Give the names in the order of their slots."""
        return iter(self._by_name)

    def __len__(self) -> int:
        """Count the members."""
        return len(self._by_name)

    def forked(self) -> Members:
        """Return a copy; what is applied to it changes nothing here."""
        other = copy.copy(self)
        other._by_lease, other._by_name = dict(self._by_lease), dict(self._by_name)
        return other

    def apply(self, entries: Iterable[tuple[str, str]]) -> None:
        """Take over what is durable; entries of others are passed over."""
        entries = list(entries)
        for guest in json.loads(dict(entries).get("guests", "[]")):  # before what is said of them
            self._by_name.setdefault(guest, Member(len(self)))
        num_changes = self.num_changes
        for key, value in entries:
            kind, _, name = key.partition("/")
            match kind:
                case "timeline":
                    self.timeline = json.loads(value)["timeline"]
                    self.num_changes += 1
                case "generation":
                    self.generation = int(value)
                case "paused":
                    self.is_paused, self._was_paused = json.loads(value), True
                case "island" if name in self:
                    self._by_name[name] = read_member(self[name].slot, value)
                    self.num_changes += 1
        if self.num_changes != num_changes:
            self._by_lease.clear()

    def lease_of(self, island: str) -> Lease:
        """How an island stands in this timeline."""
        return self[island].lease_in(self.timeline)

    @property
    def holders(self) -> tuple[str, ...]:
        """Islands that must be heard of within a term, sorted."""
        return self._with_lease(Lease.ACTIVE, Lease.DRAINING)

    @property
    def away(self) -> tuple[str, ...]:
        """Islands whose lease has ended and that have not left, sorted: they may come back."""
        return self._with_lease(Lease.LAPSED)

    @property
    def live(self) -> tuple[str, ...]:
        """Islands that rounds open with, sorted."""
        if self.rules.is_elastic:
            return self._with_lease(Lease.ACTIVE)
        return tuple(sorted(self.counted))

    def roster(self) -> Roster | None:
        """Who may take part in the next rounds; None: all that are configured, as ever."""
        fenced = {i: m.fenced_below for i, m in self.items() if m.fenced_below}
        if not (self.rules.is_elastic or self._was_paused or fenced):
            return None
        least = self.rules.min_islands if self.rules.is_elastic else len(self.live)
        return Roster(self.live, fenced, self.is_paused, least, self.generation)

    def lapsed(self, islands: Iterable[str]) -> Entries:
        """Note that the leases of islands have ended: no round opens with them."""
        return self._after(dict.fromkeys(islands, LeaseEvent.EXPIRED))

    def drained(self, island: str) -> Entries:
        """Ask an island to finish what is outstanding and to leave; none if it does already."""
        return self._after({island: LeaseEvent.DRAINED})

    def given_up(self, islands: Iterable[str]) -> Entries:
        """Count islands as left that are there, and were to leave."""
        return self.all_changed(
            {
                island: self[island]
                .after(LeaseEvent.DRAINED, self.timeline)
                .after(LeaseEvent.EXPIRED, self.timeline)
                for island in islands
            }
        )

    def kicked(self, islands: Iterable[str], reason: str) -> Entries:
        """Take islands out: starts so far are fenced, later ones refused; none if they are out."""
        changed = {
            island: self[island].kicked(reason, self.timeline)
            for island in islands
            if self.lease_of(island) is not Lease.KICKED
        }
        return self.all_changed(changed)

    def readmitted(self, island: str) -> Entries:
        """Let the next start of an island that was taken out join; none if it was not."""
        return self._after({island: LeaseEvent.READMITTED})

    def paused(self, is_paused: bool) -> Entries:
        """Let no round open, or let them open again; none if it is so."""
        if is_paused == self.is_paused:
            return ()
        return (("paused", json.dumps(is_paused)), self._next_generation)

    def _after(self, events: Mapping[str, LeaseEvent]) -> Entries:
        return self.all_changed(
            {i: self[i].after(event, self.timeline) for i, event in events.items()}
        )

    def changed(self, island: str, member: Member) -> Entries:
        """Write a member that is not what it was."""
        return self.all_changed({island: member})

    def all_changed(self, changed: Mapping[str, Member]) -> Entries:
        """Write members that are not what they were; a change of who takes part is counted."""
        new = {i: m for i, m in changed.items() if m != self.get(i)}
        entries = [member_entry(island, member) for island, member in sorted(new.items())]
        if any(self._counts(i) != _counts(m) for i, m in new.items()):
            entries.append(self._next_generation)
        return tuple(entries)

    def _counts(self, island: str) -> object:
        return _counts(self[island]) if island in self else None

    @property
    def _next_generation(self) -> tuple[str, str]:
        return "generation", str(self.generation + 1)

    def _with_lease(self, *leases: Lease) -> tuple[str, ...]:
        if leases not in self._by_lease:
            self._by_lease[leases] = tuple(sorted(i for i in self if self.lease_of(i) in leases))
        return self._by_lease[leases]

    @property
    def guests(self) -> tuple[str, ...]:
        """Islands that joined without being configured, in the order of their slots."""
        return tuple(self)[len(self.configured) :]

    @property
    def counted(self) -> Mapping[str, Member]:
        """Members that were not taken out, and where islands come and go have not left for good."""
        gone = [Lease.KICKED]
        if self.rules.is_elastic:
            gone += [Lease.ABSENT, Lease.LEFT]
        return {i: m for i, m in self.items() if self.lease_of(i) not in gone}

    def kicked_text(self, island: str) -> str:
        """Say why an island is out, and how it comes back."""
        return (
            f"island {island!r} was taken out of the run: {self[island].reason}. Nothing "
            f"of it counts until the operator takes it back, diloco kick HOST:PORT {island} "
            f"--undo; then start it again"
        )


def _counts(member: Member) -> object:
    """What of a member decides who takes part."""
    return member.lease, member.incarnation, member.fenced_below, member.timeline
