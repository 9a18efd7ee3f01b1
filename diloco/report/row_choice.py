"""Which rows of a bench are measured: those whose names match what --rows says."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Sequence

from diloco.errors import ConfigError


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
