"""Rows of a report on a terminal: no word is torn, and what does not fit in a row stands below."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # commands import what they need when they run
    from rich.console import Console
    from rich.table import Table

    from diloco.report.rows import Column

_GAPS = (2, 1)  # characters after a column; the wide one where there is room for it
_NOTHING = ("", "-")


def print_rows(
    console: Console,
    columns: Sequence[Column],
    rows: Sequence[Mapping[str, Any]],
    title: str = "",
) -> None:
    """Print rows under their headings, figures to the right.

    A column in which no row has anything is left out. Columns that do not fit go into a table
    below; each begins with the columns of text that come first, which say what a row is of.

    Args:
        console: Whose width counts.
        columns: What is shown of every row.
        rows: Values by the columns' keys.
        title: Above all of it; empty: none.
    """
    if title:
        console.print(title, style="italic", markup=False, highlight=False, soft_wrap=True)
    shown = [c for c in columns if any(c.cell(row) not in _NOTHING for row in rows)]
    names = list(takewhile(lambda column: not column.form, shown))
    least = {column: _longest(column, rows, str.split) for column in shown}
    blocks = [list(names)]
    for column in shown[len(names) :]:
        room = console.width - sum(least[c] + _GAPS[-1] for c in blocks[-1])
        if room < least[column] + _GAPS[-1] and len(blocks[-1]) > len(names):
            blocks.append(list(names))
        blocks[-1].append(column)
    for block in blocks:
        console.print(_table(block, rows, [least[column] for column in block], console.width))


def _table(
    columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], least: Sequence[int], width: int
) -> Table:
    """Lay out columns that fit; what is left of the width goes to those that can use it."""
    from rich.table import Table
    from rich.text import Text

    gap = next((g for g in _GAPS if sum(least) + g * len(columns) <= width), _GAPS[-1])
    spare = max(0, width - sum(least) - gap * len(columns))
    wishes = [_longest(c, rows, str.splitlines) - n for c, n in zip(columns, least, strict=True)]
    widths = list(least)
    # The least wish first: what it leaves of its share goes to those who wish for more.
    for number, index in enumerate(sorted(range(len(columns)), key=lambda i: wishes[i])):
        more = min(wishes[index], spare // (len(columns) - number))
        widths[index] += more
        spare -= more
    table = Table(box=None, padding=(0, gap, 0, 0), header_style="dim")
    for column, column_width in zip(columns, widths, strict=True):
        table.add_column(
            column.heading,
            justify="right" if column.form else "left",
            overflow="fold",
            width=column_width,
        )
    for row in rows:
        table.add_row(*(Text(column.cell(row)) for column in columns))
    return table


def _longest(
    column: Column, rows: Sequence[Mapping[str, Any]], parts: Callable[[str], Sequence[str]]
) -> int:
    """Length of the longest part of heading and cells, at least 1."""
    texts = (column.heading, *(column.cell(row) for row in rows))
    return max((len(part) for text in texts for part in parts(text)), default=1)
