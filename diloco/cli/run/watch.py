"""`diloco watch`: a run on a screen in the terminal."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Annotated

import typer

from diloco.cli.run.page import source_of
from diloco.cli.terminal.options import Certs, Insecure, Tokens
from diloco.errors import ConfigError
from diloco.extras import require


def watch(
    run: Annotated[
        str,
        typer.Argument(
            metavar="HOST:PORT|RUN_DIR",
            help="A coordinator, or the state directory of a run, also of one under way.",
        ),
    ],
    certs: Certs = "",
    tokens: Tokens = "",
    insecure: Insecure = False,
) -> None:
    """Show a run on a screen in the terminal: what diloco page shows in a browser, without one.

    What goes on in one sentence, alarms with the command that they name, islands and their
    links, losses, the timeline of fragments, events and configuration; keys are at the bottom. It
    changes nothing.

    A coordinator is asked once a second, as by diloco status, with the same --certs and --tokens;
    of a state directory the events are read, as they are written. In scripts and logs use diloco
    status --watch, which ends with the run.

    Example: diloco watch 127.0.0.1:29400
    """
    require("diloco watch", "textual", "use diloco status --watch")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError(
            "diloco watch: this is no terminal, and nobody could end it: use diloco status --watch"
        )
    from diloco.watch.screen import show

    logging.disable()  # lines among the screen's; it says itself what is wrong
    asyncio.run(show(source_of(run, certs, tokens, insecure)))
