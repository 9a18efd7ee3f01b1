"""Goodput under failures in closed form, next to the simulation. Pure.

    g = 1 / (1 + lambda d),    d = stop + growth exp(-lambda w),    lambda = N / (M MTBI)

where w is the mean time until a chip is back: returned chips wait until nobody else is away, so a
growth is left of those failures only that find all others back: exp(-lambda w) of them, whatever
the distribution of the absences (M/G/infinity: the share of arrivals that find it empty). Without
merging every failure has its growth. Holds for exponential lives, and absences that are short
against them.

Source: fitted to Decoupled DiLoCo (arXiv 2604.21428), Table 1, whose own times are not published.
"""

from __future__ import annotations

import math

from diloco.simulations.goodput.failures import Fleet


def fleet_goodput(fleet: Fleet, *, waits_for_all: bool = False) -> float:
    """Give the share of the chips' time in which they train.

    Args:
        fleet: Chips and learners.
        waits_for_all: Whether learners stop as long as one of them is stopped: g^M.
    """
    g = learner_goodput(fleet)
    return g**fleet.num_learners if waits_for_all else g


def learner_goodput(fleet: Fleet) -> float:
    """Give the share of the time in which a learner trains."""
    rate = fleet.num_chips / (fleet.num_learners * fleet.lives.mean_s)
    left = math.exp(-rate * fleet.absences.mean_s) if fleet.merges_growth else 1.0
    return 1.0 / (1.0 + rate * (fleet.stop_s + left * fleet.growth_s))


def nobody_s(fleet: Fleet, duration_s: float) -> float:
    """Give the seconds in which no learner trains: (1 - g)^M of all, on average."""
    return float((1.0 - learner_goodput(fleet)) ** fleet.num_learners * duration_s)
