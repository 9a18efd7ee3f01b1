"""What an island knows of versions that its syncer does not have: believed, and how far."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path

import blake3
import pytest
import torch

from diloco.compression.base import to_bytes
from diloco.protos import fragment_pb2 as wire
from diloco.refusals import Cause
from diloco.syncer.damaged import RecoveredVersion
from diloco.transport.calls.loopback import run_virtual
from diloco.versions.store import FragmentStore
from diloco.versions.value_digest import lane_digest
from tests.raw_island import NUMEL, RawIsland
from tests.syncer.test_damaged_fragment import until
from tests.virtual_run import Setting, VirtualRun, descend


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    """Two islands that merge on arrival, one fragment."""
    return Setting({"u": [16.0] * 2}, descend, tmp_path, 90).on_arrival(total_tokens=90 * 8)


def test_an_island_with_another_version_under_the_same_number_says_so(setting: Setting) -> None:
    async def scenario() -> None:
        run = VirtualRun(setting)
        await run.start_syncer()
        islands = [run.island(name) for name in "ab"]
        training = asyncio.gather(*(island.run() for island in islands))
        await asyncio.sleep(25.0)
        await run.kill_syncer()
        fragment = setting.plan().fragments[0]
        store = FragmentStore(setting.directory, fragment, 4)
        held = store.newest()
        assert held is not None
        lanes = {i: to_bytes((v.published + 1).view(torch.uint8)) for i, v in enumerate(held.lanes)}
        other = {
            "lane_digests": [lane_digest(v.published + 1).hex() for v in held.lanes],
            "lane_blake3": [blake3.blake3(lane).hexdigest() for lane in lanes.values()],
        }
        recovered = RecoveredVersion("b", {**held.header(), **other}, lanes)
        store.commit(recovered.record(fragment, None, has_second_moment=False))
        await run.start_syncer()
        assert not run.syncer.damage(0)

        await asyncio.sleep(2.0)
        assert f"version {held.version} was published" in run.syncer.damage(0)
        assert "what is here under its number is not that" in run.syncer.damage(0)
        training.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await training
        for island in islands:
            await island.exchange.stop()
        await run.kill_syncer()

    run_virtual(scenario())


def ahead(version: int) -> list[wire.FragmentState]:
    return [wire.FragmentState(is_founded=True, version=version)]


async def begun(setting: Setting) -> tuple[VirtualRun, list[RawIsland]]:
    """A run whose version 0 is published."""
    run = VirtualRun(replace(setting, initial={"u": [0.0] * NUMEL}))
    await run.start_syncer()
    a, b = (RawIsland(run, name) for name in "ab")
    await until([a, b], lambda: bool(run.syncer._admission.founder()), within_s=2)
    await a.upload()
    return run, [a, b]


def test_a_loss_that_only_islands_tell_of_takes_most_of_them_names_them_and_offers_no_repair(
    setting: Setting,
) -> None:
    async def scenario() -> None:
        run, (a, b) = await begun(setting)
        run.syncer.indexed({0: 1})
        other = wire.FragmentState(is_founded=True, version=0, digest=b"other")
        for count, known in enumerate([ahead(2), [other], ahead(2)], start=1):
            await b.poll(known=known, step_s=1.0)
            assert not run.syncer.damage(0)
            assert run.syncer.meter.counts.refusals == {("b", Cause.KEY): count}
        await a.poll(known=ahead(2))
        told = run.syncer.damage(0)
        assert "its version 2 was published, as a, b alone say" in told
        assert "diloco kick HOST:PORT a" in told
        assert "diloco repair" not in told

        run.syncer.indexed({0: 3})
        told = run.syncer.damage(0)
        assert "its version 2 was published and cannot be read" in told
        assert "It is taken from an island that holds it" in told

    run_virtual(scenario())


@pytest.mark.parametrize("version", [5, 2**63])
@pytest.mark.parametrize("was_published", [False, True])
def test_more_versions_than_are_kept_are_lost_by_the_word_of_the_coordinator_alone(
    setting: Setting, version: int, was_published: bool
) -> None:
    async def scenario() -> None:
        run, (a, b) = await begun(setting)
        service = run.syncer._services[0]
        for count in (1, 2):
            await b.poll(known=ahead(version), step_s=1.0)
            assert not run.syncer.damage(0)
            assert run.syncer.meter.counts.refusals == {("b", Cause.KEY): count}
        with pytest.raises(AssertionError, match="not within"):
            await until([a, b], lambda: service.runner.rounds.is_open, within_s=20)

        run.syncer.indexed({0: version + 1 if was_published else 1})
        assert bool(run.syncer.damage(0)) == was_published
        await b.poll(known=ahead(version), step_s=1.0)
        if not was_published:
            await until([a, b], lambda: service.runner.rounds.is_open, within_s=20)
        assert run.syncer.meter.counts.refusals["b", Cause.KEY] == (2 if was_published else 3)

    run_virtual(scenario())
