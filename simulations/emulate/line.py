"""One direction of a link inside the relay: what comes in, when it goes out, what is lost.

Pure: time and randomness are given.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from diloco.simulations.emulate.packets import (
    VNET_BYTES,
    is_acknowledgement,
    num_packets,
    without,
)

#: Upper ends of the classes in which lateness is counted: 16 us, doubling; the last has all above.
LATE_BOUNDS_S: tuple[float, ...] = tuple(16e-6 * 2**n for n in range(21))


@dataclass(frozen=True, slots=True)
class LineSettings:
    """What one direction does to packets besides its rate.

    Attributes:
        delay_s: Seconds from one end to the other.
        jitter_s: Each frame takes up to this much longer, uniformly, order kept.
        loss: Probability in [0, 1) that a packet is lost, each by itself.
        is_up: False: every packet is lost.
    """

    delay_s: float
    jitter_s: float = 0.0
    loss: float = 0.0
    is_up: bool = True


@dataclass(slots=True)
class LineCounters:
    """What a line has done so far: packets of the wire, whatever frames they came in."""

    packets: int = 0
    bytes: int = 0
    ack_bytes: int = 0
    lost_packets: int = 0
    outage_packets: int = 0
    refused_frames: int = 0


class EmulatedLine:
    """A direction in use."""

    def __init__(self, settings: LineSettings, *, seed: int) -> None:
        """Begin empty; `seed` decides jitter and loss."""
        self.settings = settings
        self.counters = LineCounters()
        self.late = [0] * len(LATE_BOUNDS_S)
        self.held: deque[tuple[float, bytes]] = deque()
        self._rng = random.Random(seed)
        self._last_due = float("-inf")
        self._until_lost = self._draw_run()

    def change(self, settings: LineSettings) -> None:
        """Let every frame from now on be treated otherwise; those on their way stay as they are."""
        self.settings = settings
        self._until_lost = self._draw_run()

    def accept(self, frame: bytes, now: float) -> None:
        """Take a frame in; it is due `delay_s` + jitter later, never before the one before it."""
        settings, counters = self.settings, self.counters
        count = num_packets(frame)
        counters.packets += count
        num_bytes = len(frame) - VNET_BYTES
        counters.bytes += num_bytes
        if is_acknowledgement(frame):
            counters.ack_bytes += num_bytes
        if not settings.is_up:
            counters.outage_packets += count
            return
        due = now + settings.delay_s
        if settings.jitter_s:
            due += self._rng.uniform(0.0, settings.jitter_s)
        due = self._last_due = max(due, self._last_due)
        if self._until_lost >= count:
            self._until_lost -= count
            self.held.append((due, frame))
            return
        lost = self._draw_lost(count)
        counters.lost_packets += len(lost)
        self.held.extend((due, left) for left in without(frame, lost))

    def next_due(self) -> float:
        """When the next frame goes out; infinite when none is held."""
        return self.held[0][0] if self.held else math.inf

    def note_late(self, late_s: float) -> None:
        """Count how much later than due a frame went out."""
        steps = math.ceil(math.log2(max(late_s, 1e-9) / LATE_BOUNDS_S[0]))
        self.late[min(max(steps, 0), len(LATE_BOUNDS_S) - 1)] += 1

    def report(self) -> dict[str, object]:
        """Give counters and lateness as JSON values."""
        return {**asdict(self.counters), "late": self.late}

    def _draw_lost(self, count: int) -> list[int]:
        """Which of the next `count` packets are lost."""
        lost = []
        while self._until_lost < count:
            lost.append(self._until_lost)
            self._until_lost += 1 + self._draw_run()
        self._until_lost -= count
        return lost

    def _draw_run(self) -> int:
        """How many packets pass before the next one is lost: geometric, one draw a loss."""
        if not self.settings.loss:
            return 2**62
        return int(math.log(1.0 - self._rng.random()) / math.log1p(-self.settings.loss))


def late_quantile_s(late: Sequence[int], share: float) -> float:
    """Upper bound of the lateness of `share` of the frames; 0 without any."""
    seen, wanted = 0, share * sum(late)
    for count, bound in zip(late, LATE_BOUNDS_S, strict=True):
        seen += count
        if seen >= wanted > 0:
            return bound
    return 0.0
