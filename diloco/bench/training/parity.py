"""Does DiLoCo learn as well as data parallel? One model, one budget of tokens, many rows.

Every row trains the same byte model on the same sequences in the same order: the global batch of a
step is drawn once, and island m of M takes its m-th contiguous part. So rows differ in who
averages what and when, in nothing else, and are compared within a seed. Warm rows go on from the
data-parallel run's middle (weights, Adam's moments, position in the text, learning rate);
published parameters are evaluated after the flush.

Rows are jobs for spawned processes of one thread each: figures do not depend on how many there
are.

Source: DiLoCo (arXiv 2311.08105); Streaming DiLoCo (arXiv 2501.18512); schedule and sizes from the
plain simulation that the bars were taken from.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diloco.bench.counted_process import prepare_process
from diloco.bench.training import parity_row
from diloco.bench.training.parity_row import Row, RowResult, Task
from diloco.report.row_choice import matching
from diloco.report.rows import Column, Report, Requirement
from diloco.report.statistics import Spread

DATA_PARALLEL = "data-parallel"

_LOOK_S = 0.5
#: Rounds of the ramp from scratch: the first half of the run.
_RAMP_ROUNDS = 10


@dataclass(frozen=True, slots=True)
class Comparison:
    """Loss of `row` over that of `base`, seed by seed, and the largest excess allowed."""

    row: str
    base: str
    at_most_percent: float


@dataclass(frozen=True, slots=True)
class Setting:
    """Everything that figures of this bench depend on besides the seed."""

    task: Task
    rows: tuple[Row, ...]
    comparisons: tuple[Comparison, ...]


def _full_setting() -> Setting:
    """Lay out the rows and bars of the bench.

    The streaming row's momentum is not ramped, as in the classic rows beside it: the ramp of the
    preset is for a start from scratch.
    """
    rows = [Row(DATA_PARALLEL, 1, None, is_warm=True)]
    comparisons = []
    for name, num_islands, outer, percent in (
        ("m2-h30", 2, _classic(30), 1.0),
        ("m4-h10", 4, _classic(10), 2.0),
        ("m4-h30", 4, _classic(30), 2.5),
        ("m4-h100", 4, _classic(100), 7.0),
        ("m4-h30-streaming", 4, _STREAMING, 2.5),
    ):
        for codec in ("float32", "int4"):
            codecs = {"uplink_codec": codec, "downlink_codec": codec}
            rows.append(Row(f"{name}-{codec}", num_islands, {**outer, **codecs}, is_warm=True))
            comparisons.append(Comparison(f"{name}-{codec}", DATA_PARALLEL, percent))
        comparisons.append(Comparison(f"{name}-int4", f"{name}-float32", 0.2))
    plain, ramped = "scratch-m4-h30", "scratch-m4-h30-ramp"
    rows += [
        Row(plain, 4, _classic(30), is_warm=False),
        Row(ramped, 4, _classic(30, momentum_ramp_rounds=_RAMP_ROUNDS), is_warm=False),
    ]
    comparisons.append(Comparison(ramped, plain, -4.0))
    return Setting(Task(), tuple(rows), tuple(comparisons))


def _classic(inner_steps_per_round: int, **optimizer: Any) -> dict[str, Any]:
    return {
        "preset": "classic",
        "inner_steps_per_round": inner_steps_per_round,
        "optimizer": {"lr": 0.7, "momentum": 0.9, **optimizer},
    }


_STREAMING: Mapping[str, Any] = {
    "preset": "streaming",
    "inner_steps_per_round": 30,
    "num_fragments": 4,
    "overlap_steps": 2,
    "local_mix": 0.0,
    "optimizer": {"lr": 0.7, "momentum": 0.9, "momentum_ramp_rounds": 0},
}

SETTING = _full_setting()

_COLUMNS = (
    Column("row", "row"),
    Column("start", "start"),
    Column("loss", "nats/byte", ".4f"),
    Column("loss_deviation", "+-", ".4f"),
    Column("over_data_parallel_percent", "over data parallel, %", "+.2f"),
    Column("over_data_parallel_deviation", "+-", ".2f"),
    Column("over_float32_percent", "int4 over float32, %", "+.2f"),
    Column("train_s", "CPU s", ".0f"),
)


def chosen_rows(setting: Setting, patterns: Sequence[str]) -> tuple[Row, ...]:
    """Give the rows that match any of `patterns`, and data parallel, which all are held against.

    Args:
        setting: Of the bench.
        patterns: Names with `*` and `?`; none of them: all rows.

    Raises:
        ConfigError: If a pattern matches no row.
    """
    wanted = matching([row.name for row in setting.rows], patterns)
    return tuple(row for row in setting.rows if row.name in wanted or row.name == DATA_PARALLEL)


def num_steps(setting: Setting, rows: Iterable[Row], num_seeds: int) -> int:
    """Count the inner steps that the bench will make: what its progress is measured in."""
    task = setting.task
    per_seed = task.warm_start_step + sum(
        task.inner_steps - (task.warm_start_step if row.is_warm else 0) for row in rows
    )
    return num_seeds * per_seed


def run_parity(
    setting: Setting,
    rows: Sequence[Row],
    *,
    seeds: Sequence[int],
    num_processes: int,
    on_progress: Callable[[int], None],
) -> Report:
    """Train every row with every seed and compare them.

    Args:
        setting: Of the bench.
        rows: Of `chosen_rows`.
        seeds: Of initial parameters and text, at least one.
        num_processes: Spawned at once, each with one thread and about half a gigabyte.
        on_progress: Hears now and then how many inner steps are done.
    """
    began = time.monotonic()
    results = _train(setting.task, rows, seeds, num_processes, on_progress)
    return Report(
        bench="parity",
        setting={
            **asdict(setting.task),
            "seeds": list(seeds),
            "parameters": results[0].num_parameters,
            "text": results[0].data_digest,
        },
        columns=_COLUMNS,
        rows=[_as_row(row, rows, results) for row in rows],
        requirements=_requirements(setting, rows, results),
        wall_s=time.monotonic() - began,
    )


def _train(
    task: Task,
    rows: Sequence[Row],
    seeds: Sequence[int],
    num_processes: int,
    on_progress: Callable[[int], None],
) -> list[RowResult]:
    """Give every (row, seed) to a process; warm rows wait for their seed's start."""
    context = multiprocessing.get_context("spawn")
    done = context.Value("q", 0)
    results: list[RowResult] = []
    with (
        tempfile.TemporaryDirectory(prefix="diloco-parity-") as directory,
        ProcessPoolExecutor(num_processes, context, prepare_process, (done,)) as pool,
    ):
        starts = {seed: Path(directory) / f"start-{seed}.safetensors" for seed in seeds}

        def submit(seed: int, *, is_warm: bool) -> list[Future[RowResult]]:
            return [
                pool.submit(parity_row.train_row, task, row, seed, starts[seed])
                for row in rows
                if row.is_warm == is_warm
            ]

        try:
            founding = {
                pool.submit(parity_row.write_start, task, seed, path): seed
                for seed, path in starts.items()
            }
            training = [future for seed in seeds for future in submit(seed, is_warm=False)]
            while founding or training:
                unfinished: list[Future[Any]] = [*founding, *training]
                wait(unfinished, _LOOK_S, FIRST_COMPLETED)
                on_progress(done.value)
                for future in [future for future in founding if future.done()]:
                    future.result()
                    training += submit(founding.pop(future), is_warm=True)
                # Asked once: one that ends between two looks would be in neither list.
                finished = [future for future in training if future.done()]
                results += [future.result() for future in finished]
                training = [future for future in training if future not in finished]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return sorted(results, key=lambda result: result.seed)


