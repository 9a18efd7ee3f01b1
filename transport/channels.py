"""How many connections carry a peer's payloads, and which of them takes the next call. Pure.

A connection whose congestion control takes every loss for congestion carries at most

    1.22 MSS / (RTT sqrt(p))        p: share of packets that are lost

so that k of them carry what one would at p / k^2. The choice is k = ceil(sqrt(p / `BORNE_LOSS`)),
by the loss that the kernel counts on this process's own connections to the peer: retransmitted
segments of what is sent, and segments that arrived behind a hole of what is received. One loss
leaves about a window of the latter, 1.22 / sqrt(p), hence p = (share / 1.22)^2.

Source: M. Mathis et al., "The Macroscopic Behavior of the TCP Congestion Avoidance Algorithm",
1997.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass

#: Loss at which one connection is enough.
BORNE_LOSS = 5e-6
#: Connections at most, when they are chosen.
MOST_CHANNELS = 16
#: Segments without which a share says nothing.
_ENOUGH_SEGMENTS = 1000
#: Segments after which half of what was counted is forgotten.
_MANY_SEGMENTS = 50_000
_MATHIS = 1.22


@dataclass(frozen=True, slots=True)
class SegmentCounts:
    """What the kernel has counted on one connection so far, in segments with data."""

    sent: int = 0
    retransmitted: int = 0
    received: int = 0
    out_of_order: int = 0


class LossMeter:
    """The loss on the way to a peer, from counts of all connections to it."""

    def __init__(self) -> None:
        """Begin with nothing counted."""
        self._last: dict[int, SegmentCounts] = {}
        self._sums = [0.0, 0.0, 0.0, 0.0]

    def count(self, connections: Mapping[int, SegmentCounts]) -> None:
        """Take the counts of the connections that are open now, by a number of each."""
        for key, counts in connections.items():
            before = astuple(self._last.get(key, SegmentCounts()))
            for i, (now, then) in enumerate(zip(astuple(counts), before, strict=True)):
                self._sums[i] += max(now - then, 0)
        self._last = dict(connections)
        if self._sums[0] + self._sums[2] > _MANY_SEGMENTS:
            self._sums = [total / 2 for total in self._sums]

    @property
    def loss(self) -> float | None:
        """Share of packets lost, of the worse direction; None: too few to say."""
        sent, retransmitted, received, out_of_order = self._sums
        found = []
        if sent >= _ENOUGH_SEGMENTS:
            found.append(retransmitted / sent)
        if received >= _ENOUGH_SEGMENTS:
            found.append((out_of_order / received / _MATHIS) ** 2)
        return max(found, default=None)


def wanted_channels(loss: float | None) -> int:
    """Say how many connections a loss asks for; None: nothing is known, one."""
    if not loss:
        return 1
    return min(max(math.ceil(math.sqrt(loss / BORNE_LOSS)), 1), MOST_CHANNELS)


class Channels:
    """Deals calls to connections: each to the one with the fewest payload bytes under way."""

    def __init__(self, num_channels: int) -> None:
        """Use so many connections at first."""
        self.num_channels = num_channels
        self._under_way: dict[int, int] = {}

    def enter(self, num_bytes: int) -> int:
        """Choose a connection, from 0, for a call; `leave` must follow."""
        index = min(range(self.num_channels), key=lambda i: (self._under_way.get(i, 0), i))
        # A call without a payload counts, too, lest they all meet on one connection.
        self._under_way[index] = self._under_way.get(index, 0) + num_bytes + 1
        return index

    def leave(self, index: int, num_bytes: int) -> None:
        """Note that a call has ended."""
        self._under_way[index] -= num_bytes + 1
