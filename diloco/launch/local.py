"""A whole run on this machine: a coordinator (restarted if it dies) and one supervisor an island.

Every process is the same `diloco` command that a site would type; this module only starts them,
watches them, and ends them. What it shows and how is its caller's.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from diloco.config.load import resolved_toml
from diloco.config.schema import Config
from diloco.errors import ConfigError, CoordinatorUnavailable
from diloco.launch.logs import tail
from diloco.launch.state_dir import (
    StateDir,
    holder,
    make_directory,
    read_endpoint,
    stop_syncer,
)

logger = logging.getLogger(__name__)

_START_S = 60.0
_LOOK_S = 0.25
_END_S = 20.0
_RESTART_WAIT_S = 0.5
#: Exit codes of an island that never trained: waiting for the others would be in vain.
_HOPELESS = frozenset({2, 10})


@dataclass(slots=True)
class LocalRun:
    """The processes of one run; use it as a context manager, so that nothing outlives it.

    `check` is called often, and raises when the run must be given up.
    """

    config: Config
    check: Callable[[], None] = lambda: None
    coordinator: subprocess.Popen[bytes] | None = None
    islands: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    coordinator_restarts: int = 0
    _seen_alive: float = 0.0
    _logs: list[IO[bytes]] = field(default_factory=list)

    @property
    def state(self) -> StateDir:
        """Where coordinator and syncer keep what is durable."""
        return StateDir(Path(self.config.coordinator.state_dir))

    @property
    def _run_file(self) -> Path:
        """The run as every process reads it, overrides included."""
        return self.state.root / "local.toml"

    @property
    def address(self) -> str:
        """Address of the coordinator, empty while it has not bound one."""
        endpoint = read_endpoint(self.state.coordinator)
        return endpoint.address if endpoint is not None else ""

    def __enter__(self) -> LocalRun:
        """Start nothing yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """End every process that is left, the syncer included."""
        processes = [*self.islands.values(), *([self.coordinator] if self.coordinator else [])]
        _end(processes)
        stop_syncer(self.state)
        for log in self._logs:
            log.close()

    def start(self) -> None:
        """Start the coordinator, wait for its address, start the islands.

        Raises:
            ConfigError: If a directory cannot be made.
            CoordinatorUnavailable: If no address appears in time; names the log.
        """
        self.state.create()
        self._run_file.write_text(resolved_toml(self.config))
        make_directory(self.config.telemetry_dir, "telemetry.dir")
        self._start_coordinator()
        deadline = time.monotonic() + _START_S
        while not self.address:
            assert self.coordinator is not None
            code = self.coordinator.poll()
            if code is not None or time.monotonic() > deadline:
                raise self._coordinator_failed("did not start", code)
            self.check()
            time.sleep(_LOOK_S)
        for island in sorted(self.config.islands):
            arguments = ["island", str(self._run_file), "--island", island]
            arguments += ["--coordinator", self.address]
            arguments += ["--output", str(self.config.telemetry_dir)]
            self.islands[island] = self._spawn(arguments, f"island-{island}")

    def wait(self, on_look: Callable[[], None]) -> int:
        """Watch until the run is over; `on_look` is called a few times a second.

        Returns:
            0, or the exit code of the first island that failed.

        Raises:
            CoordinatorUnavailable: If the coordinator ended for good and the islands did not.
        """
        codes: dict[str, int] = {}
        first_failure = 0
        while len(codes) < len(self.islands):
            for island, process in self.islands.items():
                code = process.poll()
                if code is None or island in codes:
                    continue
                codes[island] = code
                first_failure = first_failure or code
                if code in _HOPELESS:
                    return code
            self._keep_coordinator()
            self.check()
            on_look()
            time.sleep(_LOOK_S)
        return first_failure

    def wait_for_coordinator(self) -> None:
        """Give the coordinator time to note the end and to stop its syncer."""
        assert self.coordinator is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.coordinator.wait(_END_S)

    def _keep_coordinator(self) -> None:
        """Start a coordinator that died again; one that ended the run is left alone."""
        assert self.coordinator is not None
        code = self.coordinator.poll()
        if code is None:
            self._seen_alive = time.monotonic()
            return
        if code >= 0 and code != 1:
            if time.monotonic() - self._seen_alive > _END_S:
                raise self._coordinator_failed("ended before the islands", code)
            return
        logger.warning("coordinator died, starting it again, exit_code=%d", code)
        time.sleep(_RESTART_WAIT_S)
        self.coordinator_restarts += 1
        self._start_coordinator()

    def _coordinator_failed(self, how: str, code: int | None) -> CoordinatorUnavailable:
        log = self._log("coordinator")
        error = CoordinatorUnavailable(
            f"the coordinator {how} (exit code {code}); its log is {log}:\n{tail(log)}"
        )
        error.exit_code = code or error.exit_code
        return error

    def _start_coordinator(self) -> None:
        self.coordinator = self._spawn(["coordinator", str(self._run_file)], "coordinator")

    def _log(self, name: str) -> Path:
        return self.state.root / f"{name}.log"

    def _spawn(self, arguments: list[str], name: str) -> subprocess.Popen[bytes]:
        log = open(self._log(name), "ab")  # noqa: SIM115 - closed in __exit__
        self._logs.append(log)
        command = [sys.executable, "-m", "diloco", "--log-level", "info", *arguments]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def without_links(config: Config, num_islands: int) -> Config:
    """Keep the first islands of a run and take the shaped link away: a dry run of the training.

    Raises:
        ConfigError: If the run has fewer islands.
    """
    if not 1 <= num_islands <= len(config.islands):
        raise ConfigError(
            f"--islands {num_islands}: the run file has {len(config.islands)} islands, give 1 to "
            f"{len(config.islands)}"
        )
    kept = {name: config.islands[name] for name in sorted(config.islands)[:num_islands]}
    transport = config.transport.model_copy(update={"link": ""})
    return config.model_copy(update={"islands": kept, "transport": transport})


