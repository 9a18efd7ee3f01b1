"""Sweeps of the laboratory: finished points stay, whatever is killed; the commands' words."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco.cli.main import app
from diloco.errors import ConfigError
from diloco.simulations.lab.cache import Cache
from diloco.simulations.lab.config import Flags
from diloco.simulations.lab.point import points_of
from diloco.simulations.lab.sweep import run_points
from tests.simulations.test_lab import BASE, ON_ARRIVAL, TINY, tiny
from tests.waiting import wait_until

LAB = f"""
run = "{BASE}"
num_islands = 2
tokens_per_inner_step = 96
threads = 1
points = 1
seeds = [1, 2, 3]
set = {json.dumps([*TINY, "run.inner_steps=60"])}
[sweep]
"outer.uplink_codec" = ["float32", "int4"]
"""


@pytest.fixture
def lab_file(tmp_path: Path) -> Path:
    path = tmp_path / "lab.toml"
    path.write_text(LAB)
    return path


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_sweep_that_was_killed_loses_no_finished_point(lab_file: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    command = [sys.executable, "-m", "diloco", "lab", str(lab_file), "--cache", str(cache)]
    sweep = subprocess.Popen([*command, "--processes", "1"], stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: len(list(cache.glob("*.json"))) >= 2)
    finally:
        sweep.send_signal(signal.SIGKILL)
        sweep.wait()
    kept = {path: path.stat().st_mtime_ns for path in cache.glob("*.json")}
    assert 2 <= len(kept) < 6

    finished = run_points(points_of(lab_file), Cache(cache), num_processes=1)

    assert finished.num_cached == len(kept)
    assert len(finished.results) == 6
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_points_of_several_processes_are_those_of_one(lab_file: Path, tmp_path: Path) -> None:
    flags = Flags(settings=("run.inner_steps=12",), overrides=("seeds=[1]", "warm_steps=4"))
    points = points_of(lab_file, flags)

    besides = run_points(points, Cache(tmp_path / "besides"), num_processes=2)
    here = run_points(points, Cache(tmp_path / "here"), num_processes=1)

    assert [r["readings"] for r in besides.results] == [r["readings"] for r in here.results]


def test_a_damaged_result_is_trained_again(tmp_path: Path) -> None:
    cache, point = Cache(tmp_path), tiny("run.inner_steps=6")
    run_points([point], cache, num_processes=1)
    (path,) = tmp_path.glob("*.json")
    os.truncate(path, 100)

    again = run_points([point], cache, num_processes=1)

    assert again.num_cached == 0
    assert run_points([point], cache, num_processes=1).num_cached == 1


def test_progress_is_whole_when_the_last_point_is_done_and_not_before(tmp_path: Path) -> None:
    lossy = tiny(*ON_ARRIVAL, "run.inner_steps=12", failures__dropped=0.5)
    shown: list[tuple[str, int, int]] = []

    finished = run_points(
        [lossy, tiny("run.inner_steps=6")],
        Cache(tmp_path),
        num_processes=1,
        show=lambda *what: shown.append(what),
    )

    planned = 2 * (12 + 6)
    assert finished.results[0]["inner_steps"] > 2 * 12, "it ends by merged tokens"
    assert [done for _, done, _ in shown] == sorted(done for _, done, _ in shown)
    assert [what for what, done, total in shown if done == total] == [
        "1 of 2 points, inner steps",  # the last is being kept
        "2 of 2 points, inner steps",
    ]
    assert {total for _, _, total in shown} == {planned}


def test_whatever_decides_a_figure_is_in_its_fingerprint() -> None:
    points = [
        tiny(),
        tiny("outer.uplink_codec=int8"),
        tiny("run.seed=2"),
        tiny("inner.optimizer.lr=0.001"),
        tiny(num_islands=3),
        tiny(threads=2),
        tiny(step__noise=0.1),
        tiny(prune__share=0.5),
        tiny(prune__share=0.5, prune__by="size"),
        tiny(link__profile="thin-5M-60ms"),
    ]

    assert len({point.fingerprint() for point in points}) == len(points)
    assert tiny().fingerprint() == tiny("coordinator.state_dir=elsewhere").fingerprint()


def test_the_command_shows_readings_and_writes_json_and_picture(tmp_path: Path) -> None:
    settings = [f"--set={text}" for text in (*TINY, "lab.points=3", "lab.threads=1")]
    settings += ["--set=lab.tokens_per_inner_step=96", "--islands=2", f"--run={BASE}"]
    out, plot, cache = tmp_path / "out.json", tmp_path / "loss.png", tmp_path / "cache"
    words = ["lab", "run", *settings, f"--cache={cache}", f"--json={out}", f"--plot={plot}"]

    shown = CliRunner().invoke(app, words, env={"COLUMNS": "80"})

    assert shown.exit_code == 0, shown.output
    report = json.loads(out.read_text())
    assert len(report["points"][0]["readings"]) == 3
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert all(len(line) <= 80 for line in shown.stdout.splitlines()[:4])

    trace, timeline = tmp_path / "trace.json", tmp_path / "timeline.png"
    seen = CliRunner().invoke(app, [*words, f"--trace={trace}", f"--timeline={timeline}"])

    assert seen.exit_code == 0, seen.output
    named = [e["cat"] for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    assert named.count("compute") == 2 * 24, "trained again, though its result was there"
    assert timeline.read_bytes().startswith(b"\x89PNG")


def test_a_timeline_of_several_runs_is_refused() -> None:
    words = ["lab", "run", f"--run={BASE}", "--islands=2", "--seeds=1,2", "--trace=trace.json"]

    refused = CliRunner().invoke(app, words)

    assert isinstance(refused.exception, ConfigError)
    assert "--seeds 1" in str(refused.exception)
