"""The picture of `diloco sim utilization`: utilisation against bandwidth, a curve a method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.report.figures import COLOURS, SMALL, dress, new_figure
from diloco.simulations.scenarios.bandwidth import GRID, bandwidth_curve
from diloco.simulations.scenarios.scenario import Scenario

if TYPE_CHECKING:  # a second of imports, only for those who draw
    from matplotlib.figure import Figure

#: Rates that are drawn: the grid of papers, and as many steps of it below as come to 10 Mbit/s.
_RATES = (*(rate / GRID[12] * GRID[0] for rate in GRID[:12]), *GRID)


def write_plot(
    scenarios: Sequence[Scenario],
    path: Path,
    *,
    rounds: int,
    seed: int,
    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> None:
    """Simulate every scenario at every rate, and write the picture; its suffix says the format.

    Args:
        scenarios: A curve each.
        path: In a directory that there is.
        rounds: Simulated of each.
        seed: Of step times, jitter and loss.
        on_progress: Told (what is drawn, points done, of how many).
    """
    rates = _RATES[::2]
    curves: list[list[float]] = []
    for index, scenario in enumerate(scenarios):
        curve = bandwidth_curve(scenario, rounds=rounds, seed=seed)
        shares: list[float] = []
        for rate in rates:
            done = index * len(rates) + len(shares)
            on_progress(scenario.method, done, len(scenarios) * len(rates))
            # More bandwidth does no harm: what is there stays.
            is_full = bool(shares) and shares[-1] > 1 - 1e-9
            shares.append(1.0 if is_full else curve(rate))
        curves.append(shares)
    utilization_figure(scenarios, rates, curves).savefig(path)


def utilization_figure(
    scenarios: Sequence[Scenario], rates: Sequence[float], curves: Sequence[Sequence[float]]
) -> Figure:
    """Draw a curve a scenario over rates in bits a second."""
    figure = new_figure(7.0, 4.2)
    axes = figure.subplots()
    for index, (scenario, shares) in enumerate(zip(scenarios, curves, strict=True)):
        axes.plot(
            [rate / 1e9 for rate in rates],
            [100 * share for share in shares],
            color=COLOURS[index % len(COLOURS)],
            linewidth=1.6,
            linestyle="--" if scenario.method == "decoupled" else "-",
            label=_label(scenario),
        )
    axes.set_xscale("log")
    axes.set_ylim(0, 103)
    axes.legend(fontsize=SMALL - 1, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    first = scenarios[0]
    title = (
        f"{first.params / 1e9:g}B parameters, {first.layers} layers, a step of {first.step_time}, "
        f"{first.islands} islands, round trip {first.rtt if not first.link else first.link}"
    )
    dress(axes, "bandwidth of every line, Gbit/s", "time in inner steps, %", title)
    return figure


def _label(scenario: Scenario) -> str:
    """Name a curve with what it does at which bits."""
    if scenario.method in ("data-parallel", "hierarchical"):
        return f"{scenario.method}\n{scenario.bits_up:g} bits, every step"
    if scenario.method == "decoupled":
        period = scenario.inner_steps_per_round
        return f"decoupled: rounds kept\nH = {period}, {scenario.bits_up:g} bits"
    tau = f", tau = {scenario.overlap_steps}" if scenario.overlap_steps else ""
    return (
        f"{scenario.method}\nH = {scenario.inner_steps_per_round}, P = {scenario.fragments}{tau}, "
        f"{scenario.bits_up:g} bits"
    )
