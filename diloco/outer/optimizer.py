"""Outer optimizer: SGD, momentum or Nesterov steps on pseudo-gradients, float32, in place.

Every product is rounded before it is added (no `add(alpha=)`, no `lerp`): fused forms round
otherwise on other devices and under `torch.compile`, and islands must be able to recompute a
version bit by bit. Learning rate and momentum are rounded to float32 where they meet a tensor.

Source: DiLoCo (arXiv 2311.08105), section 2; momentum as in `torch.optim.SGD` without dampening.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from diloco.errors import ConfigError


@dataclass(frozen=True)
class OuterOptimizer:
    """The outer step of a fragment and its constants.

    Attributes:
        name: nesterov, momentum or sgd.
        lr: Outer learning rate, finite and > 0.
        momentum: In [0, 1); sgd does not use it.
        momentum_ramp_rounds: Rounds over which momentum grows from 0 to its value; 0 has no ramp.
    """

    name: Literal["nesterov", "momentum", "sgd"]
    lr: float
    momentum: float
    momentum_ramp_rounds: int

    def __post_init__(self) -> None:
        """Refuse impossible constants.

        Raises:
            ConfigError: Naming the field, its value and the allowed range.
        """
        if self.name not in ("nesterov", "momentum", "sgd"):
            raise ConfigError(
                f"outer.optimizer.name = {self.name!r} is unknown: choose nesterov, momentum or sgd"
            )
        for field, value, allowed, is_allowed in (
            ("lr", self.lr, "finite and > 0", math.isfinite(self.lr) and self.lr > 0),
            ("momentum", self.momentum, "in [0, 1)", 0 <= self.momentum < 1),
            (
                "momentum_ramp_rounds",
                self.momentum_ramp_rounds,
                "at least 0",
                self.momentum_ramp_rounds >= 0,
            ),
        ):
            if not is_allowed:
                raise ConfigError(f"outer.optimizer.{field} = {value} must be {allowed}")

    def momentum_at(self, version: int) -> float:
        """Return mu_v = momentum * min(1, v / momentum_ramp_rounds).

        Args:
            version: v, the fragment's version that the step starts from, >= 0.
        """
        if version >= self.momentum_ramp_rounds:
            return self.momentum
        return self.momentum * (version / self.momentum_ramp_rounds)

    @torch.no_grad()
    def step_(self, theta: Tensor, buffer: Tensor, delta: Tensor, *, version: int) -> None:
        """Take one outer step in place.

        buffer <- mu_v * buffer + delta, for every optimizer and also at mu_v = 0; then
        theta <- theta - lr * (delta + mu_v * buffer) for nesterov, theta - lr * buffer for
        momentum, theta - lr * delta for sgd. A result that is not finite is not detected here.

        Args:
            theta: Exact global parameters, float32.
            buffer: Momentum, float32, same shape and device; zeros at version 0.
            delta: Mean pseudo-gradient, float32, same shape and device; unchanged.
            version: v, the fragment's version that the step starts from.

        Raises:
            ValueError: If shapes or dtypes differ from that.
        """
        _check_alike(theta=theta, buffer=buffer, delta=delta)
        mu = self.momentum_at(version)
        buffer.mul_(mu).add_(delta)
        if self.name == "nesterov":
            direction = (buffer * mu).add_(delta).mul_(self.lr)
        else:
            direction = (buffer if self.name == "momentum" else delta) * self.lr
        theta.sub_(direction)


@torch.no_grad()
def flush_step_(theta: Tensor, delta: Tensor) -> None:
    """Take the plain averaging step of a flush in place: theta <- theta - delta.

    Args:
        theta: Exact global parameters, float32.
        delta: Mean pseudo-gradient, float32, same shape and device.

    Raises:
        ValueError: If shapes or dtypes differ from that.
    """
    _check_alike(theta=theta, delta=delta)
    theta.sub_(delta)


def _check_alike(**tensors: Tensor) -> None:
    kinds = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    if len(set(kinds.values())) > 1 or kinds["theta"][0] != torch.float32:
        raise ValueError(f"outer step on {kinds}: all must be float32 of one shape")
