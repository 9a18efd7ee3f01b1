"""The example loop of configs/examples, as a person would run it: stopped once, and resumed."""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.waiting import said_by

pytestmark = pytest.mark.timeout(300)

EXAMPLES = Path(__file__).resolve().parents[2] / "configs" / "examples" / "2-own-loop"
ISLANDS = ("east", "west")
INNER_STEPS = 240


def write_run(directory: Path) -> Path:
    text = (EXAMPLES / "nano.toml").read_text()
    for old, new in (
        ("inner_steps = 200", f"inner_steps = {INNER_STEPS}"),
        ('state_dir = "runs/nano"', f'state_dir = "{directory / "state"}"'),
    ):
        assert old in text
        text = text.replace(old, new)
    path = directory / "nano.toml"
    path.write_text(text)
    return path


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def train(run_file: Path, *options: str, is_stopped: bool) -> dict[str, str]:
    """Run coordinator and both islands; returns what the islands printed."""
    text_file = argparse.__file__
    script = str(EXAMPLES / "train_nano.py")
    with started("-m", "diloco", "coordinator", str(run_file), *options) as coordinator:
        assert coordinator.stdout is not None
        said = ""
        while "listens on" not in said:
            line = coordinator.stdout.readline()
            said += line
            assert line, f"the coordinator ended: {said}"
        with (
            started(script, str(run_file), ISLANDS[0], text_file) as east,
            started(script, str(run_file), ISLANDS[1], text_file) as west,
        ):
            first = ""
            if is_stopped:
                assert east.stdout is not None
                first = east.stdout.readline()  # it trains
                coordinator.send_signal(signal.SIGTERM)
            told = {name: p.communicate()[0] for name, p in (("east", east), ("west", west))}
            told["east"] = first + told["east"]
        assert (east.returncode, west.returncode) == (0, 0), told
        said, _ = said_by(coordinator, 30)
        assert coordinator.returncode == (128 + signal.SIGTERM if is_stopped else 0), said
    return told


def held_out(told: str) -> tuple[int, float]:
    (found,) = re.findall(r" at (\d+): held-out loss ([\d.]+)", told)
    return int(found[0]), float(found[1])


@pytest.mark.slow
def test_the_example_trains_stops_and_goes_on(tmp_path: Path) -> None:
    run_file = write_run(tmp_path)

    first = train(run_file, is_stopped=True)
    stop_step, loss = held_out(first["east"])
    assert 0 < stop_step < INNER_STEPS
    assert held_out(first["west"]) == (stop_step, loss), "what is published is everybody's"
    for island in ISLANDS:
        checkpoints = tmp_path / "state" / "checkpoints" / "nano" / island
        assert (checkpoints / f"{stop_step}.pt").is_file()

    rest = train(run_file, "--resume", is_stopped=False)
    assert held_out(rest["east"]) == held_out(rest["west"])
    last_step, last_loss = held_out(rest["east"])
    assert last_step == INNER_STEPS
    assert last_loss < min(loss, 4.0)
    first_events = re.findall(r"^east (\d+): ", rest["east"], re.MULTILINE)
    assert int(first_events[0]) == stop_step + 1, "the outcome of what was in flight"
