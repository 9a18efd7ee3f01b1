"""What the native trainer costs beside plain PyTorch: one rank, one thread, the same training.

One process trains a Llama in two ways in turns, block by block: with `diloco.trainer`, and with
`diloco.bench.training.plain_loop`, written straight. Both start from the same values and take the
same sequences, so that the first losses must agree. Neighbouring blocks see the same machine: a
ratio is of the two blocks of a cycle.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from typing import Any

from diloco.bench.counted_process import prepare_process
from diloco.bench.training import plain_blocks
from diloco.bench.training.plain_blocks import Block, Cycle, Measured
from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.report.rows import Column, Report, Requirement
from diloco.report.statistics import Interval

_ISLAND = "bench"
_LOOK_S = 0.5

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
class Row:
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
class Setting:
    """What is trained and judged.

    Attributes:
        rows: The small model shows what a step costs besides arithmetic, the other is usual.
        num_cycles: Of two blocks; the first one warms up.
        at_least: Smallest ratio of tokens/s.
        largest_difference: Of a loss of the first block; both loops compute the same in float32.
    """

    rows: tuple[Row, ...]
    num_cycles: int = 21
    at_least: float = 0.98
    largest_difference: float = 1e-4


SETTING = Setting((Row("debug", 1024, 128, 5), Row("10M", 512, 128, 2)))


def chosen_rows(setting: Setting, names: Sequence[str]) -> list[Row]:
    """Give the rows of some names; none: all.

    Raises:
        ConfigError: If a name is of no row.
    """
    known = {row.name: row for row in setting.rows}
    if unknown := sorted(set(names) - known.keys()):
        raise ConfigError(f"--rows {unknown[0]} is no row; rows are {', '.join(known)}")
    return [row for row in setting.rows if not names or row.name in names]


def run_plain(
    setting: Setting, rows: Sequence[Row], *, on_progress: Callable[[str, int, int], None]
) -> Report:
    """Train both loops and compare them.

    Args:
        setting: What is judged.
        rows: Of `chosen_rows`.
        on_progress: Hears the row, and of its cycles done and in all.
    """
    began = time.monotonic()
    told, requirements = [], []
    for row in rows:
        measured = _measure(setting, row, on_progress)
        told.append(figures(row, measured))
        requirements += _requirements(setting, told[-1])
    return Report(
        bench="plain",
        setting=asdict(setting),
        columns=_COLUMNS,
        rows=told,
        requirements=requirements,
        wall_s=time.monotonic() - began,
    )


def _measure(setting: Setting, row: Row, on_progress: Callable[[str, int, int], None]) -> Measured:
    context = multiprocessing.get_context("spawn")
    done = context.Value("q", 0)
    with ProcessPoolExecutor(1, context, prepare_process, (done,)) as pool:
        measuring = pool.submit(
            plain_blocks.measure,
            config_of(row, setting.num_cycles),
            block_steps=row.block_steps,
            num_cycles=setting.num_cycles,
        )
        while not wait([measuring], _LOOK_S).done:
            on_progress(row.name, done.value, setting.num_cycles)
        return measuring.result()


def config_of(row: Row, num_cycles: int) -> Config:
    """Write the run of a row; its only island is selected."""
    return Config.model_validate(
        {
            "run": {"name": "plain", "seed": 1, "inner_steps": row.block_steps * num_cycles},
            "model": {"preset": row.name},
            "data": {"sequence_length": row.sequence_length},
            "inner": {"optimizer": {"lr": 1e-3, "schedule": "constant", "warmup_steps": 0}},
            "outer": {"preset": "classic", "inner_steps_per_round": 1},
            "coordinator": {"state_dir": "unused"},
            "evaluation": {"num_sequences": 1},
            "islands": {_ISLAND: {"ranks": 1, "tokens_per_inner_step": row.tokens_per_inner_step}},
            "island_id": _ISLAND,
        }
    )


def figures(row: Row, measured: Measured) -> dict[str, Any]:
    """Compute a row of the report; times are of all cycles but the first, losses of that one."""
    warming, *timed = measured.cycles

    def tokens_per_s(of: Callable[[Cycle], Block]) -> float:
        num_tokens = row.block_steps * row.tokens_per_inner_step
        return statistics.median(num_tokens / of(cycle).wall_s for cycle in timed)

    ratio = Interval.of([cycle.plain.wall_s / cycle.native.wall_s for cycle in timed])
    by_cpu = Interval.of([cycle.plain.cpu_s / cycle.native.cpu_s for cycle in timed])
    losses = zip(warming.native.losses, warming.plain.losses, strict=True)
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
        "difference": max(abs(native - plain) for native, plain in losses),
        "cycles": ratio.count,
    }


def _requirements(setting: Setting, row: Mapping[str, Any]) -> list[Requirement]:
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
