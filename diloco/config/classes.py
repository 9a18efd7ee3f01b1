"""Configuration classes: what must agree, what the coordinator decides, what is a site's own.

Every field of the schema is marked `Identity[...]`, `Policy[...]` or `Local[...]`; this module owns
the marks, the walks over marked models and what travels between sites. It knows no field of the
schema by name.

Source: PROTOCOL.md, "Classes of configuration".
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, get_args, get_origin

import annotated_types
from blake3 import blake3
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_core.core_schema import (
    no_info_after_validator_function,
    no_info_before_validator_function,
)

from diloco.bounded_text import read_peer_json
from diloco.errors import ConfigError
from diloco.extensions import extension, extensions, packages_of

T = TypeVar("T")

#: Key of `policy_json` for the packages that what is named comes from; absent: all is diloco's own.
PACKAGES = "packages"


class ConfigClass(StrEnum):
    """How a field behaves when two sites' files differ."""

    IDENTITY = "identity"  # a mismatch refuses the join, by name and with both values
    POLICY = "policy"  # the coordinator's copy wins
    LOCAL = "local"  # a site's own affair


Identity: TypeAlias = Annotated[T, ConfigClass.IDENTITY]
Policy: TypeAlias = Annotated[T, ConfigClass.POLICY]
Local: TypeAlias = Annotated[T, ConfigClass.LOCAL]


@dataclass(frozen=True, slots=True)
class Needs:
    """Mark of a key that counts only where another key has one of some values.

    Attributes:
        key: The other key: an earlier one of the same section, or a dotted path from the root.
        values: Which; none: whatever is true, above 0, or not empty.
        or_added: Whether a name that another package adds is one of them, too.
    """

    key: str
    values: tuple[object, ...]
    or_added: Named | None = None

    def __init__(self, key: str, *values: object, or_added: Named | None = None) -> None:
        """Say which key, and which of its values."""
        object.__setattr__(self, "key", key)
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "or_added", or_added)

    def __str__(self) -> str:
        """Write it as it is typed: `merge = "on_arrival"`."""
        if not self.values:
            return self.key
        return f"{self.key} = {' or '.join(map(json.dumps, self.values))}"

    def is_met(self, value: object) -> bool:
        """Say whether the other key's value is one of them."""
        if self.or_added is not None and value not in self.or_added.own:
            return True
        return value in self.values if self.values else bool(value)

    def problem(self, value: object) -> str:
        """Say what to do if the other key's value is none of them; empty if it is."""
        if self.is_met(value):
            return ""
        shown = json.dumps(value, default=str)
        return f"needs {self}, and it is {shown}: set that, or leave this out"


class Section(BaseModel):
    """A component's configuration: immutable, no unknown keys, no silent conversion, no NaN."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True
    )

    @field_validator("*")
    @classmethod
    def _check_needs(cls, value: Any, info: ValidationInfo) -> Any:  # of each field's own type
        """Refuse a value that would change nothing, or that another key's value excludes."""
        field = cls.model_fields[info.field_name or ""]
        for mark in _needs(field, value):
            if mark.key in info.data and (problem := mark.problem(info.data[mark.key])):
                raise ValueError(problem)
        return value


@dataclass(frozen=True, slots=True)
class Range:
    """Mark of a text with a unit, of a type with `parse`: a quantity from `least` to `most`.

    Attributes:
        least: Smallest one; empty: 0. With one above 0 the text must be above 0, too.
        most: Largest one; empty: no bound.
        word: What may stand in place of a quantity, as it is; None: nothing.
    """

    least: str = ""
    most: str = ""
    word: str | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        """Check before the type, so that a bare number is told of its unit."""
        least = source.parse(self.least) if self.least else 0.0
        most = source.parse(self.most) if self.most else math.inf

        def check(value: Any) -> Any:
            if value != self.word and not least <= source.parse(value, least > 0) <= most:
                raise ValueError("is out of range")
            return value

        return no_info_before_validator_function(check, handler(source))


