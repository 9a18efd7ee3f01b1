"""Prunes what an island is about to send: a share of every neuron's row of its pseudo-gradient.

A row is the values of one index of a matrix's first dimension, or a whole vector. The paper calls
its rule per-neuron sign pruning and spells it out no further; read here as

    elected sign of a row = sign of the row's sum
    pruned first: values of another sign; of these, and then of the others, the smallest first

TIES-Merging, which it names, elects a sign by its total magnitude, and trims the smallest values
before; this trim alone is the other order here. What is pruned is lost: no residual keeps it.

Source: DiLoCo (arXiv 2311.08105), table 6; TIES-Merging (arXiv 2306.01708).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from diloco.outer.fragments import Fragment
from diloco.simulations.lab.config import PruneConfig


def prune_(
    config: PruneConfig,
    shapes: Mapping[str, torch.Size],
    fragment: Fragment,
    anchor: Mapping[int, Tensor],
    local: Mapping[int, Tensor],
) -> None:
    """Put the anchor's values where anchor - local is pruned, so that it is exactly zero there.

    Averaged buffers are not pruned.

    Args:
        config: How much, and in which order.
        shapes: Of all parameters, by canonical name.
        fragment: What is sent, whole rows of each parameter.
        anchor: Lane id -> published values that the island last merged, float32; all lanes.
        local: Lane id -> the island's values; overwritten.
    """
    lanes = [lane.lane_id for lane in fragment.lanes]
    before = torch.cat([anchor[lane_id] for lane_id in lanes])
    after = torch.cat([local[lane_id] for lane_id in lanes])
    for entry in fragment.entries:
        if not entry.is_buffer:
            place = slice(entry.offset, entry.offset + entry.end - entry.start)
            shape = shapes[entry.name]
            row_numel = math.prod(shape[1:]) if len(shape) > 1 else entry.end - entry.start
            rows = (before[place] - after[place]).view(-1, row_numel)
            pruned = pruned_places(config, rows).flatten()
            after[place] = torch.where(pruned, before[place], after[place])
    parts = torch.split(after, [lane.numel for lane in fragment.lanes])
    for lane_id, values in zip(lanes, parts, strict=True):
        local[lane_id].copy_(values)


def pruned_places(config: PruneConfig, rows: Tensor) -> Tensor:
    """Say which values of each row are pruned: floor(share * columns) of them.

    Args:
        config: How much, and in which order.
        rows: Shape [rows, columns], float32. NaN and infinity count as largest, and so stay.

    Returns:
        Tensor of the same shape, bool.
    """
    order = rows.abs().argsort(dim=1, stable=True)
    if config.by == "sign":
        is_elected = rows.sign() == rows.sum(dim=1, keepdim=True).sign()
        order = order.gather(1, is_elected.gather(1, order).int().argsort(dim=1, stable=True))
    pruned = torch.zeros_like(rows, dtype=torch.bool)
    return pruned.scatter_(1, order[:, : math.floor(config.share * rows.shape[1])], True)
