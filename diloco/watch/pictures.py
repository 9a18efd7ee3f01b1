"""What a terminal draws of a run: the timeline of its fragments, and losses. Pure.

A character is a moment, and a row a fragment; eight heights of a block are a curve.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from rich.text import Text

from diloco.page.run_view import Bar, Mark

_BLOCKS = " ▁▂▃▄▅▆▇█"
#: How a phase is drawn: a sign that tells them apart without colours, and its colour.
_PHASES = {
    "open": ("─", "blue"),
    "grace": ("┄", "yellow"),
    "merge": ("█", "magenta"),
    "expired": ("x", "red"),
}
_MARKS = {"published": ("│", "green"), "expired": ("x", "red")}
LEGEND = Text.assemble(
    *(
        part
        for name, (sign, style) in (_PHASES | _MARKS).items()
        for part in ((sign, style), f" {name}  ")
    )
)


def timeline(
    bars: Iterable[Bar], marks: Iterable[Mark], *, end_s: float, span_s: float, width: int
) -> Text:
    """Draw the `span_s` seconds before `end_s`, `width` characters of them, fragments below.

    Of what falls into one character, a version that was published or an attempt that expired is
    seen, else what began last.
    """
    begin_s, moment_s = end_s - span_s, span_s / width
    rows: dict[int, list[tuple[str, str]]] = {}

    def put(p: int, from_s: float, to_s: float, sign: tuple[str, str]) -> None:
        row = rows.setdefault(p, [(" ", "")] * width)
        first = max(0, int((from_s - begin_s) / moment_s))
        for at in range(first, min(width - 1, int((to_s - begin_s) / moment_s)) + 1):
            row[at] = sign

    for bar in sorted(bars, key=lambda bar: bar.start_s):
        if bar.end_s >= begin_s and bar.start_s <= end_s:
            put(bar.fragment_id, bar.start_s, bar.end_s, _PHASES.get(bar.phase, ("?", "")))
    for mark in marks:
        if mark.kind in _MARKS and begin_s <= mark.at <= end_s:
            put(mark.fragment_id, mark.at, mark.at, _MARKS[mark.kind])
    digits = len(str(max(rows, default=0)))
    lines = [Text.assemble(f"{p:>{digits}} ", *_joined(rows[p])) for p in sorted(rows)]
    return Text("\n").join(lines)


def _joined(signs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Join neighbours of one style: each piece takes time to draw."""
    for style, some in itertools.groupby(signs, lambda sign: sign[1]):
        yield "".join(sign for sign, _ in some), style


def curve(points: Sequence[tuple[float, float]], width: int) -> str:
    """Draw values over their x, the last `width` characters from the lowest to the highest.

    A character is the mean of the values that fall into it, or the one before where none does.
    """
    if not points:
        return ""
    first, last = points[0][0], points[-1][0]
    low, high = min(y for _, y in points), max(y for _, y in points)
    scale = (len(_BLOCKS) - 2) / (high - low or 1.0)
    return "".join(
        _BLOCKS[1 + round((y - low) * scale)] for y in _means(points, first, last, width)
    )


def _means(
    points: Sequence[tuple[float, float]], first: float, last: float, width: int
) -> Iterator[float]:
    each = (last - first) / width or 1.0
    held: dict[int, list[float]] = {}
    for x, y in points:
        held.setdefault(min(width - 1, int((x - first) / each)), []).append(y)
    mean = points[0][1]
    for at in range(width if len(points) > 1 else 1):
        mean = sum(held[at]) / len(held[at]) if at in held else mean
        yield mean
