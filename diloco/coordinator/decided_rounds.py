"""Runs the rounds of an all-reduce: one state machine a fragment, durable in the journal.

A version exists if and only if its entry is in the journal; that, and every expiry, is written
before anybody hears of it.

Source: PROTOCOL.md, "Decider".
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from diloco.bounded_text import MOST_NAMES
from diloco.coordinator.journal import Journal
from diloco.coordinator.round_journal import JournalUnwritable, RoundJournal, SavedRound
from diloco.loop_clock import loop_now
from diloco.outer.fragments import Plan
from diloco.protocol.rounds.allreduce import (
    AllReduceRounds,
    Assigned,
    Commit,
    DeciderInstruction,
    commit_record,
)
from diloco.protocol.rounds.terms import Lost, RecordExpiry, RoundRules, Weights
from diloco.protocol.run.membership import Membership
from diloco.protos.control_pb2 import FragmentStatus

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeciderRules:
    """The rules of a decider.

    Args:
        round_deadline_s: Seconds from the first contribution to the close, and from the close to
            the commit.
        downlink_codec: Of published versions; a flush is published in float32.
        retained_versions: Past rounds whose outcomes are remembered.
        weights: What a contribution may count.
    """

    round_deadline_s: float
    downlink_codec: str
    retained_versions: int
    weights: Weights = field(default_factory=Weights)


@dataclass(slots=True)
class DecidedFragment:
    """A fragment's machine, and what is durable of it; None before it is founded.

    `empty_handed` are the starts of islands that a resumed run cannot go on from. What was
    published before this process began counts as published then (`published_at`, of the loop).
    """

    rounds: AllReduceRounds
    published_at: float
    saved: SavedRound | None = None
    empty_handed: dict[str, int] = field(default_factory=dict)


class DecidedRounds:
    """The rounds of one timeline.

    Attributes:
        fragments: How every fragment stands; none before the plan is known.
        failure: Why the journal could not be written; None: it could.
    """

    def __init__(
        self,
        membership: Membership,
        journal: Journal,
        rules: DeciderRules,
        *,
        on_status: Callable[[FragmentStatus], None],
        on_lost: Callable[[Lost], None],
        on_change: Callable[[], None],
    ) -> None:
        """Assign only.

        Args:
            membership: Of the run.
            journal: Its durable memory.
            rules: Of the rounds.
            on_status: Hears how a fragment stands after every change.
            on_lost: Hears why rounds cannot go on.
            on_change: Called after every change.
        """
        self._membership = membership
        self._journal = RoundJournal(journal, membership.timeline)
        self._rules = rules
        self._on_status = on_status
        self._on_lost = on_lost
        self._on_change = on_change
        self.fragments: dict[int, DecidedFragment] = {}
        self.failure: JournalUnwritable | None = None
        self._failed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    async def watch(self) -> None:
        """Never return.

        Raises:
            JournalUnwritable: Once the journal could not be written. The machines are ahead of it
                then: the process must end, and its next start go on from what is durable.
        """
        await self._failed.wait()
        assert self.failure is not None
        raise self.failure

    def stop(self) -> None:
        """Let no more time pass."""
        if self._timer is not None:
            self._timer.cancel()

    def granted(self, island: str, incarnation: int) -> None:
        """Begin, if the plan is known; a new start of an island fences its earlier ones."""
        self._begin()
        for fragment in self.fragments.values():
            instructions = fragment.rounds.granted(island, incarnation, loop_now())
            if instructions:
                self.perform(fragment, instructions)

    def _begin(self) -> None:
        """Take the fragments from the plan, and what is durable of them from the journal."""
        if self.fragments or not self._membership.plan_json:
            return
        membership, now = self._membership, loop_now()
        for planned in Plan.from_json(membership.plan_json).fragments:
            p = planned.fragment_id
            rounds = AllReduceRounds(
                p,
                membership.timeline,
                RoundRules(
                    members=membership.members.configured,
                    num_lanes=len(planned.lanes),
                    deadline_s=self._rules.round_deadline_s,
                    weights=self._rules.weights,
                ),
            )
            fragment = self.fragments[p] = DecidedFragment(rounds, published_at=now)
            for island, member in membership.members.items():
                if member.incarnation and member.timeline == membership.timeline:
                    rounds.granted(island, member.incarnation, now)
            saved = fragment.saved = self._journal.saved(p)
            if saved is None:
                continue
            instructions: list[DeciderInstruction] = list(
                rounds.rounds.founded(
                    saved.record["version"],
                    saved.attempt,
                    self._journal.past(p, self._rules.retained_versions + 1),
                    now,
                    expired_in_a_row=saved.expired_in_a_row,
                    broken_in_a_row=saved.broken_in_a_row,
                    missing=saved.missing,
                    reason=saved.reason,
                )
            )
            self.perform(fragment, instructions)

    def has_committed(self, record: Mapping[str, Any]) -> bool:
        """Whether this very record is that of a version, of whichever timeline."""
        return self._journal.has_committed(record)

    def found(
        self, fragment: DecidedFragment, record: Mapping[str, Any], state_digest: bytes
    ) -> None:
        """Go on from a version that an island holds; it is durable first."""
        self._write(fragment, SavedRound(record, state_digest))
        founded = fragment.rounds.rounds.founded(record["version"], 0, {}, loop_now())
        self.perform(fragment, list(founded))

    def perform(
        self, fragment: DecidedFragment, instructions: Iterable[DeciderInstruction]
    ) -> None:
        """Carry out what a machine decided, in order; then set the alarm and tell the news."""
        rounds = fragment.rounds
        for instruction in instructions:
            match instruction:
                case Assigned(assignment):
                    logger.debug("assigned, key=%s", assignment.key)
                case Commit(assignment, prepared):
                    codec = "float32" if assignment.is_flush else self._rules.downlink_codec
                    record = commit_record(assignment, prepared, codec)
                    self._write(fragment, SavedRound(record, prepared.state_digest))
                    follow = rounds.committed(assignment.key, loop_now())
                    oldest = rounds.rounds.version - self._rules.retained_versions
                    rounds.rounds.past.forget_before(oldest)
                    self.perform(fragment, follow)
                case RecordExpiry(key, reason, missing, broken_in_a_row):
                    logger.warning("round expired, key=%s: %s", key, reason)
                    assert fragment.saved is not None
                    expired = replace(
                        fragment.saved,
                        attempt=key.attempt + 1,
                        expired_in_a_row=fragment.saved.expired_in_a_row + 1,
                        broken_in_a_row=broken_in_a_row,
                        missing=missing,
                        reason=reason,
                    )
                    self._write(fragment, expired)
                    self.perform(fragment, rounds.expiry_recorded(key, loop_now()))
                case Lost():
                    self._on_lost(instruction)
        self._on_status(self._status(fragment))
        self._on_change()
        self._set_alarm()

    def _write(self, fragment: DecidedFragment, saved: SavedRound) -> None:
        """Make the newest version, and the next attempt at the one after it, durable."""
        try:
            self._journal.write(saved)
        except JournalUnwritable as error:
            self.failure = error
            self._failed.set()
            self.stop()
            raise
        if fragment.saved is None or saved.record is not fragment.saved.record:
            fragment.published_at = loop_now()
        fragment.saved = saved

    def _status(self, fragment: DecidedFragment) -> FragmentStatus:
        rounds, record = fragment.rounds.rounds, fragment.saved and fragment.saved.record
        contributors = [c["island"] for c in record["contributors"]] if record else []
        return FragmentStatus(
            fragment_id=rounds.fragment_id,
            version=rounds.version,
            attempt=rounds.attempt,
            digest=record["digest"] if record else "",
            contributors=contributors[:MOST_NAMES],
            num_contributors=len(contributors),
            age_s=loop_now() - fragment.published_at,
            phase=fragment.rounds.phase,
        )

    def _set_alarm(self) -> None:
        self.stop()
        wake = min(fragment.rounds.next_wake for fragment in self.fragments.values())
        if wake < float("inf"):
            self._timer = asyncio.get_running_loop().call_at(wake, self._tick)

    def _tick(self) -> None:
        with contextlib.suppress(JournalUnwritable):  # the watch tells
            for fragment in self.fragments.values():
                if fragment.rounds.next_wake <= loop_now():
                    self.perform(fragment, fragment.rounds.tick(loop_now()))
            self._set_alarm()
