"""Transfers at the syncer: what is taken, what is refused, what a restart leaves, what expires."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import mmap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import blake3
import pytest

from diloco import durable
from diloco.durable import DiskFull
from diloco.protocol.rounds.orders import Orders
from diloco.protocol.rounds.terms import Roster
from diloco.protocol.rounds.transfer_manifest import LaneDigest, TransferManifest, lane_name
from diloco.protos import fragment_pb2 as wire
from diloco.protos.control_pb2 import StateTransfer
from diloco.syncer import transfer_store
from diloco.syncer.worker import Workers
from diloco.transport.calls.loopback import run_virtual
from diloco.versions.store import FragmentStore
from tests.raw_island import KEY, NUMEL, RawIsland, SlowWorker, founded, restart
from tests.syncer.test_disk_full import FullDisk
from tests.virtual_run import RUN, Setting, VirtualRun

CHECKPOINT = 3


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting({"w": [0.0] * NUMEL}, lambda *_: None, tmp_path, inner_steps=8)


def transfers(*checkpoints: int) -> list[StateTransfer]:
    """Of these checkpoints, from each of two islands to the other."""
    return [
        StateTransfer(source=source, island=island, checkpoint=checkpoint)
        for source, island in ("ab", "ba")
        for checkpoint in checkpoints
    ]


async def naming(setting: Setting) -> tuple[VirtualRun, list[RawIsland]]:
    """A run that is founded, and whose coordinator has named what islands give in these tests."""
    run, islands = await founded(setting)
    run.named_transfers = transfers(3, 4, 5, 6)
    run.syncer.set_transfers(run.named_transfers)
    return run, islands


def lane_bytes(run: VirtualRun, lane_id: int) -> bytes:
    numel = run.setting.plan().fragments[0].lanes[lane_id].numel
    return bytes([lane_id + 1]) * (8 * numel + 100)


def manifest_of(
    run: VirtualRun, source: str = "a", checkpoint: int = CHECKPOINT
) -> TransferManifest:
    plan = run.setting.plan()
    lanes = [lane.lane_id for lane in plan.fragments[0].lanes]
    payloads = {lane_name(0, n): lane_bytes(run, n) for n in lanes}
    given = {n: LaneDigest(len(p), blake3.blake3(p).hexdigest()) for n, p in payloads.items()}
    return TransferManifest(
        RUN, 0, source, checkpoint, 9, "adamw", 8, (2,), plan.fingerprint(), given
    )


async def put(island: RawIsland, payload: bytes, lane_id: int | None = None, **fields: Any) -> str:
    """Returns why it was refused, or nothing."""
    header = wire.StatePutHeader(
        checkpoint=CHECKPOINT,
        is_manifest=lane_id is None,
        lane_id=lane_id or 0,
        digest=blake3.blake3(payload).digest(),
    )
    header.MergeFrom(wire.StatePutHeader(**fields))
    ack = wire.Ack.FromString((await island.call("heal.put", header, payload)).header)
    assert ack.is_accepted == (not ack.message)
    return ack.message


async def get(
    island: RawIsland, lane_id: int | None = None, source: str = "a", checkpoint: int = CHECKPOINT
) -> bytes | None:
    """Returns what is there; None: nothing."""
    header = wire.StateGetHeader(
        source=source, checkpoint=checkpoint, is_manifest=lane_id is None, lane_id=lane_id or 0
    )
    reply = await island.call("heal.get", header)
    said = wire.FetchReply.FromString(reply.header)
    if said.status != wire.FETCH_STATUS_OK:
        assert said.status == wire.FETCH_STATUS_UNKNOWN
        return None
    assert said.digest == blake3.blake3(reply.payload).digest()
    return bytes(reply.payload)


def test_what_one_island_gives_another_takes_lane_by_lane_as_it_comes(setting: Setting) -> None:
    async def scenario() -> None:
        run, (a, b) = await naming(setting)
        text = manifest_of(run).to_json()
        assert await get(b) is None

        assert await put(a, text) == ""
        assert await get(b) == text
        assert await get(b, 0) is None
        for lane_id in (0, 1, 1):
            assert await put(a, lane_bytes(run, lane_id), lane_id) == ""
        assert await get(b, 1) == lane_bytes(run, 1)
        assert await get(b, 0, source="b") is None
        assert await get(b, 0, checkpoint=CHECKPOINT + 1) is None

    run_virtual(scenario())


def test_what_the_coordinator_has_not_named_is_neither_taken_nor_given(setting: Setting) -> None:
    async def scenario() -> None:
        setting.islands = ("a", "b", "c")
        run, (a, b, c) = await founded(setting, "abc")
        giving = asyncio.ensure_future(put(a, manifest_of(run).to_json()))
        await asyncio.sleep(5.0)
        assert not giving.done(), "told to call again: the coordinator may not have said it yet"
        assert not (setting.directory / "transfers").exists()

        named = StateTransfer(source="a", island="b", checkpoint=CHECKPOINT)
        run.syncer.set_transfers([named])
        assert await giving == ""
        assert await get(b) == manifest_of(run).to_json()
        assert await get(c) is None, "it is for another"
        for island, checkpoint in ((b, CHECKPOINT), (a, CHECKPOINT + 1)):
            unasked = manifest_of(run, island.name, checkpoint).to_json()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(600.0):  # of virtual time
                    await put(island, unasked, checkpoint=checkpoint)

        run.syncer.set_transfers([])
        assert await get(b) is None

    run_virtual(scenario())


def _not_json(text: bytes) -> bytes:
    return text[:-5]


def _changed(**changes: Any) -> Callable[[bytes], bytes]:
    return lambda text: json.dumps({**json.loads(text), **changes}).encode()


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (_not_json, "no manifest of a transfer"),
        (_changed(lanes=None), "no manifest of a transfer"),
        (_changed(optimizer_step=-1), "no manifest of a transfer"),
        (_changed(optimizer_step=2.5), "no manifest of a transfer"),
        (_changed(plan="0" * 64), "of another model"),
        (_changed(versions=[1, 2]), "2 versions; the plan has 1"),
        (_changed(lanes={}), "0 lanes are listed, the plan has these 2"),
        (_changed(donor="b"), "another transfer than its header"),
        (_changed(timeline=1), "another transfer than its header"),
        (_changed(lanes={f"0/{n}": {"num_bytes": 9, "blake3": "0" * 64} for n in (0, 1)}), "asks"),
        (lambda text: text + b" " * 100_000, "are allowed"),
    ],
)
def test_a_manifest_that_cannot_be_is_refused(
    setting: Setting, spoil: Callable[[bytes], bytes], why: str
) -> None:
    async def scenario() -> None:
        run, (a, b) = await naming(setting)

        assert why in await put(a, spoil(manifest_of(run).to_json()))
        assert await get(b) is None
        assert sum(run.syncer.meter.counts.refusals.values()) == 1

    run_virtual(scenario())


def test_a_lane_that_is_not_what_the_manifest_says_is_refused(setting: Setting) -> None:
    async def scenario() -> None:
        run, (a, b) = await naming(setting)
        lane = lane_bytes(run, 0)
        assert await put(a, lane, 0) == "its manifest is not here: it goes first"
        await put(a, manifest_of(run).to_json())

        assert await put(a, lane[:-1], 0) == "lane 0/0 has another digest in the manifest"
        torn = await put(a, lane[:-1], 0, digest=blake3.blake3(lane).digest())
        assert torn == f"{len(lane) - 1} bytes, the plan asks {len(lane)}"
        flipped = bytes([lane[0] ^ 1]) + lane[1:]
        other = await put(a, flipped, 0, digest=blake3.blake3(lane).digest())
        assert other == "the payload does not match the digest in its header"
        assert await put(a, lane, 7) == "there is no lane 0/7"
        assert await put(b, lane, 0) == "its manifest is not here: it goes first", "not its own"
        assert await get(b, 0) is None

    run_virtual(scenario())


@pytest.mark.parametrize("num_left", [100, 0])
def test_a_syncer_that_starts_again_has_what_it_had_but_what_is_damaged(
    setting: Setting, num_left: int
) -> None:
    async def scenario() -> None:
        run, (a, b) = await naming(setting)
        await put(a, manifest_of(run).to_json())
        for lane_id in (0, 1):
            await put(a, lane_bytes(run, lane_id), lane_id)
        (torn,) = (setting.directory / "transfers").glob("*/0-1.safetensors")
        torn.write_bytes(torn.read_bytes()[:num_left])
        left = setting.directory / "transfers" / "half"
        left.mkdir()

        await restart(run)

        assert await get(b) == manifest_of(run).to_json()
        assert await get(b, 0) == lane_bytes(run, 0)
        assert await get(b, 1) is None
        assert not left.exists()
        assert await put(a, lane_bytes(run, 1), 1) == ""
        assert await get(b, 1) == lane_bytes(run, 1)

    run_virtual(scenario())


def test_no_more_than_two_are_kept_and_none_for_ever(setting: Setting) -> None:
    async def scenario() -> None:
        run, (a, b) = await naming(setting)
        for number in (3, 4):
            text = manifest_of(run, checkpoint=number).to_json()
            assert await put(a, text, checkpoint=number) == ""
        text = manifest_of(run, checkpoint=5).to_json()
        third = asyncio.ensure_future(put(a, text, checkpoint=5))

        await asyncio.sleep(transfer_store.IDLE_S / 2)
        assert await get(b, checkpoint=4) is not None
        assert not third.done(), "told to call again, not refused"
        assert await third == "", "in the place of what nobody asks for"
        assert await get(b, checkpoint=3) is None
        assert await get(b, checkpoint=4) is not None

        await asyncio.sleep(transfer_store.EXPIRES_S / 2)
        assert await get(b, checkpoint=5) is not None
        await asyncio.sleep(transfer_store.EXPIRES_S / 2 + 1.0)
        assert await get(b, checkpoint=4) is None
        assert await get(b, checkpoint=5) is not None
        await asyncio.sleep(transfer_store.EXPIRES_S + 1.0)
        assert not list((setting.directory / "transfers").iterdir())

    run_virtual(scenario())


def test_two_that_come_at_once_do_not_take_the_place_of_one(setting: Setting) -> None:
    async def scenario() -> None:
        run = VirtualRun(setting)
        run.named_transfers = transfers(3, 4, 5, 6)
        run.worker = SlowWorker(before_s=0.1)
        await run.start_syncer()
        a, b = RawIsland(run, "a"), RawIsland(run, "b")

        async def begin(number: int) -> str:
            return await put(a, manifest_of(run, "a", number).to_json(), checkpoint=number)

        assert [await begin(3), await begin(4)] == ["", ""]
        await asyncio.sleep(transfer_store.IDLE_S)
        assert await get(b, checkpoint=4) is not None

        assert await asyncio.gather(begin(5), begin(6)) == ["", ""]

        assert len([*(setting.directory / "transfers").iterdir()]) == transfer_store.MOST_TRANSFERS

    run_virtual(scenario())


def test_rounds_and_transfers_do_not_wait_for_each_other(setting: Setting) -> None:
    async def scenario() -> None:
        run = VirtualRun(setting)
        run.named_transfers = transfers(CHECKPOINT)
        slow = SlowWorker(before_s=20.0)
        run.workers = replace(Workers.all_by(SlowWorker(before_s=1.0)), transfers=slow)
        await run.start_syncer()
        a, b = (RawIsland(run, name) for name in "ab")
        loop = asyncio.get_running_loop()
        await put(a, manifest_of(run).to_json())
        await put(a, lane_bytes(run, 0), 0)
        for island in (a, b):
            await island.poll()
        taking, began = asyncio.ensure_future(get(b, 0)), loop.time()
        await a.upload()
        for island in (a, b):
            await island.contribute()
        while run.syncer.states[0].version == 0:
            await asyncio.sleep(0.1)
        assert loop.time() - began < 20.0

        assert await taking == lane_bytes(run, 0)

    run_virtual(scenario())


def test_a_lane_takes_no_memory_while_it_is_sent(setting: Setting) -> None:
    async def scenario() -> None:
        run, (a, b) = await naming(setting)
        await put(a, manifest_of(run).to_json())
        await put(a, lane_bytes(run, 0), 0)
        header = wire.StateGetHeader(source="a", checkpoint=CHECKPOINT, grant=b.grant)

        reply, payload = await run.syncer._transfers.get(header)

        assert isinstance(payload, memoryview) and isinstance(payload.obj, mmap.mmap)
        for path in (setting.directory / "transfers").glob("*/*.safetensors"):
            path.unlink()
        assert blake3.blake3(payload).digest() == reply.digest

    run_virtual(scenario())


def test_a_full_disk_lets_transfers_go_and_not_the_syncer(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        run, (a, b) = await naming(setting)
        await put(a, manifest_of(run).to_json())
        await put(a, lane_bytes(run, 0), 0)
        disk = FullDisk()
        monkeypatch.setattr(durable, "os", disk)
        disk.is_full = True

        assert "disk is full" in await put(a, lane_bytes(run, 1), 1)

        assert not list((setting.directory / "transfers").iterdir())
        assert await get(b) is None
        disk.is_full = False
        assert await put(a, manifest_of(run).to_json()) == ""
        await a.contribute()
        assert run.syncer.failure is None

    run_virtual(scenario())


@pytest.mark.parametrize("spool_bytes", [1 << 20, 0], ids=["version", "lane"])
def test_what_finds_no_room_has_that_of_transfers(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, spool_bytes: int
) -> None:
    setting.spool_bytes = spool_bytes
    of_transfers = setting.directory / "transfers"
    reserve, write_bytes = durable.reserve, Path.write_bytes

    def check_room() -> None:
        if list(of_transfers.glob("*/*.safetensors")):
            raise DiskFull(errno.ENOSPC, "no room besides a transfer")

    def reserve_if_room(*arguments: Any) -> None:
        check_room()
        reserve(*arguments)

    def write_if_room(path: Path, data: bytes) -> int:
        check_room()
        return write_bytes(path, data)

    async def scenario() -> None:
        run, (a, b) = await naming(setting)
        await put(a, manifest_of(run).to_json())
        await put(a, lane_bytes(run, 0), 0)
        monkeypatch.setattr(durable, "reserve", reserve_if_room)
        monkeypatch.setattr(Path, "write_bytes", write_if_room)

        async with asyncio.timeout(30.0):  # of virtual time; transfers expire much later
            for island, lane_id in itertools.product((a, b), (0, 1)):
                while (await island.submit(KEY, lane_id)).status != wire.SUBMIT_STATUS_RECEIVED:
                    await asyncio.sleep(0.5)
        await asyncio.sleep(5.0)

        assert run.syncer.states[0].version == 1
        assert not list(of_transfers.iterdir())
        assert await get(b) is None

    run_virtual(scenario())


@pytest.mark.parametrize("what", ["a cut", "orders"])
def test_what_the_coordinator_asks_for_has_the_room_of_transfers(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    async def scenario() -> None:
        run, (a, b) = await naming(setting)
        await put(a, manifest_of(run).to_json())
        await put(a, lane_bytes(run, 0), 0)

        def full(*_: int) -> None:
            if list((setting.directory / "transfers").iterdir()):
                raise DiskFull(errno.ENOSPC, "no room besides a transfer")

        pin = FragmentStore.pin
        monkeypatch.setattr(FragmentStore, "pin", lambda *of: (full(), pin(*of)))
        run.orders.before_store = full
        for _ in range(2):  # as with every report
            if what == "a cut":
                run.syncer.keep_cut(1, [0])
            else:
                run.syncer.set_orders(Orders(roster=Roster(("a",))))
            await asyncio.sleep(2.0)

        assert await get(b) is None
        if what == "a cut":
            assert run.syncer.pinned_cut == 1
        else:
            assert run.syncer._admission.roster.live == ("a",)

    run_virtual(scenario())


def test_who_is_fenced_neither_gives_nor_takes(setting: Setting) -> None:
    async def scenario() -> None:
        run, (a, b) = await naming(setting)
        await RawIsland(run, "a", incarnation=2).poll()
        assert "newer start" in await put(a, manifest_of(run).to_json())
        header = wire.StateGetHeader(source="a", checkpoint=CHECKPOINT, is_manifest=True)
        reply = wire.FetchReply.FromString((await a.call("heal.get", header)).header)
        assert reply.status == wire.FETCH_STATUS_FENCED
        other = replace(manifest_of(run), source="b")
        assert await put(b, other.to_json()) == ""

    run_virtual(scenario())
