"""A loss is compared with the lowest ones of the run."""

from __future__ import annotations

import math
import random

import pytest

from diloco.protocol.run.loss_history import LossHistory, LossWatch


def test_the_reference_is_the_median_of_the_lowest_five() -> None:
    history = LossHistory([3.0, 9.0])
    for loss in (5.0, 1.0, 2.0, 4.0, 8.0):
        history.add(loss)

    assert history.lowest == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert history.reference == 3.0
    assert not history.is_high(3.3, 0.11)
    assert history.is_high(3.4, 0.11)
    assert history.is_high(math.nan, 0.11)
    assert not LossHistory().is_high(99.0, 0.1)


def test_a_training_loss_that_rises_for_rounds_is_an_alarm_and_its_return_ends_it() -> None:
    watch, draw = LossWatch(period=10), random.Random(7)
    for step in range(2000):
        watch.add(2.5 + 3.0 * math.exp(-step / 300) + draw.gauss(0.0, 0.3))
        assert not watch.is_rising
    for step in range(30):
        assert watch.is_rising == (step >= 30)
        watch.add(5.545)
    assert watch.is_rising
    for _ in range(10):
        watch.add(2.6)
    assert not watch.is_rising


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_training_loss_that_is_not_finite_is_an_alarm_at_once(loss: float) -> None:
    watch = LossWatch(period=10)
    watch.add(2.5)

    assert watch.add(loss) is not None
    assert watch.is_rising
