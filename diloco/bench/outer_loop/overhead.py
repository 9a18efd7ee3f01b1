"""What the outer loop costs the island that trains: time of a step, and CPU time of a round.

One process of one rank trains in turns, block by block: a plain loop, the same loop with a
`DiLoCo` that has nothing to do, plain again, and with all fragments sent and merged. Neighbouring
blocks see the same machine, so what differs within a cycle is the outer loop's; a round is a cycle.
The training thread has a CPU of its own; the island's IO thread shares another with coordinator and
syncer, real processes behind real gRPC.
"""

from __future__ import annotations

import functools
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import diloco
from diloco.bench.processes import count_one, run_jobs
from diloco.bench.run_values import ISLAND, MODEL_10M, run_values
from diloco.bench.syncer.control_plane import control_plane
from diloco.config.schema import Config
from diloco.data.open import open_data
from diloco.errors import ConfigError
from diloco.island.exchange import contributions, staging
from diloco.island.lanes.parameters import canonical_parameters
from diloco.island.lanes.shards import LaneShards
from diloco.report.rows import Column, Report, Requirement, Watch
from diloco.report.statistics import Interval
from diloco.system import require_linux
from diloco.trainer.island_trainer import island_trainer, own_batches
from diloco.trainer.trainer import InnerTrainer

_P = ParamSpec("_P")
_T = TypeVar("_T")
_MILLI, _NANO = 1e3, 1e9
_PER_ROUND = "ns a parameter and round"

_COLUMNS = (
    Column("figure", "figure"),
    Column("median", "median", ".4g"),
    Column("low", "95 % from", ".4g"),
    Column("high", "to", ".4g"),
    Column("unit", "unit"),
)


@dataclass(frozen=True, slots=True)
class OverheadSetting:
    """What the island trains, and how its blocks are cut.

    A round has an idle block and one in which fragments fly: fragment p is due after the p-th step
    of that block and merged `overlap_steps` later, the last in the block's last step but one.
    """

    num_cycles: int = 31  # the first one warms up
    block_steps: int = 10
    num_fragments: int = 4
    sequence_length: int = 32
    tokens_per_inner_step: int = 32
    codec: str = "int4"
    model: Mapping[str, Any] = field(default_factory=lambda: MODEL_10M)

    @property
    def overlap_steps(self) -> int:
        """Inner steps between a send and its merge."""
        return self.block_steps - self.num_fragments - 1


SETTING = OverheadSetting()


def run(watch: Watch, *, setting: OverheadSetting = SETTING) -> Report:
    """Train, time and judge.

    Raises:
        ConfigError: If this is not Linux, or this process may use one CPU only.
        DilocoError: If coordinator, syncer or island fail.
    """
    with tempfile.TemporaryDirectory(prefix="diloco-overhead-") as directory:
        measured = _measure(setting, config_of(setting, f"{directory}/run"), watch)
    rows = figures(measured)
    return Report(
        "overhead",
        {**asdict(setting), "parameters": measured.num_parameters},
        _COLUMNS,
        [{"figure": name, "unit": unit, **value.as_dict()} for name, unit, value in rows],
        _requirements({name: value for name, _, value in rows}),
    )


def _measure(setting: OverheadSetting, config: Config, watch: Watch) -> MeasuredOverhead:
    require_linux("diloco bench overhead, which gives threads their CPUs,", "measure there")
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        raise ConfigError(
            f"bench overhead needs two CPUs, one for the training thread and one for all else; "
            f"this process may use only CPU {cpus[0]} (see taskset)"
        )
    with control_plane(config, cpu=cpus[1]) as run_file:
        job = functools.partial(
            measure,
            run_file,
            training_cpu=cpus[0],
            other_cpu=cpus[1],
            block_steps=setting.block_steps,
            num_cycles=setting.num_cycles,
        )
        return run_jobs({"": job}, lambda done: watch("cycles", done, setting.num_cycles))[""]


def config_of(
    setting: OverheadSetting, state_dir: str, island: Mapping[str, Any] | None = None
) -> Config:
    """Write the run; `island` is what its only island has besides tokens and one rank."""
    outer = {
        "preset": "streaming",
        "inner_steps_per_round": 2 * setting.block_steps,
        "num_fragments": setting.num_fragments,
        "phases": [setting.block_steps + p + 1 for p in range(setting.num_fragments)],
        "overlap_steps": setting.overlap_steps,
        "uplink_codec": setting.codec,
        "downlink_codec": setting.codec,
    }
    values = run_values(
        "overhead",
        setting.model,
        outer,
        inner_steps=2 * setting.block_steps * setting.num_cycles,
        sequence_length=setting.sequence_length,
        tokens=setting.tokens_per_inner_step,
        island=island,
        state_dir=state_dir,
        # The default, Muon, takes nine tenths of such a step on one CPU, and hides the outer loop.
        inner={"optimizer": {"name": "adamw", "lr": 1e-3, "schedule": "constant"}},
    )
    return Config.model_validate(values)


