"""Pseudo-gradient: what an island learned since its last merge, as the outer optimizer sees it.

The only place that chooses the sign.

Source: DiLoCo (arXiv 2311.08105), Algorithm 1, line 12.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def pseudo_gradient(anchor: Tensor, local: Tensor) -> Tensor:
    """Return Delta = anchor - local, so that the outer optimizer descends.

    Args:
        anchor: Published values that the island last merged, float32.
        local: The island's values now, float32, same shape and device.

    Returns:
        Tensor of the same shape, float32, freshly allocated.

    Raises:
        ValueError: If shapes or dtypes differ from that.
    """
    if anchor.shape != local.shape or not anchor.dtype == local.dtype == torch.float32:
        raise ValueError(
            f"pseudo-gradient of local {local.dtype} {tuple(local.shape)} against anchor "
            f"{anchor.dtype} {tuple(anchor.shape)}: both must be float32 of one shape"
        )
    return anchor - local
