"""A whole run with an island of two hosts: two supervisors on loopback addresses, one rank each."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from diloco.config.load import load_config
from diloco.report.summary import read_events
from tests.faults.ranks import pid_of_rank
from tests.run_files import all_logs, write_run
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(300)

INNER_STEPS = 60
TRAINED_S = 200.0
#: The first host's address; the other reaches it from 127.0.0.1.
FIRST_HOST = "127.0.0.2"


@contextmanager
def site(directory: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Hold processes by name; at the end, end them."""
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        yield processes
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def start(directory: Path, *arguments: str, name: str) -> subprocess.Popen[bytes]:
    with open(directory / f"{name}.log", "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "diloco", *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
        )


def free_address(host: str) -> str:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return f"{host}:{probe.getsockname()[1]}"


@pytest.mark.slow
def test_an_island_of_two_hosts_trains_and_outlives_the_death_of_a_rank(tmp_path: Path) -> None:
    run_file = str(
        write_run(tmp_path, {"east": "", "west": "dp_shard = 2"}, inner_steps=INNER_STEPS)
    )
    config = load_config(run_file)
    rdzv = free_address(FIRST_HOST)
    island = ("island", run_file, "--set", "islands.west.restart_wait=100ms", "--island")

    with site(tmp_path) as started:
        started["coordinator"] = start(tmp_path, "coordinator", run_file, name="coordinator")
        wait_for(tmp_path / "coordinator.log", "listens on", started)
        for rank in (1, 0):
            place = ("--nnodes", "2", "--node-rank", str(rank), "--rdzv", rdzv)
            started[f"west-{rank}"] = start(tmp_path, *island, "west", *place, name=f"host-{rank}")
        started["east"] = start(tmp_path, *island, "east", name="east")
        wait_for(config.telemetry_dir / "events-west-1.jsonl", "fragment_merged", started)
        os.kill(pid_of_rank(started["west-1"].pid, island_rank=1), signal.SIGKILL)
        codes = {name: process.wait(TRAINED_S) for name, process in started.items()}

    logs = all_logs(tmp_path)
    assert codes == dict.fromkeys(started, 0), logs
    events = read_events(config.telemetry_dir, config.islands)
    ended = [e for lines in events.values() for e in lines if e["kind"] == "island_ended"]
    assert [(e["island"], e["island_rank"], e["inner_step"]) for e in ended] == [
        ("east", 0, INNER_STEPS),
        ("west", 0, INNER_STEPS),
        ("west", 1, INNER_STEPS),
    ]
    assert len({tuple(event["digests"]) for event in ended}) == 1
    assert {event["incarnation"] for event in ended if event["island"] == "west"} == {2}
    first = (tmp_path / "host-0.log").read_text()
    assert "island west starts again, wait_s=0.1, restarts_left=2 of 3: rank 1" in first, logs


def wait_for(path: Path, words: str, started: dict[str, subprocess.Popen[bytes]]) -> None:
    def is_written() -> bool:
        codes = {name: process.poll() for name, process in started.items()}
        assert not any(codes.values()), (codes, all_logs(path.parent))
        return path.exists() and words in path.read_text()

    wait_until(is_written, TRAINED_S, what=lambda: all_logs(path.parent))
