"""Rotary position embedding: angles at explicit positions, always in float32, and the rotation.

Positions up to 2^24 are exact in float32; in bfloat16 neighbours beyond 256 would share an angle.

Shape legend: B sequences, S positions, N heads, E values of a head.

Source: RoFormer (arXiv 2104.09864); for long sequences position interpolation (arXiv 2306.15595),
YaRN (arXiv 2309.00071) and Llama 3 (arXiv 2407.21783).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from diloco.config.model import RopeScalingConfig


def rope_table(
    positions: Tensor, head_dim: int, theta: float, scaling: RopeScalingConfig
) -> tuple[Tensor, Tensor]:
    """Compute cosine and sine of the rotary angles, angle[s, i] = positions[s] * frequency[i].

    frequency[i] = theta^(-2i/E), stretched as `scaling` says; YaRN scales cosine and sine, too.

    Args:
        positions: Absolute positions, shape [S], integer.
        head_dim: Width E of what is rotated, even.
        theta: Base of the frequencies.
        scaling: Of long sequences.

    Returns:
        cos and sin, each of shape [S, 1, E/2], float32, on the device of `positions`.

    Source: RoFormer (arXiv 2104.09864), Eq. 15.
    """
    pairs = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    frequencies = theta ** (-pairs / head_dim)
    if scaling.kind == "linear":
        frequencies = frequencies / scaling.factor
    elif scaling.kind == "llama3":
        frequencies = _llama3(frequencies, scaling)
    elif scaling.kind == "yarn":
        frequencies = _yarn(frequencies, head_dim, theta, scaling)
    angles = positions.to(torch.float32)[:, None, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    if scaling.kind == "yarn":
        factor = scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1.0
        return cos * factor, sin * factor
    return cos, sin


def _llama3(frequencies: Tensor, scaling: RopeScalingConfig) -> Tensor:
    """Divide slow frequencies by the factor, keep fast ones, and blend between.

    With t = turns in the original length, f' = f (b + (1 - b) / factor) where
    b = clamp((t - low) / (high - low), 0, 1).

    Source: Llama 3 (arXiv 2407.21783).
    """
    turns = frequencies * (scaling.original_max_sequence_length / (2 * math.pi))
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def _yarn(frequencies: Tensor, head_dim: int, theta: float, scaling: RopeScalingConfig) -> Tensor:
    """Divide slow frequencies by the factor, keep fast ones, and blend linearly in their index.

    The index of the frequency with t turns in the original length L is
    E ln(L / (2 pi t)) / (2 ln theta).

    Source: YaRN (arXiv 2309.00071), section 3.2, with borders rounded outwards.
    """

    def index_of(turns: float) -> float:
        length = scaling.original_max_sequence_length
        return head_dim * math.log(length / (2 * math.pi * turns)) / (2 * math.log(theta))

    first = max(math.floor(index_of(scaling.beta_fast)), 0)
    last = min(math.ceil(index_of(scaling.beta_slow)), head_dim - 1)
    indices = torch.arange(len(frequencies), device=frequencies.device, dtype=torch.float32)
    # Where both borders fall together the step is made just behind it.
    stretched = ((indices - first) / (last - first or 0.001)).clamp(0, 1)
    return frequencies * (1 - stretched + stretched / scaling.factor)


def apply_rope(x_BSNE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + E/2]) of every head, in float32; returns the type of `x`."""
    first, second = x_BSNE.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.type_as(x_BSNE)
