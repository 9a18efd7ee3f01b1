"""Arguments that several commands take."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer


def existing_place(target: str) -> str:
    """Refuse, before the work, a file for its figures that cannot be written after it."""
    directory = Path(target).parent
    if target not in ("", "-") and not directory.is_dir():
        raise typer.BadParameter(f"{target}: there is no directory {directory}")
    return target


RunFile = Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run.")]
Address = Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the coordinator listens.")]
Certs = Annotated[
    str, typer.Option("--certs", metavar="DIR", help="Directory with ca.pem and operator.pem.")
]
Tokens = Annotated[
    str, typer.Option("--tokens", metavar="DIR", help="Directory with operator.token.")
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Ask beyond this machine without encryption.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a value of the file; repeatable."),
]


JsonTarget = Annotated[
    str,
    typer.Option(
        "--json",
        metavar="PATH|-",
        callback=existing_place,
        help="Write the figures as JSON; -: print only them.",
    ),
]


def write_json(content: Mapping[str, Any], target: str) -> None:
    """Write figures where `JsonTarget` says; empty: nowhere."""
    text = json.dumps(content, indent=2)
    if target == "-":
        typer.echo(text)
    elif target:
        Path(target).write_text(text + "\n", encoding="utf-8")
        typer.echo(f"figures: {target}")


def size_of(option: str, text: str) -> int:
    """Read a size such as "4MiB", above 0 bytes.

    Raises:
        ConfigError: Naming the option.
    """
    from diloco.errors import ConfigError
    from transport.units import parse_bytes

    try:
        return parse_bytes(text, is_positive=True)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from error
