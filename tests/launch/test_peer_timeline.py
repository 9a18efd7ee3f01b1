"""The store of an island's peer, taken to the timeline of the run that it joins."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from diloco.durable import make_directory_durably
from diloco.launch.peer import _take_to_timeline
from diloco.launch.state_dir import StateDir, read_timeline
from diloco.outer.fragments import Plan, TensorSpec, make_plan
from diloco.rounds.store import FragmentStore, founding_record
from protos.control_pb2 import Grant, JoinReply
from transport.contracts import Buffer

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
