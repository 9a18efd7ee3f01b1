"""Coordinator and syncer as real processes on this machine: joins, kills, restarts, refusals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import blake3
import pytest

from diloco.config.classes import identity_json
from diloco.config.load import load_config
from diloco.coordinator.journal import Journal
from diloco.launch.state_dir import StateDir, holder, read_endpoint, stop_syncer
from diloco.outer.fragments import Plan, TensorSpec, make_plan
from protos import control_pb2 as control
from protos import fragment_pb2 as wire
from transport.contracts import PROTOCOL_VERSION, Reply
from transport.errors import TransportError
from transport.grpc_client import GrpcTransport

pytestmark = pytest.mark.timeout(120)

_T = TypeVar("_T")

RUN_FILE = Path(__file__).resolve().parents[2] / "configs" / "runs" / "two-islands.toml"
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
try:
    config = load_config(sys.argv[1], sys.argv[2:])
    code = asyncio.run(run_coordinator(config, tell=lambda line: print(line, flush=True)))
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

    def coordinate(self, *overrides: str) -> subprocess.Popen[str]:
        state_dir = f"coordinator.state_dir={self.state.root}"
        arguments = [str(RUN_FILE), *OVERRIDES, state_dir, *overrides]
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments], stdout=subprocess.PIPE, text=True
        )
        self.processes.append(process)
        return process

    def coordinate_until_up(self, *overrides: str) -> tuple[subprocess.Popen[str], str]:
        process = self.coordinate(*overrides)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "listens on" in line, line + process.stdout.read()
        return process, line.split()[-1]

    def join(self, address: str, island: str, start_id: str, plan: Plan = PLAN, *overrides: str):
        request = control.JoinRequest(
            protocol_version=PROTOCOL_VERSION,
            run="two-islands",
            island=island,
            identity_json=identity_json(self.config(*overrides)),
            plan_json=plan.to_json(),
            start_id=start_id,
        )
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


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    try:
        yield site
    finally:
        site.close()


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
    deadline = time.monotonic() + within_s
    while True:
        try:
            if result := check():
                return result
            last = ""
        except TransportError as error:
            last = str(error)
        assert time.monotonic() < deadline, f"{what} within {within_s:g} s {last}"
        time.sleep(0.05)


def status(address: str) -> control.StatusReply:
    reply = call(address, "control.status", control.StatusRequest())
    return control.StatusReply.FromString(reply.header)


def poll(address: str, grant: control.Grant, *outstanding: wire.RoundKey) -> wire.PollReply:
    request = wire.PollRequest(
        protocol_version=PROTOCOL_VERSION, grant=grant, outstanding=outstanding, wait_s=0
    )
    return wire.PollReply.FromString(call(address, "fragment.poll", request).header)


def values(fragment_id: int, lane_id: int, scale: float) -> bytes:
    lane = PLAN.fragments[fragment_id].lanes[lane_id]
    return array("f", [scale * (i % 7) for i in range(lane.end - lane.start)]).tobytes()


def upload(address: str, grant: control.Grant) -> None:
    for part in PLAN.fragments:
        for lane in part.lanes:
            payload = values(part.fragment_id, lane.lane_id, 1.0)
            header = wire.UploadHeader(
                protocol_version=PROTOCOL_VERSION,
                grant=grant,
                fragment_id=part.fragment_id,
                lane_id=lane.lane_id,
                digest=blake3.blake3(payload).digest(),
            )
            ack = wire.Ack.FromString(call(address, "fragment.upload", header, payload).header)
            assert ack.is_accepted, ack.message


def submit(
    address: str, grant: control.Grant, key: wire.RoundKey, scale: float
) -> list[wire.SubmitReply]:
    replies = []
    for lane in PLAN.fragments[key.fragment_id].lanes:
        payload = values(key.fragment_id, lane.lane_id, scale)
        header = wire.SubmitHeader(
            protocol_version=PROTOCOL_VERSION,
            grant=grant,
            key=key,
            lane_id=lane.lane_id,
            sent_at_inner_step=4,
            weight_tokens=128,
            weight_steps=4,
            codec="float32",
            digest=blake3.blake3(payload).digest(),
        )
        reply = call(address, "fragment.submit", header, payload)
        replies.append(wire.SubmitReply.FromString(reply.header))
    return replies


def leave(address: str, grant: control.Grant, exit_code: int = 0) -> None:
    request = control.LeaveRequest(
        protocol_version=PROTOCOL_VERSION, grant=grant, exit_code=exit_code
    )
    call(address, "control.leave", request)


def report(address: str, grant: control.Grant) -> control.ReportReply:
    request = control.ReportRequest(protocol_version=PROTOCOL_VERSION, grant=grant)
    return control.ReportReply.FromString(call(address, "control.report", request).header)


def tape(site: Site) -> list[tuple[int, int]]:
    """Fragment and version of every record that the journal knows, sorted."""
    journal = Journal(site.state.journal)
    journal.open()
    headers = [json.loads(header) for header in journal.tape()]
    journal.close()
    return sorted((header["fragment_id"], header["version"]) for header in headers)


def founded(site: Site, coordinator: str) -> tuple[str, control.Grant, control.Grant]:
    """Join both islands and found version 0; returns the syncer's address and both grants."""
    east = site.join(coordinator, "east", "east-1").grant
    west = site.join(coordinator, "west", "west-1").grant
    syncer = site.syncer_address(coordinator, "east", "east-1")
    poll(syncer, west)
    assert all(state.wants_initial for state in poll(syncer, east).fragments)
    upload(syncer, east)
    assert all(state.is_founded for state in poll(syncer, west).fragments)
    return syncer, east, west


