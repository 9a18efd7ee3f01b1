"""The guard: a flipped bit, a factor, another direction are refused, what all islands do is not."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from diloco.outer.aggregate import measured
from diloco.outer.guard import (
    WINDOW,
    Floats,
    History,
    Round,
    Sample,
    asks_trial,
    cosine_of_two,
    misdirected,
    outsized,
    refused,
)
from diloco.outer.units import Unit

NUMEL = (512, 64, 2048, 64)
UNITS = tuple(Unit(end, False, name=f"t{i}") for i, end in enumerate(itertools.accumulate(NUMEL)))
PLACES = [slice(end - n, end) for end, n in zip(itertools.accumulate(NUMEL), NUMEL, strict=True)]
OWN = np.array([[0.05 * n**0.5 for n in NUMEL], [0.15] * len(NUMEL)])


def delta(seed: int, scale: float = 1e-3) -> torch.Tensor:
    return torch.randn(sum(NUMEL), generator=torch.Generator().manual_seed(seed)) * scale


def seen(
    deltas: Sequence[torch.Tensor],
    steps: Sequence[int] = (),
    weights: Sequence[float] = (),
) -> Round:
    sizes = [measured(values, PLACES) for values in deltas]
    return Round(
        np.stack([np.stack([np.sqrt(squares), largest]) for squares, largest in sizes]),
        np.array(steps or [10.0] * len(deltas), float),
        weights or [1.0] * len(deltas),
        OWN,
    )


def after_rounds(count: int, num_islands: int, scale: float = 1e-3) -> History:
    history = History.empty(len(UNITS))
    for n in range(count):
        usual = seen([delta(100 * n + m, scale) for m in range(num_islands)])
        assert outsized(usual, history, UNITS) == {}
        history = history.after(usual.sizes, usual.steps)
    return history


def flipped(values: torch.Tensor, bit: int) -> torch.Tensor:
    """Flip a bit in a value of 0.0014 and put what it changes into a contribution."""
    (word,) = struct.unpack("<I", struct.pack("<f", 0.0014))
    (now,) = struct.unpack("<f", struct.pack("<I", word ^ (1 << bit)))
    changed = values.clone()
    changed[700] += 0.0014 - now
    return changed


@pytest.mark.parametrize("num_islands", [1, 2, 3, 4])
@pytest.mark.parametrize("rounds", [0, 1, 20], ids=["first", "second", "later"])
def test_a_factor_of_a_hundred_is_refused_of_that_island_alone(
    num_islands: int, rounds: int
) -> None:
    history = after_rounds(rounds, num_islands)
    deltas = [delta(m) for m in range(num_islands)]
    deltas[-1] = deltas[-1] * (1000 if rounds < 4 and num_islands == 1 else 100)

    found = outsized(seen(deltas), history, UNITS)

    assert list(found) == [num_islands - 1]
    assert "is usual" in found[num_islands - 1]


@pytest.mark.parametrize("num_islands", [1, 2, 3, 4])
@pytest.mark.parametrize("bit", range(20, 31))
def test_a_flipped_bit_is_refused_or_changes_less_than_the_model_has(
    num_islands: int, bit: int
) -> None:
    history = after_rounds(9, num_islands)
    deltas = [delta(m) for m in range(num_islands)]
    before = deltas[-1]
    deltas[-1] = flipped(before, bit)

    found = outsized(seen(deltas), history, UNITS)

    change = (deltas[-1] - before).abs().max()
    assert list(found) in ([], [num_islands - 1])
    # Values of the model are up to 0.15; what is let through is below that.
    assert found or change < 0.15
    if bit in (26, 30):
        assert "t2" in found[num_islands - 1] or "t1" in found[num_islands - 1]


@pytest.mark.parametrize("factor", [33.0, 60.0, 100.0])
@pytest.mark.parametrize("rounds", [4, 20])
def test_a_lawful_jump_of_an_island_that_is_alone_is_refused_twice(
    rounds: int, factor: float
) -> None:
    history = after_rounds(rounds, 1)
    jump = [seen([delta(n, factor * 1e-3)]) for n in range(30)]

    assert [bool(outsized(jump[0], history.unless_rejected(n), UNITS)) for n in range(6)] == [
        *(True, True),
        *[False] * 4,
    ]
    history = history.unless_rejected(2)
    for each in jump:
        assert not outsized(each, history.unless_rejected(0), UNITS), "from then on it is usual"
        history = history.after(each.sizes, each.steps)


@pytest.mark.parametrize("bit", range(20, 31))
@pytest.mark.parametrize("rejected_in_a_row", [0, 1, 2, 1000])
def test_however_often_it_is_refused_what_is_beyond_the_model_is_never_merged(
    bit: int, rejected_in_a_row: int
) -> None:
    before = delta(0)
    values = flipped(before, bit)
    history = after_rounds(9, 1).unless_rejected(rejected_in_a_row)

    is_refused = bool(outsized(seen([values]), history, UNITS))

    assert is_refused or (values - before).abs().max() <= 4 * OWN[1].max()
    assert is_refused or bit != 30


@pytest.mark.parametrize("seed", range(8))
def test_of_what_is_left_none_would_be_refused(seed: int) -> None:
    generator = np.random.default_rng(seed)
    num = int(generator.integers(1, 7))
    deltas = [delta(m) * 10.0 ** float(generator.integers(-2, 9)) for m in range(num)]
    samples = [values.numpy() * generator.choice([-1.0, 1.0]) for values in deltas]
    history = after_rounds(int(generator.integers(0, 9)), 2)

    found = refused(seen(deltas), samples, history, UNITS)

    left = [m for m in range(num) if m not in found]
    again = (
        refused(seen([deltas[m] for m in left]), [samples[m] for m in left], history, UNITS)
        if left
        else {}
    )
    assert not again


@pytest.mark.parametrize("num_islands", [2, 3, 4])
@pytest.mark.parametrize("factor", [1e-4, 0.1, 10.0, 1e4])
def test_what_all_islands_do_at_once_is_refused_of_none(num_islands: int, factor: float) -> None:
    """A learning rate that restarts, or is warmed up, or set by an operator."""
    history = after_rounds(20, num_islands)

    deltas = [delta(m) * factor for m in range(num_islands)]

    assert outsized(seen(deltas), history, UNITS) == {}


@pytest.mark.parametrize("rounds", [0, 20], ids=["first", "later"])
@pytest.mark.parametrize("small", [0.0, 1e-6])
def test_an_island_that_sends_nearly_nothing_makes_nobody_an_outlier(
    rounds: int, small: float
) -> None:
    for num_islands in (2, 3, 4):
        history = after_rounds(rounds, num_islands)
        deltas = [delta(0) * small, *(delta(m) for m in range(1, num_islands))]

        assert outsized(seen(deltas), history, UNITS) == {}


def test_more_inner_steps_may_be_as_many_times_larger() -> None:
    history = after_rounds(20, 2)
    deltas = [delta(0), delta(1) * 20]

    assert list(outsized(seen(deltas, [10, 10]), history, UNITS)) == [1]
    assert outsized(seen(deltas, [10, 40]), history, UNITS) == {}


def test_the_first_work_of_an_island_alone_may_be_long() -> None:
    """As Muon's 512 steps at 0.02 without a warm-up: 300 times the parameters."""
    first = [delta(0, 15.0)]

    assert list(outsized(seen(first, [16]), History.empty(len(UNITS)), UNITS)) == [0]
    assert outsized(seen(first, [512]), History.empty(len(UNITS)), UNITS) == {}
    assert list(outsized(seen([first[0] * 8], [1e6]), History.empty(len(UNITS)), UNITS)) == [0]


