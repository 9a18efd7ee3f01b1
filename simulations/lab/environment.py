"""The environment of the islands of a laboratory: step times, links, failures, lost contributions.

All of it is drawn from the point's seed, an island's, a step's or a round's name: who is asked
first decides nothing.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterator

from diloco.baseline.time_model import ReductionTime
from diloco.config.fields import Duration
from diloco.protos import fragment_pb2 as wire
from diloco.simulations.lab.config import FailuresConfig
from diloco.simulations.lab.point import LabPoint
from diloco.transport.contracts import Buffer, Reply, Transport
from diloco.transport.errors import PeerReset
from diloco.transport.shaping.link import LinkQueue
from diloco.transport.shaping.shaped import ShapedTransport
from diloco.transport.transfer import Transfer

_SUBMIT = "fragment.submit"


class LabEnvironment:
    """Step times, ways and lives of the islands of one point."""

    def __init__(self, point: LabPoint) -> None:
        """Make the links, idle."""
        self._point = point
        names = sorted(point.config.islands)
        self._mean_s = {name: _mean_step_s(point, name, slot) for slot, name in enumerate(names)}
        self._links: dict[str, tuple[LinkQueue, LinkQueue]] = {}
        for name in names:
            if (profile := point.link_of(name)) is not None:
                self._links[name] = profile.states(self._rng("link", name).getrandbits(63))

    def step_s(self, island: str, inner_step: int) -> float:
        """Give the virtual seconds of the inner step after so many completed ones."""
        noise = self._point.lab.step.noise
        if not noise:
            return self._mean_s[island]
        drawn = self._rng("step", island, inner_step).uniform(-noise, noise)
        return self._mean_s[island] * (1.0 + drawn)

    def way(self, island: str, plain: Transport) -> Transport:
        """Put an island's link, and what gets lost on it, around its way to the syncer."""
        transport = plain
        if island in self._links:
            transport = ShapedTransport(transport, *self._links[island])
        failures = self._point.lab.failures
        if failures.dropped:
            outage_s = failures.outage.seconds
            rng_name = f"{self._point.seed}/dropped/{island}"
            transport = LosingTransport(transport, rng_name, failures.dropped, outage_s)
        return transport

    def lives(self, island: str) -> Iterator[tuple[float, float]]:
        """Draw how long an island lives and is away, again and again; nothing if it never fails."""
        failures = self._point.lab.failures
        rng = self._rng("failures", island)
        return _lives(rng, failures, failures.mean_time_between, failures.mean_repair)

    def syncer_lives(self) -> Iterator[tuple[float, float]]:
        """Draw the same of the syncer."""
        failures = self._point.lab.failures
        rng = self._rng("failures of the syncer")
        between, repair = failures.syncer_mean_time_between, failures.syncer_mean_repair
        return _lives(rng, failures, between, repair)

    def all_reduce(self, num_bytes: int) -> tuple[float, int]:
        """Sum a vector over all islands by a ring over their links, through where they meet.

        The slowest direction of any link bounds the ring, and the longest way a hop.

        Args:
            num_bytes: Of the vector.

        Returns:
            Virtual seconds, and the bytes that an island sends (and gets): 2 (M - 1) / M of it.
        """
        num_islands = len(self._mean_s)
        share = 2 * num_bytes * (num_islands - 1) // num_islands
        ways = [(up.link, down.link) for up, down in self._links.values()]
        if not ways:
            return 0.0, share
        ring = ReductionTime(
            num_islands=num_islands,
            num_ranks=1,
            num_bytes=num_bytes,
            wan_bps=min(min(up.bandwidth_bps, down.bandwidth_bps) for up, down in ways),
            rtt_s=2 * max(up.delay_s + down.delay_s for up, down in ways),
        )
        return ring.flat_s, share

    def _rng(self, *what: object) -> random.Random:
        return random.Random("/".join(map(str, (self._point.seed, *what))))


class LosingTransport:
    """A way on which some contributions do not get through for a while.

    Every call that carries a part of such a contribution breaks, and is made again, until the
    outage that began with its first call is over. Which ones, the name says with the round's;
    flushes always get through.
    """

    def __init__(self, inner: Transport, name: str, share: float, outage_s: float) -> None:
        """Wrap `inner`; `share` in [0, 1) of the contributions is held up for `outage_s`."""
        self._inner = inner
        self._name = name
        self._share = share
        self._outage_s = outage_s
        self._ends: dict[str, float] = {}

    @property
    def peer(self) -> str:
        """Address of the peer."""
        return self._inner.peer

    async def call(
        self,
        method: str,
        header: bytes,
        payload: Buffer = b"",
        *,
        deadline_s: float,
        max_reply_bytes: int = 0,
        transfer: Transfer | None = None,
    ) -> Reply:
        """Call `method`; see `contracts.Transport`.

        Raises:
            PeerReset: If it is a part of a contribution that does not get through now.
        """
        if method == _SUBMIT and self._is_lost(wire.SubmitHeader.FromString(header)):
            raise PeerReset("lost on purpose", peer=self.peer, method=method)
        return await self._inner.call(
            method,
            header,
            payload,
            deadline_s=deadline_s,
            max_reply_bytes=max_reply_bytes,
            transfer=transfer,
        )

    async def close(self) -> None:
        """Close the inner transport."""
        await self._inner.close()

    def _is_lost(self, header: wire.SubmitHeader) -> bool:
        if header.is_flush:
            return False
        key = header.key
        name = f"{self._name}/{key.fragment_id}/{key.version}/{key.attempt}"
        if random.Random(name).random() >= self._share:
            return False
        now = asyncio.get_running_loop().time()
        return now < self._ends.setdefault(name, now + self._outage_s)


def _mean_step_s(point: LabPoint, island: str, slot: int) -> float:
    own = point.lab.islands.get(island)
    if own is not None and own.step:
        return own.step.seconds
    step, last = point.lab.step, max(1, len(point.config.islands) - 1)
    return step.mean.seconds * (1.0 + step.skew * slot / last)


def _lives(
    rng: random.Random, failures: FailuresConfig, between: Duration, repair: Duration
) -> Iterator[tuple[float, float]]:
    """Draw lives by Weibull's distribution and repairs by the exponential one, both by mean."""
    if not between:
        return
    scale_s = between.seconds / math.gamma(1 + 1 / failures.shape)
    mean_repair_s = repair.seconds
    while True:
        lives_s = rng.weibullvariate(scale_s, failures.shape)
        yield lives_s, rng.expovariate(1 / mean_repair_s)
