from __future__ import annotations

import itertools
import math

import pytest

from diloco.report.statistics import Interval, Spread


@pytest.mark.parametrize(
    ("count", "rank"),
    # Smallest rank of the 95 % sign-test interval of the median, from published tables.
    [(6, 1), (8, 1), (9, 2), (10, 2), (15, 4), (20, 6), (25, 8), (30, 10)],
)
def test_interval_has_the_ranks_of_the_sign_test(count: int, rank: int) -> None:
    values = [float(value) for value in range(1, count + 1)]

    interval = Interval.of(values[::-1])

    assert (interval.low, interval.high) == (rank, count + 1 - rank)
    assert interval.median == (count + 1) / 2
    assert interval.count == count


@pytest.mark.parametrize("count", [1, 2, 5])
def test_few_values_give_their_whole_range(count: int) -> None:
    values = [float(value) for value in range(count)]

    interval = Interval.of(values)

    assert (interval.low, interval.high) == (0.0, count - 1)


@pytest.mark.parametrize("confidence", [0.5, 0.8, 0.95])
def test_interval_misses_the_median_as_rarely_as_promised(confidence: float) -> None:
    # Every value lies below the true median, 0, with probability 1/2: count all sign patterns.
    count = 9
    misses = 0
    for signs in itertools.product((-1, 1), repeat=count):
        interval = Interval.of([sign * (i + 1) for i, sign in enumerate(signs)], confidence)
        misses += not interval.low <= 0 <= interval.high

    assert misses / 2**count <= 1 - confidence + 1e-12


def test_an_interval_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        Interval.of([])


def test_spread_is_mean_and_sample_deviation() -> None:
    assert Spread.of([1.0, 2.0, 3.0]) == Spread(2.0, 1.0)
    assert Spread.of([1.5]) == Spread(1.5, None)
    assert math.isclose(Spread.of([0.0, 1.0]).deviation or 0.0, math.sqrt(0.5))
    with pytest.raises(ValueError, match="at least one value"):
        Spread.of([])
