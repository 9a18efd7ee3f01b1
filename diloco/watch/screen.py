"""`diloco watch`: the screen of a run, as its page shows it, in a terminal.

Learned from: the documentation of textual, https://textual.textualize.io.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import ClassVar, TypeAlias

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widget import Widget
from textual.widgets import DataTable, Footer, Input, Static, TabbedContent, TabPane
from textual.widgets.data_table import ColumnKey

from diloco.bounded_text import bounded_text
from diloco.page.network import fullest
from diloco.page.rendering import utc
from diloco.page.run_view import FragmentRow, IslandRow, LinkRow, RunView, seconds
from diloco.page.sources import LOOK_S, Source
from diloco.watch.pictures import LEGEND, curve, timeline

_STYLES = {"plain": "", "good": "green", "warning": "yellow", "bad": "bold red"}
#: Seconds that the timeline shows at most, and characters of a curve.
_MOST_SPAN_S, _CURVE = 600.0, 40
#: Rows of a table; of more, the first; of events, the newest.
_MOST_ROWS, _MOST_EVENTS = 2000, 500
#: Heading -> field of a `LinkRow`.
_LINKS = {
    "island": "island", "link": "state", "full": "full", "sends": "up", "receives": "down",
    "round trip": "round_trip", "failed calls": "failed", "memory": "memory", "MFU": "mfu",
    "by syncer": "by_syncer",
}  # fmt: skip

#: Rows of cells by a key of each, in their order.
Table: TypeAlias = Mapping[str, tuple[Text, ...]]


def _said(text: str, style: str = "") -> Text:
    """A peer's text, of which a terminal takes no part for a command."""
    return Text(bounded_text(text), style=style)


class Rows(DataTable[Text]):
    """A table of which only what is different is drawn again."""

    def __init__(self, columns: Iterable[str]) -> None:
        """Begin without rows."""
        super().__init__(cursor_type="row", zebra_stripes=True)
        self._shown: Table = {}
        self._names = tuple(columns)

    def on_mount(self) -> None:
        """Add the columns."""
        for name in self._names:
            self.add_column(name, key=name)

    def show(self, rows: Table) -> None:
        """Show these rows, by a key of each, in their order.

        Columns become wider with what they hold, and narrower with other rows alone: textual would
        measure all cells of the column for each one that is narrower now.
        """
        if [*self._shown] != [*rows]:
            self.clear()
            for key, row in rows.items():
                self.add_row(*row, key=key)
        else:
            for key, row in rows.items():
                for name, was, cell in zip(self._names, self._shown[key], row, strict=True):
                    if was != cell:
                        width = self.columns[ColumnKey(name)].content_width
                        self.update_cell(key, name, cell, update_width=cell.cell_len > width)
        self._shown = rows


def _names(row: type) -> list[str]:
    return [each.name.replace("_", " ") for each in fields(row) if each.name != "tone"]


def _cells(row: IslandRow | FragmentRow | LinkRow, named: Iterable[str] = ()) -> tuple[Text, ...]:
    """Show fields of a row; none named: all of them."""
    named = named or [each.name for each in fields(row) if each.name != "tone"]
    return tuple(
        _said(str(getattr(row, name)), _STYLES[row.tone] if name in ("state", "phase") else "")
        for name in named
    )


