"""Pictures of the timelines of simulated and real runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from diloco.report.figures import SMALL, TITLE, dress, new_figure
from diloco.simulations.engine.timeline import Span, SpanKind
from diloco.simulations.engine.trace import tracks_of

if TYPE_CHECKING:  # a second of imports, only for those who draw
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH_IN, _ROW_IN, _MAX_ROWS_IN = 10.0, 0.22, 14.0
#: In the order of a round, which is that of the legend.
_COLOURS: dict[SpanKind, str] = {
    "compute": "#cfe3f3",
    "gather": "#0072b2",
    "encode": "#009e73",
    "send": "#e69f00",
    "fetch": "#56b4e9",
    "decode": "#f0e442",
    "merge": "#cc79a7",
    "wait": "#de2d26",
}


def timeline_figure(spans: Sequence[Span], title: str) -> Figure:
    """Draw a panel an island or syncer: a row for its training, one a fragment."""
    from matplotlib.patches import Patch

    tracks = tracks_of(spans, has_lanes=False)
    heights = [len(rows) for rows in tracks.values()]
    rows_in = min(_MAX_ROWS_IN, _ROW_IN * sum(heights) + 0.3 * len(tracks))
    figure = new_figure(_WIDTH_IN, 1.3 + rows_in)
    panels = figure.subplots(
        len(tracks), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )[:, 0]
    for axes, (place, rows) in zip(panels, tracks.items(), strict=True):
        _draw_rows(axes, rows)
        dress(axes, "", place, grid="none")
    panels[-1].set_xlim(min(s.begin_s for s in spans), max(s.end_s for s in spans))
    panels[-1].set_xlabel("time since the run began [s]", fontsize=SMALL)
    present = {span.kind for span in spans}
    figure.legend(
        handles=[Patch(color=c, label=kind) for kind, c in _COLOURS.items() if kind in present],
        loc="outside lower center",
        ncols=len(_COLOURS),
        fontsize=SMALL,
        frameon=False,
    )
    figure.suptitle(title, fontsize=TITLE)
    return figure


def _draw_rows(axes: Axes, rows: dict[str, list[Span]]) -> None:
    """Draw one collection a row: thousands of bars take seconds, not minutes."""
    for number, spans in enumerate(rows.values()):
        axes.broken_barh(
            [(span.begin_s, span.end_s - span.begin_s) for span in spans],
            (number - 0.4, 0.8),
            facecolors=[_COLOURS[span.kind] for span in spans],
            linewidth=0,
        )
    axes.set_ylim(len(rows) - 0.4, -0.6)
    every = max(1, len(rows) // 24)
    axes.set_yticks(range(0, len(rows), every), list(rows)[::every])
