"""Pictures of goodput under failures, by chips and learners."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from diloco.report.figures import COLOURS, SMALL, dress, new_figure
from diloco.simulations.goodput.closed_form import fleet_goodput
from diloco.simulations.goodput.decoupled_table import GoodputCell
from diloco.simulations.goodput.scenario import Goodput

if TYPE_CHECKING:  # a second of imports, only for those who draw
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: How much fewer and more chips than the scenario's are drawn.
_SPREAD = 8


def cells_figure(cells: Sequence[GoodputCell]) -> Figure:
    """Draw a line of simulated cells a row of the table, and the published ones as crosses."""
    figure, axes = _empty("Goodput under failures: simulated, and published (x)")
    for colour, row in zip(COLOURS, dict.fromkeys(cell.row for cell in cells), strict=False):
        of_row = [cell for cell in cells if cell.row == row]
        chips = [cell.num_chips for cell in of_row]
        axes.plot(chips, [cell.simulated for cell in of_row], "-o", ms=3, color=colour, label=row)
        axes.plot(chips, [cell.published for cell in of_row], "x", color=colour)
    axes.set_xticks(chips, [f"{number / 1e6:g}M" for number in chips])
    axes.legend(fontsize=SMALL, loc="lower left")
    return figure


def goodput_figure(result: Goodput) -> Figure:
    """Draw what other numbers of chips and learners would come to, and the scenario simulated."""
    config, fleet = result.config, result.config.fleet
    figure, axes = _empty("Chips training while chips fail: closed form, and simulated (x)")
    spread = np.geomspace(max(1, config.chips / _SPREAD), config.chips * _SPREAD, 50)
    others = sorted({1, max(1, config.learners // 4), config.learners, config.learners * 4})
    is_scheduled = config.rounds.merge == "scheduled"
    for colour, learners in zip(COLOURS, others, strict=False):
        other = replace(fleet, num_learners=learners)
        goodputs = [
            100 * fleet_goodput(replace(other, num_chips=int(chips)), waits_for_all=is_scheduled)
            for chips in spread
        ]
        axes.plot(spread, goodputs, color=colour, label=f"M = {learners}")
    axes.plot([config.chips], [100 * result.chips.goodput], "x", color="#000000", ms=9)
    axes.legend(fontsize=SMALL, loc="lower left")
    return figure


def _empty(title: str) -> tuple[Figure, Axes]:
    figure = new_figure(7.0, 4.5)
    axes = figure.subplots()
    dress(axes, "chips", "share of the chips' time [%]", title)
    axes.set_xscale("log")
    axes.minorticks_off()
    axes.set_ylim(0, 100)
    return figure, axes
