"""Learners of unequal speed, and outages, on the project's real rounds under a virtual clock."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from diloco.protocol.rounds.timing import TimingRules
from diloco.simulations.goodput.failures import Fleet, simulate_fleet, simulate_learner, stopped
from diloco.simulations.goodput.learners import Learner, LearnersTime, simulate_learners
from diloco.simulations.goodput.lifetimes import Lifetimes
from diloco.simulations.goodput.rounds import LearnerRounds

TIMING = TimingRules(
    inner_steps_per_round=8,
    overlap_steps=2,
    grace_share=0.5,
    grace_cap_s=10.0,
    deadline_floor_s=5.0,
    deadline_cap_s=60.0,
)
ON_ARRIVAL = LearnerRounds(4, 1, TIMING, up_s=0.1, down_s=0.1)
SCHEDULED = replace(ON_ARRIVAL, quorum=None)


def run(learners: list[Learner], rounds: LearnerRounds, duration_s: float = 400.0) -> LearnersTime:
    return simulate_learners(learners, rounds, np.random.default_rng(1), duration_s=duration_s)


def test_a_quorum_without_grace_counts_the_first_and_with_it_nearly_all() -> None:
    learners = [Learner(1.0, 0.1)] * 7 + [Learner(1.25, 0.1)]
    hasty = replace(ON_ARRIVAL, timing=replace(TIMING, grace_s=0.0))

    without, with_grace = run(learners, hasty), run(learners, ON_ARRIVAL)

    assert without.contributors < 1.5
    assert without.solo > 0.5
    assert with_grace.contributors > 6.5
    assert min(without.goodput, with_grace.goodput) > 0.99


def test_a_scheduled_run_has_the_pace_of_its_slowest() -> None:
    time = run([Learner(1.0), Learner(1.0), Learner(2.0)], SCHEDULED)

    # What is in flight lets the fast ones be tau steps ahead.
    assert time.steps[2] == 200
    assert {*time.steps[:2]} <= {200, 201, 202}
    assert time.contributors == 3


@pytest.mark.parametrize("rounds", [SCHEDULED, ON_ARRIVAL], ids=["scheduled", "on-arrival"])
def test_an_outage_stops_others_only_where_they_wait(rounds: LearnerRounds) -> None:
    whole = run([Learner(1.0)] * 3, rounds)
    broken = run([Learner(1.0)] * 2 + [Learner(1.0, outages=[(100.5, 200.5)])], rounds)

    lost = [before - after for before, after in zip(whole.steps, broken.steps, strict=True)]
    # The step that it was in is lost as well; waiting for exchanges takes parts of others.
    assert lost[2] == pytest.approx(101, abs=1)
    expected = 99 if rounds is SCHEDULED else 0
    assert lost[:2] == pytest.approx([expected] * 2, abs=2)


def test_outages_of_chips_cost_a_scheduled_run_what_the_fleet_says() -> None:
    fleet = Fleet(4_000, 4, Lifetimes(1_000 * 200.0), Lifetimes(60.0))
    duration_s = 4_000.0
    streams = np.random.default_rng(5).spawn(4)
    outages = [stopped(simulate_learner(fleet, 1_000, duration_s, s), duration_s) for s in streams]

    events = run([Learner(0.5, outages=each) for each in outages], SCHEDULED, duration_s)
    expected = simulate_fleet(
        fleet, duration_s, np.random.default_rng(5), quorum=4, waits_for_all=True
    )

    # About 80 stops begin in the middle of a step, 0.25 s each of 4,000; others go on for two
    # steps, 1 s, and exchanges are waited for: 80 x 1.25 / 4000 is 2.5 points.
    assert events.goodput == pytest.approx(expected.goodput, abs=0.025)


def test_who_joins_shares_the_rest_of_the_work_and_stops_nobody() -> None:
    learners = [Learner(1.0, 0.05)] * 4 + [Learner(1.0, 0.05, joins_at=0.5)] * 4

    time = simulate_learners(learners, ON_ARRIVAL, np.random.default_rng(1), total_steps=1600)

    assert time.duration_s == pytest.approx(200 + 100, abs=3)
    assert time.goodput > 0.98
    assert time.contributors > 4
    assert time == simulate_learners(
        learners, ON_ARRIVAL, np.random.default_rng(1), total_steps=1600
    )


def test_nobody_joins_a_scheduled_run() -> None:
    with pytest.raises(ValueError, match="1 of 2 join late"):
        run([Learner(1.0), Learner(1.0, joins_at=0.5)], SCHEDULED)
