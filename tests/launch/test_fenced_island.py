"""Two supervisors of one island: the first one ends for good when the second one's start joins."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco.protos import fragment_pb2 as wire
from diloco.protos.control_pb2 import ROLE_ISLAND, Grant, ReportReply
from diloco.transport.contracts import PROTOCOL_VERSION
from diloco.transport.grpc.client import GrpcTransport
from tests.served_run import ServedRun
from tests.waiting import said_by, wait_until

pytestmark = pytest.mark.timeout(120)


async def poll_as_a_newer_start(address: str) -> None:
    grant = Grant(run="test", island="east", incarnation=2, roles=[ROLE_ISLAND])
    request = wire.PollRequest(protocol_version=PROTOCOL_VERSION, grant=grant, wait_s=0)
    transport = GrpcTransport(address)
    await transport.call("fragment.poll", request.SerializeToString(), deadline_s=10)
    await transport.close()


@contextlib.contextmanager
def supervised(served: ServedRun, output: Path) -> Iterator[subprocess.Popen[str]]:
    """Start an island under its supervisor, and wait until it trains."""
    arguments = ["island", str(served.run_file), "--island", "east"]
    arguments += ["--coordinator", served.address, "--output", str(output)]
    supervisor = subprocess.Popen(
        [sys.executable, "-m", "diloco", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_until(
            lambda: (
                ("east" in served.reports and served.reports["east"].inner_step)
                or supervisor.poll() is not None
            )
        )
        assert supervisor.poll() is None
        yield supervisor
    finally:
        supervisor.kill()
        supervisor.communicate()


@pytest.mark.slow
def test_a_supervisor_whose_island_another_one_runs_ends_at_once(tmp_path: Path) -> None:
    with (
        ServedRun(tmp_path, {"east": ""}, inner_steps=100_000) as served,
        supervised(served, tmp_path / "out") as supervisor,
    ):
        asyncio.run(poll_as_a_newer_start(served.address))
        said, _ = said_by(supervisor, 40)

    assert supervisor.returncode == 41, said
    assert len(served.joins) == 1, "it fences nobody"
    assert "a newer start" in said
    assert "See whether diloco island runs twice for it" in said
    assert "starts again" not in said


@pytest.mark.slow
def test_an_island_that_a_syncer_refuses_after_a_return_of_the_run_starts_again(
    tmp_path: Path,
) -> None:
    with ServedRun(tmp_path, {"east": ""}, inner_steps=100_000) as served:
        served.last_answer = ReportReply(stop=True, exit_code=42, reason="the run went back")
        with supervised(served, tmp_path / "out") as supervisor:
            asyncio.run(poll_as_a_newer_start(served.address))
            wait_until(lambda: len(served.joins) > 1 or supervisor.poll() is not None)
            assert supervisor.poll() is None

    log = (tmp_path / "out" / "east-0.log").read_text()
    assert "island stops, exit_code=42: the run went back" in log
    assert "the syncer refuses island" in log, "it said so first"
