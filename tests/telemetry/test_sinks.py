"""The JSONL sink: whole lines with time and author, appended, from any thread."""

import json
import math
import threading
from pathlib import Path

from diloco.telemetry.events import DigestMismatch, InnerStepDone
from diloco.telemetry.sinks import JsonlSink


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
