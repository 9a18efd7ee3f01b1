"""The bandwidth that a share of the time needs: by bisection, or on a grid as in papers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, TypeAlias

import numpy as np

from diloco.errors import ConfigError
from diloco.simulations.scenarios.scenario import Scenario, at_bandwidth
from diloco.simulations.scenarios.utilization import simulate

TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
#: Bits a second: 0.1 to 1000 Gbit/s in 50 steps of 1.207x, as in Streaming DiLoCo's tables.
GRID: tuple[float, ...] = tuple(1e9 * float(rate) for rate in np.logspace(-1, 3, 50))
#: reaching: the smallest rate of the grid that reaches the target; below: the largest that does
#: not, which is what the tables of Streaming DiLoCo show.
GridRule: TypeAlias = Literal["reaching", "below"]

LEAST_BPS, _MOST_BPS = 1e3, 1e15
_PRECISION = 0.005

#: Share of the time at a rate in bits a second, which grows with the rate.
Curve: TypeAlias = Callable[[float], float]


def bandwidth_curve(
    scenario: Scenario,
    *,
    rounds: int = 0,
    seed: int = 0,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Curve:
    """Give the share of a scenario at a rate of every line, both ways; remembers what it was.

    Args:
        scenario: What is simulated.
        rounds: Of every rate; 0: as many as it takes to be steady.
        seed: Of steps, jitter and loss.
        on_progress: Told (inner steps made at a rate, of how many).
    """
    known: dict[float, float] = {}
    profile = scenario.profile

    def share(bandwidth_bps: float) -> float:
        if bandwidth_bps not in known:
            link = at_bandwidth(profile, bandwidth_bps)
            known[bandwidth_bps] = simulate(
                scenario, link=link, rounds=rounds, seed=seed, on_progress=on_progress
            ).useful
        return known[bandwidth_bps]

    return share


def needed_bps(curve: Curve, target: float, least_bps: float = LEAST_BPS) -> float | None:
    """Find the least rate that reaches a target, within 0.5 %, by bisection of its logarithm.

    Args:
        curve: The share at a rate.
        target: A share.
        least_bps: Where the search begins; what is less is not looked at.

    Returns:
        Bits a second; None: no bandwidth does, delays alone are too long.

    Raises:
        ConfigError: If the target is no share.
    """
    _check(target)
    if curve(_MOST_BPS) < target:
        return None
    low, high = least_bps, _MOST_BPS
    if curve(low) >= target:
        return low
    while high / low > 1 + _PRECISION:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if curve(middle) >= target else (middle, high)
    return high


def on_grid(curve: Curve, target: float, rule: GridRule = "below") -> float | None:
    """Find the rate of `GRID` that stands for a target.

    Returns:
        Bits a second; None: no rate of the grid reaches it. The first one where all do.

    Raises:
        ConfigError: If the target is no share.
    """
    _check(target)
    low, high = -1, len(GRID)  # curve(GRID[low]) < target <= curve(GRID[high])
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if curve(GRID[middle]) >= target else (middle, high)
    if high == len(GRID):
        return None
    return GRID[max(low, 0)] if rule == "below" else GRID[high]


def _check(target: float) -> None:
    if not 0 < target < 1:
        raise ConfigError(f"targets: {target} is outside (0, 1): give shares such as 0.5,0.9")
