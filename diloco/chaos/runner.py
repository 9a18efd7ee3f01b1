"""Drives a whole run on this machine through a plan of faults, and writes down what happened.

Everything is done between two looks at the run's processes, by the one thread that also starts them
again: nothing races with a supervisor of ours. Faults are counted from the moment when every island
has begun to train.
"""

from __future__ import annotations

import contextlib
import datetime
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from diloco.chaos.bucket import Bucket, serving_bucket
from diloco.chaos.environment import ChaosEnvironment
from diloco.chaos.fault_log import FaultLog
from diloco.chaos.injector import Injector
from diloco.chaos.injectors import injector_of
from diloco.chaos.plan import COORDINATOR, ENDING, SYNCER, ChaosPlan, Kind, TimedFault, expand
from diloco.config.load import load_config
from diloco.config.schema import Config
from diloco.errors import DilocoError
from diloco.faults.process import LINES_VARIABLE, STEP_VARIABLE, VARIABLE
from diloco.launch.local import LocalRun
from diloco.launch.process.children import spawn
from diloco.launch.process.ending import StopRequest
from diloco.security.run_ca import RunCa
from diloco.state_dir import StateDir

_LOOK_S = 0.05
#: Seconds for which what is still under way is awaited once the run is over.
_PATIENCE_S = 30.0
#: The length of a run over the time in which faults come to it, at least.
_AFTERWARDS = 1.1
FAULT_LOG = "faults.jsonl"
_CERTIFICATE_DAYS = 30
_S3 = "s3://"
#: Told how many faults are over, of how many; of a run without, tokens.
Progress = Callable[[int, int], None]


@dataclass(slots=True)
class Ended:
    """The end of a run under chaos.

    Args:
        config: The run as it was made.
        exit_codes: Island -> exit code of its last supervisor; None: it did not end by itself.
        problem: Why the run did not come to its end; empty: it did.
        copy: Directory of what the object store held then; None: there is none.
    """

    config: Config
    exit_codes: dict[str, int | None]
    problem: str = ""
    copy: Path | None = None


def configured(plan: ChaosPlan, directory: Path) -> Config:
    """Load the run of a plan, to be made below `directory`.

    Raises:
        ConfigError: If it cannot be used.
    """
    place = [f"coordinator.state_dir={directory}", "telemetry.dir=", "checkpoint.dir="]
    if plan.config.certificates:
        place.append(f"transport.certs={directory / 'certs'}")
    return load_config(plan.run_file, [*plan.config.set, *place])


def faults_of(plan: ChaosPlan, config: Config) -> tuple[TimedFault, ...]:
    """Give the faults of a plan for its run."""
    return expand(
        plan.config,
        {name: island.ranks for name, island in config.islands.items()},
        list(config.syncer_shares),
        has_bucket=config.run.state.startswith(_S3),
    )


def drive(
    plan: ChaosPlan,
    config: Config,
    faults: Sequence[TimedFault],
    request: StopRequest,
    on_progress: Progress,
) -> Ended:
    """Make the run, with its faults, to its end or to the plan's limit.

    Leaves `faults.jsonl` in `coordinator.state_dir`, with what the run itself leaves there.

    Raises:
        Interrupted: If a signal asked for the end.
    """
    directory = Path(config.coordinator.state_dir)
    directory.mkdir(parents=True, exist_ok=True)
    if plan.config.certificates:
        _make_certificates(config)
    chaos_dir = directory / "chaos"
    chaos_dir.mkdir()
    environment = {
        VARIABLE: str(chaos_dir),
        STEP_VARIABLE: str(plan.config.inner_step.seconds),
        LINES_VARIABLE: ",".join({f.target for f in faults if f.kind is Kind.THIN_LINE}),
    }
    with _bucket_of(config) as there:
        if there is not None:
            environment |= there.environment
        ended = _drive(plan, config, faults, request, on_progress, environment, there)
        if there is not None:
            there.end()  # of a run that was given up
            ended.copy = _fetched(config, there)
    return ended


