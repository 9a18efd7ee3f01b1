"""A coordinator and its syncer as real processes, and calls to them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from diloco.config.classes import identity_json
from diloco.config.load import load_config
from diloco.outer.fragments import Plan, TensorSpec, make_plan
from diloco.protocol.run.plan_bytes import packed
from diloco.protos import control_pb2 as control
from diloco.state_dir import StateDir, stop_syncer
from diloco.transport.contracts import PROTOCOL_VERSION, Reply
from diloco.transport.errors import TransportError
from diloco.transport.grpc.client import GrpcTransport
from tests.waiting import wait_until

_T = TypeVar("_T")

RUN_FILE = Path(__file__).resolve().parents[1] / "configs" / "runs" / "two-islands.toml"
PLAN = make_plan(
    [TensorSpec("layers.0.weight", (40, 8)), TensorSpec("layers.1.weight", (16,))], num_fragments=2
)
OTHER_PLAN = make_plan([TensorSpec("layers.0.weight", (40, 9))], num_fragments=1)
OVERRIDES = (
    "outer.uplink_codec=float32",
    "outer.downlink_codec=float32",
    "outer.optimizer.name=sgd",
    "outer.optimizer.lr=1.0",
)
PROGRAM = """
import asyncio, sys
from diloco.config.load import load_config
from diloco.errors import DilocoError
from diloco.launch.coordinator import run_coordinator
how, at_step = sys.argv[1], int(sys.argv[2]) if sys.argv[2] else None
try:
    config = load_config(sys.argv[3], sys.argv[4:])
    announce = lambda line: print(line, flush=True)
    code = asyncio.run(
        run_coordinator(
            config,
            announce=announce,
            resume=how == "resume",
            resume_stopped=how == "resume_stopped",
            at_step=at_step,
        )
    )
except DilocoError as error:
    print(error)
    code = error.exit_code
assert "torch" not in sys.modules
sys.exit(code)
"""


@dataclass
class Site:
    """One run in `root`, driven as its operator and its islands would."""

    root: Path
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def state(self) -> StateDir:
        return StateDir(self.root / "state")

    def config(self, *overrides: str):
        state_dir = f"coordinator.state_dir={self.state.root}"
        return load_config(RUN_FILE, (*OVERRIDES, state_dir, *overrides))

    def coordinate(
        self,
        *overrides: str,
        resume: bool = False,
        resume_stopped: bool = False,
        at_step: int | None = None,
    ) -> subprocess.Popen[str]:
        state_dir = f"coordinator.state_dir={self.state.root}"
        how = ["resume" if resume else "resume_stopped" if resume_stopped else ""]
        how += ["" if at_step is None else str(at_step)]
        arguments = [*how, str(RUN_FILE), *OVERRIDES, state_dir, *overrides]
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments], stdout=subprocess.PIPE, text=True
        )
        self.processes.append(process)
        return process

    def coordinate_until_up(
        self, *overrides: str, resume: bool = False, resume_stopped: bool = False
    ) -> tuple[subprocess.Popen[str], str]:
        process = self.coordinate(*overrides, resume=resume, resume_stopped=resume_stopped)
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            if "listens on" in line:
                return process, line.split()[-1]
            said.append(line)
        raise AssertionError("".join(said))

    def join_request(
        self, island: str, start_id: str, plan: Plan = PLAN, overrides: Sequence[str] = ()
    ) -> control.JoinRequest:
        return control.JoinRequest(
            protocol_version=PROTOCOL_VERSION,
            run="two-islands",
            island=island,
            identity_json=identity_json(self.config(*overrides)),
            plan=packed(plan.to_json()),
            start_id=start_id,
        )

    def join(
        self,
        address: str,
        island: str,
        start_id: str,
        plan: Plan = PLAN,
        *,
        overrides: Sequence[str] = (),
    ):
        request = self.join_request(island, start_id, plan, overrides)
        return control.JoinReply.FromString(call(address, "control.join", request).header)

    def syncer_address(self, coordinator: str, island: str, start_id: str) -> str:
        def assigned() -> str:
            reply = self.join(coordinator, island, start_id)
            return reply.syncers[0].address if reply.syncers else ""

        return eventually(assigned, "no syncer was assigned")

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        stop_syncer(self.state)


def call(address: str, method: str, request, payload: bytes = b"") -> Reply:
    async def once() -> Reply:
        transport = GrpcTransport(address)
        try:
            return await transport.call(
                method, request.SerializeToString(), payload, deadline_s=10, max_reply_bytes=1 << 20
            )
        finally:
            await transport.close()

    return asyncio.run(once())


def eventually(check: Callable[[], _T], what: str, within_s: float = 60) -> _T:
    """Return the first true result of `check`; calls that fail on the way are tried again."""
    last = ""

    def checked() -> _T | None:
        nonlocal last
        try:
            return check()
        except TransportError as error:
            last = str(error)
            return None

    # A look is a connection of its own.
    found = wait_until(checked, within_s, what=lambda: f"{what} {last}", every_s=0.2)
    assert found is not None
    return found


def status(address: str) -> control.StatusReply:
    reply = call(
        address, "control.status", control.StatusRequest(protocol_version=PROTOCOL_VERSION)
    )
    return control.StatusReply.FromString(reply.header)