def test_first_join_fixes_the_plan_and_every_start_gets_one_incarnation(site: Site) -> None:
    _, address = site.coordinate_until_up()

    first = site.join(address, "east", "a")
    repeated = site.join(address, "east", "a")
    second = site.join(address, "east", "b")
    fenced = site.join(address, "east", "a")
    other_plan = site.join(address, "west", "a", OTHER_PLAN)
    other_identity = site.join(address, "west", "a", PLAN, "outer.overlap_steps=2")
    unknown = site.join(address, "north", "a")
    west = site.join(address, "west", "a")

    incarnations = [r.grant.incarnation for r in (first, repeated, second, fenced, west)]
    assert incarnations == [1, 1, 2, 1, 1]
    assert other_plan.status == control.JOIN_STATUS_PLAN_MISMATCH
    assert "fragments: 2 entries here, 1 entries there" in other_plan.message
    assert other_identity.status == control.JOIN_STATUS_FINGERPRINT_MISMATCH
    assert "outer.overlap_steps: 1 here, 2 there" in other_identity.message
    assert unknown.status == control.JOIN_STATUS_UNKNOWN_ISLAND
    assert "east, west" in unknown.message
    assert (first.island_slot, west.island_slot) == (0, 1)
    assert json.loads(west.policy_json)["run.inner_steps"] == 16


