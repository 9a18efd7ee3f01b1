"""Owns which inner optimizer takes which parameter, and its learning rate: a function of the step.

There is no scheduler object: the rate is set from the number before each step, so nothing but the
optimizer's own moments has to be stored.

Source: AdamW (arXiv 1711.05101); cosine with warm-up: DiLoCo (arXiv 2311.08105),
hyperparameters; warm-up, stable, decay: arXiv 2404.06395, with the shape 1 - sqrt of arXiv
2405.18392.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from diloco.config.inner import InnerOptimizerConfig, decay_begin
from diloco.errors import ConfigError
from diloco.island.lanes.parameters import canonical_parameters
from diloco.outer.patterns import check_match, matches
from diloco.protocol.island.soundness import StepBound
from diloco.trainer.optimizers.muon import Muon

#: Of a group of parameters: what its learning rate is, as a multiple of the schedule's.
_FACTOR = "lr_factor"
#: Tables of tokens and positions that are called neither embedding nor head: GPT-2's.
_TABLES = ("*wte.weight", "*wpe.weight")
#: Two roundings of a float32 value in a step.
_ROUNDING = 2.0**-23


def learning_rate(config: InnerOptimizerConfig, inner_step: float, inner_steps: int) -> float:
    """Compute the rate of the step that follows `inner_step` completed ones.

    Warm-up: lr (inner_step + 1) / warmup_steps while inner_step < warmup_steps. Then "constant"
    stays at lr, and "cosine" gives, with x = (inner_step - warmup_steps) / (inner_steps -
    warmup_steps) and r = min_lr_ratio: lr (r + (1 - r) (1 + cos(pi min(1, x))) / 2). "wsd" stays
    at lr until b = (1 - decay_ratio) inner_steps and then, with x = (inner_step - b) / (inner_steps
    - b), gives lr (r + (1 - r) (1 - min(1, x))), or with sqrt(x) for x.

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
    ratio = config.min_lr_ratio
    if config.schedule == "wsd":
        begin = decay_begin(config, inner_steps)
        x = min(1.0, max(0.0, (inner_step - begin) / (inner_steps - begin)))
        share = x if config.decay_shape == "linear" else math.sqrt(x)
        return config.lr * (ratio + (1 - ratio) * (1 - share))
    decay_steps = max(1, inner_steps - config.warmup_steps)
    x = min(1.0, (inner_step - config.warmup_steps) / decay_steps)
    return config.lr * (ratio + (1 - ratio) * (1 + math.cos(math.pi * x)) / 2)


