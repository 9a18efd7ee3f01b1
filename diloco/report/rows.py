"""What every bench hands back: rows, what was required of them, and on what machine."""

from __future__ import annotations

import fnmatch
import platform
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from diloco.errors import ConfigError
from diloco.system import usable_cpus

#: Told what is measured, how much of it is done, of how much; called often. What it raises ends
#: the bench, and every process of it.
Watch: TypeAlias = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Requirement:
    """A figure and its bar.

    Attributes:
        what: The figure in words, its rows named.
        figure: As measured.
        limit: Largest figure that meets the requirement, or smallest if `is_at_least`.
        unit: Of both.
        is_at_least: Whether more is better.
        is_stretch: Whether it is only hoped for: said, and never missed.
    """

    what: str
    figure: float
    limit: float
    unit: str
    is_at_least: bool = False
    is_stretch: bool = False

    @property
    def is_met(self) -> bool:
        """Whether the figure is on the right side of its bar; NaN never is."""
        return self.figure >= self.limit if self.is_at_least else self.figure <= self.limit

    def as_text(self) -> str:
        """Say figure and bar in one line."""
        sign = ">=" if self.is_at_least else "<="
        verdict = "met" if self.is_met else "not met" if self.is_stretch else "MISSED"
        asked = "hoped for" if self.is_stretch else "required"
        return (
            f"{verdict}: {self.what}: {self.figure:.4g} {self.unit}, "
            f"{asked} {sign} {self.limit:g} {self.unit}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON values, hence `Any`."""
        return {
            "what": self.what,
            "figure": self.figure,
            "limit": self.limit,
            "unit": self.unit,
            "is_at_least": self.is_at_least,
            "is_stretch": self.is_stretch,
            "is_met": self.is_met,
        }


@dataclass(frozen=True, slots=True)
class Column:
    """A key of every row, its heading in the table, and how its values are written there."""

    key: str
    heading: str
    form: str = ""

    def cell(self, row: Mapping[str, Any]) -> str:
        """Write a row's value; what was not measured, or is no figure of the row, is a dash."""
        value = row.get(self.key)
        return "-" if value is None else format(value, self.form)


@dataclass(frozen=True, slots=True)
class Report:
    """A finished bench. Rows and setting are JSON values by name, hence `Any`.

    A row's "table" names the table that it is shown in, where there are several; each shows the
    columns that its rows have.
    """

    bench: str
    setting: Mapping[str, Any]
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Any]]
    requirements: Sequence[Requirement]
    wall_s: float = 0.0

    @property
    def tables(self) -> dict[str, list[Mapping[str, Any]]]:
        """Rows by the table that they are shown in, in the order of the first ones."""
        tables: dict[str, list[Mapping[str, Any]]] = {}
        for row in self.rows:
            tables.setdefault(row.get("table", ""), []).append(row)
        return tables

    @property
    def missed(self) -> list[Requirement]:
        """Requirements that were not met, those only hoped for left out."""
        return [r for r in self.requirements if not (r.is_met or r.is_stretch)]

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON values; what a column shows is a part of what a row has."""
        return {
            "bench": self.bench,
            "setting": dict(self.setting),
            "machine": machine(),
            "rows": [dict(row) for row in self.rows],
            "required": [requirement.as_dict() for requirement in self.requirements],
            "wall_s": self.wall_s,
        }


def machine() -> dict[str, Any]:
    """Describe what figures depend on besides the code: JSON values, hence `Any`."""
    import torch

    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "usable_cpus": usable_cpus(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def matching(names: Collection[str], patterns: Sequence[str], *, what: str = "row") -> list[str]:
    """Give the names that match any of `patterns`, in their order.

    Args:
        names: Of all there are.
        patterns: With `*` and `?`; none of them: all names.
        what: A name is of, in a word.

    Raises:
        ConfigError: If a pattern matches none.
    """
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ConfigError(f"--rows {pattern} matches no {what}; {what}s are {', '.join(names)}")
    return [name for name in names if any(fnmatch.fnmatch(name, p) for p in patterns or ["*"])]
