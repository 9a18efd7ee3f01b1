"""An island's processes, for real: all alive or all ended, and the right exit code.

No coordinator listens where these islands look for one, so their ranks meet and then wait for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

RUN = """
[run]
name = "alone"
seed = 1
inner_steps = 4

[model]
preset = "tiny"

[data]
sequence_length = 32

[inner.optimizer]
lr = 2e-3

[outer]
preset = "classic"
inner_steps_per_round = 2

[coordinator]
state_dir = "state"

[islands.east]
ranks = 2
mesh = { dp_shard = 2 }
tokens_per_inner_step = 128

[islands.west]
ranks = 1
tokens_per_inner_step = 64
"""
NOBODY = "127.0.0.1:9"
START_S = 45.0
END_S = 20.0


@dataclass
class Site:
    """Islands started in one directory; none outlives it."""

    root: Path
    processes: list[subprocess.Popen[str]]

    @property
    def output(self) -> Path:
        return self.root / "out"

    def start(self, island: str, *overrides: str, **environ: str) -> subprocess.Popen[str]:
        arguments = ["island", "run.toml", "--island", island, "--coordinator", NOBODY]
        arguments += ["--output", "out", *(text for o in overrides for text in ("--set", o))]
        process = subprocess.Popen(
            [sys.executable, "-m", "diloco", *arguments],
            cwd=self.root,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.root), **environ},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def wait_for_ranks(self, supervisor: subprocess.Popen[str], number: int) -> list[int]:
        """Wait until every rank has written its first file; return their pids, by rank."""
        names = [f"events-east-{rank}.jsonl" for rank in range(number)]
        wait_until(lambda: all((self.output / name).exists() for name in names), START_S)
        return children(supervisor.pid)

    def log(self, name: str) -> str:
        return (self.output / name).read_text()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    (tmp_path / "run.toml").write_text(RUN)
    site = Site(tmp_path, [])
    yield site
    for process in site.processes:
        for pid in [*children(process.pid), process.pid] if process.poll() is None else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until(check: Callable[[], bool], within_s: float) -> None:
    until = time.monotonic() + within_s
    while not check():
        assert time.monotonic() < until, f"not within {within_s:g} s"
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_killed_rank_ends_the_island_with_40_and_is_named(site: Site) -> None:
    supervisor = site.start("east")
    ranks = site.wait_for_ranks(supervisor, 2)

    os.kill(ranks[1], signal.SIGKILL)
    _, error = supervisor.communicate(timeout=END_S)

    assert supervisor.returncode == 40
    assert "rank 1 of island east" in error
    assert "was ended by SIGKILL" in error
    assert "out/east-1.log" in error
    assert not any(map(is_alive, ranks))


def test_ranks_end_when_their_supervisor_is_killed(site: Site) -> None:
    supervisor = site.start("east")
    ranks = site.wait_for_ranks(supervisor, 2)
    assert all(map(is_alive, ranks))

    os.kill(supervisor.pid, signal.SIGKILL)

    wait_until(lambda: not any(map(is_alive, ranks)), 10.0)


def test_terminated_island_ends_its_ranks_and_says_so(site: Site) -> None:
    supervisor = site.start("east")
    ranks = site.wait_for_ranks(supervisor, 2)

    supervisor.terminate()
    _, error = supervisor.communicate(timeout=END_S)

    assert supervisor.returncode == 128 + signal.SIGTERM
    assert "stopping island east, signal=SIGTERM" in error
    assert not any(map(is_alive, ranks))


def test_own_exit_code_of_a_rank_is_the_islands(site: Site) -> None:
    supervisor = site.start("east", "transport.unreachable=1s")

    _, error = supervisor.communicate(timeout=START_S + END_S)

    assert supervisor.returncode == 30
    assert "rank 0 of island east" in error
    assert f"the coordinator at {NOBODY} gave no answer to control.join" in error


def test_variables_of_a_launcher_make_it_a_rank_of_that_job(site: Site) -> None:
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    job["GLOO_SOCKET_IFNAME"] = "lo"

    ranks = [site.start("east", "transport.unreachable=1s", RANK=str(r), **job) for r in range(2)]
    seen = [0, 0]
    while ranks[0].poll() is None:
        seen = [max(a, len(children(rank.pid))) for a, rank in zip(seen, ranks, strict=True)]
        time.sleep(0.05)
    for rank in ranks:
        rank.communicate(timeout=END_S)

    # Rank 0 could not reach the coordinator; rank 1 lost rank 0 while it waited for the answer.
    assert ranks[0].returncode == 30
    assert ranks[1].returncode not in (0, None)
    assert "gave no answer to control.join" in site.log("east-0.log")
    assert seen == [0, 0]
    assert not (site.output / "resolved-east.toml").exists()


def test_job_of_another_size_is_refused(site: Site) -> None:
    job = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}

    process = site.start("west", **job)
    _, error = process.communicate(timeout=START_S)

    assert process.returncode == 2
    assert "islands.west.ranks = 1, but the launcher started 2" in error
