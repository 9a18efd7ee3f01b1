"""Combines the contributions of a round into one pseudo-gradient.

Every merge rule is a linear combination of the contributions. `diloco.outer.combination` computes
its coefficients; this module has the operations on tensors: the sum, and the inner products and
sizes that coefficients and the guard (`diloco.outer.guard`) are computed from.

The caller passes contributions sorted by island id, so that the result does not depend on the order
in which they arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from diloco.errors import AggregationError
from diloco.outer.guard import Floats

#: Values of each contribution that are float64 at once: in the caches of a CPU core.
_TILE_NUMEL = 1 << 14
#: Values that are asked for at once, of one contribution and of all; of each a tile at least.
_ASKED_NUMEL, _ASKED_NUMEL_OF_ALL = 1 << 20, 1 << 22
#: Values that are measured at once: in the second-level cache of a CPU core.
_MEASURED_NUMEL = 1 << 17


@torch.no_grad()
def weighted_sum(
    deltas: Iterable[Tensor], parts: Sequence[tuple[slice, Sequence[float]]]
) -> Tensor:
    """Sum pseudo-gradients; each part of the vector may have coefficients of its own.

    sum[part] = sum_m c_m * delta_m[part]; coefficients are rounded to float32, products and sums
    are float32, in the order given.

    Args:
        deltas: At least one, each float32 of one shape. Each is released before the next is taken,
            so that a generator can decode them one by one with only one in memory.
        parts: Slices that cover a delta exactly once, and for each the coefficients c_m, one for
            each delta.

    Returns:
        Tensor of the deltas' shape, float32, freshly allocated.

    Raises:
        AggregationError: If numbers, shapes or dtypes do not match, or the sum is not finite.
    """
    num_deltas = len(parts[0][1])
    total: Tensor | None = None
    scratch: Tensor | None = None
    count = 0
    # Neither zip nor enumerate: both keep the last delta alive while the next one is made.
    for delta in deltas:
        if count == num_deltas:
            raise AggregationError(f"more contributions than their {num_deltas} weights")
        shape = delta.shape if total is None else total.shape
        if delta.shape != shape or delta.dtype != torch.float32:
            raise AggregationError(
                f"contribution {count} is {delta.dtype} {tuple(delta.shape)}, expected "
                f"{torch.float32} {tuple(shape)}"
            )
        if total is None:
            total = _scaled(delta, parts, count, torch.empty_like(delta))
        else:
            scratch = torch.empty_like(delta) if scratch is None else scratch
            total.add_(_scaled(delta, parts, count, scratch))
        count += 1
        del delta
    if total is None or count < num_deltas:
        raise AggregationError(f"{count} contributions for {num_deltas} weights, at least one")
    # NaN passes through both ends; total.isfinite().all() takes twenty times as long.
    if total.numel() and not all(end.isfinite() for end in total.aminmax()):
        index = int(total.isfinite().logical_not().flatten().nonzero()[0])
        raise AggregationError(
            f"mean of {count} contributions is {total.flatten()[index].item()} at element {index}: "
            "the round must expire"
        )
    return total


def _scaled(
    delta: Tensor, parts: Sequence[tuple[slice, Sequence[float]]], index: int, out: Tensor
) -> Tensor:
    for place, coefficients in parts:
        torch.mul(delta[place], coefficients[index], out=out[place])
    return out


@torch.no_grad()
def inner_products(
    deltas_in: Callable[[slice], Sequence[Tensor]], num_deltas: int, places: Sequence[slice]
) -> Tensor:
    """Compute the inner products of all pairs of pseudo-gradients, slice by slice, in float64.

    G[place, m, n] = sum_i delta_m[i] * delta_n[i] over the slice, from the float32 values, tile by
    tile, whatever is asked for at once. The last bits of this sum depend on the hardware, so what
    is decided by it must be recorded.

    Args:
        deltas_in: Gives what lies in a slice of each, float32; of a few million values of all, or
            of a tile of each where that is more.
        num_deltas: How many there are, at least one.
        places: Slices with a start and an end, ascending.

    Returns:
        Tensor of shape [places, deltas, deltas], float64.
    """
    grams = torch.zeros(len(places), num_deltas, num_deltas, dtype=torch.float64)
    most = min(_ASKED_NUMEL, _ASKED_NUMEL_OF_ALL // num_deltas)
    for tiles in _asked_together(places, most):
        begin = tiles[0][1].start
        deltas = deltas_in(slice(begin, tiles[-1][1].stop))
        for index, tile in tiles:
            values = torch.empty(num_deltas, tile.stop - tile.start, dtype=torch.float64)
            for row, delta in zip(values, deltas, strict=True):
                row.copy_(delta[tile.start - begin : tile.stop - begin])
            grams[index].addmm_(values, values.T)
        del deltas
    return grams


def products_bytes(numel: int, num_deltas: int) -> int:
    """Bound the memory of `inner_products` of vectors of `numel` values, those asked for included.

    It does not grow with the vectors, nor, up to 256 of them, with their number by more than a
    tile of each in float64.
    """
    asked = max(_TILE_NUMEL, min(_ASKED_NUMEL, _ASKED_NUMEL_OF_ALL // num_deltas))
    return num_deltas * (4 * min(numel, asked) + 8 * min(numel, _TILE_NUMEL))


def _asked_together(places: Sequence[slice], most: int) -> Iterator[list[tuple[int, slice]]]:
    """Cut slices into tiles, each with the index of its slice, and join some up to `most`."""
    tiles: list[tuple[int, slice]] = []
    for index, place in enumerate(places):
        for start in range(place.start, place.stop, _TILE_NUMEL):
            tile = slice(start, min(start + _TILE_NUMEL, place.stop))
            if tiles and tile.stop - tiles[0][1].start > most:
                yield tiles
                tiles = []
            tiles.append((index, tile))
    if tiles:
        yield tiles


@torch.no_grad()
def measured(values: Tensor, places: Sequence[slice]) -> tuple[Floats, Floats]:
    """Measure how large the values in slices of a vector are.

    Args:
        values: Flat, float32, CPU; finite, and as large as float32 goes.
        places: Slices of it with a start and an end.

    Returns:
        Sum of squares of each place, infinite where float32 does not hold that of a part of it,
        and its largest |value|; both float64 of shape [places].
    """
    squares, largest = np.zeros(len(places)), np.zeros(len(places))
    for index, place in enumerate(places):
        for start in range(place.start, place.stop, _MEASURED_NUMEL):
            tile = values[start : min(start + _MEASURED_NUMEL, place.stop)]
            low, high = torch.aminmax(tile)
            squares[index] += torch.dot(tile, tile).item()
            largest[index] = max(largest[index], -low.item(), high.item())
    return squares, largest
