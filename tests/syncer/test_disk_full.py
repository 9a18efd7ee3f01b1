"""A disk without room: what was under way waits, keeps everything, and goes on by itself."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco import durable
from diloco.durable import DiskFull
from diloco.protocol.rounds.terms import OutcomeKind, RoundKey
from diloco.protos import fragment_pb2 as wire
from diloco.syncer.spool import Spool
from diloco.transport.calls.loopback import run_virtual
from diloco.transport.errors import Overloaded
from diloco.versions.frames import locate_version
from diloco.versions.record import fragment_directory
from diloco.versions.store import FragmentStore, Recovered
from tests.raw_island import KEY, RawIsland, SlowWorker, founded, restart
from tests.syncer.test_merge import CLOSE, FRAGMENT, Bench, base
from tests.syncer.test_syncer_kills import (
    assert_recomputed,
    disturbed,
    truth,
    undisturbed,  # noqa: F401  # a fixture
    whole,
)
from tests.syncer.test_syncer_pins import pin
from tests.virtual_run import InlineWorker, Setting, VirtualIsland, VirtualRun, descend


class FullDisk:
    """Stands for `os` in `diloco.durable`: has no room while it is full, or in its n-th call."""

    def __init__(self, error: int = errno.ENOSPC) -> None:
        self.is_full = False
        self.error = error
        self.num_calls = 0
        self.fails_at = -1

    def __getattr__(self, name: str) -> Any:
        found = (lambda descriptor: None) if name == "fsync" else getattr(os, name)
        takes_room = ("posix_fallocate", "pwrite", "fsync", "replace", "link", "mkdir")
        return self._call(found) if name in takes_room else found

    def _call(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any) -> Any:
            self.num_calls += 1
            if self.is_full or self.num_calls == self.fails_at:
                raise OSError(self.error, os.strerror(self.error))
            return call(*arguments)

        return called


def held_bytes(spool: Spool) -> int:
    spool.give_back()  # counts what has been noted
    return spool._held_bytes


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    disk = FullDisk()
    monkeypatch.setattr(durable, "os", disk)
    return disk


@pytest.fixture(params=[1, 3], ids=["snapshot", "log"])
def setting(request: pytest.FixtureRequest, tmp_path: Path) -> Setting:
    """Two islands, one fragment of two lanes; only raw islands take part."""
    return Setting(
        {"w": [0.0] * 40_000}, descend, tmp_path, inner_steps=8, snapshot_rounds=request.param
    )


# -- the merge -------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG], ids=os.strerror)
def test_no_room_has_one_name(disk: FullDisk, tmp_path: Path, error: int) -> None:
    disk.is_full, disk.error = True, error

    with pytest.raises(DiskFull, match=os.strerror(error)):
        durable.write_durably(tmp_path / "x", [b"x"])

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("rounds", "spool_bytes"),
    [(1, 1 << 30), (3, 1 << 30), (3, 0)],
    ids=["snapshot", "log", "log-spooled-on-disk"],
)
def test_a_close_that_found_no_room_anywhere_is_repeated_to_the_same_bytes(
    disk: FullDisk, tmp_path: Path, rounds: int, spool_bytes: int
) -> None:
    def bench(name: str) -> Bench:
        made = Bench(tmp_path / name, num_threads=2, spool_bytes=spool_bytes)
        made.store = FragmentStore(made.store.store_dir, FRAGMENT, 4, snapshot_rounds=rounds)
        made.merger = replace(made.merger, store=made.store)
        return made

    fresh = bench("fresh")
    expected = fresh.merger.publish(fresh.base, CLOSE, fresh.spooled())
    number = 0
    while True:
        number += 1
        tried = bench(f"full-{number}")
        spool = tried.spooled()
        held = held_bytes(tried.spool)
        disk.num_calls, disk.fails_at = 0, number
        try:
            tried.merger.publish(tried.base, CLOSE, spool)
            break
        except DiskFull:
            disk.fails_at = -1

        assert held_bytes(tried.spool) == held
        for state, untouched in zip(tried.base.lanes, base().lanes, strict=True):
            assert all(torch.equal(v, untouched.vectors[n]) for n, v in state.vectors.items())
        record = tried.merger.publish(tried.base, CLOSE, spool)
        assert record.header() == expected.header()
        assert held_bytes(tried.spool) == 0
        recovered = FragmentStore(tried.store.store_dir, FRAGMENT, 4).recover()
        assert recovered is not None
        assert recovered.record.header() == expected.header()
    assert number > 15


def test_without_room_no_lane_is_merged(disk: FullDisk, tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    theta = [lane.theta for lane in bench.base.lanes]
    versions = [values._version for values in theta]
    disk.is_full = True

    for _ in range(3):
        with pytest.raises(DiskFull):
            bench.merger.publish(bench.base, CLOSE, bench.spooled())

    assert [values._version for values in theta] == versions, "touched and restored"


# -- a syncer --------------------------------------------------------------------------------------


def test_rounds_wait_for_room_and_go_on(
    setting: Setting, disk: FullDisk, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        run, (a, b) = await founded(setting)
        await a.contribute(value=2.0)
        disk.is_full = True
        with caplog.at_level(logging.INFO):
            await b.contribute(value=4.0)
            await asyncio.sleep(600.0)
            assert run.syncer.phase(0) == "waiting for disk"
            assert run.syncer.meter.counts.waiting_for_disk == {0}
            assert not (await a.poll(KEY)).outcomes, "undecided"
            assert not run.syncer.ended.is_set()
            disk.is_full = False
            await asyncio.sleep(2.0)

        assert await a.published(1) == [-3.0, -3.0]
        assert run.syncer.phase(0) == "open"
        assert await a.end() is OutcomeKind.INCLUDED
        assert run.syncer.meter.counts.waiting_for_disk == set()
        assert [r.message.partition(",")[0] for r in caplog.records] == [
            "the disk is full",
            "what is to be durable can be written again",
        ]

    run_virtual(scenario())


def test_an_expiry_waits_for_room(setting: Setting, disk: FullDisk) -> None:
    async def scenario() -> None:
        run, (a, _) = await founded(setting)
        await a.contribute()
        disk.is_full = True
        await asyncio.sleep(setting.round_deadline_s + 100)
        assert run.syncer.phase(0) == "waiting for disk"
        assert run.syncer.states[0].attempt == 0, "an attempt that opens after it may be forgotten"
        disk.is_full = False
        await asyncio.sleep(2.0)

        assert run.syncer.states[0].attempt == 1
        assert run.syncer.states[0].is_open

    run_virtual(scenario())


def test_nothing_opens_while_another_fragment_waits(setting: Setting, disk: FullDisk) -> None:
    async def scenario() -> None:
        run, (a, b) = await founded(setting)
        room = run.syncer._services[0]._hooks.disk_full
        disk.is_full = True
        another = asyncio.create_task(
            room.run(7, InlineWorker(), lambda: durable.write_json(setting.directory / "x", 1))
        )
        await asyncio.sleep(1.0)
        await a.contribute(value=2.0)
        await b.contribute(value=4.0)  # what is open goes on, and waits for room too
        await asyncio.sleep(10.0)
        assert room.waiting == {0, 7}
        room.waiting.add(8)
        disk.is_full = False
        await asyncio.sleep(10.0)

        assert another.done()
        assert (run.syncer.states[0].version, run.syncer.states[0].is_open) == (1, False)
        room._found(8)
        assert run.syncer.states[0].is_open

    run_virtual(scenario())


def test_room_on_the_disk_again_opens_nothing_while_a_claim_is_in_doubt(
    setting: Setting, disk: FullDisk
) -> None:
    async def scenario() -> None:
        run, (a, b) = await founded(setting)
        await restart(run)
        claim = wire.FragmentState(fragment_id=0, is_founded=True, version=99, digest=b"x" * 32)
        await a.poll(known=[claim])
        for island in (a, b):
            await island.contribute()
        await asyncio.sleep(10.0)
        state = run.syncer.states[0]
        assert (state.version, state.is_open) == (1, False), "nobody has said what was published"
        room = run.syncer._services[0]._hooks.disk_full
        disk.is_full = True
        written = asyncio.create_task(
            room.run(7, InlineWorker(), lambda: durable.write_json(setting.directory / "x", 1))
        )
        await asyncio.sleep(5.0)
        assert room.waiting == {7}
        disk.is_full = False
        await asyncio.sleep(10.0)
        assert written.done() and not room.waiting

        assert not run.syncer.states[0].is_open
        run.syncer.indexed({0: 2})
        assert run.syncer.states[0].is_open

    run_virtual(scenario())


async def refused(island: RawIsland, key: RoundKey = KEY) -> None:
    """Have a lane refused for want of room, until its island gives up."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await island.submit(key)


