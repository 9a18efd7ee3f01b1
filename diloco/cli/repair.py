"""`diloco repair`: verify and mend the store of a run that is not under way."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("repair")(repair)


def repair(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Run file, or the coordinator.state_dir of a run.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON values.")] = False,
) -> None:
    """Verify every byte of a stopped run's store, make again what can be made, say what remains.

    A version is made again from the one before it and its own contributions; what a killed writer
    left half written is removed. Exits with 1 if something stays damaged.
    """
    from rich.console import Console
    from rich.table import Table

    from diloco.launch.export import find_run
    from diloco.launch.repair import repair_run
    from diloco.rounds.repair import Condition

    found = repair_run(find_run(run))
    remains = [finding for finding in found if finding.condition is Condition.DAMAGED]
    if as_json:
        typer.echo(json.dumps({"findings": [asdict(finding) for finding in found]}))
    else:
        table = Table("fragment", "what", "condition", "detail", box=None)
        for finding in found:
            fragment = str(finding.fragment_id) if finding.fragment_id >= 0 else "-"
            table.add_row(fragment, finding.what, finding.condition, finding.detail)
        console = Console(highlight=False, markup=False, soft_wrap=True)
        console.print(table)
        num_repaired = sum(finding.condition is Condition.REPAIRED for finding in found)
        console.print(f"{len(found)} parts, {num_repaired} repaired, {len(remains)} damaged")
    if remains:
        raise typer.Exit(1)
