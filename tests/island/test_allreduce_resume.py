"""An all-reduce run that is resumed from a checkpoint: as if nothing had happened, to the bit."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco.errors import QuorumLost
from diloco.protos import allreduce_pb2 as wire
from diloco.transport.calls.loopback import run_virtual
from tests.island.test_allreduce_equality import setting_of
from tests.virtual_allreduce import AllReduceIsland, AllReduceRun
from tests.virtual_run import Checkpoint, Setting, VirtualIsland

STEP = 5  # a contribution is in flight, and the others hold it too


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about power loss, and waiting for the disk is most of the time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def end_of(island: VirtualIsland) -> tuple[Any, ...]:
    return island.values(), island.session.digests, island.session.versions


async def stopped(run: AllReduceRun, beyond: int, step: int = STEP) -> dict[str, Checkpoint]:
    """Take a checkpoint on all islands, go further, and end them all without a word."""
    await run.start_decider()
    started = [await run.start(name) for name in run.setting.islands]

    async def train(island: VirtualIsland) -> Checkpoint:
        await island.start()
        await island.train(step)
        kept = await island.checkpoint()
        await island.train(beyond)
        return kept

    kept = await asyncio.gather(*(train(each.island) for each in started))
    await run.end(started)
    return dict(zip(run.setting.islands, kept, strict=True))


async def resumed(
    run: AllReduceRun, kept: dict[str, Checkpoint], step: int = STEP
) -> list[AllReduceIsland]:
    await run.resume(step)
    started = [await run.start(name) for name in run.setting.islands]

    async def go_on(island: VirtualIsland) -> None:
        await island.resume(kept[island.name])
        await island.go_on()

    await asyncio.gather(*(go_on(each.island) for each in started))
    await run.end(started)
    return started


@pytest.mark.parametrize(
    ("beyond", "without_store", "step"),
    [
        pytest.param(0, "", STEP, marks=pytest.mark.slow),
        (3, "", STEP),
        pytest.param(0, "c", STEP, marks=pytest.mark.slow),
        (3, "c", STEP),
        pytest.param(0, "a", STEP, id="the first island has nothing"),
        pytest.param(0, "c", 1, id="at version 0"),
    ],
)
def test_resumed_equals_undisturbed(
    tmp_path: Path, beyond: int, without_store: str, step: int
) -> None:
    setting: Setting = setting_of(tmp_path / "resumed", 3, "int4")
    whole = replace(setting, directory=tmp_path / "whole")
    for each in (setting, whole):
        each.directory.mkdir()
    undisturbed = run_virtual(AllReduceRun(whole).run())
    run = AllReduceRun(setting)

    async def scenario() -> list[AllReduceIsland]:
        kept = await stopped(run, beyond, step)
        if without_store:
            shutil.rmtree(setting.directory / "peers" / without_store)
        return await resumed(run, kept, step)

    again = run_virtual(scenario())

    for start in again:
        assert end_of(start.island) == end_of(undisturbed[start.island.name])


def test_a_run_that_no_island_can_resume_ends_and_says_so(tmp_path: Path) -> None:
    setting: Setting = setting_of(tmp_path, 2, "int4")
    run = AllReduceRun(setting)

    async def scenario() -> list[BaseException]:
        kept = await stopped(run, 0)
        for name in setting.islands:
            shutil.rmtree(setting.directory / "peers" / name)
        (setting.directory / "peers").mkdir(exist_ok=True)
        await run.resume(STEP)
        started = [await run.start(name) for name in setting.islands]
        ends = await asyncio.gather(
            *(each.island.resume(kept[each.island.name]) for each in started),
            return_exceptions=True,
        )
        await run.end(started)
        return [end for end in ends if end is not None]

    ends = run_virtual(scenario())

    assert [type(end) for end in ends] == [QuorumLost, QuorumLost]
    assert "no island holds its version of the checkpoint of inner step 5" in str(ends[0])


def test_a_resumed_run_goes_on_from_what_it_has_committed_alone(tmp_path: Path) -> None:
    run = AllReduceRun(setting_of(tmp_path, 2, "int4"))

    async def scenario() -> str:
        await stopped(run, 0)
        await run.resume(STEP)
        a = await run.start("a")
        record = a.peer._fragments[0].replica.record
        assert record is not None
        header = {**record.header(), "attempt": 7}
        ack = await a.peer._calls.send(
            "allreduce.found",
            wire.FoundRequest(record_json=json.dumps(header), state_digest=bytes(32)),
        )
        await run.end([a])
        return ack.message

    assert "is not as this run has committed it" in run_virtual(scenario())
