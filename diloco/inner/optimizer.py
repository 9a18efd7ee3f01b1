"""Owns the inner optimizer (AdamW) and its learning rate as a pure function of the inner step.

There is no scheduler object: the rate is set from the integer before each step, so nothing but the
optimizer's own moments has to be stored.

Source: AdamW (arXiv 1711.05101); cosine with warm-up as in DiLoCo (arXiv 2311.08105).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class AdamWSettings:
    """Settings of AdamW and of its learning rate.

    Attributes:
        lr: Peak learning rate, above 0.
        warmup_steps: Inner steps over which the rate rises linearly to `lr`; 0 = no warm-up.
        min_lr_ratio: Fraction of `lr` that remains at the last inner step, in [0, 1]; 1 = constant.
        beta1: Decay of the first moment, in [0, 1).
        beta2: Decay of the second moment, in [0, 1).
        eps: Added to the root of the second moment.
        weight_decay: Decoupled decay of matrices; vectors (norms) are never decayed.
    """

    lr: float
    warmup_steps: int = 0
    min_lr_ratio: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1


def learning_rate(settings: AdamWSettings, inner_step: int, inner_steps: int) -> float:
    """Compute the rate of the step that follows `inner_step` completed ones.

    Warm-up: lr (inner_step + 1) / warmup_steps while inner_step < warmup_steps. Then, with
    x = (inner_step - warmup_steps) / (inner_steps - warmup_steps) at most 1:
    lr (r + (1 - r) (1 + cos(pi x)) / 2), r = min_lr_ratio.

    Args:
        settings: Peak, warm-up and remainder.
        inner_step: Completed inner steps, from 0.
        inner_steps: Inner steps of the whole run; later steps keep the last rate.
    """
    if inner_step < settings.warmup_steps:
        return settings.lr * (inner_step + 1) / settings.warmup_steps
    decay_steps = max(1, inner_steps - settings.warmup_steps)
    x = min(1.0, (inner_step - settings.warmup_steps) / decay_steps)
    ratio = settings.min_lr_ratio
    return settings.lr * (ratio + (1 - ratio) * (1 + math.cos(math.pi * x)) / 2)


def build_optimizer(model: nn.Module, settings: AdamWSettings) -> torch.optim.AdamW:
    """Build fused AdamW with two groups: matrices, decayed, and vectors, not decayed.

    Args:
        model: Materialised and parallelised; tied parameters are taken once.
        settings: Settings of the optimizer.
    """
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (settings.beta1, settings.beta2)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=betas, eps=settings.eps, fused=True)


def set_learning_rate_(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use `rate` for every parameter from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = rate
