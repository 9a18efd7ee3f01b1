"""Makes a whole run on this machine: a coordinator, restarted if it dies, and the islands.

A coordinator that was killed (SIGKILL) after it had got as far as serving is started again at once
and as often as that happens: somebody did it, and another start will serve, too. One that fails by
itself is restarted within a budget.

Every process is the same `diloco` command that a site would type; this module only starts them,
watches them, and ends them. What it shows and how is its caller's.

The first signal is passed on to the coordinator, which lets all islands stop after one inner step,
with a checkpoint; the second ends every process. Each process has a session of its own, so that
Ctrl-C in a terminal reaches this one alone.
"""

from __future__ import annotations

import logging
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from diloco.checkpoint.lost_journal import check_journal
from diloco.checkpoint.run_checkpoints import (
    check_run,
    check_same_run,
    choose_checkpoint,
    membership_of,
    open_journal,
    read_membership,
)
from diloco.config.load import resolved_toml
from diloco.config.schema import Config
from diloco.errors import ConfigError, CoordinatorUnavailable
from diloco.launch.page_process import PageProcess
from diloco.launch.process.children import end_all, last_words, spawn, wait_for_all
from diloco.launch.process.emulated import Emulated
from diloco.launch.process.ending import Interrupted, StopRequest
from diloco.launch.process.logs import bound_log
from diloco.launch.process.restarts import RestartBudget
from diloco.state_dir import StateDir, holder, make_directory, read_endpoint, stop_syncers

logger = logging.getLogger(__name__)

_START_S = 60.0
_LOOK_S = 0.25
_END_S = 20.0
#: Seconds in which islands that have left a stopped run are gone.
_GONE_S = 5.0
#: Seconds between the kind request to a coordinator and the one that forces it.
_ASK_AGAIN_S = 1.0
#: Restarts of a coordinator in a row, wait before the first, life that gives them back; in seconds.
_COORDINATOR_RESTARTS = (8, 0.5, 10.0)
#: Name under which a coordinator is taken down and brought back.
COORDINATOR = "coordinator"
#: Exit codes of an island that never trained: waiting for the others would be in vain.
_HOPELESS = frozenset({2, 10})


