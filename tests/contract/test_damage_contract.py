"""What a line damages is asked for again: every transport that has bytes to damage."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from diloco.transport.addresses import split_address
from diloco.transport.contracts import Handlers, IncomingCall, Reply, Transport
from diloco.transport.errors import TransportError
from diloco.transport.libp2p.address import is_peer_address, parse_peer_address, tcp_port
from diloco.transport.retry import RetryPolicy, retry
from diloco.transport.shaping.line import ShapedLine
from diloco.transport.transfer import Transfer
from tests.contract.kinds import KINDS, Kind

#: A flip may leave a stream silent, as one of a frame's length: the attempt ends by its deadline.
DEADLINE_S = 1.0
PAYLOAD = random.Random(9).randbytes((1 << 20) + 300_077)
#: Of which zstandard leaves a quarter.
SHRINKING = PAYLOAD.translate(bytes(n & 3 for n in range(256)))


@pytest.fixture(params=["grpc", pytest.param("mtls", marks=pytest.mark.slow)])
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Kind:
    """Without hivemind, whose peers find a way around the line once its connection breaks."""
    return KINDS[request.param](tmp_path)


@asynccontextmanager
async def over_a_line(
    kind: Kind, handlers: Handlers, damage_every_bytes: float
) -> AsyncIterator[tuple[Transport, ShapedLine]]:
    server = kind.serve(handlers, "")
    await server.start()
    address, via = server.address, kind.via
    assert via is not None
    is_peer = is_peer_address(address)
    port = tcp_port(parse_peer_address(address)) if is_peer else split_address(address)[1]
    try:
        line = ShapedLine(("127.0.0.1", port), damage_every_bytes=damage_every_bytes)
        async with line:
            transport = kind.connect(via(address, line.port))
            try:
                yield transport, line
            finally:
                await transport.close()
    finally:
        await server.stop(0.0)


async def call(transport: Transport, method: str, payload: bytes, transfer: Transfer) -> Reply:
    async def attempt() -> Reply:
        return await transport.call(
            method,
            b"header",
            payload,
            deadline_s=DEADLINE_S,
            max_reply_bytes=len(PAYLOAD),
            transfer=transfer,
        )

    policy = RetryPolicy(budget_s=30.0, first_wait_s=0.01, max_wait_s=0.05)
    return await retry(
        attempt,
        policy,
        random.Random(0),
        lambda: transfer.moved_bytes,
        lambda: transfer.moved_bytes,
    )


@pytest.mark.parametrize(
    "payload",
    [PAYLOAD[:200_000], PAYLOAD, SHRINKING],
    ids=["one message", "chunks", "packed chunks"],
)
def test_a_flipped_bit_every_so_often_costs_time_and_nothing_else(
    kind: Kind, payload: bytes
) -> None:
    async def echo(call: IncomingCall) -> Reply:
        return Reply(call.header, await call.read_payload())

    async def run() -> None:
        async with over_a_line(kind, {"echo": echo}, 150_000.0) as (transport, line):
            while min(line.up.num_flips, line.down.num_flips) <= 3:
                transfer = Transfer()
                reply = await call(transport, "echo", payload, transfer)
                assert (reply.header, reply.payload) == (b"header", payload)

    kind.run(run())


def test_a_line_that_damages_everything_is_given_up_within_the_budget(tmp_path: Path) -> None:
    kind = KINDS["grpc"](tmp_path)
    policy = RetryPolicy(budget_s=1.0, max_wait_s=0.2)
    other = 0

    async def take(call: IncomingCall) -> Reply:
        await call.read_payload()
        return Reply(b"")

    def elsewhere() -> int:  # as if other calls over the same line went well all the time
        nonlocal other
        other += 1
        return other

    async def run() -> None:
        async with over_a_line(kind, {"take": take}, 3_000.0) as (transport, _):
            transfer = Transfer(asks_first=True)

            async def attempt() -> Reply:
                return await transport.call(
                    "take", b"", PAYLOAD, deadline_s=DEADLINE_S, transfer=transfer
                )

            with pytest.raises(TransportError, match="gave up after"):
                await retry(
                    attempt, policy, random.Random(0), elsewhere, lambda: transfer.moved_bytes
                )

    kind.run(run())