def test_a_lane_that_the_spool_has_no_room_for_is_sent_again(
    setting: Setting, disk: FullDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise DiskFull(errno.ENOSPC, "No space left on device")

    async def scenario() -> None:
        run, (a, _) = await founded(setting)
        with monkeypatch.context() as patch:
            patch.setattr(Spool, "put", full)
            await refused(a)
        assert not run.syncer.ended.is_set()
        assert (await a.submit()).status == wire.SUBMIT_STATUS_RECEIVED

    run_virtual(scenario())


def test_no_deadline_passes_on_an_island_that_the_syncer_has_no_room_for(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It passes on one that was refused room and then says nothing more."""

    def full(*_: object) -> None:
        raise DiskFull(errno.ENOSPC, "No space left on device")

    async def scenario() -> None:
        deadline_s = setting.round_deadline_s
        run, (a, b) = await founded(setting)
        await a.contribute(value=2.0)
        with monkeypatch.context() as patch:
            patch.setattr(Spool, "put", full)
            for _ in range(5):
                await asyncio.sleep(0.9 * deadline_s)
                await refused(b)
        assert (run.syncer.states[0].version, run.syncer.states[0].attempt) == (0, 0)
        await asyncio.sleep(0.9 * deadline_s)
        await b.contribute(value=4.0)
        assert run.syncer.states[0].version == 1

        key = replace(KEY, version=1)
        await a.contribute(key)
        with monkeypatch.context() as patch:
            patch.setattr(Spool, "put", full)
            await refused(b, key)
        await asyncio.sleep(1.1 * deadline_s)
        assert (run.syncer.states[0].version, run.syncer.states[0].attempt) == (1, 1)

    run_virtual(scenario())


def test_a_deadline_that_passed_in_a_verification_waits_where_there_is_no_room_after_it(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was refused room had come in time."""

    def full(*_: object) -> None:
        raise DiskFull(errno.ENOSPC, "No space left on device")

    async def scenario() -> None:
        run, (a, b) = await founded(setting)
        await a.contribute(value=2.0)
        assert (await b.submit(lane_id=0, value=4.0)).status == wire.SUBMIT_STATUS_RECEIVED
        reader = run.syncer._services[0]._reader
        with monkeypatch.context() as patch:
            patch.setattr(Spool, "put", full)
            patch.setattr(reader, "_worker", SlowWorker(1.5 * setting.round_deadline_s))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.6 * setting.round_deadline_s):
                    await b.submit(lane_id=1, value=4.0)
        await asyncio.sleep(0.8 * setting.round_deadline_s)
        assert (run.syncer.states[0].version, run.syncer.states[0].attempt) == (0, 0)

        assert (await b.submit(lane_id=1, value=4.0)).status == wire.SUBMIT_STATUS_RECEIVED

        await asyncio.sleep(1.0)
        assert (run.syncer.states[0].version, run.syncer.states[0].attempt) == (1, 0)

    run_virtual(scenario())


@pytest.mark.parametrize("what", ["grant", "founding", "pin"])
def test_calls_that_need_room_are_to_be_repeated(
    setting: Setting, disk: FullDisk, what: str
) -> None:
    async def scenario() -> None:
        run = VirtualRun(setting)
        await run.start_syncer()
        a, b = RawIsland(run, "a"), RawIsland(run, "b")
        await b.poll()
        store = run.incarnations.store
        if what != "grant":
            await a.poll()
        if what == "pin":
            await a.upload()

        def full(_: object) -> None:
            raise DiskFull(errno.ENOSPC, "No space left on device")

        disk.is_full, run.incarnations.store = True, full  # type: ignore[method-assign]
        calls = {"grant": a.poll, "founding": a.upload, "pin": lambda: pin(a, 4, {0: 0})}
        with pytest.raises(Overloaded, match="the syncer's disk is full, call again"):
            await calls[what]()
        disk.is_full, run.incarnations.store = False, store  # type: ignore[method-assign]

        assert not run.syncer.ended.is_set()
        await a.poll()
        await a.upload()
        assert (await pin(a, 4, {0: 0})).is_accepted

    run_virtual(scenario())


def test_a_start_waits_for_the_room_that_a_damaged_version_is_made_again_in(
    setting: Setting,
    disk: FullDisk,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recover, num_tries = FragmentStore.recover, 0

    def counted(store: FragmentStore) -> Recovered | None:
        nonlocal num_tries
        num_tries += 1
        return recover(store)

    async def scenario() -> None:
        run, (a, b) = await founded(setting)
        await a.contribute(value=2.0)
        await b.contribute(value=4.0)
        await run.kill_syncer()
        stored = locate_version(fragment_directory(setting.directory, 0), 1)
        data = bytearray(stored.path.read_bytes())
        data[stored.sections["payload/0"].start] ^= 1
        stored.path.write_bytes(data)

        disk.is_full = True
        monkeypatch.setattr(FragmentStore, "recover", counted)
        starting = asyncio.create_task(run.start_syncer())
        await asyncio.sleep(600.0)
        assert not starting.done()
        assert num_tries < 20, "it reads everything, each time"
        assert "the disk is full" in caplog.text
        disk.is_full = False
        await starting

        assert await a.published(1) == [-3.0, -3.0]
        assert run.syncer.states[0].is_open

    run_virtual(scenario())


@pytest.mark.parametrize("seed", range(2), ids=["snapshot", "log"])
def test_a_run_whose_disk_is_full_now_and_then_publishes_the_same_bytes(
    tmp_path: Path,
    undisturbed: tuple[Any, Any],  # noqa: F811
    disk: FullDisk,
    seed: int,
) -> None:
    setting = whole(tmp_path, seed)

    async def fill() -> None:
        for seconds in (0.5, 7.0, 100.0, 3.0):
            disk.is_full = True
            await asyncio.sleep(seconds)
            disk.is_full = False
            await asyncio.sleep(4.0)
        await asyncio.sleep(1e6)

    async def scenario() -> tuple[VirtualRun, dict[str, VirtualIsland]]:
        run = VirtualRun(setting)
        islands, ends = await disturbed(run, fill())
        assert ends == [None, None]
        return run, islands

    run, islands = run_virtual(scenario())

    records, published = undisturbed
    assert run.epoch == 1, "it was never started again"
    assert sum(run.syncer.meter.counts.disk_full.values()) > 1
    assert truth(run.records) == records
    assert {name: island.published for name, island in islands.items()} == published
    assert_recomputed(setting)
