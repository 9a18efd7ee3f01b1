"""A rank that is killed: its island returns from what lies in host memory, and touches no storage.

Supervisor and ranks are real processes; so are coordinator and syncer of the slow run.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from diloco.config.load import load_config
from diloco.launch.local import LocalRun
from tests.faults.ranks import pid_of_rank
from tests.run_files import FinishedRun, all_logs, write_run
from tests.served_run import ServedRun
from tests.waiting import exit_code, wait_until, written

pytestmark = pytest.mark.timeout(300)

INNER_STEPS = 80
#: The first host's address; the other reaches it from 127.0.0.1.
FIRST_HOST = "127.0.0.2"


def events(output: Path, kind: str) -> list[dict[str, Any]]:
    path = output / "events-west-0.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = []
    for line in lines:
        if line.endswith("}"):  # the last one may be in the writing
            found.append(json.loads(line))
    return [event for event in found if event["kind"] == kind]


def start_island(
    served: ServedRun, output: Path, every: int, *options: str
) -> subprocess.Popen[bytes]:
    """Start the supervisor of island west on a host."""
    arguments = ["island", str(served.run_file), "--island", "west", *options]
    arguments += ["--coordinator", served.address, "--output", str(output)]
    for setting in (f"memory_checkpoint_steps={every}", "restart_wait=100ms"):
        arguments += ["--set", f"islands.west.{setting}"]
    return subprocess.Popen(
        [sys.executable, "-m", "diloco", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def end(*supervisors: subprocess.Popen[bytes]) -> None:
    for supervisor in supervisors:
        supervisor.kill()
        supervisor.wait()


def wait_for_copy(output: Path, supervisor: subprocess.Popen[bytes], incarnation: int = 1) -> None:
    def is_copied() -> bool:
        assert supervisor.poll() is None, all_logs(output)
        return any(e["incarnation"] == incarnation for e in events(output, "memory_copied"))

    wait_until(is_copied, progress=written(output), what=lambda: all_logs(output))


def assert_taken_from_memory(found: list[dict[str, Any]], every: int, inner_step: int) -> None:
    """Insist on one return, with the inner state of a copy that is at most two copies old."""
    (taken,) = found
    assert taken["source"] == "memory"
    assert taken["inner_step"] == inner_step
    assert taken["taken_step"] % every == 0
    assert taken["taken_step"] > 0
    assert taken["received_bytes"] == 0, "of this host"


@pytest.mark.slow
def test_an_island_whose_rank_is_killed_returns_without_storage(tmp_path: Path) -> None:
    output, every = tmp_path / "out", 3
    with ServedRun(tmp_path, {"west": "dp_shard = 2"}, inner_steps=INNER_STEPS) as served:
        supervisor = start_island(served, output, every)
        try:
            wait_for_copy(output, supervisor)
            os.kill(pid_of_rank(supervisor.pid, island_rank=1), signal.SIGKILL)
            code = exit_code(supervisor, 120)
        finally:
            end(supervisor)

    assert code == 0, all_logs(output)
    (rejoined,) = events(output, "island_rejoined")
    assert_taken_from_memory(events(output, "inner_state_taken"), every, rejoined["inner_step"])
    last = max(e["copied_step"] for e in events(output, "memory_copied") if e["incarnation"] == 1)
    assert events(output, "inner_state_taken")[0]["taken_step"] in (last, last + every)
    (ended,) = events(output, "island_ended")
    assert (ended["inner_step"], ended["incarnation"]) == (INNER_STEPS, 2)
    steps = [e["inner_step"] for e in events(output, "inner_step") if e["incarnation"] == 2]
    assert steps == list(range(rejoined["inner_step"] + 1, INNER_STEPS + 1))
    assert not served.config.checkpoint_dir.exists(), "nothing was written, nothing could be read"
    assert "taken from memory" in (output / "west-1.log").read_text()


@pytest.mark.slow
def test_ranks_killed_at_random_never_take_an_older_copy_than_was_whole(tmp_path: Path) -> None:
    output, draw, num_kills = tmp_path / "out", random.Random(5), 6
    with ServedRun(tmp_path, {"west": "dp_shard = 2"}, inner_steps=400) as served:
        supervisor = start_island(served, output, 1, "--set", "islands.west.max_restarts=9")
        try:
            for incarnation in range(1, num_kills + 1):
                wait_for_copy(output, supervisor, incarnation)
                time.sleep(draw.uniform(0, 0.2))
                for rank in draw.choice([(0,), (1,), (0, 1)]):
                    os.kill(pid_of_rank(supervisor.pid, island_rank=rank), signal.SIGKILL)
            code = exit_code(supervisor, 120)
        finally:
            end(supervisor)

    assert code == 0, all_logs(output)
    copied, taken = events(output, "memory_copied"), events(output, "inner_state_taken")
    assert [event["incarnation"] for event in taken] == list(range(2, num_kills + 2))
    for event in taken:
        told = [e for e in copied if e["incarnation"] == event["incarnation"] - 1]
        assert event["source"] == "memory"
        # What the leader was told, or one or two copies that it had no time to be told of.
        assert 0 <= event["taken_step"] - told[-1]["copied_step"] <= 2
    (ended,) = events(output, "island_ended")
    assert ended["inner_step"] == 400


@pytest.mark.slow
def test_a_host_that_is_lost_takes_its_ranks_states_back_from_another(tmp_path: Path) -> None:
    output, every = tmp_path / "out", 2
    with socket.socket() as probe:
        probe.bind((FIRST_HOST, 0))
        rdzv = f"{FIRST_HOST}:{probe.getsockname()[1]}"
    with ServedRun(tmp_path, {"west": "dp_shard = 2"}, inner_steps=INNER_STEPS) as served:
        hosts = [start_island(served, output, every, "--nnodes", "2", "--node-rank", str(node),
                              "--rdzv", rdzv) for node in (0, 1)]  # fmt: skip
        try:
            wait_for_copy(output, hosts[0])
            hosts[1].kill()
            hosts[1].wait()
            again = ("--nnodes", "2", "--node-rank", "1", "--rdzv", rdzv)
            hosts.append(start_island(served, output, every, *again))
            codes = exit_code(hosts[0], 120), exit_code(hosts[2], 30)
        finally:
            end(*hosts)

    assert codes == (0, 0), all_logs(output)
    (taken,) = events(output, "inner_state_taken")
    assert taken["source"] == "memory"
    assert taken["taken_step"] > 0
    assert taken["received_bytes"] > 0, "the second host's memory was gone"
    (ended,) = events(output, "island_ended")
    assert (ended["inner_step"], ended["incarnation"]) == (INNER_STEPS, 2)
    assert "hosts=2 copies=2" in (output / "west-0.log").read_text()
    assert not served.config.checkpoint_dir.exists()


@pytest.mark.slow
def test_the_run_of_an_island_that_returned_from_memory_ends_as_it_should(tmp_path: Path) -> None:
    shapes = {"east": "", "west": "dp_shard = 2"}
    run_file = write_run(tmp_path, shapes, inner_steps=INNER_STEPS)
    config = load_config(
        run_file,
        ["islands.west.memory_checkpoint_steps=1", "islands.west.restart_wait=100ms"],
    )
    killed: list[int] = []
    kill_after = iter((10, 40))
    due = next(kill_after)

    with LocalRun(config) as run:

        def kill_either_rank_after_a_copy() -> None:
            nonlocal due
            copied = events(config.telemetry_dir, "memory_copied")
            if len(killed) == 2 or not copied or copied[-1]["copied_step"] < due:
                return
            killed.append(pid_of_rank(run.islands["west"].pid, island_rank=len(killed)))
            os.kill(killed[-1], signal.SIGKILL)
            due = next(kill_after, INNER_STEPS)

        run.start()
        code = run.wait(kill_either_rank_after_a_copy)
        run.wait_for_coordinator()
    logs = all_logs(run.state.root)

    assert code == 0, logs
    assert len(killed) == 2
    finished = FinishedRun(run)
    records = finished.last_records()
    assert finished.ending_digests() == {tuple(record.digest.hex() for record in records)}, logs
    for record in records:
        assert [(c.island, c.incarnation) for c in record.contributors] == [
            ("east", 1),
            ("west", 3),
        ]
    taken = finished.of_kind("west", "inner_state_taken")
    assert [event["source"] for event in taken] == ["memory", "memory"]
    for island in shapes:
        steps = [event["inner_step"] for event in finished.of_kind(island, "inner_step")]
        assert steps == list(range(1, INNER_STEPS + 1)), "every inner step stands once"
    assert not config.checkpoint_dir.exists()
