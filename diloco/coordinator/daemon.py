"""The coordinator's service: thin handlers over `Membership` and `Journal`.

Carries no tensor and imports no torch, so that a restart is quick. It never decides a round: what
it knows of rounds is an index of what the syncers reported.

Source: protocol.md sections 4 and 8.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from google.protobuf.message import Message

from diloco.config.fields import MOST_CHECKPOINTS
from diloco.coordinator.grants import is_valid, sign
from diloco.coordinator.journal import Journal
from diloco.coordinator.membership import Entries, JoinVerdict, Membership
from diloco.errors import Fenced, QuorumLost
from diloco.peer_texts import MOST_ENDING, MOST_TEXT, bounded_text
from diloco.refusals import Cause
from protos.control_pb2 import (
    JOIN_STATUS_ACCEPTED,
    JOIN_STATUS_FINGERPRINT_MISMATCH,
    JOIN_STATUS_PLAN_MISMATCH,
    JOIN_STATUS_RUN_STOPPED,
    JOIN_STATUS_UNKNOWN_ISLAND,
    JOIN_STATUS_VERSION_MISMATCH,
    JOIN_STATUS_WRONG_RUN,
    ROLE_ISLAND,
    ROLE_SYNCER,
    ClockReply,
    FragmentStatus,
    Grant,
    IslandStatus,
    JoinReply,
    JoinRequest,
    LeaveReply,
    LeaveRequest,
    RefusalCount,
    ReportReply,
    ReportRequest,
    RoundReport,
    RoundReportReply,
    StandingReply,
    StandingRequest,
    StatusReply,
    StatusRequest,
    SyncerAssignment,
    SyncerHelloReply,
    SyncerHelloRequest,
)
from transport.contracts import PROTOCOL_VERSION, Handlers, IncomingCall, Reply
from transport.errors import FrameError

logger = logging.getLogger(__name__)

_WATCH_S = 1.0
_MAX_START_ID = 64
#: Differences that one refusal names.
_MOST_LINES = 16
#: What an island may say that it is doing: operators read it, and metrics are named by it.
ISLAND_STATES = frozenset({"", "waiting", "training", "flushing", "finished", "stopped", "failed"})

_STATUS = {
    JoinVerdict.ACCEPTED: JOIN_STATUS_ACCEPTED,
    JoinVerdict.FINGERPRINT_MISMATCH: JOIN_STATUS_FINGERPRINT_MISMATCH,
    JoinVerdict.PLAN_MISMATCH: JOIN_STATUS_PLAN_MISMATCH,
    JoinVerdict.RUN_STOPPED: JOIN_STATUS_RUN_STOPPED,
    JoinVerdict.UNKNOWN_ISLAND: JOIN_STATUS_UNKNOWN_ISLAND,
    JoinVerdict.WRONG_RUN: JOIN_STATUS_WRONG_RUN,
}


@dataclass(slots=True)
class _Seen:
    """Last word of an island or of a fragment, and when it came (loop time)."""

    at: float
    report: ReportRequest = field(default_factory=ReportRequest)
    fragment: FragmentStatus = field(default_factory=FragmentStatus)


class Coordinator:
    """One run's control plane. `handlers` go to a server; `ended` is set when the run is over."""

    def __init__(
        self,
        *,
        membership: Membership,
        journal: Journal,
        secret: bytes,
        policy_json: str,
        unix_clock: Callable[[], float],
        unreachable_s: float,
    ) -> None:
        """Assign only; the journal must be open and its entries applied to `membership`.

        After `unreachable_s` seconds without a report of an island, a stop no longer waits for it.
        """
        self._membership = membership
        self._journal = journal
        self._secret = secret
        self._policy_json = policy_json
        self._unix_clock = unix_clock
        self._unreachable_s = unreachable_s
        self._heard: dict[str, float] = {}  # loop time of an island's last join or report
        self._islands: dict[str, _Seen] = {}
        self._last_inner_step: dict[str, int] = {}
        self._fragments: dict[int, _Seen] = {}
        self._syncer_address = ""
        self._syncer_epoch = 0
        self._refusals: Counter[tuple[str, Cause]] = Counter()
        self._syncer_refusals: list[RefusalCount] = []
        self.instead_of_syncer = ""  # for people, where there is none
        self.ended = asyncio.Event()

    @property
    def handlers(self) -> Handlers:
        """Method name -> handler."""
        return {
            "control.join": self._join,
            "control.report": self._report,
            "control.leave": self._leave,
            "control.status": self._status,
            "control.standing": self._standing,
            "control.clock": self._clock,
            "control.syncer_hello": self._syncer_hello,
            "control.round_report": self._round_report,
        }

    def fail(self, reason: str, exit_code: int) -> None:
        """End the run for now: every island is told at its next report, a restart tries anew."""
        remedy = (
            "nothing published is lost, the run goes on where it was: diloco coordinator RUN.toml; "
            "then every island that has ended"
        )
        self._membership.apply(self._failed(f"{reason}; {remedy}", exit_code))
        self.ended.set()

    def lose(self, reason: str, exit_code: int) -> None:
        """End the run for good: rounds cannot go on."""
        self._keep(self._failed(reason, exit_code))
        self.ended.set()

    def refused(self, island: str, cause: Cause) -> None:
        """Count a refusal; `island` is empty where nobody has proved whose call it was."""
        self._refusals[island, cause] += 1

    def fragment_stands(self, status: FragmentStatus) -> None:
        """Take note of how a fragment stands, for people."""
        self._fragments[status.fragment_id] = _Seen(_now(), fragment=status)

    def is_island(self, grant: Grant) -> bool:
        """Whether a grant is valid, and of the newest start of its island in this timeline."""
        is_current = self._membership.is_current(grant.island, grant.incarnation, grant.timeline)
        return is_current and self._is_granted(grant, ROLE_ISLAND)

    def request_stop(self) -> bool:
        """Ask all islands to stop after one inner step; false if there is nobody to ask."""
        if entries := self._membership.request_stop():
            self._keep(entries)
            logger.info("stop requested")
        return self._membership.is_stopping

    async def watch(self) -> None:
        """End a stop that an island has stayed away from for too long; watches for ever."""
        began = _now()
        while True:
            await asyncio.sleep(_WATCH_S)
            oldest = _now() - self._unreachable_s
            islands = self._membership.islands
            self._stop_without([i for i in islands if self._heard.get(i, began) < oldest])

    def _stop_without(self, silent: list[str]) -> None:
        membership = self._membership
        if not (lacks := membership.stop_lacks(silent)):
            return
        is_complete = membership.is_stop_complete
        self._keep(membership.stop_without(lacks))
        if is_complete:
            logger.warning("stopped without a last word of %s", ", ".join(lacks))
            self._end_if_over()
            return
        awaited = "; ".join(f"island {island!r} owes {what}" for island, what in lacks.items())
        self.fail(
            f"the graceful stop cannot end: {awaited}, and has not reported for "
            f"{self._unreachable_s:g} s (transport.unreachable). The stop is taken back",
            QuorumLost.exit_code,
        )

    async def _join(self, call: IncomingCall) -> Reply:
        request = JoinRequest.FromString(call.header)
        if request.protocol_version != PROTOCOL_VERSION:
            message = (
                f"you speak protocol version {request.protocol_version}, this coordinator "
                f"{PROTOCOL_VERSION}: install the same version of diloco everywhere"
            )
            self.refused("", Cause.PROTOCOL_VERSION)
            return _reply(JoinReply(status=JOIN_STATUS_VERSION_MISMATCH, message=message))
        if len(request.start_id) > _MAX_START_ID:
            self.refused("", Cause.FRAME)
            raise FrameError(
                f"a start id of {len(request.start_id)} characters; {_MAX_START_ID} are allowed"
            )
        joined = self._membership.join(
            run=request.run,
            island=request.island,
            identity_json=request.identity_json,
            plan_json=request.plan_json,
            corpus_sha256=request.corpus_sha256,
            tokenizer_digest=request.tokenizer_digest,
            start_step=request.start_step,
            start_id=request.start_id,
        )
        self._keep(joined.entries)
        if joined.verdict is not JoinVerdict.ACCEPTED:
            logger.warning("join refused, island=%.100r verdict=%s", request.island, joined.verdict)
            assert joined.cause is not None
            # Without certificates and tokens anybody could fill another's count.
            is_known = call.caller is not None and request.island in self._membership.members
            self.refused(request.island if is_known else "", joined.cause)
            self._end_if_over()
            return _reply(JoinReply(status=_STATUS[joined.verdict], message=_lines(joined.message)))
        self._heard[request.island] = _now()
        if joined.entries:
            logger.info("joined, island=%s incarnation=%d", request.island, joined.incarnation)
        is_resumed = self._is_resumed()
        grant = Grant(
            run=self._membership.run,
            timeline=self._membership.timeline,
            island=request.island,
            incarnation=joined.incarnation,
            roles=[ROLE_ISLAND],
        )
        reply = JoinReply(
            status=JOIN_STATUS_ACCEPTED,
            grant=sign(grant, self._secret),
            island_slot=self._membership.members[request.island].slot,
            policy_json=self._policy_json,
            is_resumed=is_resumed,
            resume_step=self._membership.resume_step if is_resumed else 0,
            last_inner_step=self._last_inner_step.get(request.island, 0),
        )
        if self._syncer_address:
            reply.syncers.append(
                SyncerAssignment(address=self._syncer_address, fragment_ids=self._fragment_ids())
            )
        return _reply(reply)

    async def _report(self, call: IncomingCall) -> Reply:
        request = ReportRequest.FromString(call.header)
        if not self._is_granted(request.grant, ROLE_ISLAND):
            self.refused("", Cause.GRANT)
            return _reply(ReportReply(stop=True, reason="the grant is not valid", exit_code=30))
        grant, membership = request.grant, self._membership
        if request.state not in ISLAND_STATES:
            self.refused(grant.island, Cause.FRAME)
            raise FrameError(f"a report's state is {request.state[:40]!r}")
        if (count := len(request.checkpoint_steps)) > MOST_CHECKPOINTS:
            self.refused(grant.island, Cause.FRAME)
            raise FrameError(f"a report of {count} checkpoints; {MOST_CHECKPOINTS} are allowed")
        request.message = bounded_text(request.message)
        if not membership.is_current(grant.island, grant.incarnation, grant.timeline):
            cause = membership.cause_against(grant.island, grant.incarnation, grant.timeline)
            self.refused(grant.island, cause)
            return _reply(
                ReportReply(stop=True, reason=self._fenced(grant), exit_code=Fenced.exit_code)
            )
        self._heard[grant.island] = _now()
        self._islands[grant.island] = _Seen(_now(), report=request)
        if request.inner_step:
            self._last_inner_step[grant.island] = request.inner_step
        steps, inner_step = request.checkpoint_steps, request.inner_step
        self._keep(membership.keeps(grant.island, steps, inner_step=inner_step))
        if request.has_hold:
            self._keep(membership.promise(grant.island, request.hold_step))
        return _reply(
            ReportReply(
                stop=bool(membership.fatal_reason),
                reason=membership.fatal_reason,
                exit_code=membership.fatal_exit_code,
                hold=membership.is_stopping,
                has_stop_step=membership.stop_step is not None,
                stop_step=membership.stop_step or 0,
                checkpoint_steps=membership.checkpoints,
            )
        )

    def _fenced(self, grant: Grant) -> str:
        if grant.timeline != self._membership.timeline:
            return (
                f"the run was resumed from inner step {self._membership.resume_step} (timeline "
                f"{self._membership.timeline}), this start belongs to timeline {grant.timeline}: "
                f"start island {grant.island!r} again"
            )
        return (
            f"a newer start of island {grant.island!r} has joined, and has taken the place of this "
            f"one: one `diloco island --island {grant.island}` a run; see whether two were started "
            f"(diloco status shows the start at work, incarnation "
            f"{self._membership.members[grant.island].incarnation}; this one is "
            f"{grant.incarnation}), and end the one that is not wanted"
        )

    async def _leave(self, call: IncomingCall) -> Reply:
        request = LeaveRequest.FromString(call.header)
        grant, membership = request.grant, self._membership
        if self._is_granted(grant, ROLE_ISLAND) and membership.is_current(
            grant.island, grant.incarnation, grant.timeline
        ):
            logger.info(
                "left, island=%s exit_code=%d: %s",
                grant.island, request.exit_code, bounded_text(request.reason),
            )  # fmt: skip
            self._keep(
                membership.left(grant.island, request.exit_code, is_stopped=request.is_stopped)
            )
            self._end_if_over()
        else:
            self.refused(
                "", membership.cause_against(grant.island, grant.incarnation, grant.timeline)
            )
        return _reply(LeaveReply())

    async def _syncer_hello(self, call: IncomingCall) -> Reply:
        request = SyncerHelloRequest.FromString(call.header)
        self._insist_on_syncer(request.grant)
        if len(request.address) > MOST_TEXT:
            raise FrameError(
                f"an address of {len(request.address)} characters; {MOST_TEXT} are allowed"
            )
        if request.address:
            self._syncer_address = request.address
            self._syncer_epoch = request.syncer_epoch
        reply = SyncerHelloReply(
            plan_json=self._membership.plan_json,
            islands=self._membership.islands,
            fragment_ids=self._fragment_ids(),
        )
        return _reply(reply)

    async def _round_report(self, call: IncomingCall) -> Reply:
        report = RoundReport.FromString(call.header)
        self._insist_on_syncer(report.grant)
        known = set(self._fragment_ids())
        if strangers := [f.fragment_id for f in report.fragments if f.fragment_id not in known]:
            raise FrameError(f"a report of fragment {strangers[0]}; the plan has {len(known)}")
        self._syncer_epoch = report.syncer_epoch
        self._syncer_refusals = _counted(report.refusals, self._membership.islands)
        for fragment in report.fragments:
            self.fragment_stands(self._bounded(fragment))
        if report.record_json:
            self._journal.index_round(*_indexed(report.record_json), report.record_json)
        if report.fatal_reason:
            self.lose(bounded_text(report.fatal_reason, MOST_ENDING), report.fatal_exit_code)
        return _reply(RoundReportReply(checkpoint_steps=self._membership.checkpoints))

    def _bounded(self, fragment: FragmentStatus) -> FragmentStatus:
        """Cut what a report says of a fragment to what can be true of it."""
        islands = self._membership.islands
        return FragmentStatus(
            fragment_id=fragment.fragment_id,
            version=fragment.version,
            attempt=fragment.attempt,
            digest=bounded_text(fragment.digest),
            contributors=sorted(set(fragment.contributors).intersection(islands)),
            age_s=fragment.age_s,
            phase=bounded_text(fragment.phase),
        )

    async def _clock(self, call: IncomingCall) -> Reply:
        return _reply(ClockReply(unix_s=self._unix_clock()))

    async def _status(self, call: IncomingCall) -> Reply:
        StatusRequest.FromString(call.header)
        return _reply(self.status())

    async def _standing(self, call: IncomingCall) -> Reply:
        island = StandingRequest.FromString(call.header).island
        membership = self._membership
        reply = StandingReply(
            run=membership.run,
            timeline=membership.timeline,
            state=self._state(),
            start_step=membership.start_step,
            has_published=self._journal.has_rounds(membership.timeline),
            inner_steps=self._inner_steps(),
            syncer_address=self._syncer_address,
        )
        # A stranger on a trusted network could name any island: that is `control.status`.
        is_proved = call.caller is not None or call.is_local
        if is_proved and island in membership.members:
            reply.island.CopyFrom(self._island_status(island))
        return _reply(reply)

    def status(self) -> StatusReply:
        """Everything an operator sees: islands, fragments, the syncer, the run's state."""
        membership, now = self._membership, _now()
        reply = StatusReply(
            run=membership.run,
            timeline=membership.timeline,
            syncer_address=self._syncer_address or self.instead_of_syncer,
            syncer_epoch=self._syncer_epoch,
            state=self._state(),
            message=membership.fatal_reason,
            inner_steps=self._inner_steps(),
            checkpoint_steps=membership.checkpoints,
            start_step=membership.start_step,
            has_published=self._journal.has_rounds(membership.timeline),
        )
        reply.islands.extend(map(self._island_status, membership.members))
        for _, seen in sorted(self._fragments.items()):
            fragment = FragmentStatus()
            fragment.CopyFrom(seen.fragment)
            fragment.age_s += now - seen.at
            reply.fragments.append(fragment)
        for (island, cause), count in sorted(self._refusals.items()):
            reply.refusals.add(service="coordinator", island=island, cause=cause, count=count)
        reply.refusals.extend(self._syncer_refusals)
        return reply

    def _island_status(self, island: str) -> IslandStatus:
        member, seen = self._membership.members[island], self._islands.get(island)
        status = IslandStatus(
            island=island, incarnation=member.incarnation, island_slot=member.slot
        )
        if seen is not None:
            status.last_report.CopyFrom(seen.report)
            status.last_report.ClearField("grant")
            status.report_age_s = _now() - seen.at
        return status

    def _inner_steps(self) -> int:
        return int(json.loads(self._policy_json)["run.inner_steps"])

    def _keep(self, entries: Entries) -> None:
        """Make what membership decided durable, then true."""
        if entries:
            self._journal.write(entries)
            self._membership.apply(entries)

    def _end_if_over(self) -> None:
        if self._membership.is_finished or self._membership.is_stopped:
            self.ended.set()

    def _failed(self, reason: str, exit_code: int) -> Entries:
        entries = self._membership.failed(reason, exit_code)
        if entries:
            logger.error("run failed, exit_code=%d: %s", exit_code, reason)
        return entries

    def _is_resumed(self) -> bool:
        """Whether this timeline has published nothing yet: who joins restores the checkpoint."""
        timeline = self._membership.timeline
        return timeline > 0 and not self._journal.has_rounds(timeline)

    def _state(self) -> str:
        if self._membership.fatal_reason:
            return "failed"
        if self._membership.is_finished:
            return "finished"
        if self._membership.is_stopped:
            return "stopped"
        if self._membership.is_stopping:
            return "stopping"
        return "running" if self._membership.have_all_joined else "waiting for islands"

    def _fragment_ids(self) -> list[int]:
        if not self._membership.plan_json:
            return []
        return list(range(len(json.loads(self._membership.plan_json)["fragments"])))

    def _is_granted(self, grant: Grant, role: int) -> bool:
        return is_valid(
            grant,
            self._secret,
            run=self._membership.run,
            role=role,
            now_unix_s=self._unix_clock(),
        )

    def _insist_on_syncer(self, grant: Grant) -> None:
        is_current = grant.timeline == self._membership.timeline
        if not (is_current and self._is_granted(grant, ROLE_SYNCER)):
            self.refused("", Cause.GRANT if is_current else Cause.TIMELINE)
            raise PermissionError("the syncer's grant is not valid for this run and its timeline")


def _reply(message: Message) -> Reply:
    return Reply(message.SerializeToString())


def _now() -> float:
    return asyncio.get_running_loop().time()


def _lines(message: str) -> str:
    """Cut a refusal, line by line: it repeats what the caller has said."""
    lines = message.split("\n")
    shown = [bounded_text(line) for line in lines[:_MOST_LINES]]
    if len(lines) > _MOST_LINES:
        shown.append(f"and {len(lines) - _MOST_LINES} lines more")
    return "\n".join(shown)


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
