"""What every transport does alike; `kinds` lists them."""

import asyncio
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from diloco.transport.contracts import Handlers, IncomingCall, Reply, Server, Transport
from diloco.transport.errors import (
    ConnectError,
    DeadlineExceeded,
    HandlerFailed,
    MessageTooLarge,
    PeerReset,
    TransportClosed,
)
from diloco.transport.framing import DEFAULT_CHUNK_BYTES, MAX_HEADER_BYTES
from diloco.transport.retry import RetryPolicy, retry
from tests.contract.kinds import KINDS, Kind

DEADLINE_S = 30.0


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Kind:
    return KINDS[request.param](tmp_path)


async def echo(call: IncomingCall) -> Reply:
    return Reply(call.header, await call.read_payload())


async def never(call: IncomingCall) -> Reply:
    await asyncio.sleep(1e6)
    return Reply(b"")


async def fail(call: IncomingCall) -> Reply:
    raise KeyError("no such lane")


@asynccontextmanager
async def pair(kind: Kind, handlers: Handlers) -> AsyncIterator[tuple[Server, Transport]]:
    server = kind.serve(handlers, "")
    await server.start()
    transport = kind.connect(server.address)
    try:
        yield server, transport
    finally:
        await transport.close()
        await server.stop(0.0)


def check(kind: Kind, handlers: Handlers, claim: Callable[[Transport], Awaitable[None]]) -> None:
    async def run() -> None:
        async with pair(kind, handlers) as (_, transport):
            await claim(transport)

    kind.run(run())


@pytest.mark.parametrize(
    "size",
    [0, 1, DEFAULT_CHUNK_BYTES - 1, DEFAULT_CHUNK_BYTES, DEFAULT_CHUNK_BYTES + 1, (5 << 20) + 3],
)
def test_every_size_comes_back_unchanged(kind: Kind, size: int) -> None:
    payload = random.Random(size).randbytes(size)

    async def claim(transport: Transport) -> None:
        reply = await transport.call(
            "echo", b"header", payload, deadline_s=DEADLINE_S, max_reply_bytes=size
        )
        assert reply.header == b"header"
        assert reply.payload == payload
        assert type(reply.payload) is bytearray  # writable: a tensor may lie on it

    check(kind, {"echo": echo}, claim)


def test_concurrent_calls_keep_apart(kind: Kind) -> None:
    async def claim(transport: Transport) -> None:
        payloads = [bytes([i]) * (i * 30_000) for i in range(24)]
        replies = await asyncio.gather(
            *(
                transport.call("echo", b"%d" % i, p, deadline_s=DEADLINE_S, max_reply_bytes=len(p))
                for i, p in enumerate(payloads)
            )
        )
        assert [reply.payload for reply in replies] == payloads
        assert [reply.header for reply in replies] == [b"%d" % i for i in range(24)]

    check(kind, {"echo": echo}, claim)


def test_the_handler_sees_the_call_before_its_payload(kind: Kind) -> None:
    seen: list[tuple[str, bytes, int]] = []

    async def look(call: IncomingCall) -> Reply:
        seen.append((call.method, call.header, call.payload_bytes))
        assert call.peer
        return Reply(b"", await call.read_payload())

    async def claim(transport: Transport) -> None:
        await transport.call("lane.look", b"h", bytes(7), deadline_s=DEADLINE_S, max_reply_bytes=7)

    check(kind, {"lane.look": look}, claim)
    assert seen == [("lane.look", b"h", 7)]


def test_a_payload_can_be_refused_unread(kind: Kind) -> None:
    async def refuse(call: IncomingCall) -> Reply:
        return Reply(b"too large: %d" % call.payload_bytes, bytes(3 << 20))

    async def claim(transport: Transport) -> None:
        for _ in range(5):
            reply = await transport.call(
                "refuse", b"", bytes(20 << 20), deadline_s=DEADLINE_S, max_reply_bytes=3 << 20
            )
            assert reply.header == b"too large: %d" % (20 << 20)
            assert len(reply.payload) == 3 << 20

    check(kind, {"refuse": refuse}, claim)


