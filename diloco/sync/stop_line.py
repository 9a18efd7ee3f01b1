"""Where an island stops gracefully: between its training thread and its word with the coordinator.

An operator asks to stop; the island promises an inner step that it will not pass unasked, and holds
there; when every island has promised, the coordinator names the step after which all of them stop.

The leader has one. Its IO thread calls `promise`, `decide` and `fail`; its training thread `begin`
and `passing`, and then waits for `decided`, which runs in the IO thread's loop.

Source: protocol.md section 9 (graceful stop).
"""

from __future__ import annotations

import asyncio
import threading

from diloco.errors import DilocoError
from diloco.outer.schedule import Schedule


class StopLine:
    """One island's promise, and the run's stop step."""

    def __init__(self, schedule: Schedule) -> None:
        """Assign only."""
        self._schedule = schedule
        self._lock = threading.Lock()
        self._passed: int | None = None
        self._first_stop_step = 0
        self._promised: int | None = None
        self._stop_step: int | None = None
        self._failure: DilocoError | None = None
        self._ended = asyncio.Event()

    # -- the IO thread ---------------------------------------------------------------------------

    def promise(self) -> int | None:
        """Promise a step to hold at; the same one however often it is asked for.

        Returns:
            The first due step that training has not passed, `inner_steps` if none is left; None
            before training begins, when there is nothing to hold yet.
        """
        with self._lock:
            if self._promised is None and self._passed is not None:
                self._promised = self._next_due(max(self._passed, self._first_stop_step - 1))
            return self._promised

    def decide(self, stop_step: int) -> None:
        """Hear after which inner step everybody stops; the first word stays."""
        with self._lock:
            if self._stop_step is None:
                self._stop_step = stop_step
        self._ended.set()

    def fail(self, error: DilocoError) -> None:
        """Hear that the run is over: whoever holds must not wait any longer."""
        with self._lock:
            self._failure = self._failure or error
        self._ended.set()

    async def decided(self) -> int:
        """Wait for the stop step.

        Raises:
            DilocoError: That of `fail`, if there is no stop step.
        """
        await self._ended.wait()
        with self._lock:
            if self._stop_step is not None:
                return self._stop_step
            assert self._failure is not None
            raise self._failure

    # -- the training thread ---------------------------------------------------------------------

    def begin(self, inner_step: int, first_stop_step: int = 0) -> None:
        """Say where training goes on; promises are for due steps after it.

        Args:
            inner_step: Completed inner steps.
            first_stop_step: The outer loop's `first_checkpoint_step`: a stop is a checkpoint.
        """
        with self._lock:
            self._passed, self._first_stop_step = inner_step, first_stop_step

    def passing(self, inner_step: int) -> bool:
        """Say that training has come to a due step; True: hold here until `decided`."""
        with self._lock:
            assert self._passed is not None, "begin was not called"
            self._passed = inner_step
            is_undecided = self._promised is not None and self._stop_step is None
            return is_undecided and inner_step >= (self._promised or 0)

    @property
    def stop_step(self) -> int | None:
        """Inner step after which everybody stops; None while nobody has said."""
        with self._lock:
            return self._stop_step

    def _next_due(self, after: int) -> int:
        fragments = range(self._schedule.num_fragments)
        due_steps = (self._schedule.next_due(p, after) for p in fragments)
        return min(
            (step for step in due_steps if step is not None), default=self._schedule.inner_steps
        )