def test_a_tensor_that_was_never_touched_may_begin_to_move() -> None:
    """An expert that no token came to, or a frozen tensor that thaws."""

    def still(seed: int) -> torch.Tensor:
        values = delta(seed)
        values[PLACES[1]] = 0.0
        return values

    history = History.empty(len(UNITS))
    for n in range(20):
        usual = seen([still(2 * n), still(2 * n + 1)])
        history = history.after(usual.sizes, usual.steps)

    assert outsized(seen([delta(0), still(1)]), history, UNITS) == {}


def test_buffers_are_not_judged_and_nothing_but_zeros_judges_nobody() -> None:
    buffers = tuple(Unit(unit.end, True, is_buffer=True) for unit in UNITS)
    wild = seen([delta(0), delta(1) * 1e30])
    nothing = Round(np.zeros_like(wild.sizes), wild.steps, wild.weights, OWN * 0.0)

    assert outsized(wild, History.empty(len(UNITS)), buffers) == {}
    assert outsized(nothing, History.empty(len(UNITS)), UNITS) == {}
    alone = Round(wild.sizes[:1], wild.steps[:1], wild.weights[:1], OWN * 0.0)
    assert outsized(alone, History.empty(len(UNITS)), UNITS) == {}, "there is nothing to go by"


def test_who_has_no_weight_is_judged_and_nobody_is_compared_with_it() -> None:
    deltas = [delta(0), delta(1), delta(2), delta(3) * 1e6]

    assert list(outsized(seen(deltas), History.empty(4), UNITS)) == [3]
    weightless = seen([*deltas[:2], deltas[3]], weights=[1.0, 1.0, 0.0])
    assert list(outsized(weightless, after_rounds(9, 2), UNITS)) == [2]


