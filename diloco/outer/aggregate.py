"""Aggregate: one pseudo-gradient out of the contributions of a round.

Knows nothing of islands or arrival: the caller passes contributions sorted by island id.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from diloco.errors import AggregationError


@torch.no_grad()
def weighted_mean(deltas: Iterable[Tensor], weights: Sequence[float]) -> Tensor:
    """Average the pseudo-gradients of one round, weighted by tokens.

    mean = sum_m c_m * delta_m with c_m = w_m / sum(w), rounded to float32 from float64; products
    and sums are float32, in the order given. Where all weights are zero the mean is zero.

    Args:
        deltas: At least one, each float32 of one shape; taken one by one, and let go before the
            next is asked for, so that a generator can decode with one of them in memory.
        weights: One for each delta, finite and >= 0, in tokens.

    Returns:
        Tensor of the deltas' shape, float32, freshly allocated.

    Raises:
        AggregationError: If a weight is negative or not finite, if numbers, shapes or dtypes do
            not match, or if the mean is not finite.

    Source: Decoupled DiLoCo (arXiv 2604.21428), token-weighted merging.
    """
    shares = _shares(weights)
    mean: Tensor | None = None
    scratch: Tensor | None = None
    count = 0
    # Neither zip nor enumerate: both keep the last delta alive while the next one is made.
    for delta in deltas:
        if count == len(shares):
            raise AggregationError(f"more contributions than their {len(shares)} weights")
        shape = delta.shape if mean is None else mean.shape
        if delta.shape != shape or delta.dtype != torch.float32:
            raise AggregationError(
                f"contribution {count} is {delta.dtype} {tuple(delta.shape)}, expected "
                f"{torch.float32} {tuple(shape)}"
            )
        if mean is None:
            mean = delta * shares[count]
        else:
            scratch = torch.mul(delta, shares[count], out=scratch)
            mean.add_(scratch)
        count += 1
        del delta
    if mean is None or count < len(shares):
        raise AggregationError(f"{count} contributions for {len(shares)} weights, at least one")
    # NaN passes through both ends; mean.isfinite().all() takes twenty times as long.
    if mean.numel() and not all(end.isfinite() for end in mean.aminmax()):
        index = int(mean.isfinite().logical_not().flatten().nonzero()[0])
        raise AggregationError(
            f"mean of {count} contributions is {mean.flatten()[index].item()} at element {index}: "
            "the round must expire"
        )
    return mean


def _shares(weights: Sequence[float]) -> list[float]:
    """Return w_m / sum(w); all zero where the sum is."""
    for index, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight >= 0):
            raise AggregationError(f"weight {index} is {weight}: must be finite and >= 0")
    # fsum is exact, and the same in every version of Python; sum is not.
    total = math.fsum(weights)
    return [weight / total if total else 0.0 for weight in weights]
