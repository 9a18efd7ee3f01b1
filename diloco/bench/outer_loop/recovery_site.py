"""Real processes of one run for `diloco bench recovery`, ended and started again at will.

Coordinator, its syncer and islands whose inner step is a sleep; times are read from the lines that
the islands write, `unix_s` being everybody's clock on one machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from diloco.bench.syncer.control_plane import control_plane
from diloco.config.schema import Config
from diloco.errors import IslandFailed
from diloco.launch.process.logs import tail
from diloco.state_dir import StateDir, holder, read_endpoint

_LOOK_S = 0.02
#: Whose events are those of rounds.
SYNCER = "syncer"

Event = dict[str, Any]  # JSON values


class Site:
    """A run under way.

    Attributes:
        state: Its state directory.
    """

    def __init__(self, config: Config, run_file: Path, directory: Path, step_s: float) -> None:
        """Assign only."""
        self.state = StateDir(Path(config.coordinator.state_dir))
        self._run_file = run_file
        self._directory = directory
        self._step_s = step_s
        self._islands: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, island: str) -> float:
        """Start an island; returns when, in unix time."""
        command = [
            sys.executable,
            "-m",
            "diloco.bench.outer_loop.recovery_island",
            str(self._run_file),
        ]
        command += ["--island", island, "--output", str(self._directory)]
        command += ["--step-s", str(self._step_s)]
        began = time.time()
        with open(self._log(island), "ab") as log:
            self._islands[island] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        return began

    def kill(self, island: str) -> float:
        """SIGKILL an island; returns when, in unix time."""
        self._islands[island].kill()
        killed = time.time()
        self._islands[island].wait()
        return killed

    def send(self, island: str, number: int) -> float:
        """Send a signal to an island; returns when, in unix time."""
        self._islands[island].send_signal(number)
        return time.time()

    def kill_syncer(self) -> float:
        """SIGKILL the syncer; returns the seconds until another one serves."""
        pid = holder(self.state.store_lock)
        assert pid is not None, "there is no syncer"
        os.kill(pid, signal.SIGKILL)
        began = time.monotonic()

        def is_back() -> bool:
            endpoint = read_endpoint(self.state.syncer)
            return endpoint is not None and endpoint.pid != pid and endpoint.address != ""

        self.wait_for(is_back, "another syncer", 120.0)
        return time.monotonic() - began

    def syncer_written_bytes(self) -> int:
        """Bytes that the syncer has written to files since its start."""
        lines = (Path("/proc") / str(holder(self.state.store_lock)) / "io").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("wchar:")))

    def events(self, who: str, kind: str) -> list[Event]:
        """Events of one kind that an island, or the syncer, has written so far."""
        path = self._directory / f"events-{who}-0.jsonl"
        if who == SYNCER:
            path = self.state.root / "telemetry" / "events-syncer.jsonl"
        found = []
        for line in path.read_text().split("\n") if path.exists() else ():
            with contextlib.suppress(ValueError):  # torn by a kill
                event = json.loads(line)
                if event["kind"] == kind:
                    found.append(event)
        return found

    def wait_for(self, done: Callable[[], bool], what: str, at_most_s: float) -> None:
        """Wait until something is so.

        Raises:
            IslandFailed: If it is not in time, or an island has ended by itself.
        """
        until = time.monotonic() + at_most_s
        while not done():
            for island, process in self._islands.items():
                if process.poll() not in (None, -signal.SIGKILL):
                    raise IslandFailed(
                        f"island {island} of the bench ended with exit code {process.returncode}; "
                        f"its log says:\n{tail(self._log(island))}"
                    )
            if time.monotonic() > until:
                raise IslandFailed(f"the bench waited {at_most_s:g} s for {what} in vain")
            time.sleep(_LOOK_S)

    def end(self) -> None:
        """End everything."""
        for process in self._islands.values():
            process.kill()
            process.wait()
        if (pid := holder(self.state.coordinator_lock)) is not None:
            os.kill(pid, signal.SIGKILL)

    def _log(self, island: str) -> Path:
        return self._directory / f"{island}.log"


@contextlib.contextmanager
def running(config: Config, directory: Path, step_s: float) -> Iterator[Site]:
    """Run coordinator and syncer of a run, and all its islands, while the context lasts."""
    with control_plane(config) as run_file:
        site = Site(config, run_file, directory, step_s)
        try:
            for island in sorted(config.islands):
                site.start(island)
            yield site
        finally:
            site.end()
