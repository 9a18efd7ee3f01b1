"""Pictures of simulations and of what they are held against.

Figures are drawn off screen and belong to nobody else: no state of pyplot is touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.simulations.engine.timeline import Span, SpanKind
from diloco.simulations.engine.trace import tracks_of

if TYPE_CHECKING:  # a second of imports, only for those who draw
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SMALL, _TITLE, _DPI, _WIDTH_IN = 7.5, 10.0, 150, 10.0
_ROW_IN, _MAX_ROWS_IN = 0.22, 14.0
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


def write_timeline(spans: Sequence[Span], title: str, path: Path) -> None:
    """Write the picture of a run's timeline; its suffix says the format.

    Args:
        spans: Of one run, real or simulated.
        title: Above it.
        path: In a directory that there is.
    """
    timeline_figure(spans, title).savefig(path)


def timeline_figure(spans: Sequence[Span], title: str) -> Figure:
    """Draw a panel an island or syncer: a row for its training, one a fragment."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    tracks = tracks_of(spans, has_lanes=False)
    heights = [len(rows) for rows in tracks.values()]
    rows_in = min(_MAX_ROWS_IN, _ROW_IN * sum(heights) + 0.3 * len(tracks))
    figure = Figure(figsize=(_WIDTH_IN, 1.3 + rows_in), dpi=_DPI, layout="constrained")
    panels = figure.subplots(
        len(tracks), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )[:, 0]
    for axes, (place, rows) in zip(panels, tracks.items(), strict=True):
        _draw_rows(axes, rows)
        axes.set_ylabel(place, fontsize=_SMALL)
    panels[-1].set_xlim(min(s.begin_s for s in spans), max(s.end_s for s in spans))
    panels[-1].set_xlabel("time since the run began [s]", fontsize=_SMALL)
    present = {span.kind for span in spans}
    figure.legend(
        handles=[Patch(color=c, label=kind) for kind, c in _COLOURS.items() if kind in present],
        loc="outside lower center",
        ncols=len(_COLOURS),
        fontsize=_SMALL,
        frameon=False,
    )
    figure.suptitle(title, fontsize=_TITLE)
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
    axes.tick_params(labelsize=_SMALL, length=2)
    axes.spines[["top", "right"]].set_visible(False)
