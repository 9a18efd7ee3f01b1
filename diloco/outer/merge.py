"""Merges published values into an island's parameters.

    local <- alpha local + (1 - alpha) anchor

While a fragment was on its way, the island went on training. With alpha = 0 that work is replaced
by the published values; with alpha > 0 a part of it is kept.

Source: Streaming DiLoCo (arXiv 2501.18512), Eq. 4; alpha is the weight of the local parameters.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def merge_(local: Tensor, anchor: Tensor, local_mix: float) -> None:
    """Compute local <- alpha local + (1 - alpha) anchor in place.

    Args:
        local: The island's values, float32; may be a strided view into a parameter.
        anchor: The published values just staged, float32, same shape and device.
        local_mix: alpha in [0, 1]; 0 copies `anchor` bit by bit, 1 leaves `local` untouched.

    Raises:
        ValueError: If `local_mix` is outside [0, 1], or shapes or dtypes differ.
    """
    if not 0.0 <= local_mix <= 1.0:
        raise ValueError(f"outer.local_mix = {local_mix} is outside [0, 1]")
    if anchor.shape != local.shape or not anchor.dtype == local.dtype == torch.float32:
        raise ValueError(
            f"merge of anchor {anchor.dtype} {tuple(anchor.shape)} into local {local.dtype} "
            f"{tuple(local.shape)}: both must be float32 of one shape"
        )
    if local_mix == 0.0:
        local.copy_(anchor)
    elif local_mix < 1.0:
        # Two rounded products, then their sum: lerp and addcmul round differently across devices.
        local.mul_(local_mix).add_(anchor * (1.0 - local_mix))