def build_optimizer(
    model: nn.Module | Iterable[nn.Module], config: InnerOptimizerConfig
) -> torch.optim.AdamW | Muon:
    """Build fused AdamW, or Muon, with a group for each learning rate and weight decay.

    Matrices are decayed, vectors are not, unless `weight_decay_by_name` says so. Collective with
    Muon, if the model's ranks share parameters.

    Args:
        model: Materialised and parallelised, or its parts; tied parameters are taken once.
        config: Settings of the optimizer; `check_names` has found what they name, for a stage of a
            pipeline has not all of it.
    """
    named = canonical_parameters(model).items()
    parameters = {name: p for name, p in named if p.requires_grad}  # and no buffers
    groups: dict[bool, dict[tuple[float, float], list[Tensor]]] = {False: {}, True: {}}
    for name, parameter in parameters.items():
        decay = _by_name(config.weight_decay_by_name, name)
        if decay is None:
            decay = config.weight_decay if parameter.ndim >= 2 else 0.0
        factor = _by_name(config.lr_by_name, name)
        settings = (1.0 if factor is None else factor, decay)
        is_muon = config.name != "adamw" and is_orthogonalised(config, name, parameter.ndim)
        groups[is_muon].setdefault(settings, []).append(parameter)
    others = [_group(*group) for group in groups[False].items()] or [_group((1.0, 0.0), [])]
    adamw = torch.optim.AdamW(others, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    if config.name == "adamw":
        return adamw
    matrices = [_group(*group) for group in groups[True].items()]
    return Muon(
        matrices,
        adamw,
        lr=config.lr,
        momentum=config.momentum,
        nesterov=config.name == "muon",
        scale="rms" if config.name == "muon" else "spectral",
    )


def apply_if_finite_(optimizer: torch.optim.AdamW | Muon, grad_norm: Tensor) -> None:
    """Update parameters and state, or change no bit of them where the norm is not finite.

    The device decides. The attribute is the one through which PyTorch's `GradScaler` has fused
    optimizers skip a step.

    Args:
        optimizer: From `build_optimizer`.
        grad_norm: Of all gradients, without dimensions.
    """
    optimizer.found_inf = grad_norm.isfinite().logical_not().float()  # type: ignore[union-attr]
    optimizer.step()


def step_bound(optimizer: torch.optim.Optimizer) -> StepBound:
    """Bound how far the optimizer's next step can move a value, whatever the gradients.

    AdamW: with m and v the exponential means of g and g^2, Cauchy-Schwarz gives

        |m| <= sqrt(v) (1 - b1) / sqrt((1 - b2) (1 - b1^2 / b2)),

    so that a value x moves by at most lr max(1, that factor) + lr decay |x| (1 where the first step
    alone counts). Muon: the singular values of an orthogonalised matrix are at most about 1.2, and
    so is every element of it.

    Args:
        optimizer: AdamW, Adam or `Muon`, with the learning rates of the step; of another nothing is
            known.
    """
    if not isinstance(optimizer, (torch.optim.Adam, Muon)):
        return StepBound()
    update = decay = 0.0
    for group in optimizer.param_groups:
        if not group["params"]:
            continue
        if isinstance(optimizer, Muon) and "moments" in group:
            most = optimizer.largest_update
        else:
            most = largest_ratio(*group["betas"])
        update = max(update, group["lr"] * max(1.0, most))
        decay = max(decay, group["lr"] * group["weight_decay"])
    return StepBound(update, decay + _ROUNDING)


def largest_ratio(beta1: float, beta2: float) -> float:
    """Return the largest |m| / sqrt(v) of Adam's moments, see `step_bound`; may be infinite."""
    if beta1 * beta1 >= beta2:
        return math.inf
    return (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1 * beta1 / beta2))


def check_names(config: InnerOptimizerConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that every pattern matches a parameter, and that Muon has a matrix.

    Args:
        config: Settings of the optimizer.
        shapes: Canonical name -> unsharded shape, of the whole model.

    Raises:
        ConfigError: Naming the key, the pattern and some parameters.
    """
    for key in ("lr_by_name", "weight_decay_by_name"):
        for rule in getattr(config, key):
            check_match(f"inner.optimizer.{key}", rule, rule.rpartition("=")[0], shapes)
    if config.name == "adamw":
        return
    if config.adamw_by_name != type(config).model_fields["adamw_by_name"].default:
        for pattern in config.adamw_by_name:  # the default suits models without a head
            check_match("inner.optimizer.adamw_by_name", pattern, pattern, shapes)
    if not any(is_orthogonalised(config, name, len(shape)) for name, shape in shapes.items()):
        raise ConfigError(
            f"inner.optimizer.adamw_by_name = {list(config.adamw_by_name)} leaves no matrix to "
            'muon: name fewer, or set inner.optimizer.name = "adamw"'
        )


def is_orthogonalised(config: InnerOptimizerConfig, name: str, ndim: int) -> bool:
    """Say whether Muon takes a parameter: a matrix, or matrices stacked in three dims."""
    left = (*config.adamw_by_name, *_TABLES)
    return ndim in (2, 3) and not any(matches(name, pattern) for pattern in left)


def _by_name(rules: Iterable[str], name: str) -> float | None:
    for rule in rules:
        pattern, _, number = rule.rpartition("=")
        if matches(name, pattern):
            return float(number)
    return None


def _group(settings: tuple[float, float], parameters: list[Tensor]) -> dict[str, Any]:
    factor, decay = settings
    return {"params": parameters, "weight_decay": decay, _FACTOR: factor}


def set_learning_rate_(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use `rate`, times its group's factor, for every parameter from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group[_FACTOR]