def _drive(
    plan: ChaosPlan,
    config: Config,
    faults: Sequence[TimedFault],
    request: StopRequest,
    on_progress: Progress,
    environment: Mapping[str, str],
    there: Bucket | None,
) -> Ended:
    directory = Path(config.coordinator.state_dir)
    run = LocalRun(config, request, environment=environment, look_s=_LOOK_S)
    problem = ""
    with FaultLog(directory / FAULT_LOG, time.monotonic, time.time) as log, run:
        duration_s = plan.config.duration.seconds
        around = ChaosEnvironment(run, Path(environment[VARIABLE]), bucket=there)
        director = Director(around, log, faults, on_progress, duration_s)
        director.limit_s = plan.config.limit.seconds
        try:
            try:
                run.start()
                code = run.wait(director.look)
                if code != 0:
                    problem = f"an island ended with exit code {code}"
                log.write("over")
                director.finish()
                run.wait_for_coordinator()
            except BaseException:
                director.thaw()
                raise
        except _GivenUp as error:
            problem = str(error)
        except DilocoError as error:
            problem = f"{type(error).__name__}: {error}"
        codes = {name: process.poll() for name, process in run.islands.items()}
    return Ended(config, codes, problem)


@contextlib.contextmanager
def _bucket_of(config: Config) -> Iterator[Bucket | None]:
    """Serve the bucket of `run.state`: one of this machine, whatever the environment names."""
    if not config.run.state.startswith(_S3):
        yield None
        return
    log = Path(config.coordinator.state_dir) / "bucket.log"
    with serving_bucket(urlsplit(config.run.state).netloc, log) as there:
        yield there


def _fetched(config: Config, there: Bucket) -> Path:
    """Make a directory of what the object store holds, as another machine would; `fetch.log`."""
    state = StateDir(Path(config.coordinator.state_dir))
    copy = state.root / "copy"
    command = ["env", *(f"{name}={value}" for name, value in there.environment.items())]
    command += [sys.executable, "-m", "diloco", "fetch", str(state.local)]
    command += ["--set", f"coordinator.state_dir={copy}"]
    spawn(command, state.root / "fetch.log").wait()
    return copy


def _make_certificates(config: Config) -> None:
    ca = RunCa(Path(config.transport.certs), lambda: datetime.datetime.now(datetime.UTC))
    ca.create(config.run.name, _CERTIFICATE_DAYS)
    islands = (f"island/{name}" for name in config.islands)
    for short in ("coordinator", "operator", *islands):
        ca.issue(short, _CERTIFICATE_DAYS, again=False)


class _GivenUp(Exception):
    """The run goes on beyond the plan's limit."""


@dataclass(slots=True)
class _Awaited:
    """A coordinator or syncer that a fault has ended, until another one serves."""

    fault: TimedFault
    pid: int
    since_s: float


