"""Pseudo-gradient: what an island learned since its last merge, as the outer optimizer sees it.

The only place that chooses the sign; and its norm.

Source: DiLoCo (arXiv 2311.08105), Algorithm 1, line 12.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


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


def l2_norm(delta: Tensor) -> float:
    """Return |Delta|_2 of a float32 vector; not finite if a value is not."""
    norm = float(torch.linalg.vector_norm(delta))  # a third of the time of float64
    if math.isfinite(norm):
        return norm
    return float(torch.linalg.vector_norm(delta, dtype=torch.float64))  # squares may overflow