@dataclass(frozen=True, slots=True)
class Named:
    """Mark of a text that is a name: diloco's own, or one that an installed package adds.

    Attributes:
        group: Of entry points; see `diloco.extensions`.
        own: Names that diloco itself has.
    """

    group: str
    own: tuple[str, ...]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        """Check the name after the type; a row of PATTERN=NAME is its field's to check."""
        schema = handler(source)
        return no_info_after_validator_function(self.checked, schema) if source is str else schema

    def checked(self, value: str) -> str:
        """Return a name that there is.

        Raises:
            ValueError: If there is none of that name here, or more than one.
        """
        added = [each.name for each in extensions(self.group)]
        if value not in (*self.own, *added):
            raise ValueError(
                f"is none of {', '.join((*self.own, *added))}; what another package adds must be "
                "installed at every site (diloco config --explain lists it)"
            )
        try:
            extension(self.group, value, self.own)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return value

    def packages(self, value: str | tuple[str, ...]) -> dict[str, str]:
        """Return which packages add what a value names, be it a name or PATTERN=NAME."""
        values = (value,) if isinstance(value, str) else value
        return packages_of(self.group, {each.rpartition("=")[2] for each in values})


@dataclass(frozen=True, slots=True)
class FieldRow:
    """One field of the schema, for people; every member is ready to print."""

    path: str
    config_class: str
    default: str
    allowed: str
    description: str


def section_of(field: FieldInfo) -> type[Section] | None:
    """Give the section that a field holds, be it one table or a table of named ones; else None."""
    held: object = get_args(field.annotation)[1] if is_table(field) else field.annotation
    return held if isinstance(held, type) and issubclass(held, Section) else None


def is_table(field: FieldInfo) -> bool:
    """Say whether the field is a table whose keys are names that the user chooses."""
    return get_origin(field.annotation) is dict


def is_named(field: FieldInfo) -> bool:
    """Say whether it is such a table of sections."""
    return is_table(field) and section_of(field) is not None


def class_of(field: FieldInfo) -> ConfigClass | None:
    """Give the field's mark; None for a section, whose own fields are marked."""
    return next((mark for mark in field.metadata if isinstance(mark, ConfigClass)), None)


def field_at(section: type[Section], path: tuple[str, ...]) -> FieldInfo | None:
    """Find the field that a path of keys leads to, names of tables included; None if none does."""
    field = section.model_fields.get(path[0]) if path else None
    if field is None or len(path) == 1:
        return field
    inner = section_of(field)
    if inner is None:
        return field if is_table(field) and len(path) == 2 else None
    rest = path[2:] if is_named(field) else path[1:]
    return field_at(inner, rest) if rest else field


def leaves(section: Section, prefix: str = "") -> Iterator[tuple[str, ConfigClass, Any]]:
    """Walk all values of a configuration as (dotted path, class, value).

    A table of named sections yields its sorted names first, under the class it is marked with, a
    table of values each of them. Values are of any TOML type, hence `Any`.
    """
    for name, field in type(section).model_fields.items():
        value, mark, path = getattr(section, name), class_of(field), f"{prefix}{name}"
        if mark is not None and is_table(field) and not is_named(field):
            yield from ((f"{path}.{key}", mark, value[key]) for key in sorted(value))
        elif mark is not None:
            yield path, mark, sorted(value) if is_named(field) else value
        if is_named(field):
            for key in sorted(value):
                yield from leaves(value[key], f"{path}.{key}.")
        elif isinstance(value, Section):
            yield from leaves(value, f"{path}.")


def unmet_needs(root: Section) -> Iterator[tuple[str, object, str]]:
    """Name values that need what another section of `root` does not say: path, value, problem."""
    for path, field, value in _fields(root):
        for mark in _needs(field, value):
            table, _, key = mark.key.rpartition(".")
            if table and (problem := mark.problem(getattr(getattr(root, table), key))):
                yield path, value, problem


def _needs(field: FieldInfo, value: object) -> list[Needs]:
    """Give what a key's value needs; its default needs nothing."""
    return [m for m in field.metadata if isinstance(m, Needs) and value != field.default]


def _fields(section: Section, prefix: str = "") -> Iterator[tuple[str, FieldInfo, Any]]:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        yield f"{prefix}{name}", field, value
        for key, held in value.items() if is_named(field) else (("", value),):
            if isinstance(held, Section):
                yield from _fields(held, f"{prefix}{name}.{key}{'.' * bool(key)}")


