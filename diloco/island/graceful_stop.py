"""Graceful stop: every island stops after the same inner step, with a run checkpoint of it.

An operator asks to stop. Each island promises an inner step that it will not pass unasked, and
holds there; when every island has promised, the coordinator names the step after which all of them
stop. It names a later one if an island that starts again meanwhile can stop only later. A stop that
is taken back voids all of it, and islands that hold go on.

Islands that merge on arrival promise nothing: they are asked for a cut, a run checkpoint that each
takes at its next step, and whether they are to leave then.

The island's leader has a `GracefulStop`, which its IO thread and its training thread share; each
rank has a `CommonStop`, by which all of them do the same. Whatever waits does so in turns of a
second, after each of which all ranks share what they know: a failure of one of them is soon known
to all, and no collective waits long.

Source: PROTOCOL.md, "Graceful stop".
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

from diloco.errors import CoordinatorUnavailable, DilocoError
from diloco.io_thread import Waits
from diloco.island.agreement import Agreement
from diloco.island.exchange.exchange import Exchange
from diloco.island.outer_state import LOOK_S
from diloco.outer.schedule import Schedule
from diloco.protocol.island.votes import NO_CUT, NOT_MINE, AgreedCut
from diloco.tasks import wait_for

logger = logging.getLogger(__name__)

_WAIT = -1


class GracefulStop:
    """One island's promise, and the run's stop step.

    The IO thread calls `promise` and `set_answer`, and its loop runs `wait_for_word`; everything
    else is called by the training thread. `num_words` counts the coordinator's answers: while it
    grows, the coordinator is there.
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

    def set_answer(
        self,
        stop_step: int | None,
        *,
        is_asked: bool,
        is_complete: bool,
        is_drained: bool = False,
        cut: AgreedCut = NO_CUT,
    ) -> None:
        """Take the coordinator's answer to a report.

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
        """Inner step after which everybody stops; None while it is not known."""
        with self._lock:
            return self._stop_step

    def after_holding(self) -> int | None:
        """Stop step for an island that holds; 0 once no stop is asked for, None to wait."""
        with self._lock:
            return 0 if self._promised is None else self._stop_step

    def after_checkpoint(self, inner_step: int) -> int | None:
        """Stop step for an island with its checkpoint of that step.

        Returns:
            `inner_step` once every island has it, a later one to go on to, 0 once no stop is asked
            for, None to wait.
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


class CommonStop:
    """One rank's part in a graceful stop.

    Attributes:
        step: Inner step after which everybody stops; None while that is not known here. Equal on
            all ranks.
    """

    def __init__(
        self,
        stop: GracefulStop,
        exchange: Exchange,
        agreement: Agreement,
        *,
        unreachable_s: float,
        clock: Callable[[], float],
    ) -> None:
        """Assign only; without a word for `unreachable_s` seconds the coordinator is given up."""
        self._stop = stop
        self._exchange = exchange
        self._agreement = agreement
        self._unreachable_s = unreachable_s
        self._clock = clock
        self.step: int | None = None

    def word(self, inner_step: int) -> int:
        """Return this rank's word at a due step, of which the ranks take the sum."""
        if not self._agreement.is_leader:
            return 0
        if self._stop.passing(inner_step):
            return _WAIT
        return self._stop.stop_step or 0

    def passing(self, inner_step: int, word: int) -> Waits[None]:
        """Pass a due step, or hold after it until there is a stop step, or no stop any more.

        Args:
            inner_step: Completed inner steps.
            word: Sum of all ranks' words.

        Raises:
            DilocoError: If a rank has failed, or the coordinator stays away.
        """
        if word == _WAIT:
            logger.info("holding after inner step %d: the run is asked to stop", inner_step)
            word = yield from self._agreed(inner_step, self._stop.after_holding)
        self.step = word or None

    def completing(self, inner_step: int) -> Waits[None]:
        """Wait, with this island's checkpoint at the stop step, for the others'.

        Afterwards `step` is this one, and everybody leaves; or a later one to go on to, because an
        island that started again stands beyond this one; or None: the stop was taken back.

        Raises:
            DilocoError: If a rank has failed, or the coordinator stays away.
        """
        word = yield from self._agreed(inner_step, lambda: self._stop.after_checkpoint(inner_step))
        if word > inner_step:
            logger.info("going on to inner step %d: an island that started again stops there", word)
        self.step = word or None

    def _agreed(self, inner_step: int, find: Callable[[], int | None]) -> Waits[int]:
        """Wait until the leader finds a stop step, or 0 for none any more, and share it."""
        num_words, since = -1, 0.0
        while True:
            word, failure = NOT_MINE, self._exchange.failure
            if self._agreement.is_leader:
                if self._stop.num_words != num_words:
                    num_words, since = self._stop.num_words, self._clock()
                elif self._clock() - since > self._unreachable_s:
                    failure = failure or self._given_up(inner_step)
                found = find()
                word = _WAIT if found is None else found
            (word,) = self._agreement.smallest([word], failure)
            if not word:
                logger.info("going on after inner step %d: the stop was taken back", inner_step)
            if word != _WAIT:
                return word
            if self._agreement.is_leader:
                yield self._stop.wait_for_word(LOOK_S)

    def _given_up(self, inner_step: int) -> DilocoError:
        return CoordinatorUnavailable(
            f"the coordinator has not said for {self._unreachable_s:g} s (transport.unreachable) "
            f"whether the run stops after inner step {inner_step}: start it again with the same "
            f"command, diloco coordinator RUN.toml, then this island"
        )
