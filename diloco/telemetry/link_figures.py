"""What an island's way to the syncers does: rates of its counters, and figures of a report. Pure.

A rate is taken over `LEAST_S` seconds at least, so that one payload does not make it jump; of
counters that are seldom read, over the time between the last two readings that far apart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from diloco.protos.control_pb2 import LinkUse

#: Seconds over which rates are taken, at least.
LEAST_S = 10.0
#: Share of its bandwidth from which on a link is full.
FULL = 0.9


class Growth:
    """How much some counters have grown lately: over `least_s` seconds, and little more."""

    def __init__(self, least_s: float = LEAST_S) -> None:
        """Begin with nothing read."""
        self._least_s = least_s
        self._read: deque[tuple[float, tuple[int, ...]]] = deque()

    def add(self, now: float, counters: Sequence[int]) -> None:
        """Take the counters as they are at `now`, a clock's seconds that never go back."""
        self._read.append((now, tuple(counters)))
        while len(self._read) > 2 and now - self._read[1][0] >= self._least_s:
            self._read.popleft()

    @property
    def read_at(self) -> float:
        """When the counters were read last; 0: not yet."""
        return self._read[-1][0] if self._read else 0.0

    @property
    def span_s(self) -> float:
        """Seconds over which the growth is known; 0: not known yet."""
        return self._read[-1][0] - self._read[0][0] if self._read else 0.0

    @property
    def growth(self) -> tuple[int, ...]:
        """How much each has grown in that time."""
        if not self._read:
            return ()
        (_, first), (_, last) = self._read[0], self._read[-1]
        return tuple(max(0, b - a) for a, b in zip(first, last, strict=True))


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """What a report says of an island's link, summed over the syncers.

    Attributes:
        up_bps: Bits a second; so is `down_bps`.
        round_trip_s: Of the nearest syncer; 0: not known.
        fullness: Of the fuller direction, in [0, 1]; None: the bandwidth is not known.
        failed_calls: Since the island's start.
        recent_failed_calls: Of these, in the interval of the report.
    """

    up_bps: float
    down_bps: float
    round_trip_s: float
    fullness: float | None
    failed_calls: int
    recent_failed_calls: int


def link_figures(link: LinkUse) -> LinkFigures:
    """Sum up what a report says of a link."""
    up_bps, down_bps = (sum(getattr(s, d) for s in link.syncers) for d in ("up_bps", "down_bps"))
    capacities = (up_bps, link.up_capacity_bps), (down_bps, link.down_capacity_bps)
    shares = [rate / capacity for rate, capacity in capacities if capacity]
    return LinkFigures(
        up_bps,
        down_bps,
        min((s.round_trip_s for s in link.syncers if s.round_trip_s), default=0.0),
        min(1.0, max(shares)) if shares else None,
        sum(s.failed_calls for s in link.syncers),
        sum(s.recent_failed_calls for s in link.syncers),
    )
