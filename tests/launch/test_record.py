"""Figures of one rank on a clock that the test turns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from diloco.inner.trainer import InnerMetrics
from diloco.launch.record import RankRecord
from diloco.sync.exchange import Exchange
from diloco.sync.outer_loop import OuterLoop
from diloco.sync.registration import IslandState
from diloco.telemetry.sinks import JsonlSink


class Rank:
    """A record, its clock and its file."""

    def __init__(self, path: Path, *, is_leader: bool = True) -> None:
        self.path = path
        self.now = 1000.0
        sink = JsonlSink(path, {"island": "east", "island_rank": 0}, lambda: 0.0)
        self.record = RankRecord(sink, is_leader=is_leader, clock=lambda: self.now)
        self.record.open()
        self.record.begin()

    def step(self, inner_step: int, duration_s: float, *, is_quiet: bool = True) -> None:
        self.now += duration_s
        metrics = InnerMetrics(inner_step, 2.0, 0.5, 1e-3, 64, duration_s)
        self.record.step(metrics, is_quiet=is_quiet)

    def evaluate(self, duration_s: float) -> None:
        with self.record.evaluating():
            self.now += duration_s

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]


def session(**values: Any) -> OuterLoop:
    return cast(OuterLoop, SimpleNamespace(**values))


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    rank = Rank(tmp_path / "events.jsonl")
    yield rank
    rank.record.close()


def test_evaluations_are_not_wall_time(rank: Rank) -> None:
    rank.step(1, 2.0)
    rank.evaluate(50.0)
    rank.step(2, 3.0)
    with pytest.raises(RuntimeError), rank.record.evaluating():
        rank.now += 7.0
        raise RuntimeError

    assert rank.record.wall_s == 5.0


def test_figures_at_the_end_of_an_island(rank: Rank) -> None:
    rank.step(1, 2.0)
    rank.evaluate(50.0)
    rank.step(2, 3.0)
    rank.step(3, 9.0, is_quiet=False)
    rank.step(4, 4.0)
    rank.now += 6.0  # blocked
    exchange = cast(Exchange, SimpleNamespace(bytes_up=70, bytes_down=80))

    rank.record.ended(
        session(inner_step=4, blocked_s=6.0, overwritten_steps=1.5, digests=("d0", "d1")),
        exchange,
        wall_s=rank.record.wall_s,
    )

    # Wall time 2 + 3 + 9 + 4 + 6 = 24; the median of the quiet 2, 3, 4 is 3.
    assert rank.events()[-1] == {
        "unix_s": 0.0,
        "island": "east",
        "island_rank": 0,
        "kind": "island_ended",
        "inner_step": 4,
        "tokens": 4 * 64,
        "wall_s": 24.0,
        "inner_s": 18.0,
        "blocked_s": 6.0,
        "undisturbed_step_s": 3.0,
        "utilisation": 4 * 3.0 / 24.0,
        "goodput": 18.0 / 24.0,
        "overwritten_steps": 1.5,
        "bytes_up": 70,
        "bytes_down": 80,
        "digests": ["d0", "d1"],
    }


def test_progress_is_renewed_with_the_same_figures(rank: Rank) -> None:
    rank.step(1, 2.0)
    rank.step(2, 4.0, is_quiet=False)
    rank.now += 2.0
    rank.record.moved(70, 80)

    rank.record.renew(IslandState.TRAINING, session(inner_step=2, num_in_flight=1, blocked_s=2.0))

    progress = rank.record.progress
    assert (progress.state, progress.inner_step) == (IslandState.TRAINING, 2)
    assert (progress.loss_nats, progress.tokens) == (2.0, 128)
    assert (progress.bytes_up, progress.bytes_down) == (70, 80)
    assert (progress.fragments_in_flight, progress.blocked_s) == (1, 2.0)
    assert progress.utilisation == 2 * 2.0 / 8.0
    assert progress.tokens_per_s == 128 / 6.0
    rank.record.failed()
    assert rank.record.progress.state is IslandState.FAILED


@pytest.mark.parametrize(("is_leader", "kinds"), [(True, ["inner_step"]), (False, [])])
def test_only_the_leader_records_inner_steps(
    tmp_path: Path, is_leader: bool, kinds: list[str]
) -> None:
    rank = Rank(tmp_path / "events.jsonl", is_leader=is_leader)

    rank.step(1, 2.0)
    rank.record.close()

    assert [event["kind"] for event in rank.events()] == kinds
