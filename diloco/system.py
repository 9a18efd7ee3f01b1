"""What the operating system offers: CPUs, and what Linux alone does."""

from __future__ import annotations

import os
import sys

from diloco.errors import ConfigError


def usable_cpus() -> int:
    """Count the CPUs that this process may run on; where that cannot be asked, those there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def require_linux(what: str, otherwise: str) -> None:
    """Refuse, before the work begins, what only Linux can do.

    Args:
        what: What needs it: a setting with its value, a command.
        otherwise: What to do instead.

    Raises:
        ConfigError: If this is another system.
    """
    if sys.platform != "linux":
        raise ConfigError(f"{what} needs Linux, and this is {sys.platform}: {otherwise}")
