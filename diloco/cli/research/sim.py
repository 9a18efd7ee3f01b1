"""`diloco sim`: predict a run before paying for it. Subjects register their commands here."""

from __future__ import annotations

import typer

sim = typer.Typer(
    help="Predict utilisation, bandwidth and goodput: the real machines under a virtual clock.",
    no_args_is_help=True,
)


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.add_typer(sim, name="sim")
