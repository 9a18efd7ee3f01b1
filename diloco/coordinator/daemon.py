"""The coordinator's service: thin handlers over `Membership` and `Journal`.

Carries no tensor and imports no torch, so that a restart is quick. It never decides a round: what
it knows of rounds is an index of what the syncers reported.

Source: protocol.md sections 4 and 8.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from google.protobuf.message import Message

from diloco.coordinator.grants import is_valid, sign
from diloco.coordinator.journal import Journal
from diloco.coordinator.membership import JoinVerdict, Membership
from protos.control_pb2 import (
    JOIN_STATUS_ACCEPTED,
    JOIN_STATUS_FINGERPRINT_MISMATCH,
    JOIN_STATUS_PLAN_MISMATCH,
    JOIN_STATUS_UNKNOWN_ISLAND,
    JOIN_STATUS_VERSION_MISMATCH,
    JOIN_STATUS_WRONG_RUN,
    ROLE_ISLAND,
    ROLE_SYNCER,
    FragmentStatus,
    Grant,
    IslandStatus,
    JoinReply,
    JoinRequest,
    LeaveReply,
    LeaveRequest,
    ReportReply,
    ReportRequest,
    RoundReport,
    RoundReportReply,
    StatusReply,
    StatusRequest,
    SyncerAssignment,
    SyncerHelloReply,
    SyncerHelloRequest,
)
from transport.contracts import PROTOCOL_VERSION, Handlers, IncomingCall, Reply

logger = logging.getLogger(__name__)

_STATUS = {
    JoinVerdict.ACCEPTED: JOIN_STATUS_ACCEPTED,
    JoinVerdict.FINGERPRINT_MISMATCH: JOIN_STATUS_FINGERPRINT_MISMATCH,
    JoinVerdict.PLAN_MISMATCH: JOIN_STATUS_PLAN_MISMATCH,
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
        timeline: int,
        policy_json: str,
        unix_clock: Callable[[], float],
    ) -> None:
        """Assign only; the journal must be open and its entries applied to `membership`."""
        self._membership = membership
        self._journal = journal
        self._secret = secret
        self._timeline = timeline
        self._policy_json = policy_json
        self._unix_clock = unix_clock
        self._islands: dict[str, _Seen] = {}
        self._fragments: dict[int, _Seen] = {}
        self._syncer_address = ""
        self._syncer_epoch = 0
        self.ended = asyncio.Event()

    @property
    def handlers(self) -> Handlers:
        """Method name -> handler."""
        return {
            "control.join": self._join,
            "control.report": self._report,
            "control.leave": self._leave,
            "control.status": self._status,
            "control.syncer_hello": self._syncer_hello,
            "control.round_report": self._round_report,
        }

    def fail(self, reason: str, exit_code: int) -> None:
        """End the run: every island is told at its next report."""
        if not self._membership.fatal_reason:
            logger.error("run failed, exit_code=%d: %s", exit_code, reason)
        self._membership.failed(reason, exit_code)
        self.ended.set()

    async def _join(self, call: IncomingCall) -> Reply:
        request = JoinRequest.FromString(call.header)
        if request.protocol_version != PROTOCOL_VERSION:
            message = (
                f"you speak protocol version {request.protocol_version}, this coordinator "
                f"{PROTOCOL_VERSION}: install the same version of diloco everywhere"
            )
            return _reply(JoinReply(status=JOIN_STATUS_VERSION_MISMATCH, message=message))
        joined = self._membership.join(
            run=request.run,
            island=request.island,
            identity_json=request.identity_json,
            plan_json=request.plan_json,
            corpus_sha256=request.corpus_sha256,
            start_id=request.start_id,
        )
        if joined.verdict is not JoinVerdict.ACCEPTED:
            logger.warning("join refused, island=%s verdict=%s", request.island, joined.verdict)
            return _reply(JoinReply(status=_STATUS[joined.verdict], message=joined.message))
        if joined.entries:
            self._keep(joined.entries)
            logger.info("joined, island=%s incarnation=%d", request.island, joined.incarnation)
        grant = Grant(
            run=self._membership.run,
            timeline=self._timeline,
            island=request.island,
            incarnation=joined.incarnation,
            roles=[ROLE_ISLAND],
        )
        reply = JoinReply(
            status=JOIN_STATUS_ACCEPTED,
            grant=sign(grant, self._secret),
            island_slot=self._membership.members[request.island].slot,
            policy_json=self._policy_json,
        )
        if self._syncer_address:
            reply.syncers.append(
                SyncerAssignment(address=self._syncer_address, fragment_ids=self._fragment_ids())
            )
        return _reply(reply)

    async def _report(self, call: IncomingCall) -> Reply:
        request = ReportRequest.FromString(call.header)
        if not self._is_granted(request.grant, ROLE_ISLAND):
            return _reply(ReportReply(stop=True, reason="the grant is not valid", exit_code=30))
        island = request.grant.island
        if not self._membership.is_current(island, request.grant.incarnation):
            reason = f"a newer start of island {island!r} has joined"
            return _reply(ReportReply(stop=True, reason=reason, exit_code=40))
        self._islands[island] = _Seen(_now(), report=request)
        return _reply(
            ReportReply(
                stop=bool(self._membership.fatal_reason),
                reason=self._membership.fatal_reason,
                exit_code=self._membership.fatal_exit_code,
            )
        )

    async def _leave(self, call: IncomingCall) -> Reply:
        request = LeaveRequest.FromString(call.header)
        if self._is_granted(request.grant, ROLE_ISLAND):
            grant = request.grant
            logger.info(
                "left, island=%s exit_code=%d: %s", grant.island, request.exit_code, request.reason
            )
            self._keep(self._membership.left(grant.island, grant.incarnation, request.exit_code))
            if self._membership.is_finished:
                self.ended.set()
        return _reply(LeaveReply())

    async def _syncer_hello(self, call: IncomingCall) -> Reply:
        request = SyncerHelloRequest.FromString(call.header)
        self._insist_on_syncer(request.grant)
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
        self._syncer_epoch = report.syncer_epoch
        for fragment in report.fragments:
            self._fragments[fragment.fragment_id] = _Seen(_now(), fragment=fragment)
        if report.record_json:
            header = json.loads(report.record_json)
            self._journal.index_round(
                header["timeline"], header["fragment_id"], header["version"], report.record_json
            )
        if report.fatal_reason:
            self.fail(report.fatal_reason, report.fatal_exit_code)
        return _reply(RoundReportReply())

    async def _status(self, call: IncomingCall) -> Reply:
        StatusRequest.FromString(call.header)
        return _reply(self.status())

    def status(self) -> StatusReply:
        """Everything an operator sees: islands, fragments, the syncer, the run's state."""
        membership, now = self._membership, _now()
        reply = StatusReply(
            run=membership.run,
            timeline=self._timeline,
            syncer_address=self._syncer_address,
            syncer_epoch=self._syncer_epoch,
            state=self._state(),
            message=membership.fatal_reason,
            inner_steps=json.loads(self._policy_json)["run.inner_steps"],
        )
        for island, member in membership.members.items():
            seen = self._islands.get(island)
            status = IslandStatus(
                island=island, incarnation=member.incarnation, island_slot=member.slot
            )
            if seen is not None:
                status.last_report.CopyFrom(seen.report)
                status.last_report.ClearField("grant")
                status.report_age_s = now - seen.at
            reply.islands.append(status)
        for _, seen in sorted(self._fragments.items()):
            fragment = FragmentStatus()
            fragment.CopyFrom(seen.fragment)
            fragment.age_s += now - seen.at
            reply.fragments.append(fragment)
        return reply

    def _keep(self, entries: Sequence[tuple[str, str]]) -> None:
        """Make what membership decided durable, then true."""
        self._journal.write(entries)
        self._membership.apply(entries)

    def _state(self) -> str:
        if self._membership.fatal_reason:
            return "failed"
        if self._membership.is_finished:
            return "finished"
        is_complete = all(member.incarnation for member in self._membership.members.values())
        return "running" if is_complete else "waiting for islands"

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
        if not self._is_granted(grant, ROLE_SYNCER):
            raise PermissionError("the syncer's grant is not valid for this run")


def _reply(message: Message) -> Reply:
    return Reply(message.SerializeToString())


def _now() -> float:
    return asyncio.get_running_loop().time()
