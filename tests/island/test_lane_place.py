"""Where lanes are computed and kept, and by whom: no loop waits for it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco.compression.base import from_bytes
from diloco.device_thread import DeviceThread
from diloco.errors import AggregationError
from diloco.island.exchange.checkpoint_state import FragmentCheckpoint, LaneCheckpoint
from diloco.island.exchange.contributions import Send
from diloco.island.lanes.parameters import tensor_specs
from diloco.island.lanes.place import LanePlace
from diloco.island.lanes.shards import LaneShards
from diloco.outer.fragments import make_plan
from diloco.protocol.island.ledger import FragmentLedger, Outstanding
from diloco.protocol.island.soundness import Reach
from diloco.protocol.rounds.terms import RoundKey
from tests.virtual_run import Setting, VirtualRun, descend

CPU = torch.device("cpu")
TWO_LANES = 40_000


def test_what_is_kept_apart_is_a_copy_and_what_is_not_is_the_same() -> None:
    values = torch.arange(5.0)

    assert LanePlace().kept(values) is values
    kept = LanePlace(is_apart=True).kept(values)
    assert kept.data_ptr() != values.data_ptr()
    assert torch.equal(kept, values)


@pytest.mark.parametrize(
    ("free", "step_bytes", "device", "is_apart"),
    [
        (122_880, 0, "meta", False),
        (122_880, 25_000, "meta", True),
        (57_344, 0, "meta", True),
        (57_343, 0, "cpu", False),
    ],
    ids=["all", "all but what steps take", "passing", "nothing"],
)
def test_lanes_are_computed_on_the_device_where_steps_leave_room_for_what_passes(
    free: int,
    step_bytes: int,
    device: str,
    is_apart: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    parameters = {f"w{i}": torch.zeros(512, device="meta", requires_grad=True) for i in range(4)}
    plan = make_plan(tensor_specs(parameters), num_fragments=4)
    shards = LaneShards(plan, parameters, group=None)
    monkeypatch.setattr(shards, "_free_bytes", lambda device: free)

    with caplog.at_level(logging.WARNING):
        # 8 vectors of 2 KiB and 4 of 8 KiB, twice; gradients and moments: 3 of 8 KiB, or as said.
        shards.find_room(4, step_bytes)

    assert (shards.device.type, shards.place.is_apart) == (device, is_apart)
    assert bool(caplog.records) == (device == "cpu")


def test_the_loop_goes_on_while_a_contribution_is_made_and_a_late_one_is_not_sent(
    tmp_path: Path,
) -> None:
    setting = Setting({"w": [16.0] * 8}, descend, tmp_path, 8, islands=("a",), step_s=0.01)
    key = RoundKey(0, 0, 0, 0)

    async def scenario() -> None:
        run = VirtualRun(setting)
        await run.start_syncer()
        thread, gate = DeviceThread("test"), threading.Event()
        island = run.island("a", place=LanePlace(thread=thread))
        await island.start()
        busy, freed = thread.submit(CPU, gate.wait), list[int]()

        exchange = island.exchange
        sent = Outstanding(key, 4, 4, 4, is_flush=False)
        local = {0: torch.full((128,), 15.0)}
        exchange.send(Send(sent, local, free=lambda: freed.append(1)))
        await asyncio.sleep(0.05)
        assert exchange.view(0).key == key
        assert not busy.done() and not freed

        exchange.settle(0, is_merged=False, is_included=False)
        again = replace(sent, key=replace(key, attempt=1))
        exchange.send(Send(again, {0: torch.full((128,), 14.0)}, free=lambda: freed.append(2)))
        gate.set()
        await exchange.capture({})
        assert freed == [1, 2]
        assert [event["attempt"] for event in island.kinds("fragment_sent")] == [0, 1]
        (lane,) = exchange._fragments[0].sending.values()
        delta = from_bytes(lane.payload).view(torch.float32)
        assert delta[0] == 16.0 - 14.0, "of what was sent last"
        await exchange.stop()
        await run.kill_syncer()

    asyncio.run(scenario())


class Recording(LanePlace):
    """Records what is brought to where lanes are computed."""

    def __init__(self, thread: DeviceThread) -> None:
        super().__init__(thread=thread)
        self.brought: list[Tensor] = []

    def there(self, values: Tensor, device: torch.device | None = None) -> Tensor:
        self.brought.append(values)
        return super().there(values, device)


def test_what_a_lane_is_made_with_is_on_its_way_while_the_one_before_is_made(
    tmp_path: Path,
) -> None:
    setting = Setting({"w": [16.0] * TWO_LANES}, descend, tmp_path, 8, islands=("a",))

    async def scenario() -> None:
        run = VirtualRun(setting)
        await run.start_syncer()
        thread, gate = DeviceThread("test"), threading.Event()
        place = Recording(thread)
        island = run.island("a", place=place)
        await island.start()
        busy = thread.submit(CPU, gate.wait, 10.0)
        exchange, anchor = island.exchange, dict(island.exchange.anchor(0))
        local = {lane_id: lane - 1.0 for lane_id, lane in anchor.items()}
        place.brought.clear()

        exchange.send(Send(Outstanding(RoundKey(0, 0, 0, 0), 4, 4, 4, is_flush=False), local))
        await asyncio.sleep(0.05)
        assert not busy.done()
        assert len(place.brought) == len(anchor) == 2

        gate.set()
        await exchange.wait_until_made()
        assert exchange._fragments[0].sending.keys() == anchor.keys()
        await exchange.stop()
        await run.kill_syncer()

    asyncio.run(scenario())


class SlowResiduals(UserDict[int, Tensor]):
    """Residuals that take as long to read as large ones do."""

    def __init__(self, of: Mapping[int, Tensor], gate: threading.Event) -> None:
        super().__init__(of)
        self.gate = gate

    def __getitem__(self, lane_id: int) -> Tensor:
        self.gate.wait(5.0)
        return super().__getitem__(lane_id)


def test_what_is_restored_is_summed_up_and_hashed_off_the_loop(tmp_path: Path) -> None:
    setting = Setting({"w": [16.0] * 8}, descend, tmp_path, 8, islands=("a",), error_feedback=True)

    async def scenario() -> None:
        run, gate = VirtualRun(setting), threading.Event()
        await run.start_syncer()
        first = run.island("a")
        await first.start()
        captured: dict[int, LaneCheckpoint] = {}
        await first.exchange.capture(captured)
        await first.exchange.stop()
        lanes = replace(captured[0], residual=SlowResiduals(captured[0].residual, gate))

        thread = DeviceThread("test")
        exchange = run.island("a", 2, place=LanePlace(thread=thread)).exchange
        exchange.restore([FragmentCheckpoint(FragmentLedger(0, 0), lanes, Reach())], sent_by=1)
        await exchange.wait_until_entered(0.2)
        exchange._tasks.notify()
        assert exchange.view(0).anchor_version == -1

        gate.set()
        await exchange.wait_until_entered(10.0)
        fragment = exchange._fragments[0]
        assert fragment.anchor_version == 0
        assert not fragment.flipped() and fragment.residual_sums.keys() == {0}

        hashing = threading.Event()
        thread.submit(CPU, hashing.wait, 10.0)
        exchange.resume(Outstanding(RoundKey(0, 0, 0, 0), 4, 4, 4, is_flush=False), lanes)
        await asyncio.sleep(0.05)
        assert exchange.view(0).key is None, "it may end once its lanes are there"
        hashing.set()
        await exchange.wait_until_made()
        assert exchange.view(0).key == RoundKey(0, 0, 0, 0) and fragment.sending.keys() == {0}
        await exchange.stop()
        await run.kill_syncer()

    asyncio.run(scenario())


def test_a_flush_of_lanes_that_are_kept_apart_takes_room_for_one_fragment(tmp_path: Path) -> None:
    setting = Setting(
        {name: [16.0] * 2 for name in "uvwx"},
        descend,
        tmp_path,
        8,
        islands=("a",),
        num_fragments=4,
        step_s=0.01,
        flush=True,
    )

    async def scenario() -> None:
        run = VirtualRun(setting)
        await run.start_syncer()
        place = LanePlace(is_apart=True, thread=DeviceThread("test"))
        island = run.island("a", place=place)
        await asyncio.wait_for(island.run(), 20.0)

        assert len(island.kinds("fragment_sent")) > 4
        assert len(island.session._parts.shards._rooms) == 1
        await island.exchange.stop()
        await run.kill_syncer()

    asyncio.run(scenario())


class FullDevice(LanePlace):
    """A device that has no room now and then."""

    is_full = False

    def there(self, values: Tensor, device: torch.device | None = None) -> Tensor:
        if self.is_full:
            raise torch.OutOfMemoryError("no room")
        return super().there(values, device)


@pytest.mark.parametrize("is_apart", [True, False], ids=["apart", "on the host"])
def test_what_finds_no_room_ahead_of_its_merge_is_merged_all_the_same(is_apart: bool) -> None:
    parameters = {"w": torch.zeros(300, requires_grad=True)}
    plan = make_plan(tensor_specs(parameters), num_fragments=1)
    shards = LaneShards(plan, parameters, group=None)
    shards._is_away = True  # as with parameters on an accelerator
    shards.place = place = FullDevice(is_apart=is_apart)
    lanes = {i: torch.full_like(lane, 2.0) for i, lane in shards.collect(0).items()}
    assert len(lanes) == 1

    place.is_full = True
    shards.prefetch(0, lanes)
    place.is_full = False
    shards.distribute(0, lanes, 0.0)

    assert shards.prefetches_without_room() == 1
    assert shards.prefetches_without_room() == 0
    assert parameters["w"].unique().tolist() == [2.0]


def test_contributions_that_are_made_too_late_count_as_broken_all_the_same(tmp_path: Path) -> None:
    setting = Setting({"w": [16.0] * 8}, descend, tmp_path, 8, islands=("a",))

    async def scenario() -> None:
        run = VirtualRun(setting)
        await run.start_syncer()
        thread, gate = DeviceThread("test"), threading.Event()
        island = run.island("a", place=LanePlace(thread=thread))
        await island.start()
        thread.submit(CPU, gate.wait, 10.0)
        for attempt in range(3):
            sent = Outstanding(RoundKey(0, 0, 0, attempt), 4, 4, 4, is_flush=False)
            island.exchange.send(Send(sent, {0: torch.full((128,), torch.nan)}))
            island.exchange.settle(0, is_merged=False, is_included=False)
        gate.set()
        await island.exchange.wait_until_made()

        assert isinstance(island.exchange.failure, AggregationError)
        assert not island.exchange._fragments[0].decline_reason, "of a round that is over"
        await island.exchange.stop()
        await run.kill_syncer()

    asyncio.run(scenario())


class StagingMeanwhile(LanePlace):
    """A place at which a version is staged while the third work is done."""

    num_done = 0
    stage: Callable[[], None]

    async def run(self, work: Callable[[], Any]) -> Any:
        done = await super().run(work)
        self.num_done += 1
        if self.num_done == 3:
            self.stage()
        return done


def test_what_is_staged_while_an_anchor_is_mended_is_measured(tmp_path: Path) -> None:
    setting = Setting({"w": [16.0] * 8}, descend, tmp_path, 8, islands=("a",))

    async def scenario() -> None:
        run = VirtualRun(setting)
        await run.start_syncer()
        place = StagingMeanwhile()
        island = run.island("a", place=place)
        await island.start()
        fragment = island.exchange._fragments[0]
        sound = fragment.anchor[0]
        fragment.anchor = {0: sound + 100.0}
        place.num_done = 0
        place.stage = lambda: fragment.stage({0: sound - 3.0}, 1, 103.0)

        await island.exchange.verify_anchors()

        assert torch.equal(fragment.anchor[0], sound)
        assert fragment.staged_change == 3.0
        await island.exchange.stop()
        await run.kill_syncer()

    asyncio.run(scenario())
