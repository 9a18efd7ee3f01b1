"""Vectors between the ranks of different islands: sent over any transport, taken by their address.

A vector is addressed by sender, reduction, chunk and hop. Each comes once, may come before it is
wanted, and waits in memory: a sender is at most one reduction ahead, since the next one needs this
member's part of the last. There is no other way to go on where a member is gone: who is silent for
`patience_s` ends the baseline, by name.

All coroutines run in one event loop.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from diloco.baseline.group import BaselineMember
from diloco.errors import IslandFailed
from diloco.protos.baseline_pb2 import VectorHeader
from diloco.transport.contracts import (
    PROTOCOL_VERSION,
    Buffer,
    Handlers,
    IncomingCall,
    Reply,
    Transport,
)
from diloco.transport.errors import FrameError, TransportError
from diloco.transport.retry import RetryPolicy, retry
from diloco.transport.transfer import Transfer

METHOD = "baseline.vector"

#: Slowest link for which deadlines are made.
SLOWEST_BPS = 1e6
_LOOK_S = 1.0

#: Reduction, chunk, hop.
Key: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of what a member accepts from the others.

    Attributes:
        max_bytes: Largest vector.
        max_vectors: Vectors of one sender that nobody has taken yet.
        patience_s: Seconds of silence after which a member counts as gone, besides the time that
            the vectors under way take at 1 Mbit/s.
        streams: Vectors under way to one member at once.
    """

    max_bytes: int
    max_vectors: int
    patience_s: float
    streams: int

    @property
    def silence_s(self) -> float:
        """Longest time without a vector from a member that lives."""
        return self.patience_s + 8 * self.max_bytes * self.streams / SLOWEST_BPS


class ValueExchange:
    """One member's end. `bytes_up` counts payloads sent to other islands, `bytes_down` those come.

    Attributes:
        reduction: Number of the reduction under way, which its owner raises.
    """

    def __init__(
        self, own: BaselineMember, start: str, members: frozenset[BaselineMember], bounds: Bounds
    ) -> None:
        """Assign only; `connect` follows."""
        self._own = own
        self._start = start
        self._members = members
        self._bounds = bounds
        self._transports: Mapping[BaselineMember, Transport] = {}
        self._slots: dict[BaselineMember, asyncio.Semaphore] = {}
        self._came: dict[BaselineMember, dict[Key, Buffer]] = {member: {} for member in members}
        self._taken: dict[BaselineMember, set[Key]] = {member: set() for member in members}
        self._heard: dict[BaselineMember, float] = {}
        self._waiting: dict[tuple[BaselineMember, Key], asyncio.Future[None]] = {}
        self._rng = random.Random(str(own))
        self.reduction = 0
        self.bytes_up = 0
        self.bytes_down = 0

    @property
    def handlers(self) -> Handlers:
        """What a server has to answer."""
        return {METHOD: self._receive}

    def connect(self, transports: Mapping[BaselineMember, Transport]) -> None:
        """Set the transports to the members that this one sends to."""
        self._transports = transports
        self._slots = {member: asyncio.Semaphore(self._bounds.streams) for member in transports}

    async def close(self) -> None:
        """Close every transport."""
        await asyncio.gather(*(transport.close() for transport in self._transports.values()))

    async def send(self, to: BaselineMember, key: Key, payload: Buffer) -> None:
        """Send a vector; return when it is held there.

        Raises:
            IslandFailed: If the member cannot be reached, or refuses it.
        """
        bounds, transport = self._bounds, self._transports[to]
        reduction, chunk, hop = key
        header = VectorHeader(
            protocol_version=PROTOCOL_VERSION,
            start=self._start,
            island=self._own.island,
            island_rank=self._own.island_rank,
            reduction=reduction,
            chunk=chunk,
            hop=hop,
        ).SerializeToString()
        transfer = Transfer()

        async def attempt() -> Reply:
            return await transport.call(
                METHOD, header, payload, deadline_s=bounds.silence_s, transfer=transfer
            )

        policy = RetryPolicy(budget_s=bounds.patience_s)
        async with self._slots[to]:
            try:
                await retry(attempt, policy, self._rng, lambda: transfer.moved_bytes)
            except TransportError as error:
                how = f"cannot be sent chunk {chunk} of reduction {reduction}: {error}"
                raise _gone(to, how) from error
        if to.island != self._own.island:
            self.bytes_up += memoryview(payload).nbytes

    async def receive(self, sender: BaselineMember, key: Key) -> Buffer:
        """Take a vector as soon as it is here.

        Raises:
            IslandFailed: If nothing at all came from the sender for too long.
        """
        loop = asyncio.get_running_loop()
        heard, silent_s = self._heard.get(sender), 0.0
        while key not in self._came[sender]:
            news = self._waiting[sender, key] = loop.create_future()
            try:
                async with asyncio.timeout(_LOOK_S):
                    await news
            except TimeoutError:
                silent_s += _LOOK_S  # by looking: while this process is frozen nobody is silent
                if (last := self._heard.get(sender)) != heard:
                    heard, silent_s = last, 0.0
                if silent_s > self._bounds.silence_s:
                    reduction, chunk, _ = key
                    raise _gone(
                        sender,
                        f"has sent nothing for {silent_s:.0f} s, and chunk {chunk} of reduction "
                        f"{reduction} is missing",
                    ) from None
            finally:
                del self._waiting[sender, key]
        self._taken[sender].add(key)
        return self._came[sender].pop(key)

    def end(self, reduction: int) -> None:
        """Forget which vectors of a reduction were taken: whatever comes of it is too late."""
        self.reduction = reduction + 1
        for keys in self._taken.values():
            keys -= {key for key in keys if key[0] <= reduction}

    async def _receive(self, call: IncomingCall) -> Reply:
        """Hold what another member sends.

        Raises:
            FrameError: If it is not of this start, nobody's, or more than can be wanted.
        """
        header = VectorHeader.FromString(call.header)
        sender = BaselineMember(header.island, header.island_rank)
        if header.start != self._start or sender not in self._members:
            raise FrameError(f"{sender} is of another start of the baseline, or of none")
        key = header.reduction, header.chunk, header.hop
        came = self._came[sender]
        if key in came or key in self._taken[sender] or key[0] < self.reduction:
            return Reply(b"")  # the answer to the first one was lost
        if key[0] > self.reduction + 1 or len(came) >= self._bounds.max_vectors:
            raise FrameError(
                f"{sender} sends reduction {key[0]} in the middle of {self.reduction}, "
                f"{len(came)} vectors of it wait: more than can be wanted"
            )
        if call.payload_bytes > self._bounds.max_bytes:
            raise FrameError(
                f"{sender} sends {call.payload_bytes} bytes at once, {self._bounds.max_bytes} are "
                f"the most that a chunk takes"
            )
        payload = await call.read_payload()
        self._heard[sender] = asyncio.get_running_loop().time()
        if key not in self._taken[sender] and key[0] >= self.reduction:
            came[key] = payload
        if sender.island != self._own.island:
            self.bytes_down += memoryview(payload).nbytes
        if (news := self._waiting.get((sender, key))) is not None and not news.done():
            news.set_result(None)
        return Reply(b"")


def _gone(member: BaselineMember, how: str) -> IslandFailed:
    return IslandFailed(
        f"{member} {how}. A baseline does not go on without a member: see its log, then start it "
        f"again"
    )
