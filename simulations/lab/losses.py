"""Loss against tokens, virtual time and bytes, as a point of a laboratory goes on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from diloco.island.outer_loop import OuterLoop


@dataclass(frozen=True, slots=True)
class Reading:
    """How a run stands.

    Attributes:
        tokens: Trained on so far, by all islands, those of warm steps included.
        virtual_s: Virtual seconds since the islands began.
        bytes_up: Bytes that all islands have sent since then, headers included.
        bytes_down: Bytes that they have received.
        loss: Of the published parameters on the held-out text, nats a byte.
        train_loss: Mean of the inner steps since the reading before, nats a token.
    """

    tokens: int
    virtual_s: float
    bytes_up: int
    bytes_down: int
    loss: float
    train_loss: float | None

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)


class LossCurve:
    """Takes a reading whenever another share of the run's tokens was trained on."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        start_tokens: int,
        total_tokens: int,
        points: int,
        on_progress: Callable[[], None],
    ) -> None:
        """Begin at `start_tokens`; `on_progress` hears of every inner step."""
        self.readings: list[Reading] = []
        self.tokens = start_tokens
        self.ended_up = self.ended_down = 0
        self._clock = clock
        self._every = max(1.0, (total_tokens - start_tokens) / points)
        self._next = start_tokens + self._every
        self._start_tokens, self._total_tokens = start_tokens, total_tokens
        self._outer: dict[str, OuterLoop] = {}
        self._recent: dict[str, list[float]] = defaultdict(list)
        self._on_progress = on_progress

    def ended(self, island: str, outer: OuterLoop) -> None:
        """Keep what a start of an island has moved, now that it has failed."""
        self._outer.pop(island, None)
        self.ended_up += outer.exchange.bytes_up
        self.ended_down += outer.exchange.bytes_down

    def stepped(
        self, island: str, outer: OuterLoop, num_tokens: int, evaluate: Callable[[], float]
    ) -> None:
        """Count an inner step, and evaluate what the island holds as published, if it is time."""
        self._outer[island] = outer
        if self.counted(num_tokens):
            with outer.global_parameters():
                self.read(evaluate())

    def counted(self, num_tokens: int) -> bool:
        """Count tokens; whether it is time for a reading, the last of the run left out."""
        self.tokens += num_tokens
        self._on_progress()
        if self.tokens < self._next or self.tokens == self._total_tokens:
            return False
        while self._next <= self.tokens:
            self._next += self._every
        return True

    def trained(self, island: str, loss: float) -> None:
        """Hear the loss of an inner step before its update."""
        self._recent[island].append(loss)

    def read(self, loss: float, *, at_s: float | None = None, up: int = 0, down: int = 0) -> None:
        """Take a reading.

        Args:
            loss: Of the published parameters.
            at_s: When; None: now.
            up: Bytes sent that no outer loop has counted.
            down: Bytes received that no outer loop has counted.
        """
        recent = [value for losses in self._recent.values() for value in losses]
        self._recent.clear()
        self.readings.append(
            Reading(
                tokens=self.tokens,
                virtual_s=self._clock() if at_s is None else at_s,
                bytes_up=up
                + self.ended_up
                + sum(o.exchange.bytes_up for o in self._outer.values()),
                bytes_down=down
                + self.ended_down
                + sum(o.exchange.bytes_down for o in self._outer.values()),
                loss=loss,
                train_loss=sum(recent) / len(recent) if recent else None,
            )
        )
