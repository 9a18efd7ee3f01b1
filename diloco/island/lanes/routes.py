"""Routes: what a rank exchanges with every other to collect or distribute a fragment's lanes.

A route is a list of box copies: rows and columns of a stored box, and offset and strides of the
same elements in a lane. It is executed by all-to-all in slabs of at most ``SLAB_BYTES`` a rank.
Knows boxes and lanes; no process groups, and of tensors only how a lane is viewed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.island.lanes.boxes import Box, boxes_of_range

SLAB_BYTES = 256 * 2**20  # most that a rank sends, and most that it receives, in one collective
#: Vectors of what a rank carries of a fragment that come and go while it is sent or merged.
PASSING = 8
_ITEM_BYTES = 4


@dataclass(frozen=True, slots=True)
class Copy:
    """One box of the tensor that a rank stores, and the same elements, strided, in a lane."""

    name: str
    lane_id: int
    box: Box  # within what the rank stores
    strides: tuple[int, ...]  # of the unsharded tensor, hence of its elements in the lane
    lane_offset: int

    def part(self, start: int, end: int) -> list[Copy]:
        """Return the copies of elements [start, end) of the flattened box."""
        return [
            Copy(
                self.name,
                self.lane_id,
                box.shifted(self.box.offsets),
                self.strides,
                self.lane_offset + dot(box.offsets, self.strides),
            )
            for box in boxes_of_range(self.box.sizes, start, end)
        ]

    def in_lane(self, lane: Tensor) -> Tensor:
        """Return the view of the elements in the lane, in the shape of the box."""
        offset = lane.storage_offset() + self.lane_offset
        return lane.as_strided(self.box.sizes, self.strides, offset)


@dataclass(frozen=True, slots=True)
class Slab:
    """This rank's end of one all-to-all: copies in the order of their peers, elements a peer."""

    copies: list[Copy]
    splits: list[int]

    def views(self, buffer: Tensor) -> Iterator[tuple[Copy, Tensor]]:
        """Yield every copy with its elements in the flat buffer that is sent or received."""
        pieces = torch.split(buffer, [copy.box.numel for copy in self.copies])
        for copy, values in zip(self.copies, pieces, strict=True):
            yield copy, values.view(copy.box.sizes)


class Route:
    """The copies that this rank exchanges with every peer, as holder of boxes and as carrier.

    Both ends of a pair list the same copies in the same order, so they may cut them alike.
    """

    def __init__(self, num_ranks: int) -> None:
        """Begin with nothing to exchange."""
        self.limit = max(1, SLAB_BYTES // _ITEM_BYTES // num_ranks)  # elements a peer and slab
        self.held: list[list[Copy]] = [[] for _ in range(num_ranks)]
        self.carried: list[list[Copy]] = [[] for _ in range(num_ranks)]

    def num_slabs(self) -> int:
        """Return the number of slabs that this rank needs; the island does the most of any."""
        totals = (sum(c.box.numel for c in copies) for copies in self.held + self.carried)
        return max(-(-total // self.limit) for total in totals)

    def slabs(self, num_slabs: int) -> list[tuple[Slab, Slab]]:
        """Return (held, carried) of every all-to-all."""
        ends = [
            [self._cut(copies, num_slabs) for copies in end] for end in (self.held, self.carried)
        ]
        held, carried = (
            [
                Slab(
                    [copy for pieces in end for copy in pieces[i]],
                    [sum(copy.box.numel for copy in pieces[i]) for pieces in end],
                )
                for i in range(num_slabs)
            ]
            for end in ends
        )
        return list(zip(held, carried, strict=True))

    def _cut(self, copies: list[Copy], num_slabs: int) -> list[list[Copy]]:
        pieces: list[list[Copy]] = [[] for _ in range(num_slabs)]
        position = 0
        for copy in copies:
            done = 0
            while done < copy.box.numel:
                take = min(copy.box.numel - done, self.limit - position % self.limit)
                pieces[position // self.limit] += copy.part(done, done + take)
                done += take
                position += take
        return pieces


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def dot(a: Iterable[int], b: Iterable[int]) -> int:
    """Return the sum of the products; 0 of nothing."""
    return sum(x * y for x, y in zip(a, b, strict=True))
