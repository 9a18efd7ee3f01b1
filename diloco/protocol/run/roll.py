"""Who rounds open with: the members of a run, how each stands, and what an operator does to them.

The part of `Membership` that knows of leases, drains, kicks and pauses. Every change comes back as
entries and is made by applying them; `generation` counts the changes of who takes part.

Source: PROTOCOL.md, "Members", "A lease" and "Fencing".
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from diloco.protocol.run.admission import Entries
from diloco.protocol.run.leases import Lease, LeaseEvent
from diloco.protocol.run.members import Member, MembershipRules, Roster, member_entry


class Roll:
    """Members of one run; whoever inherits it has the fields, and applies the entries."""

    islands: tuple[str, ...]
    rules: MembershipRules
    members: dict[str, Member]
    timeline: int
    generation: int
    is_paused: bool
    _was_paused: bool

    def lease_of(self, island: str) -> Lease:
        """How an island stands in this timeline."""
        return self.members[island].lease_in(self.timeline)

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
        fenced = {i: m.fenced_below for i, m in self.members.items() if m.fenced_below}
        if not (self.rules.is_elastic or self._was_paused or fenced):
            return None
        least = self.rules.min_islands if self.rules.is_elastic else len(self.live)
        return Roster(self.generation, self.live, fenced, self.is_paused, least)

    def lapsed(self, islands: Iterable[str]) -> Entries:
        """Note that the leases of islands have ended: no round opens with them."""
        return self._after(dict.fromkeys(islands, LeaseEvent.EXPIRED))

    def drained(self, island: str) -> Entries:
        """Ask an island to finish what is outstanding and to leave; none if it does already."""
        return self._after({island: LeaseEvent.DRAINED})

    def given_up(self, islands: Iterable[str]) -> Entries:
        """Count islands as left that are there, and were to leave."""
        return self._all_changed(
            {
                island: self.members[island]
                .after(LeaseEvent.DRAINED, self.timeline)
                .after(LeaseEvent.EXPIRED, self.timeline)
                for island in islands
            }
        )

    def kicked(self, islands: Iterable[str], reason: str) -> Entries:
        """Take islands out: starts so far are fenced, later ones refused; none if they are out."""
        changed = {
            island: self.members[island].kicked(reason, self.timeline)
            for island in islands
            if self.lease_of(island) is not Lease.KICKED
        }
        return self._all_changed(changed)

    def readmitted(self, island: str) -> Entries:
        """Let the next start of an island that was taken out join; none if it was not."""
        return self._after({island: LeaseEvent.READMITTED})

    def paused(self, is_paused: bool) -> Entries:
        """Let no round open, or let them open again; none if it is so."""
        if is_paused == self.is_paused:
            return ()
        return (("paused", json.dumps(is_paused)), self._next_generation)

    def _after(self, events: Mapping[str, LeaseEvent]) -> Entries:
        return self._all_changed(
            {i: self.members[i].after(event, self.timeline) for i, event in events.items()}
        )

    def changed(self, island: str, member: Member) -> Entries:
        """Write a member that is not what it was."""
        return self._all_changed({island: member})

    def _all_changed(self, changed: Mapping[str, Member]) -> Entries:
        """Write members that are not what they were; a change of who takes part is counted."""
        new = {i: m for i, m in changed.items() if m != self.members.get(i)}
        entries = [member_entry(island, member) for island, member in sorted(new.items())]
        if any(self._counts(i) != _counts(m) for i, m in new.items()):
            entries.append(self._next_generation)
        return tuple(entries)

    def _counts(self, island: str) -> object:
        return _counts(self.members[island]) if island in self.members else None

    @property
    def _next_generation(self) -> tuple[str, str]:
        return "generation", str(self.generation + 1)

    def _with_lease(self, *leases: Lease) -> tuple[str, ...]:
        return tuple(sorted(i for i in self.members if self.lease_of(i) in leases))

    @property
    def guests(self) -> tuple[str, ...]:
        """Islands that joined without being configured, in the order of their slots."""
        return tuple(self.members)[len(self.islands) :]

    @property
    def counted(self) -> Mapping[str, Member]:
        """Members that were not taken out, and where islands come and go have not left for good."""
        gone = [Lease.KICKED]
        if self.rules.is_elastic:
            gone += [Lease.ABSENT, Lease.LEFT]
        return {i: m for i, m in self.members.items() if self.lease_of(i) not in gone}

    def kicked_text(self, island: str) -> str:
        """Say why an island is out, and how it comes back."""
        return (
            f"island {island!r} was taken out of the run: {self.members[island].reason}. Nothing "
            f"of it counts until the operator takes it back, diloco kick HOST:PORT {island} "
            f"--undo; then start it again"
        )


def _counts(member: Member) -> object:
    """What of a member decides who takes part."""
    return member.lease, member.incarnation, member.fenced_below, member.timeline
