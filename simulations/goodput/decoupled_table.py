"""Decoupled DiLoCo's tables of failures and unequal learners, and the scenarios that make them.

The paper's own times of reconfigurations are not published; the defaults of a scenario are fitted
to Table 1, all 30 cells by the same ones.

Source: Decoupled DiLoCo (arXiv 2604.21428), Table 1, heterogeneity, scavenging.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from diloco.simulations.goodput.closed_form import fleet_goodput
from diloco.simulations.goodput.config import GoodputConfig
from diloco.simulations.goodput.failures import FleetTime, simulate_fleet
from diloco.simulations.goodput.learners import Learner, LearnersTime, simulate_learners

CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)
#: Row -> (learners, whether they are elastic, published goodput in percent by `CHIPS`).
TABLE: Mapping[str, tuple[int, bool, tuple[int, ...]]] = {
    "DP, not elastic": (1, False, (72, 57, 38, 27, 18)),
    "DP, elastic": (1, True, (88, 80, 69, 58, 40)),
    "Decoupled M=2": (2, True, (94, 88, 80, 70, 54)),
    "Decoupled M=4": (4, True, (96, 93, 89, 82, 73)),
    "Decoupled M=8": (8, True, (98, 96, 94, 88, 80)),
    "Decoupled M=16": (16, True, (99, 98, 96, 93, 86)),
}
#: More chips in the second half of a run's work -> published wall time over that without.
SCAVENGING: Mapping[float, float] = {0.0: 1.0, 0.25: 0.90, 0.5: 0.83, 1.0: 0.75, 3.0: 0.62}


@dataclass(frozen=True, slots=True)
class GoodputCell:
    """One cell of Table 1, goodput in percent."""

    row: str
    num_chips: int
    published: int
    simulated: float
    closed_form: float
    time: FleetTime

    @property
    def off(self) -> float:
        """Points by which the simulated figure is above the published one."""
        return self.simulated - self.published

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON values, hence `Any`."""
        return asdict(self)


def table_cells(
    config: GoodputConfig, on_progress: Callable[[int, int], None] | None = None
) -> Iterator[GoodputCell]:
    """Simulate the 30 cells; of `config`, learners, chips and elasticity are the table's."""
    done, total = 0, len(TABLE) * len(CHIPS)
    for row, (learners, is_elastic, published) in TABLE.items():
        for chips, percent in zip(CHIPS, published, strict=True):
            scenario = fleet_of(config, chips, learners, is_elastic=is_elastic)
            fleet = scenario.fleet
            time = simulate_fleet(fleet, config.duration_s, np.random.default_rng(config.seed))
            yield GoodputCell(
                row, chips, percent, 100 * time.goodput, 100 * fleet_goodput(fleet), time
            )
            done += 1
            if on_progress is not None:
                on_progress(done, total)


def fleet_of(
    config: GoodputConfig, chips: int, learners: int, *, is_elastic: bool = True
) -> GoodputConfig:
    """Give a scenario of other chips and learners."""
    failures = config.failures.model_copy(update={"elastic": is_elastic})
    return config.model_copy(update={"chips": chips, "learners": learners, "failures": failures})


def scavenged(config: GoodputConfig, more: float) -> LearnersTime:
    """Simulate a run that `more` times its learners join after half of its work.

    The work is that of `config.rounds.simulated_steps` of its learners.
    """
    rounds, learners = config.rounds, config.learners
    joining = [Learner(rounds.step_s, rounds.noise, joins_at=0.5)] * round(more * learners)
    return simulate_learners(
        [*rounds.learners(learners), *joining],
        rounds.rounds(learners),
        np.random.default_rng(config.seed),
        total_steps=rounds.simulated_steps * learners,
    )
