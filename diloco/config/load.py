"""Reading and writing run files: TOML, `--set a.b=c`, and every problem named at once.

A refusal has one line a problem: dotted path, value, what is wrong, what is allowed, what the field
is. The environment is not read here.
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from diloco.config import classes
from diloco.config.hugging_face import with_config_json
from diloco.config.schema import Config
from diloco.durable import read_text
from diloco.errors import ConfigError
from diloco.extensions import check_same_packages

S = TypeVar("S", bound=classes.Section)

_SHOWN_CHARACTERS = 60
_SHOWN_KEY = 200
_SHOWN_FILES = 3
_MESSAGES = {
    "bool_type": "must be true or false",
    "dict_type": "must be a table",
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
    "greater_than": "is out of range",
    "greater_than_equal": "is out of range",
    "int_type": "must be an integer",
    "less_than": "is out of range",
    "less_than_equal": "is out of range",
    "literal_error": "is not one of the choices",
    "model_type": "must be a table",
    "string_too_short": "must not be empty",
    "string_type": "must be a string, in quotes",
    "too_short": "must not be empty",
    "tuple_type": "must be an array",
}


def load_config(
    path: str | Path, overrides: Sequence[str] = (), island: str | None = None
) -> Config:
    """Read a run file, lay overrides over it and check everything.

    Args:
        path: TOML file.
        overrides: Texts ``a.b=value``, later ones win; the value is read as TOML and, where it is
            none, taken as a string.
        island: Name of the island that this process belongs to; None or empty: the file's own
            `island_id`, which is none unless the file is a `resolved.toml`.

    Returns:
        The validated configuration.

    Raises:
        ConfigError: If the file cannot be read, is no TOML, or has problems: one a line.
    """
    raw = _read(path, Config)
    for text in overrides:
        _override(raw, text)
    if island:
        raw["island_id"] = island
    return _validated(raw, f"cannot load {path}", Config)


def load_section(path: str | Path | None, section: type[S], overrides: Sequence[str] = ()) -> S:
    """Read another kind of file, whose root is `section`, with the same care.

    Args:
        path: TOML file; None: overrides alone say all.
        section: Root of that kind.
        overrides: As of `load_config`.

    Raises:
        ConfigError: If the file cannot be read, is no TOML, or has problems: one a line.
    """
    raw = {} if path is None else _read(path, section)
    for text in overrides:
        _override(raw, text, section)
    return _validated(raw, f"cannot load {path or 'what the flags say'}", section)


def config_of(values: Mapping[str, Any], attempt: str) -> Config:
    """Make a configuration of what a run file would say.

    Args:
        values: Sections by name.
        attempt: What is tried, for the error.

    Raises:
        ConfigError: If the values have problems: one a line.
    """
    return _validated(values, attempt, Config)


def values_of(path: str | Path, section: type[classes.Section]) -> dict[str, Any]:
    """Read the raw values of another kind of file, whose root is `section`, for `section_with`.

    Raises:
        ConfigError: If the file cannot be read, is no TOML, or is a run's.
    """
    values = _read(path, section)
    # A laboratory's file has the path of one there.
    is_run = isinstance(values.get("run"), dict)
    if is_run and not values.keys() & section.model_fields.keys():
        raise ConfigError(
            f"{path} is a run's file, and here one is read whose keys are "
            f"{', '.join(section.model_fields)}; to predict the run: diloco plan {path}"
        )
    return values


def section_with(values: Mapping[str, Any], section: type[S], attempt: str) -> S:
    """Make another kind of root of what its file would say.

    Args:
        values: Raw values by key.
        section: What is made.
        attempt: What is tried, for the error.

    Raises:
        ConfigError: If the values have problems: one a line.
    """
    return _validated(values, attempt, section)


def _read(path: str | Path, root: type[classes.Section]) -> dict[str, Any]:
    try:
        if not os.path.isfile(path) and os.path.exists(path) and not os.path.isdir(path):
            raise ConfigError(f"cannot read {path}: it is no regular file")
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror or error}. Paths are counted from "
            f"{Path.cwd()}{_files_near(Path(path), root)}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}; correct it there") from error


def _files_near(path: Path, root: type[classes.Section]) -> str:
    """Name files of the same kind where `path` was expected, the most alike first; or nothing."""
    directory = path if path.is_dir() else path.parent
    names = sorted(str(other) for other in directory.glob("*.toml") if _is_of_kind(other, root))
    names.sort(key=lambda name: -difflib.SequenceMatcher(None, name, str(path)).ratio())
    return f"; near it: {' or '.join(names[:_SHOWN_FILES])}" if names else ""


def _is_of_kind(path: Path, root: type[classes.Section]) -> bool:
    """Whether a TOML file has tables of `root`, and no others."""
    try:
        tables = tomllib.loads(read_text(path)).keys()
    except (OSError, ValueError, RecursionError):
        return False
    return bool(tables) and tables <= root.model_fields.keys()


def with_policy(config: Config, policy_json: str) -> Config:
    """Give `config` with the coordinator's copy of every policy field.

    Args:
        config: This site's configuration; its identity and local fields stay.
        policy_json: Result of `policy_json` on the coordinator's configuration.

    Raises:
        ConfigError: If the text is not the policy of this version's schema, or does not fit this
            site's other fields, or if it names what no package here adds, or another version.
    """
    theirs = json.loads(policy_json)
    ours = json.loads(classes.policy_json(config))
    ours.pop(classes.PACKAGES, None)
    check_same_packages(theirs.pop(classes.PACKAGES, {}), "the coordinator")
    if theirs.keys() != ours.keys():
        odd = ", ".join(sorted(theirs.keys() ^ ours.keys()))
        raise ConfigError(
            f"the coordinator's policy has other fields than this version's: {odd}; "
            "install the same version of diloco everywhere"
        )
    raw = config.model_dump()
    for path, value in theirs.items():
        *tables, key = path.split(".")
        table = raw
        for name in tables:
            table = table[name]
        table[key] = value
    return _validated(raw, "cannot take over the coordinator's policy", Config)


def with_setting(config: Config, text: str) -> Config:
    """Give `config` with one value changed by ``a.b=value``, read as `load_config` reads it.

    Raises:
        ConfigError: If there is no such key, or the value does not fit.
    """
    raw = config.model_dump()
    _override(raw, text)
    return _validated(raw, f"cannot set {text}", Config)


def with_settings(config: Config, settings_json: str) -> Config:
    """Give `config` with what an operator has set since the start.

    Args:
        config: The coordinator's.
        settings_json: JSON of dotted key of a policy field to value.

    Raises:
        ConfigError: If one is no policy field, or does not fit the others.
    """
    policy = json.loads(classes.policy_json(config))
    return with_policy(config, json.dumps({**policy, **json.loads(settings_json)}))


def resolved_toml(config: Config) -> str:
    """Write every value of a configuration, presets applied; loads back to an equal one."""
    return "\n".join(_table(config.model_dump())) + "\n"


def _table(values: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield the lines of one table, its own values before the tables below it."""
    own = {key: value for key, value in values.items() if not isinstance(value, Mapping)}
    if path and own:
        yield f"\n[{path}]"
    for key, value in own.items():
        yield f"{key} = {_toml(value)}"
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _table(value, f"{path}.{key}" if path else key)


