"""Figures of a run from the durations of its steps."""

import pytest

from diloco.telemetry.meter import StepMeter, utilisation


def test_nothing_measured_is_zero() -> None:
    meter = StepMeter()

    assert meter.undisturbed_step_s == 0.0
    assert meter.tokens_per_s == 0.0
    assert (meter.utilisation(0.0), meter.goodput(0.0)) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("durations", "median"),
    [([5.0], 5.0), ([1.0, 2.0], 1.5), ([9.0, 1.0, 2.0], 2.0), ([4.0, 1.0, 9.0, 2.0], 3.0)],
    ids=["one", "two", "odd", "even"],
)
def test_undisturbed_step_is_the_median_of_quiet_steps(
    durations: list[float], median: float
) -> None:
    meter = StepMeter()

    for duration_s in durations:
        meter.add(duration_s, 10, wall_s=0.0, is_quiet=True)
        meter.add(100.0, 10, wall_s=0.0, is_quiet=False)

    assert meter.undisturbed_step_s == median


def test_utilisation_and_goodput_of_a_run_with_waits() -> None:
    meter = StepMeter()

    meter.add(2.0, 10, wall_s=2.0, is_quiet=True)
    meter.add(3.0, 10, wall_s=5.0, is_quiet=False)

    assert meter.utilisation(10.0) == 2 * 2.0 / 10.0
    assert meter.goodput(10.0) == (2.0 + 3.0) / 10.0
    assert meter.tokens == 20


def test_utilisation_is_never_more_than_goodput() -> None:
    meter = StepMeter()

    # The quiet step shared its core with something else.
    meter.add(3.0, 10, wall_s=3.0, is_quiet=True)
    meter.add(2.0, 10, wall_s=5.0, is_quiet=False)

    assert meter.utilisation(5.0) == meter.goodput(5.0) == 1.0
    assert utilisation(num_steps=4, undisturbed_step_s=2.0, inner_s=6.0, wall_s=8.0) == 0.75


def test_token_rate_is_that_of_the_last_twenty_steps() -> None:
    meter = StepMeter()

    meter.add(1.0, 1_000_000, wall_s=1.0, is_quiet=True)
    for step in range(20):
        meter.add(0.5, 50, wall_s=1.0 + 2.0 * (step + 1), is_quiet=True)

    assert meter.tokens_per_s == 25.0
