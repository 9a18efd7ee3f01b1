"""Syncers on machines of their own: lost with their disks, replaced, resumed, taken over.

Real processes, each with directories of its own, a real S3 server. The published values are those
of a run with one syncer next to its coordinator, bit for bit.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.bench.network.s3_server import BUCKET, S3Server, free_port, s3_server
from diloco.checkpoint.fetch import fetch_run
from diloco.checkpoint.published import read_published
from diloco.config.load import load_config
from diloco.errors import Fenced
from diloco.state_dir import StateDir, holder
from tests.run_files import write_run
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(300)

ISLANDS = ("east", "west")
SYNCERS = ("eu", "us")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    with s3_server(tmp_path_factory.mktemp("s3") / "log") as server:
        yield server


class Run:
    """A coordinator, two islands, two syncers, each process in a directory of its own."""

    def __init__(self, directory: Path, server: S3Server, steps: int) -> None:
        self.directory, self.server = directory, server
        port = free_port()
        self.run_file = write_run(directory, dict.fromkeys(ISLANDS, ""), inner_steps=steps)
        content = self.run_file.read_text()
        content = content.replace(
            'name = "test"', f'name = "test"\nstate = "s3://{BUCKET}/{directory.name}"'
        )
        content = content.replace(
            "[coordinator]",
            f'[coordinator]\naddress = "127.0.0.1:{port}"\nlisten = "127.0.0.1:{port}"',
        )
        content += "".join(f"\n[syncers.{name}]\n" for name in SYNCERS)
        self.run_file.write_text(content)
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, where: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a command of the run on the machine `where`."""
        command = [sys.executable, "-m", "diloco", "--log-level", "info", arguments[0]]
        command += [str(self.run_file), *arguments[1:]]
        command += ["--set", f"coordinator.state_dir={self.directory / where}"]
        with (self.directory / f"{where}.log").open("ab") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **self.server.environment}
            )
        self.started.append(process)
        return process

    def start_all(self, *options: str) -> dict[str, subprocess.Popen[bytes]]:
        started = {"coordinator": self.start("control", "coordinator", *options)}
        started |= {n: self.start(n, "syncer", "--name", n, *options) for n in SYNCERS}
        started |= {n: self.start(n, "island", "--island", n, *options) for n in ISLANDS}
        return started

    def syncer(self, where: str, name: str) -> StateDir:
        return StateDir(self.directory / where).placed(name, SYNCERS.index(name))

    def num_versions(self, where: str, name: str) -> int:
        files = self.syncer(where, name).store.glob("fragment-*/v*.*")
        return max((int(path.name[1:13]) for path in files), default=0)

    def has_checkpoint(self) -> bool:
        journal = self.directory / "control" / "journal.sqlite"
        if not journal.exists():
            return False
        with contextlib.closing(sqlite3.connect(journal)) as there:
            try:
                rows = there.execute("SELECT value FROM entries WHERE key = 'checkpoint'")
                return bool(rows.fetchall())
            except sqlite3.OperationalError:  # it is being made
                return False

    def pids(self, where: str, name: str) -> list[int]:
        state = self.syncer(where, name)
        locks = (state.coordinator_lock, state.store_lock)
        return [pid for lock in locks if (pid := holder(lock)) is not None]

    def signal(self, where: str, name: str, number: int) -> None:
        for pid in self.pids(where, name):
            os.kill(pid, number)

    def said(self) -> str:
        logs = sorted(self.directory.rglob("*.log"))
        return "\n".join(f"== {log}\n{log.read_text()[-2500:]}" for log in logs)

    def published(self) -> list[tuple[int, str]]:
        """Version and digest of each fragment, as the object store has them."""
        place = f"coordinator.state_dir={self.directory / 'copy'}"
        fetch_run(load_config(self.run_file, [place]), lambda line: None)
        there = read_published(StateDir(self.directory / "copy"))
        return [(each.version, each.digest) for each in there.fragments]

    def end(self) -> None:
        for where in (*SYNCERS, "other"):
            for name in SYNCERS:
                self.signal(where, name, signal.SIGCONT)
                self.signal(where, name, signal.SIGKILL)
        for process in self.started:
            process.kill()
            process.wait()


@pytest.fixture
def run(tmp_path: Path, server: S3Server, monkeypatch, request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    for key, value in server.environment.items():
        monkeypatch.setenv(key, value)
    run = Run(tmp_path, server, getattr(request, "param", 120))
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
    run: Run, with_one_syncer: list[tuple[int, str]]
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


def test_a_supervisor_is_killed_a_child_ended_and_both_go_on(run: Run) -> None:
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


def test_ctrl_c_stops_a_syncer_with_a_word_and_lets_go_of_its_place(run: Run) -> None:
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


def test_a_stopped_run_is_resumed_where_other_machines_are(
    run: Run, with_one_syncer: list[tuple[int, str]]
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


def test_a_coordinator_that_resumes_takes_syncers_that_live_with_it(
    run: Run, with_one_syncer: list[tuple[int, str]]
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
def test_one_that_was_frozen_finds_its_place_taken(run: Run) -> None:
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
