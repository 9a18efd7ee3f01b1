"""What the outer loop takes of a device: counted on one of host memory, by real sessions."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from diloco.bench.outer_loop.counted_device import CountedDevice
from diloco.bench.outer_loop.memory import SETTING, MeasuredMemory, figures, run
from diloco.config.outer import OuterConfig
from diloco.island.lanes.boxes import declare_part
from diloco.island.lanes.shards import LaneShards
from diloco.island.layout import build_plan
from diloco.outer.fragments import TensorSpec
from diloco.transport.calls.loopback import run_virtual
from tests.distributed import run_ranks
from tests.virtual_run import Setting, VirtualRun, descend

SMALL = replace(
    SETTING,
    local_mixes=(0.5,),
    inner_steps=12,
    num_fragments=2,
    model={"dim": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "ffn_dim": 128},
)
ROWS, COLUMNS = 64, 96


def _count_what_comes_and_goes(_):
    device = CountedDevice()
    with torch.no_grad():
        there = device.place(torch.arange(6.0).view(2, 3))
        column = there[:, :1]
        device.reset_peak()
        here = torch.empty(2, 1).copy_(column)  # not contiguous: room for it on the device
        moment = device.peak_bytes
        second = torch.ones(2, 3).to(there.device)
        both = device.live_bytes
        there.add_(second)
        del second
    return here.tolist(), there.cpu().tolist(), moment, both, device.live_bytes


def test_a_counted_device_knows_what_lies_on_it():
    ((here, there, moment, both, left),) = run_ranks(_count_what_comes_and_goes, 1)

    assert here == [[0.0], [3.0]]
    assert there == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    assert (moment, both, left) == (24 + 8, 48, 24)


def _merge_half(rank, is_prefetched):
    """Merge a fragment of two ranks, each with half the rows of a matrix on a device."""
    device = CountedDevice()
    half = device.place(torch.zeros(ROWS // 2, COLUMNS)).requires_grad_()
    declare_part(half, (ROWS, COLUMNS), (rank * ROWS // 2, 0))
    outer = OuterConfig(preset="streaming", num_fragments=1, inner_steps_per_round=4)
    plan = build_plan(outer, [TensorSpec("weight", (ROWS, COLUMNS))])
    shards = LaneShards(plan, {"weight": half}, group=dist.group.WORLD)
    lanes = {i: torch.full((plan.fragments[0].lanes[i].numel,), 2.0) for i in shards.lanes_of(0)}
    device.reset_peak()
    at_rest = device.live_bytes
    if is_prefetched:
        shards.prefetch(0, lanes)
        shards.prefetch(0, lanes)  # is on its way
    shards.distribute(0, lanes, 0.5)
    merged = device.peak_bytes - at_rest
    device.reset_peak()
    collected = shards.collect(0)
    values = {float(value) for lane in collected.values() for value in lane.unique()}
    return merged, device.peak_bytes - at_rest, device.live_bytes - at_rest, values


def _train_here_and_there(_, directory):
    places = ((torch.clone, ""), (_on_device, ""), (_on_device, "all"), (_on_device, "passing"))
    return [
        [
            _train(directory / f"{local_mix}-{place.__name__}-{room}", place, room, local_mix)
            for place, room in places
        ]
        for local_mix in (0.5, "since_send")
    ]


def _on_device(values):
    return CountedDevice().place(values)


def _train(directory, place, room, local_mix):
    """Train an island in virtual time: what it held, what was merged, how often was prefetched.

    `room` is what the device has room for: lanes, or only those that are sent or merged.
    """
    setting = Setting(
        {name: [16.0, -3.0] for name in "uvwx"},
        descend,
        directory,
        24,
        islands=("a",),
        num_fragments=2,
        inner_steps_per_round=8,
        overlap_steps=3,
        local_mix=local_mix,
        error_feedback=local_mix == "since_send",
        uplink_codec="int4",
        downlink_codec="int4",
        flush=True,
        place=place,
        has_room=bool(room),
        is_apart=room == "passing",
    )
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        island = run_virtual(VirtualRun(setting).run())["a"]
    merges = [event for event in island.kinds("fragment_merged") if not event["is_flush"]]
    names = Counter(event.name for event in profile.events())
    return island.local, island.published, len(merges), names["diloco/prefetch"]


def test_lanes_on_a_device_or_before_a_merge_there_give_the_same_to_the_bit(tmp_path):
    ((mixed, kept),) = run_ranks(_train_here_and_there, 1, tmp_path)

    for expected, *others in (mixed, kept):
        assert expected[2] > 0
        assert all(other[:3] == expected[:3] for other in others)
    num_merges = mixed[0][2]
    assert [each[3] for each in mixed[:3]] == [0, num_merges, 0]
    assert mixed[3][3] > num_merges, "all that is kept apart comes by the one stream of copies"


@pytest.mark.parametrize("is_prefetched", [False, True], ids=["streamed", "prefetched"])
def test_a_rank_has_on_its_device_what_it_merges_and_only_while_it_does(is_prefetched):
    own_bytes = 4 * ROWS * COLUMNS // 2
    for merging, sending, resting, values in run_ranks(_merge_half, 2, is_prefetched):
        assert 0 < merging <= 2 * own_bytes, "its part, and that part scaled by 1 - alpha"
        assert (sending, resting) == (0, 0)
        assert values <= {0.0, 1.0}


@pytest.mark.slow
def test_a_session_keeps_nothing_on_the_device_between_rounds():
    report = run(lambda *_: None, setting=SMALL)

    by_phase = {row["phase"]: row for row in report.rows}
    assert report.missed == []
    assert 0 < by_phase["a merge"]["fragments"] <= SMALL.at_most
    assert by_phase["steps without"]["extra_bytes"] == 0
    assert by_phase["steps with fragments in flight"]["fragments"] <= 1


@pytest.mark.parametrize(("num_merges", "extra"), [(3, 211), (0, 0)], ids=["leak", "no-merge"])
def test_too_much_and_nothing_merged_are_missed(monkeypatch, num_merges, extra):
    found = MeasuredMemory(num_merges, 100, 50, 600, {"merge": extra, "between": extra})
    monkeypatch.setattr("diloco.bench.outer_loop.memory._measure", lambda *_: found)

    report = run(lambda *_: None, setting=SMALL)

    assert len(report.missed) == 1
    assert figures(0.5, found)[2]["of_trained"] == extra / (12 * 150)
