"""The picture of a laboratory: loss against tokens, virtual time and bytes, a line a point."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from diloco.report.figures import COLOURS, SMALL, dress, new_figure
from diloco.simulations.lab.run import Result

if TYPE_CHECKING:  # a second of imports, only for those who draw
    from matplotlib.figure import Figure

_STYLES = ("-", "--", ":")
#: Letters of a legend that stand side by side.
_LEGEND_WIDTH = 130
#: Most lines that a legend still names.
_MOST_NAMED = 24
#: Ends of lines that differ by more make a logarithmic axis.
_FAR = 10.0
_PANELS = (("tokens", "tokens"), ("virtual_s", "virtual time [s]"), ("megabytes", "moved [MB]"))


def lab_figure(results: Sequence[Result]) -> Figure:
    """Draw three panels side by side; a line is the mean over the seeds of a point."""
    from matplotlib.ticker import EngFormatter

    groups: dict[str, list[Result]] = {}
    for result in results:
        if result["readings"]:
            groups.setdefault(label_of(result["swept"]), []).append(result)
    figure = new_figure(11.0, 4.2)
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
