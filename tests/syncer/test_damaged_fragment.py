"""A fragment whose newest version rotted is not served; its syncer and the others go on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import blake3
import pytest
import torch

from diloco.compression.base import to_bytes
from diloco.outer.optimizer import OuterOptimizer
from diloco.protos import fragment_pb2 as wire
from diloco.telemetry.round_events import FragmentDamaged, FragmentRepaired
from diloco.transport.calls.loopback import run_virtual
from diloco.versions.frames import frame_path
from diloco.versions.record import fragment_directory, record_path, versions_in
from diloco.versions.replay import FragmentReplay, ReplayVerdict
from diloco.versions.store import FragmentStore
from tests.raw_island import NUMEL, RawIsland, founded
from tests.virtual_run import Setting, VirtualRun, descend


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    """Two islands that merge on arrival, two fragments."""
    return Setting(
        {name: [16.0] * 2 for name in "uv"},
        descend,
        tmp_path,
        inner_steps=90,
        tokens={"a": 3, "b": 5},
        num_fragments=2,
        flush=True,
    ).on_arrival(total_tokens=90 * 8)


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
        await asyncio.sleep(25.0)
        await run.kill_syncer()
        record = newest_record(setting, 0)
        whole = record.read_bytes()
        record.write_bytes(whole[:-3])

        await run.start_syncer()
        before = versions(run)
        await asyncio.sleep(25.0)

        assert [run.syncer.phase(p) == "damaged" for p in (0, 1)] == [True, False]
        assert versions(run)[0] == before[0]
        assert versions(run)[1] > before[1] + 3
        (told,) = [event for event in run.events if isinstance(event, FragmentDamaged)]
        assert (told.fragment_id, told.version) == (0, before[0] + 1)
        assert "fragment 0 is damaged and not served" in run.syncer.damage(0)
        assert "It is taken from an island that holds it" in run.syncer.damage(0)
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

        run.syncer.indexed({0: 1, 1: 1})
        assert not any(run.syncer.damage(p) for p in (0, 1))
        run.syncer.indexed({0: 1, 1: 2})
        assert [bool(run.syncer.damage(p)) for p in (0, 1)] == [False, True]
        assert "version 1 was published" in run.syncer.damage(1)
        (state, damaged) = (await islands[0].poll(step_s=1.0)).fragments
        assert (state.is_damaged, damaged.is_damaged) == (False, True)

    run_virtual(scenario())


async def until(islands: list[RawIsland], is_so: Callable[[], bool], *, within_s: int) -> None:
    """Have islands call, each second, until something is so."""
    for _ in range(within_s):
        for island in islands:
            await island.poll(step_s=1.0)
        if is_so():
            return
        await asyncio.sleep(1.0)
    raise AssertionError(f"not within {within_s} s")


@pytest.fixture
def quorum_of_one(setting: Setting) -> Setting:
    """One fragment, whose rounds close with the first contribution."""
    return replace(setting, num_fragments=1, initial={"u": [0.0] * NUMEL}, flush=False)


async def published_once(setting: Setting, cut_off: int) -> tuple[VirtualRun, list[RawIsland]]:
    """Publish version 1, from island a alone, and start again without the end of its file."""
    run = VirtualRun(setting)
    await run.start_syncer()
    a, b = (RawIsland(run, name) for name in "ab")
    await until([a, b], lambda: bool(run.syncer._admission.founder()), within_s=2)
    await a.upload()
    await until([a, b], lambda: run.syncer.states[0].is_open, within_s=20)
    await a.contribute()
    await until([a, b], lambda: versions(run) == [1], within_s=20)
    await run.kill_syncer()
    directory = fragment_directory(setting.directory, 0)
    path = record_path(directory, 1)
    path = path if path.exists() else frame_path(directory, 1)
    path.write_bytes(path.read_bytes()[:-cut_off])
    await run.start_syncer()
    return run, [a, b]


@pytest.mark.parametrize("snapshot_rounds", [1, 4], ids=["record", "frame"])
@pytest.mark.parametrize("cut_off", [1, 1000])
def test_a_newest_version_that_is_torn_is_not_published_again_though_nobody_says_so(
    quorum_of_one: Setting, cut_off: int, snapshot_rounds: int
) -> None:
    setting = replace(quorum_of_one, snapshot_rounds=snapshot_rounds)

    async def scenario() -> None:
        run, (_, b) = await published_once(setting, cut_off)

        assert "version 1 was published" in run.syncer.damage(0)
        with pytest.raises(AssertionError, match="not within"):
            await until([b], lambda: run.syncer.states[0].is_open, within_s=30)

    run_virtual(scenario())


def test_another_version_under_the_same_number_is_not_served(quorum_of_one: Setting) -> None:
    async def scenario() -> None:
        run = VirtualRun(quorum_of_one)
        await run.start_syncer()
        a, b = (RawIsland(run, name) for name in "ab")
        await until([a, b], lambda: bool(run.syncer._admission.founder()), within_s=2)
        await a.upload()
        digest = (await a.poll()).fragments[0].digest
        run.syncer.indexed({0: 1}, {0: digest.hex()})
        assert not run.syncer.damage(0)
        run.syncer.indexed({0: 1}, {0: bytes(32).hex()})
        assert run.syncer.damage(0)

    run_virtual(scenario())


def header_of(run: VirtualRun, fragment_id: int, version: int) -> str:
    """What the coordinator has indexed of a version."""
    found = [r for r in run.records if (r["fragment_id"], r["version"]) == (fragment_id, version)]
    return json.dumps(found[0])


@pytest.mark.parametrize("snapshot_rounds", [1, 4])
def test_an_island_that_holds_the_lost_version_gives_it_back(
    setting: Setting, snapshot_rounds: int
) -> None:
    setting = replace(setting, snapshot_rounds=snapshot_rounds)

    async def scenario() -> VirtualRun:
        run = VirtualRun(setting)
        run.keeps_all = True
        await run.start_syncer()
        islands = [run.island(name) for name in "ab"]
        training = [asyncio.create_task(island.run()) for island in islands]
        await asyncio.sleep(25.0)
        lost = versions(run)[0]
        await run.kill_syncer()
        directory = fragment_directory(setting.directory, 0)
        for path in directory.glob("*.record"):
            path.write_bytes(path.read_bytes()[:-3])
        for path in directory.glob("*.frame"):
            path.write_bytes(path.read_bytes()[:-3] + b"rot")
        await run.start_syncer()
        run.syncer.indexed({0: lost + 1, 1: 0})
        await asyncio.sleep(5.0)
        assert run.syncer.phase(0) == "damaged"

        header = header_of(run, 0, lost)
        run.syncer.repair(0, "b", header)
        run.syncer.repair(0, "b", header)
        await asyncio.sleep(1.0)

        assert run.syncer.damage(0) == ""
        (told,) = [event for event in run.events if isinstance(event, FragmentRepaired)]
        assert told == FragmentRepaired(0, lost, "b")
        store = FragmentStore(setting.directory, setting.plan().fragments[0], 4)
        record = store.load(lost)
        assert (record.repaired, record.digest.hex()) == ("b", json.loads(header)["digest"])
        assert record.merged_tokens == json.loads(header)["merged_tokens"]
        for lane in record.lanes:
            assert torch.equal(lane.theta, lane.published)
            if snapshot_rounds == 1:
                assert not lane.momentum.any(), "no older version can be read"
        await asyncio.gather(*training)

        assert len({island.session.digests for island in islands}) == 1
        assert versions(run)[0] > lost + 3
        for island in islands:
            await island.exchange.stop()
        await run.kill_syncer()
        await run.start_syncer()
        assert run.syncer.damage(0) == ""
        await run.kill_syncer()
        return run

    run = run_virtual(scenario())
    headers = [json.loads(text) for text in {json.dumps(r, sort_keys=True) for r in run.records}]
    replay = FragmentReplay(setting.directory, setting.plan(), 0, indexed=[
        r for r in headers if "repaired" not in r
    ])  # fmt: skip
    verdicts = {each.version: each.verdict for each in replay.run()}
    (repaired,) = [r["version"] for r in headers if "repaired" in r]
    assert verdicts[repaired] is ReplayVerdict.REPAIRED
    later = {version for version in verdicts if version > repaired}
    assert later
    assert all(verdicts[version] is ReplayVerdict.RECOMPUTED for version in later)


@pytest.mark.parametrize("names", ["a", "aba"], ids=["asked-once", "asked-after-another"])
def test_an_island_that_did_not_hold_it_when_it_was_asked_gives_it_later(
    setting: Setting, names: str
) -> None:
    async def scenario() -> None:
        run = VirtualRun(setting)
        await run.start_syncer()
        islands = [run.island(name) for name in "ab"]
        training = [asyncio.create_task(island.run()) for island in islands]
        await asyncio.sleep(25.0)
        lost = versions(run)[0]
        await run.kill_syncer()
        newest_record(setting, 0).write_bytes(b"rotten")
        await run.start_syncer()
        run.syncer.indexed({0: lost + 1})
        header = header_of(run, 0, lost)
        held = [island.exchange._fragments[0] for island in islands]
        for carried in held:
            carried.anchor_version -= 1  # this version is staged, and merged later
        for name in names[:-1] or names:
            run.syncer.repair(0, name, header)
            await asyncio.sleep(2.0)
            assert run.syncer.damage(0)
        held[0].anchor_version += 1
        for _ in range(30):
            run.syncer.repair(0, names[-1], header)
            await asyncio.sleep(2.0)
        assert run.syncer.damage(0) == ""
        for task in training:
            task.cancel()
        await asyncio.gather(*training, return_exceptions=True)
        for island in islands:
            await island.exchange.stop()
        await run.kill_syncer()

    run_virtual(scenario())


def test_moments_of_an_older_version_that_is_whole_stay(setting: Setting) -> None:
    optimizer = OuterOptimizer("nesterov", 0.7, 0.9, 0)
    run, lost = VirtualRun(replace(setting, optimizer=optimizer)), 0

    async def scenario() -> None:
        nonlocal lost
        await run.start_syncer()
        islands = [run.island(name) for name in "ab"]
        training = [asyncio.create_task(island.run()) for island in islands]
        await asyncio.sleep(25.0)
        await run.kill_syncer()
        record = newest_record(setting, 0)
        record.write_bytes(record.read_bytes()[:-3])
        await run.start_syncer()
        lost = versions(run)[0] + 1
        run.syncer.repair(0, "a", header_of(run, 0, lost))
        await asyncio.sleep(1.0)
        assert run.syncer.damage(0) == ""
        store = FragmentStore(setting.directory, setting.plan().fragments[0], 4)
        kept, record = store.load(lost - 1), store.load(lost)
        for before, lane in zip(kept.lanes, record.lanes, strict=True):
            assert before.momentum.any()
            assert torch.equal(before.momentum, lane.momentum)
        for task in training:
            task.cancel()
        await asyncio.gather(*training, return_exceptions=True)
        for island in islands:
            await island.exchange.stop()
        await run.kill_syncer()

    run_virtual(scenario())


def test_what_is_not_what_was_published_repairs_nothing(
    setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    setting = replace(
        setting, num_fragments=1, initial={"u": [0.0] * NUMEL}, min_members=None, quorum=None,
        timing=None,
    )  # fmt: skip

    async def scenario() -> None:
        run, (a, b) = await founded(setting)
        header = header_of(run, 0, 0)
        await run.kill_syncer()
        newest_record(setting, 0).write_bytes(b"rotten")
        await run.start_syncer()

        async def give(island: RawIsland, lane_id: int, value: float, version: int = 0) -> str:
            payload = to_bytes(torch.full((a.lanes[lane_id].numel,), value).view(torch.uint8))
            upload = wire.UploadHeader(
                lane_id=lane_id, digest=blake3.blake3(payload).digest(), is_published=True,
                version=version,
            )  # fmt: skip
            reply = await island.call("fragment.upload", upload, payload)
            return wire.Ack.FromString(reply.header).message

        assert "not asked of island 'a'" in await give(a, 0, 0.0)
        for _ in range(3):  # as with every report
            run.syncer.repair(0, "a", json.dumps({"version": 0}))
        assert caplog.text.count("cannot be taken from an island") == 1
        assert "from an island: its header is not indexed whole" in run.syncer.damage(0)
        assert not (await a.poll()).fragments[0].asked, "its index was cut short"
        run.syncer.repair(0, "a", header)
        assert (await a.poll()).fragments[0].asked
        assert not (await b.poll()).fragments[0].asked
        assert "was published with blake3" in await give(a, 0, 7.0)
        assert "not asked of island 'b'" in await give(b, 0, 0.0)
        assert "not asked of island 'a'" in await give(a, 0, 0.0, version=1)
        assert await give(a, 0, 0.0) == ""
        assert run.syncer.damage(0), "a lane is missing"
        assert await give(a, 1, 0.0) == ""
        assert run.syncer.damage(0) == ""
        await a.contribute()
        await b.contribute()
        await asyncio.sleep(1.0)
        assert versions(run) == [1]

    run_virtual(scenario())
