"""A scenario's goodput: what failures of chips leave, times what unequal learners leave of that.

Both are simulated apart: failures for weeks without rounds, rounds for minutes without failures.
On arrival that is exact, as nobody waits for anybody. In a scheduled run a stopped learner stops
all; the steps that the others are ahead of it, and the one that it loses, are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from diloco.errors import ConfigError
from diloco.simulations.goodput.closed_form import fleet_goodput
from diloco.simulations.goodput.config import GoodputConfig
from diloco.simulations.goodput.failures import FleetTime, simulate_fleet
from diloco.simulations.goodput.learners import LearnersTime, simulate_learners

#: Told (what is done, how much of it, of how much).
Show = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Goodput:
    """What a scenario comes to.

    Attributes:
        config: Of it.
        chips: What failures leave: the share of the chips' time in which they could train.
        closed_form: The same in closed form.
        learners: What learners of these speeds make of it while none fails.
    """

    config: GoodputConfig
    chips: FleetTime
    closed_form: float
    learners: LearnersTime

    @property
    def goodput(self) -> float:
        """Share of the chips' time in which inner steps are made."""
        return self.chips.goodput * self.learners.goodput

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON values, hence `Any`."""
        return {
            "scenario": self.config.model_dump(),
            "goodput": self.goodput,
            "chips": {**asdict(self.chips), "closed_form": self.closed_form},
            "learners": asdict(self.learners),
        }


def simulate_goodput(config: GoodputConfig, show: Show | None = None) -> Goodput:
    """Simulate a scenario.

    A scheduled run stops all learners with each; else a stopped learner stops nobody.

    Args:
        config: Of it.
        show: Told what is done.

    Raises:
        ConfigError: If more fails than can be simulated, or no round is closed.
    """
    rng = np.random.default_rng(config.seed)
    failures_rng, rounds_rng = rng.spawn(2)
    rounds, fleet = config.rounds.rounds(config.learners), config.fleet
    is_scheduled = rounds.quorum is None
    chips = simulate_fleet(
        fleet,
        config.duration_s,
        failures_rng,
        quorum=rounds.quorum or config.learners,
        waits_for_all=is_scheduled,
        on_progress=show and (lambda done: show("learners' failures", done, config.learners)),
    )
    learners = config.rounds.learners(config.learners)
    duration_s = config.rounds.simulated_steps * config.rounds.step_s
    timed = simulate_learners(
        learners,
        rounds,
        rounds_rng,
        duration_s=duration_s,
        on_progress=show and (lambda now: show("seconds of rounds", int(now), int(duration_s))),
    )
    if not timed.num_rounds:
        raise ConfigError(
            f"rounds.simulated_steps: {config.rounds.simulated_steps}: no round is closed within "
            f"these {duration_s:g} s; simulate more, or lower rounds.up_time"
        )
    closed_form = fleet_goodput(fleet, waits_for_all=is_scheduled)
    return Goodput(config, chips, closed_form, timed)
