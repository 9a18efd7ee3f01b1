"""Decoupled DiLoCo's goodput under failures, unequal learners and scavenging: rows A5 to A8.

Where nobody waits, goodput alone says nothing of the rounds: they could count nobody, or not happen
at all. So a row of learners holds only if rounds keep their pace and count whom they should.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from diloco.simulations.goodput import closed_form
from diloco.simulations.goodput.config import GoodputConfig, RoundsConfig
from diloco.simulations.goodput.decoupled_table import (
    CHIPS,
    SCAVENGING,
    GoodputCell,
    fleet_of,
    scavenged,
    table_cells,
)
from diloco.simulations.goodput.failures import simulate_fleet, simulate_learner, stopped
from diloco.simulations.goodput.learners import Learner, LearnersTime, simulate_learners
from diloco.simulations.published.check_row import CheckRow, Comparison

_DECOUPLED = "Decoupled DiLoCo (2604.21428)"
_MONTH = "30 days"
#: Of the learners that train, those that a version counts at least where nobody is to be left out.
_NEARLY_ALL = 0.85
#: Versions an inner step of a learner at full speed, H = P, at least.
_PACE = 0.9
#: Share of a month in which nobody may train where the published 0 s is not reached.
_HARDLY_EVER = 1e-5


def goodput_table() -> Iterator[CheckRow]:
    """A5: the 30 cells of Table 1, simulated, and what they say of learners and jobs."""
    source = f"{_DECOUPLED}, Table 1"
    cells = list(table_cells(GoodputConfig()))
    worst = max(cells, key=lambda cell: abs(cell.off))
    inside = sum(abs(cell.off) <= 3.0 for cell in cells)
    what = f"goodput of {len(cells)} cells, {_MONTH} each"
    ours, is_met = f"{inside} within, worst {worst.off:+.2f}", inside == len(cells)
    yield CheckRow("A5", what, "Table 1", ours, "+-3", is_met, source)
    pairs = list(_pairs(cells))
    what = f"M learners on N chips as one job on N / M ({len(pairs)} pairs)"
    ours = f"{max(pairs):.2f} off at most"
    yield CheckRow("A5", what, "equal", ours, "+-1", max(pairs) <= 1.0, source)
    far = max(abs(cell.simulated - cell.closed_form) for cell in cells)
    what, ours = "events against the closed form, all cells", f"{far:.2f} off at most"
    yield CheckRow("A5", what, "equal", ours, "+-1.5", far <= 1.5, "ours")
    yield failures_in_rounds().row


def _pairs(cells: list[GoodputCell]) -> Iterator[float]:
    """Give how far M learners on M N chips are off one job on N, in points."""
    by = {(cell.row, cell.num_chips): cell.simulated for cell in cells}
    for learners in (2, 4, 8, 16):
        for chips in CHIPS:
            if (of_all := by.get((f"Decoupled M={learners}", learners * chips))) is not None:
                yield abs(of_all - by["DP, elastic", chips])


def failures_in_rounds() -> Comparison:
    """A5: the learners of a cell in rounds, where each loses what its own failures take, no more.

    Table 1 is of fleets without rounds; here the same failures stop learners that exchange.
    """
    config = fleet_of(GoodputConfig(rounds=RoundsConfig(noise=0.1)), 1_200_000, 8)
    duration_s, rounds = 1440.0, config.rounds
    rng = np.random.default_rng(config.seed)
    outages = [
        stopped(simulate_learner(config.fleet, chips, duration_s, stream), duration_s)
        for chips, stream in zip(config.fleet.learner_chips, rng.spawn(8), strict=True)
    ]
    time = simulate_learners(
        [Learner(rounds.step_s, rounds.noise, each) for each in outages],
        rounds.rounds(8),
        rng,
        duration_s=duration_s,
    )
    lost_s = sum(end - begin for each in outages for begin, end in each)
    up = 1 - lost_s / (8 * duration_s)
    counted = _counted(time, 8 * up)
    what = f"8 learners of 150,000 chips in rounds; {counted}"
    holds = _goes_on(time, 8 * up) and time.num_rounds >= _PACE * duration_s / rounds.step_s
    published = round(100 * up, 1)
    return Comparison("A5", what, published, 100 * time.goodput, 1.0, False, "%", "ours", holds)


def global_downtime() -> Iterator[CheckRow]:
    """A6: whether there is ever nobody who trains, in 30 days."""
    for learners, chips in ((8, 1_200_000), (8, 2_400_000), (16, 1_200_000), (16, 2_400_000)):
        nobody_s, expected_s = _fleet_time(learners, chips)
        what = f"nobody trains, in {_MONTH}: M={learners}, {chips:,} chips"
        ours = f"{nobody_s:.3g} s (mean {expected_s:.2g} s)"
        missed = (
            "not for a month: so many chips have some such seconds in 30 days; for how long a run "
            "0 s is published is not said"
        )
        hardly = _HARDLY_EVER * GoodputConfig().duration_s
        is_known = (learners, chips) == (8, 2_400_000) and nobody_s <= hardly
        row = ("A6", what, "0 s", ours, "none", nobody_s == 0.0, _DECOUPLED)
        yield CheckRow(*row, missed if is_known else "")
    nobody_s, expected_s = _fleet_time(4, 1_200_000)
    what = f"somebody trains, in {_MONTH}: M=4, 1,200,000 chips"
    percent = 100 * (1 - nobody_s / GoodputConfig().duration_s)
    yield Comparison("A6", what, 100, percent, 0.5, False, "%", _DECOUPLED).row
    what = "the same: seconds in which nobody does, of its closed form"
    yield Comparison("A6", what, round(expected_s), nobody_s, 0.15, True, "s", "ours").row


def _fleet_time(learners: int, chips: int) -> tuple[float, float]:
    """Simulate seconds in which nobody trains, and give their mean in closed form."""
    config = fleet_of(GoodputConfig(), chips, learners)
    rng = np.random.default_rng(config.seed)
    time = simulate_fleet(config.fleet, config.duration_s, rng)
    return time.nobody_s, closed_form.nobody_s(config.fleet, config.duration_s)


def heterogeneity() -> Iterator[Comparison]:
    """A7: eight learners, the slowest 18 % behind, steps that vary by 10 %.

    Published are goodput and quality: K=1 counts too few, which the grace corrects.
    """
    unequal = {"slow_learners": 1, "slow_by": 0.18, "noise": 0.1}
    for name, published, counted, how in (
        ("K=8, waits for all", 84, (8.0, 8.0), {"merge": "scheduled", "quorum": 8}),
        ("K=1", 100, (1.0, 1.5), {"quorum": 1, "grace": "0s"}),
        ("K=1 + grace", 100, (7.0, 8.0), {"quorum": 1, "grace": "auto"}),
    ):
        config = GoodputConfig(learners=8, rounds=RoundsConfig.model_validate({**unequal, **how}))
        rounds = config.rounds
        rng = np.random.default_rng(config.seed)
        duration_s = rounds.simulated_steps * rounds.step_s
        time = simulate_learners(rounds.learners(8), rounds.rounds(8), rng, duration_s=duration_s)
        least, most = counted
        pace = time.num_rounds / (published / 100 * rounds.simulated_steps)
        holds = least <= time.contributors <= most and pace >= _PACE
        wanted = f"{least:g}" if least == most else f"{least:g} to {most:g}"
        what = f"{name}: goodput; {time.contributors:.1f} of 8 counted ({wanted})"
        source = f"{_DECOUPLED}, heterogeneity"
        yield Comparison("A7", what, published, 100 * time.goodput, 2.0, False, "%", source, holds)


def scavenging() -> Iterator[Comparison]:
    """A8: more learners in the second half of the work."""
    config = GoodputConfig(
        learners=8, rounds=RoundsConfig(num_fragments=4, noise=0.1, simulated_steps=480)
    )
    base_s = scavenged(config, 0.0).duration_s
    source = f"{_DECOUPLED}, scavenging"
    for more, published in SCAVENGING.items():
        if more:
            time = scavenged(config, more)
            what = f"wall time, +{more:.0%} chips in half the work; {_counted(time, time.present)}"
            ratio, holds = time.duration_s / base_s, _goes_on(time, time.present)
            yield Comparison("A8", what, published, ratio, 0.01, False, "", source, holds)


def _counted(time: LearnersTime, there: float) -> str:
    return f"{time.contributors:.1f} of {there:.1f} counted"


def _goes_on(time: LearnersTime, there: float) -> bool:
    """Whether nearly all learners that are there are counted."""
    return time.contributors >= _NEARLY_ALL * there
