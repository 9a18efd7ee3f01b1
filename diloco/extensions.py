"""Codecs, merge rules and transports that other installed packages add, found by entry points.

A package declares what it adds in its pyproject.toml,

    [project.entry-points."diloco.codecs"]
    third = "acme.codecs:THIRD"

and wherever it is installed a run file may say `uplink_codec = "third"`. What it must be is said by
`diloco.compression.base.Codec`, `diloco.outer.combination.Coefficients` and
`diloco.transport.contracts.TransportKind`. A name that two packages add, or one that diloco has
itself, is refused where it is used.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from diloco.errors import ConfigError

#: Groups of entry points, and what one of each is called.
KINDS: Mapping[str, str] = {
    "diloco.codecs": "codec",
    "diloco.merge_rules": "merge rule",
    "diloco.transports": "transport",
}
_LISTED = "diloco config --explain lists what this machine has"


@dataclass(frozen=True, slots=True)
class Extension:
    """What a package adds: `name` may stand in a run file.

    Attributes:
        group: One of `KINDS`.
        name: Of the entry point.
        package: Name and version of the distribution, such as "acme 1.2".
        entry_point: Where it is in that package.
    """

    group: str
    name: str
    package: str
    entry_point: EntryPoint

    def __str__(self) -> str:
        """Say it to people."""
        return f"{KINDS[self.group]} {self.name!r} of {self.package} ({self.entry_point.value})"


def extensions(group: str) -> tuple[Extension, ...]:
    """Return what installed packages add to a group, sorted by name and package."""
    return _found(group, tuple(sys.path))


@functools.cache
def _found(group: str, path: tuple[str, ...]) -> tuple[Extension, ...]:
    found = []
    for point in entry_points(group=group):
        package = f"{point.dist.name} {point.dist.version}" if point.dist else "an unnamed package"
        found.append(Extension(group, point.name, package, point))
    return tuple(sorted(found, key=lambda each: (each.name, each.package)))


def extension(group: str, name: str, own: Collection[str]) -> Extension | None:
    """Return what `name` stands for; None: what diloco itself calls so.

    Args:
        group: One of `KINDS`.
        name: As a run file says it.
        own: Names that diloco itself has.

    Raises:
        ConfigError: If there is nothing of that name, or more than one thing.
    """
    added = [each for each in extensions(group) if each.name == name]
    what = KINDS[group]
    if added and (len(added) > 1 or name in own):
        owners = [*(["diloco"] if name in own else []), *(each.package for each in added)]
        raise ConfigError(
            f"{what} {name!r} is added by {' and '.join(owners)}, so that nobody knows which is "
            f"meant: uninstall one ({added[-1].package.split()[0]}), or ask its authors for "
            f"another name"
        )
    if not added and name not in own:
        others = [each.name for each in extensions(group)]
        raise ConfigError(
            f"{what} {name!r} is unknown: choose one of {', '.join(sorted({*own, *others}))}; "
            f"one of another package is known where that package is installed ({_LISTED})"
        )
    return added[0] if added else None


def load(found: Extension) -> Any:
    """Import what a package adds; `Any`, since each group has a type of its own.

    Raises:
        ConfigError: If it cannot be imported.
    """
    try:
        return found.entry_point.load()
    except Exception as error:
        raise ConfigError(
            f"cannot import the {found}: {type(error).__name__}: {error}. Correct or reinstall "
            f"that package"
        ) from error


def check_same_packages(theirs: Mapping[str, str], whose: str) -> None:
    """Check that what a run's file names comes from the same packages here as elsewhere.

    Args:
        theirs: "group name" -> package, as `packages_of` of the other side gives it.
        whose: The other side, for messages.

    Raises:
        ConfigError: Naming each that is missing or of another version, with what to install.
    """
    problems = []
    for key, package in sorted(theirs.items()):
        group, _, name = key.partition(" ")
        here = [each.package for each in extensions(group) if each.name == name]
        if here != [package]:
            needed = "==".join(package.rsplit(" ", 1))
            problems.append(
                f"{KINDS.get(group, group)} {name!r}: {whose} has it of {package}, here it is "
                f"{'of ' + ' and '.join(here) if here else 'missing'}: pip install {needed}"
            )
    if problems:
        raise ConfigError(
            "\n  ".join(
                [
                    f"the run needs what other packages add, and {len(problems)} of it is not the "
                    f"same here:",
                    *problems,
                ]
            )
        )


def packages_of(group: str, names: Collection[str]) -> dict[str, str]:
    """Return "group name" -> package of those names that packages add."""
    return {
        f"{group} {each.name}": each.package for each in extensions(group) if each.name in names
    }
