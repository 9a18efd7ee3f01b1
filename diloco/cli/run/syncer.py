"""`diloco syncer`: run one of a run's syncers on a machine of its own."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from diloco.cli.terminal.options import Overrides, RunFile, flag, option


def syncer(
    run_file: RunFile,
    name: Annotated[str, option("Which table syncers.NAME this is.", "NAME", "--name")],
    coordinator: Annotated[
        str,
        option(
            "Where the coordinator listens; left out: coordinator.address of the file, or what the "
            "coordinator has said in run.state.",
            "HOST:PORT",
        ),
    ] = "",
    standby: Annotated[
        bool,
        flag(
            "Wait for the end of the machine that serves as it, then take its place.", "--standby"
        ),
    ] = False,
    overrides: Overrides = None,
) -> None:
    """Serve some of a run's fragments from this machine: one at each site spreads the traffic.

    For a run with tables syncers.NAME and run.state in an object store. Each has fragments of its
    own, in proportion to syncers.NAME.share, and keeps them in coordinator.state_dir here and in
    the object store. It ends with the run, and with Ctrl-C.

    If this machine is lost, type the same command on any other one: it takes the fragments from the
    object store, and nothing that was published is lost. The old one, should it come back, ends
    (exit code 41).

    Example: diloco syncer RUN.toml --name eu-west
    """
    from diloco.cli.run.doctor import show_at_start
    from diloco.config.load import load_config
    from diloco.launch.placed_syncer import run_placed_syncer

    config = load_config(run_file, overrides or ())
    if name in config.syncers:
        show_at_start(config.syncers[name].listen)
    run = run_placed_syncer(config, name, coordinator, typer.echo, is_standby=standby)
    raise typer.Exit(asyncio.run(run))
