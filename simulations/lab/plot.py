"""The picture of a laboratory: loss against tokens, virtual time and bytes, a line a point."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.simulations.lab.run import Result

if TYPE_CHECKING:  # a second of imports, only for those who draw
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#999999")
SMALL, TITLE, DPI = 8.0, 10.0, 150
_STYLES = ("-", "--", ":")
#: Letters of a legend that stand side by side.
_LEGEND_WIDTH = 130
#: Most lines that a legend still names.
_MOST_NAMED = 24
#: Ends of lines that differ by more make a logarithmic axis.
_FAR = 10.0
_PANELS = (("tokens", "tokens"), ("virtual_s", "virtual time [s]"), ("megabytes", "moved [MB]"))


def write_plot(results: Sequence[Result], path: Path) -> None:
    """Write the picture; its suffix says the format."""
    lab_figure(results).savefig(path)


def lab_figure(results: Sequence[Result]) -> Figure:
    """Draw three panels side by side; a line is the mean over the seeds of a point."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    groups: dict[str, list[Result]] = {}
    for result in results:
        if result["readings"]:
            groups.setdefault(label_of(result["swept"]), []).append(result)
    figure = Figure(figsize=(11.0, 4.2), dpi=DPI, layout="constrained")
    panels = figure.subplots(1, len(_PANELS), sharey=True)
    ends: list[list[float]] = [[] for _ in _PANELS]
    for number, (label, group) in enumerate(groups.items()):
        for axes, (key, _), longest in zip(panels, _PANELS, ends, strict=True):
            xs, losses = _means(group, key)
            # Neighbours differ in style, too: a line may lie on another one.
            style = _STYLES[(number + 2 * (number // len(COLOURS))) % len(_STYLES)]
            colour = COLOURS[number % len(COLOURS)]
            axes.plot(xs, losses, style, color=colour, linewidth=1.2, label=label)
            longest.append(xs[-1])
    for axes, (_, title), longest in zip(panels, _PANELS, ends, strict=True):
        dress(axes, title)
        if longest and max(longest) > _FAR * min(longest) > 0:
            axes.set_xscale("log")
    panels[0].xaxis.set_major_formatter(EngFormatter(sep=""))
    panels[0].set_ylabel("held-out loss [nats a byte]", fontsize=SMALL)
    if 1 < len(groups) <= _MOST_NAMED:
        handles, labels = panels[0].get_legend_handles_labels()
        ncols = min(4, max(1, _LEGEND_WIDTH // (max(map(len, labels)) + 8)))
        figure.legend(
            handles, labels, loc="outside lower center", ncols=ncols, fontsize=SMALL, frameon=False
        )
    return figure


def label_of(swept: Mapping[str, Any]) -> str:
    """Name a point by its swept values."""
    return ", ".join(f"{key.rpartition('.')[2]} = {value}" for key, value in swept.items())


def dress(axes: Axes, title: str) -> None:
    """Give an axis its title and a quiet grid."""
    axes.set_xlabel(title, fontsize=SMALL)
    axes.tick_params(labelsize=SMALL, length=2)
    axes.grid(visible=True, color="#e5e5e5", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _means(group: Sequence[Result], key: str) -> tuple[list[float], list[float]]:
    """Give mean x and mean loss of the readings that all seeds have."""
    count = min(len(result["readings"]) for result in group)
    xs, losses = [], []
    for index in range(count):
        readings = [result["readings"][index] for result in group]
        xs.append(statistics.fmean(_x(reading, key) for reading in readings))
        losses.append(statistics.fmean(reading["loss"] for reading in readings))
    return xs, losses


def _x(reading: Mapping[str, Any], key: str) -> float:
    if key == "megabytes":
        return float(reading["bytes_up"] + reading["bytes_down"]) / 1e6
    return float(reading[key])
