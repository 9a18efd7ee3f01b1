"""Serves the syncers of a run: takes reports of rounds, and answers who takes part.

Nothing here decides a round.

Source: PROTOCOL.md, "Authority" and "Coordinator away".
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping

from diloco.bounded_text import MOST_ENDING, MOST_TEXT, bounded_text
from diloco.coordinator.audit_log import expiry_entry, repair_entry
from diloco.coordinator.changes import Changes
from diloco.coordinator.journal import AuditEntry
from diloco.coordinator.run_status import RunStatus
from diloco.protocol.rounds.terms import RoundKey
from diloco.protocol.run.assignment import Move
from diloco.protocol.run.membership import Decide, Membership
from diloco.protocol.run.plan_bytes import packed
from diloco.protocol.run.repairs import LostVersion
from diloco.protos.control_pb2 import (
    Expiry,
    FragmentSource,
    FragmentStatus,
    Grant,
    RefusalCount,
    Repair,
    Roster,
    RoundReport,
    RoundReportReply,
    StateTransfer,
    SyncerHelloReply,
    SyncerHelloRequest,
)
from diloco.refusals import Cause
from diloco.transport.contracts import Handlers, IncomingCall, Reply
from diloco.transport.errors import FrameError
from diloco.transport.framing import MAX_HEADER_BYTES

logger = logging.getLogger(__name__)

#: Characters of headers after which no further one is in a reply; one alone has at most 3/4 of the
#: room of a message.
_MOST_HEADERS = MAX_HEADER_BYTES // 8


class SyncerService:
    """Answers the syncers of one run."""

    def __init__(
        self,
        membership: Membership,
        run_status: RunStatus,
        *,
        check_grant: Callable[[Grant], None],
        is_behind: Callable[[Grant], bool],
        lease: int,
        policy_digest: str,
        changes: Changes,
        inner_steps: Callable[[], Mapping[str, int]],
        named_transfers: Callable[[], Iterable[StateTransfer]],
        on_lost: Callable[[str, int], Awaitable[None]],
    ) -> None:
        """Assign only.

        Args:
            membership: Of the run.
            run_status: Shows what is told.
            check_grant: Refuses a caller that is not a syncer of this run and timeline.
            is_behind: Whether a caller is a syncer of this run, and of an earlier timeline.
            lease: Of the run's state in an object store; 0: it is in none.
            policy_digest: Of the policy of the coordinator's file.
            changes: Makes what is told durable, then true.
            inner_steps: Gives how far the islands have come, which is noted with a record.
            named_transfers: Gives the state transfers between islands that are under way.
            on_lost: Hears why rounds cannot go on, and the exit code.
        """
        self._membership = membership
        self._run_status = run_status
        self._check_grant = check_grant
        self._is_behind = is_behind
        self._lease, self._policy_digest = lease, policy_digest
        self._changes = changes
        self._inner_steps = inner_steps
        self._named_transfers = named_transfers
        self._pinned: tuple[int, set[int]] = 0, set()
        self._asked: dict[int, int] = {}  # syncer -> cut that the last reply asked it to keep
        self._on_lost = on_lost

    @property
    def handlers(self) -> Handlers:
        """Method name -> handler."""
        return {"control.syncer_hello": self._hello, "control.round_report": self._report}

    async def _hello(self, call: IncomingCall) -> Reply:
        request = SyncerHelloRequest.FromString(call.header)
        if self._is_behind(request.grant):
            return Reply.of(SyncerHelloReply(timeline=self._membership.timeline, lease=self._lease))
        self._check_grant(request.grant)
        if len(request.address) > MOST_TEXT:
            raise FrameError(
                f"an address of {len(request.address)} characters; {MOST_TEXT} are allowed"
            )
        self._check_number(request.syncer_id)
        assignment, plan_json = self._membership.assignment, self._membership.plan_json
        self._run_status.syncer_is_at(
            request.syncer_id,
            request.address,
            request.syncer_epoch,
            has_ended=request.has_ended,
            reason=bounded_text(request.reason, MOST_ENDING),
        )
        self._run_status.syncer_moves(request.syncer_id, request.moves)
        ready = self._run_status.ready_fragments
        fragment_ids = assignment.served_by(request.syncer_id, plan_json, ready)
        indexed = [self._run_status.indexed(fragment_id) for fragment_id in fragment_ids]
        return Reply.of(
            SyncerHelloReply(
                plan=packed(plan_json),
                islands=self._membership.members,
                fragment_ids=fragment_ids,
                num_indexed=[num_versions for num_versions, _ in indexed],
                indexed_digests=[digest for _, digest in indexed],
                incarnations=[m.incarnation for m in self._membership.members.values()],
                timeline=self._membership.timeline,
                lease=self._lease,
                ends=self._run_status.ends_syncers,
                policy_digest=self._policy_digest,
                takes=self._sources(assignment.taken_by(request.syncer_id)),
                elsewhere=assignment.elsewhere(request.syncer_id),
                withdrawn=self._sources(assignment.withdrawn_by(request.syncer_id)),
            )
        )

    def _sources(self, moves: Mapping[int, Move]) -> Iterator[FragmentSource]:
        names = list(self._membership.assignment.shares)
        for p, move in moves.items():
            yield FragmentSource(
                fragment_id=p,
                syncer=names[move.source],
                number=move.number,
                is_held=bool(move.former),
            )

    async def _report(self, call: IncomingCall) -> Reply:
        report = RoundReport.FromString(call.header)
        self._check_grant(report.grant)
        membership, known = self._membership, self._fragments_of(report.syncer_id)
        named = [f.fragment_id for f in report.fragments]
        named += [report.expiry.fragment_id] if report.HasField("expiry") else []
        row = (*_indexed(report.record_json), report.record_json) if report.record_json else None
        if row is not None:
            named.append(row[1])
            if row[0] > membership.timeline:
                raise FrameError(
                    f"a record of timeline {row[0]}; the run's is {membership.timeline}"
                )
        if strangers := [fragment_id for fragment_id in named if fragment_id not in known]:
            raise FrameError(
                f"a report of fragment {strangers[0]}; syncer {report.syncer_id} has {known[:8]}, "
                f"{len(known)} in all"
            )
        refused = _counted(report.refusals, membership.members)
        self._run_status.syncer_says(report.syncer_id, report.syncer_epoch, refused, report.alarms)
        decisions = list[Decide]()
        for fragment in report.fragments:
            self._run_status.fragment_stands(self._bounded(fragment))
            decisions.append(self._stands(fragment))
        told = [self._expired(report.expiry)] if report.HasField("expiry") else []
        if row is not None:
            decisions.append(lambda m: m.positions(self._inner_steps()))
            told = [*filter(None, [repair_entry(report.record_json)]), *told]
        decisions += [*self._pins(report), *self._lost_parts(report)]
        await self._changes.make(*decisions, rounds=() if row is None else [row], told=told)
        if row is not None:
            self._run_status.has_indexed(row[1])
        if report.fatal_reason:
            reason = bounded_text(report.fatal_reason, MOST_ENDING)
            await self._on_lost(reason, report.fatal_exit_code)
        return Reply.of(self._answer(report.syncer_id, known))

    def _answer(self, syncer_id: int, known: Collection[int]) -> RoundReportReply:
        """Say what a syncer of some fragments is to know and to do."""
        membership = self._membership
        reply = RoundReportReply(
            checkpoint_steps=membership.checkpoints,
            policy_revision=membership.settings.revision,
            policy_json=membership.settings.policy_json,
        )
        cut = membership.cuts.open(membership.timeline)
        self._asked.pop(syncer_id, None)
        if cut is not None and cut.is_taken:
            reply.cut = self._asked[syncer_id] = cut.number
            reply.cut_versions.extend(cut.versions)
        reply.repairs.extend(self._repairs(known))
        reply.transfers.extend(self._named_transfers())
        if (roster := membership.members.roster()) is not None:
            reply.roster.CopyFrom(
                Roster(
                    generation=roster.generation,
                    live=roster.live,
                    fenced=roster.fenced,
                    is_paused=roster.is_paused or self._run_status.is_halting,
                    min_islands=roster.min_islands,
                )
            )
        return reply

    def _repairs(self, known: Collection[int]) -> Iterator[Repair]:
        """Say of damaged fragments what is indexed of them, and who an operator has named.

        As many headers as have room in a reply; the others once their syncer has these.
        """
        repairs, num_characters = self._membership.repairs, 0
        for p in sorted(repairs.damaged.keys() & known):
            named, header = repairs.asked.get(p, ""), ""
            if repairs.damaged[p].wants_header and num_characters < _MOST_HEADERS:
                header = self._run_status.newest(p)
                num_characters += len(header)
            if named or header:
                yield Repair(fragment_id=p, island=named, record_json=header)

    def _stands(self, fragment: FragmentStatus) -> Decide:
        """Take it that a fragment is whole, or what it has lost, of what can be true of it."""
        p, lost = fragment.fragment_id, None
        if fragment.damage:
            holders = sorted(set(fragment.holders).intersection(self._membership.members))
            lost = LostVersion(fragment.lost_version, tuple(holders), fragment.wants_header)
        return lambda m: m.repairs.stands(p, lost)

    def _expired(self, expiry: Expiry) -> AuditEntry:
        """Say of an attempt what can be true of it."""
        key = RoundKey(
            self._membership.timeline, expiry.fragment_id, expiry.version, expiry.attempt
        )
        missing = sorted(set(expiry.missing).intersection(self._membership.members))
        return expiry_entry(key, missing, bounded_text(expiry.reason))

    def _pins(self, report: RoundReport) -> Iterator[Decide]:
        """Record the fragments whose versions are kept for a cut; with all it is complete."""
        membership = self._membership
        cut = membership.cuts.open(membership.timeline)
        if cut is None or not cut.is_taken or report.pinned_cut != cut.number:
            return
        number = cut.number
        pinned = self._pinned[1] if self._pinned[0] == number else set()
        pinned.update(fragment.fragment_id for fragment in report.fragments)
        self._pinned = number, pinned
        if pinned.issuperset(membership.assignment.of_all(membership.plan_json)):
            logger.info("cut %d is complete, islands=%s", number, ", ".join(cut.parts))
            yield lambda m: m.cut_kept(number) if _is_taken(m, number) else ()

    def _lost_parts(self, report: RoundReport) -> Iterator[Decide]:
        """Let go of parts of a cut that are ahead of what a syncer has.

        It has to know of the cut: a report that was on its way may be older than the parts. Not of
        a damaged fragment: what it has lost may be taken back from an island, and the cut waits for
        that. But a stop is aborted then, for those who could give it leave.
        """
        membership = self._membership
        cut = membership.cuts.open(membership.timeline)
        if cut is None or not cut.is_taken or self._asked.get(report.syncer_id) != cut.number:
            return
        newest = {f.fragment_id: f.version for f in report.fragments if not f.damage}
        if cut.is_last:
            newest |= {f.fragment_id: -1 for f in report.fragments if f.damage}
        if membership.cuts.within(membership.timeline, newest):
            lost = {p: (cut.versions[p], v) for p, v in newest.items() if v < cut.versions[p]}
            number = cut.number
            yield lambda m: m.cuts.within(m.timeline, newest) if _is_taken(m, number) else ()
            logger.error(
                "parts of cut %d hold versions that syncer %d does not have, and do not count: %s",
                cut.number,
                report.syncer_id,
                ", ".join(f"fragment {p} at {of}, not {v}" for p, (of, v) in lost.items()),
            )

    def _fragments_of(self, syncer_id: int) -> list[int]:
        """Give the fragments that one of the run's syncers may speak of; none before a join."""
        self._check_number(syncer_id)
        return self._membership.assignment.may_serve(syncer_id, self._membership.plan_json)

    def _check_number(self, syncer_id: int) -> None:
        if syncer_id >= (number := self._membership.assignment.num_syncers):
            raise FrameError(f"a word of syncer {syncer_id}; the run has {number}")

    def _bounded(self, fragment: FragmentStatus) -> FragmentStatus:
        """Cut what a report says of a fragment to what can be true of it."""
        return FragmentStatus(
            fragment_id=fragment.fragment_id,
            version=fragment.version,
            attempt=fragment.attempt,
            digest=bounded_text(fragment.digest),
            contributors=sorted(set(fragment.contributors).intersection(self._membership.members)),
            num_contributors=fragment.num_contributors,
            age_s=fragment.age_s,
            phase=bounded_text(fragment.phase),
            merged_tokens=fragment.merged_tokens,
            rounds=fragment.rounds,
            solo_rounds=min(fragment.solo_rounds, fragment.rounds),
            damage=bounded_text(fragment.damage),
            lost_version=fragment.lost_version,
            holders=sorted(set(fragment.holders).intersection(self._membership.members)),
            waits_for=sorted(set(fragment.waits_for).intersection(self._membership.members)),
            num_waits_for=fragment.num_waits_for,
            left_s=fragment.left_s,
        )


def _is_taken(membership: Membership, number: int) -> bool:
    """Whether only the syncers' part of a cut is missing."""
    cut = membership.cuts.open(membership.timeline)
    return cut is not None and cut.number == number and cut.is_taken


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
