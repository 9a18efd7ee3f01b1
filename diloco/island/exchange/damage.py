"""Counts the messages between a rank and one syncer that were damaged on the way.

TCP's own checksum lets about one damaged packet in 65,536 through, and few lines damage any;
several within minutes are a defect of a machine or of a network device. What came to harm was found
by the transport's checksums and is asked for again (`transport.retry`): nothing is decided here.

Source: "When the CRC and TCP Checksum Disagree" (J. Stone and C. Partridge, SIGCOMM 2000).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from diloco.bounded_text import bounded_text
from diloco.loop_clock import loop_now
from diloco.protocol.run.alarms import AlarmKind
from diloco.telemetry.events import AlarmRaised, DamagedOnTheWay, Event
from diloco.transport.errors import TransportError

#: Seconds that are looked at.
WINDOW_S = 600.0
#: Damaged messages within them that a line may have.
USUAL = 3
#: Seconds between two events, at least, but for the first of too much.
_TELL_EVERY_S = 1.0


class LineDamage:
    """Counts what one rank and one syncer lost to damage; belongs to the rank's event loop."""

    def __init__(self, island: str, on_event: Callable[[Event], None]) -> None:
        """Assign only."""
        self._island = island
        self._on_event = on_event
        self._recent: deque[float] = deque(maxlen=10_000)
        self._told_at = float("-inf")
        self._was_too_much = False
        self.count = 0

    @property
    def is_too_much(self) -> bool:
        """Whether the line damages more than it should."""
        return len(self._recent) > USUAL

    def found(self, error: TransportError) -> None:
        """Count a message that arrived damaged, at either end."""
        now = loop_now()
        self.count += 1
        self._recent.append(now)
        while now - self._recent[0] >= WINDOW_S:
            self._recent.popleft()
        is_news = self.is_too_much and not self._was_too_much
        if now - self._told_at < _TELL_EVERY_S and not is_news:
            return
        self._told_at, self._was_too_much = now, self.is_too_much
        self._on_event(
            DamagedOnTheWay(
                error.peer,
                error.method,
                self.count,
                len(self._recent),
                self.is_too_much,
                bounded_text(str(error)),
            )
        )
        if self.is_too_much:
            self._on_event(AlarmRaised(AlarmKind.DAMAGED_ON_THE_WAY, self.text, self._island))

    @property
    def text(self) -> str:
        """Say how much it is, and what to do."""
        return (
            f"{len(self._recent)} messages between island {self._island!r} and its syncer came to "
            f"harm on the way within {WINDOW_S:g} s and were sent again: look for a defective "
            f"network card, memory or proxy on that path (ethtool -S, edac-util), or reach the "
            f"syncer another way"
        )