def test_values_as_large_as_float32_goes_are_refused_by_name() -> None:
    values = delta(1)
    values[600] = -3e38

    found = outsized(seen([delta(0), values, delta(2)]), History.empty(4), UNITS)

    assert list(found) == [1]
    assert found[1].startswith("norm of t2 is inf") or found[1].startswith("norm of t1 is inf")


def test_a_history_comes_back_to_the_bit_and_stays_small() -> None:
    history = after_rounds(WINDOW + 3, 2)

    again = History.from_bytes(history.to_bytes(), len(UNITS))

    assert len(history) == len(again) == WINDOW
    assert again.to_bytes() == history.to_bytes()
    assert np.array_equal(again.sizes, history.sizes)
    assert len(History.from_bytes(history.to_bytes(), 5)) == 0, "of another plan"
    assert len(History.from_bytes(b"", 4)) == 0
    per_unit = len(history.to_bytes()) / len(UNITS)
    assert per_unit < 4 * 2 * WINDOW + 32, "bytes a tensor, however many islands there are"


def test_a_thousand_islands_are_judged_together() -> None:
    sizes: Floats = np.abs(np.random.default_rng(0).normal(1.0, 0.1, (1000, 2, 4)))
    sizes[17] *= 1e9
    many = Round(sizes, np.full(1000, 10.0), [1.0] * 1000, OWN)

    assert list(outsized(many, History.empty(4), UNITS)) == [17]


def test_measures_are_those_of_float64_over_tiles() -> None:
    values = torch.randn(400_000, generator=torch.Generator().manual_seed(5))
    places = [slice(0, 1), slice(1, 270_000), slice(270_000, 400_000)]

    squares, largest = measured(values, places)

    for place, square, peak in zip(places, squares, largest, strict=True):
        exact = float((values[place].double() ** 2).sum())
        assert square == pytest.approx(exact, rel=1e-5)
        assert peak == float(values[place].abs().max())


def heading(num_islands: int, *, noise: float = 1.0, scales: Sequence[float] = ()) -> list[Sample]:
    """Contributions that have a way in common, and each as much of its own."""
    common = delta(1000).numpy()
    scales = scales or [1.0] * num_islands
    return [s * (common + noise * delta(m).numpy()) for m, s in enumerate(scales)]


def judged(
    samples: Sequence[Sample], steps: Sequence[int] = (), weights: Sequence[float] = ()
) -> dict[int, str]:
    num = len(samples)
    round_steps = np.array(steps or [10.0] * num, float)
    sizes = np.zeros((num, 2, len(UNITS)))
    return misdirected(samples, Round(sizes, round_steps, weights or [1.0] * num, OWN))


@pytest.mark.parametrize("num_islands", [3, 4, 8])
@pytest.mark.parametrize("fault", ["signs", "noise", "labels"])
def test_who_goes_another_way_than_the_others_together_is_refused(
    num_islands: int, fault: str
) -> None:
    samples = heading(num_islands)
    own = delta(2000).numpy()
    samples[1] = {"signs": -samples[1], "noise": own, "labels": own - 0.3 * samples[0]}[fault]

    found = judged(samples)

    assert list(found) == [1]
    assert "mean cosine to the other contributions is" in found[1]


def test_unequal_islands_and_those_that_have_nothing_in_common_are_not() -> None:
    assert judged(heading(4, scales=(0.01, 1.0, 3.0, 30.0))) == {}
    mostly_its_own = heading(4)
    mostly_its_own[2] = mostly_its_own[2] + 3.0 * delta(3000).numpy()
    assert judged(mostly_its_own) == {}
    assert judged([delta(m).numpy() for m in range(4)]) == {}
    assert judged(heading(4, noise=0.0)) == {}