class WatchScreen(App[None]):
    """One run, looked at again and again.

    Args:
        source: Of the run, which has been looked at once.
    """

    CSS = """
    #head, #sentence, #alarms { padding: 0 1; }
    #sentence { text-style: bold; }
    #alarms { max-height: 10; overflow-y: auto; }
    #picture { height: auto; max-height: 60%; padding: 0 1; }
    TabbedContent, Rows { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("1", "tab('islands')", "Islands"),
        Binding("2", "tab('losses')", "Losses"),
        Binding("3", "tab('fragments')", "Fragments"),
        Binding("4", "tab('events')", "Events"),
        Binding("5", "tab('run')", "Run"),
        Binding("6", "tab('links')", "Links"),
        Binding("slash", "filter", "Filter events"),
        Binding("q", "quit", "Quit"),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, source: Source, view: RunView) -> None:
        """Assign only; `view` is what the source said first."""
        super().__init__()
        self._source, self._view = source, view
        self._head, self._sentence = Static(id="head"), Static(id="sentence")
        self._alarms, self._timeline = Static(id="alarms"), Static()
        self._filter = Input(placeholder="text, kind or island that events have")
        self._tabs = TabbedContent()
        self._rows = {
            "islands": Rows(_names(IslandRow)),
            "losses": Rows(("of", "newest", "tokens", "curve")),
            "fragments": Rows(_names(FragmentRow)),
            "events": Rows(("UTC", "kind", "island", "what happened")),
            "run": Rows(("of the run", "value", "note")),
            "links": Rows(_LINKS),
        }

    def compose(self) -> ComposeResult:
        """Lay the screen out."""
        yield from (self._head, self._sentence, self._alarms)
        above: dict[str, Widget] = {
            "fragments": VerticalScroll(self._timeline, id="picture"),
            "events": self._filter,
        }
        with self._tabs:
            for name, rows in self._rows.items():
                with TabPane(name.capitalize(), id=name):
                    yield from (*([above[name]] if name in above else []), rows)
        yield Footer()

    def on_mount(self) -> None:
        """Show what is known, and look again every second."""
        self._show()
        self.run_worker(self._follow())

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._view = await self._source.look()
            self._show()

    def on_tabbed_content_tab_activated(self) -> None:
        """Show the tab that is seen now."""
        self._show()

    def on_input_changed(self) -> None:
        """Show the events that have what was typed."""
        self._show()

    def on_resize(self) -> None:
        """Draw the timeline as wide as the screen is."""
        self._show()

    def action_tab(self, name: str) -> None:
        """Go to a tab."""
        self._tabs.active = name
        self._rows[name].focus()

    def action_filter(self) -> None:
        """Type what events must have."""
        self._tabs.active = "events"
        self._filter.focus()

    def _show(self) -> None:
        """Show the head, and the tab that is seen."""
        view = self._view
        head = Text.assemble(
            _said(view.name, "bold"),
            "  ",
            _said(view.state, _STYLES[view.tone]),
            f"  {view.origin}",
        )
        for figure in view.figures:
            head.append(f"  {figure.label} ").append(_said(figure.value, "bold"))
        self._head.update(head)
        self._sentence.update(
            _said(view.problem or view.sentence, "bold red" if view.problem else "")
        )
        self._alarms.update(_alarms(view))
        self._alarms.display = bool(view.alarms or view.notices)
        seen = self._tabs.active or "islands"
        self._rows[seen].show(getattr(self, f"_{seen}")())

    def _islands(self) -> Table:
        return {row.island: _cells(row) for row in self._view.islands[:_MOST_ROWS]}

    def _losses(self) -> Table:
        view = self._view
        curves = (
            *((f"published parameters, {c.name}", c) for c in view.held_out),
            *((f"island {c.name}", c) for c in view.curves),
        )
        return {
            name: (
                _said(name),
                _said(f"{c.points[-1][1]:.4f}"),
                _said(f"{c.points[-1][0]:,.0f}"),
                Text(curve(c.points, _CURVE)),
            )
            for name, c in curves[:_MOST_ROWS]
            if c.points
        }

    def _fragments(self) -> Table:
        view = self._view
        began = min((*(b.start_s for b in view.bars), *(m.at for m in view.marks), view.now - 1))
        span_s = min(_MOST_SPAN_S, view.now - began)
        width = max(20, self.size.width - 12)
        drawn = timeline(view.bars, view.marks, end_s=view.now, span_s=span_s, width=width)
        title = f"the last {seconds(span_s)}   "
        self._timeline.update(Text.assemble(title, LEGEND, "\n", drawn))
        return {str(row.fragment_id): _cells(row) for row in view.fragments[:_MOST_ROWS]}

    def _events(self) -> Table:
        wanted = self._filter.value.strip().lower()
        events = [
            each
            for each in self._view.events
            if wanted in f"{each.kind} {each.island} {each.text}".lower()
        ]
        return {
            str(number): (*map(_said, (utc(event.at), event.kind, event.island, event.text)),)
            for number, event in enumerate(events[: -_MOST_EVENTS - 1 : -1])
        }

    def _links(self) -> Table:
        links = fullest(self._view.links, _MOST_ROWS)
        return {link.island: _cells(link, _LINKS.values()) for link in links}

    def _run(self) -> Table:
        facts = [(f.label, f.value, f.note) for f in self._view.facts]
        facts += [(key, value, "") for key, value in self._view.settings.items()]
        return {str(at): tuple(map(_said, row)) for at, row in enumerate(facts[:_MOST_ROWS])}


def _alarms(view: RunView) -> Text:
    """Say what is wrong, and what to type; `AlarmRow.command` has nothing that is not a word."""
    lines = [
        Text.assemble(
            _said(f"{alarm.kind}, ", "bold red" if alarm.holds else "yellow"),
            _said(f"{alarm.about}: {alarm.text} ({alarm.when})"),
            (f"\n  $ {alarm.command}" if alarm.command else "", "bold"),
        )
        for alarm in view.alarms
    ]
    return Text("\n").join([*lines, *map(_said, view.notices)])


async def show(source: Source) -> None:
    """Show a run until the operator has seen enough; closes its source.

    Raises:
        CoordinatorUnavailable: If its coordinator has never answered.
    """
    try:
        await WatchScreen(source, await source.look()).run_async()
    finally:
        await source.close()
