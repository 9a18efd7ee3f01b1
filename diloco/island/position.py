"""Where an island stands, as its `DiLoCo` shows it: steps, versions, tokens, bytes.

Plain reading of the outer loop and the exchange; nothing here is collective.
"""

from __future__ import annotations

from diloco.island.exchange.exchange import Exchange
from diloco.island.outer_loop import OuterLoop


class Position:
    """What can be read at any time.

    Attributes:
        start_step: Inner steps that lie behind this start.
    """

    start_step: int
    _loop: OuterLoop
    _exchange: Exchange
    _is_ready: bool

    @property
    def inner_step(self) -> int:
        """Completed inner steps."""
        return self._loop.inner_step if self._is_ready else self.start_step

    @property
    def is_over(self) -> bool:
        """Whether training ends here: leave the loop, then call `finish`.

        By the run's inner steps; on arrival, when all fragments have merged the run's tokens, or
        when this island was told to leave (`is_leaving`).
        """
        return self._is_ready and self._loop.is_over

    @property
    def is_leaving(self) -> bool:
        """Whether an operator has this island end before the run does, without its flush."""
        return self._loop.is_leaving

    @property
    def schedule_step(self) -> float:
        """Inner steps of the whole run that lie behind: what a learning rate follows.

        `inner_step` in a scheduled run; on arrival by the share of the run's tokens that is merged.
        """
        return self._loop.schedule_step if self._is_ready else self.start_step

    @property
    def num_in_flight(self) -> int:
        """Number of fragments whose contribution has no outcome yet."""
        return self._loop.num_in_flight

    @property
    def blocked_s(self) -> float:
        """Seconds for which steps of this rank waited for outcomes."""
        return self._loop.blocked_s

    @property
    def overwritten_steps(self) -> float:
        """Inner steps whose local effect a merge replaced, by share of the parameters."""
        return self._loop.overwritten_steps

    @property
    def dropped_tokens(self) -> float:
        """Tokens that no version will have, by share of the parameters."""
        return self._loop.dropped_tokens

    @property
    def left_tokens(self) -> float:
        """Tokens that no version has yet, by share of the parameters."""
        return self._loop.left_tokens

    @property
    def versions(self) -> tuple[int, ...]:
        """Version of each fragment that this island last merged."""
        return self._loop.versions

    @property
    def digests(self) -> tuple[str, ...]:
        """Digest of what the model holds of each fragment, in hex, as `finish` found it.

        Of the published values; empty before the end of `finish`, and after a graceful stop.
        """
        return self._loop.digests

    @property
    def bytes_up(self) -> int:
        """Bytes that this rank has sent to the syncer."""
        return self._exchange.bytes_up

    @property
    def bytes_down(self) -> int:
        """Bytes that this rank has received from the syncer."""
        return self._exchange.bytes_down