def make_room(state_dir: Path, *, fresh: bool) -> Path | None:
    """See to it that `state_dir` holds no earlier run.

    Args:
        state_dir: Where the run will live.
        fresh: Whether an earlier run may be moved aside, to the first free `NAME.N`.

    Returns:
        Where an earlier run was moved to; None when there was none.

    Raises:
        ConfigError: If there is one and `fresh` is false, or if it is still under way.
    """
    if not state_dir.is_dir() or not any(state_dir.iterdir()):
        return None
    state = StateDir(state_dir)
    if (pid := holder(state.coordinator_lock)) is not None:
        raise ConfigError(
            f"a run is under way in {state_dir} (coordinator: process {pid}). Watch it with diloco "
            f"status, stop it, or give another coordinator.state_dir"
        )
    if not fresh:
        raise ConfigError(
            f"{state_dir} already holds a run. Give another coordinator.state_dir "
            f"(--set coordinator.state_dir=runs/NAME), or move it aside by itself with --fresh"
        )
    stop_syncer(state)  # one that outlived its run would go on writing to the old place
    moved = next(path for path in _numbered(state_dir) if not path.exists())
    state_dir.rename(moved)
    return moved


def _numbered(path: Path) -> Iterator[Path]:
    number = 1
    while True:
        yield path.with_name(f"{path.name}.{number}")
        number += 1


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask every living process to stop, then insist."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + _END_S
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def insist_on_no_events(directory: Path) -> None:
    """Refuse a telemetry directory in which another run's events would be mixed with this one's.

    Raises:
        ConfigError: If there are events.
    """
    if any(directory.glob("events-*.jsonl")):
        raise ConfigError(
            f"telemetry.dir = {directory} already holds the events of a run; give another one"
        )
