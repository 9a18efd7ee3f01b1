"""Computes inner products of the contributions to a round, from which coefficients are made.

The syncer multiplies what it has spooled, a replay what a record holds, lane by lane and in the
same order, so that on one machine both come to the same bits.

Source: Decoupled DiLoCo (arXiv 2604.21428), radial-directional averaging; PROTOCOL.md, "Order and
arithmetic".
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from diloco.outer.aggregate import inner_products
from diloco.outer.combination import Gram
from diloco.outer.fragments import Fragment
from diloco.outer.units import Unit
from diloco.versions.publication import ReadPart, part_decoder_of


def gram_matrices(
    payloads_of: Callable[[int], Iterable[ReadPart]],
    num_contributions: int,
    fragment: Fragment,
    units: Sequence[Unit],
    uplink_codec: str,
    *,
    has_products: bool,
    across: Callable[..., Iterable[Any]] = map,
) -> list[Gram]:
    """Multiply the contributions to a fragment with one another, by unit, in float64.

    A lane is decoded part by part, so that memory does not grow with the contributions.

    Args:
        payloads_of: Lane id -> what reads the encoded contributions to that lane, sorted by
            island.
        num_contributions: How many there are.
        fragment: Of the run's plan.
        units: Of the fragment.
        uplink_codec: In which they are encoded.
        has_products: Whether products of different contributions count; else they stay zero.
        across: Applies a function to lane ids, in order: `map`, or that of an executor.

    Raises:
        CodecError: If a payload is malformed.
    """

    def of_lane(lane_id: int) -> tuple[slice, Tensor]:
        indices, places = units_in(fragment, units, lane_id)

        def products(payloads: Sequence[ReadPart]) -> Tensor:
            def decoded(place: slice) -> list[Tensor]:
                decode = part_decoder_of(uplink_codec, fragment, lane_id, place)
                return [decode(read) for read in payloads]

            return inner_products(decoded, len(payloads), places)

        if has_products:
            return indices, products([*payloads_of(lane_id)])
        squares = [products([read])[:, 0, 0] for read in payloads_of(lane_id)]
        return indices, torch.diag_embed(torch.stack(squares, dim=1))

    grams = torch.zeros(len(units), num_contributions, num_contributions, dtype=torch.float64)
    # Added in the order of lanes, whichever was ready first.
    for indices, found in across(of_lane, range(len(fragment.lanes))):
        grams[indices] += found
    matrices: list[Gram] = grams.tolist()
    return matrices


def units_in(fragment: Fragment, units: Sequence[Unit], lane_id: int) -> tuple[slice, list[slice]]:
    """Return which units a lane has a part in, and where in the lane these are."""
    lane = fragment.lanes[lane_id]
    borders = itertools.pairwise((0, *(unit.end for unit in units)))
    places = {
        index: slice(max(start, lane.start) - lane.start, min(end, lane.end) - lane.start)
        for index, (start, end) in enumerate(borders)
        if start < lane.end and end > lane.start
    }
    return slice(min(places), max(places) + 1), list(places.values())
