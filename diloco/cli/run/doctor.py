"""`diloco doctor`: what is wrong with this site, each finding with the command that fixes it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from diloco.cli.terminal.fitted_table import FittedTable
from diloco.cli.terminal.options import AsJson, Overrides, option
from diloco.cli.terminal.progress import output
from diloco.errors import ConfigError

if TYPE_CHECKING:  # commands import what they need when they run
    from diloco.doctor.diagnosis import SiteFinding

_STYLES = {"ok": "green", "unknown": "dim", "slow": "yellow", "broken": "bold red"}


def doctor(
    run_file: Annotated[
        Path | None, typer.Argument(metavar="RUN.toml", help="The run; none: the machine alone.")
    ] = None,
    island: Annotated[
        str, option("This is the site of that island, not the coordinator's", "NAME")
    ] = "",
    coordinator: Annotated[
        str, option("Where the coordinator is, as it printed it.", "HOST:PORT")
    ] = "",
    as_json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Look for what would break a run at this site or slow it down, and say how to fix it.

    TCP (congestion control, slow start after idle, buffers); for a run also its certificates,
    tokens and ports; with --island the ways to coordinator and syncer (MTU, round trip, a call with
    this site's certificates and tokens, clock). Nothing is changed. Islands and coordinators look
    at their TCP at every start, too.

    Read "state": broken: the run cannot work so, and the exit code is 1; slow: it works, and long
    or lossy paths carry less than they could. sysctl -w holds until the next boot: put the same
    KEY = VALUE into /etc/sysctl.d/60-diloco.conf to keep it.

    Example: diloco doctor RUN.toml --island eu-west --coordinator 10.0.0.1:29400
    """
    from diloco.config.load import load_config
    from diloco.doctor.diagnosis import State, diagnose
    from diloco.doctor.machine_facts import gather

    if run_file is None and (island or coordinator or overrides):
        raise ConfigError("--island, --coordinator and --set are of a run: diloco doctor RUN.toml")
    config = load_config(run_file, overrides or (), island=island) if run_file else None
    facts = gather(config, coordinator=coordinator)
    findings = diagnose(facts)
    if as_json:
        found = [finding.as_dict() for finding in findings]
        typer.echo(json.dumps({"facts": facts.as_dict(), "findings": found}, indent=2))
    else:
        _show(findings)
    raise typer.Exit(1 if any(finding.state is State.BROKEN for finding in findings) else 0)


def show_at_start(peers: str) -> None:
    """Warn of a TCP that is slow, where peers are beyond this machine.

    Args:
        peers: HOST:PORT of them, or several, or a multiaddr.
    """
    from diloco.doctor.slow_tcp import slow_tcp

    for text in slow_tcp(peers):
        typer.echo(f"warning: {text}", err=True)


def _show(findings: list[SiteFinding]) -> None:
    from diloco.bounded_text import MOST_ENDING, bounded_text

    columns: dict[str, Callable[[SiteFinding], object]] = {
        "": lambda finding: finding.what,
        "state": lambda finding: Text(finding.state, _STYLES[finding.state]),
        # What peers sent is neither markup nor commands of a terminal.
        "found": lambda finding: bounded_text(finding.found, MOST_ENDING),
    }
    console = output()
    console.print(FittedTable.of(findings, columns))
    # Commands stand alone on their lines, unbroken, so that they can be copied.
    for finding in findings:
        if finding.fix:
            fix = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in finding.fix)
            console.print(f"\n{finding.what}:\n  {fix}")
