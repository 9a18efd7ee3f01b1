"""Flags that are the keys of a scenario's file, made from its section, so that both are the same.

A key's own description is the help of its flag, and its default the flag's. Sections are read when
a command is, not when `diloco` starts.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer
from typer.core import TyperCommand
from typer.main import get_command

if TYPE_CHECKING:  # commands import what they need when they run
    from pydantic.fields import FieldInfo

    from diloco.config.classes import Section

ScenarioFile = Annotated[
    Path | None, typer.Argument(metavar="SCENARIO.toml", help="The scenario; flags win over it.")
]

_GIVEN, _GIVEN_TWINS = "diloco.keys", "diloco.twins"
_PANEL = "Scenario"
_METAVARS: Mapping[object, str | None] = {int: "N", float: "X", bool: None}


def section_command(
    load: Callable[[], type[Section]], twins: Mapping[str, tuple[str, ...]] | None = None
) -> type[TyperCommand]:
    """Make a kind of command that has a flag for every key of a section.

    Args:
        load: Gives the section; its tables are sections, too.
        twins: Flags that stand for several keys: name to dotted paths. The keys' own flags win.
    """

    @functools.cache
    def flags() -> list[Any]:  # of the click that typer brings along
        return _flags(load(), twins or {})

    class SectionCommand(TyperCommand):
        """A command with the section's flags besides its own."""

        def get_params(self, ctx: Any) -> list[Any]:
            """Add the flags to the command's own options."""
            return [*super().get_params(ctx), *flags()]

    return SectionCommand


def given_keys(context: typer.Context) -> dict[str, Any]:
    """Return what flags said, by dotted path; what cannot be read is its key's own to refuse."""
    return {**context.meta.get(_GIVEN_TWINS, {}), **context.meta.get(_GIVEN, {})}


def is_typed(context: typer.Context, name: str) -> bool:
    """Say whether an option was typed, or has its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _flags(section: type[Section], twins: Mapping[str, tuple[str, ...]]) -> list[Any]:
    keys = list(_keys(section))
    counts = Counter(path.rpartition(".")[2] for path, _, _ in keys)
    parameters = []
    for path, field, panel in keys:
        key = path.rpartition(".")[2]
        name = key if counts[key] == 1 else path.replace(".", "_")
        keep = _keeper(_GIVEN, (path,), field)
        parameters.append(_parameter(name, field, _help(field), panel, _typed(field.default), keep))
    fields = {path: field for path, field, _ in keys}
    for name, paths in twins.items():
        field = fields[paths[0]]
        text, keep = f"{' and '.join(paths)} at once", _keeper(_GIVEN_TWINS, paths, field)
        parameters.append(_parameter(name, field, text, _PANEL, None, keep))

    def options() -> None: ...

    vars(options)["__signature__"] = inspect.Signature(parameters)
    options.__annotations__ = {each.name: each.annotation for each in parameters}
    only = typer.Typer(add_completion=False)
    only.command()(options)
    return list(get_command(only).params)


def _keys(
    section: type[Section], prefix: str = "", panel: str = _PANEL
) -> Iterator[tuple[str, FieldInfo, str]]:
    """Walk all keys below a section: dotted path, field, and the panel of help that it is in."""
    from diloco.config.classes import section_of

    for name, field in section.model_fields.items():
        if (inner := section_of(field)) is None:
            yield f"{prefix}{name}", field, panel
        else:
            yield from _keys(inner, f"{prefix}{name}.", f"{name}: {field.description}")


def _parameter(
    name: str, field: FieldInfo, text: str, panel: str, default: Any, keep: Callable[..., None]
) -> inspect.Parameter:
    """Describe a flag to typer, whose defaults are of any type."""
    flag, is_switch = name.replace("_", "-"), field.annotation is bool
    option = typer.Option(
        f"--{flag}/--no-{flag}" if is_switch else f"--{flag}",
        metavar=_METAVARS.get(field.annotation, "VALUE"),
        help=text,
        show_default=default not in (None, ""),
        rich_help_panel=panel,
        expose_value=False,
        callback=keep,
    )
    kind: Any = Annotated[bool | None, option] if is_switch else Annotated[str | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _keeper(where: str, paths: tuple[str, ...], field: FieldInfo) -> Callable[..., None]:
    """Make the callback that keeps what was typed; defaults are the section's own affair."""

    def keep(context: typer.Context, option: typer.CallbackParam, value: Any) -> None:
        if is_typed(context, option.name or ""):
            read = _read(value, field.annotation)
            context.meta.setdefault(where, {}).update(dict.fromkeys(paths, read))

    return keep


def _read(value: Any, kind: object) -> Any:
    """Read a number as one of its key's type; any other text, and what is no number, stays."""
    if kind in (int, float):
        with contextlib.suppress(ValueError):
            return int(value) if kind is int else float(value)
    return value


def _help(field: FieldInfo) -> str:
    """Give a key's description, with its choices where that does not say them."""
    text = field.description or ""
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    if all(choice in text for choice in choices):
        return text
    return f"{text}: {', '.join(choices)}"


def _typed(value: Any) -> Any:
    """Write a default as it is typed; a switch's is its side."""
    from diloco.config.classes import as_typed

    return value if isinstance(value, bool) else as_typed(value)
