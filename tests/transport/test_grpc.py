import asyncio
import contextlib
import gc
import random
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc
import grpc.aio
import pytest

from diloco.transport.addresses import split_address
from diloco.transport.contracts import Buffer, Handlers, IncomingCall, Reply, Server
from diloco.transport.errors import (
    ChecksumMismatch,
    ConnectError,
    DamagedFrame,
    DeadlineExceeded,
    FrameError,
    PeerReset,
    TransportError,
    VersionMismatch,
)
from diloco.transport.framing import MAX_MESSAGE_BYTES, FrameReader, frame_chunks, frame_messages
from diloco.transport.grpc.client import GrpcTransport
from diloco.transport.grpc.server import GrpcServer
from diloco.transport.grpc.wire import ACCEPTED_METADATA, SERVICE, STATUS_ERRORS
from diloco.transport.shaping.line import ShapedLine
from diloco.transport.transfer import Transfer
from tests.transport.test_framing import sealed
from tests.waiting import wait_until

DEADLINE_S = 30.0


async def echo(call: IncomingCall) -> Reply:
    return Reply(call.header, await call.read_payload())


def serving(handlers: Handlers, claim: Callable[[str], Awaitable[None]]) -> None:
    async def run() -> None:
        server = GrpcServer("127.0.0.1:0", handlers)
        await server.start()
        try:
            await claim(server.address)
        finally:
            await server.stop(0.0)

    asyncio.run(run())