@pytest.mark.parametrize("size", [0, 100, 3 << 20])
def test_who_answers_hears_when_all_of_it_was_sent(kind: Kind, size: int) -> None:
    async def run() -> None:
        sent = asyncio.Event()

        async def give(call: IncomingCall) -> Reply:
            assert not sent.is_set()
            return Reply(b"", bytes(size), sent.set)

        async with pair(kind, {"give": give}) as (_, transport):
            await transport.call("give", b"", deadline_s=DEADLINE_S, max_reply_bytes=size)
            async with asyncio.timeout(DEADLINE_S):
                await sent.wait()

    kind.run(run())


def test_no_answer_within_the_deadline_is_deadline_exceeded(kind: Kind) -> None:
    async def claim(transport: Transport) -> None:
        with pytest.raises(DeadlineExceeded, match="never") as caught:
            await transport.call("never", b"", deadline_s=0.2)
        assert caught.value.is_retryable
        assert (caught.value.peer, caught.value.method) == (transport.peer, "never")

    check(kind, {"never": never}, claim)


def test_a_handler_is_cancelled_when_its_caller_is_gone(kind: Kind) -> None:
    async def run() -> None:
        came, gone = asyncio.Event(), asyncio.Event()

        async def wait(call: IncomingCall) -> Reply:
            came.set()
            try:
                await asyncio.sleep(1e6)
            finally:
                gone.set()
            return Reply(b"")

        async with pair(kind, {"wait": wait, "echo": echo}) as (_, transport):
            await transport.call("echo", b"connected by now", deadline_s=DEADLINE_S)
            while not came.is_set():  # on a busy machine a call may not come in time
                with pytest.raises(DeadlineExceeded):
                    await transport.call("wait", b"", deadline_s=0.2)
            await asyncio.wait_for(gone.wait(), DEADLINE_S)

            came.clear()
            gone.clear()
            while not came.is_set():
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.2):
                        await transport.call("wait", b"", deadline_s=DEADLINE_S)
            await asyncio.wait_for(gone.wait(), DEADLINE_S)

    kind.run(run())


def test_a_reply_over_the_allowed_size_is_refused(kind: Kind) -> None:
    async def claim(transport: Transport) -> None:
        for allowed in (0, 8):
            with pytest.raises(MessageTooLarge, match=f"9 bytes; {allowed} are allowed"):
                await transport.call(
                    "echo", b"", bytes(9), deadline_s=DEADLINE_S, max_reply_bytes=allowed
                )

    check(kind, {"echo": echo}, claim)


def test_headers_have_a_limit_in_both_directions(kind: Kind) -> None:
    async def shout(call: IncomingCall) -> Reply:
        return Reply(bytes(MAX_HEADER_BYTES + 1))

    async def claim(transport: Transport) -> None:
        header = bytes(MAX_HEADER_BYTES)
        assert (await transport.call("echo", header, deadline_s=DEADLINE_S)).header == header
        with pytest.raises(MessageTooLarge, match="header"):
            await transport.call("echo", header + b"!", deadline_s=DEADLINE_S)
        with pytest.raises(MessageTooLarge, match="header"):
            await transport.call("shout", b"", deadline_s=DEADLINE_S)

    check(kind, {"echo": echo, "shout": shout}, claim)


def test_what_a_handler_raises_reaches_the_caller_and_the_log(
    kind: Kind, caplog: pytest.LogCaptureFixture
) -> None:
    async def claim(transport: Transport) -> None:
        with pytest.raises(HandlerFailed, match="KeyError: 'no such lane'") as caught:
            await transport.call("fail", b"", bytes(3 << 20), deadline_s=DEADLINE_S)
        assert not caught.value.is_retryable
        assert (await transport.call("echo", b"still here", deadline_s=DEADLINE_S)).header

    check(kind, {"fail": fail, "echo": echo}, claim)
    assert re.search(r"handler failed method=(fail|payload.call)", caplog.text)


def test_a_handlers_own_failed_call_is_not_taken_for_this_one(kind: Kind) -> None:
    async def relay(call: IncomingCall) -> Reply:
        raise ConnectError("the coordinator is away")

    async def claim(transport: Transport) -> None:
        with pytest.raises(HandlerFailed, match="ConnectError: the coordinator is away"):
            await transport.call("relay", b"", deadline_s=DEADLINE_S)

    check(kind, {"relay": relay}, claim)


