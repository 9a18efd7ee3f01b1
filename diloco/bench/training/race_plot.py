"""The picture of `diloco bench race`: wall time, bytes and held-out loss, by link and method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.report.figures import SMALL, TITLE, dress, new_figure

if TYPE_CHECKING:  # a second of imports, only for those who draw
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#999999", "#56b4e9", "#e69f00", "#009e73")
#: Key of a row, what it is, whether its axis is logarithmic (bytes differ by orders of magnitude).
_PANELS = (
    ("wall_s", "wall time\n[s]", False),
    ("megabytes_up", "sent by an island\n[MB]", True),
    ("nats_per_byte", "held-out loss\n[nats a byte]", False),
)


def write_plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the picture; its suffix says the format.

    Args:
        rows: Of the report; links that were not measured are left out.
        path: In a directory that there is.
    """
    race_figure(rows).savefig(path)


def race_figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw a panel a figure, a group of bars a link, a bar a method, its value above it."""
    measured = [row for row in rows if row["wall_s"] is not None]
    links = list(dict.fromkeys(row["link"] for row in measured))
    methods = list(dict.fromkeys(row["method"] for row in measured))
    width_in = max(6.0, 1.5 + 2.2 * len(links))
    figure = new_figure(width_in, 7.5)
    panels = figure.subplots(len(_PANELS), 1, sharex=True)
    for axes, (key, title, is_log) in zip(panels, _PANELS, strict=True):
        for index, method in enumerate(methods):
            values = {row["link"]: row[key] for row in measured if row["method"] == method}
            offset = (index - (len(methods) - 1) / 2) * 0.8 / len(methods)
            bars = axes.bar(
                [number + offset for number in range(len(links))],
                [values[link] for link in links],
                width=0.75 / len(methods),
                color=_COLOURS[index % len(_COLOURS)],
                label=method,
            )
            axes.bar_label(bars, fmt=_label, fontsize=SMALL - 1.5, padding=1)
        dress(axes, "", title, grid="y")
        axes.margins(y=0.15)
        if is_log:
            axes.set_yscale("log")
    _zoom(panels[-1], [row["nats_per_byte"] for row in measured])
    panels[-1].set_xticks(range(len(links)), links)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=4, fontsize=SMALL, frameon=False
    )
    figure.suptitle("the same model, tokens and links", fontsize=TITLE)
    return figure


def _zoom(axes: Axes, losses: Sequence[float]) -> None:
    """Losses differ by per cent: begin the axis below the smallest, and say so."""
    if not losses:
        return
    low, high = min(losses), max(losses)
    axes.set_ylim(0.97 * low, high + 0.25 * (high - 0.97 * low))
    axes.set_ylabel("held-out loss\n[nats a byte], cut axis", fontsize=SMALL)


def _label(value: float) -> str:
    """Write a figure in three digits, and never as a power of ten."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
