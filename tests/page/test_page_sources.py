"""A run under way is read from its directory as it is written."""

from __future__ import annotations

import asyncio
import json
import resource
from pathlib import Path

import pytest

from diloco.page import sources
from diloco.page.sources import RecordedSource
from diloco.state_dir import StateDir, hold
from diloco.telemetry.events import CheckpointWritten
from tests.page.recorded_page_run import step, write


def test_what_is_written_later_is_read_once_and_a_torn_line_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "LOOK_S", 0.0)
    path = tmp_path / "telemetry" / "events-east-0.jsonl"
    write(path, "east", [step(1), step(2)])
    source = RecordedSource(tmp_path)
    line = json.dumps({**json.loads(path.read_text().splitlines()[1]), "inner_step": 3}) + "\n"

    async def looks() -> list[tuple[int, int]]:
        seen = []
        for text in ("", line[:20], line[20:], "no JSON\n"):
            with path.open("a") as file:
                file.write(text)
            view = await source.look()
            seen.append((len(view.curves[0].points), len(view.notices)))
        return seen

    assert asyncio.run(looks()) == [(2, 0), (2, 0), (3, 0), (3, 1)]


def test_more_files_than_a_process_may_open_are_read_in_the_order_of_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_LINES_BYTES", 64)
    names = [f"island-{number:02d}" for number in range(80)]
    for name in names:
        path = tmp_path / "telemetry" / f"events-{name}-0.jsonl"
        write(path, name, [step(1), CheckpointWritten(1, 100, 0.5, 0.1, 0.0), step(2)])
    source, limits = RecordedSource(tmp_path), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, limits[1]))
    try:
        view = source._read_on()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    assert [(curve.name, len(curve.points)) for curve in view.curves] == [(n, 2) for n in names]
    assert [event.island for event in view.events] == names
    assert {event.at for event in view.events} == {view.events[0].at}


def test_a_run_is_under_way_while_its_coordinator_lives(tmp_path: Path) -> None:
    write(tmp_path / "telemetry" / "events-east-0.jsonl", "east", [step(1)])

    with hold(StateDir(tmp_path).coordinator_lock):
        living = asyncio.run(RecordedSource(tmp_path).look())
    left = asyncio.run(RecordedSource(tmp_path).look())

    assert (living.state, left.state) == ("running", "not at work here")
