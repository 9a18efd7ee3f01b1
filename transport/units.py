"""Quantities with their unit: "200 Mbit/s", "80ms", "1MiB".

A bare number is refused everywhere: 50 as a bandwidth means nothing until somebody says of what.
"""

from __future__ import annotations

import re

_BANDWIDTHS = {"bit/s": 1.0, "kbit/s": 1e3, "Mbit/s": 1e6, "Gbit/s": 1e9, "Tbit/s": 1e12}
_DURATIONS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_BINARY = {"B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}
_SIZES = {**_BINARY, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}

_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*([A-Za-z/]+)\s*", re.ASCII)


def parse_bandwidth(text: object) -> float:
    """Return bits per second; ``"200Mbit/s"`` is 2e8.

    Raises:
        ValueError: If `text` is not a positive number with one of the units of a bandwidth.
    """
    return _parse(text, "bandwidth", _BANDWIDTHS, "200Mbit/s", is_positive=True)


def parse_duration(text: object, *, is_positive: bool = False) -> float:
    """Return seconds; ``"80ms"`` is 0.08 and ``"0s"`` is 0.

    Raises:
        ValueError: If `text` is not a number, 0 or more, with one of the units of a duration; with
            `is_positive` also if it is 0.
    """
    return _parse(text, "duration", _DURATIONS, "80ms", is_positive=is_positive)


def parse_bytes(text: object, *, is_positive: bool = False) -> int:
    """Return bytes; ``"1MiB"`` is 1048576 and ``"1MB"`` is 1000000.

    Raises:
        ValueError: If `text` is not a whole number of bytes, 0 or more, with a unit of size; with
            `is_positive` also if it is 0.
    """
    value = _parse(text, "size", _SIZES, "1MiB", is_positive=is_positive)
    if not value.is_integer():
        raise ValueError(f"{text!r} is not a size: it comes to {value:g} bytes, not a whole number")
    return int(value)


def format_bandwidth(bandwidth_bps: float) -> str:
    """Write bits per second with four digits and the largest unit that fits."""
    return _format(bandwidth_bps, _BANDWIDTHS)


def format_duration(duration_s: float) -> str:
    """Write seconds with four digits and the largest unit that fits."""
    return _format(duration_s, _DURATIONS) if duration_s else "0 s"


def format_bytes(num_bytes: int) -> str:
    """Write bytes with four digits and the largest binary unit that fits."""
    return _format(num_bytes, _BINARY)


def _parse(
    text: object, kind: str, units: dict[str, float], example: str, *, is_positive: bool
) -> float:
    match = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    value = float(match[1]) * units.get(match[2], float("nan")) if match else float("nan")
    if not value < float("inf") or (is_positive and value == 0):
        least = " over 0," if is_positive else ", 0 or more,"
        raise ValueError(
            f"{text!r} is not a {kind}: write a number{least} with a unit "
            f"({', '.join(units)}), such as '{example}'"
        )
    return value


def _format(value: float, units: dict[str, float]) -> str:
    fitting = [unit for unit, size in units.items() if value >= size]
    unit = fitting[-1] if fitting else next(iter(units))
    return f"{value / units[unit]:.4g} {unit}"
