"""A run that islands of a test can join: a coordinator of a few lines, and a real syncer.

Both are served over gRPC by a thread of this process, so a run begins at once. What islands say is
kept; `hold` asks for a graceful stop, `resume` takes the store back to a pinned checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diloco.config.classes import policy_json
from diloco.config.load import load_config
from diloco.config.schema import Config
from diloco.launch.build import build_publication_rules
from diloco.outer.fragments import Plan
from diloco.rounds.pins import restore
from diloco.rounds.store import FragmentStore
from diloco.rounds.syncer import Syncer, SyncerRules
from diloco.sync.io_thread import IoThread
from protos.control_pb2 import (
    JOIN_STATUS_ACCEPTED,
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
from tests.run_files import write_run
from tests.virtual_run import InlineWorker, MemoryIncarnations
from transport.contracts import Handler, IncomingCall, Reply
from transport.grpc_server import GrpcServer

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
        self._store = directory / "store"
        self._thread = IoThread()
        self._syncer: Syncer | None = None
        self._timeline = 0
        self._is_holding = False

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
        plan = Plan.from_json(self.joins[0].plan_json)
        restore(self._store, plan, step=step, abandoned_timeline=self._timeline)
        self._timeline, self.resume_step, self._is_holding = self._timeline + 1, step, False
        self.reports.clear()
        await self._start_syncer(plan)

    async def _start_syncer(self, plan: Plan) -> None:
        self._syncer = Syncer(
            plan,
            SyncerRules(
                self._timeline,
                tuple(sorted(self.config.islands)),
                build_publication_rules(self.config),
                self.config.outer.round_deadline_s,
            ),
            [FragmentStore(self._store, fragment, 4) for fragment in plan.fragments],
            syncer_epoch=1 + self._timeline,
            incarnations=MemoryIncarnations(),
            is_granted=lambda grant: True,
            worker=InlineWorker(),
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
            await self._start_syncer(Plan.from_json(request.plan_json))
        self.joins.append(request)
        reply = JoinReply(
            status=JOIN_STATUS_ACCEPTED,
            grant=Grant(
                run=request.run,
                timeline=self._timeline,
                island=request.island,
                incarnation=sum(join.island == request.island for join in self.joins),
                roles=[ROLE_ISLAND],
            ),
            island_slot=sorted(self.config.islands).index(request.island),
            syncers=[SyncerAssignment(address=self.address)],
            policy_json=policy_json(self.config),
            is_resumed=self.resume_step is not None,
            resume_step=self.resume_step or 0,
        )
        return Reply(reply.SerializeToString())

    async def _report(self, call: IncomingCall) -> Reply:
        report = ReportRequest.FromString(call.header)
        self.reports[report.grant.island] = report
        reply = ReportReply(hold=self._is_holding)
        promises = [r.hold_step for r in self.reports.values() if r.has_hold]
        if self._is_holding and len(promises) == len(self.config.islands):
            reply.has_stop_step, reply.stop_step = True, max(promises)
        return Reply(reply.SerializeToString())

    async def _leave(self, call: IncomingCall) -> Reply:
        self.leaves.append(LeaveRequest.FromString(call.header))
        return Reply(LeaveReply().SerializeToString())
