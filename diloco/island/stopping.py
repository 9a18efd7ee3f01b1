"""How the ranks of an island stop together: they hold, and wait until the checkpoint is complete.

Belongs to the training thread; every rank makes the same calls, and what the leader hears of the
coordinator all of them have. What waits does so in turns of a second, after each of which all ranks
share what they know: a failure of any of them is soon known to all, and no collective waits long.

Source: PROTOCOL.md, "Graceful stop".
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from diloco.errors import CoordinatorUnavailable, DilocoError
from diloco.io_thread import Waits
from diloco.island.agreement import NOT_MINE, Agreement
from diloco.island.exchange.exchange import Exchange
from diloco.island.graceful_stop import GracefulStop
from diloco.island.outer_state import LOOK_S

logger = logging.getLogger(__name__)

#: The leader's word while it must wait for the coordinator's.
_WAIT = -1


class Stopping:
    """One rank's part in a graceful stop.

    Attributes:
        step: Inner step after which everybody stops; None while that is not known here. Equal on
            all ranks.
    """

    def __init__(
        self,
        line: GracefulStop,
        exchange: Exchange,
        agreement: Agreement,
        *,
        unreachable_s: float,
        clock: Callable[[], float],
    ) -> None:
        """Assign only; without a word for `unreachable_s` seconds the coordinator is given up."""
        self._line = line
        self._exchange = exchange
        self._agreement = agreement
        self._unreachable_s = unreachable_s
        self._clock = clock
        self.step: int | None = None

    def word(self, inner_step: int) -> int:
        """Return this rank's word at a due step, of which the ranks take the sum."""
        if not self._agreement.is_leader:
            return 0
        if self._line.passing(inner_step):
            return _WAIT
        return self._line.stop_step or 0

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
            word = yield from self._agreed(inner_step, self._line.after_holding)
        self.step = word or None

    def completing(self, inner_step: int) -> Waits[None]:
        """Wait, with this island's checkpoint at the stop step, for the others'.

        Afterwards `step` is this one, and everybody leaves; or a later one to go on to, because an
        island that started again stands beyond this one; or None: the stop was taken back.

        Raises:
            DilocoError: If a rank has failed, or the coordinator stays away.
        """
        word = yield from self._agreed(inner_step, lambda: self._line.after_checkpoint(inner_step))
        if word > inner_step:
            logger.info("going on to inner step %d: an island that started again stops there", word)
        self.step = word or None

    def _agreed(self, inner_step: int, find: Callable[[], int | None]) -> Waits[int]:
        """Wait until the leader finds a stop step, or 0 for none any more, and share it."""
        num_words, since = -1, 0.0
        while True:
            word, failure = NOT_MINE, self._exchange.failure
            if self._agreement.is_leader:
                if self._line.num_words != num_words:
                    num_words, since = self._line.num_words, self._clock()
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
                yield self._line.wait_for_word(LOOK_S)

    def _given_up(self, inner_step: int) -> DilocoError:
        return CoordinatorUnavailable(
            f"the coordinator has not said for {self._unreachable_s:g} s (transport.unreachable) "
            f"whether the run stops after inner step {inner_step}: start it again with the same "
            f"command, diloco coordinator RUN.toml, then this island"
        )