async def raw_call(address: str, messages: list[bytes]) -> bytes:
    """Send these messages as they are and return the first message of the reply."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream(f"/{SERVICE}/echo", None, None)(iter(messages))
        first = await asyncio.wait_for(call.read(), DEADLINE_S)
        call.cancel()
        assert isinstance(first, bytes)
        return first


@pytest.mark.parametrize(
    "bind", ["0.0.0.0:0", "[::]:0", "192.0.2.7:80", "example.org:80", "127.0.0.1.example.org:80"]
)
def test_a_bind_beyond_loopback_needs_insecure(bind: str) -> None:
    with pytest.raises(ValueError, match=r"diloco certs init.*insecure = true"):
        GrpcServer(bind, {})
    GrpcServer(bind, {}, insecure=True)


@pytest.mark.parametrize("bind", ["127.0.0.1:0", "localhost:0", "[::1]:0", "127.8.9.10:443"])
def test_loopback_binds_need_nothing(bind: str) -> None:
    assert isinstance(GrpcServer(bind, {}), GrpcServer)


@pytest.mark.parametrize("bind", ["127.0.0.1", ":80", "", "127.0.0.1:http", "127.0.0.1:65536"])
def test_a_bind_without_host_or_port_is_refused(bind: str) -> None:
    with pytest.raises(ValueError, match="must be HOST:PORT"):
        GrpcServer(bind, {})


def test_a_drawn_port_is_told_and_really_bound() -> None:
    async def claim(address: str) -> None:
        host, _, port = address.rpartition(":")
        assert host == "127.0.0.1"
        with socket.create_connection((host, int(port)), timeout=DEADLINE_S):
            pass

    serving({}, claim)


def test_a_taken_port_is_a_clear_error() -> None:
    async def claim(address: str) -> None:
        second: Server = GrpcServer(address, {})
        with pytest.raises(OSError, match=f"cannot listen on {address}.*another process"):
            await second.start()
        await second.stop(0.0)

    serving({}, claim)


@pytest.mark.parametrize(
    ("damage", "expected", "message"),
    [
        (lambda m: [], FrameError, "before its first message"),
        (lambda m: [b"junk"], FrameError, "too few"),
        (lambda m: [bytes(100)], FrameError, "not a diloco peer"),
        (lambda m: [m[0][:-1] + b"?", *m[1:]], ChecksumMismatch, "first message"),
        (lambda m: [m[0], m[1][:-1] + b"?", m[2]], ChecksumMismatch, "byte 0 of 5"),
        (lambda m: m[:2], FrameError, "3 bytes of 5"),
        (lambda m: [*m, m[1]], FrameError, "more than the 5 bytes"),
        (lambda m: [m[0], m[2]], FrameError, "2 bytes where 3 are due"),
        (
            lambda m: [sealed(m[0][:12] + b"\x63\x00" + m[0][14:])],
            VersionMismatch,
            "protocol 99",
        ),
    ],
    ids=[
        "nothing", "junk", "foreign", "damaged header", "damaged chunk", "too few", "too many",
        "missing chunk", "other version",
    ],
)  # fmt: skip
def test_a_server_tells_a_broken_caller_what_is_wrong(
    damage: Callable[[list[bytes]], list[bytes]], expected: type[TransportError], message: str
) -> None:
    messages = damage(list(frame_messages(b"header", b"abcde", 3)))

    async def claim(address: str) -> None:
        with pytest.raises(expected, match=message):
            FrameReader(await raw_call(address, messages))
        transport = GrpcTransport(address)
        assert (await transport.call("echo", b"well", deadline_s=DEADLINE_S)).header == b"well"
        await transport.close()

    serving({"echo": echo}, claim)


def test_a_message_over_the_bound_is_not_received() -> None:
    async def claim(address: str) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await raw_call(address, [bytes(MAX_MESSAGE_BYTES + 1)])
        assert STATUS_ERRORS[caught.value.code()] is DamagedFrame

    serving({"echo": echo}, claim)


@pytest.mark.parametrize("chunk_bytes", [1, 7, 1 << 22])
def test_the_two_ends_need_not_agree_on_a_chunk_size(chunk_bytes: int) -> None:
    async def claim(address: str) -> None:
        transport = GrpcTransport(address, chunk_bytes=chunk_bytes)
        reply = await transport.call(
            "echo", b"", bytes(range(100)), deadline_s=DEADLINE_S, max_reply_bytes=100
        )
        assert reply.payload == bytes(range(100))
        await transport.close()

    serving({"echo": echo}, claim)


def test_a_refused_payload_is_not_sent_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    num_taken = 0
    payload = random.Random(1).randbytes(1 << 20) * 200  # no chunk shrinks

    def counted(payload: Buffer, *arguments: Any) -> Iterator[bytes]:
        nonlocal num_taken
        for message in frame_chunks(payload, *arguments):
            num_taken += 1
            yield message

    async def refuse(call: IncomingCall) -> Reply:
        return Reply(b"no")

    async def claim(address: str) -> None:
        transport = GrpcTransport(address)
        reply = await transport.call("refuse", b"", payload, deadline_s=DEADLINE_S)
        assert reply.header == b"no"
        await transport.close()

    monkeypatch.setattr("diloco.transport.shaping.packing.frame_chunks", counted)
    serving({"refuse": refuse}, claim)
    assert num_taken < 100  # of 201; what gRPC had room for when the answer came


def test_a_failed_connection_with_a_large_request_is_connect_error() -> None:
    async def run() -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            transport = GrpcTransport(f"127.0.0.1:{unused.getsockname()[1]}")
            for _ in range(5):
                with pytest.raises(ConnectError):
                    await transport.call("echo", b"", bytes(8 << 20), deadline_s=DEADLINE_S)
            await transport.close()

    asyncio.run(run())


def test_a_peer_that_never_answers_is_deadline_exceeded() -> None:
    async def run() -> None:
        with socket.socket() as silent:  # accepts connections and says nothing
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            transport = GrpcTransport(f"127.0.0.1:{silent.getsockname()[1]}")
            with pytest.raises(DeadlineExceeded):
                await transport.call("echo", b"", bytes(8 << 20), deadline_s=0.3)
            await transport.close()

    asyncio.run(run())


def test_a_connection_that_nothing_comes_over_is_replaced() -> None:
    async def claim(address: str) -> None:
        async with ShapedLine(("127.0.0.1", split_address(address)[1])) as line:
            transport = GrpcTransport(f"127.0.0.1:{line.port}")

            async def call(deadline_s: float) -> Reply:
                return await transport.call("echo", b"hello", deadline_s=deadline_s)

            await call(DEADLINE_S)
            line.silence()  # as where a flipped bit hides at which byte frames begin
            for _ in range(3):
                with pytest.raises(DeadlineExceeded):
                    await call(0.3)
            assert (await call(DEADLINE_S)).header == b"hello"
            await transport.close()

    serving({"echo": echo}, claim)


def test_a_connection_cut_while_the_request_is_sent_is_peer_reset() -> None:
    async def run() -> None:
        arrived = asyncio.Event()

        async def hold(call: IncomingCall) -> Reply:
            arrived.set()
            await asyncio.sleep(1e6)
            return Reply(b"")

        server = GrpcServer("127.0.0.1:0", {"hold": hold})
        await server.start()
        transport = GrpcTransport(server.address)
        call = asyncio.create_task(
            transport.call("hold", b"", bytes(64 << 20), deadline_s=DEADLINE_S)
        )
        await arrived.wait()
        await server.stop(0.0)
        with pytest.raises(PeerReset):
            await call
        await transport.close()

    asyncio.run(run())


def test_a_stream_that_breaks_before_its_position_is_known_leaves_no_task() -> None:
    async def breaks(_: object, context: "grpc.aio.ServicerContext[bytes, bytes]") -> None:
        await context.send_initial_metadata((ACCEPTED_METADATA,))
        await context.read()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "breaks")

    async def run() -> None:
        said: list[str] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: said.append(str(context["message"])))
        server = grpc.aio.server()
        method = grpc.stream_stream_rpc_method_handler(breaks)
        handler = grpc.method_handlers_generic_handler(SERVICE, {"take": method})
        server.add_generic_rpc_handlers((handler,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        transport = GrpcTransport(f"127.0.0.1:{port}")
        for _ in range(3):
            with pytest.raises(PeerReset):
                again = Transfer(asks_first=True)
                await transport.call("take", b"", b"bytes", deadline_s=DEADLINE_S, transfer=again)
        await asyncio.sleep(0)  # in which what was cancelled ends
        gc.collect()
        # gRPC itself complains of wake-ups that another loop of this process took.
        assert not [words for words in said if "destroyed" in words]
        await transport.close()
        await server.stop(0.0)

    asyncio.run(run())


@pytest.mark.parametrize("is_called", [False, True], ids=["idle", "in a call"])
def test_a_server_that_nobody_stops_ends_with_its_loop(is_called: bool) -> None:
    addresses: list[str] = []

    async def run() -> None:
        arrived = asyncio.Event()

        async def hold(call: IncomingCall) -> Reply:
            arrived.set()
            await asyncio.sleep(1e6)
            return Reply(b"")

        server = GrpcServer("127.0.0.1:0", {"hold": hold})
        await server.start()
        addresses.append(server.address)
        transport = GrpcTransport(server.address)
        call = asyncio.create_task(transport.call("hold", b"", deadline_s=DEADLINE_S))
        if is_called:
            await arrived.wait()
        call.cancel()
        raise ValueError("the cause")

    with pytest.raises(ValueError, match="the cause"):
        asyncio.run(run())
    assert_free(addresses[0])


@pytest.mark.parametrize("num_turns", range(1, 7))
def test_a_start_that_is_cancelled_leaves_no_server(num_turns: int) -> None:
    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as drawn:
            address = f"127.0.0.1:{drawn.getsockname()[1]}"
        server = GrpcServer(address, {})
        starting = asyncio.create_task(server.start())
        for _ in range(num_turns):  # of the loop, in which it comes so far
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await server.stop(0.0)
        assert_free(address)

    asyncio.run(run())


def assert_free(address: str) -> None:
    host, _, port = address.rpartition(":")

    def is_free() -> bool:
        with contextlib.suppress(OSError), socket.create_server((host, int(port))):
            return True
        return False

    wait_until(is_free, 10.0)  # a thread of gRPC's closes it


def test_two_transports_are_two_connections() -> None:
    peers: set[str] = set()

    async def note(call: IncomingCall) -> Reply:
        peers.add(call.peer)
        return Reply(b"")

    async def claim(address: str) -> None:
        control, data = GrpcTransport(address), GrpcTransport(address)
        for transport in (control, data, control, data):
            await transport.call("note", b"", deadline_s=DEADLINE_S)
        await control.close()
        await data.close()

    serving({"note": note}, claim)
    assert len(peers) == 2


def test_a_server_and_its_callers_live_in_loops_of_their_own() -> None:
    def call_from_a_thread(address: str) -> int:
        async def run() -> int:
            transport = GrpcTransport(address)
            replies = [
                await transport.call(
                    "echo", b"", bytes(1 << 20), deadline_s=DEADLINE_S, max_reply_bytes=1 << 20
                )
                for _ in range(5)
            ]
            await transport.close()
            return sum(len(reply.payload) for reply in replies)

        return asyncio.run(run())

    async def claim(address: str) -> None:
        results = await asyncio.gather(
            *(asyncio.to_thread(call_from_a_thread, address) for _ in range(3))
        )
        assert results == [5 << 20] * 3

    serving({"echo": echo}, claim)
