"""`diloco chaos`: a run on this machine to which things happen, and what came of it."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from diloco.cli.terminal.fitted_table import print_rows
from diloco.cli.terminal.options import JsonTarget, flag, write_json
from diloco.cli.terminal.progress import counting, notes, output, stoppable

if TYPE_CHECKING:  # commands import what they need when they run
    from diloco.chaos.report import ChaosReport

PlanFile = Annotated[Path, typer.Argument(metavar="PLAN.toml", help="What happens to which run.")]


def chaos(
    plan_file: PlanFile,
    json_target: JsonTarget = "",
    require: Annotated[
        bool,
        flag(
            "Exit with 1, too, if a fault did not take effect or a figure that "
            "the plan's judge section asks for misses its bar.",
            "--require",
        ),
    ] = False,
    keep: Annotated[
        bool, flag("Keep the run's directory; it is kept if anything broke.", "--keep")
    ] = False,
) -> None:
    """Make a whole run on this machine while its processes, files and links are broken on purpose.

    PLAN.toml names a run file and the faults: kills, freezes, restarts, damaged files, a full disk,
    clocks that jump, links that are cut, late, slow or lie, an object store that does the same,
    refuses or loses; one by one, or drawn from a seed. The same file gives the same faults. Shipped
    ones are in configs/chaos.

    Prints what was planned, what took effect, how long until the process was back and until every
    fragment had its next version; what faults of an island cost the others (their longest step over
    1.05 times the usual one + 20 ms, "slower": their mean step, their next merge, rounds that
    expired) and itself (its first step, and steps until a contribution is included); then whether
    what must hold did: one digest a version, each version once, one outcome a contribution, every
    token accounted for, no island that ends unasked, versions that can be recomputed. Exits with 1
    if one did not; the last line says which.

    Example: diloco chaos configs/chaos/quick.toml --require
    """
    from diloco.chaos.plan import load_plan
    from diloco.chaos.report import run_plan

    plan = load_plan(plan_file)
    directory = Path(tempfile.mkdtemp(prefix="diloco-chaos-"))
    try:
        with stoppable() as request, counting(notes(json_target)) as show:
            report = run_plan(plan, directory, request, show)
    except typer.Exit:
        shutil.rmtree(directory)
        raise
    is_kept = keep or bool(report.broken)
    if not is_kept:
        shutil.rmtree(directory)
    console = output(json_target)
    _show(report, console)
    write_json(report.as_dict(), json_target)
    if is_kept:
        console.print(f"kept: {directory}")
    _judge(report, require=require, is_quiet=json_target == "-")


def _show(report: ChaosReport, console: Console) -> None:
    from diloco.chaos.report import ACCIDENT_COLUMNS, FAULT_COLUMNS, ISLAND_COLUMNS

    fired = sum(history.fired for history in report.faults)
    title = f"faults: {len(report.faults)} planned, {fired} took effect in {report.wall_s:.0f} s"
    if num_without := sum(not history.had_chance for history in report.faults):
        title += f", {num_without} never found their target"
    print_rows(console, FAULT_COLUMNS, report.rows, title)
    rows = [{c.key: getattr(island, c.key) for c in ISLAND_COLUMNS} for island in report.islands]
    print_rows(console, ISLAND_COLUMNS, rows, "islands")
    if report.accidents:
        accidents = [asdict(accident) for accident in report.accidents]
        print_rows(console, ACCIDENT_COLUMNS, accidents, "what faults of islands cost")
    for finding in report.findings:
        console.print(finding.text, style="green" if finding.holds else "red")
    for requirement in report.requirements:
        console.print(requirement.as_text(), style="green" if requirement.is_met else "yellow")


def _judge(report: ChaosReport, *, require: bool, is_quiet: bool) -> None:
    """Exit with 1 if something is wrong, the last line saying what.

    Raises:
        typer.Exit: If it is.
    """
    wrong = [each.as_text() for each in report.missed] if require else []
    wrong += [finding.text for finding in report.broken]
    for line in wrong:
        typer.echo(line, err=is_quiet)
    if wrong:
        raise typer.Exit(1)
