"""What pictures share: sizes of type, colours, a quiet axis.

Figures are drawn off screen; no state of pyplot is touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # a second of imports, only for those who draw
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#999999")
SMALL, TITLE = 8.0, 10.0
_DPI = 150


def new_figure(width_in: float, height_in: float) -> Figure:
    """Begin a figure of so many inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width_in, height_in), dpi=_DPI, layout="constrained")


def dress(
    axes: Axes,
    x: str,
    y: str = "",
    title: str = "",
    *,
    grid: Literal["both", "x", "y", "none"] = "both",
) -> None:
    """Give axes their words and a quiet grid behind what is drawn."""
    axes.set_xlabel(x, fontsize=SMALL)
    axes.set_ylabel(y, fontsize=SMALL)
    axes.set_title(title, fontsize=TITLE)
    axes.tick_params(labelsize=SMALL, length=2)
    if grid != "none":
        axes.grid(visible=True, axis=grid, color="#e5e5e5", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
