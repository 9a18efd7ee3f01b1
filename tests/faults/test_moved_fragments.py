"""Fragments move between syncers at work, and away from one that is lost for good.

Real processes, each with directories of its own, a real S3 server. The published values are those
of a run with one syncer next to its coordinator, bit for bit, and no island starts again.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.bench.network.s3_server import s3_server
from diloco.checkpoint.published import read_published
from diloco.config.load import load_config
from diloco.state_dir import StateDir
from tests.placed_run import ISLANDS, PlacedRun
from tests.run_files import write_run
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 240


def operate(run: PlacedRun, command: str, *arguments: str) -> str:
    address = load_config(run.run_file).coordinator.address
    command_line = [sys.executable, "-m", "diloco", command, address, *arguments]
    done = subprocess.run(command_line, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr + run.said()
    return done.stdout


def test_fragments_move_at_work_and_from_a_lost_syncer_and_nothing_else_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = tmp_path / "one"
    one.mkdir()
    run_file = write_run(one, dict.fromkeys(ISLANDS, ""), inner_steps=STEPS, num_fragments=4)
    subprocess.run([sys.executable, "-m", "diloco", "local", str(run_file)], check=True)
    undisturbed = read_published(StateDir(Path(load_config(run_file).coordinator.state_dir)))
    (tmp_path / "placed").mkdir()
    with s3_server(tmp_path / "s3.log") as server:
        for key, value in server.environment.items():
            monkeypatch.setenv(key, value)
        run = PlacedRun(tmp_path / "placed", server, STEPS, num_fragments=4)
        try:
            started = run.start_all("--set", "checkpoint.every_inner_steps=40")
            wait_until(lambda: run.num_versions("eu", "eu") >= 3, what=run.said)

            eu, us = run.served("eu"), run.served("us")
            assert f"fragment {eu[0]} (" in operate(
                run, "move", "--fragments", str(eu[0]), "--to", "us"
            )
            wait_until(lambda: run.served("us") == sorted([eu[0], *us]), what=run.said)
            assert run.served("eu") == eu[1:]
            before = run.num_versions("us", "us")
            wait_until(lambda: run.num_versions("us", "us") > before + 1, what=run.said)

            for target in ("us", "eu"):  # it stays where it is, whatever was done meanwhile
                operate(run, "move", "--fragments", str(eu[1]), "--to", target)
            wait_until(lambda: " moves from " not in operate(run, "status"), what=run.said)
            assert run.served("eu") == eu[1:]

            run.signal("eu", "eu", signal.SIGKILL)
            shutil.rmtree(run.directory / "eu")
            assert f"fragment {eu[1]} (" in operate(run, "move", "--from", "eu")
            wait_until(lambda: run.served("us") == sorted([*eu, *us]), what=run.said)

            operate(run, "pause")  # the run would not wait for a machine that is not there yet
            other = run.start("other", "syncer", "--name", "eu")  # which has nothing any more
            arguments = "--fragments", str(us[0]), "--to", "eu"
            assert f"fragment {us[0]} (" in operate(run, "move", *arguments)
            wait_until(lambda: run.served("eu", "other") == [us[0]], what=run.said)
            operate(run, "unpause")

            for process in (*(started[name] for name in (*ISLANDS, "coordinator", "us")), other):
                assert process.wait(200) == 0, run.said()
            assert run.served("us") == sorted([*eu, us[1]])
            there = [(each.version, each.digest) for each in undisturbed.fragments]
            assert run.published() == there
            assert run.num_starts() == [1, 1]
        finally:
            run.end()
