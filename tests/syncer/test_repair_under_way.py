"""What else happens at a syncer while a damaged fragment is found, asked for, and written again."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import blake3
import pytest
import torch
from torch import Tensor

from diloco.compression.base import to_bytes
from diloco.durable import DiskFull
from diloco.outer.optimizer import OuterOptimizer
from diloco.protocol.rounds.orders import Orders
from diloco.protocol.rounds.terms import Phase, Roster
from diloco.protos import fragment_pb2 as wire
from diloco.syncer.disk_full import WAITING_FOR_DISK
from diloco.syncer.service import FragmentService
from diloco.telemetry.round_events import FragmentDamaged, FragmentRepaired
from diloco.transport.calls.loopback import run_virtual
from diloco.versions.record import RecordDraft, RecordInvalid, locate, record_path
from diloco.versions.store import FragmentStore
from tests.raw_island import NUMEL, RawIsland, SlowWorker, restart
from tests.syncer.test_damaged_fragment import header_of, newest_record
from tests.virtual_run import Setting, VirtualRun


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    """Islands that merge on arrival, one fragment of two lanes."""
    return Setting(
        {"u": [0.0] * NUMEL}, lambda *_: None, tmp_path, inner_steps=90, islands=("a", "b", "c")
    ).on_arrival(total_tokens=10**6)


async def begun(setting: Setting) -> tuple[VirtualRun, list[RawIsland]]:
    """A run of a and b, and c that has not joined yet; version 0 is published."""
    run = VirtualRun(setting)
    await run.start_syncer()
    islands = [RawIsland(run, name) for name in "abc"]
    run.syncer.set_orders(Orders(roster=Roster(("a", "b"))))
    await poll(*islands[:2])
    await islands[0].upload()
    return run, islands


async def damaged(setting: Setting) -> tuple[VirtualRun, list[RawIsland]]:
    """The same, with version 0 rotten and asked of a; the syncer's work takes a second."""
    run, islands = await begun(setting)
    header = header_of(run, 0, 0)
    await run.kill_syncer()
    newest_record(setting, 0).write_bytes(b"rotten")
    run.worker = SlowWorker(after_s=1.0)
    await run.start_syncer()
    run.syncer.repair(0, "a", header)
    assert run.syncer.damage(0)
    await poll(*islands[:2])
    return run, islands


async def poll(*islands: RawIsland) -> None:
    for island in islands:
        await island.poll(step_s=1.0)


def service_of(run: VirtualRun) -> FragmentService:
    return run.syncer._services[0]


async def give(
    island: RawIsland, lane_id: int, values: Tensor | None = None, version: int = 0
) -> str:
    """Upload a lane of a published version, zeros if not given; returns what is wrong with it."""
    values = torch.zeros(island.lanes[lane_id].numel) if values is None else values
    payload = to_bytes(values.view(torch.uint8))
    header = wire.UploadHeader(
        lane_id=lane_id, digest=blake3.blake3(payload).digest(), is_published=True, version=version
    )
    reply = await island.call("fragment.upload", header, payload)
    return wire.Ack.FromString(reply.header).message


def kinds(run: VirtualRun) -> list[type]:
    return [type(e) for e in run.events if isinstance(e, FragmentDamaged | FragmentRepaired)]


def test_the_index_damages_nothing_that_is_being_repaired(setting: Setting) -> None:
    async def scenario() -> None:
        run, (a, b, _) = await damaged(setting)
        assert [await give(a, lane_id) for lane_id in (0, 1)] == ["", ""]
        while run.syncer.damage(0):
            await asyncio.sleep(0.1)
            run.syncer.indexed({0: 1})  # as with every report
        assert run.syncer.damage(0) == ""
        assert kinds(run) == [FragmentDamaged, FragmentRepaired]
        for _ in range(10):
            await poll(a, b)
            await asyncio.sleep(1.0)
        assert service_of(run).runner.rounds.is_open

    run_virtual(scenario())


