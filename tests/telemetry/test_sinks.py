"""Sinks: whole lines with time and author, and no sink that stops or delays a training."""

import json
import logging
import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from diloco.telemetry.events import DigestMismatch, Event, InnerStepDone
from diloco.telemetry.sinks import BackgroundSink, FanOut, JsonlSink


def make_sink(path: Path) -> JsonlSink:
    ticks = iter(range(1, 10_000))
    return JsonlSink(path, {"island": "east", "island_rank": 1}, lambda: float(next(ticks)))


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_line_has_time_author_kind_and_values_and_is_there_at_once(tmp_path: Path) -> None:
    sink = make_sink(tmp_path / "deep" / "events.jsonl")

    sink.open()
    sink.write(DigestMismatch(fragment_id=2, version=3, lane_id=4))
    written = lines(sink.path)
    sink.close()

    assert written == [
        {
            "unix_s": 1.0,
            "island": "east",
            "island_rank": 1,
            "kind": "digest_mismatch",
            "fragment_id": 2,
            "version": 3,
            "lane_id": 4,
        }
    ]


def test_second_start_appends(tmp_path: Path) -> None:
    for version in (1, 2):
        sink = make_sink(tmp_path / "events.jsonl")
        sink.open()
        sink.write(DigestMismatch(0, version, 0))
        sink.close()

    assert [line["version"] for line in lines(tmp_path / "events.jsonl")] == [1, 2]


@pytest.mark.parametrize("torn", ['{"kind": "inner_s', "", '{"kind": "whole"}\n'])
def test_event_after_a_torn_line_has_a_line_of_its_own(tmp_path: Path, torn: str) -> None:
    sink = make_sink(tmp_path / "events.jsonl")
    sink.path.write_text('{"kind": "first"}\n' + torn)

    sink.open()
    sink.write(DigestMismatch(0, 7, 0))
    sink.close()

    first, *torn_lines, last = sink.path.read_text().splitlines()
    assert json.loads(first)["kind"] == "first"
    assert torn_lines == torn.splitlines()
    assert json.loads(last)["version"] == 7


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    sink = make_sink(tmp_path / "events.jsonl")

    sink.open()
    sink.write(InnerStepDone(1, math.nan, math.inf, 1e-3, 64, 0.5))
    sink.close()

    (line,) = lines(sink.path)
    assert (line["loss"], line["grad_norm"], line["learning_rate"]) == (None, None, 1e-3)


def test_lines_of_several_threads_do_not_mix(tmp_path: Path) -> None:
    sink = make_sink(tmp_path / "events.jsonl")
    sink.open()

    def write(lane_id: int) -> None:
        for version in range(100):
            sink.write(DigestMismatch(0, version, lane_id))

    threads = [threading.Thread(target=write, args=(lane_id,)) for lane_id in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sink.close()

    pairs = {(line["lane_id"], line["version"]) for line in lines(sink.path)}
    assert len(lines(sink.path)) == len(pairs) == 400


def test_event_after_close_is_dropped(tmp_path: Path) -> None:
    sink = make_sink(tmp_path / "events.jsonl")
    sink.open()
    sink.close()
    sink.close()

    sink.write(DigestMismatch(0, 1, 0))

    assert lines(sink.path) == []


def test_context_that_is_known_later_is_in_later_lines(tmp_path: Path) -> None:
    sink = make_sink(tmp_path / "events.jsonl")

    sink.open()
    sink.write(DigestMismatch(0, 1, 0))
    sink.add_context({"timeline": 2, "incarnation": 3})
    sink.write(DigestMismatch(0, 2, 0))
    sink.close()

    before, after = lines(sink.path)
    assert "timeline" not in before
    assert (after["island"], after["timeline"], after["incarnation"]) == ("east", 2, 3)


def test_full_disk_is_one_warning_and_a_count(caplog: pytest.LogCaptureFixture) -> None:
    sink = make_sink(Path("/dev/full"))

    sink.open()
    with caplog.at_level(logging.WARNING):
        for version in range(5):
            sink.write(DigestMismatch(0, version, 0))
        sink.close()

    first, last = [record.getMessage() for record in caplog.records]
    assert "/dev/full" in first and "No space left on device" in first
    assert sink.losses.num_lost == 6  # five events, and the close that tried them again
    assert "num_lost=6" in last


class Recording:
    """A sink that remembers, and does what it is told to instead of writing."""

    def __init__(self, name: str = "", log: list[str] | None = None) -> None:
        self.name = name
        self.log = [] if log is None else log
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None

    def open(self) -> None:
        if self.error is not None:
            raise self.error
        self.log.append(f"{self.name}open")

    def add_context(self, context: Mapping[str, Any]) -> None:
        self.log.append(f"{self.name}context {dict(context)}")

    def write(self, event: Event) -> None:
        self.gate.wait()
        if self.error is not None:
            raise self.error
        self.log.append(f"{self.name}{event.kind}")

    def close(self) -> None:
        self.log.append(f"{self.name}close")


EVENT = DigestMismatch(0, 1, 0)


def test_fan_out_tells_every_sink_in_order() -> None:
    log: list[str] = []
    both = FanOut([Recording("a ", log), Recording("b ", log)])

    both.open()
    both.add_context({"timeline": 1})
    both.write(EVENT)
    both.close()

    assert log == [
        f"{name} {what}"
        for what in ("open", "context {'timeline': 1}", "digest_mismatch", "close")
        for name in ("a", "b")
    ]


def test_sinks_opened_before_one_that_cannot_be_had_are_closed_again() -> None:
    first, second = Recording(), Recording()
    second.error = OSError("no")

    with pytest.raises(OSError, match="no"):
        FanOut([first, second]).open()

    assert first.log == ["open", "close"]


def test_background_sink_takes_everything_in_order_before_it_is_closed() -> None:
    inner = Recording()
    sink = BackgroundSink("recording", inner)

    sink.open()
    sink.write(EVENT)
    sink.add_context({"incarnation": 2})
    sink.write(EVENT)
    sink.close()
    sink.close()

    told = ["digest_mismatch", "context {'incarnation': 2}", "digest_mismatch"]
    assert inner.log == ["open", *told, "close"]
    assert sink.losses.num_lost == 0


def test_background_sink_that_fails_is_one_warning_and_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    inner = Recording()
    sink = BackgroundSink("recording", inner)

    with caplog.at_level(logging.WARNING):
        sink.open()
        inner.error = RuntimeError("the service is gone")
        for _ in range(3):
            sink.write(EVENT)
        sink.close()

    first, last = [record.getMessage() for record in caplog.records]
    assert "sink=recording" in first and "the service is gone" in first
    assert "num_lost=3" in last
    assert inner.log == ["open", "close"]


def test_background_sink_that_hangs_delays_nobody(caplog: pytest.LogCaptureFixture) -> None:
    inner = Recording()
    inner.gate.clear()
    sink = BackgroundSink("recording", inner, capacity=4, close_s=0.05)

    with caplog.at_level(logging.WARNING):
        sink.open()
        for _ in range(10):
            sink.write(EVENT)
        sink.close()
    inner.gate.set()

    # One event is with the sink and four wait, or, before the thread took it, four wait.
    assert sink.losses.num_lost in (10 - 5 + 1, 10 - 4 + 1)
    assert "does not take its events" in caplog.records[0].getMessage()
