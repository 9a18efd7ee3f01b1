"""Who does the work on tensors and files, which never runs on an event loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

_T = TypeVar("_T")


class Worker(Protocol):
    """Runs tensor and file work off the event loop, one piece at a time."""

    async def run(self, work: Callable[[], _T]) -> _T:
        """Return what `work()` returns, or raise what it raises."""
