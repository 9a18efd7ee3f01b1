"""A table that fits its terminal: no word is torn, and what does not fit in a row stands below."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console, ConsoleOptions
from rich.text import Text

if TYPE_CHECKING:  # commands import what they need when they run
    from rich.table import Table

    from diloco.report.rows import Column

_T = TypeVar("_T")

_GAPS = (2, 1)  # characters after a column; the wide one where there is room for it
_NOTHING = ("", "-")
_FIGURE = re.compile(r"([-+<]?\d.*|-?)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class FittedTable:
    """Rows under their headings, figures to the right.

    Columns that do not fit go into a table below; each begins with the columns of text that come
    first, which say what a row is of.

    Attributes:
        headings: Of the columns.
        rows: Cells, one a column.
        figures: Columns that are aligned to the right.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[Text]]
    figures: frozenset[int]

    @classmethod
    def of(cls, items: Iterable[_T], columns: Mapping[str, Callable[[_T], object]]) -> FittedTable:
        """Make a row of each item; `columns`: heading -> what gives an item's cell."""
        rows = [[cell(item) for cell in columns.values()] for item in items]
        return cls.with_rows(list(columns), rows)

    @classmethod
    def with_rows(
        cls,
        headings: Sequence[str],
        rows: Iterable[Iterable[object]],
        figures: Iterable[int] | None = None,
    ) -> FittedTable:
        """Take rows of cells, each a `Text` or what `str` makes one of.

        Args:
            headings: Of the columns.
            rows: As many cells each.
            figures: Columns of figures; None: all but the first whose cells begin with a digit or
                say nothing.
        """
        texts = [
            [cell if isinstance(cell, Text) else Text(str(cell)) for cell in row] for row in rows
        ]
        if figures is None:
            columns = enumerate(zip(*texts, strict=True))
            figures = [i for i, of in columns if i and all(_FIGURE.fullmatch(c.plain) for c in of)]
        return cls(headings, texts, frozenset(figures))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        """Lay the columns out in as many tables as the width asks for."""
        columns = range(len(self.headings))
        names = list(takewhile(lambda column: column not in self.figures, columns))
        least = [self._longest(column, str.split) for column in columns]
        blocks = [list(names)]
        for column in columns[len(names) :]:
            room = options.max_width - sum(least[c] + _GAPS[-1] for c in blocks[-1])
            if room < least[column] + _GAPS[-1] and len(blocks[-1]) > len(names):
                blocks.append(list(names))
            blocks[-1].append(column)
        for block in blocks:
            yield self._table(block, [least[column] for column in block], options.max_width)

    def _table(self, columns: Sequence[int], least: Sequence[int], width: int) -> Table:
        """Lay out columns that fit; what is left of the width goes to those that can use it."""
        from rich.table import Table

        gap = next((g for g in _GAPS if sum(least) + g * len(columns) <= width), _GAPS[-1])
        spare = max(0, width - sum(least) - gap * len(columns))
        widths = list(least)
        wants = [self._longest(c, str.splitlines) - widths[i] for i, c in enumerate(columns)]
        # What a column does not need of its share is left to those that need more.
        for number, index in enumerate(sorted(range(len(columns)), key=lambda i: wants[i])):
            more = min(wants[index], spare // (len(columns) - number))
            widths[index] += more
            spare -= more
        table = Table(box=None, padding=(0, gap, 0, 0), header_style="dim")
        for column, column_width in zip(columns, widths, strict=True):
            table.add_column(
                self.headings[column],
                justify="right" if column in self.figures else "left",
                overflow="fold",
                width=column_width,
            )
        for row in self.rows:
            table.add_row(*(row[column] for column in columns))
        return table

    def _longest(self, column: int, parts: Callable[[str], Sequence[str]]) -> int:
        """Length of the longest part of heading and cells, at least 1."""
        texts = (self.headings[column], *(row[column].plain for row in self.rows))
        return max((len(part) for text in texts for part in parts(text)), default=1)


def print_rows(
    console: Console, columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], title: str = ""
) -> None:
    """Print the rows of a report; a column in which no row has anything is left out.

    Args:
        console: Whose width counts.
        columns: What is shown of every row.
        rows: Values by the columns' keys.
        title: Above all of it; empty: none.
    """
    if title:
        console.print(title, style="italic", markup=False, highlight=False, soft_wrap=True)
    shown = [c for c in columns if any(c.cell(row) not in _NOTHING for row in rows)]
    cells = [[column.cell(row) for column in shown] for row in rows]
    figures = [index for index, column in enumerate(shown) if column.form]
    console.print(FittedTable.with_rows([column.heading for column in shown], cells, figures))
