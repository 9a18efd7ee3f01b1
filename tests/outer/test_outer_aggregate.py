import weakref
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from diloco.errors import AggregationError
from diloco.outer.aggregate import weighted_sum
from diloco.outer.combination import mean_of


def weighted_mean(deltas: Iterable[Tensor], weights: Sequence[float]) -> Tensor:
    """Merge as a syncer does by the rule `mean`."""
    return weighted_sum(deltas, mean_of(weights, 1 << 20).within(0, 1 << 20))


def test_contributions_are_weighted_by_tokens() -> None:
    deltas = [torch.tensor([8.0, 0.0]), torch.tensor([-4.0, 4.0])]

    assert weighted_mean(deltas, [1, 3]).tolist() == [-1.0, 3.0]
    assert [delta.tolist() for delta in deltas] == [[8.0, 0.0], [-4.0, 4.0]]


def test_one_contribution_is_its_own_mean_in_fresh_memory() -> None:
    delta = torch.tensor([0.1, -1e-42, 3e38])

    mean = weighted_mean([delta], [1536])

    assert torch.equal(mean, delta)
    assert mean.data_ptr() != delta.data_ptr()


def test_no_tokens_at_all_give_a_zero_mean() -> None:
    assert weighted_mean([torch.ones(3), torch.ones(3)], [0, 0]).tolist() == [0.0, 0.0, 0.0]


def test_products_and_sums_are_float32_in_the_order_given() -> None:
    weights = [1536, 700, 13]
    deltas = torch.randn(3, 10_000, generator=torch.Generator().manual_seed(3))
    shares = [np.float32(w / 2249) for w in weights]
    a, b, c = (d.numpy() * share for d, share in zip(deltas, shares, strict=True))

    mean = weighted_mean(deltas, weights).numpy()

    assert np.array_equal(mean, (a + b) + c)
    # The order does matter, so a fixed one is needed.
    assert not np.array_equal(mean, (c + b) + a)


def test_a_contribution_is_let_go_before_the_next_is_asked_for() -> None:
    alive: list[weakref.ref[Tensor]] = []

    def decode() -> Iterator[Tensor]:
        for _ in range(4):
            assert all(reference() is None for reference in alive)
            yield watched()

    def watched() -> Tensor:
        delta = torch.ones(2)
        alive.append(weakref.ref(delta))
        return delta

    assert weighted_mean(decode(), [1.0] * 4).tolist() == [1.0, 1.0]
    assert len(alive) == 4


ONE = torch.ones(2)


@pytest.mark.parametrize(
    ("deltas", "weights", "message"),
    [
        pytest.param([], [], "0 contributions for 0 weights", id="nothing"),
        pytest.param([ONE], [1, 1], "1 contributions for 2 weights", id="too few"),
        pytest.param([ONE, ONE], [1], "more contributions than their 1 weights", id="too many"),
        pytest.param([ONE], [-1.0], "weight 0 is -1.0", id="negative weight"),
        pytest.param([ONE, ONE], [1, float("nan")], "weight 1 is nan", id="NaN weight"),
        pytest.param([ONE], [float("inf")], "weight 0 is inf", id="infinite weight"),
        pytest.param([ONE, torch.ones(1)], [1, 1], r"contribution 1 is .* \(1,\)", id="shape"),
        pytest.param([ONE.double()], [1], "contribution 0 is torch.float64", id="dtype"),
        pytest.param(
            [ONE, torch.tensor([0.0, float("nan")])], [1, 0], "nan at element 1", id="NaN"
        ),
        pytest.param([torch.full((2,), 3e38)] * 2 + [ONE / 0], [1, 1, 1], "inf at", id="infinity"),
    ],
)
def test_it_refuses(deltas: list[Tensor], weights: list[float], message: str) -> None:
    with pytest.raises(AggregationError, match=message):
        weighted_mean(deltas, weights)
