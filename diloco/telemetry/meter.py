"""Measures what an island's time was spent on, and what it computes a second.

Pure arithmetic over seconds that it is given; reads no clock.

Source: PROTOCOL.md, "Words for figures".
"""

from __future__ import annotations

import bisect
from collections import deque
from dataclasses import dataclass

_RATE_STEPS = 20


def utilisation(
    *, num_steps: int, undisturbed_step_s: float, inner_s: float, wall_s: float
) -> float:
    """Compute min(inner steps x undisturbed step time, time in inner steps) / wall time.

    No step is faster during an exchange than without one. Where the steps say otherwise, something
    else shared the cores with the quiet ones, what an undisturbed step takes is not known, and the
    time that was spent in inner steps stands for it: utilisation is goodput then, a bound from
    above, and never more than 1.

    Args:
        num_steps: Inner steps.
        undisturbed_step_s: Seconds that one takes while nothing is outstanding.
        inner_s: Seconds that all of them took.
        wall_s: Seconds from the first to the end; 0 gives 0.
    """
    return min(num_steps * undisturbed_step_s, inner_s) / wall_s if wall_s > 0 else 0.0


class StepMeter:
    """Durations of inner steps (without `outer.step()`), and what follows from them."""

    def __init__(self) -> None:
        """Begin with no step."""
        self.num_steps = 0
        self.tokens = 0
        self.inner_s = 0.0
        self._quiet_s: list[float] = []  # ascending
        self._recent: deque[tuple[float, int]] = deque([(0.0, 0)], maxlen=_RATE_STEPS + 1)
        self._progress: deque[float] = deque(maxlen=_RATE_STEPS)

    def add(self, duration_s: float, num_tokens: int, *, wall_s: float, is_quiet: bool) -> None:
        """Count one inner step.

        Args:
            duration_s: Seconds that it took.
            num_tokens: Tokens of the whole island in it.
            wall_s: Seconds since the first inner step began.
            is_quiet: Whether nothing was outstanding during it.
        """
        self.num_steps += 1
        self.tokens += num_tokens
        self.inner_s += duration_s
        self._recent.append((wall_s, self.tokens))
        if is_quiet:
            bisect.insort(self._quiet_s, duration_s)

    def progressed(self, schedule_steps: float) -> None:
        """Count how far the run has come with the inner step that was added last."""
        self._progress.append(schedule_steps)

    def left_s(self, schedule_steps: float) -> float:
        """Seconds that so many steps of the run will take, as the last 20 did; 0: not known."""
        num_steps = len(self._progress)
        done, (last_s, _) = sum(self._progress), self._recent[-1]
        if num_steps < 2 or done <= 0:
            return 0.0
        first_s = self._recent[max(0, len(self._recent) - 1 - num_steps)][0]
        return schedule_steps * (last_s - first_s) / done

    @property
    def undisturbed_step_s(self) -> float:
        """Median duration of the steps during which nothing was outstanding; 0 before the first.

        The steps before the first send are among them, so there is always one. Undisturbed by
        exchanges, that is: what else runs on the same cores disturbs these steps, too.
        """
        quiet_s = self._quiet_s
        if not quiet_s:
            return 0.0
        middle = len(quiet_s) // 2
        return (quiet_s[middle] + quiet_s[-middle - 1]) / 2

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of wall time, waits included, over the last 20 inner steps."""
        (first_s, first), (last_s, last) = self._recent[0], self._recent[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else 0.0

    def utilisation(self, wall_s: float) -> float:
        """Compute `utilisation` of all steps so far."""
        return utilisation(
            num_steps=self.num_steps,
            undisturbed_step_s=self.undisturbed_step_s,
            inner_s=self.inner_s,
            wall_s=wall_s,
        )

    def goodput(self, wall_s: float) -> float:
        """Compute the share of wall time spent in inner steps; 0 before any wall time."""
        return self.inner_s / wall_s if wall_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class ComputeWork:
    """Work of a token and the devices that do it.

    Args:
        flops_per_token: Operations of training on one token; 0: not known.
        num_ranks: Devices of the island.
        peak_flops: Operations a second of one device at most; 0: not known (CPUs, among others).
    """

    flops_per_token: float = 0.0
    num_ranks: int = 1
    peak_flops: float = 0.0

    def tflops_per_s(self, tokens: int, seconds: float) -> float:
        """Compute 10^12 operations a second and rank; 0 where they are not known."""
        if seconds <= 0:
            return 0.0
        return tokens * self.flops_per_token / (seconds * self.num_ranks) / 1e12

    def mfu(self, tokens: int, seconds: float) -> float:
        """Compute the share of the devices' peak in [0, 1]; 0 where that is not known."""
        if not self.peak_flops:
            return 0.0
        return self.tflops_per_s(tokens, seconds) * 1e12 / self.peak_flops
