"""When rounds open, wait and expire, by figures that were calculated by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from diloco.protocol.rounds.timing import (
    MOST_FASTER,
    Downtime,
    FixedTiming,
    MeasuredTiming,
    StepTimes,
    TimingRules,
)

RULES = TimingRules(
    inner_steps_per_round=30,
    overlap_steps=2,
    grace_share=0.5,
    grace_cap_s=10.0,
    deadline_floor_s=1.0,
    deadline_cap_s=60.0,
)
BOTH = ("fast", "slow")


def step_times() -> StepTimes:
    steps = StepTimes()
    steps.stepped("fast", 1.0)
    steps.stepped("slow", 2.0)
    return steps


def measured(**changes: float) -> MeasuredTiming:
    return MeasuredTiming(replace(RULES, **changes), step_times(), begins_at=100.0)


def one_round(timing: MeasuredTiming, at: float, *, slow_after: float) -> None:
    """Open, fast after 1 s, slow so much later, close, fetched half a second later."""
    timing.opened(at)
    timing.arrived("fast", at + 1.0)
    timing.at_quorum(at + 1.0)
    timing.arrived("slow", at + 1.0 + slow_after)
    timing.closed(at + 1.0 + slow_after)
    timing.published()
    timing.fetched(at + 1.5 + slow_after)


def test_a_round_opens_when_the_fastest_has_made_its_steps_since_the_close() -> None:
    timing = measured()
    one_round(timing, 130.0, slow_after=1.0)

    assert timing.opens_at(BOTH) == 132.0 + 30 * 1.0
    assert timing.opens_at(("slow",)) == 132.0 + 30 * 2.0


def test_rounds_that_grow_open_as_many_steps_after_the_close_as_each_has() -> None:
    timing = measured(first_round=28)
    one_round(timing, 130.0, slow_after=1.0)

    lengths = []
    for _ in range(4):
        lengths.append(timing.opens_at(BOTH) - 132.0)
        timing.published()
    assert lengths == [29.0, 30.0, 30.0, 30.0]

    timing.resumed(1, None, 0, 0.0)
    assert timing.opens_at(BOTH) == 132.0 + 29.0


def test_an_island_that_says_that_its_steps_take_no_time_does_not_decide_when_rounds_open() -> None:
    steps = step_times()
    steps.stepped("liar", 1e-6)
    timing = MeasuredTiming(RULES, steps, 100.0)
    assert timing.opens_at(("fast", "slow", "liar")) == 100.0 + 30 * 1.0 / MOST_FASTER


def test_of_two_islands_the_faster_one_decides_however_slow_the_other_is() -> None:
    steps = step_times()
    steps.stepped("slowest", 10.0)
    assert MeasuredTiming(RULES, steps, 100.0).opens_at(("fast", "slowest")) == 100.0 + 30 * 1.0


def test_nothing_opens_before_somebody_has_told_a_step() -> None:
    timing = MeasuredTiming(RULES, StepTimes(), begins_at=0.0)

    assert timing.opens_at(BOTH) == math.inf


def test_fragments_take_turns_from_the_first_interval_on() -> None:
    first = [measured(phase=(p + 1) / 3).opens_at(BOTH) for p in range(3)]

    assert first == [110.0, 120.0, 130.0]


def test_an_expired_attempt_is_tried_again_soon_then_ever_later_but_within_a_round() -> None:
    timing, waits = measured(), []
    for _ in range(7):
        timing.expired(200.0)
        waits.append(timing.opens_at(BOTH) - 200.0)

    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_the_grace_spends_a_share_of_the_slack() -> None:
    timing = measured()
    assert timing.grace_s(BOTH) == 0.0  # neither quorum nor fetching is known

    one_round(timing, 130.0, slow_after=1.0)

    # tau * slowest - (until quorum + until fetched), of which half is spent
    assert timing.grace_s(BOTH) == pytest.approx(0.5 * (2 * 2.0 - (1.0 + 0.5)))
    assert timing.grace_s(("fast",)) == pytest.approx(0.5 * (2 * 1.0 - (1.0 + 0.5)))
    assert measured_with(timing_cap=0.2).grace_s(BOTH) == 0.2


def measured_with(*, timing_cap: float) -> MeasuredTiming:
    timing = measured(grace_cap_s=timing_cap)
    one_round(timing, 130.0, slow_after=1.0)
    return timing


def test_a_member_without_a_known_step_takes_no_grace_from_the_others() -> None:
    timing = measured()
    one_round(timing, 130.0, slow_after=1.0)

    assert timing.grace_s((*BOTH, "new")) == timing.grace_s(BOTH) > 0.0
    assert timing.grace_s(("new",)) == 0.0


def test_a_close_that_came_to_nothing_is_not_what_is_fetched() -> None:
    timing = measured()
    one_round(timing, 130.0, slow_after=1.0)
    before = timing.grace_s(BOTH)
    timing.closed(150.0)  # of an attempt that is broken
    timing.fetched(132.5)  # what was published at 132

    assert timing.grace_s(BOTH) == before


def test_a_restart_goes_on_waiting_ever_longer() -> None:
    timing = measured()
    timing.resumed(0, None, 3, 200.0)

    assert timing.opens_at(BOTH) == 204.0


def restarted(ended_at: float, *closed_at: float) -> list[float]:
    """When fragments open after a restart that closed at these times."""
    downtime = Downtime(ended_at)
    timings = []
    for p, at in enumerate(closed_at):
        rules = replace(RULES, phase=(p + 1) / len(closed_at))
        timing = MeasuredTiming(rules, step_times(), ended_at, downtime)
        timing.resumed(7, at, 0, ended_at)
        timings.append(timing)
    return [timing.opens_at(BOTH) for timing in timings]


def test_the_floor_counts_from_the_close_before_a_restart() -> None:
    assert restarted(125.0, 100.0, 110.0, 120.0) == [130.0, 140.0, 150.0]


def test_what_is_overdue_after_a_restart_opens_in_turn_the_oldest_at_once() -> None:
    assert restarted(1000.0, 110.0, 120.0, 100.0) == [1010.0, 1020.0, 1000.0]


def test_a_fragment_that_is_long_overdue_delays_no_other() -> None:
    assert restarted(1000.0, 100.0, 990.0, 995.0) == [1000.0, 1020.0, 1025.0]


def test_a_round_after_the_restart_is_shifted_no_more() -> None:
    downtime = Downtime(1000.0)
    timing = MeasuredTiming(RULES, step_times(), 1000.0, downtime)
    timing.resumed(7, 100.0, 0, 1000.0)
    timing.closed(1001.0)

    assert timing.opens_at(BOTH) == 1031.0


def test_version_0_keeps_its_first_interval_over_a_restart() -> None:
    timing = MeasuredTiming(replace(RULES, phase=1 / 3), step_times(), 104.0, Downtime(104.0))
    timing.resumed(0, 100.0, 0, 104.0)

    assert timing.opens_at(BOTH) == 110.0


def test_where_fetching_takes_longer_than_the_overlap_there_is_no_grace() -> None:
    timing = measured()
    one_round(timing, 130.0, slow_after=0.0)
    timing.fetched(140.0)

    assert timing.grace_s(BOTH) == 0.0


def test_a_grace_that_comes_to_nothing_says_what_of() -> None:
    timing = measured()
    assert timing.lacks_grace(BOTH) is None, "not known yet"
    one_round(timing, 130.0, slow_after=0.0)
    assert timing.lacks_grace(BOTH) is None
    timing.fetched(140.0)

    assert timing.lacks_grace(BOTH) == pytest.approx((4.0, 1.0 + (0.5 + 9.0) / 2))
    assert timing.lacks_grace((*BOTH, "new")) is None, "which may be slower than both"

    fixed = MeasuredTiming(replace(RULES, grace_s=0.0), step_times(), begins_at=100.0)
    one_round(fixed, 130.0, slow_after=0.0)
    fixed.fetched(140.0)
    assert fixed.lacks_grace(BOTH) is None, "it is what was asked for"


def test_the_deadline_follows_how_late_members_come() -> None:
    timing = measured()
    assert timing.deadline_s(BOTH) == 60.0  # of unknown members: the longest

    one_round(timing, 130.0, slow_after=2.0)
    first = timing.deadline_s(BOTH)
    one_round(timing, 170.0, slow_after=2.0)

    assert first == pytest.approx(2.0 + 4 * 1.0)  # the first deviation is half of the value
    assert timing.deadline_s(BOTH) == pytest.approx(2.0 + 4 * 0.5)
    assert timing.deadline_s(("fast",)) == 1.0  # never late: the shortest
    assert timing.deadline_s((*BOTH, "new")) == 60.0


def test_every_expiry_doubles_the_deadline_up_to_the_longest() -> None:
    timing = measured()
    one_round(timing, 130.0, slow_after=2.0)
    deadlines = []
    for _ in range(5):
        timing.expired(200.0)
        deadlines.append(timing.deadline_s(BOTH))
    timing.published()

    assert deadlines == [12.0, 24.0, 48.0, 60.0, 60.0]
    assert timing.deadline_s(BOTH) == 6.0


@pytest.mark.parametrize("step_s", [0.0, -1.0, math.inf, math.nan, 5e-324, 1e308])
def test_what_is_no_duration_is_not_taken(step_s: float) -> None:
    steps = step_times()
    steps.stepped("fast", step_s)

    assert steps.of(("fast",)) == [1.0]


def test_an_average_weighs_the_newest_half() -> None:
    steps = step_times()
    steps.stepped("fast", 2.0)
    steps.stepped("fast", 2.0)
    steps.forget("slow")

    assert steps.of(BOTH) == [1.75]


def test_fixed_times_are_what_was_said() -> None:
    timing = FixedTiming(deadline_s=60.0, grace_s=3.0, opening_floor_s=5.0)
    assert timing.opens_at(BOTH) == -math.inf

    timing.closed(10.0)

    assert (timing.opens_at(BOTH), timing.grace_s(BOTH), timing.deadline_s(BOTH)) == (15, 3, 60)