def test_a_direction_is_judged_where_it_can_be_told() -> None:
    samples = heading(3)
    flipped_signs = [samples[0], -samples[1], samples[2]]
    assert list(judged(flipped_signs)) == [1]
    assert judged(flipped_signs[:2]) == {}, "of two it cannot be told which"
    assert judged(flipped_signs, weights=[1.0, 0.0, 1.0]) == {}
    assert judged(flipped_signs, steps=[10, 4, 10]) == {}, "few steps are mostly noise"
    assert judged([s[:1000] for s in flipped_signs]) == {}, "a cosine by chance"
    assert judged([0.0 * s for s in samples]) == {}
    assert judged([samples[0], -samples[1], 0.0 * samples[2]]) == {}
    assert judged([]) == {}


def test_directions_of_a_thousand_islands_are_those_of_all_pairs() -> None:
    samples = heading(1000)
    samples[500] = -samples[500]
    matrix = np.stack(samples).astype(np.float64)
    matrix /= np.linalg.norm(matrix, axis=1, keepdims=True)
    others = np.delete(matrix, 500, axis=0)
    to_others = (others @ matrix[500]).mean()
    agreement = (np.square(others.sum(0)).sum() - 999) / (999 * 998)

    found = judged(samples)

    assert list(found) == [500]
    assert f"is {to_others:.3f}, theirs to each other is {agreement:.3f}:" in found[500]


def rounds_of_two(history: History, cosines: Sequence[float]) -> History:
    sizes, steps = np.ones((2, 2, len(UNITS))), np.ones(2)
    for cosine in cosines:
        history = history.after(sizes, steps, cosine)
        history = History.from_bytes(history.to_bytes(), len(UNITS))
    return history


@pytest.mark.parametrize(
    ("before", "later", "is_opposed"),
    [
        pytest.param([], [-0.4, -0.5, -0.4], True, id="from-the-start"),
        pytest.param([0.9], [-0.1] * 9, False, id="too-little-known"),
        pytest.param([0.9, 0.7, 0.6, 0.5], [-0.6, -0.5], False, id="two-rounds"),
        pytest.param([0.9, 0.7, 0.6, 0.5], [0.0, -0.5, 0.05], True, id="signs-or-noise"),
        pytest.param([0.9, 0.7, 0.6, 0.5], [0.0, float("nan"), 0.0, 0.0], True, id="one-late"),
        pytest.param([0.9, 0.7, 0.6, 0.5], [0.0] * 20, True, id="as-long-as-it-goes-on"),
        pytest.param([0.9, 0.7, 0.6, 0.5], [0.0, 0.0, 0.0, 0.4], False, id="well-again"),
        pytest.param([0.1] * 8, [-0.1] * 9, False, id="little-in-common"),
    ],
)
def test_two_that_go_against_each_other_for_three_rounds_are_opposed(
    before: Sequence[float], later: Sequence[float], is_opposed: bool
) -> None:
    history = rounds_of_two(History.empty(len(UNITS)), before)
    assert not history.is_opposed

    assert rounds_of_two(history, later).is_opposed == is_opposed


def test_one_round_of_two_that_do_not_agree_asks_for_trials_until_one_agrees() -> None:
    agreed = rounds_of_two(History.empty(len(UNITS)), [0.9, 0.7, 0.6, 0.5])
    opposed = rounds_of_two(agreed, [-0.2, float("nan")])

    found = [asks_trial(each.to_bytes()) for each in (agreed, opposed)]

    assert found == [False, True]
    assert not asks_trial(rounds_of_two(opposed, [0.4]).to_bytes()) and not asks_trial(b"")


def test_only_two_that_were_made_of_enough_steps_have_a_cosine() -> None:
    samples = [delta(m).numpy() for m in range(3)]
    pair = [samples[0], -samples[0]]

    assert cosine_of_two(pair, seen([delta(0)] * 2)) == pytest.approx(-1.0)
    assert np.isnan(cosine_of_two(pair, seen([delta(0)] * 2, steps=[10, 1])))
    assert np.isnan(cosine_of_two(samples, seen([delta(m) for m in range(3)])))
    assert np.isnan(cosine_of_two([], seen([delta(0)] * 2)))
