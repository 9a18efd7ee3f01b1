"""What surrounds the islands of a laboratory: step times, links, failures, lost contributions.

All of it is drawn from the point's seed, an island's, a step's or a round's name: who is asked
first decides nothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from protos import fragment_pb2 as wire
from simulations.lab.config import FailuresConfig
from simulations.lab.point import Point
from transport.contracts import Buffer, Reply, Transport
from transport.errors import PeerReset
from transport.link import LinkState
from transport.shaped import ShapedTransport
from transport.transfer import Transfer
from transport.units import parse_duration

_SUBMIT = "fragment.submit"


class Surroundings:
    """Step times, ways and lives of the islands of one point."""

    def __init__(self, point: Point) -> None:
        """Make the links, idle."""
        self._point = point
        names = sorted(point.config.islands)
        self._mean_s = {name: _mean_step_s(point, name, slot) for slot, name in enumerate(names)}
        self._links: dict[str, tuple[LinkState, LinkState]] = {}
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
        if self._point.lab.failures.dropped:
            transport = LosingTransport(
                transport, self._point.seed, island, self._point.lab.failures.dropped
            )
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

    def all_reduce_s(self, now: float, num_bytes: int) -> tuple[float, int]:
        """Cross all links once, both ways at the same time, as a ring does.

        A ring over M islands is a reduce-scatter and an all-gather: in each of them every island
        sends and receives (M - 1) / M of the vector, in M - 1 parts that follow one another, the
        last of which has crossed M - 1 links.

        Args:
            now: Virtual seconds.
            num_bytes: Of the whole vector.

        Returns:
            Seconds until all islands have the sum, and the bytes that an island sends (and gets).
        """
        num_islands = len(self._mean_s)
        share = 2 * num_bytes * (num_islands - 1) // num_islands
        if not share or not self._links:
            return 0.0, share
        ends = []
        for up, down in self._links.values():
            sent, _ = up.reserve(now, share)
            received, _ = down.reserve(now, share)
            hops = 2 * (num_islands - 1) * (up.link.delay_s + down.link.delay_s)
            ends.append(max(sent, received) + hops)
        return max(ends) - now, share

    def _rng(self, *what: object) -> random.Random:
        return random.Random("/".join(map(str, (self._point.seed, *what))))


class LosingTransport:
    """A way on which some contributions are lost until their round is over.

    Every call that carries a part of such a contribution breaks, and is made again in vain. Which
    ones, the seed says by island and round; flushes always arrive.
    """

    def __init__(self, inner: Transport, seed: int, island: str, share: float) -> None:
        """Wrap `inner`; `share` in [0, 1) of the contributions is lost."""
        self._inner = inner
        self._seed = seed
        self._island = island
        self._share = share

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
            PeerReset: If it is a part of a contribution that is lost.
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
        name = f"{self._island}/{key.fragment_id}/{key.version}/{key.attempt}"
        return random.Random(f"{self._seed}/dropped/{name}").random() < self._share


def _mean_step_s(point: Point, island: str, slot: int) -> float:
    own = point.lab.islands.get(island)
    if own is not None and own.step:
        return parse_duration(own.step)
    step, last = point.lab.step, max(1, len(point.config.islands) - 1)
    return parse_duration(step.mean) * (1.0 + step.skew * slot / last)


def _lives(
    rng: random.Random, failures: FailuresConfig, between: str, repair: str
) -> Iterator[tuple[float, float]]:
    """Draw lives by Weibull's distribution and repairs by the exponential one, both by mean."""
    if not between:
        return
    scale_s = parse_duration(between) / math.gamma(1 + 1 / failures.shape)
    mean_repair_s = parse_duration(repair)
    while True:
        lives_s = rng.weibullvariate(scale_s, failures.shape)
        yield lives_s, rng.expovariate(1 / mean_repair_s)
