"""How often something that fails is started again, and after what wait. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

#: Longest wait before a restart, in seconds.
MAX_WAIT_S = 60.0


@dataclass(slots=True)
class RestartBudget:
    """Restarts in a row; a start that lives long enough gives all of them back.

    The n-th restart in a row waits min(60, first_wait_s * 2^(n-1)) seconds.

    Args:
        max_restarts: Restarts in a row, at least 0; 0: the first failure is the last.
        first_wait_s: Wait before the first of them, in seconds.
        reset_s: Life of a start, in seconds, after which all restarts are back.
    """

    max_restarts: int
    first_wait_s: float
    reset_s: float
    used: int = 0

    @property
    def left(self) -> int:
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
        return min(self.first_wait_s * 2.0 ** (self.used - 1), MAX_WAIT_S)
