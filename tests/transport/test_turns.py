"""How many payloads are under way at once, and when a connection is silent: virtual clock."""

from __future__ import annotations

import asyncio

import pytest

from diloco.transport.calls.loopback import VirtualClockLoop, run_virtual
from diloco.transport.deadlines import STILL, Movement
from diloco.transport.framing import WHOLE_BYTES
from diloco.transport.shaping.turns import MOVE_S, START_BYTES, LineTurns, RateMeter, may_begin

MESSAGE = 1 << 20


@pytest.mark.parametrize(
    ("rate_bps", "most"),
    [(None, START_BYTES // MESSAGE), (1e5, 1), (1e6, 1), (1e7, 11), (1e9, 1192)],
)
def test_as_many_begin_as_can_move_a_message_in_time(rate_bps: float | None, most: int) -> None:
    num = 0
    while may_begin(MESSAGE, under_way=num, under_way_bytes=num * MESSAGE, rate_bps=rate_bps):
        num += 1
    assert num == most
    assert rate_bps is None or num == 1 or 8 * num * MESSAGE / rate_bps <= MOVE_S


def test_messages_whole_at_the_same_late_time_do_not_look_like_a_fast_line() -> None:
    meter = RateMeter()
    meter.change(0.0, 4)
    for _ in range(4):
        meter.moved(33.0, MESSAGE)
    assert meter.rate_bps(33.0) == pytest.approx(8 * 4 * MESSAGE / 33.0)


def test_idle_time_does_not_count() -> None:
    meter = RateMeter()
    for begin in (0.0, 1000.0):
        meter.change(begin, 1)
        for n in range(10):
            meter.moved(begin + n + 1.0, MESSAGE)
        meter.change(begin + 10.0, -1)
    assert meter.rate_bps(1010.0) == pytest.approx(8 * MESSAGE, rel=0.01)


def test_all_get_their_turn_in_order_and_who_gives_up_holds_up_nobody() -> None:
    async def run() -> list[int]:
        turns, order = LineTurns(MESSAGE), []

        async def call(number: int) -> None:
            async with turns.turn(4 * MESSAGE, 0, is_bulk=False) as under_way:
                order.append(number)
                under_way.sending.begin()
                for _ in range(4):
                    await asyncio.sleep(8.0)  # 1 Mbit/s
                    under_way.sending.moved(MESSAGE)

        tasks = [asyncio.create_task(call(n)) for n in range(12)]
        await asyncio.sleep(1.0)
        tasks[5].cancel()  # waits
        tasks[1].cancel()  # is under way
        await asyncio.gather(*tasks, return_exceptions=True)
        return order

    assert run_virtual(run()) == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]


def test_small_payloads_take_turns_and_do_not_wait_for_large_ones() -> None:
    async def run() -> int:
        turns, num_begun = LineTurns(MESSAGE), 0

        async def call(num_bytes: int) -> None:
            nonlocal num_begun
            async with turns.turn(0, num_bytes, is_bulk=False):
                num_begun += num_bytes == WHOLE_BYTES
                await asyncio.sleep(1e6)

        tasks = [asyncio.create_task(call(n)) for n in [MESSAGE] * 9 + [WHOLE_BYTES] * 99]
        await asyncio.sleep(1.0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return num_begun

    assert run_virtual(run()) == START_BYTES // WHOLE_BYTES


def test_a_stream_is_silent_when_its_connection_is_and_after_some_silences_of_its_own() -> None:
    async def silent_after(moves_s: list[float]) -> float:
        movement = Movement()
        loop = asyncio.get_running_loop()

        async def move() -> None:
            for pause_s in moves_s:
                await asyncio.sleep(pause_s)
                movement.at = loop.time()

        others, began = asyncio.create_task(move()), loop.time()
        with pytest.raises(TimeoutError):
            async with movement.within(10.0):
                await asyncio.sleep(1e6)
        others.cancel()
        return loop.time() - began

    async def run() -> list[float]:
        return [await silent_after(moves) for moves in ([], [6.0, 9.0], [5.0] * 100)]

    assert run_virtual(run()) == pytest.approx([10.0, 25.0, 10.0 * STILL])


def test_time_in_which_the_loop_had_no_turn_is_nobodys_silence() -> None:
    """As of a process that was suspended: what came meanwhile is read after it."""

    async def run() -> float:
        movement, loop = Movement(), asyncio.get_running_loop()
        assert isinstance(loop, VirtualClockLoop)

        async def pause() -> None:
            await asyncio.sleep(1.0)
            loop._jumping.now += 1000.0

        pausing, began = asyncio.create_task(pause()), loop.time()
        with pytest.raises(TimeoutError):
            async with movement.within(10.0):
                await asyncio.sleep(1e6)
        await pausing
        return loop.time() - began - 1000.0

    # Of the pause the rest of the time to the next look counts.
    assert 10.0 - 2.5 <= run_virtual(run()) <= 10.0


def test_bytes_that_cross_are_no_silence() -> None:
    async def run(num_moves: int) -> float:
        moves, loop = iter([True] * num_moves), asyncio.get_running_loop()
        movement, began = Movement(has_moved=lambda: next(moves, False)), loop.time()
        with pytest.raises(TimeoutError):
            async with movement.within(10.0) as moved:
                await asyncio.sleep(5.0)
                moved()
                await asyncio.sleep(1e6)
        return loop.time() - began

    silences = [run_virtual(run(num)) for num in (0, 1, 100)]
    assert silences == pytest.approx([15.0, 25.0, 5.0 + 10.0 * STILL])
