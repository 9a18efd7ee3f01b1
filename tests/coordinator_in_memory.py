"""A coordinator over a loopback network that can be killed, and anyone who calls it."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from diloco.config.classes import identity_difference
from diloco.config.load import with_settings
from diloco.config.schema import Config
from diloco.coordinator.daemon import Coordinator
from diloco.coordinator.grants import sign
from diloco.coordinator.journal import Journal
from diloco.coordinator.operator_service import Operations
from diloco.outer.fragments import TensorSpec, make_plan
from diloco.protocol.run.assignment import FragmentAssignment
from diloco.protocol.run.claims import Claims
from diloco.protocol.run.membership import Decide, Membership
from diloco.protocol.run.plan_bytes import packed
from diloco.protocol.run.terms import Terms, terms_of
from diloco.protos import control_pb2 as control
from diloco.transport.calls.loopback import LoopbackNetwork, run_virtual
from diloco.transport.contracts import PROTOCOL_VERSION

SECRET = bytes(32)
PLAN = make_plan([TensorSpec("a", (3, 5)), TensorSpec("b", (7,))], num_fragments=2).to_json()
IDENTITY = json.dumps({"run.seed": 7})
UNREACHABLE_S = 60.0
TERMS = Terms(json.dumps({"run.inner_steps": 100}), UNREACHABLE_S)


#: Names of one syncer, of two, and of three.
SYNCERS = (("syncer",), ("syncer-0", "syncer-1"), ("syncer-0", "syncer-1", "syncer-2"))


class CoordinatorInMemory:
    """A coordinator that can be killed, and anyone who calls it.

    With a `config` it takes an operator's commands, and its terms are read from that.
    """

    def __init__(
        self,
        directory: Path,
        terms: Terms = TERMS,
        config: Config | None = None,
        num_syncers: int = 1,
        names: tuple[str, ...] = ("east", "west"),
    ) -> None:
        self.num_syncers = num_syncers
        self.names = names
        self.terms = terms
        self.config = config
        self.network = LoopbackNetwork()
        self.transport = self.network.connect("coordinator")
        self.path = directory / "journal.sqlite"

    async def start(self) -> None:
        self.journal = Journal(self.path)
        self.journal.open()
        names, is_shared = self.names, self.config and self.config.outer.is_on_arrival
        self.membership = Membership(
            "demo", names, IDENTITY, identity_difference, 100, num_checkpoints=2,
            claims=Claims(len(names), names) if is_shared else None,
            assignment=FragmentAssignment(dict.fromkeys(SYNCERS[self.num_syncers - 1], 1.0)),
        )  # fmt: skip
        self.membership.apply(self.journal.entries().items())
        terms = self.terms
        self.operations: Operations | None = None
        if self.config is not None:
            self.in_force = self._in_force(self.config)
            terms = terms_of(self.in_force)
            self.operations = Operations(self.in_force, self._take, self._back_up)
        self.coordinator = Coordinator(
            membership=self.membership,
            journal=self.journal,
            secret=SECRET,
            terms=terms,
            unix_clock=lambda: 0.0,
            operations=self.operations,
        )
        self.server = self.network.server("coordinator", self.coordinator.handlers)
        await self.server.start()

    async def restart(self, resume_step: int | None = None) -> None:
        await self.close()
        if resume_step is not None:
            self.journal.open()
            self.journal.write(self.membership.resumed(resume_step))
            self.journal.close()
        await self.start()

    async def close(self) -> None:
        await self.server.stop(0)
        await self.coordinator.settled()
        self.journal.close()

    async def call(self, method: str, request: Message) -> bytes:
        reply = await self.transport.call(
            f"control.{method}", request.SerializeToString(), deadline_s=5.0
        )
        return reply.header

    async def join(
        self, island: str, start_id: str = "a", plan: str = PLAN, **fields: Any
    ) -> control.JoinReply:
        request = control.JoinRequest(
            protocol_version=PROTOCOL_VERSION,
            run="demo",
            island=island,
            identity_json=IDENTITY,
            plan=packed(plan),
            start_id=start_id,
            **fields,
        )
        return control.JoinReply.FromString(await self.call("join", request))

    async def report(self, grant: control.Grant, **fields: Any) -> control.ReportReply:
        request = control.ReportRequest(grant=grant, **fields)
        return control.ReportReply.FromString(await self.call("report", request))

    async def leave(self, grant: control.Grant, **fields: Any) -> None:
        request = control.LeaveRequest(grant=grant, **fields)
        await self.call("leave", request)

    async def round_report(
        self, timeline: int = 0, record: dict[str, int] | None = None, **fields: Any
    ) -> list[int]:
        grant = control.Grant(run="demo", timeline=timeline, roles=[control.ROLE_SYNCER])
        request = control.RoundReport(
            grant=sign(grant, SECRET), record_json=json.dumps(record) if record else "", **fields
        )
        reply = control.RoundReportReply.FromString(await self.call("round_report", request))
        return list(reply.checkpoint_steps)

    async def run_state(self, island: str) -> control.RunStateReply:
        request = control.RunStateRequest(protocol_version=PROTOCOL_VERSION, island=island)
        return control.RunStateReply.FromString(await self.call("standing", request))

    async def operate(self, command: str, **arguments: str) -> control.OperateReply:
        request = control.OperateRequest(command=command, arguments=arguments)
        return control.OperateReply.FromString(await self.call("operate", request))

    async def change(self, decide: Decide) -> None:
        await self.coordinator._changes.make(decide)

    async def roster(self) -> control.Roster | None:
        reply = await self.told_to_syncer()
        return reply.roster if reply.HasField("roster") else None

    async def told_to_syncer(self) -> control.RoundReportReply:
        grant = control.Grant(
            run="demo", timeline=self.membership.timeline, roles=[control.ROLE_SYNCER]
        )
        request = control.RoundReport(grant=sign(grant, SECRET))
        return control.RoundReportReply.FromString(await self.call("round_report", request))

    def _in_force(self, config: Config) -> Config:
        return with_settings(config, json.dumps(self.membership.settings.policy))

    def _take(self, config: Config) -> None:
        self.in_force = config

    async def _back_up(self, arguments: Mapping[str, str]) -> str:
        return f"copied to {arguments['directory']}"

    def merge_all(self) -> None:
        """Let every fragment have merged the run's tokens."""
        tokens = self.coordinator.run_status.terms.total_tokens
        for p in range(2):
            status = control.FragmentStatus(fragment_id=p, merged_tokens=tokens)
            self.coordinator.fragment_stands(status)

    def state(self) -> str:
        return self.coordinator.status().state


Story = Callable[[CoordinatorInMemory], Coroutine[Any, Any, None]]


def tell(directory: Path, story: Story, **changes: Any) -> None:
    """Run a story with a coordinator of two islands."""

    async def told() -> None:
        coord = CoordinatorInMemory(directory, **changes)
        await coord.start()
        try:
            await story(coord)
        finally:
            await coord.close()

    run_virtual(told())


async def joined(coord: CoordinatorInMemory, start_id: str = "a") -> list[control.Grant]:
    return [(await coord.join(island, start_id)).grant for island in coord.names]
