"""Deadlines of tests count what the machine grants and what advances, not the wall clock alone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import waiting
from tests.waiting import Patience, said_by, wait_until, written


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The wall clock in seconds, and how many processes want a core of the two."""
    now = [0.0, 1.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (now[1], 0.0, 0.0))
    return now


def test_on_an_idle_machine_a_second_is_a_second(clock: list[float]) -> None:
    patience = Patience(60.0)
    clock[0] = 59.0
    assert patience.left_s() == pytest.approx(1.0)
    clock[0] = 60.0
    assert patience.left_s() <= 0


def test_at_a_load_of_20_on_two_cores_a_second_counts_a_tenth(clock: list[float]) -> None:
    patience = Patience(60.0)
    clock[:] = [590.0, 20.0]
    assert patience.left_s() == pytest.approx(1.0)
    clock[:] = [592.0, 1.0]
    assert patience.left_s() <= 0


def test_what_advances_starts_the_deadline_again(clock: list[float], tmp_path: Path) -> None:
    events = tmp_path / "run" / "events.jsonl"
    events.parent.mkdir()
    patience = Patience(60.0, written(tmp_path))

    clock[0] = 50.0
    events.write_text("one\n")
    clock[0] = 100.0
    assert patience.left_s() == pytest.approx(60.0)
    clock[0] = 161.0
    assert patience.left_s() <= 0, "nothing was written since"


def test_what_never_comes_is_told_with_what_is_missing() -> None:
    with pytest.raises(AssertionError, match=r"not within 0\.01 s the second island"):
        wait_until(lambda: None, 0.01, what=lambda: "the second island")


def test_what_a_process_said_is_whole_after_looks_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waiting, "_CALL_S", 0.05)
    code = "import time; print('one', flush=True); time.sleep(0.3); print('two')"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert said_by(process, 60.0)[0] == "one\ntwo\n"

    hung = subprocess.Popen(["sleep", "600"], text=True)
    with pytest.raises(subprocess.TimeoutExpired):
        said_by(hung, 0.1)
    hung.kill()
    hung.wait()
