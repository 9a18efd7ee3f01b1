"""Figures of one rank on a clock that the test turns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco.island.registration import IslandState
from diloco.launch.rank.record import RankRecord
from diloco.telemetry.sinks import JsonlSink
from diloco.trainer.trainer import InnerMetrics


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


def outer(**values: Any) -> Any:
    """What a record reads of an outer loop, zero where the test does not say."""
    zero = {
        "inner_step": 0,
        "num_in_flight": 0,
        "blocked_s": 0.0,
        "overwritten_steps": 0.0,
        "dropped_tokens": 0.0,
        "left_tokens": 0.0,
        "digests": (),
        "bytes_up": 0,
        "bytes_down": 0,
    }
    return SimpleNamespace(**{**zero, **values})


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

    rank.record.ended(
        outer(
            inner_step=4,
            blocked_s=6.0,
            overwritten_steps=1.5,
            dropped_tokens=96.0,
            left_tokens=32.0,
            digests=("d0", "d1"),
            bytes_up=70,
            bytes_down=80,
        ),
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
        "dropped_tokens": 96.0,
        "left_tokens": 32.0,
        "bytes_up": 70,
        "bytes_down": 80,
        "digests": ["d0", "d1"],
        "tflops_per_s": 0.0,
        "mfu": 0.0,
    }


def test_progress_is_renewed_with_the_same_figures(rank: Rank) -> None:
    rank.step(1, 2.0)
    rank.step(2, 4.0, is_quiet=False)
    rank.now += 2.0
    rank.record.moved(70, 80)

    rank.record.renew(IslandState.TRAINING, outer(inner_step=2, num_in_flight=1, blocked_s=2.0))

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


def test_events_say_which_start_writes_once_it_is_known(rank: Rank) -> None:
    rank.step(1, 2.0)
    rank.record.identify(timeline=1, incarnation=3)
    rank.step(2, 2.0)

    before, after = rank.events()
    assert "incarnation" not in before
    assert (after["timeline"], after["incarnation"]) == (1, 3)


@pytest.mark.parametrize(("is_leader", "moved"), [(True, [(4, 70, 80), (8, 90, 80)]), (False, [])])
def test_the_leader_records_the_bytes_of_its_island_when_they_are_news(
    tmp_path: Path, is_leader: bool, moved: list[tuple[int, int, int]]
) -> None:
    rank = Rank(tmp_path / "events.jsonl", is_leader=is_leader)

    rank.record.renew(IslandState.TRAINING, outer(inner_step=3))
    rank.record.moved(70, 80)
    rank.record.renew(IslandState.TRAINING, outer(inner_step=4))
    rank.record.renew(IslandState.TRAINING, outer(inner_step=5))
    rank.record.moved(90, 80)
    rank.record.renew(IslandState.TRAINING, outer(inner_step=8))
    rank.record.close()

    told = [(e["inner_step"], e["bytes_up"], e["bytes_down"]) for e in rank.events()]
    assert told == moved
