"""`diloco sim validate`: predictions beside real runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli.bench import Require, bench_console, show_report
from diloco.cli.options import JsonTarget
from diloco.cli.sim_trace import seconds

if TYPE_CHECKING:  # commands import what they need when they run
    from rich.console import Console

    from diloco.bench.report import Report
    from simulations.validate import Sweep


def register(sim: typer.Typer) -> None:
    """Add the command of this module to `diloco sim`."""
    sim.command()(validate)


def validate(
    rows: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only these points, with * and ?; repeatable."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Four points, few rounds: three minutes.")
    ] = False,
    emulate: Annotated[
        bool,
        typer.Option("--emulate", help="Links of network namespaces (root), not of the process."),
    ] = False,
    directory: Annotated[
        Path, typer.Option("--dir", help="Where measured points and their events are kept.")
    ] = Path("runs/validate"),
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure again what was measured before.")
    ] = False,
    step_time: Annotated[
        str, typer.Option("--step-time", metavar="TIME", help="Of an inner step.")
    ] = "100ms",
    rounds: Annotated[
        int, typer.Option("--rounds", min=0, help="Measured rounds a point; 0: 5, quick 3.")
    ] = 0,
    json_target: JsonTarget = "",
    require: Require = False,
) -> None:
    """Run the real system on links, simulate the same run files, and compare blocked time.

    Two islands of a model of 10M parameters, `diloco local` with everything that belongs to it, on
    links of 100 Mbit/s to 1 Gbit/s and 0 to 100 ms round trip, by codec, H, P and tau. An inner
    step trains on 16 bytes and sleeps until it has taken --step-time, so that two cores measure
    links, not each other. What hosts take is calibrated from four runs without a link, two a codec,
    never from a point. About a quarter of an hour on two cores without other work, which it needs:
    commits of rounds are CPU and disk (a --dir in /dev/shm leaves the disk out). What was measured
    stays in --dir, so a sweep that died goes on where it was, and the timeline of a point can be
    drawn: diloco sim trace DIR/POINT/run --plot timeline.png.

    Read "blocked": seconds a round (H inner steps) for which training stood still, medians over
    rounds and islands, the first round left out; "busy": utilisation; "round": its seconds; "sim":
    the simulator's word on the figure before; "run": seconds of the whole run; "plan": what diloco
    plan says of these, told the link and the inner step, and nothing that was calibrated. The bars:
    errors of blocked time of 10 % in the median and 25 % at worst, over at least 12 points. The
    last line says with what the difference goes: bandwidth, round trips, bytes, CPU and disk, or a
    constant.
    """
    from dataclasses import replace

    from simulations.validate import (
        POINTS,
        QUICK,
        QUICK_POINTS,
        SETTING,
        Sweep,
        chosen_points,
        forget,
    )

    setting = QUICK if quick else SETTING
    setting = replace(
        setting,
        step_s=seconds("--step-time", step_time),
        rounds=rounds or setting.rounds,
        is_emulated=emulate,
    )
    points = chosen_points(QUICK_POINTS if quick else POINTS, rows or [])
    sweep = Sweep(setting, points, directory.resolve(), not (quick or rows))
    if fresh:
        forget(sweep)
    console = bench_console(json_target)
    report = _validated(sweep, console)
    _explain(report, console)
    show_report(report, json_target, require=require)


def _validated(sweep: Sweep, console: Console) -> Report:
    """Make the runs that are missing, showing progress, and judge all."""
    from diloco.cli.progress import counting
    from diloco.launch.ending import Interrupted, heeding_signals
    from simulations.validate import missing_points, run_validation

    known = len(sweep.calibrations) + len(sweep.points) - len(missing_points(sweep))
    if known:
        said = f"{known} runs were measured before, in {sweep.directory}; --fresh measures them "
        console.print(f"{said}again", highlight=False, soft_wrap=True)
    try:
        with heeding_signals() as request, counting(console) as show:
            return run_validation(sweep, on_progress=show, on_look=request.check)
    except Interrupted as interrupted:
        raise typer.Exit(interrupted.exit_code) from None


def _explain(report: Report, console: Console) -> None:
    """Say which links were not as told, and what the predictions lack."""
    from simulations.validate import residual_text

    for row in report.rows:
        if row["check"] != "ok":
            said = f"{row['point']}: the emulated link is not as told, no figure: {row['check']}"
            console.print(said, highlight=False, soft_wrap=True)
    if text := residual_text(report.setting["residual"]):
        console.print(text, highlight=False, soft_wrap=True)
