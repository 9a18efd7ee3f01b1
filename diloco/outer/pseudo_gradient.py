"""Computes pseudo-gradients: what an island learned since its last merge.

    Delta = anchor - local

The outer optimizer treats Delta as a gradient: a step against it moves the global parameters to
where the island's inner steps went. This module alone chooses the sign. It also measures Delta and
checks whether the inner steps can have produced it.

Source: DiLoCo (arXiv 2311.08105), Algorithm 1, line 12.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: Values of a difference that are made at once: in the second-level cache of a CPU core.
_TILE_NUMEL = 1 << 17


@torch.no_grad()
def pseudo_gradient_(local: Tensor, anchor: Tensor) -> Tensor:
    """Turn local values into Delta = anchor - local in place.

    In place, because fresh memory costs more time than the subtraction.

    Args:
        local: A copy of the island's values now, float32; overwritten.
        anchor: Published values that the island last merged, float32, same shape and device.

    Returns:
        `local`.

    Raises:
        ValueError: If shapes or dtypes differ from that.
    """
    if anchor.shape != local.shape or not anchor.dtype == local.dtype == torch.float32:
        raise ValueError(
            f"pseudo-gradient of local {local.dtype} {tuple(local.shape)} against anchor "
            f"{anchor.dtype} {tuple(anchor.shape)}: both must be float32 of one shape"
        )
    return torch.sub(anchor, local, out=local)


def farthest(delta: Tensor, anchor: Tensor, limits: tuple[float, float]) -> str:
    """Describe the value of Delta that is farthest beyond limits[0] + limits[1] |anchor|.

    Takes one pass over Delta if no value is beyond limits[0], which is the usual case.

    Args:
        delta: Finite, float32.
        anchor: Of the same shape.
        limits: The largest change that the inner steps allow: a constant part, and a part that is
            multiplied with |anchor|; infinite allows anything.

    Returns:
        A sentence about the value; empty if all values are within the limits.
    """
    fixed, share = limits
    if math.isinf(fixed) or not delta.numel():
        return ""
    least, most = torch.aminmax(delta)  # the infinity norm takes ten times as long
    if max(-float(least), float(most)) <= fixed:
        return ""
    excess = delta.abs().sub_(anchor.abs().mul_(share)).sub_(fixed)
    index = int(excess.argmax())
    if not float(excess[index]) > 0:
        return ""
    return (
        f"value {index} is {float(delta[index]):.4g} from its anchor {float(anchor[index]):.4g}, "
        f"and the inner steps since the last merge move it by at most "
        f"{fixed + share * abs(float(anchor[index])):.4g}"
    )


def bit_sum(values: Tensor) -> int:
    """Add the bits of float32 values as integers, modulo 2^64: a checksum against flipped bits.

    A single flipped bit always changes it. It takes a tenth of a nanosecond a value.
    """
    words = torch.int32 if values.numel() % 2 else torch.int64
    return int(values.view(words).sum(dtype=torch.int64))


@torch.no_grad()
def largest_change(before: Tensor, after: Tensor) -> float:
    """Return max |after - before| of two finite float32 vectors of one length; 0 if empty.

    On a CPU it works on tiles that stay in the cache: a twelfth of the time of a whole difference
    vector.
    """
    numel = before.numel()
    tile_numel = min(_TILE_NUMEL, numel) if before.is_cpu else numel
    largest, scratch = 0.0, before.new_empty(tile_numel)
    for start in range(0, numel, max(1, tile_numel)):
        tile = slice(start, start + tile_numel)
        change = torch.sub(after[tile], before[tile], out=scratch[: len(before[tile])])
        low, high = torch.aminmax(change)
        largest = max(largest, -low.item(), high.item())
    return largest


def l2_norm(delta: Tensor) -> float:
    """Return |Delta|_2 of a float32 vector; not finite if a value is not."""
    norm = float(torch.linalg.vector_norm(delta))  # a third of the time of float64
    if math.isfinite(norm):
        return norm
    return float(torch.linalg.vector_norm(delta, dtype=torch.float64))  # squares may overflow
