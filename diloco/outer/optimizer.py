"""Takes outer steps: SGD, momentum, Nesterov or Adam on merged pseudo-gradients.

DiLoCo uses Nesterov momentum. The step runs in the syncer, in float32 and in place.

A version must be recomputable bit by bit on other hardware. So every product is rounded before it
is added: fused forms (`add(alpha=)`, `lerp`) round differently on other devices and under
`torch.compile`. Constants are rounded to float32 where they meet a tensor.

Source: DiLoCo (arXiv 2311.08105), section 2, whose outer Adam needs eps = 0.1; momentum as in
`torch.optim.SGD` without dampening, Adam as in Kingma and Ba (arXiv 1412.6980), Algorithm 1.
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
    """The rule of the outer step, and its constants.

    Attributes:
        name: nesterov, momentum, sgd or adam.
        lr: Outer learning rate, finite and > 0.
        momentum: mu, in [0, 1); of nesterov and momentum.
        momentum_ramp_rounds: Rounds over which momentum grows from 0 to its value; 0 has no ramp.
        betas: Decay of the first and second moment, each in [0, 1); of adam.
        eps: Added to the root of the second moment, finite and > 0; of adam.
        last_momentum: What momentum falls to, in [0, 1); None: it does not.
        num_rounds: Rounds of the run, the flush among them; counts only where momentum falls.
    """

    name: Literal["nesterov", "momentum", "sgd", "adam"]
    lr: float
    momentum: float
    momentum_ramp_rounds: int
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 0.1
    last_momentum: float | None = None
    num_rounds: int = 0

    def __post_init__(self) -> None:
        """Refuse impossible constants.

        Raises:
            ConfigError: Naming the field, its value and the allowed range.
        """
        if self.name not in ("nesterov", "momentum", "sgd", "adam"):
            raise ConfigError(
                f"outer.optimizer.name = {self.name!r} is unknown: choose nesterov, momentum, sgd "
                "or adam"
            )
        for field, value, allowed, is_allowed in (
            ("lr", self.lr, "finite and > 0", math.isfinite(self.lr) and self.lr > 0),
            *(
                (field, mu, "in [0, 1)", 0 <= mu < 1)
                for field, mu in (("momentum", self.momentum), ("momentum[1]", self.last_momentum))
                if mu is not None
            ),
            (
                "momentum_ramp_rounds",
                self.momentum_ramp_rounds,
                "at least 0",
                self.momentum_ramp_rounds >= 0,
            ),
            *(
                (f"betas[{i}]", beta, "in [0, 1)", 0 <= beta < 1)
                for i, beta in enumerate(self.betas)
            ),
            ("eps", self.eps, "finite and > 0", math.isfinite(self.eps) and self.eps > 0),
        ):
            if not is_allowed:
                raise ConfigError(f"outer.optimizer.{field} = {value} must be {allowed}")

    @property
    def has_second_moment(self) -> bool:
        """Whether its state is two values for each parameter, not one."""
        return self.name == "adam"

    def momentum_at(self, version: int) -> float:
        """Return mu_v = m_v min(1, v / momentum_ramp_rounds).

        m_v is momentum; where it falls, it does so linearly in the last F = floor(3 R / 10) of R
        rounds, so that the last step before the flush, v = R - 2, has last_momentum:

            m_v = momentum + (last_momentum - momentum) min(1, max(0, v + 2 + F - R) / F)

        Args:
            version: v, the fragment's version that the step starts from, >= 0.
        """
        momentum, falling = self.momentum, 3 * self.num_rounds // 10
        passed = min(falling, version + 2 + falling - self.num_rounds)
        if self.last_momentum is not None and falling and passed > 0:
            momentum += (self.last_momentum - momentum) * (passed / falling)
        if version >= self.momentum_ramp_rounds:
            return momentum
        return momentum * (version / self.momentum_ramp_rounds)

    @torch.no_grad()
    def step_(
        self,
        theta: Tensor,
        buffer: Tensor,
        delta: Tensor,
        second_moment: Tensor | None = None,
        *,
        version: int,
    ) -> None:
        """Take one outer step in place.

            buffer <- mu_v * buffer + delta                     (also for sgd and at mu_v = 0)
            theta  <- theta - lr * (delta + mu_v * buffer)      nesterov
                      theta - lr * buffer                       momentum
                      theta - lr * delta                        sgd

        For adam, with betas b, c and t = version + 1,

            buffer <- b * buffer + (1 - b) * delta
            second_moment <- c * second_moment + (1 - c) * delta^2
            theta <- theta - lr * m / (sqrt(s) + eps)
                m = buffer / (1 - b^t),  s = second_moment / (1 - c^t)

        The caller checks that the result is finite.

        Args:
            theta: Exact global parameters, float32.
            buffer: Momentum or first moment, float32, same shape and device; zeros at version 0.
            delta: Merged pseudo-gradient, float32, same shape and device; unchanged.
            second_moment: The same of adam; None for all others.
            version: v, the fragment's version that the step starts from; flushes before it count.

        Raises:
            ValueError: If shapes or dtypes differ from that, or adam has no second moment.
        """
        if (second_moment is not None) != self.has_second_moment:
            raise ValueError(f"outer step of {self.name}: second moment is {second_moment}")
        if second_moment is not None:
            _check_alike(theta=theta, buffer=buffer, delta=delta, second_moment=second_moment)
            self._adam_step_(theta, buffer, delta, second_moment, num_steps=version + 1)
            return
        _check_alike(theta=theta, buffer=buffer, delta=delta)
        mu = self.momentum_at(version)
        buffer.mul_(mu).add_(delta)
        if self.name == "nesterov":
            direction = (buffer * mu).add_(delta).mul_(self.lr)
        else:
            direction = (buffer if self.name == "momentum" else delta) * self.lr
        theta.sub_(direction)

    def _adam_step_(
        self, theta: Tensor, first: Tensor, delta: Tensor, second: Tensor, *, num_steps: int
    ) -> None:
        b, c = self.betas
        first.mul_(b).add_(delta * (1 - b))
        second.mul_(c).add_((delta * delta).mul_(1 - c))
        # A float32 root is not correctly rounded everywhere; out of one of float64 it always is:
        # no root of a number of 24 bits is within 2^-51 of the middle between two such numbers.
        root = (second * (1 / (1 - c**num_steps))).double().sqrt_().float()
        divisor = root.add_(self.eps)
        theta.sub_((first * (self.lr / (1 - b**num_steps))).div_(divisor))


@torch.no_grad()
def flush_step_(theta: Tensor, delta: Tensor) -> None:
    """Take the step of a flush in place: theta <- theta - delta, which averages the islands.

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
