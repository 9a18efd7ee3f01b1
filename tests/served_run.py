"""A run that islands of a test can join: real membership and syncer behind handlers of a few lines.

Both are served over gRPC by a thread of this process, so a run begins at once. What islands say is
kept; `hold` asks for a graceful stop, `resume` takes the store back to a pinned checkpoint. A last
report of an island that failed is answered by `last_answer`, if that is set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diloco.config.classes import identity_json, policy_json
from diloco.config.load import load_config
from diloco.config.schema import Config
from diloco.forecast.build import build_syncer_rules
from diloco.io_thread import IoThread
from diloco.outer.fragments import Plan
from diloco.protocol.run.admission import JoinVerdict
from diloco.protocol.run.membership import Membership
from diloco.protocol.run.plan_bytes import unpacked
from diloco.protos.control_pb2 import (
    JOIN_STATUS_ACCEPTED,
    JOIN_STATUS_RUN_STOPPED,
    ROLE_ISLAND,
    Grant,
    JoinReply,
    JoinRequest,
    LeaveReply,
    LeaveRequest,
    ReportReply,
    ReportRequest,
    SyncerAssignment,
)
from diloco.syncer.syncer import Syncer
from diloco.syncer.worker import Workers
from diloco.transport.contracts import Handler, IncomingCall, Reply
from diloco.transport.grpc.server import GrpcServer
from diloco.versions.pins import restore
from diloco.versions.store import FragmentStore
from tests.run_files import write_run
from tests.virtual_run import InlineWorker, MemoryIncarnations

_FRAGMENT_METHODS = ("submit", "decline", "upload", "poll", "fetch", "pin")


class ServedRun:
    """Use it as a context manager; `islands` and `settings` are those of `write_run`."""

    def __init__(
        self,
        directory: Path,
        islands: Mapping[str, str],
        overrides: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        self.run_file = write_run(directory, islands, **settings)
        self.config = load_config(self.run_file, overrides)
        self.joins: list[JoinRequest] = []
        self.leaves: list[LeaveRequest] = []
        self.reports: dict[str, ReportRequest] = {}
        self.address = ""
        self.resume_step: int | None = None
        self.last_answer: ReportReply | None = None
        self._store = directory / "store"
        self._thread = IoThread()
        self._syncer: Syncer | None = None
        self._is_holding = False
        self.membership = Membership(
            self.config.run.name,
            tuple(sorted(self.config.islands)),
            identity_json(self.config),
            lambda here, there: [],
            self.config.run.inner_steps,
            num_checkpoints=self.config.checkpoint.keep,
        )

    def __enter__(self) -> ServedRun:
        self._thread.start()
        self._thread.run(self._serve())
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.run(self._stop())
        self._thread.stop()

    def island(self, name: str) -> Config:
        """Configuration of one island; what is overridden is the coordinator's alone."""
        return load_config(self.run_file, island=name)

    def hold(self) -> None:
        """Ask every island to promise where it stops."""
        self._is_holding = True

    def go_on(self) -> None:
        """Take the request to stop back, as for islands that start again."""
        self._is_holding = False
        self.membership.apply([("stop", "null")])
        self.reports.clear()

    def resume(self, step: int) -> None:
        """Serve the run from its checkpoint of an inner step on, in a new timeline."""
        self._thread.run(self._resume(step))

    async def _serve(self) -> None:
        handlers = {f"fragment.{name}": self._fragment(name) for name in _FRAGMENT_METHODS}
        own = {"join": self._join, "report": self._report, "leave": self._leave}
        handlers |= {f"control.{name}": handler for name, handler in own.items()}
        self._server = GrpcServer("127.0.0.1:0", handlers)
        await self._server.start()
        self.address = self._server.address

    async def _stop(self) -> None:
        await self._server.stop(0)
        if self._syncer is not None:
            await self._syncer.stop()

    async def _resume(self, step: int) -> None:
        assert self._syncer is not None
        await self._syncer.stop()
        plan = Plan.from_json(unpacked(self.joins[0].plan))
        timeline = self.membership.timeline
        restore(self._store, plan, step=step, abandoned_timeline=timeline)
        self.membership.apply(self.membership.resumed(step))
        self.resume_step, self._is_holding = step, False
        self.reports.clear()
        await self._start_syncer(plan)

    async def _start_syncer(self, plan: Plan) -> None:
        self._syncer = Syncer(
            plan,
            build_syncer_rules(self.config, timeline=self.membership.timeline),
            [FragmentStore(self._store, fragment, 4) for fragment in plan.fragments],
            syncer_epoch=1 + self.membership.timeline,
            incarnations=MemoryIncarnations(),
            is_granted=lambda grant: True,
            workers=Workers.all_by(InlineWorker()),
            on_record=lambda header: None,
            on_change=lambda: None,
        )
        await self._syncer.start()

    def _fragment(self, name: str) -> Handler:
        async def handle(call: IncomingCall) -> Reply:
            assert self._syncer is not None
            return await self._syncer.handlers[f"fragment.{name}"](call)

        return handle

    async def _join(self, call: IncomingCall) -> Reply:
        request = JoinRequest.FromString(call.header)
        if self._syncer is None:
            await self._start_syncer(Plan.from_json(unpacked(request.plan)))
        self.joins.append(request)
        joined = self.membership.join(
            run=request.run,
            island=request.island,
            identity_json=request.identity_json,
            plan_json=unpacked(request.plan),
            corpus_sha256=request.corpus_sha256,
            tokenizer_digest=request.tokenizer_digest,
            start_step=request.start_step,
            start_id=request.start_id,
        )
        self.membership.apply(joined.entries)
        if joined.verdict is JoinVerdict.RUN_STOPPED:
            stopped = JoinReply(status=JOIN_STATUS_RUN_STOPPED, message=joined.message)
            return Reply(stopped.SerializeToString())
        assert joined.verdict is JoinVerdict.ACCEPTED, joined.message
        reply = JoinReply(
            status=JOIN_STATUS_ACCEPTED,
            grant=Grant(
                run=request.run,
                timeline=self.membership.timeline,
                island=request.island,
                incarnation=joined.incarnation,
                roles=[ROLE_ISLAND],
            ),
            island_slot=self.membership.members[request.island].slot,
            syncers=[
                SyncerAssignment(
                    address=self.address,
                    fragment_ids=range(self.config.outer.num_fragments),
                )
            ],
            policy_json=policy_json(self.config),
            is_resumed=self.resume_step is not None,
            resume_step=self.resume_step or 0,
        )
        return Reply(reply.SerializeToString())

    async def _report(self, call: IncomingCall) -> Reply:
        report, membership = ReportRequest.FromString(call.header), self.membership
        island, steps = report.grant.island, report.checkpoint_steps
        self.reports[island] = report
        if self._is_holding:
            membership.apply(membership.request_stop())
        membership.apply(membership.keeps(island, steps, inner_step=report.inner_step))
        if report.has_hold:
            membership.apply(membership.promise(island, report.hold_step))
        reply = ReportReply(
            hold=membership.is_stopping,
            has_stop_step=membership.stop_step is not None,
            stop_step=membership.stop_step or 0,
            checkpoint_steps=membership.checkpoints,
        )
        if report.state == "failed" and self.last_answer is not None:
            reply = self.last_answer
        return Reply(reply.SerializeToString())

    async def _leave(self, call: IncomingCall) -> Reply:
        leave = LeaveRequest.FromString(call.header)
        self.leaves.append(leave)
        left = self.membership.left(
            leave.grant.island, leave.exit_code, is_stopped=leave.is_stopped
        )
        self.membership.apply(left)
        return Reply(LeaveReply().SerializeToString())
