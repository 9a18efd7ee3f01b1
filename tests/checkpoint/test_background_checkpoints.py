"""Checkpoints that are written while training goes on: real ranks, disks that stand still."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from diloco.checkpoint import checkpoint_writer
from diloco.checkpoint.checkpoint_writer import CheckpointWriter, RankPart, SaveThread
from diloco.checkpoint.checkpoints import Checkpoint, valid_steps
from diloco.checkpoint.state_copy import StateCopier
from diloco.errors import DilocoError
from diloco.trainer.state import kept_tensors
from tests.checkpoint.late_copies import BrokenDevice, late_copier
from tests.checkpoint.small_checkpoint import ISLAND, Trained, make_optimizer
from tests.distributed import run_ranks
from tests.served_run import ServedRun
from tests.waiting import exit_code, wait_until

pytestmark = pytest.mark.timeout(120)


def events(output: Path, kind: str) -> list[dict[str, Any]]:
    path = output / "events-east-0.jsonl"
    whole, _, _ = (path.read_text() if path.exists() else "").rpartition("\n")
    return [event for event in map(json.loads, whole.splitlines()) if event["kind"] == kind]


@pytest.mark.parametrize(
    "is_killed",
    [
        pytest.param(True, id="killed"),
        pytest.param(False, id="awaited-at-the-end", marks=pytest.mark.slow),
    ],
)
def test_training_goes_on_and_a_kill_leaves_the_checkpoint_before_whole(
    tmp_path: Path, is_killed: bool
) -> None:
    directory, output = tmp_path / "state" / "checkpoints", tmp_path / "out"
    settings = ["checkpoint.every_inner_steps=20", "checkpoint.keep=4"]
    with ServedRun(tmp_path, {"east": ""}, settings, inner_steps=62) as served:
        arguments = ["40", str(tmp_path / "go-on"), "--config", str(served.run_file)]
        arguments += ["--island", "east", "--coordinator", served.address, "--output", str(output)]
        rank = subprocess.Popen(
            [sys.executable, "-m", "tests.launch.slow_disk_rank", *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1", "RANK": "0", "WORLD_SIZE": "1"},
        )
        try:
            # The disk stands still from step 40 on; training does from the next checkpoint on.
            wait_until(lambda: len(events(output, "inner_step")) == 60)
            # Sixteen steps may be over before the first byte is written behind them.
            torn = "east/step-000000000040/parts-0001/rank-*.tmp"
            wait_until(lambda: [path for path in directory.glob(torn) if path.stat().st_size])
            assert rank.poll() is None, "the next checkpoint waits for this one"
            if is_killed:
                rank.send_signal(signal.SIGKILL)
            else:
                (tmp_path / "go-on").touch()
            code = exit_code(rank, 60)
        finally:
            rank.kill()

    assert code == (-signal.SIGKILL if is_killed else 0)
    assert valid_steps(directory, "east") == ([20] if is_killed else [20, 40, 60])
    written = events(output, "checkpoint_written")
    assert [event["inner_step"] for event in written] == ([20] if is_killed else [20, 40, 60])
    if not is_killed:
        assert written[0]["awaited_s"] < written[2]["awaited_s"] <= written[2]["blocked_s"]
        assert written[1]["blocked_s"] < written[1]["seconds"]
        assert list(served.reports["east"].checkpoint_steps) == [20, 40, 60]


def sharded() -> Trained:
    trained = Trained(seed=1, num_steps=0)
    fully_shard(trained.model, mesh=init_device_mesh("cpu", (2,)))
    trained.optimizer = make_optimizer(trained.model)
    trained.step()
    return trained


def save_behind_two_ranks(island_rank: int, directory: Path) -> dict[str, Any]:
    """Take, then train on while rank 1's disk stands still; let it be full; break its device."""
    trained, thread = sharded(), SaveThread(torch.device("cpu"))
    copiers = [late_copier(trained.optimizer)]
    writer = CheckpointWriter(directory, ISLAND, trained.plan(), group=dist.group.WORLD)
    go_on, failures = threading.Event(), []
    real = checkpoint_writer.write_durably

    def stand_still(path: Path, pieces: Any, **options: Any) -> None:
        assert go_on.wait(60)
        real(path, pieces, **options)

    def be_full(path: Path, pieces: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    def begin(step: int) -> None:
        part: RankPart = writer.take(
            kept_tensors(trained.model, trained.optimizer),
            {"meta": torch.tensor([step])},
            copier=copiers[-1],
            group=thread.group,
        )

        def save() -> None:
            try:
                writer.save(step, part, about={}, cut=0)
            except OSError as error:
                failures.append(str(error))

        thread.start(save)

    is_slow = island_rank == 1
    with mock.patch.object(checkpoint_writer, "write_durably", stand_still if is_slow else real):
        begin(1)
        expected = trained.model[0].weight
        assert isinstance(expected, DTensor)
        seen: dict[str, Any] = {"taken": expected.full_tensor().flatten().tolist()}
        for _ in range(3):  # collectives of training, besides those of the thread
            trained.step()
        seen["while"] = valid_steps(directory, ISLAND)
        dist.barrier()
        go_on.set()
        thread.settle()
    seen["after"] = valid_steps(directory, ISLAND)
    with mock.patch.object(checkpoint_writer, "write_durably", be_full if is_slow else real):
        begin(4)
        copiers[-1].precede()
        thread.settle()
    seen["failures"] = failures
    copiers.append(late_copier(trained.optimizer, BrokenDevice() if is_slow else None))
    begin(5)
    copiers[-1].precede()
    wait_until(lambda: not thread.is_busy)
    try:
        thread.check()
    except DilocoError as error:
        seen["raised"] = str(error)
    seen["left"] = valid_steps(directory, ISLAND)
    return seen


def wait_for_a_slow_disk(island_rank: int, directory: Path) -> list[int]:
    """Save what is waited for, with a collective timeout of a second, rank 1's disk taking two."""
    trained, thread = sharded(), SaveThread(torch.device("cpu"))
    short = dist.new_group(backend="gloo", timeout=timedelta(seconds=1))
    writer = CheckpointWriter(directory, ISLAND, trained.plan(), group=short)
    part = writer.take(
        kept_tensors(trained.model, trained.optimizer),
        {"meta": torch.ones(1)},
        copier=StateCopier(trained.optimizer),
        group=thread.group,
    )
    real = checkpoint_writer.write_durably

    def slow(path: Path, pieces: Any, **options: Any) -> None:
        time.sleep(2.0 * island_rank)
        real(path, pieces, **options)

    with mock.patch.object(checkpoint_writer, "write_durably", slow):
        thread.run(lambda: writer.save(1, part, about={}, cut=0))
    return valid_steps(directory, ISLAND)


def test_a_stop_waits_for_the_disk_of_a_rank_beyond_the_collective_timeout(tmp_path: Path) -> None:
    assert run_ranks(wait_for_a_slow_disk, 2, tmp_path) == [[1], [1]]


def test_two_ranks_write_what_they_took_and_share_a_full_disk_behind_the_training() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        for seen in run_ranks(save_behind_two_ranks, 2, directory):
            assert seen["while"] == [], "rank 1 has written nothing yet"
            assert seen["after"] == seen["left"] == [1]
            (failure,) = seen["failures"]
            assert "rank 1: " in failure and "No space left" in failure
            assert "000005: rank-00001-of-00002.safetensors: the training sta" in seen["raised"]
            assert "illegal memory access was encountered. Earlier ones stay" in seen["raised"]

        read = Checkpoint.open(directory, ISLAND, 1).read("model", "0.weight")
        assert read.flatten().tolist() == seen["taken"], "as it was when it was taken"
