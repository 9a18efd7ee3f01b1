"""Arguments that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
