"""Types of fields that several sections of the run file share, and how a section lays its preset.

Owns what a text with a unit, a deferred choice, an array and a name are; knows no section. Whatever
comes before validation is `Any`: a raw value of the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator, Field, GetCoreSchemaHandler
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import no_info_after_validator_function, str_schema

from diloco.config.classes import Range
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


class _Quantity(str):
    """A text with a unit, kept as it was written; a field of this type has a `Range`."""

    __slots__ = ()

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        """Make the type of a text that the field's range has read."""
        return no_info_after_validator_function(cls, str_schema(strict=True))


class Duration(_Quantity):
    """A time, such as "80ms"."""

    __slots__ = ()

    @property
    def seconds(self) -> float:
        """The time in seconds; 0 where the text is empty."""
        return parse_duration(self) if self else 0.0

    @staticmethod
    def parse(text: object, is_positive: bool = False) -> float:
        """Read seconds, above 0 if `is_positive`."""
        return parse_duration(text, is_positive=is_positive)


class Bandwidth(_Quantity):
    """A rate, such as "200Mbit/s"."""

    __slots__ = ()

    @property
    def bps(self) -> float:
        """The rate in bits per second; 0 where the text is empty."""
        return parse_bandwidth(self) if self else 0.0

    @staticmethod
    def parse(text: object, is_positive: bool = False) -> float:
        """Read bits per second, which are above 0 in any case."""
        return parse_bandwidth(text)


class Size(_Quantity):
    """A number of bytes, such as "1MiB"."""

    __slots__ = ()

    @property
    def num_bytes(self) -> int:
        """The size in bytes; 0 where the text is empty."""
        return parse_bytes(self) if self else 0

    @staticmethod
    def parse(text: object, is_positive: bool = False) -> int:
        """Read bytes, above 0 if `is_positive`."""
        return parse_bytes(text, is_positive=is_positive)


#: Any time, rate or size; the optional ones may be empty.
Time: TypeAlias = Annotated[Duration, Range()]
OptionalTime: TypeAlias = Annotated[Duration, Range(word="")]
Rate: TypeAlias = Annotated[Bandwidth, Range()]
OptionalRate: TypeAlias = Annotated[Bandwidth, Range(word="")]
OptionalSize: TypeAlias = Annotated[Size, Range(word="")]
#: How long something may take that a network or a person has a part in.
Deadline: TypeAlias = Annotated[Duration, Range("100ms", "168h")]
AutoDeadline: TypeAlias = Annotated[Duration, Range("100ms", "168h", "auto")]
#: Of what is renewed under way; a server takes up to 6 s to show what is new.
Lifetime: TypeAlias = Annotated[Duration, Range("20s", "8760h")]
#: A wait that may be none.
AutoPause: TypeAlias = Annotated[Duration, Range("0s", "1h", "auto")]
#: Between one attempt and the next.
Wait: TypeAlias = Annotated[Duration, Range("1ms", "60s")]
#: Of an inner step in virtual time.
Step: TypeAlias = Annotated[Duration, Range("1us", "24h")]
Memory: TypeAlias = Annotated[Size, Range("0B", "1024TiB")]
#: Decay of a moving average.
Beta: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
#: Used in file names and addresses, so without blanks, slashes and dots at the start.
Name: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
#: Of islands: they are parts of file names, and each of them travels in many messages.
ISLAND_NAME = r"^[a-z0-9-]{1,100}$"
IslandName: TypeAlias = Annotated[str, Field(pattern=ISLAND_NAME)]
