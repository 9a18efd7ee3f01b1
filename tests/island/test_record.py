"""Figures of one rank on a clock that the test turns."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diloco.config.load import load_config
from diloco.island.record import Record
from diloco.telemetry.events import Event
from tests.run_files import write_run


def outer(**values: Any) -> Any:
    """What a record reads of an outer loop, zero where the test does not say."""
    zero = {
        "inner_step": 0,
        "schedule_step": 0.0,
        "blocked_s": 0.0,
        "merging": SimpleNamespace(overwritten_steps=0.0, dropped_tokens=0.0),
        "left_tokens": 0.0,
        "exchange": SimpleNamespace(bytes_up=0, bytes_down=0),
        "digests": (),
    }
    return SimpleNamespace(**{**zero, **values})


class Rank:
    """A record, its clock and its file."""

    def __init__(self, directory: Path, island_rank: int = 0) -> None:
        self.path = directory / f"events-east-{island_rank}.jsonl"
        self.now = 1000.0
        run_file = write_run(directory, {"east": "dp_shard = 2", "west": ""})
        config = load_config(run_file, island="east")
        self.record = Record(config, directory, clock=lambda: self.now)
        self.record.open(island_rank)
        self.record.begin(outer(), config, torch.device("cpu"))

    def step(
        self, inner_step: int, took_s: float, *, is_quiet: bool = True, **logged: float
    ) -> float | None:
        self.now += took_s
        self.record.log(logged)
        return self.record.step(inner_step, 64, is_quiet=is_quiet)

    def stepped(self, inner_step: int, moved: tuple[int, int] = (0, 0)) -> None:
        self.record.stepped(outer(inner_step=inner_step, schedule_step=inner_step), moved)

    def evaluate(self, duration_s: float) -> None:
        with self.record.evaluating():
            self.now += duration_s

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        lines = map(json.loads, self.path.read_text().splitlines())
        return [event for event in lines if kind in ("", event["kind"])]


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    rank = Rank(tmp_path)
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


def test_an_inner_step_lasts_from_the_last_one_without_what_was_done_besides(rank: Rank) -> None:
    rank.step(1, 2.0)
    rank.now += 4.0  # blocked
    rank.stepped(1)
    with rank.record.aside():
        rank.now += 30.0
        rank.evaluate(50.0)
    rank.evaluate(20.0)
    rank.step(2, 3.0)
    rank.stepped(2)
    rank.step(3, 3.0, duration_s=2.5)

    assert [e["duration_s"] for e in rank.events("inner_step")] == [2.0, 3.0, 2.5]
    assert rank.record.wall_s == 2 + 4 + 30 + 3 + 3


def test_what_a_loop_logs_is_recorded_with_the_step_that_follows(rank: Rank) -> None:
    first = rank.step(1, 1.0, loss=2.0, grad_norm=0.5, learning_rate=1e-3, accuracy=0.25)
    rank.stepped(1)
    second = rank.step(2, 1.0)

    assert (first, second, rank.record.loss_nats) == (2.0, None, 2.0)
    told = [
        (e["loss"], e["grad_norm"], e["learning_rate"], e["metrics"])
        for e in rank.events("inner_step")
    ]
    assert told == [(2.0, 0.5, 1e-3, {"accuracy": 0.25}), (None, None, None, {})]


def test_figures_at_the_end_of_an_island(rank: Rank) -> None:
    for inner_step, duration_s, is_quiet in [(1, 2.0, True), (2, 3.0, True), (3, 9.0, False)]:
        rank.step(inner_step, duration_s, is_quiet=is_quiet)
        rank.stepped(inner_step)
        rank.evaluate(50.0)
    rank.step(4, 4.0)
    rank.now += 6.0  # blocked

    rank.record.ended(
        outer(
            inner_step=4,
            blocked_s=6.0,
            merging=SimpleNamespace(overwritten_steps=1.5, dropped_tokens=96.0),
            left_tokens=32.0,
            exchange=SimpleNamespace(bytes_up=70, bytes_down=80),
            digests=("d0", "d1"),
        ),
        (70, 80),
        wall_s=rank.record.wall_s,
    )

    # Wall time 2 + 3 + 9 + 4 + 6 = 24; the median of the quiet 2, 3, 4 is 3.
    (ended,) = rank.events("island_ended")
    del ended["unix_s"]
    assert ended == {
        "run": "test",
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
    assert [e["inner_step"] for e in rank.events("memory_used")] == [4]


def test_what_is_left_takes_as_long_as_the_last_steps_took(rank: Rank) -> None:
    assert rank.record.meter.left_s(10) == 0.0  # before the first step nobody knows

    for inner_step in range(1, 5):
        rank.step(inner_step, 2.0)
        rank.stepped(inner_step)

    assert rank.record.meter.left_s(10) == 20.0


@pytest.mark.parametrize(("island_rank", "count"), [(0, 1), (1, 0)], ids=["leader", "other"])
def test_only_the_leader_records_inner_steps_and_bytes(
    tmp_path: Path, island_rank: int, count: int
) -> None:
    rank = Rank(tmp_path, island_rank)

    rank.step(1, 2.0)
    rank.stepped(1, (70, 80))
    rank.record.close()

    assert [e["kind"] for e in rank.events()] == ["inner_step", "bytes_moved"] * count


def test_events_say_which_start_writes_once_it_is_known(rank: Rank) -> None:
    rank.step(1, 2.0)
    rank.record.identify(timeline=1, incarnation=3)
    rank.step(2, 2.0)

    before, after = rank.events()
    assert "incarnation" not in before
    assert (after["timeline"], after["incarnation"]) == (1, 3)


def test_bytes_are_recorded_when_they_are_news(rank: Rank) -> None:
    for inner_step, moved in [(3, (0, 0)), (4, (70, 80)), (5, (70, 80)), (8, (90, 80))]:
        rank.stepped(inner_step, moved)

    told = [(e["inner_step"], e["bytes_up"], e["bytes_down"]) for e in rank.events("bytes_moved")]
    assert told == [(4, 70, 80), (8, 90, 80)]


def test_a_training_loss_that_rises_for_rounds_is_an_alarm_until_it_falls(rank: Rank) -> None:
    heard: list[Event] = []
    rank.record.on_alarm = heard.append

    for inner_step, loss in enumerate([2.0] * 20 + [4.0] * 40 + [2.0] * 20, start=1):
        rank.step(inner_step, 1.0, loss=loss)
        rank.stepped(inner_step)

    assert [event.kind for event in heard] == ["alarm", "alarm", "alarm_cleared"]
    assert [e["kind"] for e in rank.events() if e["kind"].startswith("alarm")] == [
        event.kind for event in heard
    ]


def test_figures_that_come_late_are_recorded_with_their_step_once(rank: Rank) -> None:
    asked = []

    def later(step: int) -> dict[str, float]:
        asked.append(step)
        return {"loss": 3.0 - step, "duration_s": 0.5}

    losses = []
    for step in (1, 2):
        losses.append(rank.record.settle())
        rank.record.log_later(functools.partial(later, step))
        losses.append(rank.step(step, 2.0))
        assert asked == list(range(1, step)), "the host would wait for the step just launched"
    losses += [rank.record.settle(), rank.record.settle()]
    rank.step(3, 2.0, loss=0.5, duration_s=2.0)
    rank.record.close()

    assert losses == [None, None, 2.0, None, 1.0, None]
    steps = [(e["inner_step"], e["loss"], e["duration_s"]) for e in rank.events("inner_step")]
    assert steps == [(1, 2.0, 0.5), (2, 1.0, 0.5), (3, 0.5, 2.0)]
    assert rank.record.meter.inner_s == 3.0