def test_an_unknown_method_is_handler_failed(kind: Kind) -> None:
    async def claim(transport: Transport) -> None:
        with pytest.raises(HandlerFailed, match=r"'nothing'.*'echo'"):
            await transport.call("nothing", b"", bytes(3 << 20), deadline_s=DEADLINE_S)

    check(kind, {"echo": echo}, claim)


def test_a_call_to_nobody_is_connect_error(kind: Kind) -> None:
    async def run() -> None:
        async with pair(kind, {"echo": echo}) as (server, _):
            address = server.address
        transport = kind.connect(address)
        with pytest.raises(ConnectError) as caught:
            await transport.call("echo", b"", deadline_s=DEADLINE_S)
        assert caught.value.is_retryable
        assert caught.value.peer == address
        await transport.close()

    kind.run(run())


def test_a_server_that_stops_resets_its_calls_and_a_new_one_is_found(kind: Kind) -> None:
    async def run() -> None:
        started = asyncio.Event()

        async def hold(call: IncomingCall) -> Reply:
            started.set()
            return await never(call)

        async with pair(kind, {"hold": hold}) as (server, transport):
            call = asyncio.create_task(transport.call("hold", b"", deadline_s=DEADLINE_S))
            await started.wait()
            await server.stop(0.0)
            # Over libp2p the news that the call was accepted may end with the server.
            with pytest.raises((PeerReset, ConnectError)) as caught:
                await call
            assert caught.value.is_retryable
            with pytest.raises(ConnectError):
                await transport.call("echo", b"", deadline_s=DEADLINE_S)

            again = kind.serve({"echo": echo}, server.address)
            await again.start()
            assert again.address == server.address
            reply = await retry(
                lambda: transport.call("echo", b"back", deadline_s=DEADLINE_S),
                RetryPolicy(budget_s=DEADLINE_S),
                random.Random(0),
            )
            assert reply.header == b"back"
            await again.stop(0.0)

    kind.run(run())


def test_a_stopping_server_lets_calls_finish_within_the_drain_timeout(kind: Kind) -> None:
    async def run() -> None:
        started, may_end = asyncio.Event(), asyncio.Event()

        async def hold(call: IncomingCall) -> Reply:
            started.set()
            await may_end.wait()
            return Reply(b"drained")

        async with pair(kind, {"hold": hold, "echo": echo}) as (server, transport):
            call = asyncio.create_task(transport.call("hold", b"", deadline_s=DEADLINE_S))
            await started.wait()
            stopping = asyncio.create_task(server.stop(DEADLINE_S))
            other = kind.connect(server.address)
            with pytest.raises(ConnectError):
                async with asyncio.timeout(DEADLINE_S):
                    while True:  # until the stop has begun, calls are still taken
                        await other.call("echo", b"", deadline_s=DEADLINE_S)
            await other.close()
            may_end.set()
            assert (await call).header == b"drained"
            await stopping
            await server.stop(0.0)

    kind.run(run())


def test_closing_ends_calls_in_flight_and_is_harmless_twice(kind: Kind) -> None:
    async def run() -> None:
        started = asyncio.Event()

        async def hold(call: IncomingCall) -> Reply:
            started.set()
            return await never(call)

        async with pair(kind, {"hold": hold}) as (_, transport):
            call = asyncio.create_task(transport.call("hold", b"", deadline_s=DEADLINE_S))
            await started.wait()
            await transport.close()
            await transport.close()
            with pytest.raises(TransportClosed) as caught:
                await call
            assert not caught.value.is_retryable
            with pytest.raises(TransportClosed):
                await transport.call("hold", b"", deadline_s=DEADLINE_S)

    kind.run(run())


def test_a_transport_that_never_called_can_be_closed(kind: Kind) -> None:
    async def claim(transport: Transport) -> None:
        assert isinstance(transport, Transport)
        await transport.close()

    check(kind, {}, claim)


def test_a_cancelled_call_is_cancelled_and_nothing_else(kind: Kind) -> None:
    async def claim(transport: Transport) -> None:
        call = asyncio.create_task(transport.call("never", b"", deadline_s=DEADLINE_S))
        await asyncio.sleep(0.1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await transport.call("echo", b"still here", deadline_s=DEADLINE_S)).header

    check(kind, {"never": never, "echo": echo}, claim)
