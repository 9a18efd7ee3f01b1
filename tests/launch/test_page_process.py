"""The page that a coordinator starts: refused early, started again, and gone with it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco.cli.main import app
from diloco.config.load import load_config
from diloco.errors import ConfigError
from diloco.launch.page_process import PageProcess
from diloco.state_dir import StateDir, stop_syncers
from tests.run_files import write_run
from tests.waiting import wait_until


@pytest.mark.parametrize("command", ["coordinator", "local"])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--listen 0.0.0.0:0", "give --certificate and --key and --token-file"),
        ("--acts", "give --token-file"),
        ("--certs nowhere", "the page asks the coordinator as an operator: "),
        ("--listen 'x", "quote it as a shell does"),
    ],
)
def test_what_its_options_lack_is_refused_before_the_run_begins(
    command: str, options: str, said: str, tmp_path: Path
) -> None:
    run_file = write_run(tmp_path, {"east": ""})

    result = CliRunner().invoke(app, [command, str(run_file), "--page-options", options])

    assert isinstance(result.exception, ConfigError), result.output
    assert said in str(result.exception)
    assert not (tmp_path / "state").exists()


def test_what_fails_while_the_page_is_looked_after_ends_no_run(tmp_path: Path) -> None:
    config = load_config(write_run(tmp_path, {"east": ""}), ["transport.certs=nowhere"])
    Path(config.coordinator.state_dir).mkdir(parents=True)
    told: list[str] = []

    def announce(line: str) -> None:
        told.append(line)
        raise BrokenPipeError("nobody reads the output any more")

    page = PageProcess(config, ["--no-such-option"], socket.socket(), announce)

    def has_ended() -> bool:
        page.look("127.0.0.1:1")
        return bool(told)

    wait_until(has_ended)
    page.look("127.0.0.1:1")
    page.close()
    (line,) = told
    assert "the run goes on without" in line and "No such option" in line
    assert line.endswith("diloco page 127.0.0.1:1 --certs=nowhere --no-such-option")


@pytest.mark.slow
def test_the_page_of_a_coordinator_is_started_again_on_a_full_disk_and_ends_when_it_is_killed(
    tmp_path: Path,
) -> None:
    run_file = write_run(tmp_path, {"east": ""})
    log = tmp_path / "log"
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "page.log").symlink_to("/dev/full")

    def url() -> str:
        lines = log.read_text().splitlines()
        return next((line.removeprefix("page: ") for line in lines if "page: http" in line), "")

    def answers() -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(url(), timeout=10) as reply:
            return b"test" in reply.read()
        return False

    def children() -> list[int]:
        found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        lines = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in found}
        return [pid for pid, line in lines.items() if b"--descriptor" in line]

    def is_gone() -> bool:
        with contextlib.suppress(FileNotFoundError):
            return b"--descriptor" not in Path(f"/proc/{page}/cmdline").read_bytes()
        return True

    with log.open("wb") as output:
        command = [sys.executable, "-m", "diloco", "coordinator", str(run_file), "--page"]
        environment = {**os.environ, "AWS_SECRET_ACCESS_KEY": "of-the-bucket"}
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        wait_until(url)
        assert answers()
        (page,) = children()
        assert b"of-the-bucket" not in Path(f"/proc/{page}/environ").read_bytes()
        os.kill(page, signal.SIGKILL)
        wait_until(lambda: children() not in ([], [page]) and answers())
        (page,) = children()
    finally:
        process.kill()
        process.wait()
        stop_syncers(StateDir(tmp_path / "state"))

    wait_until(is_gone, 20.0)
