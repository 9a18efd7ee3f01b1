"""Plots of a run: what is in the figures, and files that hold a picture."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

from diloco.telemetry.plots import (
    Flight,
    curve_of,
    flights_of,
    loss_figure,
    timeline_figure,
    write_plots,
)

Lines = list[dict[str, Any]]


class Island:
    """Events of an island's leader on a clock that the test turns."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.now = 1000.0
        self.lines: Lines = []

    def add(self, kind: str, after_s: float = 0.0, *, rank: int = 0, **values: Any) -> None:
        self.now += after_s
        who = {"run": "lab", "island": self.name, "island_rank": rank}
        self.lines.append({"unix_s": self.now, **who, "kind": kind, **values})

    def step(self, inner_step: int, loss: float | None = 2.0) -> None:
        self.add("inner_step", 1.0, inner_step=inner_step, loss=loss, num_tokens=64)

    def send(self, fragment_id: int, *, is_flush: bool = False) -> None:
        self.add("fragment_sent", fragment_id=fragment_id, is_flush=is_flush)

    def merge(self, fragment_id: int, *, after_s: float, blocked_s: float, outcome: str) -> None:
        self.add(
            "fragment_merged",
            after_s,
            fragment_id=fragment_id,
            blocked_s=blocked_s,
            outcome=outcome,
        )

    def expire(self, fragment_id: int, *, after_s: float) -> None:
        self.add("round_expired", after_s, fragment_id=fragment_id, blocked_s=0.5)


def island_with_everything(name: str) -> Island:
    island = Island(name)
    island.step(1)
    island.send(0)
    island.merge(0, after_s=2.0, blocked_s=0.5, outcome="included")
    island.send(1)
    island.expire(1, after_s=1.0)
    island.send(0)
    island.merge(0, after_s=1.0, blocked_s=0.0, outcome="not_included")
    island.send(1)
    island.add("island_rejoined", 5.0, inner_step=1, lost_steps=3)
    island.step(2, 1.5)
    island.add("evaluated", inner_step=2, parameters="local", nats_per_byte=1.75)
    island.send(0, is_flush=True)
    island.merge(0, after_s=1.0, blocked_s=1.0, outcome="included")
    island.add("evaluated", inner_step=2, parameters="published", nats_per_byte=1.5)
    return island


def test_every_send_is_paired_with_its_end() -> None:
    flights = flights_of(island_with_everything("east").lines, origin_s=1000.0)

    assert flights == [
        Flight(0, 1.0, 3.0, 0.5, "included"),
        Flight(1, 3.0, 4.0, 0.5, "expired"),
        Flight(0, 4.0, 5.0, 0.0, "not_included"),
        Flight(1, 5.0, 5.0, 0.0, "lost"),
        Flight(0, 11.0, 12.0, 1.0, "flush"),
    ]


def test_contribution_in_flight_at_a_resume_arrives_after_it() -> None:
    island = Island("east")
    island.send(0)
    island.add("island_resumed", 9.0, inner_step=4, timeline=1)
    island.merge(0, after_s=1.0, blocked_s=0.0, outcome="included")

    assert flights_of(island.lines, origin_s=1000.0) == [Flight(0, 0.0, 10.0, 0.0, "included")]


def test_curve_counts_tokens_before_the_first_step_and_keeps_gaps() -> None:
    island = Island("east")
    for inner_step, loss in ((11, 2.0), (12, None), (13, 1.0)):
        island.step(inner_step, loss)
    island.add("evaluated", inner_step=10, parameters="published", nats_per_byte=3.0)
    island.add("evaluated", inner_step=13, parameters="published", nats_per_byte=1.5)

    curve = curve_of(island.lines)

    assert curve.tokens == (704, 768, 832)
    assert curve.loss[0] == 2.0 and math.isnan(curve.loss[1])
    assert curve.evaluations == {"published": ((640, 3.0), (832, 1.5))}


def test_loss_figure_names_run_islands_units_and_evaluations() -> None:
    events = {name: island_with_everything(name).lines for name in ("east", "west")}

    figure = loss_figure(events)

    training, held_out = figure.axes
    assert figure.get_suptitle() == "lab: loss by tokens"
    assert training.get_legend_handles_labels()[1] == ["east", "west"]
    assert training.get_ylabel() == "training loss\n[nats a token]"
    assert held_out.get_legend_handles_labels()[1] == [
        "east, published: last 1.5000",
        "east, local: last 1.7500",
        "west, published: last 1.5000",
        "west, local: last 1.7500",
    ]
    assert held_out.get_xlabel() == "tokens of the island"


def test_timeline_has_a_panel_an_island_with_its_bars_and_marks() -> None:
    events = {name: island_with_everything(name).lines for name in ("east", "west")}

    figure = timeline_figure(events)

    assert [axes.get_ylabel() for axes in figure.axes] == ["east\nfragment", "west\nfragment"]
    assert figure.axes[-1].get_xlabel() == "time since the first event [s]"
    for axes in figure.axes:
        bars = [path for collection in axes.collections for path in collection.get_paths()]
        assert len(bars) == 2 * 5  # under way and waited, of each send
        marks = {(float(x), float(y)) for line in axes.lines[:1] for x, y in line.get_xydata()}
        assert marks == {(3.0, 1.0), (4.0, 1.0)}  # since the first event, at 1001
        assert [text.get_text() for text in axes.texts] == ["returned, 3 steps lost"]


@pytest.mark.parametrize(
    ("span_s", "unit"), [(10.0, "s"), (3000.0, "min"), (90000.0, "h")], ids=["s", "min", "h"]
)
def test_time_is_said_in_a_unit_that_fits(span_s: float, unit: str) -> None:
    island = Island("east")
    island.step(1)
    island.add("inner_step", span_s, inner_step=2, loss=1.0, num_tokens=64)

    assert timeline_figure({"east": island.lines}).axes[-1].get_xlabel().endswith(f"[{unit}]")


def test_files_hold_pictures_drawn_without_pyplot(tmp_path: Path) -> None:
    sys.modules.pop("matplotlib.pyplot", None)
    follower = Island("east")
    follower.add("evaluated", rank=1, inner_step=1, parameters="local", nats_per_byte=9.0)
    events = {
        "east": follower.lines + island_with_everything("east").lines,
        "never-started": [],
    }

    paths = write_plots(events, tmp_path / "plots")

    assert [path.name for path in paths] == ["loss.png", "timeline.png"]
    for path in paths:
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG") and len(data) > 5_000
        assert int.from_bytes(data[16:20]) == 1500  # pixels wide
    assert "matplotlib.pyplot" not in sys.modules


def test_run_without_an_inner_step_has_no_plots(tmp_path: Path) -> None:
    assert write_plots({"east": []}, tmp_path / "plots") == []
    assert not (tmp_path / "plots").exists()
