"""`diloco`: the command line. Commands live next to this module, one file a subject."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import shlex
import signal
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

import diloco
from diloco.cli.operate import operate, repair, replay
from diloco.cli.research import baseline, bench, chaos, conformance, emulate, lab, sim
from diloco.cli.run import (
    certs,
    configuration,
    control,
    data,
    doctor,
    export,
    fetch,
    init,
    island,
    launch,
    local,
    page,
    plan,
    report,
    syncer,
    watch,
)
from diloco.errors import DilocoError
from diloco.extras import EXTRA_OF, missing
from diloco.launch.process.logs import log_to
from diloco.state_dir import directory_in_place

app = typer.Typer(
    name="diloco",
    help="Train one language model on islands (datacenters, clusters, boxes) far apart.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _show_version(is_asked: bool) -> None:
    """Print which diloco, Python and torch these are; torch is not loaded for it."""
    if is_asked:
        python = ".".join(map(str, sys.version_info[:3]))
        typer.echo(f"diloco {diloco.__version__} (Python {python}, torch {version('torch')})")
        raise typer.Exit


@app.callback()
def _options(
    log_level: Annotated[
        str, typer.Option(help="Least severe log message shown: debug, info, warning or error.")
    ] = "warning",
    is_version_asked: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            help="Show the version, also of Python and torch.",
        ),
    ] = False,
) -> None:
    """Train one language model on islands (datacenters, clusters, boxes) far apart.

    Begin with `diloco init DIR` (a new run), `diloco plan RUN.toml` (nothing is started), then
    `diloco local RUN.toml` (everything on this machine).
    """
    levels = logging.getLevelNamesMapping()
    if log_level.upper() not in levels:
        raise typer.BadParameter(f"{log_level!r}: choose debug, info, warning or error")
    if not logging.getLogger().handlers:
        log_to(None, levels[log_level.upper()])


#: Every command in the panel of its group, in the order in which help shows them.
_PANELS: dict[str, dict[str, Callable[..., None] | typer.Typer]] = {
    "Run": {
        "init": init.init,
        "plan": plan.plan,
        "coordinator": control.coordinator,
        "syncer": syncer.syncer,
        "island": island.island,
        "local": local.local,
        "launch": launch.launch,
        "status": control.status,
        "page": page.page,
        "watch": watch.watch,
        "report": report.report,
        "export": export.export,
        "fetch": fetch.fetch,
        "data": data.data,
        "doctor": doctor.doctor,
        "certs": certs.certs,
        "config": configuration.config,
    },
    "Operate": {
        "pause": operate.pause,
        "unpause": operate.unpause,
        "drain": operate.drain,
        "kick": operate.kick,
        "set": operate.set_,
        "move": operate.move,
        "stop": operate.stop,
        "backup": operate.backup,
        "repair": repair.repair,
        "replay": replay.replay,
    },
    "Research": {
        "sim": sim.sim,
        "lab": lab.lab,
        "emulate": emulate.emulate,
        "chaos": chaos.chaos,
        "bench": bench.bench,
        "conformance": conformance.conformance,
        "baseline": baseline.baseline,
    },
}
for panel, commands in _PANELS.items():
    for name, body in commands.items():
        if isinstance(body, typer.Typer):
            app.add_typer(body, name=name, rich_help_panel=panel)
        else:
            app.command(name, rich_help_panel=panel)(body)

#: What is typed for example, by command: the last paragraph of its docstring.
EXAMPLES: dict[str, str] = {}


def _complete(group: typer.Typer, path: str = "") -> None:
    """Let help pages wrap paragraphs by the terminal's width, and end them with an example."""
    for command in group.registered_commands:
        assert command.callback is not None
        text = inspect.cleandoc(command.help or command.callback.__doc__ or "")
        *parts, example = (" ".join(part.split()) for part in text.split("\n\n"))
        command.help = "\n\n".join(parts)
        name = command.name or command.callback.__name__.replace("_", "-")
        EXAMPLES[f"{path}{name}"] = example.removeprefix("Example: ")
        command.epilog = escape(example)
    for below in group.registered_groups:
        assert below.typer_instance is not None
        _complete(below.typer_instance, f"{below.name} ")


_complete(app)


def main() -> None:
    """Run the command line; an error of the product ends in its exit code and one message.

    An optional package that is not installed is such an error, whichever command needs it. Anyone
    who reads may have enough (`| head`): that ends it as SIGPIPE ends other programs. Ctrl-C ends
    it at once, whatever threads are still doing that nobody waits for.
    """
    try:
        app()
    except SystemExit as end:
        if isinstance(getattr(end.__context__, "__cause__", None), KeyboardInterrupt):
            _end_interrupted()
        if not isinstance(end.__context__, BrokenPipeError):  # which typer and rich end with 1
            raise
        sys.exit(128 + signal.SIGPIPE)
    except KeyboardInterrupt:  # before typer looks for it
        _end_interrupted()
    except (DilocoError, IsADirectoryError) as problem:
        _end_with(directory_in_place(problem) if isinstance(problem, OSError) else problem)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA_OF:
            raise
        _end_with(missing(shlex.join(["diloco", *sys.argv[1:]]), package))


def _end_interrupted() -> NoReturn:
    with contextlib.suppress(OSError, ValueError):  # a terminal that was closed
        typer.echo("interrupted", err=True)
        sys.stdout.flush()
    os._exit(128 + signal.SIGINT)


def _end_with(error: DilocoError) -> NoReturn:
    message = Text.assemble(("error: ", "bold red"), str(error))
    Console(stderr=True).print(message, soft_wrap=True)
    sys.exit(error.exit_code)
