"""The machine of coordinator and syncer is lost, disk and all; another one goes on with the run.

Real processes, a real S3 server. What was published is in the bucket, so that nothing is published
twice or lost, and every token counts once.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from diloco.bench.network.s3_server import BUCKET, S3Server, free_port, s3_server
from diloco.config.load import load_config
from diloco.errors import Fenced
from diloco.island.layout import build_schedule
from diloco.report.summary import read_events
from diloco.state_dir import StateDir, holder
from tests.run_files import indexed_headers, write_run
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(300)

ISLANDS = ("east", "west")
STEPS = 120


class Site:
    """A machine of the control plane: its own directory and port."""

    def __init__(self, run_file: Path, root: Path, port: int, environment: Mapping[str, str]):
        self.run_file, self.root, self.environment = run_file, root, environment
        self.state = StateDir(root / "state")
        self.options = ["--set", f"coordinator.state_dir={self.state.root}"]
        self.options += ["--set", f"coordinator.listen=127.0.0.1:{port}"]
        self.started: list[subprocess.Popen[bytes]] = []
        root.mkdir()

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "diloco", "coordinator", str(self.run_file), *self.options]
        with (self.root.parent / f"{self.root.name}.log").open("ab") as log:
            process = subprocess.Popen(
                [*command, *arguments],
                stdout=log, stderr=log, env={**os.environ, **self.environment},
            )  # fmt: skip
        self.started.append(process)
        return process

    @property
    def said(self) -> str:
        log, syncer = self.root.parent / f"{self.root.name}.log", self.state.syncer_log
        texts = [path.read_text() for path in (log, syncer) if path.exists()]
        return "\n".join(texts)

    def num_versions(self) -> int:
        files = self.state.store.glob("fragment-*/v*.*")
        return max((int(path.name[1:13]) for path in files), default=0)

    def pids(self) -> list[int]:
        locks = (self.state.coordinator_lock, self.state.store_lock)
        return [pid for lock in locks if (pid := holder(lock)) is not None]

    def signal_all(self, number: int) -> None:
        for pid in self.pids():
            os.kill(pid, number)

    def destroy(self) -> None:
        """Lose the machine: every process and the disk."""
        self.signal_all(signal.SIGKILL)
        shutil.rmtree(self.root)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    with s3_server(tmp_path_factory.mktemp("s3") / "log") as server:
        yield server


class Run:
    """Two islands, and two machines that can coordinate them."""

    def __init__(self, directory: Path, server: S3Server, steps: int = STEPS) -> None:
        ports = free_port(), free_port()
        self.directory, self.server, self.steps = directory, server, steps
        self.run_file = write_run(directory, dict.fromkeys(ISLANDS, ""), inner_steps=steps)
        addresses = ",".join(f"127.0.0.1:{port}" for port in ports)
        text = self.run_file.read_text()
        text = text.replace(
            'name = "test"', f'name = "test"\nstate = "s3://{BUCKET}/{directory.name}"'
        )
        text = text.replace("[coordinator]", f'[coordinator]\naddress = "{addresses}"')
        self.run_file.write_text(text)
        self.one, self.two = (
            Site(self.run_file, directory / name, port, server.environment)
            for name, port in zip(("one", "two"), ports, strict=True)
        )
        self.islands: list[subprocess.Popen[bytes]] = []

    def start_islands(self) -> None:
        for name in ISLANDS:
            command = [sys.executable, "-m", "diloco", "island", str(self.run_file)]
            command += ["--island", name, "--output", str(self.directory / "telemetry")]
            with (self.directory / f"{name}.log").open("wb") as log:
                self.islands.append(subprocess.Popen(command, stdout=log, stderr=log))

    def wait(self) -> None:
        for process in self.islands:
            assert process.wait(200) == 0, self.said

    def end(self) -> None:
        for process in self.islands:
            process.kill()
        for site in (self.one, self.two):
            site.signal_all(signal.SIGCONT)
            site.signal_all(signal.SIGKILL)
        for process in (*self.islands, *self.one.started, *self.two.started):
            process.kill()
            process.wait()

    @property
    def said(self) -> str:
        logs = [(self.directory / f"{name}.log").read_text()[-3000:] for name in ISLANDS]
        return "\n".join([*logs, self.one.said[-3000:], self.two.said[-6000:]])

    def check(self, state: StateDir, *, is_long: bool = False) -> None:
        """Every version once, every token once, the same values at both islands.

        In a long run islands may decline: so small a model learns its text by heart.
        """
        config = load_config(self.run_file)
        schedule = build_schedule(config.outer, config.run.inner_steps)
        sends = [p for step in range(1, self.steps + 1) for p in schedule.due(step)]
        headers = indexed_headers(state)
        for p in range(config.outer.num_fragments):
            own = [header for header in headers if header["fragment_id"] == p]
            last = sends.count(p) + 1
            assert [header["version"] for header in own] == list(range(last + 1))
            for island in ISLANDS:
                counted = [c for h in own for c in h["contributors"] if c["island"] == island]
                tokens = sum(c["weight_tokens"] for c in counted)
                assert is_long or tokens == self.steps * 128
        events = read_events(self.directory / "telemetry", ISLANDS)
        ends = [e for own in events.values() for e in own if e["kind"] == "island_ended"]
        assert len(ends) == len(ISLANDS)
        assert len({tuple(end["digests"]) for end in ends}) == 1


@pytest.fixture
def run(tmp_path: Path, server: S3Server, request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    run = Run(tmp_path, server, getattr(request, "param", STEPS))
    yield run
    run.end()


@pytest.mark.slow  # half a minute; test_placed_syncers loses a machine in the default suite
def test_a_lost_machine_takes_nothing_with_it(run: Run) -> None:
    first = run.one.start()
    wait_until(lambda: run.one.state.coordinator.exists(), what=lambda: run.one.said)
    standby = run.two.start("--standby")
    run.start_islands()
    wait_until(lambda: run.one.num_versions() >= 4, what=lambda: run.said)

    run.one.destroy()
    first.wait()
    run.wait()

    assert standby.wait(60) == 0, run.said
    assert "has been silent for" in run.two.said
    run.check(run.two.state)


@pytest.mark.slow
@pytest.mark.parametrize("run", [1000], indirect=True)
def test_a_machine_that_was_frozen_finds_that_it_is_not_the_holder(run: Run) -> None:
    first = run.one.start()
    wait_until(lambda: run.one.state.coordinator.exists(), what=lambda: run.one.said)
    standby = run.two.start("--standby")
    run.start_islands()
    wait_until(lambda: run.one.num_versions() >= 4, what=lambda: run.said)
    run.one.signal_all(signal.SIGSTOP)
    frozen = run.one.num_versions()
    wait_until(lambda: run.two.num_versions() > frozen, what=lambda: run.said)

    run.one.signal_all(signal.SIGCONT)

    assert first.wait(60) == Fenced.exit_code, run.said
    wait_until(lambda: not run.one.pids(), what=lambda: run.said)
    assert "another machine has taken this run over" in run.one.said
    again = run.one.start()
    assert again.wait(60) == 2
    assert "is held by" in run.one.said and "--standby" in run.one.said
    run.wait()
    assert standby.wait(60) == 0, run.said
    run.check(run.two.state, is_long=True)


@pytest.mark.slow
def test_a_bucket_that_is_away_holds_rounds_and_loses_nothing(run: Run) -> None:
    first = run.one.start()
    wait_until(lambda: run.one.state.coordinator.exists(), what=lambda: run.one.said)
    run.start_islands()
    wait_until(lambda: run.one.num_versions() >= 3, what=lambda: run.said)

    run.server.process.send_signal(signal.SIGSTOP)
    try:
        wait_until(lambda: "does not answer" in run.one.said, what=lambda: run.said)
        published = run.one.num_versions()
        time.sleep(3.0)
        assert run.one.num_versions() <= published + 1
    finally:
        run.server.process.send_signal(signal.SIGCONT)

    run.wait()
    assert first.wait(60) == 0, run.said
    run.check(run.one.state)


def test_another_run_is_refused_by_name(run: Run, tmp_path: Path) -> None:
    first = run.one.start()
    wait_until(lambda: run.one.state.coordinator.exists(), what=lambda: run.one.said)
    text = run.run_file.read_text().replace('name = "test"', 'name = "other"')
    run.two.run_file = tmp_path / "other.toml"
    run.two.run_file.write_text(text)

    assert run.two.start("--standby").wait(60) == 2

    assert "holds the run 'test', and this file is of 'other'" in run.two.said.replace("\n", " ")
    first.terminate()
    first.terminate()
