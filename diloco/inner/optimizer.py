"""Owns the inner optimizer (AdamW) and its learning rate as a pure function of the inner step.

There is no scheduler object: the rate is set from the number before each step, so nothing but the
optimizer's own moments has to be stored.

Source: AdamW (arXiv 1711.05101); cosine with warm-up as in DiLoCo (arXiv 2311.08105).
"""

from __future__ import annotations

import math

import torch
from torch import nn

from diloco.config.inner import InnerOptimizerConfig


def learning_rate(config: InnerOptimizerConfig, inner_step: float, inner_steps: int) -> float:
    """Compute the rate of the step that follows `inner_step` completed ones.

    Warm-up: lr (inner_step + 1) / warmup_steps while inner_step < warmup_steps. Then "constant"
    stays at lr, and "cosine" gives, with x = (inner_step - warmup_steps) / (inner_steps -
    warmup_steps) and r = min_lr_ratio: lr (r + (1 - r) (1 + cos(pi min(1, x))) / 2).

    Args:
        config: Peak, warm-up, schedule and remainder; warmup_steps = 0 starts at the peak.
        inner_step: Completed inner steps, from 0; where tokens end the run, the share of them that
            is merged, in inner steps.
        inner_steps: Inner steps of the whole run; later steps keep the last rate.
    """
    if inner_step < config.warmup_steps:
        return config.lr * (inner_step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    decay_steps = max(1, inner_steps - config.warmup_steps)
    x = min(1.0, (inner_step - config.warmup_steps) / decay_steps)
    ratio = config.min_lr_ratio
    return config.lr * (ratio + (1 - ratio) * (1 + math.cos(math.pi * x)) / 2)


def build_optimizer(model: nn.Module, config: InnerOptimizerConfig) -> torch.optim.AdamW:
    """Build fused AdamW with two groups: matrices, decayed, and vectors, not decayed.

    Args:
        model: Materialised and parallelised; tied parameters are taken once.
        config: Settings of the optimizer.
    """
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def set_learning_rate_(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use `rate` for every parameter from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = rate
