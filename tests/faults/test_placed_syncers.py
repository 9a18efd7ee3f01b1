"""Syncers on machines of their own: lost with their disks, replaced, resumed, taken over.

Real processes, each with directories of its own, a real S3 server. The published values are those
of a run with one syncer next to its coordinator, bit for bit.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.bench.network.s3_server import S3Server, s3_server
from diloco.checkpoint.published import read_published
from diloco.config.load import load_config
from diloco.errors import Fenced
from diloco.state_dir import StateDir, holder
from tests.placed_run import ISLANDS, SYNCERS, PlacedRun
from tests.run_files import write_run
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    with s3_server(tmp_path_factory.mktemp("s3") / "log") as server:
        yield server


@pytest.fixture
def run(tmp_path: Path, server: S3Server, monkeypatch, request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    for key, value in server.environment.items():
        monkeypatch.setenv(key, value)
    run = PlacedRun(tmp_path, server, getattr(request, "param", 120))
    yield run
    run.end()


@pytest.fixture(scope="module")
def with_one_syncer(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str]]:
    """What the same run publishes with one syncer, next to its coordinator."""
    directory = tmp_path_factory.mktemp("one")
    run_file = write_run(directory, dict.fromkeys(ISLANDS, ""), inner_steps=120)
    command = [sys.executable, "-m", "diloco", "local", str(run_file)]
    subprocess.run(command, check=True, capture_output=True)
    state = StateDir(Path(load_config(run_file).coordinator.state_dir))
    return [(each.version, each.digest) for each in read_published(state).fragments]


def test_a_lost_machine_is_replaced_by_any_other(
    run: PlacedRun, with_one_syncer: list[tuple[int, str]]
) -> None:
    started = run.start_all()
    wait_until(lambda: run.num_versions("us", "us") >= 4, what=run.said)

    run.signal("us", "us", signal.SIGKILL)
    shutil.rmtree(run.directory / "us")
    other = run.start("other", "syncer", "--name", "us")

    for name in ISLANDS:
        assert started[name].wait(200) == 0, run.said()
    for process in (started["coordinator"], started["eu"], other):
        assert process.wait(60) == 0, run.said()
    assert "taking syncer us over" in (run.directory / "other.log").read_text()
    assert run.published() == with_one_syncer


@pytest.mark.slow  # those before and after it start machines again as well
def test_a_supervisor_is_killed_a_child_ended_and_both_go_on(run: PlacedRun) -> None:
    started = run.start_all()
    wait_until(lambda: run.num_versions("us", "us") >= 2, what=run.said)

    started["us"].kill()  # its child lives
    started["us"].wait()
    again = run.start("us", "syncer", "--name", "us")
    child = holder(run.syncer("eu", "eu").store_lock)
    assert child is not None
    os.kill(child, signal.SIGTERM)  # by mistake: its supervisor starts another one
    for name in ISLANDS:
        assert started[name].wait(200) == 0, run.said()
    for process in (started["coordinator"], started["eu"], again):
        assert process.wait(60) == 0, run.said()


def test_ctrl_c_stops_a_syncer_with_a_word_and_lets_go_of_its_place(run: PlacedRun) -> None:
    started = run.start_all()
    wait_until(lambda: run.num_versions("us", "us") >= 2, what=run.said)

    started["us"].send_signal(signal.SIGINT)

    assert started["us"].wait(30) == 130, run.said()
    said = (run.directory / "us.log").read_text()
    assert "rounds of its fragments wait until it is started again" in said
    assert "Traceback" not in said and not run.pids("us", "us")
    other = run.start("other", "syncer", "--name", "us")
    for name in ISLANDS:
        assert started[name].wait(200) == 0, run.said()
    assert other.wait(60) == 0, run.said()
    assert "silent" not in (run.directory / "other.log").read_text()


@pytest.mark.slow
def test_a_syncer_that_ends_while_its_disk_is_full_starts_once_there_is_room(
    run: PlacedRun,
) -> None:
    started = run.start_all()
    wait_until(lambda: run.num_versions("us", "us") >= 2, what=run.said)
    log = run.directory / "us.log"

    resource.prlimit(started["us"].pid, resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
    child = holder(run.syncer("us", "us").store_lock)
    assert child is not None
    os.kill(child, signal.SIGKILL)
    wait_until(
        lambda: "waiting: the disk is full; make some room" in log.read_text(), what=run.said
    )
    unlimited = resource.RLIM_INFINITY, resource.RLIM_INFINITY
    resource.prlimit(started["us"].pid, resource.RLIMIT_FSIZE, unlimited)

    for process in started.values():
        assert process.wait(200) == 0, run.said()


@pytest.mark.slow  # half a minute; the test before replaces a machine as well
def test_a_stopped_run_is_resumed_where_other_machines_are(
    run: PlacedRun, with_one_syncer: list[tuple[int, str]]
) -> None:
    started = run.start_all()
    wait_until(lambda: run.num_versions("us", "us") >= 3, what=run.said)

    started["coordinator"].send_signal(signal.SIGINT)
    for name, process in started.items():
        assert process.wait(60) == (130 if name == "coordinator" else 0), run.said()
    resumed = [run.start("control", "coordinator", "--resume")]
    resumed += [run.start("other", "syncer", "--name", name) for name in SYNCERS]
    resumed += [run.start(name, "island", "--island", name) for name in ISLANDS]

    for process in resumed:
        assert process.wait(200) == 0, run.said()
    assert run.published() == with_one_syncer


@pytest.mark.slow
def test_a_coordinator_that_resumes_takes_syncers_that_live_with_it(
    run: PlacedRun, with_one_syncer: list[tuple[int, str]]
) -> None:
    """They hear of the new timeline, and take their stores to its checkpoint by themselves."""
    often = ["--set", "checkpoint.every_inner_steps=20"]
    started = run.start_all(*often)
    wait_until(run.has_checkpoint, what=run.said)

    for name in ("coordinator", *ISLANDS):
        started[name].kill()
        started[name].wait()
    resumed = [run.start("control", "coordinator", "--resume", *often)]
    resumed += [run.start(name, "island", "--island", name, *often) for name in ISLANDS]

    for process in (*resumed, started["eu"], started["us"]):
        assert process.wait(200) == 0, run.said()
    assert "to timeline 1" in run.syncer("us", "us").syncer_log.read_text()
    assert run.published() == with_one_syncer


@pytest.mark.slow
@pytest.mark.parametrize("run", [1500], indirect=True)
def test_one_that_was_frozen_finds_its_place_taken(run: PlacedRun) -> None:
    started = run.start_all()
    wait_until(lambda: run.num_versions("us", "us") >= 4, what=run.said)
    refused = run.start("other", "syncer", "--name", "us")
    assert refused.wait(60) == 2
    assert "which is at work" in (run.directory / "other.log").read_text()
    standby = run.start("other", "syncer", "--name", "us", "--standby")
    run.signal("us", "us", signal.SIGSTOP)
    frozen = run.num_versions("us", "us")
    wait_until(lambda: run.num_versions("other", "us") > frozen, what=run.said)

    run.signal("us", "us", signal.SIGCONT)

    assert started["us"].wait(60) == Fenced.exit_code, run.said()
    assert not run.pids("us", "us")
    for name in (*ISLANDS, "coordinator", "eu"):
        assert started[name].wait(200) == 0, run.said()
    assert standby.wait(60) == 0, run.said()
