"""A merge that takes a minute: anyone who calls meanwhile is answered as if there were none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from diloco.launch.process.tensor_thread import syncer_workers
from diloco.protocol.rounds.orders import Orders
from diloco.protocol.rounds.terms import Roster, RoundKey
from diloco.protos import fragment_pb2 as wire
from diloco.syncer.merge import Merger
from diloco.syncer.worker import Workers
from diloco.transport.calls.loopback import run_virtual
from tests.raw_island import NUMEL, RawIsland, SlowWorker
from tests.virtual_run import Setting, VirtualRun

_T = TypeVar("_T")

MERGE_S, PIECE_S = 60.0, 0.05
FIRST, SECOND = RoundKey(0, 0, 0, 0), RoundKey(0, 1, 0, 0)
#: How long a real loop is waited for: far beyond any delay of a loaded machine.
PATIENCE_S = 60.0


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    """Three islands and two fragments; a quorum of two, 2 s of grace, leases of 10 s."""
    setting = Setting(
        {"v": [0.0] * NUMEL, "w": [0.0] * NUMEL},
        lambda *_: None,
        tmp_path,
        inner_steps=8,
        num_fragments=2,
        islands=("a", "b", "c"),
    ).on_arrival(total_tokens=0)
    return replace(setting, quorum=2, timing=setting.measured(grace_s=2.0))


class SlowMerges:
    """The worker of a fragment: a merge takes a minute, anything else a moment."""

    merging = 0

    def __init__(self) -> None:
        self._others = SlowWorker(PIECE_S)

    async def run(self, work: Callable[[], _T]) -> _T:
        began = SlowMerges.merging
        result: _T = await self._others.run(work)
        if SlowMerges.merging > began:
            await asyncio.sleep(MERGE_S)
        return result


@pytest.fixture(autouse=True)
def _merges_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    publish = Merger.publish

    def counted(*arguments: Any) -> Any:
        SlowMerges.merging += 1
        return publish(*arguments)

    monkeypatch.setattr(Merger, "publish", counted)


def slow_merges(*, check_s: float = PIECE_S) -> Workers:
    notes, checks, reads, pins, transfers = (SlowWorker(PIECE_S) for _ in range(5))
    checks.before_s = check_s
    return Workers(SlowMerges, notes, checks, reads, pins, transfers)


async def begun(setting: Setting, workers: Workers) -> tuple[VirtualRun, list[RawIsland]]:
    """A run whose first rounds are open, both at once, to all three."""
    run = VirtualRun(setting)
    run.workers = workers
    await run.start_syncer()
    islands = [RawIsland(run, name) for name in "abc"]
    for island in islands:
        await island.poll(step_s=0.01)
    for fragment_id in (0, 1):
        assert all(ack.is_accepted for ack in await islands[0].upload(0.0, fragment_id))
    await until(lambda: all(state.is_open for state in run.syncer.states))
    return run, islands


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S + MERGE_S):
        while not is_so():
            await asyncio.sleep(0.01)


async def everything(run: VirtualRun, a: RawIsland) -> None:
    """What may be called while fragment 0 merges; c starts again, and sends to fragment 1."""
    again = RawIsland(run, "c", 2)
    await again.poll(step_s=0.01)
    for lane_id in range(2):
        reply = await again.submit(SECOND, lane_id)
        assert reply.status == wire.SUBMIT_STATUS_RECEIVED
    await a.poll(step_s=0.01)
    assert await a.published(0) == [0.0, 0.0]
    run.syncer.keep_cut(4, [0, 0])
    await until(lambda: run.syncer.pinned_cut == 4)


def test_during_a_merge_of_a_minute_no_call_takes_longer_and_no_lease_lapses(
    setting: Setting,
) -> None:
    longest: dict[str, float] = {}

    async def timed(name: str, call: Awaitable[_T]) -> _T:
        loop = asyncio.get_running_loop()
        began = loop.time()
        result = await call
        longest[name] = max(longest.get(name, 0.0), loop.time() - began)
        return result

    async def scenario() -> None:
        run, (a, b, c) = await begun(setting, slow_merges())
        for island in (a, b, c):
            await island.contribute(FIRST)
        await until(lambda: run.syncer.phase(0) == "closing")
        loop = asyncio.get_running_loop()
        began = loop.time()

        async def renew(island: RawIsland) -> None:
            while run.syncer.states[0].version == 0:
                await timed("poll", island.poll(step_s=0.01))
                assert run.syncer._admission.roster.live == ("a", "b", "c")
                await asyncio.sleep(0.5)

        again = RawIsland(run, "c", 2)
        await timed("join", again.poll(step_s=0.01))
        renewing = [asyncio.create_task(renew(island)) for island in (a, b, again)]
        for island in (a, b):
            for lane_id in range(2):
                await timed("lane", island.submit(SECOND, lane_id))
        await asyncio.sleep(1.5)
        for lane_id in range(2):
            await timed("late lane", again.submit(SECOND, lane_id))
        await timed("fetch", a.published(0))
        run.syncer.set_orders(Orders(Roster(("a", "b", "c"), min_islands=2)))
        await asyncio.sleep(0.2)
        assert run.orders.saved.roster is not None, "orders are durable at once"
        await asyncio.gather(*renewing)
        assert loop.time() - began > MERGE_S - 1.0
        await until(lambda: run.syncer.states[1].version == 1)

        assert list(run.syncer.states[1].contributors) == ["a", "b", "c"]

    run_virtual(scenario())

    assert set(longest) == {"poll", "join", "lane", "late lane", "fetch"}
    assert max(longest.values()) <= 0.1, longest


def test_what_came_whole_in_the_grace_window_counts_though_its_verification_takes_long(
    setting: Setting,
) -> None:
    async def scenario() -> None:
        run, (a, b, c) = await begun(replace(setting, lease_s=60.0), slow_merges(check_s=5.0))

        await asyncio.gather(*(island.contribute(FIRST) for island in (a, b, c)))
        await until(lambda: run.syncer.states[0].version == 1)

        assert list(run.syncer.states[0].contributors) == ["a", "b", "c"], "5 s each, one by one"

    run_virtual(scenario())


@pytest.mark.parametrize(("merges_at_once", "takes_s"), [(1, 2 * MERGE_S), (2, MERGE_S)])
def test_fragments_merge_at_once_where_there_are_cores_for_it(
    setting: Setting, merges_at_once: int, takes_s: float
) -> None:
    async def scenario() -> None:
        run, islands = await begun(replace(setting, merges_at_once=merges_at_once), slow_merges())
        for key in (FIRST, SECOND):
            for island in islands:
                await island.contribute(key)
        began = asyncio.get_running_loop().time()

        await until(lambda: all(state.version == 1 for state in run.syncer.states))

        took_s = asyncio.get_running_loop().time() - began
        assert took_s == pytest.approx(takes_s, abs=2.0)

    run_virtual(scenario())


def test_every_call_is_answered_while_a_merge_holds_its_thread(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real threads: the merge ends once all calls have been answered, and not before."""
    publish, is_over = Merger.publish, threading.Event()

    def held(self: Merger, *arguments: Any) -> Any:
        if self.fragment.fragment_id == 0:
            assert is_over.wait(2 * PATIENCE_S)
        return publish(self, *arguments)

    async def scenario(workers: Workers) -> None:
        run, (a, b, c) = await begun(replace(setting, lease_s=PATIENCE_S), workers)
        for island in (a, b, c):
            await island.contribute(FIRST)
        await until(lambda: run.syncer.phase(0) == "closing")
        async with asyncio.timeout(PATIENCE_S):
            await everything(run, a)
            for island in (a, b):
                await island.contribute(SECOND)
        assert run.syncer.phase(0) == "closing"

        is_over.set()
        await until(lambda: all(state.version == 1 for state in run.syncer.states))
        await run.kill_syncer()

    monkeypatch.setattr(Merger, "publish", held)
    with syncer_workers(num_threads=1) as workers:
        try:
            asyncio.run(scenario(workers))
        finally:
            is_over.set()
