"""What the outer loop takes of a device: counted on one of host memory, by real sessions."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from diloco.bench.counted_device import CountedDevice
from diloco.bench.memory import SETTING, figures, run_memory
from diloco.bench.memory_island import Measured
from diloco.config.outer import OuterConfig
from diloco.outer.fragments import TensorSpec
from diloco.sync.boxes import declare_part
from diloco.sync.layout import build_plan
from diloco.sync.shards import LaneShards
from tests.distributed import run_ranks

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


def _merge_half(rank):
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
    shards.distribute(0, lanes, 0.5)
    merged = device.peak_bytes - at_rest
    device.reset_peak()
    collected = shards.collect(0)
    values = {float(value) for lane in collected.values() for value in lane.unique()}
    return merged, device.peak_bytes - at_rest, device.live_bytes - at_rest, values


def test_a_rank_has_on_its_device_what_it_merges_and_only_while_it_does():
    own_bytes = 4 * ROWS * COLUMNS // 2
    for merging, sending, resting, values in run_ranks(_merge_half, 2):
        assert 0 < merging <= 2 * own_bytes, "its part, and that part scaled by 1 - alpha"
        assert (sending, resting) == (0, 0)
        assert values <= {0.0, 1.0}


def test_a_session_keeps_nothing_on_the_device_between_rounds():
    report = run_memory(SMALL, on_progress=lambda _: None)

    by_phase = {row["phase"]: row for row in report.rows}
    assert report.missed == []
    assert by_phase["a merge"]["device"] == ("cuda" if torch.cuda.is_available() else "counted")
    assert 0 < by_phase["a merge"]["fragments"] <= SMALL.at_most
    assert by_phase["between rounds"]["extra_bytes"] == 0


@pytest.mark.parametrize(("num_merges", "extra"), [(3, 211), (0, 0)], ids=["leak", "no-merge"])
def test_too_much_and_nothing_merged_are_missed(monkeypatch, num_merges, extra):
    found = Measured("counted", num_merges, 100, 50, 600, {"merge": extra, "between": extra})
    monkeypatch.setattr("diloco.bench.memory._measure", lambda *_: found)

    report = run_memory(SMALL, on_progress=lambda _: None)

    assert len(report.missed) == 1
    assert figures(0.5, found)[2]["of_trained"] == extra / (12 * 150)
