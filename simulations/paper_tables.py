"""Figures of papers that the simulators are held against: the inputs, the cells, and ours beside.

Everything here is data and comparison; what computes is general (`utilization`, `bandwidth`,
`wallclock`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from simulations import wallclock
from simulations.bandwidth import (
    GRID,
    TARGETS,
    GridRule,
    bandwidth_curve,
    needed_bps,
    on_grid,
)
from simulations.scenario import Scenario
from simulations.utilization import simulate

#: Columns of Table 4: DiLoCo's methods by their own names here.
_METHODS = ("data-parallel", "diloco", "streaming", "overlap", "4-bit")
#: Gbit/s for a utilisation of 50, 80, 90, 95 and 99 %, by model and method.
_STREAMING_TABLE_4: dict[tuple[str, float, int, str], tuple[tuple[float, ...], ...]] = {
    ("1B", 1e9, 24, "0.1s"): (
        (86.8, 152.6, 184.2, 222.3, 569.0),
        (1.4, 6.2, 13.3, 23.3, 86.8),
        (1.4, 5.2, 9.1, 16.0, 28.1),
        (1.4, 4.3, 6.2, 9.1, 11.0),
        (0.4, 0.9, 1.7, 2.0, 3.0),
    ),
    ("10B", 1e10, 48, "0.8s"): (
        (104.8, 222.3, 222.3, 268.3, 471.5),
        (1.7, 7.5, 16.0, 33.9, 104.8),
        (1.7, 5.2, 9.1, 13.3, 19.3),
        (1.7, 3.6, 5.2, 6.2, 7.5),
        (0.4, 0.9, 1.4, 1.4, 1.7),
    ),
    ("100B", 1e11, 108, "4.9s"): (
        (184.2, 323.8, 390.7, 390.7, 471.5),
        (3.0, 11.0, 23.3, 49.4, 184.2),
        (2.4, 6.2, 9.1, 11.0, 19.3),
        (1.7, 3.6, 4.3, 5.2, 5.2),
        (0.5, 0.9, 1.1, 1.1, 1.4),
    ),
}
#: Rounds simulated for a cell: one warms up, one counts; nothing varies.
_TABLE_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Cell:
    """One figure of a table, Gbit/s, and ours; both lie on `GRID`."""

    model: str
    method: str
    target: float
    paper: float
    ours: float

    @property
    def ratio(self) -> float:
        """Ours over the paper's."""
        return self.ours / self.paper

    @property
    def grid_steps(self) -> int:
        """How many rates of the grid lie between them; 0: the same."""
        return abs(_nearest(self.ours) - _nearest(self.paper))


@dataclass(frozen=True, slots=True)
class Comparison:
    """A target of a paper and our figure: `within` is what is allowed, absolute or of the target.

    Attributes:
        name: Which of the targets.
        what: The figure in words.
        target: As published.
        ours: As computed.
        within: Largest difference allowed.
        is_relative: Whether `within` is a share of the target.
        unit: Of both.
        source: Paper and table.
    """

    name: str
    what: str
    target: float
    ours: float
    within: float
    is_relative: bool
    unit: str
    source: str

    @property
    def is_met(self) -> bool:
        """Whether ours is near enough."""
        allowed = self.within * (abs(self.target) if self.is_relative else 1.0)
        return abs(self.ours - self.target) <= allowed * (1 + 1e-9)


def _nearest(gbps: float) -> int:
    return min(range(len(GRID)), key=lambda i: abs(math.log(GRID[i] / 1e9 / gbps)))


