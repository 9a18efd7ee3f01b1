"""`diloco emulate`: a command on an emulated network; its links measured before."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from diloco.cli.terminal.fitted_table import FittedTable
from diloco.cli.terminal.options import JsonTarget, flag, option, write_json
from diloco.cli.terminal.progress import notes, output
from diloco.errors import ConfigError
from diloco.launch.process.ending import Interrupted, note_signals

if TYPE_CHECKING:  # commands import what they need when they run
    from diloco.launch.process.ending import StopRequest
    from diloco.simulations.emulate.check import LinkFinding
    from diloco.simulations.emulate.config import Wan
    from diloco.simulations.emulate.emulation import Emulation


def emulate(
    wan_file: Annotated[Path, typer.Argument(metavar="WAN.toml", help="The network.")],
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND...", help="What to run in it.")
    ] = None,
    check: Annotated[
        bool,
        flag(
            "Measure every link first; exit with 1 and run nothing if one is not as told.",
            "--check",
        ),
    ] = False,
    shell: Annotated[
        str,
        option(
            "Run in this island, not where the coordinator is; without a command: $SHELL.", "ISLAND"
        ),
    ] = "",
    json_target: JsonTarget = "",
) -> None:
    """Run a command on an emulated network: a namespace an island, links as WAN.toml says.

    diloco emulate configs/wan/star-100M-60ms.toml --check -- diloco local RUN.toml puts every
    island of the run into the namespace of its name, coordinator and syncer where coordinator_at
    says, and the check into the run's summary.json. Any other command runs where the coordinator
    is; `ip netns exec NAME` enters an island, the names are printed. Ctrl-C is the command's to
    heed; everything goes when it ends, and what still runs inside is ended.

    Read the check: rates within 5 %, round trips within 2 ms + 2 %, loss within 20 % of itself.
    Needs root.

    Example: diloco emulate configs/wan/star-100M-60ms.toml --check -- diloco local RUN.toml
    """
    from diloco.simulations.emulate.config import load_wan
    from diloco.simulations.emulate.emulation import Emulation

    wan = load_wan(wan_file)
    words = _words(wan, command, shell, with_check=check)
    # The command's output is its own: what is said in addition goes to standard error.
    console = notes(json_target) if words else output(json_target)
    record: dict[str, Any] = {}
    with note_signals() as request:
        try:
            with Emulation(wan) as emulation:
                code = _use(emulation, words, shell, request, console, record, with_check=check)
        except Interrupted as interrupted:
            code = interrupted.exit_code
    if emulation.ended:
        ended = ", ".join(map(str, emulation.ended))
        console.print(f"ended what still ran inside: processes {ended}")
    write_json(record, json_target, err=bool(words))
    raise typer.Exit(code)


def _words(wan: Wan, command: list[str] | None, shell: str, *, with_check: bool) -> list[str]:
    """Return what to run in the network; nothing where its links are only measured.

    Raises:
        ConfigError: If there is no such island, or nothing to do.
    """
    if shell and shell not in wan.config.islands:
        names = ", ".join(sorted(wan.config.islands))
        raise ConfigError(f"--shell {shell}: not an island of {wan.path}; islands: {names}")
    words = command or ([os.environ.get("SHELL", "/bin/sh")] if shell else [])
    if not words and not with_check:
        raise ConfigError(
            f"nothing to run: diloco emulate {wan.path} -- COMMAND, such as diloco local RUN.toml; "
            f"or --check to measure the links, or --shell ISLAND"
        )
    return words


def _use(
    emulation: Emulation,
    words: list[str],
    shell: str,
    request: StopRequest,
    console: Console,
    record: dict[str, Any],
    *,
    with_check: bool,
) -> int:
    """Check, run the command, and fill the record; returns the exit code."""
    from diloco.simulations.emulate.command import run_command

    _show(emulation, console)
    record |= emulation.as_dict()
    if with_check:
        findings = _checked(emulation, request, console)
        record["check"] = [finding.as_dict() for finding in findings]
        emulation.describe(check=record["check"])
        if not all(finding.is_met for finding in findings):
            told = "a link is not as told" + ("; the command was not run" if words else "")
            typer.echo(told, err=True)
            return 1
    if not words:
        return 0
    request.check()
    if words[0] == "diloco":
        words = [sys.executable, "-m", *words]
    before = emulation.carried()
    code, record["changes"] = run_command(
        emulation, shell or emulation.network.coordinator, words, os.environ
    )
    record |= {"command": words, "exit_code": code, "carried": []}
    for (link, way), now in emulation.carried().items():
        carried = now.since(before[link, way])
        record["carried"].append({"link": link, "way": way, **carried.as_dict()})
        console.print(f"{link} {way}: {carried.as_text()}")
    return code


def _show(emulation: Emulation, console: Console) -> None:
    """Say what was made, and how to enter it."""
    network, spaces = emulation.network, emulation.namespaces
    if spaces.swept:
        console.print(f"removed what a killed emulation had left: {', '.join(spaces.swept)}")
    for node in network.nodes:
        role = "coordinator" if node == network.coordinator else ""
        role = " + ".join(filter(None, ["island" if node in network.islands else "", role]))
        console.print(
            f"{node:16} {network.address(node):12} {role or 'router':20} "
            f"ip netns exec {spaces.name(node)}"
        )
    if not emulation.is_realtime:
        console.print(
            "warning: the relay has no real-time priority here (it needs CAP_SYS_NICE): packets "
            "are late when the machine is busy; look at --check",
            style="yellow",
        )


def _checked(emulation: Emulation, request: StopRequest, console: Console) -> list[LinkFinding]:
    """Measure and print."""
    from diloco.simulations.emulate.check import check

    with console.status("measuring") as status:
        findings = check(emulation, on_measure=status.update, on_look=request.check)
    headings = ("link", "way", "figure", "asked for", "measured", "off", "allowed", "tries", "")
    rows = [
        [Text(c, "" if f.is_met else "red") for c in (*f.cells(), "ok" if f.is_met else "MISSED")]
        for f in findings
    ]
    console.print(FittedTable.with_rows(headings, rows))
    return findings