class Director:
    """Does faults when their times have come, and sees what follows; pure but for its environment.

    Args:
        environment: The run.
        log: Where all is noted.
        faults: In the order of their times.
        on_progress: Called with the number of those that are over, and of all.
        duration_s: In which they come. A run that would end before the last of them is not
            outrun: a fault comes at its share of that time, counted by what has been trained.
    """

    def __init__(
        self,
        environment: ChaosEnvironment,
        log: FaultLog,
        faults: Sequence[TimedFault],
        on_progress: Progress,
        duration_s: float,
    ) -> None:
        """Assign only."""
        self._environment = environment
        self._log = log
        self._on_progress = on_progress
        self._to_come = list(faults)
        self._num_faults = len(faults)
        self._under_way: list[tuple[float, Injector]] = []
        self._awaited: list[_Awaited] = []
        self._newest: dict[int, int] = {}
        self._began_s: float | None = None
        lasting_s = max((each.at_s + each.lasts_s for each in faults), default=0.0)
        self._length_s = min(duration_s, _AFTERWARDS * lasting_s)
        self.limit_s = float("inf")

    def look(self) -> None:
        """Do what is due.

        Raises:
            _GivenUp: Beyond the limit.
        """
        now_s = self._log.now_s
        if now_s > self.limit_s:
            raise _GivenUp(
                f"the run still went on after {self.limit_s:g} s, the plan's limit: give it more, "
                f"or see the logs for what it waits for"
            )
        self._see_versions()
        self._see_who_is_back()
        if self._began_s is None:
            if not self._is_training():
                return
            self._began_s = self._log.write("training")
        self._end(now_s)
        trained, total = self._environment.trained_tokens, self._environment.run.config.total_tokens
        self._begin(max(now_s - self._began_s, self._length_s * trained / total))
        if self._num_faults:
            num_over = self._num_faults - len(self._to_come) - len(self._under_way)
            self._on_progress(num_over, self._num_faults)
        else:
            self._on_progress(min(trained, total), total)

    def finish(self) -> None:
        """Undo what is still under way once the run is over, and see what it came to."""
        for _, injector in self._under_way:
            until = time.monotonic() + _PATIENCE_S
            while not self._try_end(injector) and time.monotonic() < until:
                time.sleep(_LOOK_S)
        self._see_versions()
        self._see_who_is_back()

    def thaw(self) -> None:
        """Let processes go on that are frozen: of a run that is given up they are to end."""
        for _, injector in self._under_way:
            if injector.fault.kind is Kind.FREEZE:
                injector.end()

    def _begin(self, plan_s: float) -> None:
        for fault in [each for each in self._to_come if each.at_s <= plan_s]:
            injector = injector_of(self._environment, fault)
            taken = [other.place for _, other in self._under_way if other.place is not None]
            if injector.place in taken:  # they would undo each other: one after the other
                continue
            is_process = fault.role in (COORDINATOR, SYNCER)
            pid = self._environment.pid(fault.target) if is_process else None
            at_s = self._log.now_s
            if injector.begin():
                self._log.write(
                    "begun",
                    number=fault.number,
                    kind=fault.kind,
                    target=fault.target,
                    note=injector.note,
                )
                self._to_come.remove(fault)
                self._under_way.append((at_s + fault.lasts_s, injector))
                if pid is not None and fault.kind in ENDING:
                    # What was killed again on its way back is awaited from this kill on.
                    others = [a for a in self._awaited if a.fault.target != fault.target]
                    self._awaited = [*others, _Awaited(fault, pid, at_s)]

    def _end(self, now_s: float) -> None:
        self._under_way = [
            (end_s, injector)
            for end_s, injector in self._under_way
            if now_s < end_s or self._keeps(injector, now_s - end_s) or not self._try_end(injector)
        ]

    @staticmethod
    def _keeps(injector: Injector, beyond_s: float) -> bool:
        """Let a fault go on that has met nobody: else it would not have taken effect."""
        if not injector.is_unmet():
            return False
        injector.kept_s = beyond_s
        return True

    def _try_end(self, injector: Injector) -> bool:
        if not injector.end():
            return False
        self._log.write(
            "ended",
            number=injector.fault.number,
            fired=injector.fired,
            note=injector.note,
            is_same=injector.is_same,
            is_told=injector.is_told,
            had_chance=injector.had_chance,
            kept_s=round(injector.kept_s, 3),
        )
        return True

    def _see_who_is_back(self) -> None:
        """Note when another process serves where one was ended.

        One that lives on, frozen or with a full disk, is never back.
        """
        for awaited in tuple(self._awaited):
            target = awaited.fault.target
            if self._environment.serving_pid(target) not in (None, awaited.pid):
                seconds = self._log.now_s - awaited.since_s
                self._log.write("back", number=awaited.fault.number, seconds=round(seconds, 3))
                self._awaited.remove(awaited)

    def _see_versions(self) -> None:
        for fragment, versions in self._environment.versions().items():
            for version in versions:
                if version > self._newest.get(fragment, -1):
                    self._newest[fragment] = version
                    self._log.write("published", fragment=fragment, version=version)

    def _is_training(self) -> bool:
        return all(map(self._environment.inner_step, self._environment.run.islands))