def figures(measured: MeasuredOverhead) -> list[tuple[str, str, Interval]]:
    """Compute every figure, one value a cycle: (name, unit, interval)."""
    cycles, per = measured.cycles, _NANO / measured.num_parameters

    def over(figure: Callable[[TimedCycle], float]) -> Interval:
        return Interval.of([figure(cycle) for cycle in cycles])

    def phase(name: str) -> Interval:
        return over(lambda cycle: per * cycle.flying.phases_s[name])

    def slowed_s(cycle: TimedCycle) -> float:
        plain_s = (cycle.plain.trained_cpu_s + cycle.plain_again.trained_cpu_s) / 2
        return cycle.flying.trained_cpu_s - plain_s

    def rest_of(total: Callable[[TimedCycle], float], names: Sequence[str]) -> Interval:
        return over(lambda c: per * (total(c) - sum(c.flying.phases_s[name] for name in names)))

    return [
        ("step, plain loop", "ms", over(lambda cycle: _MILLI * _plain_step_s(cycle))),
        ("step, session idle", "ms", over(lambda cycle: _MILLI * _median_s(cycle.idle))),
        ("step, fragments in flight", "ms", over(lambda cycle: _MILLI * _mean_s(cycle.flying))),
        (_IDLE, "x", over(lambda cycle: _median_s(cycle.idle) / _plain_step_s(cycle))),
        ("in flight over plain", "x", over(_flying_ratio)),
        (_CRITICAL, _PER_ROUND, over(lambda cycle: per * cycle.flying.outer_s)),
        (f"{_CRITICAL}, CPU", _PER_ROUND, over(lambda cycle: per * cycle.flying.outer_cpu_s)),
        *((f"  {name}", _PER_ROUND, phase(name)) for name in CRITICAL_PHASES),
        ("  rest", _PER_ROUND, rest_of(lambda c: c.flying.outer_cpu_s, [*CRITICAL_PHASES])),
        (_ALL_CPU, _PER_ROUND, over(lambda cycle: per * _added_cpu_s(cycle))),
        ("  inner steps, slowed", _PER_ROUND, over(lambda cycle: per * slowed_s(cycle))),
        *((f"  {name}", _PER_ROUND, phase(name)) for name in IO_PHASES),
        (
            "  rest of the other threads",
            _PER_ROUND,
            rest_of(lambda c: _added_cpu_s(c) - slowed_s(c) - c.flying.outer_cpu_s, [*IO_PHASES]),
        ),
    ]


_IDLE = "session idle over plain"
_CRITICAL = "critical path (DiLoCo.step)"
_ALL_CPU = "all CPU beyond training"


def _requirements(rows: dict[str, Interval]) -> list[Requirement]:
    return [
        Requirement("step, plain loop", rows["step, plain loop"].median, 100.0, "ms"),
        Requirement(f"{_IDLE}, lower bound", rows[_IDLE].low, 1.01, "x"),
        Requirement(_CRITICAL, rows[_CRITICAL].median, 4.0, _PER_ROUND),
        Requirement(_ALL_CPU, rows[_ALL_CPU].median, 30.0, _PER_ROUND),
    ]


def _median_s(block: TimedBlock) -> float:
    return statistics.median(block.steps_s)


def _mean_s(block: TimedBlock) -> float:
    return statistics.fmean(block.steps_s)


def _plain_step_s(cycle: TimedCycle) -> float:
    return statistics.median([*cycle.plain.steps_s, *cycle.plain_again.steps_s])


def _flying_ratio(cycle: TimedCycle) -> float:
    """Divide means: what flying costs falls on few steps of the block."""
    return 2 * _mean_s(cycle.flying) / (_mean_s(cycle.plain) + _mean_s(cycle.plain_again))


def _added_cpu_s(cycle: TimedCycle) -> float:
    return cycle.flying.cpu_s - (cycle.plain.cpu_s + cycle.plain_again.cpu_s) / 2


# -- the island, in a process of its own -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TimedBlock:
    """Some inner steps in a row.

    Attributes:
        steps_s: Duration of each, `DiLoCo.step` included where there is one.
        cpu_s: CPU seconds of the whole process.
        trained_cpu_s: CPU seconds of the training thread in the inner steps themselves.
        outer_s: Seconds inside `DiLoCo.step`, waiting for outcomes not counted.
        outer_cpu_s: CPU seconds of the training thread there.
        phases_s: CPU seconds of each phase of the outer loop.
    """

    steps_s: tuple[float, ...]
    cpu_s: float
    trained_cpu_s: float
    outer_s: float
    outer_cpu_s: float
    phases_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class TimedCycle:
    """Blocks in the order in which they ran; in `flying` each fragment is sent and merged once."""

    plain: TimedBlock
    idle: TimedBlock
    plain_again: TimedBlock
    flying: TimedBlock


