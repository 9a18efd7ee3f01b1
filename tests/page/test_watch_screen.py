"""The screen of a run in a terminal, driven by keys, from recorded and from live runs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from textual.widgets import DataTable, Input, Static
from typer.testing import CliRunner

from diloco.cli.main import app
from diloco.errors import ConfigError
from diloco.page.run_view import Bar, EventRow, IslandRow, Mark, RunView
from diloco.page.sources import RecordedSource
from diloco.watch import screen
from diloco.watch.pictures import curve, timeline
from diloco.watch.screen import WatchScreen
from tests.page.recorded_page_run import HOSTILE_NAME, write_state


def text_of(app: WatchScreen, name: str) -> str:
    return str(app.query_one(f"#{name}", Static).render())


def table(app: WatchScreen, name: str) -> list[list[str]]:
    rows = app.query_one(f"#{name} DataTable", DataTable)
    return [[str(cell) for cell in rows.get_row(key)] for key in rows.rows]


def test_a_recorded_run_is_read_by_keys_and_a_hostile_text_is_only_text(tmp_path: Path) -> None:
    async def look() -> None:
        source = RecordedSource(write_state(tmp_path))
        app = WatchScreen(source, await source.look())
        async with app.run_test(size=(120, 40)) as pilot:
            assert "recorded" in text_of(app, "head")
            islands = table(app, "islands")
            assert len(islands) == 3 and ascii(HOSTILE_NAME)[1:-1] in [row[0] for row in islands]
            await pilot.press("2")
            assert {row[0] for row in table(app, "losses")} >= {"island east", "island west"}
            await pilot.press("3")
            assert "the last " in text_of(app, "picture Static")
            assert [row[0] for row in table(app, "fragments")] == ["0"]
            await pilot.press("slash", *"expired")
            assert app.query_one(Input).value == "expired"
            events = table(app, "events")
            assert events and all("expired" in " ".join(row).lower() for row in events)
            await pilot.press("escape")
            app.action_tab("run")
            await pilot.pause()
            assert ["outer.lr", "0.7", ""] in table(app, "run")
            await pilot.press("6")
            links = {row[0]: row[3:5] for row in table(app, "links")}
            assert links["east"] == ["1.26 kbit/s", "2.52 kbit/s"]
            everything = [
                c for n in ("islands", "links", "events", "run") for r in table(app, n) for c in r
            ]
            assert all(text.isascii() and text.isprintable() for text in everything)
        await source.close()

    asyncio.run(look())


class Changing:
    """A run that is something else at each look."""

    def __init__(self, *views: RunView) -> None:
        self._views = [*views]

    async def look(self) -> RunView:
        return self._views.pop(0) if len(self._views) > 1 else self._views[0]

    async def act(self, command: str, arguments: Mapping[str, str]) -> str:
        raise AssertionError("a screen does nothing")

    async def close(self) -> None:
        pass


def test_what_changes_is_seen_and_where_one_reads_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        IslandRow(f"i{n:04d}", "training", "good", inner_step="1", loss="10.5") for n in range(1000)
    ]
    events = tuple(EventRow(float(n), "step", "", f"event {n}") for n in range(10_000))
    first = RunView("run", "here", True, "running", "good", "All train.", 9.0, islands=tuple(rows))
    rows = [replace(row, loss="9.5") for row in rows]
    rows[500] = replace(rows[500], inner_step="2")
    away = replace(
        first, islands=tuple(rows), events=events, problem="the coordinator does not answer"
    )
    monkeypatch.setattr(screen, "LOOK_S", 0.01)

    def measured_whole(*_: object) -> None:
        raise AssertionError("a column is measured for a cell: a million cells of 1,000 rows")

    monkeypatch.setattr(DataTable, "get_column", measured_whole)

    async def look() -> None:
        app = WatchScreen(Changing(away), first)
        async with app.run_test(size=(80, 24)) as pilot:
            islands = app.query_one("#islands DataTable", DataTable)
            islands.move_cursor(row=700)
            while table(app, "islands")[500][4] != "2":
                await pilot.pause(0.01)
            assert islands.cursor_row == 700
            assert text_of(app, "sentence") == "the coordinator does not answer"
            await pilot.press("4")
            assert table(app, "events")[0][3] == "event 9999"

    asyncio.run(look())


def test_a_timeline_shows_phases_by_signs_and_what_was_published_last() -> None:
    bars = [
        Bar(0, 0.0, 5.0, "open", ""),
        Bar(0, 5.0, 7.0, "merge", ""),
        Bar(12, -9.0, 2.0, "x", ""),
    ]
    marks = [
        Mark(0, 8.0, "published", ""),
        Mark(12, 4.0, "expired", ""),
        Mark(0, 9.0, "merged", ""),
    ]

    drawn = timeline(bars, marks, end_s=10.0, span_s=10.0, width=10)

    assert drawn.plain.split("\n") == [" 0 ─────███│ ", "12 ??? x     "]
    assert len(drawn.spans) == 4, "a piece for each style, and none for each sign"


def test_a_curve_goes_from_the_highest_to_the_lowest_and_fills_gaps() -> None:
    assert curve([(0.0, 8.0), (1.0, 4.5), (3.0, 1.0)], 4) == "█▅▅▁"
    assert curve([(0.0, 2.0)], 4) == "▁" and curve([], 4) == ""


def test_where_there_is_no_terminal_another_command_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["watch", str(write_state(tmp_path))])
    assert isinstance(result.exception, ConfigError)
    assert "use diloco status --watch" in str(result.exception)
