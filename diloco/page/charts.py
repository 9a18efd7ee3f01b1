"""Where the lines and bars of a page's pictures stand, in units of their view box. Pure.

A picture has bounded many shapes, however many points and rounds there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from diloco.page.run_view import Bar, CurveView, Mark

WIDTH = 1000.0
#: Of the picture of losses; of a row of the timeline, and of a bar and the mark of a merge in it.
HEIGHT, ROW, BAR, MERGED = 300.0, 22.0, 16.0, 8.0
#: Room around a picture for the labels of its axes.
_LEFT, _RIGHT, _TOP, _BOTTOM = 70.0, 24.0, 8.0, 24.0
_MOST_POINTS = 4000
_LEAST_POINTS = 20
#: Points of a curve up to which each is a dot.
_DOTTED = 12
#: Curves that have a colour and a name of their own.
NAMED = 8
_TICKS = 5
#: Bars of one phase closer than this are drawn as one.
_CLOSE = 0.6
#: Bars and moments up to which each is a shape with a text; of more, those alike are one path.
_MOST_TITLED = 600


@dataclass(frozen=True, slots=True)
class Tick:
    """A labelled position on an axis."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Line:
    """A curve: points as SVG writes them; as dots, too, where they are few."""

    name: str
    style: str
    points: str
    dots: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class LossChart:
    """Losses by tokens."""

    lines: tuple[Line, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    is_named: bool
    height: float = HEIGHT


@dataclass(frozen=True, slots=True)
class Shape:
    """A bar of the timeline."""

    x: float
    y: float
    width: float
    phase: str
    text: str


@dataclass(frozen=True, slots=True)
class Outline:
    """Bars of a phase, or moments of a kind, as the path that SVG draws."""

    style: str
    path: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class TimelineChart:
    """Rounds by fragment and time."""

    rows: tuple[Tick, ...]
    outlines: tuple[Outline, ...]
    x_ticks: tuple[Tick, ...]
    height: float


def loss_chart(curves: Sequence[CurveView]) -> LossChart | None:
    """Place curves; None: none has two points yet.

    The lowest and highest of them end the axis. More than `NAMED` curves have one colour.
    """
    each = max(_LEAST_POINTS, _MOST_POINTS // max(1, len(curves)))
    thinned = [_thinned(curve.points, each) for curve in curves]
    everything = [point for points in thinned for point in points]
    if all(len(points) < 2 for points in thinned):
        return None
    xs, ys = [x for x, _ in everything], [y for _, y in everything]
    (x_low, x_high), (y_low, y_high) = _ends(xs, least=1.0), _ends(ys, least=1e-3)
    floor = HEIGHT - _BOTTOM

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x = _LEFT + (point[0] - x_low) / (x_high - x_low) * (WIDTH - _LEFT - _RIGHT)
        y = floor - (point[1] - y_low) / (y_high - y_low) * (floor - _TOP)
        return round(x, 1), round(y, 1)

    is_named = len(curves) <= NAMED
    lines = tuple(
        Line(
            curve.name,
            f"c{number}" if is_named else "many",
            " ".join(f"{x:g},{y:g}" for x, y in map(place, points)),
            tuple(map(place, points)) if len(points) <= _DOTTED else (),
        )
        for number, (curve, points) in enumerate(zip(curves, thinned, strict=True))
    )
    return LossChart(
        lines,
        tuple(Tick(place((x, y_low))[0], _si(x)) for x in _ticks(x_low, x_high)),
        tuple(Tick(place((x_low, y))[1], f"{y:.4g}") for y in _ticks(y_low, y_high)),
        is_named,
    )


def timeline_chart(
    bars: Iterable[Bar], marks: Iterable[Mark], *, end_s: float, span_s: float
) -> TimelineChart | None:
    """Place what happened in the `span_s` seconds before `end_s`; None: nothing did."""
    start_s = end_s - span_s
    shown = [bar for bar in bars if bar.end_s > start_s and bar.start_s < end_s]
    moments = [mark for mark in marks if start_s <= mark.at <= end_s]
    fragments = sorted({b.fragment_id for b in shown} | {m.fragment_id for m in moments})
    if not fragments:
        return None
    top = {fragment: _TOP + ROW * row for row, fragment in enumerate(fragments)}

    def place(at: float) -> float:
        share = (min(max(at, start_s), end_s) - start_s) / span_s
        return round(_LEFT + share * (WIDTH - _LEFT - _RIGHT), 1)

    shapes: dict[tuple[int, str], Shape] = {}  # the newest of each fragment and phase
    done: list[Shape] = []
    for bar in sorted(shown, key=lambda bar: bar.start_s):
        x, end = place(bar.start_s), place(bar.end_s)
        key = bar.fragment_id, bar.phase
        last = shapes.get(key)
        if last is not None and x - (last.x + last.width) < _CLOSE and end - x < _CLOSE:
            width = max(last.width, round(end - last.x, 1))
            shapes[key] = Shape(last.x, last.y, width, last.phase, f"several rounds: {bar.phase}")
            continue
        if last is not None:
            done.append(last)
        width = max(_CLOSE, round(end - x, 1))
        shapes[key] = Shape(x, top[bar.fragment_id], width, bar.phase, bar.text)
    outlines = [
        Outline(f"phase {shape.phase}", _bar_path(shape), shape.text)
        for shape in sorted([*done, *shapes.values()], key=lambda s: (s.y, s.x))
    ]
    dots = {(mark.kind, top[mark.fragment_id], place(mark.at)): mark.text for mark in moments}
    outlines += [
        Outline(f"mark {kind}", _mark_path(kind, x, y), text) for (kind, y, x), text in dots.items()
    ]
    if len(outlines) > _MOST_TITLED:
        paths: dict[str, list[str]] = {}
        for each in outlines:
            paths.setdefault(each.style, []).append(each.path)
        outlines = [Outline(style, "".join(of)) for style, of in paths.items()]
    return TimelineChart(
        rows=tuple(Tick(top[p] + ROW / 2, str(p)) for p in fragments),
        outlines=tuple(outlines),
        x_ticks=tuple(
            Tick(place(end_s - ago), f"-{_time(ago)}" if ago else "end")
            for ago in (span_s * part / _TICKS for part in range(_TICKS))
        ),
        height=_TOP + ROW * len(fragments) + _BOTTOM,
    )


def _bar_path(shape: Shape) -> str:
    return f"M{shape.x:g} {shape.y:g}h{shape.width:g}v{BAR:g}h-{shape.width:g}z"


def _mark_path(kind: str, x: float, y: float) -> str:
    """Draw a line over the bar; that of a merge below it, so that both are seen."""
    is_merge = kind == "merged"
    return f"M{x:g} {y + 12 if is_merge else y:g}v{MERGED if is_merge else BAR:g}"


def _thinned(points: Sequence[tuple[float, float]], most: int) -> Sequence[tuple[float, float]]:
    """Leave out points between the first and the last, evenly."""
    if len(points) <= most:
        return points
    step = math.ceil(len(points) / most)
    return [*points[::step], points[-1]]


def _ends(values: Sequence[float], least: float) -> tuple[float, float]:
    """Give the ends of an axis, which differ by `least` or a millionth of their value."""
    low = min(values)
    return low, max(*values, low + max(least, 1e-6 * abs(low)))


def _ticks(low: float, high: float) -> list[float]:
    """Give round values between two others."""
    rough = (high - low) / _TICKS
    scale = 10 ** math.floor(math.log10(rough))
    step = next(scale * m for m in (1, 2, 5, 10) if scale * m >= rough)
    first = math.ceil(low / step)
    return [step * n for n in range(first, math.floor(high / step) + 1)]


def _si(value: float) -> str:
    for factor, sign in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.4g}{sign}"
    return f"{value:.4g}"


def _time(duration_s: float) -> str:
    return f"{duration_s:.3g} s" if duration_s < 120 else f"{duration_s / 60:.3g} min"
