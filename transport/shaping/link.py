"""Model of one direction of a WAN path: bandwidth, delay, jitter, loss. Pure arithmetic.

It shows neither slow start nor congestion: right for tests and demonstrations, too kind by up to
four times to a cold burst on a long fat path. Published figures need the emulated network.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

#: A sender that comes back at most this late has lost nothing of the link's time.
CATCH_UP_S = 0.010


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a path.

    Attributes:
        bandwidth_bps: Bits per second; > 0.
        delay_s: Seconds one way; half of the round trip.
        jitter_s: Each chunk takes up to this much longer, uniformly, order kept.
        loss: Probability in [0, 1) that a chunk is lost once and sent again.
    """

    bandwidth_bps: float
    delay_s: float
    jitter_s: float = 0.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what no link can be.

        Raises:
            ValueError: If a value is out of its range or NaN.
        """
        if not 0 < self.bandwidth_bps < float("inf"):
            raise ValueError(f"bandwidth_bps = {self.bandwidth_bps}: must be finite and over 0")
        if not 0 <= self.delay_s < float("inf"):
            raise ValueError(f"delay_s = {self.delay_s}: must be finite and 0 or more")
        if not 0 <= self.jitter_s < float("inf"):
            raise ValueError(f"jitter_s = {self.jitter_s}: must be finite and 0 or more")
        if not 0 <= self.loss < 1:
            raise ValueError(f"loss = {self.loss}: must be in [0, 1)")


class LinkQueue:
    """A link in use: when it is free again, and what it has carried.

    Attributes:
        link: The link.
        carried_bytes: All bytes put on the link so far, retransmissions included.
        num_lost: Chunks that had to be sent twice.
    """

    def __init__(self, link: Link, *, seed: int) -> None:
        """Make an idle link; `seed` decides jitter and loss."""
        self.link = link
        self.carried_bytes = 0
        self.num_lost = 0
        self._rng = random.Random(seed)
        self._free = float("-inf")
        self._delivered = float("-inf")

    def reserve(self, now: float, num_bytes: int) -> tuple[float, float]:
        """Put a chunk on the link as soon as it is free.

            start    = free                  if 0 <= now - free <= CATCH_UP_S   (a late sender)
                     = max(free, now)        otherwise
            release  = start + 8 num_bytes / bandwidth
            delivery = max(release, now) + delay + jitter, never before the chunk before it

        The credit makes up for late wake-ups and never shortens the delay. A lost chunk takes
        the link twice and arrives one round trip (2 `delay_s`) later.

        Args:
            now: Seconds, any clock.
            num_bytes: Size of the chunk; 0 takes no time on the link but pays the delay.

        Returns:
            When the link is free for the next chunk, and when this one has arrived.
        """
        link = self.link
        start = self._free if now - self._free <= CATCH_UP_S else now
        is_lost = link.loss > 0 and self._rng.random() < link.loss
        sent_bytes = num_bytes * (2 if is_lost else 1)
        self._free = start + 8 * sent_bytes / link.bandwidth_bps
        arrival = max(self._free, now) + link.delay_s * (3 if is_lost else 1)
        if link.jitter_s > 0:
            arrival += self._rng.uniform(0.0, link.jitter_s)
        self._delivered = max(self._delivered, arrival)
        self.carried_bytes += sent_bytes
        self.num_lost += is_lost
        return self._free, self._delivered


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """A named path in both directions, seen from the side that calls."""

    name: str
    up: Link
    down: Link
    source: str

    def states(self, seed: int) -> tuple[LinkQueue, LinkQueue]:
        """Make the two idle links, up and down, with seeds of their own."""
        rng = random.Random(seed)
        return (
            LinkQueue(self.up, seed=rng.getrandbits(64)),
            LinkQueue(self.down, seed=rng.getrandbits(64)),
        )
