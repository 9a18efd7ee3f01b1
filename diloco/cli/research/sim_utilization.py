"""`diloco sim utilization` and `diloco sim bandwidth`: how busy islands stay, and on what links."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from diloco.cli.terminal.fitted_table import FittedTable, print_rows
from diloco.cli.terminal.options import JsonTarget, flag, option, plot_option, write_json
from diloco.cli.terminal.progress import Show, counting, notes, output
from diloco.cli.terminal.section_flags import ScenarioFile, given_keys, is_typed
from diloco.errors import ConfigError
from diloco.report.rows import Column

if TYPE_CHECKING:  # commands import what they need when they run
    from diloco.simulations.published.paper_tables import BandwidthCell
    from diloco.simulations.scenarios.scenario import Scenario

Seed = Annotated[int, option("Of step times, jitter and loss.", "N", min=0)]


def _several(rounds: int) -> int:
    """Refuse one round, which only warms up."""
    if rounds == 1:
        raise ConfigError("--rounds 1: the first only warms up; give 2 or more, or 0")
    return rounds


Rounds = Annotated[
    int,
    option(
        "Simulated, of which the first warms up; 0: 3, or where several fragments are under "
        "way at once 32, of which 16 do.",
        "N",
        min=0,
        callback=_several,
    ),
]

#: Least of the 75 cells that are exact, and that are within one step of the grid.
_LEAST_EXACT, _LEAST_NEAR = 60, 73
_TABLES = ("streaming-table4",)


def section() -> type[Scenario]:
    """Load what both commands have a flag of each key of."""
    from diloco.simulations.scenarios.scenario import Scenario

    return Scenario


def utilization(
    context: typer.Context,
    scenario_file: ScenarioFile = None,
    table: Annotated[str, option(f"A paper's, next to ours: {_TABLES[0]}.", "NAME")] = "",
    plot: Annotated[str, plot_option("utilisation against bandwidth")] = "",
    rounds: Rounds = 0,
    seed: Seed = 0,
    json_target: JsonTarget = "",
    require: Annotated[
        bool, flag("With --table: exit with 1 if too few cells are met.", "--require")
    ] = False,
) -> None:
    """Predict the share of the time in which islands compute, by method.

    Events under a virtual clock: the product's schedule, fragments and rounds on links that share
    their bandwidth fairly. Without --method every method is a row; flags that a method has no use
    for are not its. --table streaming-table4 computes the 75 bandwidths of Streaming DiLoCo's
    Table 4 by the same code, with --buckets and --release as said there.

    Read "utilisation": compute over compute and stalls, in the rounds after those that warm up;
    "formula": the same in closed form, where there is one; "stall": seconds a round that the
    slowest island stood still; "pace": of decoupled islands, which never wait, their rounds over
    those on unlimited lines. To predict a run file with its own model, codecs and hosts: diloco
    plan.

    Example: diloco sim utilization --method overlap --bandwidth 1Gbit/s
    """
    from diloco.simulations.scenarios.scenario import make_scenarios

    if table and table not in _TABLES:
        raise ConfigError(f"--table {table}: choose {' or '.join(_TABLES)}")
    if require and not table:
        raise ConfigError("--require judges a table: add --table streaming-table4")
    if table:
        odd = [name for name in ("rounds", "seed", "plot") if is_typed(context, name)]
        odd = [*(["SCENARIO.toml"] if scenario_file else []), *(f"--{name}" for name in odd)]
        if odd:
            raise ConfigError(f"--table {table} has no use for {', '.join(odd)}: leave it out")
        _show_table(given_keys(context), json_target, require=require)
        return
    scenarios = make_scenarios(scenario_file, given_keys(context))
    rows = _rows(scenarios, rounds, seed, json_target)
    _show(_COLUMNS, rows, json_target, {"command": "sim utilization", "rows": rows})
    if plot:
        _plot(scenarios, plot, rounds, seed, json_target)


def bandwidth(
    context: typer.Context,
    scenario_file: ScenarioFile = None,
    targets: Annotated[
        str, option("Of the time in inner steps, with commas.", "SHARES")
    ] = "0.5,0.8,0.9,0.95,0.99",
    grid: Annotated[
        bool, flag("On 50 rates from 0.1 to 1000 Gbit/s; without, by bisection.", "--grid")
    ] = False,
    grid_rule: Annotated[
        str,
        option(
            "Of --grid: below, the largest rate that misses the target, as papers tabulate "
            "it; reaching, the smallest that does not.",
            "RULE",
        ),
    ] = "below",
    rounds: Rounds = 0,
    seed: Seed = 0,
    json_target: JsonTarget = "",
) -> None:
    """Find the bandwidth of every line that a utilisation needs.

    Gbit/s, both ways at once; everything else of the scenario stays. Of a decoupled run, whose
    islands train at any bandwidth, the bandwidth at which so large a share of its rounds is made.
    A dash: no bandwidth is enough, delays alone are too long. 1e-06 (with --grid 0.1): the least
    that is looked at, which is enough.

    Example: diloco sim bandwidth --method 4-bit --rtt 100ms
    """
    from diloco.simulations.scenarios.bandwidth import GRID
    from diloco.simulations.scenarios.scenario import make_scenarios

    shares = _shares(targets)
    keys = given_keys(context)
    if said := [key for key in ("bandwidth", "bandwidth_down") if key in keys]:
        names = ", ".join(f"--{key.replace('_', '-')}" for key in said)
        raise ConfigError(f"{names}: is what is looked for, both ways at once; leave it out")
    if grid_rule not in ("below", "reaching"):
        raise ConfigError(f"--grid-rule {grid_rule}: choose below or reaching")
    if is_typed(context, "grid_rule") and not grid:
        raise ConfigError("--grid-rule is of --grid: add it; without, the rate is found exactly")
    scenarios = make_scenarios(scenario_file, keys)
    with counting(notes(json_target)) as show:
        rows = [
            _needed(scenario, shares, grid_rule if grid else "", rounds, seed, show)
            for scenario in scenarios
        ]
    columns = [Column("method", "method")]
    columns += [Column(f"gbps_at_{target:g}", f"{target:.0%}", ".3g") for target in shares]
    setting = {
        "command": "sim bandwidth",
        "unit": "Gbit/s",
        "grid_gbps": [rate / 1e9 for rate in GRID] if grid else [],
        "rows": rows,
    }
    _show(columns, rows, json_target, setting)
    output(json_target).print("Gbit/s of every line, each way")


def _needed(
    scenario: Scenario, targets: Sequence[float], grid_rule: str, rounds: int, seed: int, show: Show
) -> dict[str, Any]:
    """Find what a scenario needs, on the grid if there is a rule; JSON values, hence `Any`."""
    from diloco.simulations.scenarios.bandwidth import bandwidth_curve, needed_bps, on_grid

    target, rates = 0.0, 0

    def count(done: int, total: int) -> None:
        nonlocal rates
        rates += done == total
        show(f"{scenario.method} at {target:g}, rate {rates + 1}: inner steps", done, total)

    curve = bandwidth_curve(scenario, rounds=rounds, seed=seed, on_progress=count)
    row = _described(scenario)
    for target in targets:
        bps = (
            on_grid(curve, target, "below" if grid_rule == "below" else "reaching")
            if grid_rule
            else needed_bps(curve, target)
        )
        row[f"gbps_at_{target:g}"] = None if bps is None else bps / 1e9
        row[f"utilisation_at_{target:g}"] = None if bps is None else curve(bps)
    return row


_COLUMNS = [
    Column("method", "method"),
    Column("period", "H", "d"),
    Column("fragments", "P", "d"),
    Column("overlap_steps", "tau", "d"),
    Column("bits_up", "bits", "g"),
    Column("utilisation", "utilisation", ".1%"),
    Column("formula", "formula", ".1%"),
    Column("stall_s", "stall, s", ".3g"),
    Column("gbit_up", "Gbit up", ".3g"),
    Column("pace", "pace", ".0%"),
]


def _rows(
    scenarios: Sequence[Scenario], rounds: int, seed: int, json_target: str
) -> list[dict[str, Any]]:
    """Simulate each scenario; JSON values, hence `Any`."""
    from diloco.simulations.scenarios import wallclock
    from diloco.simulations.scenarios.utilization import simulate

    rows = []
    with counting(notes(json_target)) as show:
        for scenario in scenarios:
            told = functools.partial(show, f"{scenario.method}: inner steps")
            figures = simulate(scenario, rounds=rounds, seed=seed, on_progress=told)
            why = wallclock.applies(scenario)
            rows.append(
                {
                    **_described(scenario),
                    "utilisation": figures.utilisation,
                    "formula": None if why else wallclock.utilisation(scenario),
                    "no_formula": why,
                    "stall_s": figures.stall_s,
                    "round_s": figures.round_s,
                    "gbit_up": figures.bits_up / 1e9,
                    "gbit_down": figures.bits_down / 1e9,
                    "pace": figures.pace if scenario.method == "decoupled" else None,
                }
            )
    return rows


def _described(scenario: Scenario) -> dict[str, Any]:
    return {
        "method": scenario.method,
        "period": scenario.inner_steps_per_round,
        "fragments": scenario.fragments,
        "overlap_steps": scenario.overlap_steps,
        "bits_up": scenario.bits_up,
        "scenario": scenario.model_dump(),
    }


def _show_table(values: Mapping[str, Any], json_target: str, *, require: bool) -> None:
    """Compute a paper's table, show it next to ours, and judge."""
    from diloco.simulations.published.paper_tables import streaming_table4, table4_counts

    if unknown := values.keys() - {"buckets", "release"}:
        names = ", ".join(f"--{key.replace('_', '-')}" for key in sorted(unknown))
        raise ConfigError(f"{names}: the table says that itself; leave it out")
    with counting(notes(json_target)) as show:
        cells = streaming_table4(
            buckets=values.get("buckets", 0),
            release=values.get("release", "backward"),
            on_progress=lambda done, total: show("curves", done, total),
        )
    exact, near = table4_counts(cells)
    is_met = exact >= _LEAST_EXACT and near >= _LEAST_NEAR
    said = (
        f"{'met' if is_met else 'MISSED'}: {exact} of {len(cells)} cells exact (required "
        f">= {_LEAST_EXACT}), {near} within one grid step of 1.207x (required >= {_LEAST_NEAR})"
    )
    content = {
        "command": "sim utilization --table streaming-table4",
        "source": "Streaming DiLoCo (arXiv 2501.18512), Table 4",
        "unit": "Gbit/s",
        "exact": exact,
        "within_one_grid_step": near,
        "cells": [
            {
                "model": cell.model,
                "method": cell.method,
                "target": cell.target,
                "paper": cell.paper,
                "ours": cell.ours,
                "ratio": cell.ratio,
                "grid_steps": cell.grid_steps,
            }
            for cell in cells
        ],
    }
    console = output(json_target)
    console.print(_cells_table(cells))
    source = "paper: Table 4 of arXiv 2501.18512, to one decimal"
    console.print(f"Gbit/s that each utilisation needs; {source}", style="dim")
    write_json(content, json_target)
    typer.echo(said, err=json_target == "-")
    if require and not is_met:
        raise typer.Exit(1)


