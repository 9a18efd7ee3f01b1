"""What a faulty island does to a run behind the guard: fault x number of islands x mode.

Every cell is a small training run in virtual time (`guard_cell`); the last of its islands is faulty
from its middle on. It is held against the same run without a fault; of two islands against
the worse of that and the run that goes on without the faulty one.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import numpy as np
import torch

from diloco.bench.outer_loop.byte_model import SLOT
from diloco.bench.outer_loop.guard_cell import (
    CLEAN,
    LASTING,
    MODES,
    PLACES,
    CellResult,
    GuardCell,
    GuardSetting,
    run_cell,
)
from diloco.bench.processes import run_jobs
from diloco.compression.base import to_bytes
from diloco.compression.registry import get_codec
from diloco.outer.combination import mean_of
from diloco.outer.fragments import Fragment, TensorSpec, make_plan
from diloco.outer.guard import WINDOW, History
from diloco.outer.optimizer import OuterOptimizer
from diloco.outer.units import merge_units
from diloco.protocol.rounds.terms import Contributor, RoundKey
from diloco.report.rows import Column, Report, Requirement, Watch
from diloco.syncer.watch import MergeWatch
from diloco.versions.publication import LaneState, PublicationRules, publish_lane_
from diloco.versions.version import VersionRecord

_T = TypeVar("_T")

SETTING = GuardSetting()

_NONE, _LEAVE = "none", "leave"
_FLIPS = tuple(f"{place}-{bit}" for place in PLACES for bit in (30, 24))
#: Loss over that of the yardstick, and CPU nanoseconds a value and contribution.
_MOST_PERCENT = 1.0
_MOST_NS = 1.0

_COLUMNS = (
    Column("mode", "mode"),
    Column("islands", "M", "d"),
    Column("fault", "fault"),
    Column("loss", "nats/byte", ".4f"),
    Column("undisturbed", "undisturbed", ".4f"),
    Column("ratio", "ratio", ".3f"),
    Column("refused", "refused", "d"),
    Column("declined", "declined", "d"),
    Column("named", "named"),
    Column("false", "false", "d"),
    Column("ends", "ends"),
)


def chosen_cells(*, is_full: bool) -> tuple[GuardCell, ...]:
    """Give the cells to train: all, or those of two and three islands that tell most."""
    full = dict.fromkeys((2, 3, 4), (*CLEAN, *LASTING, *_FLIPS))
    quick = {2: (_NONE, _LEAVE, "labels", "signs"), 3: (_NONE, *LASTING, "parameter-30")}
    chosen = full if is_full else quick
    return tuple(
        GuardCell(mode, num, fault)
        for mode in MODES
        for num, faults in chosen.items()
        for fault in faults
    )


def run(
    watch: Watch,
    *,
    full: bool = False,
    seed: int = 1,
    processes: int = 0,
    setting: GuardSetting = SETTING,
    cells: Sequence[GuardCell] = (),
) -> Report:
    """Train every cell, and time what the guard costs a merge.

    Args:
        watch: See `Watch`.
        full: Whether all cells are trained.
        seed: Of initial parameters and text.
        processes: Cells trained at once; 0: by CPUs.
        setting: What all train.
        cells: In place of those of `chosen_cells`.
    """
    cells = cells or chosen_cells(is_full=full)
    cost_ns = guard_cost_ns()
    jobs = {cell: functools.partial(run_cell, setting, cell, seed) for cell in cells}
    results = run_jobs(jobs, lambda done: watch("cells", done, len(cells)), processes)
    rows = [as_row(cell, results) for cell in cells]
    cost = Requirement("guard, CPU a value and contribution", cost_ns, _MOST_NS, "ns")
    described = {**asdict(setting), "seed": seed}
    return Report("guard", described, _COLUMNS, rows, [*requirements_of(rows), cost])


def as_row(cell: GuardCell, results: Mapping[GuardCell, CellResult]) -> dict[str, Any]:
    """Give the row of a cell, JSON values."""
    result, faulty = results[cell], SLOT.format(cell.num_islands - 1)
    is_clean = cell.fault in CLEAN
    base = results[GuardCell(cell.mode, cell.num_islands, _NONE)]
    without = results.get(GuardCell(cell.mode, cell.num_islands, _LEAVE))
    of_faulty = [0 if is_clean else of.get(faulty, 0) for of in (result.refused, result.declined)]
    num_judged = sum(result.refused.values()) + sum(result.declined.values())
    is_named = result.named == (faulty,)
    return {
        "mode": cell.mode,
        "islands": cell.num_islands,
        "fault": cell.fault,
        "loss": result.loss,
        "undisturbed": base.loss,
        "ratio": result.loss / base.loss,
        "without": None if without is None else without.loss,
        "refused": of_faulty[0],
        "declined": of_faulty[1],
        "named": "yes" if is_named else "both" if result.is_opposed else ", ".join(result.named),
        "false": num_judged - sum(of_faulty),
        "ends": ", ".join(result.left),
        "ended": result.ended,
    }


def requirements_of(rows: Sequence[Mapping[str, Any]]) -> list[Requirement]:
    """Judge losses by fault and its worst cell; who is named; what is refused without a fault.

    Two islands are held against the worse of the run without a fault and that without the faulty
    island.
    """
    requirements = []
    faulty = [row for row in rows if row["fault"] not in CLEAN]
    for is_pair, fault in sorted({(row["islands"] == 2, row["fault"]) for row in faulty}):
        over = [
            100 * (row["loss"] / max(row["undisturbed"], row["without"] if is_pair else 0) - 1)
            for row in faulty
            if (row["islands"] == 2, row["fault"]) == (is_pair, fault)
        ]
        requirements.append(
            Requirement(
                f"loss with {fault}, {'two islands' if is_pair else 'three and more'}, worst cell",
                math.nan if any(map(math.isnan, over)) else max(over),
                _MOST_PERCENT,
                "%",
            )
        )
    is_due = [row for row in faulty if row["refused"] + row["declined"] or row["fault"] in LASTING]
    unnamed = [row for row in is_due if row["named"] != "yes"]
    wrongly = sum(row["false"] for row in rows)
    return [
        *requirements,
        Requirement("cells in which the faulty island is not named", len(unnamed), 0, ""),
        Requirement("contributions of healthy islands refused or declined", wrongly, 0, ""),
    ]


def guard_cost_ns(numel: int = 1 << 22, num_islands: int = 4, repeats: int = 5) -> float:
    """Measure the CPU nanoseconds a value and contribution that the guard takes within a merge.

    One lane, int4, one thread; the least of the repeats.
    """
    plan = make_plan([TensorSpec("w", (numel,))], num_fragments=1, num_lanes=1)
    fragment = plan.fragments[0]
    rules = PublicationRules("int4", "int4", OuterOptimizer("nesterov", 0.7, 0.9, 0), seed=0)
    generator = torch.Generator().manual_seed(0)
    codec = get_codec("int4")
    payloads = [
        to_bytes(codec.encode(torch.randn(numel, generator=generator) * 1e-3))
        for _ in range(num_islands)
    ]
    base = _settled(fragment, generator)
    contributors = [Contributor(str(m), 1, 1, 1, 1, ()) for m in range(num_islands)]
    least = math.inf
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(repeats):
            clock = _Clock()
            units = merge_units(plan, 0)
            watch = MergeWatch(fragment, units, rules, contributors, base, is_flush=False)
            publish_lane_(
                base.lanes[0],
                payloads,
                mean_of([1] * num_islands, numel),
                rules,
                fragment=fragment,
                lane_id=0,
                key=RoundKey(0, 0, 0, 0),
                is_flush=False,
                on_delta=clock.timed(watch.lane(0)),
            )
            assert not clock.timed(watch.outliers)() and clock.timed(watch.guard)()
            least = min(least, clock.cpu_s)
    finally:
        torch.set_num_threads(threads)
    return least / (numel * num_islands) * 1e9


class _Clock:
    """Adds up the CPU time of what it times."""

    def __init__(self) -> None:
        self.cpu_s = 0.0

    def timed(self, call: Callable[..., _T]) -> Callable[..., _T]:
        def timed(*arguments: object) -> _T:
            began = time.process_time()
            result = call(*arguments)
            self.cpu_s += time.process_time() - began
            return result

        return timed


def _settled(fragment: Fragment, generator: torch.Generator) -> VersionRecord:
    """Give a version whose guard has seen rounds enough to go by them."""
    theta = torch.randn(fragment.padded_numel, generator=generator)
    state = LaneState(theta, theta.clone(), torch.zeros_like(theta))
    history, sizes = History.empty(1), np.array([[[1e-3 * math.sqrt(theta.numel())], [6e-3]]])
    for _ in range(WINDOW):
        history = history.after(sizes, np.ones(1))
    return VersionRecord(
        0, 0, 0, None, False, "float32", (b"",), (b"",), (state,), guard=history.to_bytes()
    )
