"""Figures of papers that the simulators are held against: the inputs, the cells, and ours beside.

Everything here is data and comparison; what computes is general (`utilization`, `bandwidth`,
`wallclock`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from simulations.bandwidth import GRID, TARGETS, GridRule, bandwidth_curve, on_grid
from simulations.scenario import Scenario

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
