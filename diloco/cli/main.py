"""`diloco`: the command line. Commands live beside this module, one file a subject."""

from __future__ import annotations

import inspect
import logging
import signal
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from diloco.cli.operate import operate, repair, replay
from diloco.cli.research import (
    baseline,
    bench,
    bench_inner,
    bench_race,
    chaos,
    emulate,
    lab,
    sim,
    sim_goodput,
    sim_utilization,
    sim_validate,
)
from diloco.cli.run import certs, configuration, control, doctor, export, island, local, plan
from diloco.errors import DilocoError
from diloco.launch.process.logs import log_to

app = typer.Typer(
    name="diloco",
    help="Train one language model on islands (datacenters, clusters, boxes) far apart.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _options(
    log_level: Annotated[
        str, typer.Option(help="Least severe log message shown: debug, info, warning or error.")
    ] = "warning",
) -> None:
    """Train one language model on islands (datacenters, clusters, boxes) far apart.

    Begin with `diloco plan RUN.toml` (nothing is started), then `diloco local RUN.toml` (everything
    on this machine).
    """
    levels = logging.getLevelNamesMapping()
    if log_level.upper() not in levels:
        raise typer.BadParameter(f"{log_level!r}: choose debug, info, warning or error")
    if not logging.getLogger().handlers:
        log_to(None, levels[log_level.upper()])


for subject in (
    control,
    operate,
    plan,
    island,
    local,
    baseline,
    export,
    repair,
    replay,
    emulate,
    certs,
    doctor,
    bench,
    sim,
    lab,
    chaos,
    configuration,
):
    subject.register(app)
bench_inner.register(bench.bench)
bench_race.register(bench.bench)
sim_goodput.register(sim.sim)
sim_utilization.register(sim.sim)
sim_validate.register(sim.sim)


def _flow(group: typer.Typer) -> None:
    """Let help pages wrap paragraphs by the terminal's width, not where the source breaks them."""
    for command in group.registered_commands:
        if command.callback is not None:
            text = inspect.cleandoc(command.help or command.callback.__doc__ or "")
            paragraphs = (" ".join(part.split()) for part in text.split("\n\n"))
            command.help = "\n\n".join(paragraphs)
    for below in group.registered_groups:
        if below.typer_instance is not None:
            _flow(below.typer_instance)


_flow(app)


def main() -> None:
    """Run the command line; an error of the product ends in its exit code and one message.

    Whoever reads may have enough (`| head`): that ends it as SIGPIPE ends other programs.
    """
    try:
        app()
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):  # which typer and rich end with 1
            raise
        sys.exit(128 + signal.SIGPIPE)
    except DilocoError as error:
        message = Text.assemble(("error: ", "bold red"), str(error))
        Console(stderr=True).print(message, soft_wrap=True)
        sys.exit(error.exit_code)
