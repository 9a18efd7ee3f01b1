"""When an island sends and merges. Pure: integers in, decisions out; equal on all its ranks.

    scheduled    sends at due steps known beforehand, merges exactly tau steps after a send, and
                 waits for the outcome there
    on arrival   sends at the first step boundary after it learns that an attempt has opened with
                 it as a member; merges a version at the first one after all its ranks have it
                 staged; never waits

On arrival, the leader names the version that all ranks stage. It is never lowered, and raised only
when one of them finds that the syncer has it no more: whatever is published meanwhile, what was
begun is brought to its end, and the next target leaps to the newest version.

Source: PROTOCOL.md, "Scheduled runs" and "Runs on arrival".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from diloco.outer.schedule import Schedule
from diloco.protocol.island.ledger import FragmentLedger, Verdict
from diloco.protocol.island.votes import (
    GONE,
    NOTHING_STAGED,
    FragmentView,
    FragmentVote,
    IslandVote,
)


class Pace(Protocol):
    """What an outer loop asks at a step boundary.

    Attributes:
        waits: Whether it waits for outcomes at all, at the merge or right after the send.
    """

    waits: bool
    waits_at_send: bool

    def is_merge_due(self, ledger: FragmentLedger, inner_step: int) -> bool:
        """Whether what is outstanding must be settled now, however long that takes."""

    def arrived(self, ledger: FragmentLedger, vote: FragmentVote) -> Verdict | None:
        """Say how to settle a fragment now, without waiting; None: there is nothing to settle."""

    def due(
        self,
        ledgers: Sequence[FragmentLedger],
        inner_step: int,
        agreed: IslandVote | None,
        *,
        is_over: bool,
    ) -> list[int]:
        """Name the fragments to send now, ascending, after all merges.

        Args:
            ledgers: Of all fragments, in plan order.
            inner_step: Completed inner steps.
            agreed: The island's common word; None: there is none at this step.
            is_over: Whether training has ended, and flushes are made.
        """

    def is_agreeing(self, num_in_flight: int) -> bool:
        """Whether the ranks share their word until the next step boundary."""


class ScheduledPace:
    """Due steps and merge steps of a schedule."""

    waits = True

    def __init__(self, schedule: Schedule) -> None:
        """Assign only."""
        self._schedule = schedule
        self.waits_at_send = schedule.overlap_steps == 0

    def is_merge_due(self, ledger: FragmentLedger, inner_step: int) -> bool:
        """See `Pace`."""
        sent = ledger.outstanding
        return sent is not None and self._schedule.merge_step(sent.sent_at_inner_step) <= inner_step

    def arrived(self, ledger: FragmentLedger, vote: FragmentVote) -> Verdict | None:
        """See `Pace`: nothing is merged before its step."""
        return None

    def due(
        self,
        ledgers: Sequence[FragmentLedger],
        inner_step: int,
        agreed: IslandVote | None,
        *,
        is_over: bool,
    ) -> list[int]:
        """See `Pace`."""
        return [p for p in self._schedule.due(inner_step) if ledgers[p].is_sending(inner_step)]

    def is_agreeing(self, num_in_flight: int) -> bool:
        """See `Pace`: with nothing outstanding there is no collective at all."""
        return num_in_flight > 0


class ArrivalPace:
    """Openings and publications, as the island's leader hears of them."""

    waits = False
    waits_at_send = False

    def is_merge_due(self, ledger: FragmentLedger, inner_step: int) -> bool:
        """See `Pace`: nothing is waited for."""
        return False

    def arrived(self, ledger: FragmentLedger, vote: FragmentVote) -> Verdict | None:
        """See `Pace`."""
        sent, target = ledger.outstanding, ledger.target
        verdict = vote.verdict
        if sent is not None and (verdict is None or verdict.has_expired):
            return verdict
        if target is None or vote.staged_version != target.version:
            return None
        return Verdict.ABSENT if sent is None else verdict

    def due(
        self,
        ledgers: Sequence[FragmentLedger],
        inner_step: int,
        agreed: IslandVote | None,
        *,
        is_over: bool,
    ) -> list[int]:
        """See `Pace`; an attempt whose end was heard of before its successor is not served again.

        A flush is sent only once every fragment takes one: until then its island trains on.
        """
        if agreed is None:
            return []
        return [
            ledger.fragment_id
            for ledger, vote in zip(ledgers, agreed.votes, strict=True)
            if ledger.outstanding is None
            and not ledger.is_flushed
            and vote.open_version == ledger.version
            and vote.attempt >= ledger.attempt
            and (is_over or not vote.is_ending)
        ]

    def is_agreeing(self, num_in_flight: int) -> bool:
        """See `Pace`: an opening may be heard of at any step."""
        return True


def aim(ledger: FragmentLedger, vote: FragmentVote) -> bool:
    """Take the target that the leader names; whether it is another than before."""
    named, held = vote.target, ledger.target
    if named is None or named.version <= max(ledger.version, held.version if held else -1):
        ledger.is_target_gone = held is not None and vote.staged_version == GONE
        return False
    ledger.target, ledger.is_target_gone = named, False
    return True


def arrival_vote(ledger: FragmentLedger, view: FragmentView) -> FragmentVote:
    """Give a rank's word on a fragment, from what it holds and what its exchange shows.

    Posted commands may not have been carried out yet: what the exchange shows of versions that are
    merged, or of another contribution, counts nothing.
    """
    sent, held = ledger.outstanding, ledger.target
    is_current = sent is not None and view.key == sent.key
    staged = view.staged_version if view.staged_version > ledger.version else NOTHING_STAGED
    target = held
    if held is None and view.staging is not None and view.staging.target.version > ledger.version:
        target = view.staging.target
    elif held is not None and view.gone_version >= held.version:
        staged = GONE
    if held is not None and ledger.is_target_gone and view.newest.version > held.version:
        target = view.newest
    is_open = sent is None and view.is_open
    return FragmentVote(
        staged,
        view.verdict if is_current else None,
        view.attempt,
        target,
        view.version if is_open else -1,
        view.is_ending,
    )