def streaming_table4(
    *,
    buckets: int = 0,
    release: str = "backward",
    rule: GridRule = "below",
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Cell]:
    """Compute the 75 cells of Streaming DiLoCo's Table 4 by simulation (target A1).

    Args:
        buckets: Pieces of a payload; 0, the scenario's default: one a layer.
        release: When they are released, the scenario's default.
        rule: Which rate of the grid is shown.
        on_progress: Told how many curves of how many are done.
    """
    cells = []
    total = len(_STREAMING_TABLE_4) * len(_METHODS)
    for (model, params, layers, step_time), rows in _STREAMING_TABLE_4.items():
        for method, row in zip(_METHODS, rows, strict=True):
            scenario = Scenario.model_validate(
                {
                    "method": method,
                    "params": params,
                    "layers": layers,
                    "step_time": step_time,
                    "buckets": buckets,
                    "release": release,
                }
            )
            curve = bandwidth_curve(scenario, rounds=_TABLE_ROUNDS)
            for target, paper in zip(TARGETS, row, strict=True):
                ours = on_grid(curve, target, rule) or GRID[-1]
                cells.append(Cell(model, method, target, paper, ours / 1e9))
            on_progress(len(cells) // len(TARGETS), total)
    return cells


def table4_counts(cells: list[Cell]) -> tuple[int, int]:
    """Count the cells that are exact, and those within one step of the grid (target A1)."""
    steps = [cell.grid_steps for cell in cells]
    return steps.count(0), sum(each <= 1 for each in steps)


# Targets of single figures, each a function that gives them with ours.
_INTELLECT_1 = "INTELLECT-1 (arXiv 2412.01152)"
_COVENANT = "Covenant-72B (arXiv 2603.08163)"
_DECOUPLED = "Decoupled DiLoCo (arXiv 2604.21428), appendix and launch"
_STREAMING = "Streaming DiLoCo (arXiv 2501.18512), Table 1"
_SCALING_LAWS = "Scaling laws for DiLoCo (arXiv 2503.09799), wall-clock model"


def scaling_laws_figures() -> list[Comparison]:
    """Wall-clock model: communication between islands is half of all at H = W0 / W1 (A4).

    For islands of many chips, where parameters decide and not latencies.
    """
    figures = []
    for name, between in (("medium", wallclock.MEDIUM), ("low", wallclock.LOW)):
        period = wallclock.least_period(wallclock.HIGH, between)
        training = wallclock.TrainingTime(
            params=1e10,
            tokens=2e11,
            batch_tokens=2**21,
            chips=10**9,
            islands=2,
            inside=wallclock.LinkClass(wallclock.HIGH.bandwidth_bps, 0.0),
            between=wallclock.LinkClass(between.bandwidth_bps, 0.0),
            inner_steps_per_round=round(period),
        )
        share = training.outer_s / (training.inner_s + training.outer_s)
        what = f"outer share of communication, high to {name} bandwidth, H = {period:g}"
        figures.append(Comparison("A4", what, 0.5, share, 1e-6, True, "", _SCALING_LAWS))
    return figures


def decoupled_bandwidth_figures() -> list[Comparison]:
    """Gbit/s of a model of 5B parameters with steps of 1 s, decoupled and data parallel (A10).

    Decoupled (H = P = 24): 16 bits within tau = 2 steps with two islands, 4 bits within the one
    step until the next fragment with eight. Data parallel: simulated, for a utilisation of 90 %
    with two and of 95 % with eight islands. The settings are inferred, not published.
    """
    fragment = 5e9 / 24
    ours = [
        ("decoupled, 2 islands, 16 bits", 1.7, wallclock.pacing_bps(16 * fragment, 2, 1.0)),
        ("decoupled, 8 islands, 4 bits", 0.84, wallclock.pacing_bps(4 * fragment, 1, 1.0)),
    ]
    for islands, target, published in ((2, 0.9, 104.0), (8, 0.95, 198.0)):
        scenario = Scenario(
            method="data-parallel",
            inner_steps_per_round=1,
            params=5e9,
            layers=32,
            step_time="1s",
            islands=islands,
        )
        needed = needed_bps(bandwidth_curve(scenario), target)
        assert needed is not None, "there is no delay that bandwidth cannot make up for"
        ours.append((f"data parallel, {islands} islands, {target:.0%}", published, needed))
    return [
        Comparison("A10", what, published, bps / 1e9, 0.1, True, "Gbit/s", _DECOUPLED)
        for what, published, bps in ours
    ]


def intellect_figures() -> list[Comparison]:
    """Compute utilisation of INTELLECT-1: 38 min of training, then an all-reduce (A11)."""
    return [
        Comparison(
            "A11",
            f"utilisation, {where}: 38 min, then {sync_s} s",
            published,
            100 * wallclock.compute_utilisation(38 * 60, sync_s),
            0.3,
            False,
            "%",
            _INTELLECT_1,
        )
        for where, sync_s, published in (
            ("USA", 103, 95.7),
            ("USA and EU", 382, 85.6),
            ("global", 469, 83.0),
        )
    ]


def covenant_figures() -> list[Comparison]:
    """Compute utilisation of Covenant-72B, SparseLoCo and INTELLECT-1; bits saved (A12)."""
    figures = [
        Comparison(
            "A12",
            f"utilisation, {name}: {compute_s / 60:g} min, then {sync_s:g} s",
            published,
            100 * wallclock.compute_utilisation(compute_s, sync_s),
            0.2,
            False,
            "%",
            _COVENANT,
        )
        for name, compute_s, sync_s, published in (
            ("Covenant-72B", 20 * 60, 70, 94.5),
            ("SparseLoCo 8B", 4.5 * 60, 12, 95.7),
            ("INTELLECT-1", 38 * 60, 8.3 * 60, 82.1),
        )
    ]
    # Of a chunk of 4096 values: 64, each of 2 bits with an index of 12.
    times = 32 * 4096 / (64 * (2 + math.log2(4096)))
    what = "float32 over 1.5625 % of the values in 2 bits and an index"
    figures.append(Comparison("A12", what, 146.0, times, 0.01, True, "x", _COVENANT))
    return figures


def streaming_table1_figures() -> list[Comparison]:
    """Hours at 1 Gbit/s and bits exchanged: 1B parameters, 25B tokens, 0.67 h of compute (A13).

    Simulated: steps of 0.1 s, as in Table 4; H = 100, tau = 1, 4 bits against gradients in 16 bits.
    """
    compute_h = 0.67
    given: dict[str, object] = {"params": 1e9, "layers": 24, "step_time": "0.1s"}
    every_step = Scenario.model_validate({"method": "data-parallel", **given})
    streaming = Scenario.model_validate({"method": "4-bit", **given})
    hours = {
        each.method: compute_h / simulate(each).utilisation for each in (every_step, streaming)
    }
    bits = streaming.inner_steps_per_round * simulate(every_step).bits_up
    times = bits / simulate(streaming).bits_up
    return [
        Comparison("A13", what, published, ours, 0.1, True, unit, _STREAMING)
        for what, published, ours, unit in (
            ("bits of data parallel over streaming's, H = 100", 400.0, times, "x"),
            ("data parallel at 1 Gbit/s", 109.0, hours["data-parallel"], "h"),
            ("streaming, 4 bits, at 1 Gbit/s", 0.88, hours["4-bit"], "h"),
        )
    ]
