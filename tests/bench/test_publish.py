"""The bench of a round: real processes, rows with all their parts, and what is judged."""

from __future__ import annotations

import json
import multiprocessing

import pytest

from diloco.bench.syncer.publish import SETTING, Setting, _hear, run_publish
from diloco.errors import DilocoError


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_rounds_are_timed_with_their_parts_and_the_first_row_is_judged() -> None:
    heard: list[tuple[int, int]] = []

    report = run_publish(
        Setting(numel=70_000, num_rounds=1, bar=1e9), lambda done, of: heard.append((done, of))
    )

    alone, off, stored = report.rows
    assert alone["of_codecs"] == 1
    assert alone["commit_ms"] is None
    for row in (off, stored):
        parts = ("encode_ms", "arrive_ms", "merge_ms", "commit_ms", "announce_ms")
        assert sum(row[part] for part in parts) == pytest.approx(row["total_ms"])
        assert row["of_codecs"] == row["total_ms"] / alone["total_ms"]
    assert stored["commit_ms"] > off["commit_ms"], "the other's store is off the clock"
    (requirement,) = report.requirements
    assert requirement.is_met
    assert requirement.figure == off["of_codecs"]
    assert heard == [(0, 2), (1, 2), (2, 2)]
    assert json.dumps(report.as_dict())
    assert not multiprocessing.active_children()


def test_a_process_that_ended_is_named_as_the_reason() -> None:
    here, there = multiprocessing.Pipe()
    there.close()

    with pytest.raises(DilocoError, match="a process of the bench ended"):
        _hear(here)


def test_the_setting_is_what_was_asked_for() -> None:
    assert (SETTING.numel, SETTING.codec, SETTING.num_islands) == (25_000_000, "int4", 2)
    assert SETTING.bar == 1.5
