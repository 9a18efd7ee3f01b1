"""Medians with intervals, means with spreads: what a bench says of repeated measurements.

Intervals come from ranks, not from a resampling: no seed, no assumption on the distribution.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Interval:
    """A median and the interval that holds the true one with at least the confidence asked for.

    Attributes:
        median: Of the values.
        low: Lower end, one of the values.
        high: Upper end, one of the values.
        count: Number of values.
    """

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float], confidence: float = 0.95) -> Interval:
        """Take the k-th smallest and k-th largest of n values.

        Each value lies below the true median with probability 1/2, so [x_(k), x_(n+1-k)] misses it
        with probability 2 P(Binomial(n, 1/2) < k). k is the largest rank that keeps this at most
        1 - confidence; where none does (n < 6 at 95 %) the interval is the whole range.

        Args:
            values: Independent measurements, at least one, in any order.
            confidence: In (0, 1).

        Raises:
            ValueError: If there is no value.

        Source: the sign test's confidence interval (Conover, Practical Nonparametric Statistics).
        """
        if not values:
            raise ValueError("an interval needs at least one value")
        ordered = sorted(values)
        n = len(ordered)
        rank, missed = 0, 0.0
        while rank < n // 2:
            missed += 2 * math.comb(n, rank) / 2**n
            if missed > 1 - confidence:
                break
            rank += 1
        k = max(rank, 1)
        return cls(statistics.median(ordered), ordered[k - 1], ordered[n - k], n)

    def as_dict(self) -> dict[str, float]:
        """Return it as JSON values."""
        return {"median": self.median, "low": self.low, "high": self.high, "count": self.count}


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean of some values and their sample standard deviation, None of a single value."""

    mean: float
    deviation: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Compute both.

        Raises:
            ValueError: If there is no value.
        """
        if not values:
            raise ValueError("a mean needs at least one value")
        deviation = statistics.stdev(values) if len(values) > 1 else None
        return cls(statistics.fmean(values), deviation)
