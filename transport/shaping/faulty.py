"""Faults on purpose, around any transport.

    DROP         the request is lost: nobody hears it, its caller waits until its deadline
    DELAY        it arrives `delay_s` late
    CORRUPT      one bit of its payload, else of the reply's, is wrong: below no checksum of ours
    DUPLICATE    it arrives twice, the second time after the first was answered
    REORDER      it waits until a later call of this link was answered, `delay_s` at most
    RESET        the connection breaks, before or after the peer has done what it was asked
    HALF_OPEN    the peer does it, and its answer never comes
    SLOW_READER  payloads move at `slow_bps`

Besides what single calls meet, a link's gate may be shut, both ways or one way: requests, or
replies of calls in flight too, then wait as on a real link whose packets are lost, until the gate
is open again or their deadline has passed.

Which call meets which fault is a hash of (seed, link, number of the call on that link), so a script
plays the same way again as long as each link makes the same calls in the same order. At most one
fault a call; one that can overtake another meets no REORDER of its own. `Faults.fired` counts those
that took effect: CORRUPT and DUPLICATE once the peer has answered what it heard so.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NoReturn

import xxhash

from diloco.transport.contracts import Buffer, Reply, Transport
from diloco.transport.deadlines import Deadlines, seconds_left
from diloco.transport.errors import PeerReset, TransportError
from diloco.transport.framing import check_call
from diloco.transport.transfer import Transfer

#: Seconds between two looks at a gate that is shut.
_GATE_LOOK_S = 0.05
_RESET = "the connection was reset on purpose"


class Fault(StrEnum):
    """What can happen to a call."""

    DROP = "drop"
    DELAY = "delay"
    CORRUPT = "corrupt"
    DUPLICATE = "duplicate"
    REORDER = "reorder"
    RESET = "reset"
    HALF_OPEN = "half-open"
    SLOW_READER = "slow reader"


class Gate(StrEnum):
    """Which ways of a link are open."""

    OPEN = "open"
    CUT = "cut"
    NO_REQUESTS = "no requests"
    NO_REPLIES = "no replies"

    @property
    def lets_requests(self) -> bool:
        """Whether what the caller sends arrives."""
        return self in (Gate.OPEN, Gate.NO_REPLIES)

    @property
    def lets_replies(self) -> bool:
        """Whether what the peer answers arrives."""
        return self in (Gate.OPEN, Gate.NO_REQUESTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultScript:
    """How often what happens.

    Attributes:
        seed: Decides which calls are met.
        rates: Probability of each fault, in [0, 1], together at most 1; one left out has 0.
        methods: Calls that faults may meet; empty: all.
        delay_s: Seconds of DELAY; longest wait of REORDER, which does nothing to a call that
            nobody overtakes by then.
        slow_bps: Bits per second of SLOW_READER; > 0.
        gate: Which ways are open, for every call.
    """

    seed: int
    rates: Mapping[Fault, float] = field(default_factory=dict)
    methods: frozenset[str] = frozenset()
    delay_s: float = 0.05
    slow_bps: float = 1e6
    gate: Gate = Gate.OPEN

    def __post_init__(self) -> None:
        """Refuse what cannot be.

        Raises:
            ValueError: If a value is out of its range.
        """
        if min(self.rates.values(), default=0) < 0 or sum(self.rates.values()) > 1 + 1e-9:
            raise ValueError(f"rates = {dict(self.rates)}: must be 0 or more, together at most 1")
        if not (0 <= self.delay_s < float("inf") and 0 < self.slow_bps < float("inf")):
            raise ValueError(f"delay_s = {self.delay_s}, slow_bps = {self.slow_bps}: out of range")

    def fault_of(self, link: str, call_index: int) -> Fault | None:
        """Say what happens to the `call_index`-th call of a link, from 0."""
        drawn = self.draw(link, call_index, "fault")
        for fault in Fault:
            drawn -= self.rates.get(fault, 0.0)
            if drawn < 0:
                return fault
        return None

    def draw(self, link: str, call_index: int, purpose: str) -> float:
        """Draw a number in [0, 1)."""
        key = f"{self.seed}/{link}/{call_index}/{purpose}"
        digest = xxhash.xxh3_64_intdigest(key.encode())
        return float(digest >> 11) / float(1 << 53)


class Faults:
    """A script as it plays on one link.

    Attributes:
        script: What may happen; another one may be put in its place at any time, from any thread.
        fired: How often each fault took effect.
        num_held: Requests and replies that found the gate shut.
    """

    def __init__(self, script: FaultScript, link: str) -> None:
        """Begin with the first call of `link`."""
        self.fired: Counter[Fault] = Counter()
        self.num_held = 0
        self.script = script
        self._link = link
        self._num_calls = 0
        self._held_index = -1
        self._overtaken = asyncio.Event()

    async def play(
        self,
        method: str,
        payload_bytes: int,
        attempt: Callable[[_Tamper], Awaitable[Reply]],
        *,
        peer: str,
    ) -> Reply:
        """Make one call, with what the script has for it.

        Args:
            method: Name of the method.
            payload_bytes: Of the request.
            attempt: Makes the call, its payload taken through the function it is given.
            peer: Address of the peer.

        Raises:
            PeerReset: On RESET.
        """
        await self._pass_gate(lambda gate: gate.lets_requests)
        reply = await self._play(method, payload_bytes, attempt, peer)
        await self._pass_gate(lambda gate: gate.lets_replies)
        return reply

    async def _pass_gate(self, lets: Callable[[Gate], bool]) -> None:
        if lets(self.script.gate):
            return
        self.num_held += 1
        while not lets(self.script.gate):
            await asyncio.sleep(_GATE_LOOK_S)

    async def _play(
        self,
        method: str,
        payload_bytes: int,
        attempt: Callable[[_Tamper], Awaitable[Reply]],
        peer: str,
    ) -> Reply:
        script = self.script
        if script.methods and method not in script.methods:
            return await attempt(_unchanged)
        index, self._num_calls = self._num_calls, self._num_calls + 1
        reply = await self._meet(index, method, payload_bytes, attempt, peer)
        if 0 <= self._held_index < index:
            self._overtaken.set()
        return reply

    async def _meet(
        self,
        index: int,
        method: str,
        payload_bytes: int,
        attempt: Callable[[_Tamper], Awaitable[Reply]],
        peer: str,
    ) -> Reply:
        script = self.script
        match script.fault_of(self._link, index):
            case Fault.DROP:
                await self._for_ever(Fault.DROP)
            case Fault.DELAY:
                self.fired[Fault.DELAY] += 1
                await asyncio.sleep(script.delay_s)
            case Fault.REORDER if self._held_index < 0:
                await self._be_overtaken(index)
            case Fault.RESET:
                if script.draw(self._link, index, "when") >= 0.5:
                    await attempt(_unchanged)
                self.fired[Fault.RESET] += 1
                raise PeerReset(_RESET, peer=peer, method=method)
            case Fault.DUPLICATE:
                await attempt(_unchanged)
                self.fired[Fault.DUPLICATE] += 1
            case Fault.HALF_OPEN:
                await attempt(_unchanged)
                await self._for_ever(Fault.HALF_OPEN)
            case Fault.CORRUPT:
                return await self._corrupted(payload_bytes, attempt, index)
            case Fault.SLOW_READER:
                self.fired[Fault.SLOW_READER] += 1
                await self._crawl(payload_bytes)
                reply = await attempt(_unchanged)
                await self._crawl(len(memoryview(reply.payload).cast("B")))
                return reply
        return await attempt(_unchanged)

    async def _for_ever(self, fault: Fault) -> NoReturn:
        self.fired[fault] += 1
        await asyncio.Event().wait()  # until the caller's deadline
        raise AssertionError("nobody sets it")

    async def _be_overtaken(self, index: int) -> None:
        self._held_index, self._overtaken = index, asyncio.Event()
        try:
            async with asyncio.timeout(self.script.delay_s):
                await self._overtaken.wait()
            self.fired[Fault.REORDER] += 1
        except TimeoutError:
            return
        finally:
            self._held_index = -1

    async def _corrupted(
        self, payload_bytes: int, attempt: Callable[[_Tamper], Awaitable[Reply]], index: int
    ) -> Reply:
        where = self.script.draw(self._link, index, "where")
        is_damaged = False

        def tamper(payload: Buffer) -> Buffer:
            nonlocal is_damaged
            view = memoryview(payload).cast("B")
            if not view:
                return payload
            is_damaged = True
            damaged = bytearray(view)
            damaged[int(where * len(damaged))] ^= 1
            return damaged

        try:
            reply = await attempt(tamper if payload_bytes else _unchanged)
        except Exception as error:
            if is_damaged and not (isinstance(error, TransportError) and error.is_retryable):
                self.fired[Fault.CORRUPT] += 1  # the peer that got it refused it
            raise
        if not payload_bytes:
            reply = Reply(reply.header, tamper(reply.payload))
        if is_damaged:
            self.fired[Fault.CORRUPT] += 1
        return reply

    async def _crawl(self, num_bytes: int) -> None:
        await asyncio.sleep(8 * num_bytes / self.script.slow_bps)


_Tamper = Callable[[Buffer], Buffer]


def _unchanged(payload: Buffer) -> Buffer:
    return payload


class FaultyTransport:
    """A transport whose calls meet faults on their way."""

    def __init__(self, inner: Transport, faults: Faults) -> None:
        """Wrap `inner`."""
        self._inner = inner
        self._faults = faults
        self._deadlines = Deadlines(inner.peer)

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
        """Call `method`; see `contracts.Transport`."""
        check_call(header, deadline_s=deadline_s, max_reply_bytes=max_reply_bytes)
        async with self._deadlines.within(method, deadline_s) as scope:

            async def attempt(tamper: _Tamper) -> Reply:
                return await self._inner.call(
                    method,
                    header,
                    tamper(payload),
                    deadline_s=seconds_left(scope),
                    max_reply_bytes=max_reply_bytes,
                    transfer=transfer,
                )

            payload_bytes = memoryview(payload).nbytes
            return await self._faults.play(method, payload_bytes, attempt, peer=self.peer)

    async def close(self) -> None:
        """Close the inner transport; calls in flight raise `TransportClosed`."""
        self._deadlines.close()
        await self._inner.close()