def allowed_values(field: FieldInfo) -> str:
    """Describe the range or the choices of a field; empty where its type says all."""
    if get_origin(field.annotation) is Literal:
        return " or ".join(f'"{choice}"' for choice in get_args(field.annotation))
    for mark in field.metadata:
        if isinstance(mark, Named) and field.annotation is str:
            names = (*mark.own, *(each.name for each in extensions(mark.group)))
            return " or ".join(f'"{name}"' for name in names)
    signs = {
        annotated_types.Ge: (">=", "ge"),
        annotated_types.Gt: (">", "gt"),
        annotated_types.Le: ("<=", "le"),
        annotated_types.Lt: ("<", "lt"),
    }
    if spans := [mark for mark in field.metadata if isinstance(mark, Range)]:
        word = f'"{spans[0].word}" or ' if spans[0].word else ""
        return f"{word}{spans[0].least} to {spans[0].most}" if spans[0].most else ""
    bounds = [
        f"{signs[type(mark)][0]} {as_typed(getattr(mark, signs[type(mark)][1]))}"
        for mark in field.metadata
        if type(mark) in signs
    ]
    return " and ".join(bounds)


def as_typed(value: object) -> str:
    """Write a number as it is typed: 1e9 for the float of a billion."""
    if isinstance(value, float):
        return re.sub(r"e\+?(-?)0*", r"e\1", f"{value:g}")
    return str(value)


def explain(section: type[Section], prefix: str = "") -> list[FieldRow]:
    """List every field below `section`: path, class, default, range and description.

    A key that the user chooses appears as NAME. A default of "-" means that the field must be
    given, unless a preset gives it.
    """
    rows: list[FieldRow] = []
    for name, field in section.model_fields.items():
        inner, mark, path = section_of(field), class_of(field), f"{prefix}{name}"
        if mark is not None:
            default = "-" if field.is_required() else json.dumps(field.get_default())
            needs = [f"needs {each}" for each in field.metadata if isinstance(each, Needs)]
            description = "; ".join([field.description or "", *needs])
            rows.append(FieldRow(path, mark, default, allowed_values(field), description))
        if inner is not None:
            rows += explain(inner, f"{path}.NAME." if is_named(field) else f"{path}.")
    return rows


def identity_json(config: Section) -> str:
    """Write what must be equal everywhere: canonical JSON of dotted key to value."""
    return _class_json(config, ConfigClass.IDENTITY)


def policy_json(config: Section) -> str:
    """Write what the coordinator decides: canonical JSON of dotted key to value.

    Where a value names what another package adds, `PACKAGES` says which package.
    """
    packages: dict[str, str] = {}
    for _, field, value in _fields(config):
        for mark in field.metadata:
            if isinstance(mark, Named) and class_of(field) is not ConfigClass.LOCAL:
                packages |= mark.packages(value)
    return _class_json(config, ConfigClass.POLICY, {PACKAGES: packages} if packages else {})


def _class_json(config: Section, wanted: ConfigClass, more: dict[str, object] | None = None) -> str:
    values = {path: value for path, mark, value in leaves(config) if mark is wanted} | (more or {})
    return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def fingerprint(config: Section) -> str:
    """Give the blake3 of `identity_json`, in hex: equal for two sites that may train together."""
    return blake3(identity_json(config).encode()).hexdigest()


def identity_difference(a_json: str, b_json: str) -> list[str]:
    """Name every dotted key whose value differs, with both values; empty when none does.

    Args:
        a_json: Result of `identity_json` on one side; its values are written first.
        b_json: The same of the other side.

    Returns:
        Lines such as ``outer.overlap_steps: 2 here, 3 there``, `a_json` being "here"; a key that
        one side lacks is "absent" (another version of the program); what is no such document
        lacks them all.
    """
    try:
        here, there = _document(a_json), _document(b_json)
    except ValueError as error:
        return [f"it cannot be read: {error}"]

    def shown(values: dict[str, object], key: str) -> str:
        return json.dumps(values[key]) if key in values else "absent"

    return [
        f"{key}: {shown(here, key)} here, {shown(there, key)} there"
        for key in sorted(here.keys() | there.keys())
        if shown(here, key) != shown(there, key)
    ]


def _document(text: str) -> dict[str, object]:
    values = read_peer_json(text)
    return values if isinstance(values, dict) else {}
