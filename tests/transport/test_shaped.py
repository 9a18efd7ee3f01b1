import asyncio
from collections.abc import Awaitable, Callable

import pytest

from diloco.transport.calls.loopback import LoopbackNetwork, run_virtual
from diloco.transport.contracts import IncomingCall, Reply
from diloco.transport.errors import DeadlineExceeded, MessageTooLarge, TransportClosed
from diloco.transport.shaping.link import Link, LinkQueue
from diloco.transport.shaping.shaped import TURN_BYTES, ShapedTransport

THIN = Link(bandwidth_bps=5e6, delay_s=0.03)
Claim = Callable[[ShapedTransport, ShapedTransport], Awaitable[None]]


async def answer(call: IncomingCall) -> Reply:
    """Reply with as many bytes as the header says."""
    await call.read_payload()
    return Reply(b"", bytes(int(call.header or b"0")))


async def think(call: IncomingCall) -> Reply:
    await asyncio.sleep(0.5)
    return Reply(b"")


def over_one_link(claim: Claim) -> tuple[LinkQueue, LinkQueue]:
    """Run `claim` with two transports that share an up and a down link."""
    up, down = LinkQueue(THIN, seed=1), LinkQueue(THIN, seed=2)

    async def run() -> None:
        network = LoopbackNetwork()
        await network.server("hub", {"answer": answer, "think": think}).start()
        await claim(*(ShapedTransport(network.connect("hub"), up, down) for _ in range(2)))

    run_virtual(run())
    return up, down


async def timed(call: Awaitable[Reply]) -> float:
    loop = asyncio.get_running_loop()
    started = loop.time()
    await call
    return loop.time() - started


@pytest.mark.parametrize(
    ("header", "request_bytes", "expected_s"),
    [
        (b"", 0, 0.06),
        (b"", 1, 0.06 + 8 / 5e6),
        (b"", TURN_BYTES, 0.06 + 8 * TURN_BYTES / 5e6),
        (b"", TURN_BYTES + 1, 0.06 + 8 * (TURN_BYTES + 1) / 5e6),
        (b"", 1_000_000, 1.6 + 0.06),
        (b"1000000", 0, 7 * 8 / 5e6 + 1.6 + 0.06),
        (b"0500000", 1_000_000, 7 * 8 / 5e6 + 1.6 + 0.8 + 0.06),
    ],
    ids=["empty", "one byte", "one turn", "one more", "1 MB up", "1 MB down", "both"],
)
def test_a_call_takes_exactly_its_bytes_and_the_round_trip(
    header: bytes, request_bytes: int, expected_s: float
) -> None:
    async def claim(transport: ShapedTransport, _: ShapedTransport) -> None:
        took_s = await timed(
            transport.call(
                "answer", header, bytes(request_bytes), deadline_s=60, max_reply_bytes=1_000_000
            )
        )
        assert took_s == pytest.approx(expected_s, abs=1e-9)

    up, down = over_one_link(claim)

    assert up.carried_bytes == len(header) + request_bytes
    assert down.carried_bytes == int(header or b"0")


def test_calls_that_share_a_link_take_turns() -> None:
    async def claim(data: ShapedTransport, control: ShapedTransport) -> None:
        long, other, short = await asyncio.gather(
            timed(data.call("answer", b"", bytes(16 * TURN_BYTES), deadline_s=60)),
            timed(data.call("answer", b"", bytes(16 * TURN_BYTES), deadline_s=60)),
            timed(control.call("answer", b"", bytes(8), deadline_s=60)),
        )
        turn_s = 8 * TURN_BYTES / 5e6
        tiny_s = 8 * 8 / 5e6
        assert short == pytest.approx(2 * turn_s + tiny_s + 0.06)
        assert long == pytest.approx(31 * turn_s + tiny_s + 0.06)
        assert other == pytest.approx(32 * turn_s + tiny_s + 0.06)

    up, _ = over_one_link(claim)
    assert up.carried_bytes == 32 * TURN_BYTES + 8


def test_a_wait_at_the_peer_keeps_no_link_busy() -> None:
    async def claim(data: ShapedTransport, control: ShapedTransport) -> None:
        waiting = asyncio.create_task(timed(control.call("think", b"", deadline_s=60)))
        assert await timed(data.call("answer", b"", deadline_s=60)) == pytest.approx(0.06)
        assert await waiting == pytest.approx(0.56)

    over_one_link(claim)


@pytest.mark.parametrize(
    ("method", "request_bytes", "reply_bytes"),
    [("answer", 1_000_000, 0), ("think", 0, 0), ("answer", 0, 1_000_000)],
    ids=["on the way up", "at the peer", "on the way down"],
)
def test_the_deadline_covers_every_part(method: str, request_bytes: int, reply_bytes: int) -> None:
    async def claim(transport: ShapedTransport, _: ShapedTransport) -> None:
        loop = asyncio.get_running_loop()
        with pytest.raises(DeadlineExceeded, match=method):
            await transport.call(
                method, b"%d" % reply_bytes, bytes(request_bytes),
                deadline_s=0.4, max_reply_bytes=reply_bytes,
            )  # fmt: skip
        assert loop.time() == pytest.approx(0.4)

    over_one_link(claim)


def test_a_reply_that_is_too_large_does_not_cross() -> None:
    async def claim(transport: ShapedTransport, _: ShapedTransport) -> None:
        with pytest.raises(MessageTooLarge):
            await transport.call("answer", b"100", deadline_s=60, max_reply_bytes=99)

    _, down = over_one_link(claim)
    assert down.carried_bytes == 0


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.2, 0.56])
def test_closing_ends_a_call_wherever_it_is(after_s: float) -> None:
    async def claim(transport: ShapedTransport, _: ShapedTransport) -> None:
        loop = asyncio.get_running_loop()
        call = asyncio.create_task(transport.call("think", bytes(10), bytes(10_000), deadline_s=60))
        await asyncio.sleep(after_s)
        await transport.close()
        with pytest.raises(TransportClosed, match="think"):
            await call
        assert loop.time() == after_s

    over_one_link(claim)


def test_closing_at_the_moment_of_a_deadline_is_harmless() -> None:
    async def claim(transport: ShapedTransport, _: ShapedTransport) -> None:
        call = asyncio.create_task(transport.call("think", b"", deadline_s=0.25))
        await asyncio.sleep(0.25)
        await transport.close()
        with pytest.raises((TransportClosed, DeadlineExceeded)):
            await call

    over_one_link(claim)


def test_buffers_are_counted_in_bytes() -> None:
    async def claim(transport: ShapedTransport, _: ShapedTransport) -> None:
        await transport.call("answer", b"", memoryview(bytes(800)).cast("d"), deadline_s=60)

    up, _ = over_one_link(claim)
    assert up.carried_bytes == 800
