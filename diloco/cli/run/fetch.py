"""`diloco fetch`: bring a run's state from its object store into a directory."""

from __future__ import annotations

import typer

from diloco.cli.terminal.options import Overrides, RunFile


def fetch(run_file: RunFile, overrides: Overrides = None) -> None:
    """Bring a run's state from run.state into coordinator.state_dir, to read it there.

    For what reads a state directory (export, replay, report), where that is on other machines: with
    syncers on machines of their own no directory has all of it. The run may be under way. Again
    fetches what is new. A coordinator or syncer that starts needs none of it: it fetches itself.

    Example: diloco fetch RUN.toml --set coordinator.state_dir=copy
    """
    from diloco.checkpoint.fetch import fetch_run
    from diloco.config.load import load_config

    fetch_run(load_config(run_file, overrides or ()), typer.echo)
