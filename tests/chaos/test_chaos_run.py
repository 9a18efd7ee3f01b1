"""`diloco chaos` against whole runs: what it prints, and with which code it ends."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.chaos.plan import load_plan
from tests.run_files import write_run

PLANS = Path(__file__).resolve().parents[2] / "configs" / "chaos"
SHORT = """
run = "run.toml"
set = ["islands.west.restart_wait=100ms"]
duration = "30s"
limit = "270s"
fault = [
  { kind = "kill", target = "coordinator", at = "0s" },
  { kind = "freeze", target = "west", at = "1s", lasts = "1s" },
  { kind = "kill", target = "syncer", at = "3s" },
  { kind = "kill", target = "west/0", at = "3s" },
]
"""


TWO_SYNCERS = """
run = "run.toml"
set = ["coordinator.num_syncers=2"]
duration = "60s"
limit = "270s"
fault = [
  { kind = "kill", target = "syncer-1", at = "0s" },
  { kind = "clock", target = "syncer-0", at = "12s", lasts = "2s" },
  { kind = "disk-full", target = "syncer-1", at = "15s", lasts = "2s" },
  { kind = "freeze", target = "syncer-1", at = "18s", lasts = "1s" },
  { kind = "truncate", target = "syncer-0", at = "20s" },
]
judge = { syncer_back = "60s" }
"""


OF_A_BUCKET = """
run = "run.toml"
set = [
  "run.state=s3://state/test", "outer.inner_steps_per_round=20", "outer.retained_versions=16",
]
duration = "20s"
limit = "270s"
inner_step = "60ms"
fault = [
  { kind = "cut-replies", target = "bucket", at = "0s", lasts = "3s", share = 0.5 },
  { kind = "cut", target = "bucket", at = "4s", lasts = "10s" },
  { kind = "kill", target = "syncer", at = "9s" },
  { kind = "lose-object", target = "bucket", at = "15s" },
]
"""


def chaos(plan: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "diloco", "chaos", str(plan), *options]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.timeout(400)
def test_a_short_run_survives_a_kill_of_everybody_and_a_freeze(tmp_path: Path) -> None:
    write_run(tmp_path, {"east": "", "west": ""}, inner_steps=100)
    plan = tmp_path / "plan.toml"
    plan.write_text(SHORT)

    done = chaos(plan, "--require", "--json", "-")

    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert [fault["fired"] for fault in report["faults"]] == [True] * 4
    assert len(report["findings"]) == 12
    assert all(finding["holds"] for finding in report["findings"])
    backs = {fault["fault"]["target"]: fault["back_s"] for fault in report["faults"]}
    assert backs["coordinator"] > 0 < backs["syncer"]
    assert [island["num_starts"] for island in report["islands"]] == [1, 2]


@pytest.mark.slow  # a minute; each kind of fault has tests of its own in test_bucket_faults
@pytest.mark.timeout(400)
def test_a_run_outlives_what_its_object_store_does(tmp_path: Path) -> None:
    write_run(tmp_path, {"east": "", "west": ""}, inner_steps=240)
    plan = tmp_path / "plan.toml"
    plan.write_text(OF_A_BUCKET)

    done = chaos(plan, "--require", "--json", "-")

    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert [fault["fired"] for fault in report["faults"]] == [True] * 4
    found = {finding["invariant"]: finding for finding in report["findings"]}
    assert all(finding["holds"] for finding in found.values())
    stored = found["what is published is in the object store"]
    assert stored["evidence"] == "another machine makes 2 fragments of it"
    cut, lost = report["faults"][1], report["faults"][-1]
    assert cut["note"].endswith("requests, an alarm")
    assert lost["note"].endswith("written again, an alarm")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_each_of_two_syncers_is_met_and_the_run_survives(tmp_path: Path) -> None:
    write_run(tmp_path, {"east": "", "west": ""}, inner_steps=600, num_fragments=4)
    plan = tmp_path / "plan.toml"
    plan.write_text(TWO_SYNCERS)

    done = chaos(plan, "--require", "--json", "-")

    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert [fault["fired"] for fault in report["faults"]] == [True] * 5
    assert all(finding["holds"] for finding in report["findings"])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_that_is_given_up_breaks_and_is_kept(tmp_path: Path) -> None:
    write_run(tmp_path, {"east": "", "west": ""}, inner_steps=100000)
    plan = tmp_path / "plan.toml"
    plan.write_text(SHORT.replace('"270s"', '"20s"'))

    done = chaos(plan)

    assert done.returncode == 1, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("BROKEN: "), last
    assert "the run still went on after 20 s" in done.stdout
    kept = next(line for line in done.stdout.splitlines() if line.startswith("kept: "))
    directory = Path(kept.removeprefix("kept: "))
    assert (directory / "run" / "faults.jsonl").exists()
    shutil.rmtree(directory)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("plan", ["quick", "decoupled-quick", "bucket"])
def test_every_kind_of_fault_takes_effect_on_a_real_run(plan: str) -> None:
    done = chaos(PLANS / f"{plan}.toml", "--require")

    assert done.returncode == 0, done.stdout + done.stderr
    num_faults = len(load_plan(PLANS / f"{plan}.toml").config.fault)
    assert f"faults: {num_faults} planned, {num_faults} took effect" in done.stdout
