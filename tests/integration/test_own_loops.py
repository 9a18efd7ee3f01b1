"""Two loops of a user's own: one is killed and comes back, or leaves before the end of the run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco.cli.main import app
from tests.waiting import exit_code, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

EXAMPLE = Path(__file__).resolve().parents[2] / "configs/examples/2-own-loop/own-loop.toml"
CHANGES = """
[telemetry]
tensorboard = true
"""
LOOP = """
import sys, time
import torch
import diloco

island, last_step = sys.argv[1], int(sys.argv[2])
config = diloco.load_config("own-loop.toml", island=island)
torch.manual_seed(config.run.seed)
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
with diloco.connect(config) as connection:
    outer = diloco.DiLoCo(model, config.outer, transport=connection)
    for inner_step in range(outer.start_step, last_step):
        inputs = torch.randn(32, 16)
        loss = (model(inputs) - inputs.flip(-1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.1)
        outer.log(loss=loss.item())
        outer.step(num_tokens=512)
    outer.finish()
"""


class Loops:
    """Processes of one run, each with a file of what it says."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.state = directory / "runs" / "own-loop"
        (directory / "own-loop.toml").write_text(EXAMPLE.read_text() + CHANGES)
        (directory / "loop.py").write_text(LOOP)
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.directory / name).open("ab") as said:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=self.directory,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                stdout=said,
                stderr=said,
            )
        self.processes.append(process)
        return process

    def island(self, name: str, last_step: int = 60) -> subprocess.Popen[bytes]:
        return self.start(name, "loop.py", name, str(last_step))

    def said(self, name: str) -> str:
        return (self.directory / name).read_text()

    def steps(self, island: str) -> int:
        path = self.state / "telemetry" / f"events-{island}-0.jsonl"
        return path.read_text().count('"inner_step", ') if path.exists() else 0

    def until_said(self, name: str, text: str, within_s: float = 60.0) -> None:
        wait_until(lambda: text in self.said(name), within_s, what=lambda: self.said(name))

    def report(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, object]]:
        monkeypatch.chdir(self.directory)
        result = CliRunner().invoke(app, ["report", "own-loop.toml"])
        assert result.exit_code == 0, result.output
        summary = json.loads((self.state / "summary.json").read_text())
        return {island["island"]: island for island in summary["islands"]}


@pytest.fixture
def loops(tmp_path: Path) -> Iterator[Loops]:
    loops = Loops(tmp_path)
    try:
        loops.start("coordinator", "-m", "diloco", "coordinator", "own-loop.toml")
        loops.until_said("coordinator", "listens on")
        yield loops
    finally:
        for process in loops.processes:
            process.kill()
            process.wait()


def test_all_say_that_an_island_is_away_and_the_run_goes_on_when_it_is_back(
    loops: Loops, monkeypatch: pytest.MonkeyPatch
) -> None:
    east, west = loops.island("eu-west"), loops.island("us-east")
    wait_until(lambda: loops.steps("us-east") > 12, 60)
    west.send_signal(signal.SIGKILL)

    for name in ("coordinator", "eu-west"):
        loops.until_said(name, "island us-east is away: no report for more than 10 s")
    again = loops.island("us-east")
    loops.until_said("eu-west", "no island is away any more")

    for process in (again, east, loops.processes[0]):
        assert exit_code(process, 90) == 0, loops.said("coordinator")
    told = loops.report(monkeypatch)
    assert [told[name]["num_returns"] for name in ("eu-west", "us-east")] == [0, 1]
    assert [path.name for path in (loops.state / "telemetry" / "tensorboard").iterdir()]


def test_who_leaves_early_says_so_and_the_other_trains_on_without_it(
    loops: Loops, monkeypatch: pytest.MonkeyPatch
) -> None:
    east, west = loops.island("eu-west"), loops.island("us-east", last_step=25)

    assert exit_code(west, 60) == 0
    assert "after inner step 25 of 60: island us-east leaves the run" in loops.said("us-east")
    for process in (east, loops.processes[0]):
        assert exit_code(process, 50) == 0, loops.said("coordinator")
    text = "island us-east is out of the run, and the others go on without it"
    assert text in loops.said("eu-west") and text in loops.said("coordinator")
    told = loops.report(monkeypatch)
    assert [told[name]["num_steps"] for name in ("eu-west", "us-east")] == [60, 25]
