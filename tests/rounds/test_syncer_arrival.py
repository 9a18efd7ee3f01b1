"""The syncer of a run in which nobody waits: openings by the floor, quorum, tokens, the end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from diloco.rounds.terms import OutcomeKind, RoundKey
from protos import fragment_pb2 as wire
from tests.raw_island import NUMEL, RawIsland, restart
from tests.virtual_run import Setting, VirtualRun
from transport.loopback import run_virtual

#: Of an inner step, and H: nothing opens earlier than a round after the close before it.
STEP_S, ROUND_S = 1.0, 4.0


def stand_still(island: str, inner_step: int, parameters: dict[str, Tensor]) -> None:
    pass


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    """Three islands, a quorum of one; only the raw islands below take part."""
    setting = Setting(
        {"w": [0.0] * NUMEL},
        stand_still,
        tmp_path,
        inner_steps=8,
        islands=("a", "b", "c"),
        overlap_steps=2,
        flush=True,
        min_members=1,
        quorum=1,
        total_tokens=12,
    )
    return replace(setting, timing=setting.measured())


def version_of(run: VirtualRun) -> tuple[int, int, bool]:
    (state,) = run.syncer.states
    return state.version, state.attempt, state.is_open


async def begun(
    setting: Setting, names: Sequence[str] = "abc"
) -> tuple[VirtualRun, list[RawIsland]]:
    """A run whose first round is open to all of `names`."""
    run = VirtualRun(setting)
    await run.start_syncer()
    islands = [RawIsland(run, name) for name in names]
    for island in islands:
        await island.poll(step_s=STEP_S)
    assert all(ack.is_accepted for ack in await islands[0].upload())
    await asyncio.sleep(ROUND_S)
    await heartbeat(*islands)
    (state,) = run.syncer.states
    assert state.is_open and list(state.members) == sorted(names)
    return run, islands


async def heartbeat(*islands: RawIsland) -> None:
    for island in islands:
        await island.poll(step_s=STEP_S)


async def fetch(island: RawIsland, version: int) -> None:
    await island.published(version)


def test_nothing_opens_before_a_step_time_is_known_and_a_round_has_passed(
    setting: Setting,
) -> None:
    async def scenario() -> None:
        run = VirtualRun(setting)
        await run.start_syncer()
        a, began = RawIsland(run, "a"), asyncio.get_running_loop().time()
        await a.poll()
        await a.upload()
        await asyncio.sleep(2 * ROUND_S)
        assert version_of(run) == (0, 0, False)

        reply = await a.poll(step_s=STEP_S)

        assert reply.fragments[0].is_open
        await a.contribute(KEY)
        closed = asyncio.get_running_loop().time()
        assert version_of(run) == (1, 0, False)
        reply = await a.poll(wait_s=60.0, known_epoch=1, known=reply.fragments, step_s=STEP_S)
        reply = await a.poll(wait_s=60.0, known_epoch=1, known=reply.fragments, step_s=STEP_S)
        assert reply.fragments[0].is_open
        assert asyncio.get_running_loop().time() == pytest.approx(closed + ROUND_S)
        assert closed - began < 3 * ROUND_S

    run_virtual(scenario())


KEY = RoundKey(0, 0, 0, 0)


def test_tokens_add_up_and_end_the_fragment_with_one_flush(setting: Setting) -> None:
    async def scenario() -> None:
        run, (a, b, c) = await begun(setting)
        key = KEY
        for version in (1, 2):
            await a.contribute(key, weight_tokens=6)
            (state,) = run.syncer.states
            assert (state.version, state.merged_tokens) == (version, 6 * version)
            await asyncio.sleep(ROUND_S)
            await heartbeat(a, b, c)
            key = replace(key, version=version)
        (state,) = run.syncer.states
        assert state.is_open and state.takes_flush

        await restart(run)
        await heartbeat(a, b, c)
        await asyncio.sleep(ROUND_S)

        (state,) = run.syncer.states
        assert state.is_open and state.takes_flush, "a restart knows it, too"
        refused = await a.submit(key)
        assert refused.status == wire.SUBMIT_STATUS_INVALID
        assert "takes flushes only" in refused.message
        for island in (a, b, c):
            await island.contribute(key, is_flush=True, weight_tokens=1)
        for _ in range(10):
            await asyncio.sleep(ROUND_S)
            await heartbeat(a, b, c)
        (state,) = run.syncer.states
        assert (state.version, state.is_flush, state.is_open) == (3, True, False)
        assert state.merged_tokens == 15
        await restart(run)
        await heartbeat(a, b, c)
        await asyncio.sleep(10 * ROUND_S)
        assert version_of(run) == (3, 0, False)

    run_virtual(scenario())


def test_a_flush_closes_by_its_deadline_with_those_that_came(setting: Setting) -> None:
    async def scenario() -> None:
        run, (a, b, c) = await begun(replace(setting, total_tokens=4))
        await a.contribute(KEY)
        await asyncio.sleep(ROUND_S)
        key = replace(KEY, version=1)
        await a.contribute(key, is_flush=True)
        await b.contribute(key, is_flush=True)
        assert version_of(run) == (1, 0, True)

        for _ in range(16):
            await asyncio.sleep(4.0)
            await heartbeat(a, b, c)

        assert version_of(run) == (2, 0, False)
        assert await c.end(key) is OutcomeKind.NOT_INCLUDED

    run_virtual(scenario())