def test_a_repair_whose_island_dies_while_it_is_written_comes_to_its_end(
    setting: Setting,
) -> None:
    async def scenario() -> None:
        run, (a, _, _) = await damaged(setting)
        assert await give(a, 0) == ""
        last = asyncio.create_task(give(a, 1))
        await asyncio.sleep(1.5)
        last.cancel()
        assert newest_record(setting, 0).read_bytes() != b"rotten", "it is written"
        assert run.syncer.damage(0), "and not read back"
        await asyncio.sleep(1.0)
        assert run.syncer.damage(0) == ""
        assert kinds(run) == [FragmentDamaged, FragmentRepaired]

    run_virtual(scenario())


def test_a_lane_that_is_repeated_after_the_repair_is_no_failure(setting: Setting) -> None:
    async def scenario() -> None:
        run, (a, _, _) = await damaged(setting)
        for lane_id in (0, 1, 1):
            assert await give(a, lane_id) == ""
        await asyncio.sleep(5.0)
        assert run.syncer.damage(0) == ""
        assert await give(a, 1) == ""
        assert not run.syncer.meter.counts.refusals
        assert "not asked of island 'a'" in await give(a, 1, version=1)
        assert "not asked of island 'a'" in await give(a, 1, torch.ones(a.lanes[1].numel))
        assert kinds(run) == [FragmentDamaged, FragmentRepaired]

    run_virtual(scenario())


