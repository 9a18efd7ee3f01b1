"""An all-reduce run that is resumed from a checkpoint: as if nothing had happened, to the bit."""

from __future__ import annotations

import asyncio
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.sync.test_allreduce_equality import setting_of
from tests.virtual_allreduce import AllReduceIsland, AllReduceRun
from tests.virtual_run import Checkpoint, Setting, VirtualIsland
from transport.loopback import run_virtual

STEP = 5  # a contribution is in flight, and the others hold it too


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about power loss, and waiting for the disk is most of the time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def end_of(island: VirtualIsland) -> tuple[Any, ...]:
    return island.values(), island.session.digests, island.session.versions


async def stopped(run: AllReduceRun, beyond: int) -> dict[str, Checkpoint]:
    """Take a checkpoint on all islands, go further, and end them all without a word."""
    await run.start_decider()
    started = [await run.start(name) for name in run.setting.islands]

    async def train(island: VirtualIsland) -> Checkpoint:
        await island.start()
        await island.train(STEP)
        kept = await island.checkpoint()
        await island.train(beyond)
        return kept

    kept = await asyncio.gather(*(train(each.island) for each in started))
    await run.end(started)
    return dict(zip(run.setting.islands, kept, strict=True))


async def resumed(run: AllReduceRun, kept: dict[str, Checkpoint]) -> list[AllReduceIsland]:
    await run.resume(STEP)
    started = [await run.start(name) for name in run.setting.islands]

    async def go_on(island: VirtualIsland) -> None:
        await island.resume(kept[island.name])
        await island.go_on()

    await asyncio.gather(*(go_on(each.island) for each in started))
    await run.end(started)
    return started


@pytest.mark.parametrize(
    ("beyond", "loses_store"),
    [
        pytest.param(0, False, marks=pytest.mark.slow),
        (3, False),
        pytest.param(0, True, marks=pytest.mark.slow),
        (3, True),
    ],
)
def test_resumed_equals_undisturbed(tmp_path: Path, beyond: int, loses_store: bool) -> None:
    setting: Setting = setting_of(tmp_path / "resumed", 3, "int4")
    whole = replace(setting, directory=tmp_path / "whole")
    for each in (setting, whole):
        each.directory.mkdir()
    undisturbed = run_virtual(AllReduceRun(whole).run())
    run = AllReduceRun(setting)

    async def scenario() -> list[AllReduceIsland]:
        kept = await stopped(run, beyond)
        if loses_store:
            shutil.rmtree(setting.directory / "peers" / "c")
        return await resumed(run, kept)

    again = run_virtual(scenario())

    for each in again:
        assert end_of(each.island) == end_of(undisturbed[each.island.name])