def _as_row(row: Row, rows: Sequence[Row], results: Sequence[RowResult]) -> dict[str, Any]:
    mine = [result for result in results if result.row == row.name]
    loss = Spread.of([result.loss for result in mine])
    over = Spread.of(_excesses(row.name, DATA_PARALLEL, results))
    twin = row.name.replace("-int4", "-float32")
    has_twin = twin != row.name and any(other.name == twin for other in rows)
    return {
        "row": row.name,
        "start": "warm" if row.is_warm else "scratch",
        "num_islands": row.num_islands,
        "outer": None if row.outer is None else dict(row.outer),
        "loss": loss.mean,
        "loss_deviation": loss.deviation,
        "over_data_parallel_percent": over.mean,
        "over_data_parallel_deviation": over.deviation,
        "over_float32_percent": (
            Spread.of(_excesses(row.name, twin, results)).mean if has_twin else None
        ),
        "train_s": Spread.of([result.train_s for result in mine]).mean,
        "losses": {str(result.seed): result.loss for result in mine},
    }


def _excesses(row: str, base: str, results: Sequence[RowResult]) -> list[float]:
    """Give the loss of `row` over that of `base` in percent, seed by seed."""
    losses = {(result.row, result.seed): result.loss for result in results}
    seeds = sorted(seed for name, seed in losses if name == row)
    return [100 * (losses[row, seed] / losses[base, seed] - 1) for seed in seeds]


def _requirements(
    setting: Setting, rows: Sequence[Row], results: Sequence[RowResult]
) -> list[Requirement]:
    trained = {row.name for row in rows}
    return [
        Requirement(
            f"loss of {comparison.row} over {comparison.base}",
            Spread.of(_excesses(comparison.row, comparison.base, results)).mean,
            comparison.at_most_percent,
            "%",
        )
        for comparison in setting.comparisons
        if {comparison.row, comparison.base} <= trained
    ]
