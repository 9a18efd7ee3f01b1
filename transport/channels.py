"""Chooses how many connections carry a peer's payloads, and which takes the next call. Pure.

A connection whose congestion control takes every loss for congestion carries at most

    1.22 MSS / (RTT sqrt(p))        p: share of packets that are lost

so that k of them carry what one would at p / k^2. The choice is k = sqrt(p / `BORNE_LOSS`), rounded
up to a power of two: lanes are 16 unless told otherwise, and where they are not dealt evenly, the
connections that carry one more end alone, at a small part of the rate (of 15 connections, one did
so for a quarter of the time).

The loss is what the kernel counts on this process's own connections to the peer:

    sent        p = (n - 2 sqrt(n)) / segments      n: retransmitted; two deviations below the
                                                    mean, so that a few say nothing
    received    p = (share / 1.22)^2                share: of segments that arrived behind a hole;
                                                    one loss leaves about a window, 1.22 / sqrt(p)

One loss of a connection that never had one leaves a far larger window behind a hole; therefore
what is received counts once `_HOLED_LOOKS` looks in a row have found holes.

BBR does not take losses for congestion, and fills the link over one connection; a few hide the
time that one takes to repair a loss (1 % lost: 4 carry 1.2 times as much as 1, 16 carry 1.05 times
as much as 4). So `MOST_TOLERANT` are enough for what is sent; how the peer sends is not known here.

Source: M. Mathis et al., "The Macroscopic Behavior of the TCP Congestion Avoidance Algorithm",
1997; N. Cardwell et al., "BBR: Congestion-Based Congestion Control", 2016.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter

#: Loss at which one connection is enough.
BORNE_LOSS = 5e-6
#: Connections at most, when they are chosen.
MOST_CHANNELS = 16
#: The same, where every connection sends by a control that bears losses.
MOST_TOLERANT = 4
#: Segments without which a share says nothing.
_ENOUGH_SEGMENTS = 1000
#: Segments after which half of what was counted is forgotten.
_MANY_SEGMENTS = 50_000
_MATHIS = 1.22
_HOLED_LOOKS = 3
_COUNTED = attrgetter("sent", "retransmitted", "received", "out_of_order")


@dataclass(frozen=True, slots=True)
class SegmentCounts:
    """What the kernel has counted on one connection so far, in segments with data.

    `control` is the name of its congestion control; empty: not known.
    """

    sent: int = 0
    retransmitted: int = 0
    received: int = 0
    out_of_order: int = 0
    control: str = ""


class LossMeter:
    """The loss on the way to a peer, from counts of all connections to it."""

    def __init__(self) -> None:
        """Begin with nothing counted."""
        self._last: dict[int, SegmentCounts] = {}
        self._sums = [0.0, 0.0, 0.0, 0.0]
        self._look = [0, 0]  # received and out of order, of a look that has not enough yet
        self._holed_looks = 0
        self._is_holed = False

    def count(self, connections: Mapping[int, SegmentCounts]) -> None:
        """Take the counts of the connections that are open now, by a number of each."""
        new = [0, 0, 0, 0]
        for key, counts in connections.items():
            before = _COUNTED(self._last.get(key, SegmentCounts()))
            for i, (now, then) in enumerate(zip(_COUNTED(counts), before, strict=True)):
                new[i] += max(now - then, 0)
        self._last = dict(connections)
        self._sums = [total + more for total, more in zip(self._sums, new, strict=True)]
        self._look = [self._look[0] + new[2], self._look[1] + new[3]]
        if self._look[0] >= _ENOUGH_SEGMENTS:
            # Where few are lost a look may have no hole: what was found is not forgotten for one.
            step = 1 if self._look[1] else -1
            self._holed_looks = min(max(self._holed_looks + step, 0), _HOLED_LOOKS)
            if self._holed_looks in (0, _HOLED_LOOKS):
                self._is_holed = self._holed_looks > 0
            self._look = [0, 0]
        if self._sums[0] + self._sums[2] > _MANY_SEGMENTS:
            self._sums = [total / 2 for total in self._sums]

    @property
    def sent_loss(self) -> float:
        """Share of packets lost of what is sent, at least; 0: none, or too few to say."""
        sent, retransmitted, _, _ = self._sums
        if sent < _ENOUGH_SEGMENTS:
            return 0.0
        return max(retransmitted - 2 * math.sqrt(retransmitted), 0.0) / sent

    @property
    def received_loss(self) -> float:
        """Share of packets lost of what is received; 0: none, or too few to say."""
        _, _, received, out_of_order = self._sums
        if not self._is_holed:
            return 0.0
        return (out_of_order / received / _MATHIS) ** 2

    @property
    def wanted(self) -> int:
        """How many connections the worse direction asks for."""
        controls = {counts.control for counts in self._last.values()}
        is_tolerant = bool(controls) and all(name.startswith("bbr") for name in controls)
        most = MOST_TOLERANT if is_tolerant else MOST_CHANNELS
        return max(min(wanted_channels(self.sent_loss), most), wanted_channels(self.received_loss))


def wanted_channels(loss: float) -> int:
    """Say how many connections a loss asks for, where losses are taken for congestion."""
    wanted = max(math.ceil(math.sqrt(loss / BORNE_LOSS)), 1)
    return min(1 << (wanted - 1).bit_length(), MOST_CHANNELS)


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
