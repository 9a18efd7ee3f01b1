"""Steps of a replica are taken in place, and are aborted when their attempt is abandoned."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest
import torch

from diloco.compression.base import to_bytes
from diloco.errors import AggregationError
from diloco.island.peer.replica import Replica, state_digest
from diloco.outer.fragments import Fragment, TensorSpec, make_plan
from diloco.outer.optimizer import OuterOptimizer
from diloco.protocol.rounds.allreduce import Assignment, Prepared, Staged
from diloco.protocol.rounds.terms import Contributor, RoundKey
from diloco.transport.contracts import Buffer
from diloco.versions.publication import PublicationRules
from tests.virtual_run import InlineWorker

RULES = PublicationRules("float32", "int4", OuterOptimizer("nesterov", 0.7, 0.9, 0), seed=3)


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about power loss, and waiting for the disk is most of the time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def fragment() -> Fragment:
    return make_plan([TensorSpec("w", (700,))], num_fragments=1).fragments[0]


def values(seed: int) -> dict[int, Buffer]:
    drawn = torch.Generator().manual_seed(seed)
    return {
        lane.lane_id: to_bytes(torch.randn(lane.numel, generator=drawn).view(torch.uint8))
        for lane in fragment().lanes
    }


def replica(directory: Path) -> Replica:
    """Make one that holds version 0."""
    made = Replica(directory, fragment(), RULES, retained=2)
    asyncio.run(made.start(InlineWorker(), timeline=0))
    asyncio.run(made.take(made.founding(values(0), timeline=0), InlineWorker()))
    return made


def assignment(attempt: int, version: int = 0, timeline: int = 0) -> Assignment:
    contributors = tuple(
        Contributor(island, 1, 8, 4, 4, tuple(bytes(32) for _ in fragment().lanes))
        for island in ("a", "b")
    )
    key = RoundKey(timeline, 0, version, attempt)
    return Assignment(key, ("a", "b"), contributors, False, {}, 2)


def reduce(made: Replica, wanted: Assignment, *seeds: int) -> Prepared:
    """Come to a result and stage it."""
    made.begin(wanted)
    sent = dict(zip(("a", "b"), map(values, seeds), strict=True))
    lanes = [
        made.reduce(wanted, i, {island: lanes[i] for island, lanes in sent.items()})
        for i in range(len(fragment().lanes))
    ]
    return made.stage(wanted, lanes)


def test_a_later_attempt_begins_where_the_abandoned_one_did(tmp_path: Path) -> None:
    disturbed, undisturbed = replica(tmp_path / "1"), replica(tmp_path / "2")
    reduce(disturbed, assignment(0), 1, 2)

    prepared = reduce(disturbed, assignment(1), 3, 4)

    assert prepared == reduce(undisturbed, assignment(1), 3, 4)


def test_a_result_that_is_not_finite_leaves_what_was(tmp_path: Path) -> None:
    disturbed, undisturbed = replica(tmp_path / "1"), replica(tmp_path / "2")
    huge = {
        lane.lane_id: to_bytes(torch.full((lane.numel,), 3e38).view(torch.uint8))
        for lane in fragment().lanes
    }
    wanted = assignment(0)
    disturbed.begin(wanted)
    with pytest.raises(AggregationError):
        disturbed.reduce(wanted, 0, {"a": huge[0], "b": huge[0]})

    prepared = reduce(disturbed, assignment(1), 3, 4)

    assert prepared == reduce(undisturbed, assignment(1), 3, 4)


def test_what_was_staged_is_promoted_whatever_was_begun_after_it(tmp_path: Path) -> None:
    made, undisturbed = replica(tmp_path / "1"), replica(tmp_path / "2")
    prepared = reduce(made, assignment(0), 1, 2)
    made.begin(assignment(1))
    made.reduce(assignment(1), 0, {"a": values(3)[0], "b": values(4)[0]})

    asyncio.run(made.promote(InlineWorker()))

    assert made.record is not None
    assert state_digest(made.record) == made.state_digest == prepared.state_digest
    reduce(undisturbed, assignment(0), 1, 2)
    asyncio.run(undisturbed.promote(InlineWorker()))
    assert reduce(made, assignment(0, 1), 5, 6) == reduce(undisturbed, assignment(0, 1), 5, 6)


def test_a_peer_that_heals_is_given_what_is_committed(tmp_path: Path) -> None:
    made = replica(tmp_path)
    before = {
        (name, i): bytes(asyncio.run(made.section(i, name, InlineWorker())))
        for name in ("theta", "published", "momentum")
        for i in range(len(fragment().lanes))
    }
    reduce(made, assignment(0), 1, 2)

    for (name, i), section in before.items():
        assert bytes(asyncio.run(made.section(i, name, InlineWorker()))) == section


def restarted(directory: Path, timeline: int) -> Replica:
    made = Replica(directory, fragment(), RULES, retained=2)
    asyncio.run(made.start(InlineWorker(), timeline))
    return made


def test_a_higher_version_of_an_earlier_timeline_hides_nothing_that_is_staged(
    tmp_path: Path,
) -> None:
    ahead = replica(tmp_path / "ahead")
    reduce(ahead, assignment(0), 1, 2)
    asyncio.run(ahead.promote(InlineWorker()))
    reduce(ahead, assignment(0, version=1), 3, 4)
    made = replica(tmp_path / "run")
    shutil.copytree(tmp_path / "ahead" / "staged", tmp_path / "run" / "staged", dirs_exist_ok=True)
    prepared = reduce(made, assignment(0, timeline=1), 5, 6)

    again = restarted(tmp_path / "run", timeline=1)

    assert again.staged == Staged(1, prepared.state_digest, b"")


def test_what_an_earlier_timeline_has_staged_is_not_taken_up(tmp_path: Path) -> None:
    reduce(replica(tmp_path), assignment(0), 1, 2)

    assert restarted(tmp_path, timeline=1).staged is None
    assert restarted(tmp_path, timeline=0).staged is None, "and it is gone"