def test_a_repair_that_finds_no_room_is_repeated(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        run, (a, _, _) = await damaged(setting)
        store = service_of(run).runner._store
        recover = store.recover

        def full() -> None:
            raise DiskFull("no room")

        monkeypatch.setattr(store, "recover", full)
        assert [await give(a, lane_id) for lane_id in (0, 1)] == ["", ""]
        await asyncio.sleep(100.0)
        assert run.syncer.phase(0) == "damaged"
        monkeypatch.setattr(store, "recover", recover)
        await asyncio.sleep(70.0)
        assert run.syncer.damage(0) == ""

    run_virtual(scenario())


def test_who_comes_and_what_is_ordered_during_a_repair_counts_after_it(setting: Setting) -> None:
    async def scenario() -> None:
        run, islands = await damaged(setting)
        a, _, c = islands
        assert await give(a, 0) == ""
        last = asyncio.create_task(give(a, 1))
        await asyncio.sleep(0.2)
        orders = Orders(roster=Roster(("a", "b", "c")), policy_json='{"quorum": 2}')
        run.syncer.set_orders(replace(orders, policy_revision=1))
        await c.poll(step_s=1.0)
        assert await last == ""
        for _ in range(10):
            await poll(*islands)
            await asyncio.sleep(1.0)
        rounds = service_of(run).runner.rounds
        assert rounds.is_open
        assert rounds.current.members == ("a", "b", "c")
        assert rounds.rules.min_contributions == 2
        assert "c" in rounds.participants.incarnations

    run_virtual(scenario())


def test_a_policy_that_was_set_while_it_was_damaged_counts_after_it(setting: Setting) -> None:
    async def scenario() -> None:
        run, islands = await begun(setting)
        a, b, _ = islands
        for _ in range(8):
            await poll(a, b)
            await asyncio.sleep(1.0)
        assert service_of(run).runner.rounds.is_open
        run.syncer.indexed({0: 2})
        orders = Orders(roster=Roster(("a", "b")), policy_json='{"quorum": 2}', policy_revision=1)
        run.syncer.set_orders(orders)
        await asyncio.sleep(1.0)
        header = json.loads(header_of(run, 0, 0))
        run.syncer.repair(0, "a", json.dumps({**header, "version": 1}))
        run.syncer._hold_openings(True)
        service_of(run)._hooks.disk_full.waiting.add(7)  # another fragment of this syncer
        assert [await give(a, lane_id, version=1) for lane_id in (0, 1)] == ["", ""]
        assert service_of(run).runner.rounds.rules.min_contributions == 2
        for _ in range(10):
            await poll(a, b)
            await asyncio.sleep(1.0)
        assert not service_of(run).runner.rounds.is_open, "nothing opens while the disk is full"
        run.syncer._hold_openings(False)
        await poll(a, b)
        assert service_of(run).runner.rounds.is_open

    run_virtual(scenario())


async def published(run: VirtualRun, islands: list[RawIsland], version: int) -> None:
    """Have the first of the islands contribute to each version up to this one."""
    service = service_of(run)
    while service.runner.rounds.version < version:
        await poll(*islands[:2])
        if service.runner.rounds.is_open:
            await islands[0].contribute(
                service.runner.rounds.key, value=1.0 + service.runner.rounds.version / 3
            )
        await asyncio.sleep(1.0)


def test_an_older_version_than_was_lost_repairs_nothing(setting: Setting) -> None:
    nesterov = OuterOptimizer("nesterov", 0.7, 0.9, 0)
    setting = replace(setting, optimizer=nesterov, downlink_codec="int4")

    async def scenario() -> None:
        run, islands = await begun(setting)
        b = islands[1]
        await published(run, islands, 2)
        await run.kill_syncer()
        store = FragmentStore(setting.directory, setting.plan().fragments[0], 4)
        held, lost = store.load(1), store.load(2)
        newest = newest_record(setting, 0)
        rotten, older = bytearray(newest.read_bytes()), record_path(newest.parent, 1).read_bytes()
        for name, section in locate(newest).sections.items():
            if name.startswith("contribution") or name == "theta/0":
                rotten[section.start] ^= 1
        newest.write_bytes(rotten)
        told = header_of(run, 0, 1)  # the coordinator was away when version 2 was published
        run.records.clear()
        await run.start_syncer()
        why = run.syncer.damage(0)
        assert "its version 2 was published" in why

        run.syncer.repair(0, "b", told)
        assert run.syncer.damage(0).startswith(why.partition("It is taken")[0])
        assert "has indexed is 1" in run.syncer.damage(0)
        assert not (await b.poll()).fragments[0].asked
        values = [lane.published for lane in held.lanes]
        assert "not asked of" in await give(b, 0, values[0], version=1)
        assert record_path(newest.parent, 1).read_bytes() == older

        run.syncer.repair(0, "b", header_of(run, 0, 2))  # its own header is whole, and was told
        assert "Version 2 is asked of b" in run.syncer.damage(0)
        for lane_id, lane in enumerate(lost.lanes):
            assert await give(b, lane_id, lane.published, version=2) == ""
        assert run.syncer.damage(0) == ""
        for before, lane in zip(held.lanes, store.load(2).lanes, strict=True):
            assert torch.equal(before.momentum, lane.momentum)

    run_virtual(scenario())


def test_a_later_version_known_of_during_a_repair_is_lost_after_it(setting: Setting) -> None:
    async def scenario() -> None:
        run, (a, _, _) = await damaged(setting)
        assert await give(a, 0) == ""
        assert await give(a, 1) == ""
        await asyncio.sleep(0.5)
        run.syncer.indexed({0: 3})
        await asyncio.sleep(1.0)
        assert "its version 2 was published" in run.syncer.damage(0)
        assert "the newest that can is version 0" in run.syncer.damage(0)
        assert kinds(run) == [FragmentDamaged, FragmentDamaged, FragmentRepaired, FragmentDamaged]

    run_virtual(scenario())


async def closing(run: VirtualRun, islands: list[RawIsland]) -> None:
    """Have the next attempt close, and come back while that is under way."""
    rounds = service_of(run).runner.rounds
    while not rounds.is_open:
        await poll(*islands[:2])
        await asyncio.sleep(0.1)
    contributing = asyncio.create_task(islands[0].contribute(rounds.key))
    while rounds.phase is not Phase.CLOSING:
        await asyncio.sleep(0.05)
    await contributing


async def repaired(run: VirtualRun, islands: list[RawIsland], version: int) -> None:
    """Have a fragment that lost a version take it from b, who holds it to be as the one before."""
    store = FragmentStore(run.setting.directory, run.setting.plan().fragments[0], 4)
    held = store.load(version - 1)
    header = json.loads(header_of(run, 0, version - 1))
    run.syncer.repair(0, "b", json.dumps({**header, "version": version}))
    for lane_id, lane in enumerate(held.lanes):
        assert await give(islands[1], lane_id, lane.published, version=version) == ""
    await asyncio.sleep(1.0)
    assert run.syncer.damage(0) == ""
    for before, lane in zip(held.lanes, store.load(version).lanes, strict=True):
        assert before.momentum.any()
        assert torch.equal(before.momentum, lane.momentum)


@pytest.mark.parametrize("snapshot_rounds", [1, 4])
@pytest.mark.parametrize("when", ["before", "within", "after"])
def test_a_merge_under_way_when_a_version_is_lost_comes_to_nothing(
    setting: Setting, when: str, snapshot_rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    nesterov = OuterOptimizer("nesterov", 0.7, 0.9, 0)
    setting = replace(setting, optimizer=nesterov, snapshot_rounds=snapshot_rounds)

    async def scenario() -> None:
        run, islands = await begun(setting)
        await published(run, islands, 2)
        worker = SlowWorker()
        run.worker = worker
        await restart(run)
        store = service_of(run).runner._store
        draft = store.draft

        def draft_and_lose(*arguments: Any) -> RecordDraft:
            run.syncer.indexed({0: 4})
            return draft(*arguments)

        if when == "within":
            monkeypatch.setattr(store, "draft", draft_and_lose)
        worker.before_s, worker.after_s = (0.0, 2.0) if when == "after" else (2.0, 0.0)
        await closing(run, islands)
        if when == "after":
            await asyncio.sleep(1.0)
            assert store.load(3), "durable, and not announced"
        if when != "within":
            run.syncer.indexed({0: 4})
        await asyncio.sleep(10.0)
        monkeypatch.setattr(store, "draft", draft)
        worker.before_s = worker.after_s = 0.0

        assert "its version 3 was published" in run.syncer.damage(0)
        assert [state.version for state in run.syncer.states] == [2]
        assert max(header["version"] for header in run.records) == 2
        assert not run.syncer.ended.is_set()
        with pytest.raises(RecordInvalid):
            store.load(3)
        await repaired(run, islands, 3)
        await published(run, islands, 4)
        assert not run.syncer.ended.is_set()

    run_virtual(scenario())


@pytest.mark.parametrize("is_expiry", [False, True], ids=["a version", "an expiry"])
def test_what_waits_for_room_is_given_up_when_the_fragment_is_repaired(
    setting: Setting, is_expiry: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = replace(setting, optimizer=OuterOptimizer("nesterov", 0.7, 0.9, 0))

    async def scenario() -> None:
        run, islands = await begun(setting)
        await published(run, islands, 2)
        service = service_of(run)
        while not service.runner.rounds.is_open:
            await poll(*islands[:2])
            await asyncio.sleep(0.1)

        def full(*_: Any) -> None:
            raise DiskFull("no room")

        with monkeypatch.context() as patch:
            patch.setattr(service.runner._store, "record_expiry" if is_expiry else "draft", full)
            key = service.runner.rounds.key
            for island in islands[: 1 + is_expiry]:
                await (island.decline(key) if is_expiry else island.contribute(key))
            while run.syncer.phase(0) != WAITING_FOR_DISK:
                await asyncio.sleep(0.1)
            run.syncer.indexed({0: 4})
            await repaired(run, islands, 3)
            await asyncio.sleep(3.0)
            assert run.syncer.phase(0) != WAITING_FOR_DISK
        await published(run, islands, 4)
        assert not run.syncer.ended.is_set()

    run_virtual(scenario())


def test_moments_of_another_version_under_the_same_number_do_not_stay(setting: Setting) -> None:
    setting = replace(setting, optimizer=OuterOptimizer("nesterov", 0.7, 0.9, 0))

    async def scenario() -> None:
        run, islands = await begun(setting)
        await published(run, islands, 3)
        store = FragmentStore(setting.directory, setting.plan().fragments[0], 4)
        header, held = json.loads(header_of(run, 0, 2)), store.load(2)
        run.syncer.indexed({0: 4}, {0: header["digest"]})  # as if version 3 had been equal to 2
        assert "what is here under its number is not that" in run.syncer.damage(0)
        run.syncer.repair(0, "b", json.dumps({**header, "version": 3}))
        for lane_id, lane in enumerate(held.lanes):
            assert await give(islands[1], lane_id, lane.published, version=3) == ""
        assert run.syncer.damage(0) == ""
        for before, lane in zip(held.lanes, store.load(3).lanes, strict=True):
            assert before.momentum.any()
            assert torch.equal(before.momentum, lane.momentum)

    run_virtual(scenario())
