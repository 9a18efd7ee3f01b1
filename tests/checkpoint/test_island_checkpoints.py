"""The built-in loop's checkpoints: a disk that is full, and an island that starts again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from diloco.checkpoint.checkpoints import valid_steps
from tests.served_run import ServedRun
from tests.waiting import run_command

pytestmark = pytest.mark.timeout(120)


def run_rank(served: ServedRun, output: Path) -> subprocess.CompletedProcess[str]:
    """Run the only rank of the island east to its end."""
    arguments = ["--config", str(served.run_file), "--island", "east"]
    arguments += ["--coordinator", served.address, "--output", str(output)]
    return run_command(
        [sys.executable, "-m", "diloco.launch.rank", *arguments],
        100,
        env={**os.environ, "OMP_NUM_THREADS": "1", "RANK": "0", "WORLD_SIZE": "1"},
    )


def events(output: Path, kind: str) -> list[dict[str, Any]]:
    lines = (output / "events-east-0.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def log(output: Path) -> str:
    return (output / "east-0.log").read_text()


def test_training_goes_on_when_no_checkpoint_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "state" / "checkpoints").mkdir(parents=True)
    (tmp_path / "state" / "checkpoints" / "east").write_text("in the way, as a full disk is")
    with ServedRun(tmp_path, {"east": ""}, ["checkpoint.every_inner_steps=3"]) as served:
        ended = run_rank(served, tmp_path / "out")

    assert ended.returncode == 0, ended.stderr
    failed = events(tmp_path / "out", "checkpoint_failed")
    assert [event["inner_step"] for event in failed] == [3, 6]
    assert "no checkpoint after inner step 3, earlier ones stay: rank 0: " in failed[0]["reason"]
    assert f"Make room in checkpoint.dir = {tmp_path / 'state'}" in failed[0]["reason"]
    assert failed[0]["reason"] in log(tmp_path / "out")
    assert len(events(tmp_path / "out", "inner_step")) == 8
    assert served.reports["east"].checkpoint_steps == []
    assert served.leaves[0].exit_code == 0


def test_a_stop_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "state" / "checkpoints").mkdir(parents=True)
    (tmp_path / "state" / "checkpoints" / "east").write_text("in the way")
    with ServedRun(tmp_path, {"east": ""}, inner_steps=5000) as served:
        served.hold()
        ended = run_rank(served, tmp_path / "out")

    assert ended.returncode == 1
    assert "can be resumed from an earlier checkpoint only" in served.leaves[0].reason
    assert not served.leaves[0].is_stopped


@pytest.mark.slow
def test_a_returning_island_takes_its_inner_optimizer_from_its_newest_checkpoint(
    tmp_path: Path,
) -> None:
    with ServedRun(tmp_path, {"east": ""}, inner_steps=600) as served:
        served.hold()
        first = run_rank(served, tmp_path / "first")
        served.go_on()
        second = run_rank(served, tmp_path / "second")

    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    (stop_step,) = valid_steps(tmp_path / "state" / "checkpoints", "east")
    (written,) = events(tmp_path / "first", "checkpoint_written")
    assert written["inner_step"] == stop_step
    assert written["bytes"] > 0
    assert not events(tmp_path / "first", "island_ended")
    assert [leave.is_stopped for leave in served.leaves] == [True, False]
    (rejoined,) = events(tmp_path / "second", "island_rejoined")
    assert f"inner optimizer of inner step {stop_step} taken" in log(tmp_path / "second")
    steps = events(tmp_path / "second", "inner_step")
    assert steps[0]["inner_step"] == rejoined["inner_step"] + 1
    assert rejoined["inner_step"] <= stop_step < rejoined["inner_step"] + 5
    assert steps[-1]["inner_step"] == 600
    assert served.reports["east"].checkpoint_steps == [stop_step]
    (ended,) = events(tmp_path / "second", "island_ended")
    assert ended["incarnation"] == 2