def test_run_survives_kills_of_coordinator_and_syncer_and_ends_when_all_islands_left(
    site: Site,
) -> None:
    process, coordinator = site.coordinate_until_up()
    syncer, east, west = founded(site, coordinator)
    before = poll(syncer, east)
    syncer_pid = holder(site.state.store_lock)

    process.kill()
    process.wait()
    key = wire.RoundKey(timeline=0, fragment_id=1, version=0, attempt=0)
    submit(syncer, east, key, 0.5)
    submit(syncer, west, key, 0.25)
    published = eventually(
        lambda: (state := poll(syncer, east, key)).outcomes and state, "version 1 of fragment 1"
    )
    process, restarted = site.coordinate_until_up()
    again = site.join(restarted, "east", "east-1").grant
    adopted_pid = holder(site.state.store_lock)

    assert restarted == coordinator
    assert (again.incarnation, again.mac) == (1, east.mac)
    assert adopted_pid == syncer_pid
    assert published.outcomes[0].kind == wire.OUTCOME_KIND_INCLUDED
    assert site.syncer_address(coordinator, "east", "east-1") == syncer

    expected_tape = [(0, 0), (1, 0), (1, 1)]
    eventually(lambda: tape(site) == expected_tape, "the report of every record")
    assert syncer_pid is not None
    os.kill(syncer_pid, signal.SIGKILL)
    after = eventually(
        lambda: (reply := poll(syncer, east)).syncer_epoch > before.syncer_epoch and reply,
        "the syncer's next epoch",
    )

    assert after.syncer_epoch == before.syncer_epoch + 1
    assert [state.version for state in after.fragments] == [0, 1]
    assert after.fragments[0].digest == before.fragments[0].digest
    assert after.fragments[1].digest == published.fragments[1].digest
    assert list(after.fragments[1].contributors) == ["east", "west"]
    assert holder(site.state.store_lock) != syncer_pid
    reported = eventually(
        lambda: (
            (reply := status(coordinator)).syncer_epoch == after.syncer_epoch
            and len(reply.fragments) == 2
            and reply
        ),
        "the restarted syncer's report",
    )
    assert reported.state == "running"
    assert [(f.version, f.digest) for f in reported.fragments] == [
        (state.version, state.digest.hex()) for state in after.fragments
    ]

    leave(coordinator, east)
    leave(coordinator, west)
    output, _ = process.communicate(timeout=30)

    assert (process.returncode, output) == (0, "the run 'two-islands' has finished\n")
    assert holder(site.state.store_lock) is None
    assert read_endpoint(site.state.syncer) is None
    assert tape(site) == expected_tape
    rerun = site.coordinate()
    assert "has finished" in rerun.communicate(timeout=30)[0]
    assert rerun.returncode == 0


def test_lost_quorum_ends_everybody_with_its_exit_code_and_names_the_missing(site: Site) -> None:
    process, coordinator = site.coordinate_until_up("outer.round_deadline=100ms")
    syncer, east, west = founded(site, coordinator)

    def contribute_alone() -> bool:
        reply = poll(syncer, east)
        state = reply.fragments[0]
        if state.is_open:
            key = wire.RoundKey(timeline=0, fragment_id=0, version=0, attempt=state.attempt)
            submit(syncer, east, key, 0.5)
        return reply.HasField("fatal")

    eventually(contribute_alone, "the loss of the quorum")
    reply = eventually(
        lambda: (r := report(coordinator, west)).stop and r,
        "the order to stop",
    )
    leave(coordinator, east, 50)
    leave(coordinator, west, 50)
    output, _ = process.communicate(timeout=30)

    assert reply.exit_code == 50
    assert "missing: west" in reply.reason
    assert process.returncode == 50
    assert "diloco island RUN.toml --island west" in output
    assert holder(site.state.store_lock) is None


def test_state_dir_admits_one_coordinator_of_one_run(site: Site) -> None:
    process, _ = site.coordinate_until_up()
    second = site.coordinate()
    second_output, _ = second.communicate(timeout=30)

    assert second.returncode == 2
    assert "another coordinator runs in" in second_output
    assert str(process.pid) in second_output
    assert stat.S_IMODE(site.state.secret.stat().st_mode) == 0o600
    assert stat.S_IMODE(site.state.root.stat().st_mode) == 0o700

    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)

    assert process.returncode == 0
    assert "start it again with the same command" in output
    assert holder(site.state.store_lock) is None

    other = site.coordinate("run.seed=99", "run.name=other")
    other_output, _ = other.communicate(timeout=30)

    assert other.returncode == 2
    assert 'run.name: "other" here, "two-islands" there' in other_output
    assert "run.seed: 99 here, 1234 there" in other_output
    assert site.config() == load_config(site.state.resolved)


def test_policy_cannot_change_under_a_living_syncer(site: Site) -> None:
    process, coordinator = site.coordinate_until_up()
    site.join(coordinator, "east", "a")
    site.syncer_address(coordinator, "east", "a")
    process.kill()
    process.wait()

    changed = site.coordinate("outer.round_deadline=5s")
    output, _ = changed.communicate(timeout=30)

    assert changed.returncode == 2
    assert 'outer.round_deadline: "5s" here, "30s" there' in output
    assert str(holder(site.state.store_lock)) in output
