"""What a scheduled run does without an island that stays away: stop, wait, or go on without it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from diloco.protocol.rounds.orders import Orders
from diloco.protocol.rounds.terms import OutcomeKind, Roster, RoundKey
from diloco.transport.calls.loopback import run_virtual
from tests.raw_island import KEY, NUMEL, RawIsland, founded, restart
from tests.virtual_run import Setting, VirtualRun

DEADLINE_S = 60.0


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    """Three islands of a scheduled run; only the raw islands below take part."""
    return Setting(
        {"w": [0.0] * NUMEL}, lambda *_: None, tmp_path, inner_steps=8, islands=("a", "b", "c")
    )


def version_of(run: VirtualRun) -> tuple[int, int, bool]:
    (state,) = run.syncer.states
    return state.version, state.attempt, state.is_open


async def order(run: VirtualRun, *live: str, is_paused: bool = False, **fenced: int) -> None:
    """Give a roster as the coordinator does: who was taken out is fenced from then on."""
    run.syncer.set_orders(Orders(Roster(live, fenced, is_paused)))
    await asyncio.sleep(0.01)


async def expire(run: VirtualRun, island: RawIsland, times: int) -> RoundKey:
    """Let attempts expire for which one member does not come; returns what is open then."""
    key = KEY
    for attempt in range(times):
        await island.contribute(replace(key, attempt=attempt))
        await asyncio.sleep(DEADLINE_S + 0.1)
    return replace(key, attempt=times)


def test_a_run_that_waits_is_never_lost(setting: Setting) -> None:
    async def scenario() -> None:
        run, (a, b, c) = await founded(replace(setting, on_member_lost="wait"), "abc")
        key = await expire(run, a, 5)
        assert run.syncer.fatal is None
        assert version_of(run) == (0, 5, True)

        for island in (a, b, c):
            await island.contribute(key)

        assert version_of(run) == (1, 0, True)

    run_virtual(scenario())


def test_a_run_that_stops_is_lost_after_three_attempts(setting: Setting) -> None:
    async def scenario() -> None:
        run, (a, _, _) = await founded(setting, "abc")
        await expire(run, a, 3)

        assert run.syncer.fatal is not None
        assert run.syncer.fatal.exit_code == 50
        assert "diloco island RUN.toml --island c" in run.syncer.fatal.reason

    run_virtual(scenario())


def test_a_run_that_shrinks_goes_on_without_the_member_from_the_open_attempt_on(
    setting: Setting,
) -> None:
    async def scenario() -> None:
        run, (a, b, c) = await founded(replace(setting, on_member_lost="shrink"), "abc")
        key = await expire(run, a, 4)
        for island in (a, b):
            await island.contribute(key)
        assert version_of(run) == (0, 4, True)

        await order(run, "a", "b", c=2)

        assert version_of(run) == (1, 0, True)
        assert [await island.end(key) for island in (a, b)] == 2 * [OutcomeKind.INCLUDED]
        assert (await c.poll(key)).is_fenced
        (state,) = run.syncer.states
        assert list(state.members) == ["a", "b"]
        await restart(run)  # and the coordinator is away
        (state,) = run.syncer.states
        assert list(state.members) == ["a", "b"]
        await order(run, "a", "b", "c", c=2)  # it may come back
        assert version_of(run) == (1, 0, True)
        await RawIsland(run, "c", 2).poll()
        for island in (a, b):
            await island.contribute(replace(KEY, version=1))
        (state,) = run.syncer.states
        assert (state.version, list(state.members)) == (2, ["a", "b", "c"])

    run_virtual(scenario())


def test_orders_that_follow_one_another_in_an_attempt_take_each_member_out_once(
    setting: Setting,
) -> None:
    async def scenario() -> None:
        run, (a, b, _) = await founded(replace(setting, on_member_lost="shrink"), "abc")

        await order(run, "a", "b", c=2)
        await order(run, "a", "b", is_paused=True, c=2)
        await order(run, "a", b=2, c=2)

        assert run.syncer.failure is None and version_of(run) == (0, 0, True)
        assert (await b.poll()).is_fenced
        await a.contribute()
        assert version_of(run) == (1, 0, True)
        (state,) = run.syncer.states
        assert list(state.members) == ["a"]

    run_virtual(scenario())


def test_who_is_on_the_roster_is_waited_for_though_it_was_never_here(setting: Setting) -> None:
    async def scenario() -> None:
        run = VirtualRun(replace(setting, on_member_lost="shrink"))
        await run.start_syncer()
        a, b = RawIsland(run, "a"), RawIsland(run, "b")
        await b.poll()
        await order(run, "a", "b", "c")
        assert not (await a.poll()).fragments[0].wants_initial

        await order(run, "a", "b", c=1)  # an operator has taken it out

        assert (await a.poll()).fragments[0].wants_initial
        await a.upload()
        assert version_of(run) == (0, 0, True)

    run_virtual(scenario())
