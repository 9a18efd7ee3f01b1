"""What a call's payload costs its sender: turns of the pacer, and bytes that are counted."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Iterator

import pytest

from diloco.transport.calls.requesting import Request
from diloco.transport.contracts import IncomingCall, Reply
from diloco.transport.errors import ConnectError
from diloco.transport.framing import WHOLE_BYTES
from diloco.transport.grpc.client import GrpcTransport
from diloco.transport.grpc.server import GrpcServer
from diloco.transport.shaping.pacing import Pacer
from diloco.transport.shaping.packing import Packers
from diloco.transport.shaping.turns import LineTurns
from diloco.transport.transfer import Transfer

DEADLINE_S = 30.0
SIZES = pytest.mark.parametrize("size", [WHOLE_BYTES, WHOLE_BYTES + 1], ids=["whole", "chunks"])


class CountingPacer(Pacer):
    """Knows what it has let leave, and whether a round's payload moves."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[int] = []

    @property
    def is_moving(self) -> bool:
        return self._num_moving > 0

    async def admit(self, num_bytes: int, *, is_bulk: bool) -> None:
        self.left.append(num_bytes)
        await super().admit(num_bytes, is_bulk=is_bulk)


@pytest.fixture
def dead() -> Iterator[str]:
    """Give an address at which nobody listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{unused.getsockname()[1]}"


@SIZES
def test_a_payload_that_never_left_is_not_counted(size: int, dead: str) -> None:
    async def run() -> None:
        transport, transfer = GrpcTransport(dead), Transfer()
        for _ in range(3):
            with pytest.raises(ConnectError):
                await transport.call(
                    "take", b"", bytes(size), deadline_s=DEADLINE_S, transfer=transfer
                )
        await transport.close()
        assert transfer.sent_bytes == 0

    asyncio.run(run())


@SIZES
def test_a_payload_is_paced_and_counted_once_whatever_addresses_fail(size: int, dead: str) -> None:
    async def take(call: IncomingCall) -> Reply:
        return Reply(b"%d" % len(await call.read_payload()))

    async def run() -> None:
        server, pacer, transfer = (
            GrpcServer("127.0.0.1:0", {"take": take}),
            CountingPacer(),
            Transfer(),
        )
        await server.start()
        transport = GrpcTransport(f"{dead},{server.address}", pacer=pacer)
        payload = random.Random(size).randbytes(size)
        reply = await transport.call("take", b"", payload, deadline_s=DEADLINE_S, transfer=transfer)
        assert reply.header == b"%d" % size
        assert sum(pacer.left) in (size, size + 9), "the payload, or the message of its only chunk"
        assert transfer.sent_bytes == size
        assert not pacer.is_moving
        await transport.close()
        await server.stop(0.0)

    asyncio.run(run())


@pytest.mark.parametrize("is_bulk", [False, True], ids=["round", "bulk"])
def test_bulk_waits_until_the_whole_payload_of_a_round_is_written(is_bulk: bool) -> None:
    async def run() -> None:
        pacer = CountingPacer()
        request = Request(
            b"",
            bytes(1000),
            Transfer(is_bulk=is_bulk),
            max_reply_bytes=0,
            chunk_bytes=1 << 20,
            packer=Packers(pacer).of("", ""),
            under_way=LineTurns(1 << 20).call(1000, 0, is_bulk=is_bulk),
        )
        messages = request.messages()
        await anext(messages)
        assert pacer.is_moving == (not is_bulk), "its only message is being written"
        with pytest.raises(StopAsyncIteration):
            await anext(messages)
        assert not pacer.is_moving
        await request.whole()
        assert pacer.is_moving == (not is_bulk)
        request.close()
        assert not pacer.is_moving

    asyncio.run(run())
