"""How long a chip lives, and how long it is away: distributions by their mean. Pure.

    exponential              F(x) = 1 - exp(-x / s)
    weibull                  F(x) = 1 - exp(-(x / s)^shape)
    exponentiated-weibull    F(x) = (1 - exp(-(x / s)^shape))^exponent

The scale s follows from the mean. With shape < 1 the young fail more often, with shape > 1 the old;
an exponent > 1 makes short times rare.

Source: Decoupled DiLoCo (arXiv 2604.21428), time until a chip is back; exponentiated Weibull:
Mudholkar and Srivastava, 1993.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

#: Of a random number that is neither 0 nor 1.
_TINY = 2.0**-53
#: Points and bounds of the integral that gives the mean, in ln(x / s) times shape.
_POINTS, _LOWEST, _HIGHEST = 20_001, -40.0, math.log(700.0)


@dataclass(frozen=True)
class Lifetimes:
    """Times of mean `mean_s`, exponentiated Weibull; shape 1 and exponent 1 are exponential.

    Attributes:
        mean_s: Their mean, seconds, > 0.
        shape: Of the Weibull distribution, > 0.
        exponent: Of its distribution function, > 0.
    """

    mean_s: float
    shape: float = 1.0
    exponent: float = 1.0

    @cached_property
    def scale_s(self) -> float:
        """The s that makes the mean what it is: mean / integral of 1 - F over x at s = 1."""
        if self.exponent == 1.0:
            return self.mean_s / math.gamma(1.0 + 1.0 / self.shape)
        x = np.exp(np.linspace(_LOWEST, _HIGHEST, _POINTS) / self.shape)
        survival = -np.expm1(self.exponent * np.log(-np.expm1(-(x**self.shape))))
        return self.mean_s / float(x[0] + np.trapezoid(survival, x))

    def draw(self, count: int, rng: np.random.Generator) -> Floats:
        """Draw `count` independent times, [count], float64, seconds."""
        if self.shape == 1.0 and self.exponent == 1.0:
            return rng.exponential(self.mean_s, count)
        if self.exponent == 1.0:
            return self.scale_s * rng.weibull(self.shape, count)
        share = np.clip(rng.random(count), _TINY, 1.0 - _TINY)
        survival = -np.expm1(np.log(share) / self.exponent)  # 1 - F, exact where it is small
        times: Floats = self.scale_s * (-np.log(survival)) ** (1.0 / self.shape)
        return times
