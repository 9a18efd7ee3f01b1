"""`diloco sim goodput` and `diloco sim check`: what failures leave, and what papers published."""

from __future__ import annotations

import resource
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from diloco.cli.terminal.fitted_table import FittedTable
from diloco.cli.terminal.options import JsonTarget, option, plot_option, write_json
from diloco.cli.terminal.progress import Show, counting, notes, output
from diloco.cli.terminal.section_flags import ScenarioFile, given_keys
from diloco.errors import ConfigError
from diloco.transport.units import format_bytes

if TYPE_CHECKING:  # commands import what they need when they run
    from diloco.simulations.goodput.config import GoodputConfig
    from diloco.simulations.goodput.decoupled_table import GoodputCell
    from diloco.simulations.goodput.scenario import Goodput
    from diloco.simulations.published.check_row import CheckRow

DECOUPLED_TABLE = "decoupled-table1"
#: Keys that its scenarios take from file and flags; the rest is the table's own.
_OF_TABLE = ("failures.", "returns.", "duration", "seed")
#: Of the columns of `diloco sim check`: target, what, published, allowed, ours, verdict.
_CHECK_WIDTHS = (3, 33, 9, 8, 17, 4)
_VERDICTS = {"pass": "green", "miss": "yellow", "FAIL": "bold red"}


def section() -> type[GoodputConfig]:
    """Load what `diloco sim goodput` has a flag of each key of."""
    from diloco.simulations.goodput.config import GoodputConfig

    return GoodputConfig


def goodput(
    context: typer.Context,
    scenario_file: ScenarioFile = None,
    table: Annotated[
        str, option(f"{DECOUPLED_TABLE}: its 30 cells next to ours instead.", "NAME")
    ] = "",
    plot: Annotated[str, plot_option("goodput against chips")] = "",
    json_target: JsonTarget = "",
) -> None:
    """Predict how much of the chips' time is training while chips fail and learners differ.

    Every chip is drawn: it fails, is away, comes back; its learner stops to go on without it (or
    with a spare) and again to take it in. What unequal learners lose to each other is simulated
    with the project's own rounds: quorum, grace, openings. Flags are the keys of
    SCENARIO.toml, by its tables. Seconds, also for millions of chips.

    Read "goodput": chips x learners. "chips": what reconfigurations leave, its closed form next to
    it; "learners": what waiting leaves; "counted": contributions that a round did not close
    without. The times of reconfigurations are fitted to Decoupled DiLoCo's Table 1 (all 30 cells
    by the same ones): put your own in.

    Example: diloco sim goodput configs/simulations/goodput/2.4M-chips.toml --learners 16
    """
    from diloco.simulations.goodput.config import load_goodput

    flags = given_keys(context)
    _check_table(table, flags)
    config = load_goodput(scenario_file, flags, has_both=bool(table))
    console, began = output(json_target), time.monotonic()
    with counting(notes(json_target)) as show:
        cells, result = _simulated(config, table, show)
    wall_s, peak_bytes = time.monotonic() - began, _peak_memory_bytes()
    if result is None:
        _show_cells(cells, console)
        figures: dict[str, Any] = {"cells": [cell.as_dict() for cell in cells]}
    else:
        _show_goodput(result, console)
        figures = result.as_dict()
    console.print(
        f"simulated in {wall_s:.2f} s; peak memory of this process {format_bytes(peak_bytes)}",
        style="dim",
    )
    if plot:
        _draw(cells, result, plot, console)
    figures |= {"wall_s": wall_s, "peak_memory_bytes": peak_bytes}
    write_json(figures, json_target)


def check(
    targets: Annotated[
        list[str] | None, option("Only this one, such as A5; repeatable.", "NAME", "--target")
    ] = None,
    json_target: JsonTarget = "",
) -> None:
    """Hold the simulators against what papers published; exits with 1 if one row fails.

    Simulates the bandwidth that methods need (75 cells), goodput under failures (30 cells, 30 days
    each), unequal learners, scavenging, joins, utilisation and failure rates from the published
    inputs, and counts bytes, memory and checkpoints. Some twenty seconds of one CPU.

    Read a row from the left: target, what, the published figure, how far off ours may be, ours. A
    fail is a defect of the simulators, or of a change to the rounds that they drive: diloco sim
    check --target NAME makes its rows alone. A miss is a published figure that ours is known not to
    reach, and why; it fails when ours moves.

    Example: diloco sim check --target T4
    """
    from diloco.simulations.published import check as checking

    for name in targets or []:
        if name not in checking.CHECKS:
            known = ", ".join(checking.CHECKS)
            raise ConfigError(f"--target {name}: there is none; targets are {known}")
    began = time.monotonic()
    with counting(notes(json_target)) as show:
        rows = checking.check(targets or [], show)
    console = output(json_target)
    _show_rows(rows, console)
    counts, wall_s = Counter(row.verdict for row in rows), time.monotonic() - began
    known = f", {counts['miss']} known not to" if counts["miss"] else ""
    console.print(f"{counts['pass']} of {len(rows)} rows pass{known} ({wall_s:.1f} s)")
    write_json({"rows": [row.as_dict() for row in rows], "wall_s": wall_s}, json_target)
    if counts["FAIL"]:
        raise typer.Exit(1)


