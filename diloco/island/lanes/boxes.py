"""Boxes: which elements of a parameter a rank stores, and how flat ranges become boxes.

The only module that knows DTensor layouts. Every rank stores one box of a parameter, or none of it:
FSDP2 and TP its shard; a TP norm or an HSDP copy the same box as other ranks; a plain tensor the
whole, unless `declare_part` says of which box of a larger tensor it is all (the experts of one rank
in a stacked [E, ...] tensor, say).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_T = TypeVar("_T", bound=Tensor)
#: Where a tensor keeps what `declare_part` said of it.
_PART = "_diloco_part"


@dataclass(frozen=True, slots=True)
class Box:
    """Elements [offset, offset + size) of every dim of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements; 1 for the box of a scalar."""
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of the box in its tensor."""
        return tuple(slice(a, a + n) for a, n in zip(self.offsets, self.sizes, strict=True))

    def shifted(self, by: Iterable[int]) -> Box:
        """Return the box at other offsets."""
        return Box(tuple(a + b for a, b in zip(self.offsets, by, strict=True)), self.sizes)

    def intersect(self, other: Box) -> Box | None:
        """Return the common elements, None where there are none."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        dims = zip(offsets, self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        sizes = tuple(min(a + m, b + n) - offset for offset, a, m, b, n in dims)
        return Box(offsets, sizes) if min(sizes, default=1) > 0 else None


def are_disjoint(boxes: Iterable[Box], dim: int = 0) -> bool:
    """Say whether no element is in two of the boxes, none of which is empty.

    Boxes that meet in `dim` are compared in the next one. Shards have the same bounds there, or do
    not meet: then this takes n log n comparisons for n boxes.
    """
    for group in _meeting(boxes, dim):
        if len(group) == 1:
            continue
        if len({(box.offsets[dim], box.sizes[dim]) for box in group}) > 1:
            if any(a.intersect(b) for a, b in itertools.combinations(group, 2)):
                return False
        elif dim + 1 == len(group[0].sizes) or not are_disjoint(group, dim + 1):
            return False
    return True


def _meeting(boxes: Iterable[Box], dim: int) -> list[list[Box]]:
    """Put boxes whose bounds in a dim overlap, one after the other, together."""
    groups: list[list[Box]] = []
    end = 0
    for box in sorted(boxes, key=lambda box: box.offsets[dim]):
        if not groups or box.offsets[dim] >= end:
            groups.append([])
        groups[-1].append(box)
        end = max(end, box.offsets[dim] + box.sizes[dim])
    return groups


def boxes_of_range(shape: tuple[int, ...], start: int, end: int) -> list[Box]:
    """Cut elements [start, end) of a flattened row-major tensor into at most 2 ndim - 1 boxes."""
    if start >= end:
        return []
    if not shape:
        return [Box((), ())]
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row  # full rows are [first, last)
    if first > last:
        partial = [(last, start - last * row, end - last * row)]
    else:
        partial = [(first - 1, start - (first - 1) * row, row), (last, 0, end - last * row)]
    boxes = [
        Box((index, *box.offsets), (1, *box.sizes))
        for index, row_start, row_end in partial
        for box in boxes_of_range(shape[1:], row_start, row_end)
    ]
    if first < last:
        boxes.append(Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    return boxes


def declare_part(parameter: _T, shape: Sequence[int], offsets: Sequence[int]) -> _T:
    """Say that a tensor is a box of a larger one, which ranks store in parts.

    For ranks that hold different experts, or other parts, as plain tensors (or as FSDP2's shards of
    these: to be declared after `fully_shard`, which replaces parameters). What TP and FSDP2 shard
    of a whole parameter needs no such word.

        experts = nn.Parameter(torch.empty(num_experts // ep, dim, width))
        first = ep_rank * (num_experts // ep)
        diloco.declare_part(experts, (num_experts, dim, width), (first, 0, 0))

    Args:
        parameter: Its shape is that of the box.
        shape: Of the whole tensor, the same on all ranks.
        offsets: Of the box in it.

    Returns:
        The parameter itself.

    Raises:
        ValueError: If the box is not inside the whole.
    """
    box = Box(tuple(offsets), tuple(parameter.shape))
    whole = tuple(shape)
    if len({len(whole), len(box.offsets), len(box.sizes)}) > 1 or not all(
        a >= 0 and a + n <= of for a, n, of in zip(box.offsets, box.sizes, whole, strict=True)
    ):
        raise ValueError(
            f"a part of shape {list(box.sizes)} at {list(box.offsets)} does not lie in a tensor of "
            f"shape {list(whole)}: offsets and sizes must fit in every dim"
        )
    setattr(parameter, _PART, (whole, box.offsets))
    return parameter


def declared_like(tensor: _T, parameter: Tensor) -> _T:
    """Declare a tensor to be the same part as a parameter of its shape, if that is declared one."""
    if (part := getattr(parameter, _PART, None)) is not None:
        setattr(tensor, _PART, part)
    return tensor


def whole_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of the tensor that no rank need store whole."""
    part = getattr(tensor, _PART, None)
    return tuple(tensor.shape) if part is None else part[0]


def stored_box(tensor: Tensor) -> Box:
    """Return the box that this rank stores; the only use of DTensor's private hook.

    Its sizes are those of `stored`; zero where a rank's shard is empty.
    """
    part = getattr(tensor, _PART, None)
    box = Box((0,) * tensor.ndim, tuple(tensor.shape))
    if isinstance(tensor, DTensor):
        (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
        assert tuple(chunk.sizes) == tuple(tensor.to_local().shape)
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
    return box if part is None else box.shifted(part[1])


def stored(tensor: Tensor) -> Tensor:
    """Return what this rank stores of a tensor, detached, to be read and written in place."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


@torch.no_grad()
def write_stored_(target: Tensor, whole: Tensor) -> None:
    """Copy this rank's box of `whole` into `target`; no communication.

    Args:
        target: Placed in any way.
        whole: All elements, any device.

    Raises:
        ValueError: If `whole` has another shape than the tensor that `target` is a part of.
    """
    if tuple(whole.shape) != whole_shape(target):
        raise ValueError(
            f"shape {list(whole.shape)} cannot be written into {list(whole_shape(target))}"
        )
    stored(target).copy_(whole[stored_box(target).slices])
