"""`diloco config`: what a run file may say, and what one says once everything is resolved."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from diloco.cli.terminal.options import Overrides


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("config")(config)


def config(
    run_file: Annotated[
        Path | None, typer.Argument(metavar="RUN.toml", help="Resolve this run file.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="List every key: class, default, range, meaning.")
    ] = False,
    overrides: Overrides = None,
) -> None:
    """Check a run file and print it with every default filled in, or explain all keys.

    Keys of class identity must be equal on every island, those of class policy are decided by the
    coordinator's file, local ones are each site's own.
    """
    from rich.console import Console
    from rich.text import Text

    from diloco.config.classes import explain as explain_section
    from diloco.config.classes import fingerprint
    from diloco.config.load import load_config, resolved_toml
    from diloco.config.schema import Config

    if explain:
        console = Console(highlight=False, soft_wrap=True)
        for row in explain_section(Config):
            facts = ", ".join(
                part for part in (row.config_class, f"default {row.default}", row.allowed) if part
            )
            console.print(Text.assemble((row.path, "bold"), f"  {facts}\n    {row.description}"))
        return
    if run_file is None:
        raise typer.BadParameter("give a RUN.toml, or --explain")
    resolved = load_config(run_file, overrides or ())
    typer.echo(f"# identity fingerprint {fingerprint(resolved)}")
    typer.echo(resolved_toml(resolved), nl=False)
