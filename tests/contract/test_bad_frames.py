"""Callers that are broken or hostile, alike over every wire: refused by name, others go on."""

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import pytest
import xxhash
import zstandard

from diloco.transport.calls.limits import Limits
from diloco.transport.contracts import PROTOCOL_VERSION, IncomingCall, Reply, Server, Transport
from diloco.transport.errors import (
    ChecksumMismatch,
    DeadlineExceeded,
    FrameError,
    TransportError,
    VersionMismatch,
)
from diloco.transport.framing import (
    WHOLE_BYTES,
    FrameReader,
    Resumption,
    frame_chunk,
    frame_messages,
    frame_whole,
)
from diloco.transport.grpc.client import GrpcTransport
from diloco.transport.grpc.server import GrpcServer
from diloco.transport.grpc.wire import SERVICE
from diloco.transport.libp2p.address import parse_peer_address
from diloco.transport.libp2p.client import HivemindTransport
from diloco.transport.libp2p.daemon import Daemon, Swarm
from diloco.transport.libp2p.server import HivemindServer
from diloco.transport.libp2p.wire import ACCEPTED, Opening, read_message, write_message

DEADLINE_S = 30.0
LIMITS = Limits(silence_s=0.5)


async def echo(call: IncomingCall) -> Reply:
    return Reply(call.header, await call.read_payload())


Say = Callable[[list[bytes]], Awaitable[bytes]]


@asynccontextmanager
async def raw_grpc(address: str) -> AsyncIterator[Say]:
    async with grpc.aio.insecure_channel(address) as channel:

        async def say(messages: list[bytes]) -> bytes:
            call = channel.stream_stream(f"/{SERVICE}/echo", None, None)()
            for message in messages:
                await call.write(message)
            first = await call.read()
            call.cancel()
            assert isinstance(first, bytes)
            return first

        yield say


@asynccontextmanager
async def raw_hivemind(address: str) -> AsyncIterator[Say]:
    daemon = await Daemon.start(Swarm())

    async def say(messages: list[bytes]) -> bytes:
        reader, writer, _ = await daemon.open(parse_peer_address(address))
        writer.write(Opening("echo", "", DEADLINE_S).to_bytes())
        for message in messages:
            await write_message(writer, message)
        assert await reader.readexactly(len(ACCEPTED)) == ACCEPTED
        first = await read_message(reader)
        writer.transport.abort()
        return first

    try:
        yield say
    finally:
        await daemon.stop()


@dataclass(frozen=True)
class Wire:
    """A kind whose messages can be sent one by one.

    Attributes:
        serve: Makes a server with `LIMITS`, not started yet.
        connect: Makes a well-behaved way to it.
        raw: Gives what sends messages as those of a call, does not end it, and returns the first
            answer.
    """

    serve: Callable[[Path], Server]
    connect: Callable[[str], Transport]
    raw: Callable[[str], AbstractAsyncContextManager[Say]]


WIRES = {
    "grpc": Wire(
        lambda _: GrpcServer("127.0.0.1:0", {"echo": echo}, limits=LIMITS), GrpcTransport, raw_grpc
    ),
    "hivemind": Wire(
        lambda directory: HivemindServer(
            "127.0.0.1:0", {"echo": echo}, identity=directory / "key", limits=LIMITS
        ),
        HivemindTransport,
        raw_hivemind,
    ),
}


def first_message(
    payload_bytes: int, chunk_bytes: int = 1 << 20, version: int = PROTOCOL_VERSION
) -> bytes:
    """A first message with a good checksum that declares any payload."""
    sizes = (1, chunk_bytes, payload_bytes)
    body = struct.pack("<4sHHIIQB16s16sQ", b"DLCO", version, 0, *sizes, 0, b"", b"", 0) + b"h"
    return sealed(body)


def sealed(body: bytes) -> bytes:
    return xxhash.xxh3_64(body).digest() + body


SOUND = list(frame_messages(b"header", b"abcdef", 3))
DAMAGED = SOUND[1][:-1] + b"?"
CASES: dict[str, tuple[list[bytes], type[TransportError], str]] = {
    "nothing": ([], DeadlineExceeded, r"sent nothing for 0\.5 s"),
    "garbage": ([b"garbage!" * 12], FrameError, "not a diloco peer"),
    "another version": ([first_message(0, version=999)], VersionMismatch, "wire protocol 999"),
    "a payload of 2^63": ([first_message(2**63)], FrameError, f"declares {2**63} bytes"),
    "single bytes": ([first_message(1 << 20, 1)], FrameError, "in chunks of 1; 65536 chunks"),
    "too large a whole payload": (
        [frame_whole(b"h", bytes(WHOLE_BYTES + 1))],
        FrameError,
        f"holds a payload of {WHOLE_BYTES + 1} bytes",
    ),
    "a whole payload that goes on": (
        [frame_whole(b"h", b"payload", Resumption(is_resuming=True))],
        FrameError,
        "never go on after a break",
    ),
    "half a payload": (SOUND[:2], DeadlineExceeded, r"sent nothing for 0\.5 s"),
    "a damaged chunk": ([SOUND[0], DAMAGED], ChecksumMismatch, "does not match its checksum"),
    "a chunk of another form": (
        [SOUND[0], sealed(b"\x02abc")],
        FrameError,
        "3 bytes where 3 are due, form '02'",
    ),
    "a chunk that swells to 64 MiB": (
        [first_message(1 << 20), frame_chunk(b"", zstandard.compress(bytes(64 << 20)))],
        FrameError,
        "unpacks to 67108864 bytes where 1048576 are due",
    ),
    "a long chunk": ([SOUND[0], SOUND[1] + b"!"], FrameError, "chunk of 4 bytes where 3 are due"),
}


@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES.keys())
def test_bad_frames_are_refused_by_name_and_the_service_goes_on(
    wire: Wire, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        server = wire.serve(tmp_path)
        await server.start()
        transport = wire.connect(server.address)
        async with wire.raw(server.address) as say:
            for what, (messages, kind, reason) in CASES.items():
                caplog.clear()
                async with asyncio.timeout(DEADLINE_S):
                    answer = await say(messages)
                with pytest.raises(kind, match=reason):
                    FrameReader(answer)
                assert "call refused method=echo" in caplog.text, what
                reply = await transport.call("echo", b"goes on", deadline_s=DEADLINE_S)
                assert reply.header == b"goes on"
        await transport.close()
        await server.stop(0.0)

    asyncio.run(run())
