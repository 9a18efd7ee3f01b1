"""Peers that are broken or hostile: each is refused by name, in bounded time, and the rest go on.

Certificates and tokens have files of their own (`test_tls`, `test_tokens`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
import struct
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path

import grpc
import grpc.aio
import pytest
import xxhash

from diloco.transport.calls.limits import Limits
from diloco.transport.contracts import PROTOCOL_VERSION, Handlers, IncomingCall, Reply
from diloco.transport.errors import (
    ConnectError,
    DeadlineExceeded,
    FrameError,
    MessageTooLarge,
    PeerReset,
    TransportError,
)
from diloco.transport.framing import MAX_CHUNKS, FrameReader, frame_messages
from diloco.transport.grpc.client import GrpcTransport
from diloco.transport.grpc.server import GrpcServer
from diloco.transport.grpc.wire import SERVER_OPTIONS, SERVICE

DEADLINE_S = 30.0
SILENCE_S = 0.3


async def echo(call: IncomingCall) -> Reply:
    return Reply(call.header, await call.read_payload())


async def flood(call: IncomingCall) -> Reply:
    return Reply(b"", random.Random(1).randbytes(1 << 20) * 64)


HANDLERS: Handlers = {"echo": echo, "flood": flood}


def serving(claim: Callable[[str], Awaitable[None]], limits: Limits | None = None) -> None:
    """Serve, let `claim` misbehave, and insist that a well-behaved caller is served after it."""

    async def run() -> None:
        server = GrpcServer("127.0.0.1:0", HANDLERS, limits=limits or Limits(silence_s=SILENCE_S))
        await server.start()
        try:
            async with asyncio.timeout(DEADLINE_S):
                await claim(server.address)
            transport = GrpcTransport(server.address)
            reply = await transport.call("echo", b"goes on", deadline_s=DEADLINE_S)
            assert reply.header == b"goes on"
            await transport.close()
        finally:
            await server.stop(0.0)

    asyncio.run(run())


@contextlib.contextmanager
def growing_less_than(kib: int) -> Iterator[None]:
    """Check that the memory of this process, server and all, never grows by that much."""

    def peak_kib() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0])

    Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
    before = peak_kib()
    yield
    assert peak_kib() - before < kib


def _say_and_listen(raw: socket.socket, data: bytes) -> None:
    raw.settimeout(DEADLINE_S)
    raw.sendall(data)
    raw.shutdown(socket.SHUT_WR)
    while raw.recv(1 << 16):
        pass


class RawHttp2:
    """A connection that speaks just enough HTTP/2 to break off in the middle."""

    def __init__(self, address: str) -> None:
        host, port = address.rsplit(":", 1)
        self._socket = socket.create_connection((host, int(port)))
        self._socket.settimeout(DEADLINE_S)
        self._socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b""))

    def open_call(self, method: str, more: Mapping[str, str] | None = None) -> None:
        headers = {
            ":method": "POST", ":scheme": "http", ":path": f"/{SERVICE}/{method}",
            ":authority": "test", "content-type": "application/grpc", "te": "trailers",
            **(more or {}),
        }  # fmt: skip
        block = b"".join(
            b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
            for name, value in headers.items()
        )
        self._socket.sendall(frame(1, 4, 1, block))

    def send(self, data: bytes) -> None:
        self._socket.sendall(frame(0, 0, 1, data))

    def ping(self) -> None:
        self._socket.sendall(frame(6, 0, 0, bytes(8)))

    async def read_until(self, text: bytes) -> bytes:
        """Return what came up to `text`, or to the end of the connection."""

        def read() -> bytes:
            data = b""
            while text not in data and (more := self._socket.recv(1 << 16)):
                data += more
            return data

        return await asyncio.to_thread(read)

    def close(self) -> None:
        self._socket.close()


def frame(kind: int, flags: int, stream: int, data: bytes) -> bytes:
    return (
        struct.pack(">I", len(data))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + data
    )


def first_message(payload_bytes: int, chunk_bytes: int = 1 << 20) -> bytes:
    """A first message with a good checksum that declares any payload."""
    opening = b"DLCO", PROTOCOL_VERSION, 0, 1, chunk_bytes, payload_bytes
    body = struct.pack("<4sHHIIQB16s16sQ", *opening, 0, bytes(16), bytes(16), 0) + b"h"
    return xxhash.xxh3_64(body).digest() + body


async def raw_call(address: str, messages: list[bytes], method: str = "echo") -> bytes:
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream(f"/{SERVICE}/{method}", None, None)(iter(messages))
        first = await call.read()
        call.cancel()
        assert isinstance(first, bytes)
        return first


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, MAX_CHUNKS * (1 << 20) + 1])
def test_a_payload_without_end_is_refused_before_anything_is_allocated(length: int) -> None:
    async def claim(address: str) -> None:
        with pytest.raises(FrameError, match=f"declares {length} bytes"):
            FrameReader(await raw_call(address, [first_message(length)]))

    with growing_less_than(200_000):
        serving(claim)


def test_a_payload_of_single_bytes_is_refused() -> None:
    async def claim(address: str) -> None:
        with pytest.raises(FrameError, match=r"in chunks of 1; 65536 chunks are allowed"):
            FrameReader(await raw_call(address, [first_message(1 << 20, chunk_bytes=1)]))

    serving(claim)


def test_a_reply_without_end_is_refused_by_the_client() -> None:
    with pytest.raises(FrameError, match="declares 9223372036854775808 bytes"):
        FrameReader(first_message(2**63))
    with pytest.raises(MessageTooLarge):
        FrameReader(first_message(1 << 30)).accept(1 << 20)


def test_garbage_on_the_wire_ends_its_connection_only() -> None:
    async def claim(address: str) -> None:
        host, port = address.rsplit(":", 1)
        draw = random.Random(7)
        for size in (1, 100, 10_000, 1 << 20):
            with contextlib.suppress(OSError), socket.create_connection((host, int(port))) as raw:
                await asyncio.to_thread(_say_and_listen, raw, draw.randbytes(size))

    serving(claim)


def test_half_a_message_is_given_up_by_name() -> None:
    message = next(frame_messages(b"header", b"abc", 3))

    async def claim(address: str) -> None:
        raw = RawHttp2(address)
        raw.open_call("echo")
        raw.send(b"\0" + struct.pack(">I", len(message)) + message[:10])
        assert b"the caller sent nothing for 0.3 s" in await raw.read_until(b"sent nothing")
        raw.close()

    serving(claim)


def test_a_payload_that_stops_half_way_is_given_up_by_name() -> None:
    messages = list(frame_messages(b"header", b"abcdef", 3))

    async def claim(address: str) -> None:
        raw = RawHttp2(address)
        raw.open_call("echo")
        for message in messages[:2]:
            raw.send(b"\0" + struct.pack(">I", len(message)) + message)
        assert b"the caller sent nothing for 0.3 s" in await raw.read_until(b"sent nothing")
        raw.close()

    serving(claim)


def test_a_message_of_four_gigabytes_is_refused_at_its_length() -> None:
    async def claim(address: str) -> None:
        raw = RawHttp2(address)
        raw.open_call("echo")
        raw.send(b"\0" + struct.pack(">I", 2**32 - 1) + b"x")
        said = await raw.read_until(b"larger than max")
        assert b"larger than max" in said
        raw.close()

    serving(claim)


def test_a_zip_bomb_is_refused_packed() -> None:
    """64 KiB that would swell to 64 MiB: refused for being packed, not for what came out."""
    packer = zlib.compressobj(wbits=31)
    bomb = b"".join([*(packer.compress(bytes(1 << 20)) for _ in range(64)), packer.flush()])

    async def claim(address: str) -> None:
        raw = RawHttp2(address)
        raw.open_call("echo", {"grpc-encoding": "gzip"})
        raw.send(b"\1" + struct.pack(">I", len(bomb)))
        for start in range(0, len(bomb), 16_384):
            raw.send(bomb[start : start + 16_384])
        refusal = b"Compression algorithm 'gzip' is disabled"
        assert refusal in await raw.read_until(refusal)
        raw.close()

    with growing_less_than(32 << 10):
        serving(claim)


def test_a_connection_that_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**dict(SERVER_OPTIONS), "grpc.server_handshake_timeout_ms": 300}
    monkeypatch.setattr("diloco.transport.grpc.listener.SERVER_OPTIONS", tuple(options.items()))

    async def claim(address: str) -> None:
        host, port = address.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        await reader.read()  # to its end
        writer.close()
        await writer.wait_closed()

    serving(claim)


def test_a_call_that_says_nothing_is_given_up_by_name(caplog: pytest.LogCaptureFixture) -> None:
    async def claim(address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            call = channel.stream_stream(f"/{SERVICE}/echo", None, None)()
            first = await call.read()
            with pytest.raises(DeadlineExceeded, match=r"sent nothing for 0\.3 s"):
                FrameReader(first)
            call.cancel()

    with caplog.at_level(logging.WARNING):
        serving(claim)
    assert "call refused method=echo" in caplog.text


def test_a_connection_without_calls_is_closed_however_it_pings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {**dict(SERVER_OPTIONS), "grpc.max_connection_idle_ms": 300}
    monkeypatch.setattr("diloco.transport.grpc.listener.SERVER_OPTIONS", tuple(options.items()))

    async def claim(address: str) -> None:
        raw = RawHttp2(address)
        raw.ping()
        assert await raw.read_until(b"never said")  # up to the end of the connection
        raw.close()

    serving(claim)


def test_refused_calls_that_never_end_are_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    limits = Limits(calls_per_caller=1, refused=4, refusals_logged_per_s=0.5)

    async def claim(address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            method = channel.stream_stream(f"/{SERVICE}/echo", None, None)
            calls = [method() for _ in range(60)]  # never told that they are at their end
            waiting = {asyncio.create_task(call.read()) for call in calls}
            done: set[asyncio.Task[object]] = set()
            while len(done) < 59:  # the one that was let in has no answer
                ended, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                done |= ended
            cut_off = [error for task in done if (error := task.exception())]
            assert len(cut_off) == 59 - limits.refused
            for error in cut_off:
                assert isinstance(error, grpc.aio.AioRpcError)
                assert error.code() is grpc.StatusCode.UNAVAILABLE
            for call in calls:
                call.cancel()
            await asyncio.wait(waiting)
        while True:  # room again, once the server has noticed
            try:
                transport = GrpcTransport(address)
                assert (await transport.call("echo", b"", deadline_s=DEADLINE_S)).header == b""
                break
            except ConnectError:
                await asyncio.sleep(0.05)
            finally:
                await transport.close()

    with caplog.at_level(logging.WARNING):
        serving(claim, limits)
    assert caplog.text.count("call refused") <= 6


def test_a_reader_that_never_reads_holds_its_call_for_a_bounded_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def claim(address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            call = channel.stream_stream(f"/{SERVICE}/flood", None, None)(
                iter([next(frame_messages(b"", b"", 1))])
            )
            while "ended by its limit" not in caplog.text:
                await asyncio.sleep(0.05)
            call.cancel()

    with caplog.at_level(logging.WARNING):
        serving(claim)


def test_more_connections_than_allowed_are_closed_unheard() -> None:
    async def claim(address: str) -> None:
        host, port = address.rsplit(":", 1)
        opened = [await asyncio.open_connection(host, int(port)) for _ in range(12)]
        endings = [asyncio.create_task(reader.read()) for reader, _ in opened]
        done, waiting = set(), set(endings)
        while len(done) < 8:
            done, waiting = await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0.02)
        assert len(waiting) == 4
        for _, writer in opened:
            writer.close()
            await writer.wait_closed()
        await asyncio.wait(endings)
        await asyncio.sleep(0.1)  # the server has to notice that there is room again

    serving(claim, Limits(connections=4))


def test_names_of_methods_reach_the_log_shortened(caplog: pytest.LogCaptureFixture) -> None:
    async def claim(address: str) -> None:
        name = "x" * 4000
        with pytest.raises(Exception, match="no method"):
            FrameReader(await raw_call(address, list(frame_messages(b"", b"", 1)), name))

    with caplog.at_level(logging.WARNING):
        serving(claim)
    assert "handler failed" in caplog.text
    assert len(caplog.text) < 10_000


@pytest.mark.parametrize(
    ("error", "level", "has_trace"),
    [
        (FrameError("no such field"), logging.WARNING, False),
        (PeerReset("a newer attempt of this call goes on with it"), logging.INFO, False),
        (KeyError("a bug of ours"), logging.WARNING, True),
    ],
    ids=["refused", "ordinary", "own failure"],
)
def test_calls_that_fail_are_logged_so_often_and_with_a_trace_if_it_is_our_failure(
    caplog: pytest.LogCaptureFixture, error: Exception, level: int, has_trace: bool
) -> None:
    async def fail(call: IncomingCall) -> Reply:
        raise error

    async def run() -> None:
        limits = Limits(refusals_logged_per_s=0.3)  # three at once, after a pause
        server = GrpcServer("127.0.0.1:0", {"fail": fail}, limits=limits)
        await server.start()
        transport = GrpcTransport(server.address)
        for _ in range(60):
            with pytest.raises(TransportError):
                await transport.call("fail", b"", deadline_s=DEADLINE_S)
        await transport.close()
        await server.stop(0.0)

    with caplog.at_level(logging.INFO, "diloco.transport.calls.dispatch"):
        asyncio.run(run())
    said = [record for record in caplog.records if record.name == "diloco.transport.calls.dispatch"]
    assert 3 <= len(said) < 30  # one more every 3.3 s on a slow machine
    assert {record.levelno for record in said} == {level}
    assert all(bool(record.exc_info) == has_trace for record in said)


def test_metadata_has_a_bound() -> None:
    async def claim(address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            call = channel.stream_stream(f"/{SERVICE}/echo", None, None)(
                iter([b""]), metadata=(("diloco-token", "x" * 100_000),)
            )
            with pytest.raises(grpc.aio.AioRpcError):
                await call.read()

    serving(claim)
