"""Types of fields that several sections of the run file share, and how a section lays its preset.

Owns what a text with a unit, a deferred choice, an array and a name are; knows no section. Whatever
comes before validation is `Any`: a raw value of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from diloco.config.classes import Range
from diloco.transport.framing import MAX_CHUNK_BYTES
from diloco.transport.units import parse_bandwidth, parse_bytes, parse_duration

#: More than any run makes, and less than what integers on the wire hold.
MOST_STEPS = 10**9
#: Checkpoints that an island may keep, and name in a report to the coordinator.
MOST_CHECKPOINTS = 1000

#: A path below the validated field, the value found there, and what is wrong with it.
Problem: TypeAlias = tuple[str, object, str]


def several_problems(problems: Sequence[Problem]) -> PydanticCustomError:
    """Carry the problems of one validator out of it; `load` writes each on a line of its own."""
    return PydanticCustomError("several_problems", "several problems", {"problems": problems})


def with_preset(data: Any, presets: Mapping[str, Mapping[str, Any]]) -> Any:
    """Lay the explicit keys of a raw table over its preset's, one table deep.

    Whatever is malformed passes through: the field's own validation names it.
    """
    if not isinstance(data, Mapping):
        return data
    defaults = presets.get(str(data.get("preset")), {})
    merged = {**defaults, **data}
    for key, value in defaults.items():
        if isinstance(value, Mapping) and isinstance(merged[key], Mapping):
            merged[key] = {**value, **merged[key]}
    return merged


def later(*values: object) -> BeforeValidator:
    """Refuse by name what is designed but not built; a type stands for all its values."""

    def check(value: Any) -> Any:
        if value in values or type(value) in values:
            raise ValueError("comes later")
        return value

    return BeforeValidator(check)


def tuples(value: Any) -> Any:
    """Turn TOML's arrays, nested ones too, into tuples."""
    return tuple(tuples(item) for item in value) if isinstance(value, list) else value


def text_read_by(parse: Callable[[Any], object]) -> BeforeValidator:
    """Accept a text that `parse` reads, and keep it; empty passes where the default is empty."""

    def check(value: Any) -> Any:
        if value != "":
            parse(value)
        return value

    return BeforeValidator(check)


_duration = partial(parse_duration, is_positive=True)
#: How long something may take that a network or a person has a part in.
Deadline: TypeAlias = Annotated[str, Range(_duration, "100ms", "168h")]
AutoDeadline: TypeAlias = Annotated[str, Range(_duration, "100ms", "168h", word="auto")]
#: Of what is renewed under way; a server takes up to 6 s to show what is new.
Lifetime: TypeAlias = Annotated[str, Range(_duration, "20s", "8760h")]
#: A wait that may be none.
AutoPause: TypeAlias = Annotated[str, Range(parse_duration, "0s", "1h", word="auto")]
#: Between one attempt and the next.
Wait: TypeAlias = Annotated[str, Range(_duration, "1ms", "60s")]
Chunk: TypeAlias = Annotated[
    str, Range(partial(parse_bytes, is_positive=True), "1KiB", f"{MAX_CHUNK_BYTES >> 20}MiB")
]
Memory: TypeAlias = Annotated[str, Range(parse_bytes, "0B", "1024TiB")]
#: Empty: no limit.
Rate: TypeAlias = Annotated[str, text_read_by(parse_bandwidth)]
#: Decay of a moving average.
Beta: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
#: Used in file names and addresses, so without blanks, slashes and dots at the start.
Name: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
#: Of islands: they are parts of file names, and each of them travels in many messages.
ISLAND_NAME = r"^[a-z0-9-]{1,100}$"
IslandName: TypeAlias = Annotated[str, Field(pattern=ISLAND_NAME)]
