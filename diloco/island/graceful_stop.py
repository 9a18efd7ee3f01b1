"""Where an island stops gracefully: between its training thread and its word with the coordinator.

An operator asks to stop; the island promises an inner step that it will not pass unasked, and holds
there; when every island has promised, the coordinator names the step after which all of them stop.
It names a later one if an island that starts again meanwhile can stop only later. A stop that is
taken back voids all of it: who holds goes on.

Islands that merge on arrival promise nothing: they hear of a cut, a run checkpoint that each takes
at its next step, and whether they are to leave then.

The leader has one. Its IO thread calls `promise` and `hear`, its training thread the rest, but for
`wait_for_word`, which runs in the IO thread's loop.

Source: PROTOCOL.md, "Graceful stop".
"""

from __future__ import annotations

import asyncio
import threading

from diloco.outer.schedule import Schedule
from diloco.protocol.island.votes import NO_CUT, Cut
from diloco.tasks import wait_for


class GracefulStop:
    """One island's promise, and the run's stop step.

    `num_words` counts what was heard of the coordinator: while it grows, the coordinator lives.
    """

    def __init__(self, schedule: Schedule, *, on_arrival: bool = False) -> None:
        """Assign only; `on_arrival`: islands have no inner step in common to stop after."""
        self._schedule = schedule
        self._on_arrival = on_arrival
        self._is_drained = False
        self._cut = NO_CUT
        self._lock = threading.Lock()
        self._passed: int | None = None
        self._first_stop_step = 0
        self._promised: int | None = None
        self._stop_step: int | None = None
        self._is_complete = False
        self._word = asyncio.Event()
        self.num_words = 0

    # -- the IO thread ---------------------------------------------------------------------------

    def promise(self) -> int | None:
        """Promise a step to hold at; the same one however often it is asked for.

        Returns:
            The first due step that training has not passed, `inner_steps` if none is left; None
            before training begins, when there is nothing to hold yet, and on arrival.
        """
        with self._lock:
            if self._on_arrival:
                return None
            if self._promised is None and self._passed is not None:
                self._promised = self._next_due(max(self._passed, self._first_stop_step - 1))
            return self._promised

    def hear(
        self,
        stop_step: int | None,
        *,
        is_asked: bool,
        is_complete: bool,
        is_drained: bool = False,
        cut: AgreedCut = NO_CUT,
    ) -> None:
        """Hear what the coordinator says.

        Args:
            stop_step: After which inner step everybody stops; None: not decided yet, or not again:
                until then what it was stays.
            is_asked: Whether the run is to stop at all; if not, or not any more, there is neither
                promise nor stop step. A complete stop is never taken back.
            is_complete: Whether every island has its checkpoint: all may leave.
            is_drained: Whether this island is to finish what is outstanding, and to leave for good.
            cut: That this island is to take, if it has not.
        """
        with self._lock:
            self.num_words += 1
            self._is_drained = is_drained
            self._cut = cut
            if not is_asked:
                self._promised = self._stop_step = None
            elif stop_step is not None:
                self._stop_step = stop_step
            self._is_complete = is_complete
        self._word.set()

    async def wait_for_word(self, at_most_s: float) -> None:
        """Wait until the coordinator says something, or for time to pass."""
        self._word.clear()
        await wait_for(self._word, at_most_s)

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
        """Say that training has come to a due step; True: hold here until there is a stop step."""
        with self._lock:
            assert self._passed is not None, "begin was not called"
            self._passed = inner_step
            is_undecided = self._promised is not None and self._stop_step is None
            return is_undecided and inner_step >= (self._promised or 0)

    @property
    def must_leave(self) -> bool:
        """Whether an island that merges on arrival has to end now, before the run does."""
        with self._lock:
            return self._on_arrival and self._is_drained

    @property
    def cut(self) -> AgreedCut:
        """The cut that an island that merges on arrival was asked for last."""
        with self._lock:
            return self._cut

    @property
    def stop_step(self) -> int | None:
        """Inner step after which everybody stops; None while nobody has said."""
        with self._lock:
            return self._stop_step

    def after_holding(self) -> int | None:
        """Stop step for an island that holds; 0 once nobody asks for a stop, None to wait."""
        with self._lock:
            return 0 if self._promised is None else self._stop_step

    def after_checkpoint(self, inner_step: int) -> int | None:
        """Stop step for an island with its checkpoint of that step.

        Returns:
            `inner_step` once every island has it, a later one to go on to, 0 once nobody asks for
            a stop, None to wait.
        """
        with self._lock:
            if self._stop_step is None:
                return 0
            is_known = self._is_complete or self._stop_step > inner_step
            return self._stop_step if is_known else None

    def _next_due(self, after: int) -> int:
        fragments = range(self._schedule.num_fragments)
        due_steps = (self._schedule.next_due(p, after) for p in fragments)
        return min(
            (step for step in due_steps if step is not None), default=self._schedule.inner_steps
        )
