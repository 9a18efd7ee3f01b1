"""Decides whether a loss is far above the good losses of a run so far. Pure.

The reference is the median of the lowest losses: one that was lucky does not move it, once there
are three, nor does a run that becomes worse in small steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

#: Lowest losses that are remembered.
_REMEMBERED = 5


class LossHistory:
    """The lowest losses of a run, in one unit; `lowest` can be kept and given back."""

    def __init__(self, lowest: Iterable[float] = ()) -> None:
        """Begin with what is known, if anything."""
        self.lowest = sorted(lowest)[:_REMEMBERED]

    @property
    def reference(self) -> float:
        """What a loss is compared with; infinite before the first."""
        return statistics.median(self.lowest) if self.lowest else math.inf

    def is_high(self, loss: float, most_rise: float) -> bool:
        """Whether a loss is not finite, or above (1 + `most_rise`) x the reference."""
        return not math.isfinite(loss) or loss > (1 + most_rise) * self.reference

    def add(self, loss: float) -> None:
        """Remember a loss, if it is one of the lowest."""
        self.lowest = sorted([*self.lowest, loss])[:_REMEMBERED]


class LossWatch:
    """Whether the training loss of an island rises for rounds.

    Args:
        period: Inner steps whose mean counts as one loss.
    """

    #: Rise above the reference from which on a mean is high; batches differ, and so does text.
    MOST_RISE = 0.2
    #: High means in a row that are an alarm.
    NUM_HIGH = 3

    def __init__(self, period: int) -> None:
        """Begin with no loss."""
        self.period = period
        self._history = LossHistory()
        self._sum, self._count, self._num_high = 0.0, 0, 0

    @property
    def is_rising(self) -> bool:
        """Whether the last means were high, so many in a row."""
        return self._num_high >= self.NUM_HIGH

    @property
    def reference(self) -> float:
        """Median of the lowest means; infinite before the first."""
        return self._history.reference

    def add(self, loss: float) -> float | None:
        """Take the loss of an inner step; returns the mean of the period that it ends, or None.

        A loss that is not finite ends the period, and is an alarm at once.
        """
        self._sum, self._count = self._sum + loss, self._count + 1
        if math.isfinite(loss) and self._count < self.period:
            return None
        mean = self._sum / self._count
        self._sum, self._count = 0.0, 0
        if self._history.is_high(mean, self.MOST_RISE):
            self._num_high += 1 if math.isfinite(mean) else self.NUM_HIGH
        else:
            self._num_high = 0
            self._history.add(mean)
        return mean
