"""Merge rules as coefficients: radial-directional averages, clipped contributions."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.errors import AggregationError
from diloco.outer.aggregate import inner_products, weighted_sum
from diloco.outer.combination import (
    Combination,
    MergeRule,
    coefficients_of,
    combine,
    mean_of,
)
from diloco.outer.units import Unit
from diloco.versions.replay import COEFFICIENT_TOLERANCE
from tests.outer.test_outer_aggregate import weighted_mean

RADIAL = MergeRule("radial_directional")
# Coefficients are float64 rounded to float32, and M products and sums in float32 follow.
TOLERANCE = 16 * 2.0**-24


def units(*ends: int) -> tuple[Unit, ...]:
    return tuple(Unit(end, False) for end in ends)


def products(deltas: Sequence[Tensor], places: Sequence[slice]) -> Tensor:
    return inner_products(lambda place: [delta[place] for delta in deltas], len(deltas), places)


def combined(
    deltas: Sequence[Tensor],
    weights: Sequence[float],
    rule: MergeRule,
    parts: tuple[Unit, ...] = (),
    *,
    is_flush: bool = False,
) -> Combination:
    parts = parts or units(deltas[0].numel())
    borders = itertools.pairwise((0, *(unit.end for unit in parts)))
    grams = products(deltas, [slice(start, end) for start, end in borders])
    return combine(grams.tolist(), parts, weights, rule, is_flush=is_flush)


def merged(
    deltas: Sequence[Tensor],
    weights: Sequence[float],
    rule: MergeRule = RADIAL,
    parts: tuple[Unit, ...] = (),
) -> Tensor:
    combination = combined(deltas, weights, rule, parts)
    return weighted_sum(deltas, combination.within(0, deltas[0].numel()))


def norm(values: Tensor) -> float:
    return float(values.double().norm())


def is_close(values: Tensor, expected: Tensor) -> bool:
    return norm(values.double() - expected.double()) <= TOLERANCE * max(norm(expected), 2.0**-126)


def drawn(seed: int, count: int, numel: int = 300) -> list[Tensor]:
    return list(torch.randn(count, numel, generator=torch.Generator().manual_seed(seed)))


@st.composite
def rounds(draw: st.DrawFn) -> tuple[list[Tensor], list[float]]:
    count = draw(st.integers(1, 6))
    deltas = drawn(draw(st.integers(0, 10_000)), count)
    scales = draw(st.lists(st.floats(1e-6, 1e6), min_size=count, max_size=count))
    weights = draw(st.lists(st.integers(1, 10_000), min_size=count, max_size=count))
    return [d * s for d, s in zip(deltas, scales, strict=True)], [float(w) for w in weights]


def by_the_formula(deltas: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """[sum w |v| / sum w] phi(sum w phi(v) / sum w), in float64."""
    total = sum(weights)
    pairs = [(w / total, d.double()) for d, w in zip(deltas, weights, strict=True)]
    direction = sum((w * d / d.norm() for w, d in pairs), torch.zeros(300, dtype=torch.float64))
    radius = sum(w * float(d.norm()) for w, d in pairs)
    return radius * direction / direction.norm()


# -- radial-directional averaging ------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(rounds())
def test_the_coefficients_give_the_formula(drawn_round: tuple[list[Tensor], list[float]]) -> None:
    deltas, weights = drawn_round

    assert is_close(merged(deltas, weights), by_the_formula(deltas, weights))


@settings(max_examples=40, deadline=None)
@given(rounds(), st.floats(1e-6, 1e6))
def test_it_is_equivariant_to_scale(
    drawn_round: tuple[list[Tensor], list[float]], scale: float
) -> None:
    deltas, weights = drawn_round

    assert is_close(
        merged([delta * scale for delta in deltas], weights), merged(deltas, weights) * scale
    )


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_equal_contributions_give_what_they_are(count: int) -> None:
    delta = drawn(3, 1)[0]

    assert is_close(merged([delta] * count, [float(m + 1) for m in range(count)]), delta)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 3.3e20])
def test_one_contribution_is_itself_to_the_bit(scale: float) -> None:
    delta = drawn(4, 1)[0] * scale

    assert torch.equal(merged([delta], [1536.0]), delta)


@pytest.mark.parametrize("count", range(1, 17))
def test_orthogonal_contributions_keep_their_norm_where_the_mean_shrinks(count: int) -> None:
    deltas = [row * 4.0 for row in torch.eye(16)[:count]]

    assert norm(merged(deltas, [1.0] * count)) == pytest.approx(4.0, rel=TOLERANCE)
    mean = weighted_mean(deltas, [1.0] * count)
    assert norm(mean) == pytest.approx(4.0 / math.sqrt(count), rel=TOLERANCE)


def test_weights_count_in_the_length_and_in_the_direction() -> None:
    # R = (3 * 2 + 1 * 6) / 4 = 3; u = (3/4, 1/4), |u| = sqrt(10)/4.
    result = merged([torch.tensor([2.0, 0.0]), torch.tensor([0.0, 6.0])], [3.0, 1.0])

    assert is_close(result, torch.tensor([9.0, 3.0], dtype=torch.float64) / math.sqrt(10))


def test_every_unit_has_a_radius_and_a_direction_of_its_own() -> None:
    deltas = drawn(5, 3)
    parts = units(100, 250, 300)

    together = merged(deltas, [1.0, 2.0, 3.0], parts=parts)

    for start, end in ((0, 100), (100, 250), (250, 300)):
        alone = merged([delta[start:end] for delta in deltas], [1.0, 2.0, 3.0])
        assert torch.equal(together[start:end], alone)
    assert not is_close(together, merged(deltas, [1.0, 2.0, 3.0]))


def test_a_plain_unit_takes_the_mean_to_the_bit() -> None:
    deltas = drawn(6, 3)
    parts = (Unit(100, True), Unit(300, False))

    result = merged(deltas, [1.0, 2.0, 4.0], parts=parts)

    assert torch.equal(result[:100], weighted_mean([d[:100] for d in deltas], [1.0, 2.0, 4.0]))
    assert norm(result[100:]) > norm(weighted_mean(deltas, [1.0, 2.0, 4.0])[100:])


def test_a_zero_vector_has_no_direction_but_its_norm_counts() -> None:
    delta = drawn(7, 1)[0]

    assert is_close(merged([delta, torch.zeros(300)], [1.0, 1.0]), delta * 0.5)
    assert not merged([torch.zeros(300)] * 3, [1.0] * 3).any()


def test_directions_that_cancel_give_nothing() -> None:
    delta = drawn(8, 1)[0]

    assert not merged([delta, -delta], [1.0, 1.0]).any()


@pytest.mark.parametrize("angle", [1.0, 1e-2, 2e-3, 1.9e-3, 1e-4, 1e-7, 0.0])
def test_directions_that_nearly_cancel_are_not_made_long_out_of_rounding(angle: float) -> None:
    """v and one at `angle` from -v: half of it is |u|, about."""
    gram = [[1.0, -math.cos(angle)], [-math.cos(angle), 1.0]]
    other = [[1.0, -math.cos(angle) + 1e-13], [-math.cos(angle) + 1e-13, 1.0]]  # other hardware

    ours, theirs = (
        combine([g], units(8), [1.0, 1.0], RADIAL, is_flush=False) for g in (gram, other)
    )

    assert ours.distance(theirs) < COEFFICIENT_TOLERANCE
    ((one, two),) = ours.coefficients
    length = math.sqrt(max(0.0, one * one + two * two + 2 * one * two * gram[0][1]))
    assert length == pytest.approx(min(1.0, math.sin(angle / 2) * 2**10), rel=1e-6, abs=1e-4)


def test_a_vanishing_contribution_does_not_break_float32() -> None:
    delta, other = drawn(9, 2)

    result = merged([delta, other * 1e-40], [1.0, 1.0])

    assert is_close(result, delta * 0.5)


def test_no_weight_at_all_merges_to_nothing() -> None:
    assert not merged(drawn(10, 2), [0.0, 0.0]).any()


@pytest.mark.parametrize("borders", [(150,), (1, 299), (64, 128, 192)])
def test_a_tensor_split_over_lanes_merges_as_in_one(borders: tuple[int, ...]) -> None:
    deltas, weights = drawn(11, 4), [1.0, 5.0, 2.0, 1.0]
    lanes = list(itertools.pairwise((0, *borders, 300)))
    grams = sum(
        (products([d[a:b] for d in deltas], [slice(0, b - a)]) for a, b in lanes),
        torch.zeros(1, 4, 4, dtype=torch.float64),
    )

    split = combine(grams.tolist(), units(300), weights, RADIAL, is_flush=False)
    by_lane = [weighted_sum([d[a:b] for d in deltas], split.within(a, b)) for a, b in lanes]

    assert is_close(torch.cat(by_lane), merged(deltas, weights))


def test_inner_products_are_float64_over_tiles() -> None:
    # 2^24 + 1 is no float32; 40,000 values are three tiles.
    deltas = [torch.full((40_000,), 4097.0), torch.ones(40_000)]

    gram = products(deltas, [slice(0, 39_999), slice(39_999, 40_000)])

    assert gram[0].tolist() == [[4097.0**2 * 39_999, 4097.0 * 39_999], [4097.0 * 39_999, 39_999.0]]
    assert gram[1].tolist() == [[4097.0**2, 4097.0], [4097.0, 1.0]]


@pytest.mark.parametrize("num", [1, 2, 64, 300])
def test_tile_after_tile_is_multiplied_whatever_is_asked_for_at_once(num: int) -> None:
    deltas = torch.randn(num, 150_000, generator=torch.Generator().manual_seed(num))
    places = [slice(7, 100), slice(100, 90_000), slice(90_000, 150_000)]
    expected = torch.zeros(3, num, num, dtype=torch.float64)
    for gram, place in zip(expected, places, strict=True):
        for tile in deltas[:, place].split(1 << 14, dim=1):
            values = tile.double().contiguous()
            gram.addmm_(values, values.T)
    asked: list[int] = []

    def deltas_in(place: slice) -> list[Tensor]:
        asked.append(place.stop - place.start)
        return [delta[place] for delta in deltas]

    assert torch.equal(inner_products(deltas_in, num, places), expected)
    assert sum(asked) == 150_000 - 7
    assert max(asked) * num <= max(1 << 22, num << 14), "bounded, however many there are"
    assert len(asked) <= 3 or num > 2


# -- clipping ------------------------------------------------------------------------------------


def of_norms(*norms: float) -> list[Tensor]:
    return [row * norm for row, norm in zip(torch.eye(8), norms, strict=False)]


def test_a_norm_beyond_the_clip_is_scaled_down_to_it() -> None:
    rule = MergeRule(clip_norm_ratio=3.0)

    result = merged(of_norms(1.0, 2.0, 40.0, 4.0), [1.0] * 4, rule)

    # Median (2 + 4) / 2 = 3: 40 becomes 9.
    assert result[:4].tolist() == [0.25, 0.5, 2.25, 1.0]


def test_radial_directions_are_those_of_what_was_clipped() -> None:
    rule = MergeRule("radial_directional", clip_norm_ratio=2.0)
    deltas = of_norms(1.0, 1.0, 10.0)

    assert is_close(merged(deltas, [1.0] * 3, rule), merged(of_norms(1.0, 1.0, 2.0), [1.0] * 3))


@pytest.mark.parametrize(
    ("norms", "weights"),
    [
        pytest.param((1.0, 500.0), (1.0, 1.0), id="two do not say which is odd"),
        pytest.param((0.0, 0.0, 5.0), (1.0, 1.0, 1.0), id="a median of zero says nothing"),
        pytest.param((1.0, 500.0, 0.0), (1.0, 1.0, 0.0), id="no weight, no vote"),
        pytest.param((1.0, 1.0, 1.0, 10.0), (1.0,) * 4, id="at the border"),
    ],
)
def test_nobody_is_clipped(norms: tuple, weights: tuple) -> None:
    rule = MergeRule(clip_norm_ratio=10.0)

    assert combined(of_norms(*norms), weights, rule) == mean_of(weights, 8)


def test_a_flush_is_the_plain_mean_by_tokens() -> None:
    rule = MergeRule("radial_directional", "tokens_times_rate", 2.0)

    combination = combined(of_norms(1.0, 3.0, 500.0), [1.0, 3.0, 1.0], rule, is_flush=True)

    assert combination == mean_of([1.0, 3.0, 1.0], 8)
    assert rule.weight(300, 10, is_flush=True) == 300.0
    assert not rule.needs_norms(is_flush=True)


def test_where_nothing_is_clipped_the_mean_stays_what_it_is_to_the_bit() -> None:
    deltas, weights = drawn(12, 5), [3.0, 1.0, 700.0, 1536.0, 13.0]
    rule = MergeRule(clip_norm_ratio=100.0)

    parts = units(17, 300)

    assert torch.equal(merged(deltas, weights, rule, parts), weighted_mean(deltas, weights))
    assert len(combined(deltas, weights, rule, parts).ends) == 1, "joined"


# -- weights and their record ----------------------------------------------------------------------


def test_weights_are_tokens_or_tokens_times_their_rate() -> None:
    assert MergeRule().weight(300, 10, is_flush=False) == 300.0
    by_rate = MergeRule(weighting="tokens_times_rate")
    assert by_rate.weight(300, 10, is_flush=False) == 300.0 * 30.0
    assert by_rate.weight(0, 0, is_flush=False) == 0.0


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_impossible_weights_are_refused(weight: float) -> None:
    with pytest.raises(AggregationError, match="weight 1 is"):
        combined(drawn(13, 2), [1.0, weight], RADIAL)
    with pytest.raises(AggregationError, match="weight 1 is"):
        mean_of([1.0, weight], 8)


def test_coefficients_come_back_from_json_to_the_bit() -> None:
    combination = combined(drawn(14, 3), [1.0, 2.0, 4.0], RADIAL, units(10, 300))

    assert Combination.from_json(json.loads(json.dumps(combination.to_json()))) == combination
    assert combination.to_json()["ends"] == [10, 300]
    assert all(len(row) == 3 * 8 for row in combination.to_json()["coefficients"])


def test_a_part_has_the_ranges_that_lie_in_it() -> None:
    whole = Combination((10, 20, 30), ((1.0,), (2.0,), (3.0,)))

    assert whole.within(5, 20) == ((slice(0, 5), (1.0,)), (slice(5, 15), (2.0,)))
    assert whole.within(20, 30) == ((slice(0, 10), (3.0,)),)


def test_the_radial_coefficients_of_the_mean_of_two_by_hand() -> None:
    # |v| = 3 and 4, orthogonal: R = 3.5, a = 1/6 and 1/8, a'Ga = 1/2.
    coefficients = coefficients_of([[9.0, 0.0], [0.0, 16.0]], [1.0, 1.0], is_radial=True)

    assert coefficients == pytest.approx([3.5 / 6 * math.sqrt(2), 3.5 / 8 * math.sqrt(2)])
