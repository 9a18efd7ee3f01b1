"""Waiting for what another thread or process does: until it is so, and not for ever."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")
_LOOK_S = 0.01


def wait_until(check: Callable[[], _T], within_s: float = 90.0) -> _T:
    """Return the first true result of `check`."""
    deadline = time.monotonic() + within_s
    while not (result := check()):
        assert time.monotonic() < deadline, f"not within {within_s:g} s"
        time.sleep(_LOOK_S)
    return result
