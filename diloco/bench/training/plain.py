"""What the native trainer costs against plain PyTorch: one rank, one thread, the same training.

One process trains a Llama in two ways in turns, block by block: with `diloco.trainer`, and with
`diloco.bench.training.plain_loop`, written straight. Both start from the same values and take the
same sequences, so that the first losses must agree. Neighbouring blocks see the same machine: a
ratio is of the two blocks of a cycle.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from diloco.bench.device_clock import device_s
from diloco.bench.processes import count_one, run_jobs
from diloco.bench.run_values import ISLAND, NO_OUTER, run_values
from diloco.bench.training.plain_loop import PlainLlama, PlainLoop
from diloco.config.schema import Config
from diloco.data.batches import Data
from diloco.data.open import open_data
from diloco.island.lanes.boxes import stored
from diloco.report.rows import Column, Report, Requirement, Watch, matching
from diloco.report.statistics import Interval
from diloco.trainer.island_trainer import island_trainer, own_batches
from diloco.trainer.trainer import InnerTrainer

_CPU = torch.device("cpu")

_COLUMNS = (
    Column("model", "model"),
    Column("parameters", "parameters", ",d"),
    Column("tokens_per_inner_step", "tokens a step", ",d"),
    Column("native", "native, tokens/s", ",.0f"),
    Column("plain", "plain, tokens/s", ",.0f"),
    Column("ratio", "native / plain", ".4f"),
    Column("low", "95 % from", ".4f"),
    Column("high", "to", ".4f"),
    Column("cpu_ratio", "by CPU time", ".4f"),
    Column("difference", "losses differ by", ".1e"),
)


@dataclass(frozen=True, slots=True)
class PlainRow:
    """A model and how it is trained.

    Attributes:
        name: What --rows chooses by, and the model's preset.
        tokens_per_inner_step: A multiple of `sequence_length`.
        sequence_length: Tokens.
        block_steps: Inner steps of a block.
    """

    name: str
    tokens_per_inner_step: int
    sequence_length: int
    block_steps: int


@dataclass(frozen=True, slots=True)
class PlainSetting:
    """What is trained and judged.

    Attributes:
        rows: The small model shows what a step costs besides arithmetic, the other is usual.
        num_cycles: Of two blocks; the first one warms up.
        at_least: Smallest ratio of tokens/s.
        largest_difference: Of a loss of the first block; both loops compute the same in float32.
    """

    rows: tuple[PlainRow, ...]
    num_cycles: int = 21
    at_least: float = 0.98
    largest_difference: float = 1e-4


SETTING = PlainSetting((PlainRow("debug", 1024, 128, 5), PlainRow("10M", 512, 128, 2)))


def run(watch: Watch, rows: Sequence[str] = (), *, setting: PlainSetting = SETTING) -> Report:
    """Train both loops on every model whose name matches, and compare them.

    Raises:
        ConfigError: If a pattern matches no row.
    """
    wanted = matching([row.name for row in setting.rows], rows)
    results, requirements = [], []
    for row in setting.rows:
        if row.name in wanted:
            results.append(figures(row, _measure(setting, row, watch)))
            requirements += _requirements(setting, results[-1])
    return Report("plain", asdict(setting), _COLUMNS, results, requirements)


def _measure(setting: PlainSetting, row: PlainRow, watch: Watch) -> MeasuredLoops:
    job = functools.partial(
        measure,
        config_of(row, setting.num_cycles),
        block_steps=row.block_steps,
        num_cycles=setting.num_cycles,
    )
    return run_jobs({"": job}, lambda done: watch(row.name, done, setting.num_cycles))[""]


def config_of(row: PlainRow, num_cycles: int, island: Mapping[str, Any] | None = None) -> Config:
    """Write the run of a row; its only island, which has `island` besides, is selected."""
    values = run_values(
        "plain",
        {"preset": row.name},
        NO_OUTER,
        inner_steps=row.block_steps * num_cycles,
        sequence_length=row.sequence_length,
        tokens=row.tokens_per_inner_step,
        island=island,
        inner={"optimizer": {"name": "adamw", "lr": 1e-3, "schedule": "constant"}},
        island_id=ISLAND,
    )
    return Config.model_validate(values)


def figures(row: PlainRow, measured: MeasuredLoops) -> dict[str, Any]:
    """Compute a row of the report; times are of all cycles but the first, losses of that one."""
    warming, *timed = measured.cycles

    def tokens_per_s(of: Callable[[LoopCycle], LoopBlock]) -> float:
        num_tokens = row.block_steps * row.tokens_per_inner_step
        return statistics.median(num_tokens / of(cycle).wall_s for cycle in timed)

    ratio = Interval.of([cycle.plain.wall_s / cycle.native.wall_s for cycle in timed])
    by_cpu = Interval.of([cycle.plain.cpu_s / cycle.native.cpu_s for cycle in timed])
    return {
        "model": row.name,
        "parameters": measured.num_parameters,
        "tokens_per_inner_step": row.tokens_per_inner_step,
        "native": tokens_per_s(lambda cycle: cycle.native),
        "plain": tokens_per_s(lambda cycle: cycle.plain),
        "ratio": ratio.median,
        "low": ratio.low,
        "high": ratio.high,
        "cpu_ratio": by_cpu.median,
        "cpu_ratio_interval": by_cpu.as_dict(),
        "difference": warming.difference,
        "cycles": ratio.count,
    }


def _requirements(setting: PlainSetting, row: Mapping[str, Any]) -> list[Requirement]:
    name = row["model"]
    return [
        Requirement(
            f"{name}: tokens/s of the native trainer over plain PyTorch's",
            row["ratio"],
            setting.at_least,
            "x",
            is_at_least=True,
        ),
        Requirement(
            f"{name}: largest loss difference of the first steps",
            row["difference"],
            setting.largest_difference,
            "nats",
        ),
    ]


# -- the blocks, in a process of their own ---------------------------------------------------------

#: Launches the inner step that follows so many; what it returns waits for it and gives its loss.
Step = Callable[[int], Callable[[], float]]


@dataclass(frozen=True, slots=True)
class LoopBlock:
    """Some inner steps in a row: how long they took, on the wall and of the CPU, and their loss."""

    wall_s: float
    cpu_s: float
    losses: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LoopCycle:
    """The same inner steps of both loops."""

    native: LoopBlock
    plain: LoopBlock

    @property
    def difference(self) -> float:
        """Largest difference of two losses of the same inner step."""
        losses = zip(self.native.losses, self.plain.losses, strict=True)
        return max(abs(native - plain) for native, plain in losses)


@dataclass(frozen=True, slots=True)
class MeasuredLoops:
    """All cycles, the first one included, which warms up, and the size of the model."""

    num_parameters: int
    cycles: tuple[LoopCycle, ...]


def measure(config: Config, *, block_steps: int, num_cycles: int) -> MeasuredLoops:
    """Train both loops from the same values on the same sequences, block by block.

    Args:
        config: With an island of one rank selected.
        block_steps: Inner steps of a block.
        num_cycles: Of two blocks each; who is first alternates.
    """
    data = open_data(config)
    trainer = island_trainer(config, data, own_batches(config, data, 0))
    return compare(config, data, trainer, block_steps=block_steps, num_cycles=num_cycles)


def compare(
    config: Config,
    data: Data,
    trainer: InnerTrainer,
    *,
    device: torch.device = _CPU,
    dtype: torch.dtype = torch.float32,
    block_steps: int,
    num_cycles: int,
) -> MeasuredLoops:
    """Train a native trainer and a plain loop that begins with its values.

    Args:
        config: As for `measure`; where it has blocks compiled, the plain loop's are, too.
        data: Of the run.
        trainer: New, of one rank.
        device: Of the trainer.
        dtype: In which the trainer computes.
        block_steps: As for `measure`.
        num_cycles: As for `measure`.
    """
    model = PlainLlama(config.model, config.data.sequence_length).to(device)
    for ours, native in zip(model.parameters(), trainer.model.parameters(), strict=True):
        ours.data.copy_(stored(native))
    if backend := config.island.compute.compile_backend:
        for layer in model.layers:
            layer.compile(backend=backend, fullgraph=True)
    batches = own_batches(config, data, 0)
    ready = [batches.batch(step).to(device) for step in range(block_steps * num_cycles)]
    loop = PlainLoop(model, config.inner, dtype)

    def native_step(step: int) -> Callable[[], float]:
        launched = trainer.inner_step(step)
        return lambda: launched.read().loss

    def plain_step(step: int) -> Callable[[], float]:
        return loop.step(ready[step]).item

    steps: dict[str, Step] = {"native": native_step, "plain": plain_step}
    cycles = []
    for number in range(num_cycles):
        order = sorted(steps, reverse=bool(number % 2))
        first = number * block_steps
        blocks = {name: _block(steps[name], first, block_steps, device) for name in order}
        cycles.append(LoopCycle(**blocks))
        count_one()
    return MeasuredLoops(sum(p.numel() for p in model.parameters()), tuple(cycles))


def _block(step: Step, first: int, num_steps: int, device: torch.device) -> LoopBlock:
    """Time some inner steps, from a device at rest until it has done them."""
    began_cpu, launched = time.process_time(), list[Callable[[], float]]()

    def work() -> None:
        launched.extend(step(number) for number in range(first, first + num_steps))

    wall_s = device_s(device, work)
    cpu_s = time.process_time() - began_cpu
    return LoopBlock(wall_s, cpu_s, tuple(read() for read in launched))
