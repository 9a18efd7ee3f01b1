"""When payloads leave: on a virtual clock, so that every time is exact."""

from __future__ import annotations

import asyncio

import pytest

from diloco.transport.calls.loopback import run_virtual
from diloco.transport.framing import MAX_CHUNKS
from diloco.transport.shaping.pacing import (
    BULK_CHUNK_BYTES,
    BULK_PATIENCE_S,
    STUCK_S,
    WIRE_SHARE,
    Pacer,
)

RATE_BPS = 10e6
CHUNK = 10_000
CHUNK_S = 8 * CHUNK * WIRE_SHARE / RATE_BPS


async def send(pacer: Pacer, times: list[float], num_chunks: int, *, is_bulk: bool = False) -> None:
    with pacer.moving(is_bulk=is_bulk):
        for _ in range(num_chunks):
            await pacer.admit(CHUNK, is_bulk=is_bulk)
            times.append(asyncio.get_running_loop().time())


def test_all_payloads_of_a_process_share_one_rate() -> None:
    async def run() -> tuple[list[float], list[float]]:
        pacer = Pacer(RATE_BPS)
        first: list[float] = []
        second: list[float] = []
        await asyncio.gather(send(pacer, first, 50), send(pacer, second, 50))
        return first, second

    first, second = run_virtual(run())

    assert max(first[-1], second[-1]) == pytest.approx(99 * CHUNK_S)
    assert abs(first[-1] - second[-1]) < 2 * CHUNK_S  # in turn


def test_without_a_rate_payloads_of_rounds_never_wait() -> None:
    async def run() -> list[float]:
        times: list[float] = []
        await send(Pacer(), times, 1000)
        return times

    assert run_virtual(run()) == [0.0] * 1000


def test_a_pause_gives_no_burst() -> None:
    async def run() -> list[float]:
        pacer, times = Pacer(RATE_BPS), []
        await send(pacer, times, 1)
        await asyncio.sleep(60.0)
        await send(pacer, times, 3)
        return times

    _, *later = run_virtual(run())

    assert later == pytest.approx([60.0, 60.0 + CHUNK_S, 60.0 + 2 * CHUNK_S])


@pytest.mark.parametrize("rate_bps", [0.0, RATE_BPS], ids=["unpaced", "paced"])
def test_bulk_lets_rounds_go_first_and_is_not_kept_out_for_ever(rate_bps: float) -> None:
    bulk: list[float] = []
    ended: list[float] = []

    async def rounds(pacer: Pacer) -> None:
        with pacer.moving(is_bulk=False):
            for _ in range(1000):
                await pacer.admit(CHUNK, is_bulk=False)
                await asyncio.sleep(0.005)  # the link takes it
        ended.append(asyncio.get_running_loop().time())

    async def run() -> None:
        pacer = Pacer(rate_bps)
        sending = asyncio.create_task(rounds(pacer))
        await asyncio.sleep(0.001)
        await send(pacer, bulk, 200, is_bulk=True)
        await sending

    run_virtual(run())

    during = [time for time in bulk if time < ended[0]]
    assert len(during) == pytest.approx(ended[0] / BULK_PATIENCE_S, abs=1.5)
    assert bulk[-1] < ended[0] + 200 * CHUNK_S + 1


def test_many_bulk_payloads_take_no_more_from_rounds_than_one() -> None:
    async def run() -> tuple[list[float], list[float]]:
        pacer = Pacer(RATE_BPS)
        bulk: list[float] = []
        rounds: list[float] = []
        sending = [asyncio.create_task(send(pacer, rounds, 10_000)) for _ in range(4)]
        sending += [asyncio.create_task(send(pacer, bulk, 1000, is_bulk=True)) for _ in range(64)]
        await asyncio.sleep(10.0)
        for task in sending:
            task.cancel()
        return bulk, rounds

    bulk, rounds = run_virtual(run())

    assert len(bulk) == pytest.approx(10.0 / BULK_PATIENCE_S, abs=1)
    assert len(bulk) + len(rounds) == pytest.approx(10.0 / CHUNK_S, rel=0.01)


def test_a_round_that_is_stuck_holds_no_bulk_up() -> None:
    async def run() -> list[float]:
        pacer, times = Pacer(), []
        with pacer.moving(is_bulk=False):
            await pacer.admit(CHUNK, is_bulk=False)
            await asyncio.sleep(STUCK_S)
            await send(pacer, times, 20, is_bulk=True)
        return times

    assert run_virtual(run()) == [STUCK_S] * 20


def test_bulk_has_a_rate_of_its_own_and_never_slows_rounds() -> None:
    async def run() -> tuple[list[float], list[float]]:
        pacer = Pacer(RATE_BPS, RATE_BPS / 100)
        bulk: list[float] = []
        rounds: list[float] = []
        sending = asyncio.create_task(send(pacer, bulk, 3, is_bulk=True))
        await asyncio.sleep(0.001)
        await send(pacer, rounds, 100)
        await sending
        return bulk, rounds

    bulk, rounds = run_virtual(run())

    assert bulk == pytest.approx([0.0, 100 * CHUNK_S, 200 * CHUNK_S], abs=2 * CHUNK_S)
    assert rounds[-1] < 103 * CHUNK_S


def test_a_call_that_ends_gives_its_turn_away() -> None:
    async def run() -> list[float]:
        pacer, times, gone = Pacer(RATE_BPS), [], []
        await send(pacer, times, 1)
        ended = asyncio.create_task(send(pacer, gone, 1))
        follower = asyncio.create_task(send(pacer, times, 1))
        await asyncio.sleep(0)
        ended.cancel()
        await follower
        assert not gone
        return times

    assert run_virtual(run()) == pytest.approx([0.0, CHUNK_S])


def test_chunks_are_short_on_thin_links() -> None:
    large = 8 << 20
    assert Pacer().chunk_bytes(1 << 20, large, is_bulk=False) == 1 << 20
    assert Pacer().chunk_bytes(1 << 20, large, is_bulk=True) == BULK_CHUNK_BYTES
    assert Pacer(10e6).chunk_bytes(1 << 20, large, is_bulk=False) == 12_500
    assert Pacer(1e9).chunk_bytes(1 << 20, large, is_bulk=False) == 1 << 20
    assert Pacer(1e3).chunk_bytes(1 << 20, large, is_bulk=False) == 4096
    assert Pacer(1e3).chunk_bytes(7, large, is_bulk=False) == 7
    whole_model = MAX_CHUNKS * 10_000 + 1  # a payload has a bounded number of chunks
    assert Pacer(1e3).chunk_bytes(1 << 20, whole_model, is_bulk=True) == 10_001
