"""Retries calls: exponential waits with full jitter, within a budget of seconds.

Each wait is uniform in [0, cap], the cap doubling from one failure to the next, so that islands
that lost the same peer do not come back together.

Source: "Exponential Backoff And Jitter" (M. Brooker, AWS Architecture Blog, 2015), full jitter.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from diloco.transport.errors import TransportError

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How long to keep trying.

    Attributes:
        first_wait_s: Cap of the first wait, in seconds; > 0.
        max_wait_s: Largest cap, in seconds; at least `first_wait_s`.
        budget_s: Seconds after the start, or after the last progress, from which no attempt is
            begun; 0 allows one attempt.
    """

    first_wait_s: float = 0.1
    max_wait_s: float = 5.0
    budget_s: float

    def __post_init__(self) -> None:
        """Refuse what cannot be waited.

        Raises:
            ValueError: If not 0 < first_wait_s <= max_wait_s, or the budget is not finite and
                0 or more.
        """
        if not 0 < self.first_wait_s <= self.max_wait_s < float("inf"):
            raise ValueError(
                f"first_wait_s = {self.first_wait_s}, max_wait_s = {self.max_wait_s}: "
                "must be 0 < first_wait_s <= max_wait_s"
            )
        if not 0 <= self.budget_s < float("inf"):
            raise ValueError(f"budget_s = {self.budget_s}: must be finite and 0 or more seconds")


async def retry(
    attempt: Callable[[], Awaitable[_T]],
    policy: RetryPolicy,
    rng: random.Random,
    progress: Callable[[], int] = lambda: 0,
    moved: Callable[[], int] = lambda: 0,
    *,
    attempt_s: float = math.inf,
) -> _T:
    """Await `attempt()` until it succeeds, fails for good, or the budget is spent.

    Args:
        attempt: Makes one attempt, with a deadline of its own.
        policy: Waits and budget, on the running loop's clock.
        rng: Draws the waits.
        progress: Counts what shows that the peer is reached, such as bytes that need not move
            again: where it has grown, waits and budget begin again, so that a transfer may take as
            long as its link needs.
        moved: Counts that of this call alone. What arrives damaged again and again is not asked for
            beyond the budget without it, however much else moves.
        attempt_s: Of one attempt no more is counted: where it took longer, this process had no turn
            for so long, and could not have heard an answer.

    Raises:
        TransportError: At once if it is not retryable; otherwise the last one, its message
            naming the number of attempts and the seconds spent.
    """
    loop = asyncio.get_running_loop()
    spent_s = still_s = 0.0  # since the last progress, and since something of this call moved
    cap_s = policy.first_wait_s
    num_attempts, done, own = 0, progress(), moved()
    while True:
        num_attempts += 1
        began = loop.time()
        try:
            return await attempt()
        except TransportError as error:
            if not error.is_retryable:
                raise
            took_s = min(loop.time() - began, attempt_s)
            spent_s, still_s = spent_s + took_s, still_s + took_s
            if progress() > done:
                spent_s, cap_s, done = 0.0, policy.first_wait_s, progress()
            if moved() > own:
                still_s, own = 0.0, moved()
            wait_s = rng.uniform(0.0, cap_s)
            elapsed_s = still_s if error.is_damage else spent_s
            if elapsed_s + wait_s >= policy.budget_s:
                final = type(error)(
                    f"gave up after {num_attempts} attempts in {elapsed_s:.1f} s "
                    f"(budget {policy.budget_s:g} s), the last: {error}"
                )
                final.peer, final.method = error.peer, error.method
                raise final from error
            _log.debug("attempt failed attempt=%d wait_s=%.3f: %s", num_attempts, wait_s, error)
        cap_s = min(cap_s * 2, policy.max_wait_s)
        await asyncio.sleep(wait_s)
        spent_s, still_s = spent_s + wait_s, still_s + wait_s
