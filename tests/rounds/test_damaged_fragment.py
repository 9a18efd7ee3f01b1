"""A fragment whose newest version rotted is not served; its syncer and the others go on."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from diloco.rounds.record import fragment_directory, record_path, versions_in
from diloco.telemetry.round_events import FragmentDamaged
from protos import fragment_pb2 as wire
from tests.raw_island import RawIsland, founded
from tests.virtual_run import Setting, VirtualRun
from transport.loopback import run_virtual


def descend(island: str, inner_step: int, parameters: dict[str, Tensor]) -> None:
    for parameter in parameters.values():
        parameter.sub_({"a": 1.0, "b": 3.0}[island])


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    """Two islands that merge on arrival, two fragments."""
    setting = Setting(
        {name: [16.0] * 2 for name in "uv"},
        descend,
        tmp_path,
        inner_steps=200,
        tokens={"a": 3, "b": 5},
        num_fragments=2,
        flush=True,
        min_members=1,
        quorum=1,
        total_tokens=200 * 8,
    )
    return replace(setting, timing=setting.measured())


def newest_record(setting: Setting, fragment_id: int) -> Path:
    directory = fragment_directory(setting.directory, fragment_id)
    return record_path(directory, versions_in(directory)[-1])


def versions(run: VirtualRun) -> list[int]:
    return [state.version for state in run.syncer.states]


def test_the_other_fragments_go_on_and_islands_do_not_end(setting: Setting) -> None:
    async def scenario() -> None:
        run = VirtualRun(setting)
        await run.start_syncer()
        islands = [run.island(name) for name in "ab"]
        training = [asyncio.create_task(island.run()) for island in islands]
        await asyncio.sleep(40.0)
        await run.kill_syncer()
        record = newest_record(setting, 0)
        whole = record.read_bytes()
        record.write_bytes(whole[:-3] + b"rot")

        await run.start_syncer()
        before = versions(run)
        await asyncio.sleep(40.0)

        assert [run.syncer.phase(p) == "damaged" for p in (0, 1)] == [True, False]
        assert versions(run)[0] == before[0]
        assert versions(run)[1] > before[1] + 3
        (told,) = [event for event in run.events if isinstance(event, FragmentDamaged)]
        assert (told.fragment_id, told.version) == (0, before[0] + 1)
        assert "fragment 0 is damaged and not served" in run.syncer.damage(0)
        assert "diloco repair" in run.syncer.damage(0)
        assert run.syncer.fatal is None and not run.syncer.ended.is_set()
        assert not any(task.done() for task in training)
        assert all(island.exchange.failure is None for island in islands)
        run.syncer.keep_cut(1, [])
        await asyncio.sleep(1.0)
        assert run.syncer.pinned_cut == 0, "a cut waits for it"

        await run.kill_syncer()
        record.write_bytes(whole)
        await run.start_syncer()
        await asyncio.gather(*training)

        assert len({island.session.digests for island in islands}) == 1
        assert min(versions(run)) > before[0] + 3
        for island in islands:
            await island.exchange.stop()
        await run.kill_syncer()

    run_virtual(scenario())


def test_who_knows_of_a_damaged_fragment_is_not_answered_again_and_again(setting: Setting) -> None:
    async def scenario() -> None:
        run, (a, _) = await founded(replace(setting, num_fragments=1, initial={"u": [0.0]}))
        known = (await a.poll()).fragments
        await run.kill_syncer()
        newest_record(setting, 0).write_bytes(b"rotten")
        await run.start_syncer()

        reply = await a.poll(known=known, known_epoch=run.epoch)
        assert reply.fragments[0].is_damaged
        assert not reply.fragments[0].wants_initial, "no island founds the run a second time"
        told = [*known]
        told[0].is_damaged = True
        before = asyncio.get_running_loop().time()
        await a.poll(known=told, known_epoch=run.epoch, wait_s=4.0, step_s=1.0)
        assert asyncio.get_running_loop().time() - before == pytest.approx(4.0)
        for call in (a.submit(), a.decline(), a.published(0), a.upload_lane(0)):
            with pytest.raises(TimeoutError):  # it is called again, until it is repaired
                await asyncio.wait_for(call, 1.0)

    run_virtual(scenario())


def test_a_version_that_only_the_coordinator_knows_of_is_lost_too(setting: Setting) -> None:
    async def scenario() -> None:
        run = VirtualRun(setting)
        await run.start_syncer()
        islands = [RawIsland(run, name) for name in "ab"]
        for island in islands:
            await island.poll(step_s=1.0)
        for fragment in setting.plan().fragments:
            islands[0].lanes = fragment.lanes
            await islands[0].upload(fragment_id=fragment.fragment_id)

        run.syncer.indexed([1, 1])
        assert not any(run.syncer.damage(p) for p in (0, 1))
        run.syncer.indexed([1, 2])
        assert [bool(run.syncer.damage(p)) for p in (0, 1)] == [False, True]
        assert "version 1 was published" in run.syncer.damage(1)
        (state, damaged) = (await islands[0].poll(step_s=1.0)).fragments
        assert (state.is_damaged, damaged.is_damaged) == (False, True)
        known = wire.FragmentState(fragment_id=0, is_founded=True, version=7)
        alone = await islands[0].poll(step_s=1.0, known=[known])
        assert alone.fragments[0].is_damaged, "to the island that holds more"
        assert not run.syncer.damage(0), "one island's word stops nobody else"

    run_virtual(scenario())
