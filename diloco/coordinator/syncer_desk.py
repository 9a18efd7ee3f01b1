"""What a syncer tells its coordinator, and hears: an index of rounds, and who takes part.

Nothing here decides a round.

Source: protocol.md sections 4 and 8.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable

from google.protobuf.message import Message

from diloco.coordinator.admission import Entries
from diloco.coordinator.board import Board
from diloco.coordinator.journal import Told
from diloco.coordinator.membership import Membership
from diloco.coordinator.tape import told_expiry, told_repair
from diloco.peer_texts import MOST_ENDING, MOST_TEXT, bounded_text
from diloco.refusals import Cause
from diloco.rounds.terms import RoundKey
from protos.control_pb2 import (
    Expiry,
    FragmentStatus,
    Grant,
    RefusalCount,
    Roster,
    RoundReport,
    RoundReportReply,
    SyncerHelloReply,
    SyncerHelloRequest,
)
from transport.contracts import Handlers, IncomingCall, Reply
from transport.errors import FrameError

logger = logging.getLogger(__name__)

#: Timeline, fragment, version and header of a durable record.
RoundRow = tuple[int, int, int, str]


class SyncerDesk:
    """Answers the syncers of one run."""

    def __init__(
        self,
        membership: Membership,
        board: Board,
        *,
        insist: Callable[[Grant], None],
        index: Callable[[RoundRow], None],
        tell: Callable[[Told], None],
        keep: Callable[[Entries], None],
        on_lost: Callable[[str, int], None],
    ) -> None:
        """Assign only.

        Args:
            membership: Of the run.
            board: Shows what is told.
            insist: Refuses whoever is not a syncer of this run and timeline.
            index: Makes it durable that there is a record.
            tell: Puts on the tape what happened between records.
            keep: Makes what was decided durable, then true.
            on_lost: Hears why rounds cannot go on, and the exit code.
        """
        self._membership = membership
        self._board = board
        self._insist = insist
        self._index = index
        self._tell = tell
        self._keep = keep
        self._pinned: tuple[int, set[int]] = 0, set()
        self._on_lost = on_lost

    @property
    def handlers(self) -> Handlers:
        """Method name -> handler."""
        return {"control.syncer_hello": self._hello, "control.round_report": self._report}

    async def _hello(self, call: IncomingCall) -> Reply:
        request = SyncerHelloRequest.FromString(call.header)
        self._insist(request.grant)
        if len(request.address) > MOST_TEXT:
            raise FrameError(
                f"an address of {len(request.address)} characters; {MOST_TEXT} are allowed"
            )
        if request.address:
            self._board.syncer_address = request.address
            self._board.syncer_epoch = request.syncer_epoch
        return _reply(
            SyncerHelloReply(
                plan_json=self._membership.plan_json,
                islands=self._membership.members,
                fragment_ids=fragment_ids(self._membership),
                num_indexed=map(self._board.num_indexed, fragment_ids(self._membership)),
            )
        )

    async def _report(self, call: IncomingCall) -> Reply:
        report = RoundReport.FromString(call.header)
        self._insist(report.grant)
        membership, known = self._membership, set(fragment_ids(self._membership))
        named = [f.fragment_id for f in report.fragments]
        named += [report.expiry.fragment_id] if report.HasField("expiry") else []
        if strangers := [fragment_id for fragment_id in named if fragment_id not in known]:
            raise FrameError(f"a report of fragment {strangers[0]}; the plan has {len(known)}")
        self._board.syncer_epoch = report.syncer_epoch
        self._board.syncer_refusals = _counted(report.refusals, membership.members)
        for fragment in report.fragments:
            self._board.fragment_stands(self._bounded(fragment))
            is_damaged = bool(fragment.damage)
            self._keep(membership.repairs.stands(fragment.fragment_id, is_damaged=is_damaged))
        if report.record_json:
            self._index((*_indexed(report.record_json), report.record_json))
            if (told := told_repair(report.record_json)) is not None:
                self._tell(told)
        if report.HasField("expiry"):
            self._tell(self._expired(report.expiry))
        self._note_pins(report)
        if report.fatal_reason:
            self._on_lost(bounded_text(report.fatal_reason, MOST_ENDING), report.fatal_exit_code)
        reply = RoundReportReply(
            checkpoint_steps=membership.checkpoints, policy_revision=membership.policy_revision
        )
        cut = membership.cuts.open(membership.timeline)
        if cut is not None and cut.is_taken:
            reply.cut = cut.number
            reply.cut_versions.extend(cut.versions)
        for p, island in sorted(membership.repairs.asked.items()):
            reply.repairs.add(fragment_id=p, island=island, record_json=self._board.newest(p))
        if membership.settings:
            reply.policy_json = json.dumps(membership.policy)
        if (roster := membership.roster()) is not None:
            reply.roster.CopyFrom(
                Roster(
                    generation=roster.generation,
                    live=roster.live,
                    fenced=roster.fenced,
                    is_paused=roster.is_paused or self._board.is_halting,
                    min_islands=roster.min_islands,
                )
            )
        return _reply(reply)

    def _expired(self, expiry: Expiry) -> Told:
        """Say of an attempt what can be true of it."""
        key = RoundKey(
            self._membership.timeline, expiry.fragment_id, expiry.version, expiry.attempt
        )
        missing = sorted(set(expiry.missing).intersection(self._membership.members))
        return told_expiry(key, missing, bounded_text(expiry.reason))

    def _note_pins(self, report: RoundReport) -> None:
        """Take note of the fragments whose versions are kept for a cut; with all it is complete."""
        membership = self._membership
        cut = membership.cuts.open(membership.timeline)
        if cut is None or not cut.is_taken or report.pinned_cut != cut.number:
            return
        number, pinned = self._pinned
        pinned = pinned if number == cut.number else set()
        pinned.update(fragment.fragment_id for fragment in report.fragments)
        self._pinned = cut.number, pinned
        if pinned.issuperset(fragment_ids(membership)):
            self._keep(membership.cut_kept(cut.number))
            logger.info("cut %d is complete, islands=%s", cut.number, ", ".join(cut.parts))

    def _bounded(self, fragment: FragmentStatus) -> FragmentStatus:
        """Cut what a report says of a fragment to what can be true of it."""
        return FragmentStatus(
            fragment_id=fragment.fragment_id,
            version=fragment.version,
            attempt=fragment.attempt,
            digest=bounded_text(fragment.digest),
            contributors=sorted(set(fragment.contributors).intersection(self._membership.members)),
            age_s=fragment.age_s,
            phase=bounded_text(fragment.phase),
            merged_tokens=fragment.merged_tokens,
            damage=bounded_text(fragment.damage),
        )


def fragment_ids(membership: Membership) -> list[int]:
    """Fragments of the run's plan; none before the first join."""
    if not membership.plan_json:
        return []
    return list(range(len(json.loads(membership.plan_json)["fragments"])))


def _reply(message: Message) -> Reply:
    return Reply(message.SerializeToString())


def _counted(reported: Iterable[RefusalCount], islands: Collection[str]) -> list[RefusalCount]:
    """Return what a syncer has refused, by the islands and causes that there are."""
    causes = set(map(str, Cause))
    counts: Counter[tuple[str, str]] = Counter()
    for each in reported:
        if each.cause in causes and (not each.island or each.island in islands):
            counts[each.island, each.cause] = each.count
    return [
        RefusalCount(service="syncer", island=island, cause=cause, count=count)
        for (island, cause), count in sorted(counts.items())
    ]


def _indexed(record_json: str) -> tuple[int, int, int]:
    """Return timeline, fragment and version of a record's header.

    Raises:
        FrameError: If it is no header.
    """
    try:
        header = json.loads(record_json)
        key = header["timeline"], header["fragment_id"], header["version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FrameError(f"a report's record is no header: {type(error).__name__}") from error
    if not all(type(number) is int and 0 <= number < 2**63 for number in key):
        raise FrameError(f"a report's record is of round {key}")
    return key