@dataclass(slots=True)
class LocalRun:
    """The processes of one run; use it as a context manager, so that nothing outlives it.

    Args:
        config: The run.
        request: What signals have asked for: one kindly, then by force.
        resume_step: Inner step of the run checkpoint to go on from; None: a new run, or one that
            goes on where it was.
        emulated: The network that this process is in, if it is not the machine's own.
        page: That is to be served as long as the run is; this object's from now on.
        environment: Variables of all its processes, beyond this one's.
        look_s: Seconds between two looks at the processes.

    Attributes:
        ended: Exit codes of the islands that have ended for good, in that order.
    """

    config: Config
    request: StopRequest = field(default_factory=lambda: StopRequest(num_graceful=1))
    resume_step: int | None = None
    emulated: Emulated | None = None
    page: PageProcess | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    look_s: float = _LOOK_S
    coordinator: subprocess.Popen[bytes] | None = None
    islands: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    syncers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    coordinator_restarts: int = 0
    _budget: RestartBudget = field(default_factory=lambda: RestartBudget(*_COORDINATOR_RESTARTS))
    _began: float = 0.0
    _seen_alive: float = 0.0
    _restart_at: float = 0.0
    _asked_pid: int = 0
    _away: set[str] = field(default_factory=set)

    @property
    def state(self) -> StateDir:
        """Where coordinator and syncer keep what is durable."""
        return StateDir(Path(self.config.coordinator.state_dir))

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
        if self.page is not None:
            self.page.close()
        end_all(self.islands.values(), _END_S)
        if self.coordinator is not None:
            self.coordinator.terminate()  # this asks it kindly, and the next one forces it
            wait_for_all([self.coordinator], _ASK_AGAIN_S)
            end_all([self.coordinator], _END_S)
        end_all(self.syncers.values(), _END_S)  # most have ended with it
        for state in (self.state, *(self.state.placed(name, 0) for name in self.syncers)):
            stop_syncers(state)

    def start(self) -> None:
        """Start the coordinator, wait for its address, start the islands.

        Raises:
            ConfigError: If a directory cannot be made.
            CoordinatorUnavailable: If the coordinator ends, or a new run's binds no address in
                time; names the log. A resumed run's reads every byte of its checkpoint before.
            Interrupted: If a signal came meanwhile: there is nothing yet to stop kindly.
        """
        is_new = not self.state.journal.exists()
        make_directory(self.state.root, "coordinator.state_dir")
        self.state.local.write_text(resolved_toml(self.config))  # whatever comes is of this start
        self.state.create(self.config.own_syncers)
        make_directory(self.config.telemetry_dir, "telemetry.dir")
        # What is resumed is durable before the coordinator binds its address: once is enough.
        resume = [] if is_new else ["--resume"]
        at = [] if self.resume_step is None else ["--at", str(self.resume_step)]
        self._start_coordinator(*resume, *at)
        deadline = time.monotonic() + (_START_S if is_new else math.inf)
        while not self._is_bound:
            assert self.coordinator is not None
            code = self.coordinator.poll()
            if code is not None or time.monotonic() > deadline:
                raise self._coordinator_failed("did not start", code)
            if self.request.number:
                raise Interrupted(self.request.number)
            time.sleep(_LOOK_S)
        for name in sorted(self.config.syncers):
            self._start_syncer(name)
        for island in sorted(self.config.islands):
            self._start_island(island)

    def wait(self, on_look: Callable[[], None]) -> int:
        """Watch until the run is over or has stopped; `on_look` is called a few times a second.

        Returns:
            0, or the exit code of the first island that failed.

        Raises:
            CoordinatorUnavailable: If the coordinator ended for good and the islands did not.
            Interrupted: If a second signal asked for the end.
        """
        while len(self.ended) < len(self.islands):
            for island, process in self.islands.items():
                code = process.poll()
                if code is None or island in self.ended or island in self._away:
                    continue
                self.ended[island] = code
                if code != 0:
                    log = self._log(f"island-{island}")
                    logger.warning("island %s has ended with exit code %d: %s", island, code, log)
                if code in _HOPELESS:
                    return code
            if self._has_stopped() or (self._asked_pid and any(self.ended.values())):
                break
            self._look_after_syncers()
            if self.page is not None:
                self.page.look(self.address)
            self._pass_on()
            self.request.check()
            on_look()
            time.sleep(self.look_s)
        return next(filter(None, self.ended.values()), 0)

    def _look_after_syncers(self) -> None:
        """Start those on machines of their own again that were killed.

        Raises:
            CoordinatorUnavailable: If one has ended by itself: the run would wait for it.
        """
        for name, process in self.syncers.items():
            if (code := process.poll()) is None or code == 0:
                continue
            if code > 0:
                log = self._log(f"site-{name}")
                error = CoordinatorUnavailable(
                    f"syncer {name} ended (exit code {code}); {last_words(log)}"
                )
                error.exit_code = code
                raise error
            logger.warning("syncer %s was killed, starting it again", name)
            self._start_syncer(name)

    def take_down(self, name: str, number: int) -> None:
        """Send a signal that ends the coordinator or an island, whose end then is nobody's failure.

        It stays away until `bring_back`.
        """
        process = self.coordinator if name == COORDINATOR else self.islands[name]
        assert process is not None
        self._away.add(name)
        process.send_signal(number)

    def bring_back(self, name: str) -> bool:
        """Start again what was taken down; false while its process has not ended."""
        process = self.coordinator if name == COORDINATOR else self.islands[name]
        assert process is not None
        if process.poll() is None:
            return False
        if name != COORDINATOR:  # its own restart starts that one
            self._start_island(name)
        self._away.discard(name)
        return True

    @property
    def is_stopped(self) -> bool:
        """Whether it was asked to, by a signal or `diloco stop`; after `wait_for_coordinator`."""
        assert self.coordinator is not None
        if self.request.number:
            return self.coordinator.returncode != 0
        membership = membership_of(self.config)
        return membership is not None and membership.is_stopped

    def wait_for_coordinator(self) -> None:
        """Give the coordinator time to note the end and to stop its syncer."""
        assert self.coordinator is not None
        wait_for_all([self.coordinator], _END_S)

    @property
    def _is_bound(self) -> bool:
        """Whether the coordinator that runs now has bound its address, and so handles signals."""
        assert self.coordinator is not None
        return self._has_bound and self.coordinator.poll() is None

    @property
    def _has_bound(self) -> bool:
        """Whether the newest coordinator has bound its address, dead or alive."""
        assert self.coordinator is not None
        endpoint = read_endpoint(self.state.coordinator)
        return endpoint is not None and endpoint.pid == self.coordinator.pid

    def _pass_on(self) -> None:
        """Ask the coordinator for a graceful stop once a signal has; a restarted one again."""
        if not self.request.number or not self._is_bound:
            return
        assert self.coordinator is not None
        if self._asked_pid != self.coordinator.pid:
            self._asked_pid = self.coordinator.pid
            self.coordinator.send_signal(signal.SIGTERM)

    def _has_stopped(self) -> bool:
        """Look after the coordinator; true when it has ended as it was asked to, seconds ago.

        True, too, when a run has finished that did not wait for the islands that are left. One that
        died is started again: at once if it was killed, else after a wait.

        Raises:
            CoordinatorUnavailable: If it ended otherwise while islands go on, or dies too often.
        """
        assert self.coordinator is not None
        code, now = self.coordinator.poll(), time.monotonic()
        if code is None:
            self._seen_alive = now
            bound_log(self._log(COORDINATOR))
            return False
        if code >= 0 and code != 1:
            if self._asked_pid == self.coordinator.pid:
                return now - self._seen_alive > _GONE_S
            if now - self._seen_alive > _END_S:
                if code == 0 and self.config.outer.is_on_arrival:
                    away = [name for name, p in self.islands.items() if p.poll() is None]
                    logger.warning("the run has ended without %s, away", ", ".join(away))
                    return True
                raise self._coordinator_failed("ended before the islands", code)
            return False
        if not self._restart_at:
            self._restart_at = now + self._restart_wait_s(code)
        if now >= self._restart_at and COORDINATOR not in self._away:
            self.coordinator_restarts += 1
            self._start_coordinator()
        return False

    def _restart_wait_s(self, code: int) -> float:
        if code == -signal.SIGKILL and self._has_bound:
            logger.warning("coordinator was killed, starting it again at once")
            self._budget.used = 0  # it had served: whatever failed before it does so no more
            return 0.0
        wait_s = self._budget.failed(self._seen_alive - self._began)
        if wait_s is None:
            died = f"died {self._budget.max_restarts + 1} times in a row"
            raise self._coordinator_failed(died, code)
        logger.warning(
            "coordinator died, starting it again, exit_code=%d wait_s=%g restarts_left=%d",
            code, wait_s, self._budget.left,
        )  # fmt: skip
        return wait_s

    def _coordinator_failed(self, how: str, code: int | None) -> CoordinatorUnavailable:
        error = CoordinatorUnavailable(
            f"the coordinator {how} (exit code {code}); {last_words(self._log(COORDINATOR))}"
        )
        error.exit_code = code if code is not None and code > 0 else error.exit_code
        return error

    def _start_coordinator(self, *options: str) -> None:
        arguments = ["coordinator", str(self.state.local), *options]
        self.coordinator = self._spawn(arguments, COORDINATOR)
        self._began = self._seen_alive = time.monotonic()
        self._restart_at = 0.0

    def _start_syncer(self, name: str) -> None:
        arguments = ["syncer", str(self.state.local), "--name", name]
        arguments += ["--coordinator", self.address]
        arguments += ["--set", f"telemetry.dir={self.config.telemetry_dir}"]
        prefix = self.emulated.prefix(name) if self.emulated else []
        self.syncers[name] = self._spawn(arguments, f"site-{name}", prefix)

    def _start_island(self, island: str) -> None:
        arguments = ["island", str(self.state.local), "--island", island]
        arguments += ["--coordinator", self.address]
        arguments += ["--output", str(self.config.telemetry_dir)]
        prefix = self.emulated.prefix(island) if self.emulated else []
        self.islands[island] = self._spawn(arguments, f"island-{island}", prefix)

    def _log(self, name: str) -> Path:
        return self.state.root / f"{name}.log"

    def _spawn(
        self, arguments: list[str], name: str, prefix: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        command = [*prefix, sys.executable, "-m", "diloco", "--log-level", "info", *arguments]
        return spawn(command, self._log(name), environment={**os.environ, **self.environment})


def without_links(config: Config, num_islands: int) -> Config:
    """Keep the first islands of a run and take the shaped link away: a dry run of the training.

    What loss it ends with is no matter.

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
    evaluation = config.evaluation.model_copy(update={"max_nats_per_byte": 0.0})
    return config.model_copy(
        update={"islands": kept, "transport": transport, "evaluation": evaluation}
    )


def check_place(state_dir: Path, *, fresh: bool) -> None:
    """Refuse a `state_dir` that holds an earlier run, unless it may be moved aside.

    Args:
        state_dir: Where the run will live.
        fresh: Whether an earlier run may be moved aside; one that has no version 0, because a
            first start failed, may be in any case.

    Raises:
        ConfigError: If there is one and `fresh` is false, or if it is still under way.
    """
    if not _is_used(state_dir):
        return
    state = StateDir(state_dir)
    if (pid := holder(state.coordinator_lock)) is not None:
        raise ConfigError(
            f"a run is under way in {state_dir} (coordinator: process {pid}). Watch it "
            f"({_status_of(state)}), stop it, or give another coordinator.state_dir"
        )
    is_of_a_start = state.resolved.exists() or state.local.exists()
    has_begun = not is_of_a_start or any(state.root.rglob("fragment-*/*.record"))
    if has_begun and not fresh:
        raise ConfigError(
            f"{state_dir} already holds a run. Go on with it with --resume (from its newest "
            f"checkpoint; before there is one, from what it has published), move it aside with "
            f"--fresh, or give another coordinator.state_dir (--set "
            f"coordinator.state_dir=runs/NAME)"
        )


def _status_of(state: StateDir) -> str:
    endpoint = read_endpoint(state.coordinator)
    return f"diloco status {endpoint.address if endpoint is not None else 'HOST:PORT'}"


def make_room(state_dir: Path) -> Path | None:
    """Move an earlier run aside, to the first free `NAME.N`, after `check_place`.

    Returns:
        Where it was moved to; None when there was none.
    """
    if not _is_used(state_dir):
        return None
    stop_syncers(StateDir(state_dir))  # one that outlived its run would go on writing there
    moved = next(path for path in _numbered(state_dir) if not path.exists())
    state_dir.rename(moved)
    return moved


def _is_used(directory: Path) -> bool:
    return directory.is_dir() and any(directory.iterdir())


def _numbered(path: Path) -> Iterator[Path]:
    number = 1
    while True:
        yield path.with_name(f"{path.name}.{number}")
        number += 1


def check_no_events(config: Config) -> None:
    """Refuse a telemetry directory in which another run's events would be mixed with this one's.

    Those below `coordinator.state_dir` are not: `make_room` moves them aside with it.

    Raises:
        ConfigError: If there are events.
    """
    directory = config.telemetry_dir
    is_moved = directory.resolve().is_relative_to(Path(config.coordinator.state_dir).resolve())
    if not is_moved and any(directory.glob("events-*.jsonl")):
        raise ConfigError(
            f"telemetry.dir = {directory} already holds the events of a run; give another one"
        )


def find_resume_step(
    config: Config, at: int | None, announce: Callable[[str], None], *, start: str
) -> int | None:
    """Find the newest run checkpoint that is whole, or insist on the one of inner step `at`.

    As `choose_checkpoint` does; None where the run goes on without one.

    Args:
        config: The run.
        at: Inner step of the checkpoint asked for; None takes the newest.
        announce: Called with what was found, skipped and taken.
        start: What the user types to start the run, shown with ``--resume --at STEP`` behind it.

    Raises:
        ConfigError: If there is no run, it is under way, it is of another file, it has finished,
            or it has no such checkpoint; says what to type instead.
    """
    state = StateDir(Path(config.coordinator.state_dir))
    if (pid := holder(state.coordinator_lock)) is not None:
        raise ConfigError(
            f"--resume: the run in {state.root} is under way (coordinator: process {pid}). Watch "
            f"it: {_status_of(state)}; to stop it with a checkpoint: kill -TERM {pid}"
        )
    check_run(state, start=start)
    check_same_run(
        config,
        state,
        f"Go on with the run that is there: diloco local {shlex.quote(str(state.resolved))} "
        f"--resume\nStart this one elsewhere: {start} --set coordinator.state_dir=runs/NAME",
    )
    with open_journal(state.journal) as journal:
        check_journal(state, journal)
        membership = read_membership(config, journal)
    return choose_checkpoint(config, state, membership, at, announce, start=start)
