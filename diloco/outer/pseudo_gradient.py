"""Pseudo-gradient: what an island learned since its last merge, as the outer optimizer sees it.

The only place that chooses the sign; its norm, and whether inner steps can have made it.

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
    """Turn local values into Delta = anchor - local in place, so that the outer optimizer descends.

    In place: fresh memory costs more than the subtraction.

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
    """Say which value of Delta lies beyond |Delta| <= limits[0] + limits[1] |anchor|; "": none.

    One pass over Delta where no value is beyond limits[0], which is nearly always.

    Args:
        delta: Finite, float32.
        anchor: Of the same shape.
        limits: What inner steps allow, without and per |anchor|; infinite: anything.
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
    """Add the bits of float32 values as integers, modulo 2^64: any one flipped bit changes it.

    A tenth of a nanosecond a value; what was made by a single change is found for certain.
    """
    words = torch.int32 if values.numel() % 2 else torch.int64
    return int(values.view(words).sum(dtype=torch.int64))


@torch.no_grad()
def largest_change(before: Tensor, after: Tensor) -> float:
    """Return max |after - before| of two finite float32 CPU vectors of one length; empty: 0.

    By tiles, without a vector of the difference: a twelfth of the time.
    """
    largest, scratch = 0.0, torch.empty(min(_TILE_NUMEL, before.numel()))
    for start in range(0, before.numel(), _TILE_NUMEL):
        tile = slice(start, start + _TILE_NUMEL)
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
