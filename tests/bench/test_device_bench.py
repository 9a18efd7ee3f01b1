"""The counter of what an accelerator would be waited for, operation by operation, and its bars."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from diloco.bench.training.device import SETTING, Section, figures, requirements, run
from diloco.bench.training.device_counter import DeviceCounter, DeviceCounts

#: What the product calls a device: of a counter it is the accelerator.
DEVICE = torch.device("cpu")


def there(counter: DeviceCounter) -> Tensor:
    values = torch.arange(4.0)
    counter.place([values])
    return values


def counted(work: Callable[[Tensor], object]) -> DeviceCounts:
    counter = DeviceCounter()
    values = there(counter)
    with counter.counting() as counts:
        work(values)
    return counts


@pytest.mark.parametrize(
    "work",
    [
        pytest.param(lambda x: x[0].item(), id="item"),
        pytest.param(lambda x: bool(x[0]), id="bool"),
        pytest.param(lambda x: float(x.sum()), id="float"),
        pytest.param(lambda x: x.tolist(), id="tolist"),
        pytest.param(lambda x: x.numpy(), id="numpy"),
        pytest.param(lambda x: x.nonzero(), id="nonzero"),
        pytest.param(lambda x: x[x > 1], id="mask"),
        pytest.param(lambda x: torch.bincount(x.long()), id="bincount"),
        pytest.param(
            lambda x: torch.empty(4).copy_(x, non_blocking=True).tolist(), id="read-at-once"
        ),
    ],
)
def test_a_value_of_the_device_that_the_host_asks_for_is_a_synchronisation(
    work: Callable[[Tensor], object],
) -> None:
    counts = counted(work)

    assert (counts.syncs, counts.sync_copies) == (1, 0)


@pytest.mark.parametrize(
    ("work", "down", "up"),
    [
        pytest.param(lambda x: x.cpu(), 16, 0, id="cpu"),
        pytest.param(lambda x: x.to("cpu"), 16, 0, id="to-host"),
        pytest.param(lambda x: torch.ones(2).to(DEVICE), 0, 8, id="to-device"),
        pytest.param(lambda x: torch.tensor([1.0], device=DEVICE), 0, 4, id="tensor"),
        pytest.param(lambda x: torch.empty(4).copy_(x), 16, 0, id="copy-down"),
        pytest.param(lambda x: x.copy_(torch.ones(4)), 0, 16, id="copy-up"),
        pytest.param(lambda x: x[torch.tensor([0, 1])], 0, 16, id="indices-of-the-host"),
        pytest.param(lambda x: torch.where(x > 1, x, torch.ones(())), 0, 4, id="where-scalar"),
    ],
)
def test_a_copy_that_blocks_is_counted_with_its_bytes(
    work: Callable[[Tensor], object], down: int, up: int
) -> None:
    counts = counted(work)

    assert (counts.syncs, counts.sync_copies) == (0, 1)
    assert (counts.bytes_down, counts.bytes_up) == (down, up)


def test_what_stays_on_either_side_waits_for_nothing() -> None:
    def work(x: Tensor) -> None:
        x.mul_(2).add_(torch.zeros(4, device=DEVICE)).view(2, 2)[0].masked_fill_(x[:2] > 1, 0.0)
        x[x > 1] = 0.0
        torch.ones(3).cumsum(0).tolist()
        torch.ones(2).to(DEVICE, non_blocking=True)

    counts = counted(work)

    assert (counts.syncs, counts.sync_copies, counts.bytes_down, counts.bytes_up) == (0, 0, 0, 8)
    assert counts.launches >= 4


def test_a_copy_that_did_not_block_is_a_late_wait_once_more_was_launched() -> None:
    counter = DeviceCounter()
    values, here = there(counter), torch.empty(4)
    with counter.counting() as first:
        here.copy_(values, non_blocking=True)
    with counter.counting() as second:
        values.mul_(2)
        here.tolist()
        here.tolist()

    assert (first.syncs, first.sync_copies, first.late_waits) == (0, 0, 0)
    assert (second.syncs, second.late_waits) == (0, 1)


def test_what_a_watched_thread_copies_is_counted_and_its_values_apart() -> None:
    counter = DeviceCounter()
    values, codes = there(counter), torch.zeros(6, dtype=torch.uint8)
    counter.place([codes])

    def copy() -> None:
        counter.watch()
        values.to("cpu", non_blocking=True)
        codes.to("cpu", non_blocking=True)
        torch.zeros(3, dtype=torch.uint8).to(DEVICE)

    thread = threading.Thread(target=copy)
    thread.start()
    thread.join()

    counts = counter.counts
    assert (counts.bytes_down, counts.values_down, counts.bytes_up) == (16 + 6, 16, 3)


def test_other_threads_may_wait_but_their_coded_bytes_have_a_bar() -> None:
    counts = DeviceCounts(
        syncs=9, sync_copies=9, bytes_down=450, values_down=400, bytes_up=870, values_up=800
    )

    rows = [
        *figures("decoupled", "one", [[Section("exchange", counts, 100, 100)]]),
        *figures("decoupled on host", "one", [[Section("exchange", counts, 100, 100)]]),
    ]

    assert [(row["syncs"], row["uncoded_down"], row["uncoded_up"]) for row in rows] == [
        (None, 4, 8)
    ] * 2
    bars = [(each.figure, each.is_met) for each in requirements(rows)]
    assert bars == [(0.5, True), (0.7, False), (4, False), (8, False)]
    assert [each.figure for each in requirements(rows[1:])] == [0.5, 0.7]


def test_of_a_checkpoint_the_bytes_of_all_ranks_are_held_against_the_state() -> None:
    halves = [
        Section("checkpoint", DeviceCounts(bytes_down=502, largest_bytes=2), lane_bytes=100,
                state_bytes=state_bytes)
        for state_bytes in (1000, 0)
    ]  # fmt: skip

    rows = figures("scheduled", "fsdp-2", [[half] for half in halves])

    assert [row["down_per_state"] for row in rows] == [1.004]
    assert [each.figure for each in requirements(rows) if not each.is_met] == [1.004, 0.02]


def test_figures_are_the_worst_of_all_ranks_and_bars_name_their_row() -> None:
    section = Section(
        "send", DeviceCounts(sync_copies=1, bytes_down=200, largest_bytes=80), 100, 0, 40
    )
    quiet = Section("send", DeviceCounts(bytes_down=200), 100, 0, 40)

    rows = figures("scheduled", "fsdp-2", [[quiet, section], [quiet, quiet]])

    assert [(row["sync_copies"], row["down_per_value"], row["new_per_lane"]) for row in rows] == [
        (1, 4.0, 2.0)
    ]
    missed = [each for each in requirements(rows) if not each.is_met]
    assert [(each.what, each.figure) for each in missed] == [
        ("send, fsdp-2, scheduled", 1),
        ("send, fsdp-2, scheduled", 4.0),
        ("send, fsdp-2, scheduled", 2.0),
    ]


@pytest.mark.slow
def test_an_inner_step_waits_for_nothing_in_any_layout() -> None:
    report = run(lambda *_: None, ["step"], setting=SETTING)

    assert [row["layout"] for row in report.rows] == list(SETTING.layouts)
    assert report.missed == []


@pytest.mark.slow
def test_sends_and_merges_wait_for_nothing_and_move_coded_bytes_only() -> None:
    report = run(lambda *_: None, ["send", "merge", "both", "exchange"], setting=SETTING)

    exchanged = [row for row in report.rows if row["operation"] == "exchange"]
    assert len(exchanged) == sum(map(len, SETTING.synchronised.values()))
    assert all(row["down_per_value"] > 0.5 and row["up_per_value"] > 0.5 for row in exchanged)
    # A room is made once more fragments than ever before are sent faster than they are encoded.
    missed = [each for each in report.missed if "new storage" not in each.unit]
    assert missed == []


@pytest.mark.slow
def test_checkpoints_and_copies_in_memory_wait_for_nothing_and_copy_the_state_once() -> None:
    report = run(lambda *_: None, ["checkpoint", "copy"], setting=SETTING)

    layouts = [(m, layout) for m, layouts in SETTING.synchronised.items() for layout in layouts]
    for operation in ("checkpoint", "copy"):
        rows = [row for row in report.rows if row["operation"] == operation]
        assert [(row["mode"], row["layout"]) for row in rows] == layouts
        assert all(row["down_per_state"] >= 1.0 and row["up"] == 0 for row in rows)
    assert report.missed == []
