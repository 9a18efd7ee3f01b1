"""Two supervisors of one island: the first one ends for good when the second one's start joins."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from protos import fragment_pb2 as wire
from protos.control_pb2 import ROLE_ISLAND, Grant
from tests.served_run import ServedRun
from transport.contracts import PROTOCOL_VERSION
from transport.grpc_client import GrpcTransport

pytestmark = pytest.mark.timeout(120)


async def poll_as_a_newer_start(address: str) -> None:
    grant = Grant(run="test", island="east", incarnation=2, roles=[ROLE_ISLAND])
    request = wire.PollRequest(protocol_version=PROTOCOL_VERSION, grant=grant, wait_s=0)
    transport = GrpcTransport(address)
    await transport.call("fragment.poll", request.SerializeToString(), deadline_s=10)
    await transport.close()


def test_a_supervisor_whose_island_another_one_runs_ends_at_once(tmp_path: Path) -> None:
    with ServedRun(tmp_path, {"east": ""}, inner_steps=100_000) as served:
        arguments = ["island", str(served.run_file), "--island", "east"]
        arguments += ["--coordinator", served.address, "--output", str(tmp_path / "out")]
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "diloco", *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            until = time.monotonic() + 60
            while "east" not in served.reports or not served.reports["east"].inner_step:
                assert time.monotonic() < until and supervisor.poll() is None
                time.sleep(0.05)
            asyncio.run(poll_as_a_newer_start(served.address))
            said, _ = supervisor.communicate(timeout=40)
        finally:
            supervisor.kill()
            supervisor.wait()

    assert supervisor.returncode == 41, said
    assert len(served.joins) == 1, "it fences nobody"
    assert "a newer start" in said
    assert "See whether diloco island runs twice for it" in said
    assert "starts again" not in said
