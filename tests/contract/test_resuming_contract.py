"""A call that breaks goes on where it broke: every transport that has a connection to break."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from diloco.syncer.spool import Spool
from diloco.transport.addresses import split_address
from diloco.transport.contracts import Handlers, IncomingCall, Reply, Server, Transport
from diloco.transport.errors import HandlerFailed, NotYet, PeerReset
from diloco.transport.framing import DEFAULT_CHUNK_BYTES
from diloco.transport.libp2p.address import is_peer_address, parse_peer_address, tcp_port
from diloco.transport.retry import RetryPolicy, retry
from diloco.transport.shaping.line import ShapedLine
from diloco.transport.transfer import Transfer
from tests.contract.kinds import KINDS, Kind

DEADLINE_S = 30.0
SIZE = (6 << 20) + 12_345
PAYLOAD = random.Random(4).randbytes(SIZE)
#: Of which zstandard leaves a quarter.
SHRINKING = random.Random(5).randbytes(SIZE).translate(bytes(n & 3 for n in range(256)))
#: What may be sent twice at a cut: the chunk that was under way, and one that was not read yet.
AGAIN = 2 * DEFAULT_CHUNK_BYTES
#: Handshakes and frames around a payload of this size.
AROUND = SIZE // 20


@pytest.fixture(params=["grpc", "mtls", "hivemind"])
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Kind:
    return KINDS[request.param](tmp_path)


@pytest.fixture(params=["grpc", pytest.param("hivemind", marks=pytest.mark.slow)])
def either_kind(request: pytest.FixtureRequest, tmp_path: Path) -> Kind:
    """One of each wire: TLS changes nothing here."""
    return KINDS[request.param](tmp_path)


def cuts_of(kind: Kind) -> tuple[int, ...]:
    """Bytes after which to cut: thrice, or once a connection that the proxy does not see again."""
    return (4_500_000,) if kind.goes_around else (1_500_000, 2_000_000, 1_200_000)


class Ends:
    """A server, the line before it, and a way through."""

    def __init__(self, server: Server, line: ShapedLine, transport: Transport) -> None:
        self.server, self.line, self.transport = server, line, transport

    async def call(
        self, method: str, payload: bytes = b"", transfer: Transfer | None = None
    ) -> tuple[Reply, Transfer, int]:
        """Call until it is answered; also says how many attempts it took."""
        kept = transfer or Transfer()
        num_attempts = 0

        async def attempt() -> Reply:
            nonlocal num_attempts
            num_attempts += 1
            return await self.transport.call(
                method,
                b"header",
                payload,
                deadline_s=DEADLINE_S,
                max_reply_bytes=SIZE,
                transfer=kept,
            )

        policy = RetryPolicy(budget_s=DEADLINE_S, max_wait_s=0.5)
        reply = await retry(attempt, policy, random.Random(0), lambda: kept.moved_bytes)
        return reply, kept, num_attempts


@asynccontextmanager
async def ends(
    kind: Kind, handlers: Handlers, *, up: tuple[int, ...] = (), down: tuple[int, ...] = ()
) -> AsyncIterator[Ends]:
    server = kind.serve(handlers, "")
    await server.start()
    address = server.address
    is_peer = is_peer_address(address)
    port = tcp_port(parse_peer_address(address)) if is_peer else split_address(address)[1]
    try:
        # At a rate at which what has passed before a cut has also been read.
        async with ShapedLine(
            ("127.0.0.1", port), rate_bps=128e6, cut_up=up, cut_down=down
        ) as line:
            assert kind.via is not None
            transport = kind.connect(kind.via(address, line.port))
            try:
                yield Ends(server, line, transport)
            finally:
                await transport.close()
    finally:
        await server.stop(0.0)


def test_a_payload_goes_on_where_its_connection_broke(kind: Kind) -> None:
    received: list[bytes] = []

    async def take(call: IncomingCall) -> Reply:
        received.append(bytes(await call.read_payload()))
        return Reply(b"taken")

    async def run() -> None:
        cuts = cuts_of(kind)
        async with ends(kind, {"take": take}, up=cuts) as there:
            reply, transfer, num_attempts = await there.call("take", PAYLOAD)
            assert reply.header == b"taken"
            assert received == [PAYLOAD]
            assert there.line.num_cuts == len(cuts)
            assert num_attempts > len(cuts)
            assert there.line.up.num_bytes < SIZE + AROUND + len(cuts) * AGAIN
            if kind.goes_around:
                # All may have been in buffers when the first attempt broke; the second began late.
                assert transfer.sent_bytes < 2 * SIZE - (1 << 20)
            assert transfer.acknowledged_bytes == SIZE

    kind.run(run())


def test_a_reply_goes_on_where_its_connection_broke_and_is_made_once(kind: Kind) -> None:
    num_made = 0

    async def give(call: IncomingCall) -> Reply:
        nonlocal num_made
        num_made += 1
        return Reply(b"%d" % num_made, PAYLOAD)

    async def run() -> None:
        cuts = cuts_of(kind)
        async with ends(kind, {"give": give}, down=cuts) as there:
            reply, transfer, _ = await there.call("give")
            assert (reply.header, reply.payload, num_made) == (b"1", PAYLOAD, 1)
            assert there.line.num_cuts == len(cuts)
            assert there.line.down.num_bytes < SIZE + AROUND + len(cuts) * AGAIN
            assert transfer.received_bytes == SIZE  # what has arrived is never asked for again
            table = there.server._transfers  # type: ignore[attr-defined]
            async with asyncio.timeout(DEADLINE_S):
                while not table.num_idle:  # the caller has its reply before the server has its end
                    await asyncio.sleep(0.01)
            assert [is_sent for _, is_sent in table._idle] == [True], "kept briefly"

    kind.run(run())


def test_both_directions_of_one_call_may_break(either_kind: Kind) -> None:
    async def echo(call: IncomingCall) -> Reply:
        return Reply(call.header, await call.read_payload())

    async def run() -> None:
        # What goes around the proxy after its first cut is cut once: on its way up.
        down = () if either_kind.goes_around else (3_000_000,)
        async with ends(either_kind, {"echo": echo}, up=(3_000_000,), down=down) as there:
            reply, _, _ = await there.call("echo", PAYLOAD)
            assert (reply.header, reply.payload) == (b"header", PAYLOAD)
            assert there.line.num_cuts == 1 + len(down)
            assert there.line.up.num_bytes < SIZE + 2 * AROUND + AGAIN
            assert there.line.down.num_bytes < SIZE + 2 * AROUND + AGAIN

    either_kind.run(run())


def test_a_payload_and_its_reply_that_shrink_go_on_where_their_chunks_broke(kind: Kind) -> None:
    """Their connections break in the middle of what was packed; positions count what was not."""

    async def echo(call: IncomingCall) -> Reply:
        return Reply(call.header, await call.read_payload())

    async def run() -> None:
        down = () if kind.goes_around else (600_000,)
        async with ends(kind, {"echo": echo}, up=(700_000,), down=down) as there:
            reply, transfer, _ = await there.call("echo", SHRINKING)
            assert (reply.header, reply.payload) == (b"header", SHRINKING)
            assert there.line.num_cuts == 1 + len(down)
            assert there.line.up.num_bytes < SIZE // 2
            assert there.line.down.num_bytes < SIZE // 2
            assert (transfer.acknowledged_bytes, transfer.received_bytes) == (SIZE, SIZE)

    kind.run(run())


def test_without_a_transfer_a_call_begins_again(either_kind: Kind) -> None:
    num_asked = 0

    async def echo(call: IncomingCall) -> Reply:
        nonlocal num_asked
        num_asked += 1
        return Reply(b"", await call.read_payload())

    async def run() -> None:
        async with ends(either_kind, {"echo": echo}, up=(2_000_000,)) as there:

            async def attempt() -> Reply:
                return await there.transport.call(
                    "echo", b"", PAYLOAD, deadline_s=DEADLINE_S, max_reply_bytes=SIZE
                )

            with pytest.raises(PeerReset):
                await attempt()
            before = there.line.up.num_bytes
            reply = await retry(attempt, RetryPolicy(budget_s=DEADLINE_S), random.Random(0))
            assert (reply.payload, num_asked) == (PAYLOAD, 2)
            assert there.server._transfers.num_idle == 0  # type: ignore[attr-defined]
            if not either_kind.goes_around:
                assert there.line.up.num_bytes - before >= SIZE

    either_kind.run(run())


@pytest.mark.parametrize("size", [0, 1000, 2_000_000], ids=["empty", "small", "chunks"])
def test_who_asks_first_sends_nothing_of_its_payload_before_its_turn(
    either_kind: Kind, size: int
) -> None:
    received: list[bytes] = []

    async def run() -> None:
        arrived, turn = asyncio.Event(), asyncio.Event()

        async def take(call: IncomingCall) -> Reply:
            arrived.set()
            assert (call.payload_bytes, call.has_asked) == (size, size > 0)
            await turn.wait()
            received.append(bytes(await call.read_payload()))
            return Reply(b"taken")

        async def ping(call: IncomingCall) -> Reply:
            return Reply(b"pong")

        async with ends(either_kind, {"take": take, "ping": ping}) as there:
            transfer = Transfer(asks_first=True)
            call = asyncio.create_task(there.call("take", PAYLOAD[:size], transfer))
            async with asyncio.timeout(DEADLINE_S):
                await arrived.wait()
            await there.call("ping")  # what is sent ahead would have left before
            assert transfer.sent_bytes == 0

            turn.set()
            reply, _, num_attempts = await call
            assert (reply.header, num_attempts) == (b"taken", 1)
            assert transfer.sent_bytes == transfer.acknowledged_bytes == size

    either_kind.run(run())
    assert received == [PAYLOAD[:size]]


def test_what_did_not_ask_is_refused_unread_by_a_spool_without_room(
    either_kind: Kind, tmp_path: Path
) -> None:
    """However many calls ignore what they were told, none of their payloads waits in the server."""
    asked: list[bool] = []

    async def run() -> None:
        spool = Spool(tmp_path, 1)

        async def take(call: IncomingCall) -> Reply:
            asked.append(call.has_asked)
            async with spool.arrival(len(asked), call.payload_bytes, has_asked=call.has_asked):
                return Reply(b"%d" % len(await call.read_payload()))

        server = either_kind.serve({"take": take}, "")
        await server.start()
        transport = either_kind.connect(server.address)

        async def ignore(num_bytes: int) -> None:
            with pytest.raises(NotYet):
                await transport.call("take", b"", bytes(num_bytes), deadline_s=DEADLINE_S)

        try:
            async with spool.arrival("all the room", 1 << 30, has_asked=True):
                await asyncio.gather(*(ignore(size) for size in [1000, 4_000_000] * 16))
            assert asked == [False] * 32
            reply = await transport.call("take", b"", bytes(4_000_000), deadline_s=DEADLINE_S)
            assert reply.header == b"4000000"
        finally:
            await transport.close()
            await server.stop(0.0)

    either_kind.run(run())


def test_an_answer_to_who_asked_and_was_refused_unread_is_kept_briefly(either_kind: Kind) -> None:
    async def refuse(call: IncomingCall) -> Reply:
        return Reply(b"no")

    async def run() -> None:
        async with ends(either_kind, {"refuse": refuse}) as there:
            reply, _, _ = await there.call("refuse", PAYLOAD, Transfer(asks_first=True))
            assert reply.header == b"no"
            table = there.server._transfers  # type: ignore[attr-defined]
            async with asyncio.timeout(DEADLINE_S):
                while not table.num_idle:
                    await asyncio.sleep(0.01)
            assert [is_sent for _, is_sent in table._idle] == [True]

    either_kind.run(run())


def test_a_server_that_has_forgotten_takes_it_from_the_start(either_kind: Kind) -> None:
    async def echo(call: IncomingCall) -> Reply:
        return Reply(b"", await call.read_payload())

    async def run() -> None:
        async with ends(either_kind, {"echo": echo}, up=(2_000_000,), down=()) as there:
            transfer = Transfer()
            with pytest.raises(PeerReset):
                await there.transport.call(
                    "echo",
                    b"header",
                    PAYLOAD,
                    deadline_s=DEADLINE_S,
                    max_reply_bytes=SIZE,
                    transfer=transfer,
                )
            await there.server.stop(0.0)
            again = either_kind.serve({"echo": echo}, there.server.address)
            await again.start()
            try:
                reply, _, _ = await there.call("echo", PAYLOAD, transfer)
                assert reply.payload == PAYLOAD
            finally:
                await again.stop(0.0)

    either_kind.run(run())


def test_a_refusal_of_a_resumed_call_is_heard_unread(either_kind: Kind) -> None:
    num_asked = 0

    async def refuse_later(call: IncomingCall) -> Reply:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 1:
            await call.read_payload()
        raise ValueError("closed by now")

    async def run() -> None:
        async with ends(either_kind, {"take": refuse_later}, up=(2_000_000,)) as there:
            with pytest.raises(HandlerFailed, match="closed by now"):
                await there.call("take", PAYLOAD)
            assert there.line.up.num_bytes < 2_000_000 + AROUND + AGAIN

    either_kind.run(run())


def test_attempts_of_one_call_at_once_do_no_harm(either_kind: Kind) -> None:
    """The first is taken for dead by its caller, and is not."""
    taken: list[bytes] = []

    async def take(call: IncomingCall) -> Reply:
        taken.append(bytes(await call.read_payload()))
        return Reply(b"taken")

    async def run() -> None:
        async with ends(either_kind, {"take": take}) as there:
            transfer = Transfer()
            first = asyncio.create_task(there.call("take", PAYLOAD, transfer))
            while there.line.up.num_bytes < 2_000_000:
                await asyncio.sleep(0.001)
            second = asyncio.create_task(there.call("take", PAYLOAD, transfer))
            (reply, _, _), _ = await asyncio.gather(second, first, return_exceptions=True)
            assert reply.header == b"taken"
            assert set(taken) == {PAYLOAD}

    either_kind.run(run())
