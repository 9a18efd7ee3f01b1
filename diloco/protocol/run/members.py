"""One island of a run as its coordinator remembers it, and what may happen to it.

Pure: a member is replaced, never changed; `member_entry` is how it is remembered.

Source: PROTOCOL.md, "A lease" and "Fencing".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

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
    """

    is_elastic: bool = False
    is_open: bool = False
    are_names_shared: bool = True
    min_islands: int = 1
    max_islands: int = 1
    on_member_lost: Literal["stop", "wait", "shrink"] = "stop"
    most_step_tokens: int = 0
    total_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Roster:
    """Who may take part in the next rounds, for the syncers.

    Args:
        generation: Counter of changes; information, not a fence.
        live: Islands that rounds open with, sorted: those that hold a lease, or where the islands
            are fixed all that were not taken out, be they there or not.
        fenced: Island -> least incarnation that counts, where a kick has raised it.
        is_paused: Whether no round opens until an operator says so.
        min_islands: Islands without which none opens.
    """

    generation: int
    live: tuple[str, ...]
    fenced: Mapping[str, int]
    is_paused: bool
    min_islands: int


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
