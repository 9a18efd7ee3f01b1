"""`diloco`: the command line. Commands live beside this module, one file a subject."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer
from rich.console import Console

from diloco.cli import control, island, local
from diloco.errors import DilocoError

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
    logging.basicConfig(
        level=levels[log_level.upper()],
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )


control.register(app)
island.register(app)
local.register(app)


def main() -> None:
    """Run the command line; an error of the product ends in its exit code and one message."""
    try:
        app(standalone_mode=False)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except typer.Abort:
        sys.exit(130)
    except DilocoError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {error}", highlight=False)
        sys.exit(error.exit_code)
