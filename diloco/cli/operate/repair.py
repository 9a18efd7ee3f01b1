"""`diloco repair`: mend the store of a stopped run, or a damaged fragment of one under way."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli.run.control import talk
from diloco.cli.terminal.fitted_table import FittedTable
from diloco.cli.terminal.options import AsJson, Certs, Insecure, Tokens, option
from diloco.cli.terminal.progress import output
from diloco.errors import ConfigError

if TYPE_CHECKING:  # commands import what they need when they run
    from diloco.versions.repair import RepairFinding


def repair(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="Run file, or the coordinator.state_dir of a run; with --from-island HOST:PORT of "
            "its coordinator.",
        ),
    ],
    as_json: AsJson = False,
    fragment: Annotated[
        int | None, typer.Option(min=0, help="Damaged fragment of a run under way.")
    ] = None,
    from_island: Annotated[str, option("Island that holds what its syncer has lost.", "NAME")] = "",
    certs: Certs = "",
    tokens: Tokens = "",
    insecure: Insecure = False,
) -> None:
    """Verify every byte of a stopped run's store, make again what can be made, say what remains.

    A version is made again from the one before it and its own contributions; what a killed writer
    left half written is removed. A journal that is lost or damaged is made again from the store,
    its pins and the islands' checkpoints; what cannot be known then is said, and every island has
    to be started again. Pins of complete checkpoints are read; of the islands' checkpoints that are
    on this machine manifests and sizes are looked at, and damage is said: their bytes are verified
    when one is resumed. Exits with 1 if something stays damaged.

    A run under way repairs a damaged fragment itself, from any island that holds the version that
    its syncer has lost. With --fragment and --from-island it is asked of that island first, and the
    command waits until the fragment is served again: only then it exits with 0. An island that does
    not hold the version is refused. It counts only if its digest is the one that was published; the
    outer momentum is then that of the newest older version that can be read, or zero, and the audit
    log says so.

    Example: diloco repair runs/demo
    """
    if fragment is not None or from_island:
        if fragment is None or not from_island:
            raise ConfigError(
                "--fragment and --from-island belong together: diloco repair HOST:PORT --fragment "
                "P --from-island NAME (diloco status HOST:PORT says which fragment is damaged)"
            )
        repair_from_island(run, fragment, from_island, certs, tokens, insecure)
        return
    from diloco.checkpoint.export import find_run
    from diloco.report.repair import repair_run
    from diloco.versions.repair import Condition

    found = repair_run(find_run(Path(run)))
    remains = [finding for finding in found if finding.condition is Condition.DAMAGED]
    if as_json:
        typer.echo(json.dumps({"findings": [asdict(finding) for finding in found]}))
    else:
        columns: dict[str, Callable[[RepairFinding], object]] = {
            "fragment": lambda f: f.fragment_id if f.fragment_id >= 0 else "-",
            "what": lambda f: f.what,
            "condition": lambda f: f.condition,
        }
        console = output()
        console.print(FittedTable.of(found, columns))
        for finding in found:
            if finding.detail:
                where = f"fragment {finding.fragment_id}, " if finding.fragment_id >= 0 else ""
                console.print(f"{where}{finding.what}: {finding.detail}", soft_wrap=True)
        num_repaired = sum(finding.condition is Condition.REPAIRED for finding in found)
        console.print(f"{len(found)} parts, {num_repaired} repaired, {len(remains)} damaged")
    if remains:
        raise typer.Exit(1)


def repair_from_island(
    address: str, fragment: int, island: str, certs: str, tokens: str, insecure: bool
) -> None:
    """Have a fragment repaired, and print how that ended; an error says why it could not be."""
    from diloco.coordinator.status import operate, wait_for_repair

    arguments = {"fragment": str(fragment), "island": island}
    talk(
        address,
        (
            lambda transport: operate(transport, "repair", arguments),
            lambda transport: wait_for_repair(transport, fragment, island),
        ),
        certs,
        tokens,
        insecure,
    )
