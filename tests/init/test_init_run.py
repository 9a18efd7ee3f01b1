"""Runs that `diloco init` wrote, started by the files that it wrote: real processes."""

from __future__ import annotations

import configparser
import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco.cli.main import app
from tests.waiting import exit_code, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ISLANDS = ("island-east", "island-west")
NAMES = ("coordinator", *ISLANDS)


class Hosts:
    """A home for all hosts, and a PATH whose `ssh` runs here what is to run there."""

    def __init__(self, root: Path, *words: str) -> None:
        self.home = root / "home"
        self.run = root / "trial"
        self.site = self.home / "diloco-trial"
        (root / "bin").mkdir()
        self.site.mkdir(parents=True)
        self._path = f"{root / 'bin'}:{os.environ['PATH']}"
        self._groups: list[int] = []
        for name, script in (
            ("ssh", f'cd {self.home}; exec bash -c "$2"'),
            ("diloco", f'exec {sys.executable} -m diloco "$@"'),
        ):
            (root / "bin" / name).write_text(f"#!/bin/bash\n{script}\n")
            (root / "bin" / name).chmod(0o755)
        base = ["init", str(self.run), "--yes", "--model", "tiny"]
        base += ["--island", "east=localhost", "--island", "west=localhost"]
        base += ["--coordinator", f"127.0.0.1:{two_free_ports()}"]
        made = CliRunner().invoke(app, [*base, *words], catch_exceptions=False)
        assert made.exit_code == 0, made.output

    def ssh(self, action: str) -> None:
        started = self.start(["bash", str(self.run / "launch" / "ssh.sh"), action], self.run)
        wait_until(lambda: started.poll() is not None, 60, progress=self.logs, what=self.logs)
        assert started.returncode == 0, self.logs()

    def start(self, command: list[str], directory: Path) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PATH": self._path, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, cwd=directory, env=environment, start_new_session=True)
        self._groups.append(process.pid)
        return process

    def log(self, name: str) -> str:
        path = self.site / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def logs(self) -> str:
        return "\n".join(f"--- {name}\n{self.log(name)[-3000:]}" for name in NAMES)

    def wait_for(self, words: str, name: str = "coordinator") -> None:
        wait_until(lambda: words in self.log(name), 60, progress=self.logs, what=self.logs)

    def wait_for_steps(self) -> None:
        """Wait until each island has said once more that it has made inner steps."""

        def said() -> list[int]:
            return [self.log(name).count(", step ") for name in ISLANDS]

        before = said()
        wait_until(
            lambda: all(now > then for now, then in zip(said(), before, strict=True)),
            60,
            progress=self.logs,
            what=self.logs,
        )

    def is_running(self, name: str) -> bool:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int((self.site / f"{name}.pid").read_text()), 0)
            return True
        return False

    def close(self) -> None:
        """End what still runs: the syncer with its coordinator, ranks with their supervisors."""
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            for group in self._groups:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, number)
            if number == signal.SIGTERM and any(map(is_alive, self._groups)):
                time.sleep(1)


def is_alive(group: int) -> bool:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, 0)
        return True
    return False


def two_free_ports() -> int:
    """Find a port that is free, and so is the next one."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first, contextlib.suppress(OSError):
            port = int(first.getsockname()[1])
            with socket.create_server(("127.0.0.1", port + 1)):
                return port


@pytest.fixture
def hosts(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Hosts]:
    made = Hosts(tmp_path, *request.param)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("hosts", [("--steps", "4", "--launcher", "ssh")], indirect=True)
def test_two_sites_train_to_the_end_by_the_script_that_was_written(hosts: Hosts) -> None:
    hosts.ssh("copy")
    hosts.ssh("start")

    hosts.wait_for("the run 'trial' has finished")
    for name in ISLANDS:
        hosts.wait_for("is done", name)


@pytest.mark.parametrize("hosts", [("--steps", "100000", "--launcher", "ssh")], indirect=True)
def test_a_run_stopped_by_the_script_goes_on_when_it_is_started_again(hosts: Hosts) -> None:
    hosts.ssh("copy")
    hosts.ssh("start")
    hosts.wait_for_steps()

    hosts.ssh("stop")
    assert "the run 'trial' is stopped" in hosts.log("coordinator")
    assert not [name for name in NAMES if hosts.is_running(name)]
    hosts.ssh("start")

    hosts.wait_for("start every island: ")  # what a resume says
    hosts.wait_for_steps()
    hosts.ssh("stop")
    assert hosts.log("coordinator").count("the run 'trial' is stopped") == 2


@pytest.mark.parametrize("hosts", [("--steps", "4", "--launcher", "systemd")], indirect=True)
def test_two_sites_train_to_the_end_by_the_commands_of_their_units(hosts: Hosts) -> None:
    processes = []
    for path in sorted((hosts.run / "launch" / "systemd").iterdir()):
        unit = configparser.RawConfigParser(strict=True)
        unit.read_string(path.read_text().replace("\\\n", " "))
        _, *words = shlex.split(unit["Service"]["ExecStart"])
        processes.append(hosts.start([sys.executable, "-m", "diloco", *words], hosts.run))

    assert [exit_code(process, 300) for process in processes] == [0, 0, 0]
