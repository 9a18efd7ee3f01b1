"""What an island knows of versions that its syncer does not have: believed, and how far."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import blake3
import pytest
import torch

from diloco.compression.base import to_bytes
from diloco.rounds.damaged import Gift
from diloco.rounds.store import FragmentStore
from tests.rounds.test_damaged_fragment import descend
from tests.virtual_run import Setting, VirtualRun
from transport.loopback import run_virtual


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    """Two islands that merge on arrival, one fragment."""
    setting = Setting(
        {"u": [16.0] * 2},
        descend,
        tmp_path,
        inner_steps=90,
        min_members=1,
        quorum=1,
        total_tokens=90 * 8,
    )
    return replace(setting, timing=setting.measured())


def test_an_island_with_another_version_under_the_same_number_says_so(setting: Setting) -> None:
    async def scenario() -> None:
        run = VirtualRun(setting)
        await run.start_syncer()
        island = run.island("a")
        training = asyncio.create_task(island.run())
        await asyncio.sleep(25.0)
        await run.kill_syncer()
        fragment = setting.plan().fragments[0]
        store = FragmentStore(setting.directory, fragment, 4)
        held = store.newest()
        assert held is not None
        lanes = {i: to_bytes((v.published + 1).view(torch.uint8)) for i, v in enumerate(held.lanes)}
        digests = [blake3.blake3(lane).hexdigest() for lane in lanes.values()]
        gift = Gift("b", {**held.header(), "lane_digests": digests}, lanes)
        store.commit(gift.record(fragment, None, has_second_moment=False))
        await run.start_syncer()
        assert not run.syncer.damage(0)

        await asyncio.sleep(2.0)
        assert f"version {held.version} was published" in run.syncer.damage(0)
        assert "what is here under its number is not that" in run.syncer.damage(0)
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)
        await island.exchange.stop()
        await run.kill_syncer()

    run_virtual(scenario())
