"""Patterns of tensor names in a run file: which match, and that none matches nothing.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from diloco.errors import ConfigError


def matches(name: str, pattern: str) -> bool:
    """Match with * and ? only: names may have brackets, which are no class of characters here."""
    return fnmatchcase(name, pattern.replace("[", "[[]"))


def check_match(key: str, rule: str, pattern: str, names: Iterable[str]) -> None:
    """Check that a pattern matches some tensor.

    Args:
        key: Of the run file.
        rule: What is written there.
        pattern: Of it.
        names: Of all tensors.

    Raises:
        ConfigError: Naming the key, the rule and some tensors.
    """
    known = sorted(names)
    if not any(matches(name, pattern) for name in known):
        raise ConfigError(
            f"{key}: {rule!r} matches no parameter of the model, which has "
            f"{', '.join(known[:8])}{', ...' if len(known) > 8 else ''}: mend or remove it"
        )
