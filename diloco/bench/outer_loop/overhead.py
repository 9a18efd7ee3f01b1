"""What the outer loop costs the island that trains: time of a step, and CPU time of a round.

One process of one rank trains in turns, block by block: a plain loop, the same loop with a
`DiLoCo` that has nothing to do, plain again, and with all fragments sent and merged. Neighbouring
blocks see the same machine, so what differs within a cycle is the outer loop's; a round is a cycle.
The training thread has a CPU of its own; the island's IO thread shares another with coordinator and
syncer, real processes behind real gRPC.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field

from diloco.bench.counted_process import prepare_process
from diloco.bench.outer_loop import overhead_island
from diloco.bench.outer_loop.overhead_island import ISLAND, Block, Cycle, Measured
from diloco.bench.outer_loop.phases import CRITICAL_PHASES, IO_PHASES
from diloco.bench.syncer.control_plane import control_plane
from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.report.rows import Column, Report, Requirement
from diloco.report.statistics import Interval

_LOOK_S = 0.5
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
class Setting:
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
    model: dict[str, int] = field(
        default_factory=lambda: {  # 9,933,696 parameters
            "dim": 384,
            "num_layers": 6,
            "num_heads": 6,
            "num_kv_heads": 3,
            "ffn_dim": 1024,
        }
    )

    @property
    def overlap_steps(self) -> int:
        """Inner steps between a send and its merge."""
        return self.block_steps - self.num_fragments - 1


SETTING = Setting()


def run_overhead(setting: Setting, *, on_progress: Callable[[int], None]) -> Report:
    """Train, time and judge.

    Args:
        setting: What is trained.
        on_progress: Hears now and then how many cycles are done.

    Raises:
        ConfigError: If this process may use one CPU only.
        DilocoError: If coordinator, syncer or island fail.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="diloco-overhead-") as directory:
        measured = _measure(setting, _config(setting, f"{directory}/run"), on_progress)
    rows = figures(measured)
    return Report(
        bench="overhead",
        setting={**asdict(setting), "parameters": measured.num_parameters},
        columns=_COLUMNS,
        rows=[{"figure": name, "unit": unit, **value.as_dict()} for name, unit, value in rows],
        requirements=_requirements({name: value for name, _, value in rows}),
        wall_s=time.monotonic() - began,
    )


def _measure(setting: Setting, config: Config, on_progress: Callable[[int], None]) -> Measured:
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        raise ConfigError(
            f"bench overhead needs two CPUs, one for the training thread and one for all else; "
            f"this process may use only CPU {cpus[0]} (see taskset)"
        )
    context = multiprocessing.get_context("spawn")
    done = context.Value("q", 0)
    with (
        control_plane(config, cpu=cpus[1]) as run_file,
        ProcessPoolExecutor(1, context, prepare_process, (done,)) as pool,
    ):
        measuring = pool.submit(
            overhead_island.measure,
            run_file,
            training_cpu=cpus[0],
            other_cpu=cpus[1],
            block_steps=setting.block_steps,
            num_cycles=setting.num_cycles,
        )
        while not wait([measuring], _LOOK_S).done:
            on_progress(done.value)
        return measuring.result()


def _config(setting: Setting, state_dir: str) -> Config:
    return Config.model_validate(
        {
            "run": {
                "name": "overhead",
                "seed": 1,
                "inner_steps": 2 * setting.block_steps * setting.num_cycles,
            },
            "model": setting.model,
            "data": {"sequence_length": setting.sequence_length},
            "inner": {"optimizer": {"lr": 1e-3, "schedule": "constant"}},
            "outer": {
                "preset": "streaming",
                "inner_steps_per_round": 2 * setting.block_steps,
                "num_fragments": setting.num_fragments,
                "phases": [setting.block_steps + p + 1 for p in range(setting.num_fragments)],
                "overlap_steps": setting.overlap_steps,
                "uplink_codec": setting.codec,
                "downlink_codec": setting.codec,
            },
            "coordinator": {"state_dir": state_dir},
            "evaluation": {"num_sequences": 1},
            "islands": {
                ISLAND: {"ranks": 1, "tokens_per_inner_step": setting.tokens_per_inner_step}
            },
        }
    )


def figures(measured: Measured) -> list[tuple[str, str, Interval]]:
    """Compute every figure, one value a cycle: (name, unit, interval)."""
    cycles, per = measured.cycles, _NANO / measured.num_parameters

    def over(figure: Callable[[Cycle], float]) -> Interval:
        return Interval.of([figure(cycle) for cycle in cycles])

    def phase(name: str) -> Interval:
        return over(lambda cycle: per * cycle.flying.phases_s[name])

    def slowed_s(cycle: Cycle) -> float:
        plain_s = (cycle.plain.trained_cpu_s + cycle.plain_again.trained_cpu_s) / 2
        return cycle.flying.trained_cpu_s - plain_s

    def rest_of(total: Callable[[Cycle], float], names: Sequence[str]) -> Interval:
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


def _median_s(block: Block) -> float:
    return statistics.median(block.steps_s)


def _mean_s(block: Block) -> float:
    return statistics.fmean(block.steps_s)


def _plain_step_s(cycle: Cycle) -> float:
    return statistics.median([*cycle.plain.steps_s, *cycle.plain_again.steps_s])


def _flying_ratio(cycle: Cycle) -> float:
    """Divide means: what flying costs falls on few steps of the block."""
    return 2 * _mean_s(cycle.flying) / (_mean_s(cycle.plain) + _mean_s(cycle.plain_again))


def _added_cpu_s(cycle: Cycle) -> float:
    return cycle.flying.cpu_s - (cycle.plain.cpu_s + cycle.plain_again.cpu_s) / 2
