"""Many lanes at once over a thin line, or one that breaks: each comes, and little is sent twice."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest
from google.protobuf.wrappers_pb2 import Int64Value

from diloco.island.exchange.damage import LineDamage
from diloco.island.exchange.retried_calls import RetriedCalls, SyncerReach
from diloco.transport.calls.limits import Limits
from diloco.transport.contracts import IncomingCall, Reply
from diloco.transport.deadlines import STILL
from diloco.transport.errors import DeadlineExceeded
from diloco.transport.framing import WHOLE_BYTES
from diloco.transport.grpc.client import GrpcTransport
from diloco.transport.grpc.server import GrpcServer
from diloco.transport.retry import RetryPolicy
from diloco.transport.shaping import turns
from diloco.transport.shaping.line import ShapedLine
from diloco.transport.tcp_counters import can_count
from diloco.transport.transfer import Transfer

WAYS = pytest.mark.parametrize("is_up", [True, False], ids=["up", "down"])


async def carry(
    num_lanes: int,
    lane_bytes: int,
    rate_bps: float,
    limits: Limits,
    *,
    is_up: bool,
    cuts: Sequence[int] = (),
    num_ranks: int = 1,
) -> tuple[int, float, int]:
    """Move lanes.

    Returns:
        How many came whole, bytes that crossed by bytes of the lanes, and the most that were under
        way at once.
    """
    lane = random.Random(0).randbytes(lane_bytes)

    under_way = most = 0

    def count(by: int) -> None:
        nonlocal under_way, most
        under_way += by
        most = max(most, under_way)

    async def take(call: IncomingCall) -> Reply:
        count(1)
        try:
            return Reply(b"whole" if await call.read_payload() == lane else b"")
        finally:
            count(-1)

    async def give(_: IncomingCall) -> Reply:
        count(1)
        return Reply(b"whole", lane, on_sent=lambda: count(-1), digest=b"d" * 32)

    server = GrpcServer("127.0.0.1:0", {"take": take, "give": give}, limits=limits)
    await server.start()
    port = int(server.address.rpartition(":")[2])
    way = {"cut_up" if is_up else "cut_down": cuts}
    async with ShapedLine(("127.0.0.1", port), rate_bps=rate_bps, **way) as line:
        ranks = [
            RetriedCalls(
                GrpcTransport(f"127.0.0.1:{line.port}"),
                GrpcTransport(f"127.0.0.1:{line.port}"),
                "east",
                rpc_deadline_s=60.0,
                policy=RetryPolicy(budget_s=600.0, max_wait_s=1.0),
                rng=random.Random(1),
                reach=SyncerReach(),
                damage=LineDamage("east", lambda _: None),
            )
            for _ in range(num_ranks)
        ]

        async def move(number: int) -> bool:
            calls = ranks[number % num_ranks]
            if is_up:
                return (await calls.data("take", Int64Value(value=number), lane)).header == b"whole"
            asked = Int64Value(value=number)
            return (await calls.data("give", asked, max_reply_bytes=lane_bytes)).payload == lane

        came = await asyncio.gather(*map(move, range(num_lanes)))
        for calls in ranks:
            await calls.close()
        assert bool(line.num_cuts) == bool(cuts)
        moved = line.up.num_bytes if is_up else line.down.num_bytes
    await server.stop(0)
    return sum(came), moved / (num_lanes * lane_bytes), most


@pytest.mark.parametrize(
    "is_up", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["up", "down"]
)
def test_lanes_share_a_thin_line_in_turns(is_up: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "START_BYTES", 1 << 20)
    monkeypatch.setattr(turns, "MOVE_S", 0.5)
    limits = Limits(silence_s=10.0)
    came, share, most = asyncio.run(carry(24, 300 << 10, 32e6, limits, is_up=is_up))
    assert came == 24
    assert share < 1.05
    assert most <= 16  # 6 by the rate; more at the begin, where buffers swallow some at once


@pytest.mark.slow
@pytest.mark.timeout(900)
@WAYS
@pytest.mark.parametrize(
    ("mbps", "num_lanes", "size_kib"),
    [(1, 16, 1280), (1, 128, 160), (2, 128, 300), (5, 64, 1536), (5, 128, 400), (10, 128, 400)],
)
def test_all_lanes_come_over_a_thin_line(
    mbps: int, num_lanes: int, size_kib: int, is_up: bool
) -> None:
    size = size_kib << 10
    came, share, _ = asyncio.run(carry(num_lanes, size, mbps * 1e6, Limits(), is_up=is_up))
    assert came == num_lanes
    assert share < 1.2


@pytest.mark.slow
@pytest.mark.timeout(900)
@WAYS
def test_lanes_of_16_ranks_that_share_a_thin_line_come(is_up: bool) -> None:
    come = carry(16, 1280 << 10, 2e6, Limits(), is_up=is_up, num_ranks=16)
    came, share, _ = asyncio.run(come)
    assert came == 16
    assert share < 1.2


@WAYS
def test_lanes_larger_than_what_is_kept_come_over_a_line_that_breaks(is_up: bool) -> None:
    """As those of a joiner, or of an island: however many share a line, none begins at 0 for ever.

    A cut leaves each of four at a fifth of a lane.
    """
    limits, size = Limits(kept_bytes=1 << 19), 1 << 20
    cuts = [3 << 18] * 1000
    came, _, _ = asyncio.run(carry(4, size, 200e6, limits, is_up=is_up, cuts=cuts))
    assert came == 4


def test_a_call_may_take_longer_than_its_deadline_while_it_moves_and_not_when_it_is_dead() -> None:
    deadline_s = 1.0

    async def run() -> None:
        payload = random.Random(1).randbytes(1 << 20)

        async def give(_: IncomingCall) -> Reply:
            return Reply(b"", payload)

        server = GrpcServer("127.0.0.1:0", {"give": give}, chunk_bytes=64 << 10)
        await server.start()
        port = int(server.address.rpartition(":")[2])
        loop = asyncio.get_running_loop()
        async with ShapedLine(("127.0.0.1", port), rate_bps=6e6) as line:
            transport = GrpcTransport(f"127.0.0.1:{line.port}")
            began = loop.time()

            async def call() -> Reply:
                return await transport.call(
                    "give",
                    b"",
                    deadline_s=deadline_s,
                    max_reply_bytes=len(payload),
                    transfer=Transfer(),
                )

            assert (await call()).payload == payload
            assert loop.time() - began > deadline_s
            line.silence()
            with pytest.raises(DeadlineExceeded, match=f"no answer within {deadline_s:g} s"):
                await call()
            await transport.close()
        await server.stop(0)

    asyncio.run(run())


@pytest.mark.parametrize(
    "is_up", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["up", "down"]
)
@pytest.mark.skipif(not can_count(), reason="what a line moves is counted by Linux")
def test_a_payload_of_one_message_may_take_longer_than_its_deadline_while_the_line_moves(
    is_up: bool,
) -> None:
    """Nothing of it is whole before all of it is; a line that is dead is found out as ever."""
    deadline_s, payload = 0.75, bytes(WHOLE_BYTES)

    async def run() -> None:
        async def take(call: IncomingCall) -> Reply:
            return Reply(b"%d" % len(await call.read_payload()), b"" if is_up else payload)

        server = GrpcServer("127.0.0.1:0", {"take": take})
        await server.start()
        port = int(server.address.rpartition(":")[2])
        loop = asyncio.get_running_loop()
        async with ShapedLine(("127.0.0.1", port), rate_bps=2.4e6) as line:
            transport = GrpcTransport(f"127.0.0.1:{line.port}")
            began = loop.time()

            async def call() -> Reply:
                return await transport.call(
                    "take",
                    b"",
                    payload if is_up else b"",
                    deadline_s=deadline_s,
                    max_reply_bytes=0 if is_up else len(payload),
                    transfer=Transfer(),
                )

            reply = await call()
            assert (reply.header, len(reply.payload)) == (
                (b"%d" % len(payload), 0) if is_up else (b"0", len(payload))
            )
            assert loop.time() - began > deadline_s
            line.silence()
            began = loop.time()
            with pytest.raises(DeadlineExceeded, match=f"no answer within {deadline_s:g} s"):
                await call()
            assert loop.time() - began < STILL * deadline_s
            await transport.close()
        await server.stop(0)

    asyncio.run(run())
