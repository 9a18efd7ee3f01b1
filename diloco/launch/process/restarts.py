"""Decides how often something that fails is started again, and after what wait. Pure.

`diloco.launch.island` starts ranks again by it, `diloco.launch.syncer_supervisor` a syncer.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Longest wait before a restart, in seconds.
MAX_WAIT_S = 60.0
#: Seconds for which one that reaches nobody is started again: a weekend's outage.
MAX_OUTAGE_S = 72 * 3600.0
#: Doublings after which any wait is the longest.
_MOST_DOUBLINGS = 30


@dataclass(slots=True)
class RestartBudget:
    """Restarts in a row; a start that lives long enough gives all of them back.

    The n-th restart in a row waits min(most_wait_s, first_wait_s * 2^(n-1)) seconds.

    Args:
        max_restarts: Restarts in a row, at least 0; 0: the first failure is the last.
        first_wait_s: Wait before the first of them, in seconds.
        reset_s: Life of a start, in seconds, after which all restarts are back.
        most_wait_s: Longest wait, in seconds.
    """

    max_restarts: float
    first_wait_s: float
    reset_s: float
    most_wait_s: float = MAX_WAIT_S
    used: int = 0

    @property
    def left(self) -> float:
        """Restarts that are left."""
        return self.max_restarts - self.used

    def failed(self, lived_s: float) -> float | None:
        """Take one restart for a start that failed after `lived_s` seconds.

        Returns:
            Seconds to wait before the restart; None when none is left.
        """
        if lived_s >= self.reset_s:
            self.used = 0
        if self.left <= 0:
            return None
        self.used += 1
        return _wait_s(self.first_wait_s, self.used, self.most_wait_s)


@dataclass(slots=True)
class OutageBudget:
    """Restarts of what reaches nobody, however many: the time of all of them is bounded instead.

    Waits grow as those of a `RestartBudget`.

    Args:
        first_wait_s: Wait before the first restart, in seconds.
        reset_s: Life of a start, in seconds, after which the next outage is another one.
        most_s: Seconds of an outage after which nothing is started again.
    """

    first_wait_s: float
    reset_s: float
    most_s: float = MAX_OUTAGE_S
    used: int = 0
    lasted_s: float = 0.0

    def failed(self, lived_s: float, called_s: float) -> float | None:
        """Record a start that lived for so long and then called for so long in vain.

        Returns:
            Seconds to wait before the restart; None when the outage has lasted too long.
        """
        if lived_s >= self.reset_s:
            self.used, self.lasted_s = 0, 0.0
        self.lasted_s += called_s
        if self.lasted_s >= self.most_s:
            return None
        self.used += 1
        wait_s = _wait_s(self.first_wait_s, self.used, MAX_WAIT_S)
        self.lasted_s += wait_s
        return wait_s


def _wait_s(first_wait_s: float, num_restarts: int, most_s: float) -> float:
    return min(first_wait_s * 2.0 ** min(num_restarts - 1, _MOST_DOUBLINGS), most_s)
