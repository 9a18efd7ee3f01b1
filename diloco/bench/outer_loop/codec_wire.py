"""What the wire makes of coded payloads: over a connection of this machine, slow and fast.

A call of `GrpcTransport` to a `GrpcServer` of this process, whose handler reads the payload. It is
compared with a payload of the same size of random bytes, which nothing shrinks. Slow: through a
`ShapedLine`, a transport of its own for each call; fast: straight, calls of either kind in turns,
once the transport knows its line, in CPU seconds of both ends: they are what such a line takes, and
other load on the machine does less harm. A chunk is no larger than what is repeated to fill a
payload, so that none is shorter for that.
"""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from diloco.transport.addresses import split_address
from diloco.transport.contracts import IncomingCall, Reply
from diloco.transport.framing import DEFAULT_CHUNK_BYTES
from diloco.transport.grpc.client import GrpcTransport
from diloco.transport.grpc.server import GrpcServer
from diloco.transport.shaping.line import ShapedLine

_DEADLINE_S = 600.0


@dataclass(frozen=True, slots=True)
class WireSetting:
    """What is sent.

    Attributes:
        slow_bps: Bits per second of the slow line.
        slow_bytes: Payload of a call over it, at least.
        fast_bytes: The same without a line.
        repetitions: Calls of either kind without a line.
    """

    slow_bps: float = 100e6
    slow_bytes: int = 12 << 20
    fast_bytes: int = 48 << 20
    repetitions: int = 20


async def measure(coded: bytes, setting: WireSetting) -> dict[str, float]:
    """Send a coded vector, again and again.

    Returns:
        `wire_ratio`: payload bytes over those that crossed the slow line; `wire_speedup`: seconds
        of random bytes over it, by those of the payload; `loopback_slowdown`: CPU seconds without
        a line, by those of random bytes.
    """
    chunk_bytes = min(len(coded), DEFAULT_CHUNK_BYTES)
    async with _server() as port:
        seconds: list[float] = []
        crossed: list[int] = []
        for payload in _pair(coded, setting.slow_bytes):
            async with (
                ShapedLine(("127.0.0.1", port), rate_bps=setting.slow_bps) as line,
                _transport(line.port, chunk_bytes) as transport,
            ):
                before = line.up.num_bytes
                began = time.perf_counter()
                await _call(transport, payload)
                seconds.append(time.perf_counter() - began)
                crossed.append(line.up.num_bytes - before)
        cpu_s = [0.0, 0.0]
        async with _transport(port, chunk_bytes) as transport:
            pair = _pair(coded, setting.fast_bytes)
            for repetition in range(1 + setting.repetitions):
                for n, payload in enumerate(pair):
                    began = time.process_time()
                    await _call(transport, payload, n)
                    if repetition:
                        cpu_s[n] += time.process_time() - began
    return {
        "wire_ratio": crossed[0] / crossed[1],
        "wire_speedup": seconds[0] / seconds[1],
        "loopback_slowdown": cpu_s[1] / cpu_s[0],
    }


def _pair(coded: bytes, num_bytes: int) -> tuple[bytes, bytes]:
    """Return random bytes, and as many that repeat what is coded."""
    payload = coded * -(-num_bytes // len(coded))
    return random.Random(1).randbytes(len(payload)), payload


@asynccontextmanager
async def _server() -> AsyncIterator[int]:
    async def take(call: IncomingCall) -> Reply:
        await call.read_payload()
        return Reply(b"")

    # A method each: what is known of one is not taken for the other's.
    server = GrpcServer("127.0.0.1:0", {"take-0": take, "take-1": take})
    await server.start()
    try:
        yield split_address(server.address)[1]
    finally:
        await server.stop(0.0)


@asynccontextmanager
async def _transport(port: int, chunk_bytes: int) -> AsyncIterator[GrpcTransport]:
    transport = GrpcTransport(f"127.0.0.1:{port}", chunk_bytes=chunk_bytes)
    try:
        await transport.call("take-0", b"", deadline_s=_DEADLINE_S)  # connected
        yield transport
    finally:
        await transport.close()


async def _call(transport: GrpcTransport, payload: bytes, method: int = 0) -> None:
    await transport.call(f"take-{method}", b"", payload, deadline_s=_DEADLINE_S)
