"""The picture of a plan: which fragment is under way when, by the schedule and by the prediction.

Above: from the inner step after which a fragment is sent to that after which it is merged. Below,
where links are known: what the first island's rounds were simulated to be, in seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.outer.schedule import Schedule
from diloco.report.figures import SMALL, TITLE, dress, new_figure
from diloco.simulations.planner.prediction import Prediction

if TYPE_CHECKING:  # a second of imports, only for those who draw
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH_IN = 10.0
_ROW_IN, _MOST_IN = 0.22, 9.0
_PERIODS = 2
_WINDOW = "#9ecae1"
#: What is shown of a fragment, in the order in which it is drawn.
_COLOURS = {
    "gather": "#000000",
    "encode": "#cc79a7",
    "send": "#0072b2",
    "fetch": "#009e73",
    "decode": "#f0e442",
    "merge": "#e69f00",
    "wait": "#de2d26",
}
#: Training waits while other things go on.
_HEIGHTS = {"wait": 0.25}


def plan_figure(run: str, schedule: Schedule, predicted: Prediction | None) -> Figure:
    """Draw two periods of a schedule, and of a prediction."""
    panels = 1 if predicted is None else 2
    height_in = min(_MOST_IN, 1.2 + _ROW_IN * schedule.num_fragments)
    figure = new_figure(_WIDTH_IN, panels * height_in)
    axes = figure.subplots(panels, 1, squeeze=False)[:, 0]
    _draw_schedule(axes[0], schedule)
    if predicted is not None:
        _draw_spans(axes[1], schedule, predicted)
    figure.suptitle(f"{run}: the first {_PERIODS} rounds", fontsize=TITLE)
    return figure


def _draw_schedule(axes: Axes, schedule: Schedule) -> None:
    last = min(_PERIODS * schedule.inner_steps_per_round, schedule.inner_steps)
    for step in range(1, last + 1):
        for p in schedule.due(step):
            width = schedule.merge_step(step) - step
            axes.barh(p, max(width, 0.1), left=step, height=0.7, color=_WINDOW)
            axes.plot([step], [p], marker="|", color="#000000", markersize=7)
    axes.set_xlim(0, last + schedule.overlap_steps)
    _dress(axes, "completed inner steps; a bar: from a send to its merge", schedule.num_fragments)


def _draw_spans(axes: Axes, schedule: Schedule, predicted: Prediction) -> None:
    from matplotlib.patches import Patch

    island = min(predicted.islands)
    until_s = _PERIODS * predicted.round_s
    others = predicted.islands.keys() - {island}
    shown = [s for s in predicted.run.spans if s.island not in others and s.begin_s < until_s]
    for kind, colour in _COLOURS.items():
        for span in shown:
            if span.kind == kind and span.fragment is not None:
                axes.barh(
                    span.fragment,
                    span.end_s - span.begin_s,
                    left=span.begin_s,
                    height=_HEIGHTS.get(kind, 0.7),
                    color=colour,
                )
    axes.set_xlim(0, until_s)
    what = f"seconds, predicted, of island {island} and of the syncer"
    _dress(axes, what, schedule.num_fragments)
    axes.legend(
        handles=[Patch(color=colour, label=kind) for kind, colour in _COLOURS.items()],
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        borderaxespad=0,
        fontsize=SMALL,
        frameon=False,
    )


def _dress(axes: Axes, what: str, num_fragments: int) -> None:
    dress(axes, what, "fragment", grid="x")
    axes.set_ylim(num_fragments - 0.4, -0.6)
    if num_fragments <= 40:
        axes.set_yticks(range(num_fragments))