def _check_table(table: str, flags: Mapping[str, Any]) -> None:
    """Refuse a table that there is not, and what it says itself."""
    if table not in ("", DECOUPLED_TABLE):
        raise ConfigError(f"--table {table}: there is none; choose {DECOUPLED_TABLE}")
    odd = [path for path in flags if not path.startswith(_OF_TABLE) or path == "failures.elastic"]
    if table and odd:
        raise ConfigError(
            f"--table {table} has chips and learners of its own, {', '.join(odd)} would change "
            "nothing: leave it out; keys of [failures] and [returns], duration and seed count"
        )


def _simulated(
    config: GoodputConfig, table: str, show: Show
) -> tuple[list[GoodputCell], Goodput | None]:
    """Simulate the table's cells, or the scenario."""
    if table:
        from diloco.simulations.goodput.decoupled_table import table_cells

        return list(table_cells(config, lambda done, of: show("cells", done, of))), None
    from diloco.simulations.goodput.scenario import simulate_goodput

    return [], simulate_goodput(config, show)


def _draw(
    cells: Sequence[GoodputCell], result: Goodput | None, plot: str, console: Console
) -> None:
    from diloco.simulations.goodput.plots import cells_figure, goodput_figure

    (goodput_figure(result) if result else cells_figure(cells)).savefig(plot)
    console.print(f"picture: {plot}")


def _show_cells(cells: Sequence[GoodputCell], console: Console) -> None:
    """Print ours next to the published ones, a row of the paper's table a row."""
    rows: dict[str, list[GoodputCell]] = {}
    for cell in cells:
        rows.setdefault(cell.row, []).append(cell)
    sizes = [f"{cell.num_chips / 1000:,.0f}k" for cell in next(iter(rows.values()))]
    shown = [[row, *(f"{c.simulated:.1f} ({c.published})" for c in of)] for row, of in rows.items()]
    console.print(FittedTable.with_rows(["goodput, %: ours (published)", *sizes], shown))
    worst = max(cells, key=lambda cell: abs(cell.off))
    console.print(
        f"{sum(abs(cell.off) <= 3.0 for cell in cells)} of {len(cells)} within 3 points; the worst "
        f"is off by {worst.off:+.2f} ({worst.row}, {worst.num_chips:,} chips)"
    )


def _show_goodput(result: Goodput, console: Console) -> None:
    """Print what a scenario comes to, a figure a line."""
    config, chips, learners = result.config, result.chips, result.learners
    days = chips.duration_s / 86400.0
    figures = {
        "goodput": Text(f"{result.goodput:.1%}", "bold"),
        "  chips: what failures leave": f"{chips.goodput:.1%}",
        "    in closed form": f"{result.closed_form:.1%}",
        "  learners: what waiting leaves": f"{learners.goodput:.1%}",
        "at least one learner trains": f"{chips.uptime:.4%}",
        f"nobody trains, in {days:.4g} days": f"{chips.nobody_s:,.1f} s",
        "fewer than the quorum train": f"{chips.below_quorum_s:,.1f} s",
        "chips that fail a day": f"{chips.num_failures / days:,.0f}",
        "reconfigurations a learner and day": (
            f"{chips.num_reconfigurations / days / config.learners:,.1f}"
        ),
        "learners counted a round": f"{learners.contributors:.2f} of {config.learners}",
        "  rounds of one learner only": f"{learners.solo:.1%}",
        "  contributions counted": f"{learners.counted:.1%}",
    }
    console.print(FittedTable.with_rows(["", "figure"], figures.items()))


def _show_rows(rows: Sequence[CheckRow], console: Console) -> None:
    """Print a row a claim, below its source: what, published, how far off it may be, ours."""
    from rich.table import Table

    for source, group in groupby(rows, key=lambda row: row.source):
        of_source = list(group)
        console.print(source, style="dim")
        table = Table(box=None, padding=(0, 1, 0, 0), show_header=False)
        for width in _CHECK_WIDTHS:
            table.add_column(width=width, overflow="fold")
        for row in of_source:
            verdict = Text(row.verdict, _VERDICTS[row.verdict])
            table.add_row(row.target, row.what, row.published, row.allowed, row.ours, verdict)
        console.print(table)
        for row in of_source:
            if row.missed:
                console.print(f"    {row.target} misses it: {row.missed}", style="yellow")


def _peak_memory_bytes() -> int:
    """Give the most memory that this process has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