def _cells_table(cells: Sequence[BandwidthCell]) -> FittedTable:
    """Lay out three rows a model and method: the paper's figures, ours, and their ratio."""
    targets = list(dict.fromkeys(cell.target for cell in cells))
    rows: list[list[str | Text]] = []
    for start in range(0, len(cells), len(targets)):
        row = cells[start : start + len(targets)]
        rows.append([row[0].model, row[0].method, "paper", *(f"{c.paper:.1f}" for c in row)])
        rows.append(["", "", "ours", *(f"{c.ours:.1f}" for c in row)])
        styles = ["yellow" if cell.grid_steps else "dim" for cell in row]
        ratios = [Text(f"{c.ratio:.2f}", s) for c, s in zip(row, styles, strict=True)]
        rows.append(["", "", "ratio", *ratios])
    headings = ["model", "method", "", *(f"{target:.0%}" for target in targets)]
    return FittedTable.with_rows(headings, rows)


def _plot(
    scenarios: Sequence[Scenario], path: str, rounds: int, seed: int, json_target: str
) -> None:
    from diloco.simulations.scenarios.utilization_plot import write_plot

    with counting(notes(json_target)) as show:
        write_plot(
            scenarios, Path(path), rounds=rounds, seed=seed, on_progress=lambda *at: show(*at)
        )
    typer.echo(f"picture: {path}", err=json_target == "-")


def _shares(text: str) -> list[float]:
    try:
        shares = [float(word) for word in text.split(",")]
    except ValueError:
        shares = []
    if not shares or not all(0 < share < 1 for share in shares):
        raise ConfigError(f"--targets {text}: give shares in (0, 1) with commas, such as 0.5,0.9")
    return shares


def _show(
    columns: Sequence[Column],
    rows: Sequence[Mapping[str, Any]],
    json_target: str,
    content: Mapping[str, Any],
) -> None:
    print_rows(output(json_target), columns, rows)
    write_json(content, json_target)
