"""Chips that fail and come back: what their learners' reconfigurations leave of the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.simulations.goodput.closed_form import fleet_goodput, nobody_s
from diloco.simulations.goodput.failures import (
    Fleet,
    simulate_fleet,
    simulate_learner,
    stopped,
)
from diloco.simulations.goodput.lifetimes import Floats, Lifetimes

YEAR_S = 8760 * 3600.0


@dataclass(frozen=True)
class Given(Lifetimes):
    """Times that a test has chosen; what comes after them never happens."""

    times: Sequence[float] = ()

    def draw(self, count: int, rng: np.random.Generator) -> Floats:
        rest = [np.inf] * count
        return (
            np.array([*self.times, *rest][:count]) if count == len(self.times) else np.array(rest)
        )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # Fails at 10 and, while it reconfigures, at 15; both are away from 30 on, and back at 45.
        ({}, [(10.0, 30.0), (45.0, 60.0)]),
        # The return at 40 is taken in by itself; that at 45 joins it.
        ({"merges_growth": False}, [(10.0, 30.0), (40.0, 55.0)]),
        # Both returns fall into the restart.
        ({"is_elastic": False}, [(10.0, 83.0)]),
        ({"is_elastic": False, "restart_s": 95.0}, [(10.0, 100.0)]),
    ],
    ids=["merged-growth", "growth-each", "spares", "beyond-the-end"],
)
def test_what_happens_in_a_reconfiguration_joins_it(
    changes: dict[str, object], expected: list[tuple[float, float]]
) -> None:
    lives, absences = Given(1.0, times=(10.0, 15.0, 1e9)), Given(1.0, times=(30.0, 30.0))
    fleet = replace(Fleet(3, 1, lives, absences), **changes)  # type: ignore[arg-type]

    learner = simulate_learner(fleet, 3, 100.0, np.random.default_rng(0))

    assert stopped(learner, 100.0) == expected


def test_an_elastic_learner_trains_with_the_chips_it_has() -> None:
    lives, absences = Given(1.0, times=(10.0, 15.0, 1e9)), Given(1.0, times=(30.0, 30.0))

    time = simulate_fleet(Fleet(3, 1, lives, absences), 100.0, np.random.default_rng(0))

    # All three until 10, one from 30 to 45, all three again from 60 to 100.
    assert time.goodput == pytest.approx((3 * 10 + 1 * 15 + 3 * 40) / 300)
    assert time.nobody_s == pytest.approx(20 + 15)
    assert (time.num_failures, time.num_reconfigurations) == (2, 2)


@given(
    learners=st.integers(1, 4),
    rate=st.floats(1e-4, 2e-2),
    shrink_s=st.floats(1.0, 60.0),
    growth_s=st.floats(0.0, 30.0),
    absence_s=st.floats(60.0, 200.0),
    shape=st.floats(0.7, 4.0),
    exponent=st.floats(0.7, 3.0),
    is_elastic=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_events_agree_with_the_closed_form(
    learners: int,
    rate: float,
    shrink_s: float,
    growth_s: float,
    absence_s: float,
    shape: float,
    exponent: float,
    is_elastic: bool,
    seed: int,
) -> None:
    # `rate` is of failures of a learner; as many chips as make one chip's failure nothing.
    chips = 20_000 * learners
    fleet = Fleet(
        chips,
        learners,
        Lifetimes(20_000 / rate),
        Lifetimes(absence_s, shape, exponent),
        is_elastic=is_elastic,
        shrink_s=shrink_s,
        restart_s=shrink_s,
        growth_s=growth_s,
    )
    duration_s = 4_000 / rate  # 4,000 failures a learner

    time = simulate_fleet(fleet, duration_s, np.random.default_rng(seed))

    # The stops' total varies by about sqrt(2 / 4000) of itself, 2.2 %, so g by 0.6 points at most;
    # four of these, and 1.5 points for what is not exponential about growths (they hide in stops).
    assert time.goodput == pytest.approx(fleet_goodput(fleet), abs=0.04)


def test_learners_that_wait_for_each_other_stop_with_each() -> None:
    fleet = Fleet(40_000, 4, Lifetimes(40_000 * 100.0), Lifetimes(60.0))

    alone = simulate_fleet(fleet, 2e6, np.random.default_rng(1))
    together = simulate_fleet(fleet, 2e6, np.random.default_rng(1), quorum=4, waits_for_all=True)

    # The closed form has growths that are hidden in stops: chips that are back within the 20 s of
    # theirs, 28 %, so up to 1 point of a learner's goodput, and 4 of all four.
    assert alone.goodput == pytest.approx(fleet_goodput(fleet), abs=0.01)
    assert together.goodput == pytest.approx(fleet_goodput(fleet, waits_for_all=True), abs=0.04)
    assert together.goodput == pytest.approx(alone.goodput**4, abs=0.01)
    assert together.below_quorum_s == pytest.approx(2e6 * (1 - together.goodput), rel=0.01)
    assert alone.nobody_s == pytest.approx(nobody_s(fleet, 2e6), rel=0.5)


def test_2_4_million_chips_for_30_days_are_the_same_for_a_seed() -> None:
    fleet = Fleet(2_400_000, 16, Lifetimes(YEAR_S), Lifetimes(120.0, 2.0, 3.0))

    times = [simulate_fleet(fleet, 30 * 86400.0, np.random.default_rng(n)) for n in (1, 1, 2)]

    assert times[0] == times[1] != times[2]
    # 30 / 365 of the chips, and those that fail again: a deviation is sqrt of that.
    assert times[0].num_failures == pytest.approx(2_400_000 * 30 / 365, abs=5 * 444)


@pytest.mark.parametrize(
    ("shape", "exponent"), [(1.0, 1.0), (2.0, 1.0), (0.7, 1.0), (2.0, 3.0), (0.8, 2.0), (3.0, 0.5)]
)
def test_times_have_the_mean_that_is_asked_for(shape: float, exponent: float) -> None:
    times = Lifetimes(90.0, shape, exponent).draw(200_000, np.random.default_rng(0))

    # The widest of these has a deviation of 1.5 means: four of 1.5 / sqrt(200000).
    assert times.mean() == pytest.approx(90.0, rel=0.014)
    assert times.min() > 0.0


def test_chips_that_wear_out_fail_late_and_infants_early() -> None:
    halves = {}
    for shape in (0.5, 1.0, 3.0):
        fleet = Fleet(50_000, 1, Lifetimes(100 * 86400.0, shape), Lifetimes(60.0))
        first, both = (
            simulate_fleet(fleet, days * 86400.0, np.random.default_rng(3)).num_failures
            for days in (15, 30)
        )
        halves[shape] = first / both

    assert halves[0.5] > 0.6 > halves[1.0] > 0.45 > 0.2 > halves[3.0]