def _toml(value: Any) -> str:
    """Write one value of any TOML type; floats in full, strings escaped as basic strings."""
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for the one control character that JSON leaves alone.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{key} = {_toml(item)}' for key, item in value.items())} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _override(raw: dict[str, Any], text: str, root: type[classes.Section] = Config) -> None:
    """Set one ``a.b=value`` in a raw configuration, in place."""
    key, sign, value = text.partition("=")
    path = tuple(key.strip().split("."))
    if not sign or not all(path):
        raise ConfigError(f"--set {text}: write KEY=VALUE, such as run.inner_steps=100")
    if classes.field_at(root, path) is None:
        raise ConfigError(f"--set {text}: {_unknown_key(root, path)}")
    islands = raw.get("islands")
    is_inside = root is Config and path[0] == "islands" and len(path) > 2
    if is_inside and isinstance(islands, dict) and path[1] not in islands:
        names = ", ".join(sorted(islands))
        raise ConfigError(
            f"--set {text}: {path[1]} is not an island of this file; islands: {names}"
        )
    table = raw
    for name in path[:-1]:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {text}: {name} is not a table in the file")
    table[path[-1]] = _value(value.strip())


def _value(text: str) -> Any:
    """Read a value as TOML; whatever is no boolean, number, array, table or string is a string."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    value = parsed.pop("value")
    is_configurable = isinstance(value, bool | int | float | str | list | dict)
    return value if is_configurable and not parsed else text


def _validated(raw: Mapping[str, Any], attempt: str, root: type[S]) -> S:
    if root is Config:
        try:
            raw = with_config_json(raw)
        except ConfigError as error:
            raise ConfigError(f"{attempt}: 1 problem\n  {error}") from error
    try:
        return root.model_validate(raw)
    except ValidationError as error:
        lines = [line for problem in error.errors() for line in _lines(root, problem)]
    count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    raise ConfigError("\n  ".join([f"{attempt}: {count}", *lines]))


def _lines(root: type[classes.Section], error: ErrorDetails) -> Iterator[str]:
    """Turn one error of pydantic into lines for people; several problems give several."""
    path = tuple(str(part) for part in error["loc"] if part != "[key]")
    kind, context = error["type"], error.get("ctx", {})
    if kind == "several_problems":
        for below, value, message in context["problems"]:
            yield _line(root, (*path, *below.split(".")), f"{_shown(value)}: {message}")
        return
    if kind == "missing":
        field = classes.field_at(root, path)
        is_section = field is not None and classes.section_of(field) is not None
        missing = f"missing; add a section [{'.'.join(path)}]" if is_section else kind
        yield _line(root, path, missing)
        return
    if kind == "extra_forbidden":
        message = _unknown_key(root, path)
    elif kind == "value_error":
        message = str(context["error"])
    elif kind == "string_pattern_mismatch":
        message = f"must match {context['pattern']}"
    else:
        message = _MESSAGES.get(kind, error["msg"])
    yield _line(root, path, f"{_shown(error['input'])}: {message}")


def _line(root: type[classes.Section], path: tuple[str, ...], problem: str) -> str:
    """Write ``path: problem; allowed: range (what the field is)``."""
    name = ".".join(path)[:_SHOWN_KEY]
    line = f"{name if name.isprintable() else json.dumps(name)}: {problem}"
    while path[-1:] and path[-1].isdecimal():  # an index into an array: the array's field tells
        path = path[:-1]
    field = classes.field_at(root, path)
    if field is None:
        return line
    if allowed := classes.allowed_values(field):
        line += f"; allowed: {allowed}"
    return f"{line} ({field.description})"


def _shown(value: object) -> str:
    try:
        text = _toml(value)
    except RecursionError:
        return "values nested too deep to be shown"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _unknown_key(section: type[classes.Section], path: tuple[str, ...]) -> str:
    """Say what the last known table of `path` would have taken instead."""
    root, unknown = section, path[0]
    for n in range(1, len(path)):
        field = classes.field_at(root, path[:n])
        inner = classes.section_of(field) if field else None
        if inner is None:
            break
        section, unknown = inner, path[n]
    keys = list(section.model_fields)
    close = difflib.get_close_matches(unknown, keys, n=1)
    hint = f'did you mean "{close[0]}"?' if close else f"known here: {', '.join(keys)}"
    return f"unknown key; {hint}"
