"""What the loss of the coordinator's machine costs, with its disk, again and again.

An S3 server (moto) is a process of its own, behind a line that delays every byte. Two islands merge
on arrival; of two state directories one has the coordinator and its syncer, the other a standby.
Each time all processes of the first are killed, its directory is removed, and a standby is started
in a new one. What islands merged, with which digests, is compared with the journal at the end.

    lease      from the kill until the standby has taken the run over
    published  from then until it publishes a version
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diloco.bench.network.s3_server import (
    BUCKET,
    delayed,
    environment_at,
    free_port,
    s3_server,
)
from diloco.checkpoint.run_checkpoints import open_journal
from diloco.config.load import load_config, resolved_toml
from diloco.errors import CoordinatorUnavailable
from diloco.extras import require
from diloco.launch.process.children import end_all, last_words, spawn
from diloco.report.rows import Column, Report, Requirement, Watch
from diloco.report.summary import event_lines
from diloco.state_dir import StateDir, holder

_ISLANDS = ("east", "west")
_PATIENCE_S, _LOOK_S, _END_S = 120.0, 0.02, 10.0
_RUN = """
[run]
name = "failover"
seed = 1
inner_steps = 1000000
state = "s3://{bucket}/failover"
[model]
preset = "tiny"
[data]
sequence_length = 32
[inner.optimizer]
lr = 2e-3
warmup_steps = 2
[outer]
preset = "decoupled"
inner_steps_per_round = 16
num_fragments = 2
grace = "1s"
[coordinator]
state_dir = "{place}/0"
address = "{addresses}"
[transport]
rpc_timeout = "10s"
[evaluation]
num_sequences = 8
[telemetry]
dir = "{place}/telemetry"
"""
_ISLAND = "[islands.{name}]\nranks = 1\ntokens_per_inner_step = 128\n"
_COLUMNS = (
    Column("takeover", "machine lost"),
    Column("versions", "published before", ",d"),
    Column("lease_s", "taken over after, s", ".1f"),
    Column("published_s", "next version after, s", ".1f"),
    Column("pause_s", "longest inner step, s", ".2f"),
)


@dataclass(frozen=True, slots=True)
class FailoverSetting:
    """What is measured.

    Attributes:
        num_takeovers: Machines that are lost, one after the other.
        delay_ms: To the object store, one way.
        published_s: Bar of the first version after the lease's end.
        blocked: Bar of the share of time for which islands waited.
    """

    num_takeovers: int = 10
    delay_ms: float = 15.0
    published_s: float = 30.0
    blocked: float = 0.02


def run(watch: Watch, *, setting: FailoverSetting | None = None) -> Report:
    """Lose machine after machine.

    Raises:
        ConfigError: If moto or obstore is not installed.
        CoordinatorUnavailable: If a machine does not do what is waited for.
    """
    setting = setting or FailoverSetting()
    require("diloco bench failover", "obstore")
    with tempfile.TemporaryDirectory(prefix="diloco-bench-failover-") as directory:
        place = Path(directory)
        with (
            s3_server(place / "s3.log") as server,
            delayed(server.port, setting.delay_ms / 1e3) as line,
        ):
            return _Failover(setting, place, environment_at(line)).measure(watch)


class _Failover:
    def __init__(
        self, setting: FailoverSetting, place: Path, environment: Mapping[str, str]
    ) -> None:
        self._setting = setting
        self._place = place
        self._with = ["env", *(f"{key}={value}" for key, value in environment.items())]
        self._ports = free_port(), free_port()
        addresses = ",".join(f"127.0.0.1:{port}" for port in self._ports)
        text = _RUN.format(bucket=BUCKET, place=place, addresses=addresses)
        text += "".join(_ISLAND.format(name=name) for name in _ISLANDS)
        (place / "run.toml").write_text(text, encoding="utf-8")
        self._run_file = place / "resolved.toml"
        self._run_file.write_text(resolved_toml(load_config(place / "run.toml")), encoding="utf-8")
        self._machines: list[subprocess.Popen[bytes]] = []

    def measure(self, watch: Watch) -> Report:
        rows: list[dict[str, Any]] = []
        islands: list[subprocess.Popen[bytes]] = []
        try:
            self._start(0)
            self._wait("the coordinator to listen", lambda: self._state(0).coordinator.exists())
            islands = [self._start_island(name) for name in _ISLANDS]
            self._wait("the first versions", lambda: self._newest(0) >= 3)
            for number in range(self._setting.num_takeovers):
                watch("a machine is lost", number, self._setting.num_takeovers)
                rows.append(self._lose(number))
            lost, differing = self._compared(self._setting.num_takeovers)
        finally:
            end_all(islands, _END_S)
            for number in range(len(self._machines)):
                self._kill(number)
        blocked = self._blocked()
        slowest = max(row["published_s"] for row in rows)
        requirements = [
            Requirement("published versions that are lost", lost, 0, "versions"),
            Requirement("digests that differ", differing, 0, "versions"),
            Requirement(
                "the first version after the lease's end", slowest, self._setting.published_s, "s"
            ),
            Requirement("islands' time blocked", blocked, self._setting.blocked, ""),
        ]
        typical = statistics.median(row["published_s"] for row in rows)
        rows.append({"takeover": "median", "published_s": typical, "pause_s": self._pause()})
        return Report("failover", asdict(self._setting), _COLUMNS, rows, requirements)

    def _lose(self, number: int) -> dict[str, Any]:
        """Lose a machine while the next one stands by; returns what that costs."""
        self._start(number + 1, "--standby")
        log = self._place / f"{number + 1}.log"
        self._wait("the standby to wait", lambda: "waiting for its end" in _text(log))
        before = self._newest(number)
        self._wait("versions in between", lambda: self._newest(number) >= before + 4)
        before = self._newest(number)
        self._kill(number)
        began = time.monotonic()
        shutil.rmtree(self._state(number).root)
        self._wait("the standby to take over", lambda: "has been silent for" in _text(log))
        taken = time.monotonic()
        self._wait("the next version", lambda: self._newest(number + 1) > before)
        published = time.monotonic()
        return {
            "takeover": str(number + 1),
            "versions": before,
            "lease_s": taken - began,
            "published_s": published - taken,
        }

    def _compared(self, last: int) -> tuple[int, int]:
        """Count versions that an island merged and the journal has not, or as another one."""
        self._wait("some more versions", lambda: self._newest(last) > 0)
        time.sleep(1.0)
        merged = self._merged()
        deadline = time.monotonic() + _END_S  # what was published last is still to be reported
        while (lost := merged.keys() - (known := self._journal(last)).keys()) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.2)
        differing = [k for k, found in merged.items() if found != {known.get(k)} and k not in lost]
        return len(lost), len(differing)

    def _merged(self) -> dict[tuple[int, int], set[str]]:
        merged: dict[tuple[int, int], set[str]] = {}
        for event in self._events("fragment_merged"):
            key = event["fragment_id"], event["version"]
            merged.setdefault(key, set()).add(event["digest"])
        return merged

    def _journal(self, number: int) -> dict[tuple[int, int], str]:
        copy = self._place / "journal.sqlite"
        for end in ("", "-wal"):
            source = self._state(number).journal.with_name(f"journal.sqlite{end}")
            if source.exists():
                shutil.copy(source, copy.with_name(f"journal.sqlite{end}"))
        with open_journal(copy) as journal:
            headers = [json.loads(header) for header in journal.headers()]
        return {(h["fragment_id"], h["version"]): h["digest"] for h in headers}

    def _blocked(self) -> float:
        """Share of their time for which the islands waited for a merge."""
        blocked = sum(event["blocked_s"] for event in self._events("fragment_merged"))
        times = [event["unix_s"] for event in self._events("inner_step")]
        return float(blocked / (len(_ISLANDS) * (max(times) - min(times))))

    def _pause(self) -> float:
        """Longest time between two inner steps of an island, in seconds."""
        times: dict[str, list[float]] = {}
        for event in self._events("inner_step"):
            times.setdefault(event["island"], []).append(event["unix_s"])
        gaps = [b - a for own in times.values() for a, b in itertools.pairwise(sorted(own))]
        return max(gaps)

    def _events(self, kind: str) -> Iterator[Mapping[str, Any]]:
        for path in sorted((self._place / "telemetry").glob("events-*.jsonl")):
            for event in event_lines(path):
                if event["kind"] == kind and event.get("island") in _ISLANDS:
                    yield event

    # -- processes -------------------------------------------------------------------------------

    def _start(self, number: int, *options: str) -> None:
        settings = (
            f"coordinator.state_dir={self._state(number).root}",
            f"coordinator.listen=127.0.0.1:{self._ports[number % 2]}",
        )
        words = [word for setting in settings for word in ("--set", setting)]
        command = [*self._with, sys.executable, "-m", "diloco", "coordinator", str(self._run_file)]
        log = self._place / f"{number}.log"
        self._machines.append(spawn([*command, *words, *options], log))

    def _start_island(self, name: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "diloco", "island", str(self._run_file)]
        command += ["--island", name, "--output", str(self._place / "telemetry")]
        return spawn(command, self._place / f"{name}.log")

    def _kill(self, number: int) -> None:
        """Kill all processes of a machine."""
        state = self._state(number)
        while state.root.exists() and (pid := holder(state.store_lock)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self._machines[number].kill()
        self._machines[number].kill()
        self._machines[number].wait()

    def _state(self, number: int) -> StateDir:
        return StateDir(self._place / str(number))

    def _newest(self, number: int) -> int:
        files = self._state(number).store.glob("fragment-*/v*.*")
        names = [path.name for path in files if not path.name.endswith((".tmp", ".fetched"))]
        return max((int(name[1:13]) for name in names), default=0)

    def _wait(self, what: str, is_so: Callable[[], bool]) -> None:
        until = time.monotonic() + _PATIENCE_S
        while not is_so():
            if time.monotonic() > until:
                logs = sorted(self._place.glob("*.log"))
                said = "; ".join(last_words(log) for log in logs)
                raise CoordinatorUnavailable(f"waited for {_PATIENCE_S:g} s for {what}: {said}")
            time.sleep(_LOOK_S)


def _text(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
