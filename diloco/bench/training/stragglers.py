"""What a slow island costs the others: who waits, what is lost, what the model learns.

Four islands train one byte model from the seed; a step of the slowest takes twice as long, and all
vary by 10 %. Time is virtual and nothing is shaped, so that only the rounds differ:

    scheduled   every round waits for everybody
    all         on arrival, and a round counts everybody
    k1-grace    on arrival, a round closes 3 s (of steps of 1 s) after the first contribution
    k1          on arrival, a round closes with the first contribution

All rows end with the same merged tokens; the flush is evaluated.

Source: Decoupled DiLoCo (arXiv 2604.21428): quorum, grace, weights by tokens.
"""

from __future__ import annotations

import multiprocessing
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from diloco.bench.loopback_run import LoopbackResult, World, run_islands
from diloco.bench.training.parity_row import SLOT, RowTraining, Task, open_row_data, row_config
from diloco.errors import ConfigError
from diloco.report.rows import Column, Report, Requirement

_BASE = "scheduled"
_GRACE = "k1-grace"

_COMMON: Mapping[str, Any] = {
    "inner_steps_per_round": 30,
    "optimizer": {"lr": 0.7, "momentum": 0.9, "momentum_ramp_rounds": 5},
}
_ON_ARRIVAL: Mapping[str, Any] = {
    **_COMMON,
    "preset": "classic",
    "merge": "on_arrival",
    "min_contributions": 1,
}
ROWS: Mapping[str, Mapping[str, Any]] = {
    _BASE: {**_COMMON, "preset": "classic"},
    "all": {**_ON_ARRIVAL, "min_contributions": "all"},
    _GRACE: {**_ON_ARRIVAL, "grace": "3s"},
    "k1": _ON_ARRIVAL,
}


@dataclass(frozen=True, slots=True)
class Setting:
    """What is trained, and how long a step of each island takes, in virtual seconds."""

    task: Task = field(
        default_factory=lambda: Task(inner_steps=300, warm_start_step=0, warmup_steps=30)
    )
    steps_s: tuple[float, ...] = (1.0, 1.0, 1.0, 2.0)
    noise: float = 0.1


SETTING = Setting()

_COLUMNS = (
    Column("row", "row"),
    Column("loss", "nats/byte", ".4f"),
    Column("over_scheduled_percent", "over scheduled, %", "+.2f"),
    Column("virtual_s", "time", ".0f"),
    Column("busy_fast_percent", "fast islands busy, %", ".1f"),
    Column("steps_fast", "fast steps", ".0f"),
    Column("steps_slow", "slow steps", ".0f"),
    Column("dropped_percent", "tokens dropped, %", ".1f"),
    Column("rounds", "rounds", "d"),
    Column("solo_percent", "solo, %", ".1f"),
)


def chosen_rows(names: Sequence[str]) -> tuple[str, ...]:
    """Give these rows, and the scheduled one, which all are held against; none named: all.

    Raises:
        ConfigError: If there is no row of a name.
    """
    for name in names:
        if name not in ROWS:
            raise ConfigError(f"--rows {name}: there is none; rows are {', '.join(ROWS)}")
    return tuple(name for name in ROWS if not names or name in names or name == _BASE)


def run_stragglers(
    setting: Setting,
    rows: Sequence[str],
    *,
    seed: int,
    num_processes: int,
    on_progress: Callable[[int], None],
) -> Report:
    """Train every row and compare them.

    Args:
        setting: Of the bench.
        rows: Of `chosen_rows`.
        seed: Of initial parameters, text and step times.
        num_processes: Spawned at once, each with one thread.
        on_progress: Hears how many rows are done.
    """
    began = time.monotonic()
    results: dict[str, LoopbackResult] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, context) as pool:
        jobs = {pool.submit(train_row, setting, name, seed): name for name in rows}
        for job in as_completed(jobs):
            results[jobs[job]] = job.result()
            on_progress(len(results))
    shown = [_as_row(setting, name, results[name], results[_BASE]) for name in rows]
    return Report(
        bench="stragglers",
        setting={**asdict(setting), "seed": seed},
        columns=_COLUMNS,
        rows=shown,
        requirements=_requirements(shown),
        wall_s=time.monotonic() - began,
    )


def train_row(setting: Setting, name: str, seed: int) -> LoopbackResult:
    """Train one row to its end and evaluate it; in a process of its own."""
    torch.set_num_threads(1)
    task, num_islands = setting.task, len(setting.steps_s)
    data = open_row_data(task, seed)
    trainings = {
        SLOT.format(slot): RowTraining(task, seed, data, num_islands=num_islands, island_slot=slot)
        for slot in range(num_islands)
    }
    steps_s = dict(zip(trainings, setting.steps_s, strict=True))

    def step_s(island: str, inner_step: int) -> float:
        noise = random.Random(f"{seed}/{island}/{inner_step}").uniform(-1.0, 1.0) * setting.noise
        return steps_s[island] * (1.0 + noise)

    with tempfile.TemporaryDirectory(prefix="diloco-stragglers-") as directory:
        return run_islands(
            row_config(task, seed, num_islands, ROWS[name]),
            trainings,
            directory=Path(directory),
            start_step=0,
            world=World(step_s=step_s),
        )


def _as_row(
    setting: Setting, name: str, result: LoopbackResult, base: LoopbackResult
) -> dict[str, Any]:
    islands = sorted(result.steps)
    fast, slow = islands[:-1], islands[-1]
    tokens = setting.task.sequences // len(islands) * setting.task.sequence_length
    trained = tokens * sum(result.steps.values())
    return {
        "row": name,
        "outer": dict(ROWS[name]),
        "loss": result.figure,
        "over_scheduled_percent": 100 * (result.figure / base.figure - 1),
        "virtual_s": result.virtual_s,
        "busy_fast_percent": 100 * min(result.busy[island] for island in fast),
        "steps_fast": sum(result.steps[island] for island in fast) / len(fast),
        "steps_slow": result.steps[slow],
        "dropped_percent": 100 * sum(result.dropped_tokens.values()) / trained,
        "rounds": result.num_rounds,
        "solo_percent": 100 * result.num_solo / max(result.num_rounds, 1),
    }


def _requirements(rows: Sequence[Mapping[str, Any]]) -> list[Requirement]:
    """Judge the row with grace: nobody waits, little is lost, and it learns as well."""
    by_name = {row["row"]: row for row in rows}
    if _GRACE not in by_name:
        return []
    grace, base = by_name[_GRACE], by_name[_BASE]
    return [
        Requirement(
            f"loss of {_GRACE} over {_BASE}", grace["over_scheduled_percent"], 1.0, "%"
        ),
        Requirement(
            f"fast islands of {_GRACE} busy", grace["busy_fast_percent"], 99.0, "%",
            is_at_least=True,
        ),
        Requirement(
            f"time of {_GRACE} over that of {_BASE}",
            grace["virtual_s"] / base["virtual_s"], 0.7, "x",
        ),
    ]  # fmt: skip
