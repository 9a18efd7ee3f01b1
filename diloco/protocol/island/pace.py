"""Decides when an island sends a fragment, and when it merges what was published.

    scheduled    sends at the due steps of the schedule, merges exactly tau steps after a send, and
                 waits there for the outcome
    on arrival   sends at the first step boundary after it learns that an attempt has opened with
                 this island as a member; merges a version at the first step boundary after all
                 ranks of the island have staged it; never waits

On arrival, the leader names the version that all ranks stage, the target. Ranks finish a target
that they have begun, even if a newer version is published meanwhile. The target changes only if a
rank finds that the syncer no longer has it. The next target is then the newest version; versions
between are left out.

All ranks of an island make the same decisions, because they decide from the same votes.

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
    """Answers what the outer loop asks at a step boundary.

    Attributes:
        waits_at_send: Whether the outcome is waited for right after the send.
    """

    waits_at_send: bool

    def is_merge_due(self, ledger: FragmentLedger, inner_step: int) -> bool:
        """Whether the outcome of what is outstanding must be waited for now."""

    def arrived(self, ledger: FragmentLedger, vote: FragmentVote) -> Verdict | None:
        """Return the outcome to settle a fragment with now, without waiting; or None."""

    def due(
        self,
        ledgers: Sequence[FragmentLedger],
        inner_step: int,
        agreed: IslandVote | None,
        *,
        is_over: bool,
    ) -> list[int]:
        """Return the fragments to send now, ascending; asked after all merges.

        Args:
            ledgers: Of all fragments, in plan order.
            inner_step: Completed inner steps.
            agreed: The island's common vote; None: there is none at this step.
            is_over: Whether training has ended, and flushes are made.
        """

    def is_agreeing(self, num_in_flight: int) -> bool:
        """Whether the ranks vote before the next step boundary."""


class ScheduledPace:
    """Sends and merges at the steps of a schedule."""

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
    """Sends as rounds open and merges as versions come, as the island's leader knows of them."""

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
        """See `Pace`; an attempt whose end is known is not sent to again.

        A flush is sent only once every fragment takes one; until then the island trains on.
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
        """See `Pace`: a round may open at any step."""
        return True


def aim(ledger: FragmentLedger, vote: FragmentVote) -> bool:
    """Set the target that the leader names; return whether it has changed."""
    named, held = vote.target, ledger.target
    if named is None or named.version <= max(ledger.version, held.version if held else -1):
        ledger.is_target_gone = held is not None and vote.staged_version == GONE
        return False
    ledger.target, ledger.is_target_gone = named, False
    return True


def arrival_vote(ledger: FragmentLedger, view: FragmentView) -> FragmentVote:
    """Return a rank's vote on a fragment, from its ledger and what its exchange shows.

    Commands that were posted to the exchange may not have been carried out yet. So what it shows of
    versions that are already merged, or of another contribution, is ignored.
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