@dataclass(frozen=True, slots=True)
class MeasuredOverhead:
    """What the island measured, and the size of its model."""

    num_parameters: int
    cycles: tuple[TimedCycle, ...]


def measure(
    run_file: Path, *, training_cpu: int, other_cpu: int, block_steps: int, num_cycles: int
) -> MeasuredOverhead:
    """Join as the run's only island and train to its end.

    Args:
        run_file: A run of `num_cycles` rounds of 2 `block_steps` inner steps; nothing is due or in
            flight in the first half of a round.
        training_cpu: CPU of the training thread.
        other_cpu: CPU of all other threads.
        block_steps: Inner steps of a block.
        num_cycles: Cycles; the first one warms up and is dropped.
    """
    os.sched_setaffinity(0, {other_cpu})  # threads started from here on stay there
    clock = PhaseClock()
    clock.install()
    config = diloco.load_config(run_file, island=ISLAND)
    data = open_data(config)
    trainer = island_trainer(config, data, own_batches(config, data, island_slot=0))
    cycles = []
    with diloco.connect(config) as connection:
        outer = diloco.DiLoCo(trainer.model, config.outer, transport=connection)
        os.sched_setaffinity(0, {training_cpu})  # of this thread alone
        loop = _Loop(trainer, outer, clock, block_steps)
        for _ in range(num_cycles):
            cycles.append(
                TimedCycle(
                    plain=loop.block(has_outer=False),
                    idle=loop.block(has_outer=True),
                    plain_again=loop.block(has_outer=False),
                    flying=loop.block(has_outer=True),
                )
            )
            assert outer.num_in_flight == 0, "a block ended with fragments in flight"
            count_one()
        outer.finish()
    parameters = canonical_parameters(trainer.model).values()
    return MeasuredOverhead(sum(p.numel() for p in parameters), tuple(cycles[1:]))


class _Loop:
    def __init__(
        self, trainer: InnerTrainer, outer: diloco.DiLoCo, clock: PhaseClock, block_steps: int
    ) -> None:
        self._trainer = trainer
        self._outer = outer
        self._clock = clock
        self._block_steps = block_steps
        self._inner_step = 0

    def block(self, *, has_outer: bool) -> TimedBlock:
        """Make and time the inner steps of one block."""
        outer, steps_s, outer_s, outer_cpu_s = self._outer, [], 0.0, 0.0
        trained_cpu_s = 0.0
        blocked_before, phases_before = outer.blocked_s, self._clock.read()
        cpu_before = time.process_time()
        for _ in range(self._block_steps):
            began, began_cpu = time.perf_counter(), time.thread_time()
            metrics = self._trainer.inner_step(self._inner_step).read()
            trained_cpu = time.thread_time()
            trained_cpu_s += trained_cpu - began_cpu
            if has_outer:
                trained = time.perf_counter()
                outer.step(num_tokens=metrics.num_tokens)
                outer_s += time.perf_counter() - trained
                outer_cpu_s += time.thread_time() - trained_cpu
            steps_s.append(time.perf_counter() - began)
            self._inner_step += 1
        return TimedBlock(
            steps_s=tuple(steps_s),
            cpu_s=time.process_time() - cpu_before,
            trained_cpu_s=trained_cpu_s,
            outer_s=outer_s - (outer.blocked_s - blocked_before),
            outer_cpu_s=outer_cpu_s,
            phases_s={
                phase: seconds - phases_before[phase]
                for phase, seconds in self._clock.read().items()
            },
        )


# -- where its CPU time goes -----------------------------------------------------------------------

#: Phase -> (owner, name) of the function that is it; critical ones run in the training thread.
CRITICAL_PHASES = {
    "collect": (LaneShards, "collect"),
    "distribute": (LaneShards, "distribute"),
}
IO_PHASES = {
    "pseudo-gradient": (contributions, "pseudo_gradient_"),
    "norm": (contributions, "l2_norm"),
    "encode": (contributions, "encode_with_feedback"),
    "decode and add": (staging, "apply_payload"),
    "digest of lanes": (staging, "lane_digest"),
}


class PhaseClock:
    """CPU seconds of every phase so far, by the clock of the thread that ran it."""

    def __init__(self) -> None:
        """Start at zero; `install` begins to count."""
        self._seconds = dict.fromkeys([*CRITICAL_PHASES, *IO_PHASES], 0.0)
        self._lock = threading.Lock()

    def install(self) -> None:
        """Wrap the functions for the rest of this process, which should be the bench's own."""
        for phase, (owner, name) in {**CRITICAL_PHASES, **IO_PHASES}.items():
            setattr(owner, name, self._timed(phase, getattr(owner, name)))

    def read(self) -> dict[str, float]:
        """Return the seconds so far, by phase."""
        with self._lock:
            return dict(self._seconds)

    def _timed(self, phase: str, function: Callable[_P, _T]) -> Callable[_P, _T]:
        @functools.wraps(function)
        def timed(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.thread_time() - began
                with self._lock:
                    self._seconds[phase] += spent

        return timed
