"""The store of an island's peer, taken to the timeline of the run that it joins."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from diloco.durable import make_directory_durably
from diloco.errors import ConfigError
from diloco.launch.rank.peer import _take_to_timeline
from diloco.outer.fragments import Plan, TensorSpec, make_plan
from diloco.protos.control_pb2 import Grant, JoinReply
from diloco.state_dir import StateDir, Timeline, read_timeline
from diloco.transport.contracts import Buffer
from diloco.versions.pins import forget_pins, pinned_steps
from diloco.versions.store import FragmentStore
from diloco.versions.version import founding_record

STEP = 120


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about power loss, and waiting for the disk is most of the time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path).peer("a")


def plan() -> Plan:
    return make_plan([TensorSpec(name, (8,)) for name in "tu"], num_fragments=2)


def keep_records(state: StateDir, pins: tuple[int, ...] = ()) -> None:
    make_directory_durably(state.store)
    for directory in (state.store, state.store / "staged"):
        for fragment in plan().fragments:
            records = FragmentStore(directory, fragment, 4)
            records.recover()
            initial: dict[int, Buffer] = {
                lane.lane_id: bytearray(4 * lane.numel) for lane in fragment.lanes
            }
            records.commit(founding_record(fragment, initial, 0))
            for step in pins if directory == state.store else ():
                records.pin(step, 0)


def reply(timeline: int, resume_step: int | None = None) -> JoinReply:
    """Answer a join of the timeline, while it has published nothing if a step is given."""
    return JoinReply(
        grant=Grant(run="r", island="a", incarnation=1, timeline=timeline),
        is_resumed=resume_step is not None,
        resume_step=resume_step or 0,
    )


@pytest.mark.parametrize("step", [STEP, None], ids=["restored", "set aside"])
def test_what_is_in_doubt_is_abandoned_with_its_timeline(state: StateDir, step: int | None) -> None:
    keep_records(state, pins=(STEP,))

    _take_to_timeline(state, plan(), reply(1, step))

    assert not (state.store / "staged").exists()
    assert read_timeline(state.store_timeline).number == 1


@pytest.mark.parametrize("step", [STEP, None], ids=["no pin", "the others have gone on"])
def test_a_store_that_cannot_be_restored_is_set_aside_until_a_later_checkpoint(
    state: StateDir, caplog: pytest.LogCaptureFixture, step: int | None
) -> None:
    keep_records(state, pins=(80, 160))

    _take_to_timeline(state, plan(), reply(1, step))

    assert "set aside" in caplog.text
    assert read_timeline(state.store_timeline).number == 1
    for fragment in plan().fragments:
        assert FragmentStore(state.store, fragment, 4).recover() is None
    # An older checkpoint can still be resumed, where it is known to be one.
    assert pinned_steps(state.store) == ([80] if step else [])
    asides = {path.name for path in state.store.glob("*/abandoned-*")}
    assert asides == {"abandoned-timeline-0000-after-000000000160"}
    forget_pins(state.store, complete=[80], num_unsure=1)
    assert len(list(state.store.glob("*/abandoned-*"))) == 3
    forget_pins(state.store, complete=[200], num_unsure=1)
    assert list(state.store.glob("*/abandoned-*")) == []


def test_a_store_is_not_taken_to_an_earlier_timeline(state: StateDir) -> None:
    keep_records(state, pins=(STEP,))
    _take_to_timeline(state, plan(), reply(1, STEP))

    with pytest.raises(ConfigError, match=r"copy from another day.*remove .*peers/a"):
        _take_to_timeline(state, plan(), reply(0))

    for fragment in plan().fragments:
        assert FragmentStore(state.store, fragment, 4).recover() is not None


def test_a_new_store_takes_its_timeline_without_a_word(
    state: StateDir, caplog: pytest.LogCaptureFixture
) -> None:
    make_directory_durably(state.store)

    _take_to_timeline(state, plan(), reply(2, STEP))

    assert caplog.text == ""
    assert read_timeline(state.store_timeline) == Timeline(2, STEP)
