"""Arguments that several commands take."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from diloco.errors import ConfigError
from diloco.extras import require
from diloco.transport.units import parse_bytes

#: Formats of pictures.
_PICTURES = (".png", ".svg", ".pdf")


def writable(option: typer.CallbackParam, target: str) -> str:
    """Refuse, before the work, a file that cannot be written after it; empty and "-" are none.

    Raises:
        ConfigError: Naming the option.
    """
    path, said = Path(target), f"{option.opts[0]} {target}:"
    if target in ("", "-"):
        return target
    if path.is_dir():
        raise ConfigError(f"{said} is a directory; name a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"{said} there is no directory {path.parent}; mkdir -p {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{said} may not be written by this user; name another file")
    return target


def _picture(option: typer.CallbackParam, target: str) -> str:
    """Refuse what is no file of a format that pictures have, or cannot be drawn here."""
    if target and Path(target).suffix not in _PICTURES:
        formats = ", ".join(_PICTURES)
        raise ConfigError(f"{option.opts[0]} {target}: give a path that ends with {formats}")
    if target:
        require(f"{option.opts[0]} {target}", "matplotlib")
    return writable(option, target)


def plot_option(what: str, name: str = "--plot") -> Any:
    """Describe a picture's path; typer takes an option for a default of any type, hence `Any`."""
    return typer.Option(
        name, metavar="PATH", callback=_picture, help=f"Draw {what}, as .png, .svg or .pdf."
    )


def option(text: str, metavar: str, *names: str, **more: Any) -> Any:
    """Describe an option with a value; typer takes defaults of any type, hence `Any`."""
    return typer.Option(*names, metavar=metavar, help=text, **more)


def flag(text: str, name: str, **more: Any) -> Any:
    """Describe an option that is there or not."""
    return typer.Option(name, help=text, **more)


def with_options(
    call: Callable[..., None], *declared: Callable[..., object]
) -> Callable[..., None]:
    """Give `call` the options that functions declare, and the name and help of the first one."""
    signatures = [inspect.signature(each, eval_str=True) for each in declared]
    parameters = [each for of in signatures for each in of.parameters.values()]
    vars(call)["__signature__"] = inspect.Signature(parameters)
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    call.__name__, call.__doc__ = declared[0].__name__, declared[0].__doc__
    return call


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
WithPage = Annotated[
    bool, flag("Serve the run's page in a browser, too; prints its address.", "--page")
]
PageOptions = Annotated[
    str,
    option(
        "The same, with options of diloco page: '--listen 127.0.0.1:8443', for example.", "OPTIONS"
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a value of the file; repeatable."),
]
#: Of commands that print JSON alone, instead of words.
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")]
Run = Annotated[
    Path, typer.Argument(metavar="RUN", help="Run file, or the coordinator.state_dir of a run.")
]
Require = Annotated[
    bool,
    typer.Option("--require", help="Exit with 1 if a figure misses its bar; the last line says."),
]
Rows = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Only these rows, with * and ?; repeatable."),
]
Emulate = Annotated[
    bool, typer.Option("--emulate", help="Links of network namespaces (root), not of the process.")
]
JsonTarget = Annotated[
    str,
    typer.Option(
        "--json",
        metavar="PATH|-",
        callback=writable,
        help="Write the figures as JSON; -: print only them.",
    ),
]


def write_json(content: Mapping[str, Any], target: str, *, err: bool = False) -> None:
    """Write figures where `JsonTarget` says; empty: nowhere.

    `err`: standard output is another program's.
    """
    text = json.dumps(content, indent=2)
    if target == "-":
        typer.echo(text)
    elif target:
        Path(target).write_text(text + "\n", encoding="utf-8")
        typer.echo(f"figures: {target}", err=err)


def size_of(option: str, text: str) -> int:
    """Read a size such as "4MiB", above 0 bytes.

    Raises:
        ConfigError: Naming the option.
    """
    try:
        return parse_bytes(text, is_positive=True)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from error
