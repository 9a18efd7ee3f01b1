"""Does the work on tensors and files, which never runs on an event loop.

Source: PROTOCOL.md, "Calls do not wait for merges".
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

_T = TypeVar("_T")
_Item = TypeVar("_Item")


class Worker(Protocol):
    """Runs tensor and file work off the event loop."""

    async def run(self, work: Callable[[], _T]) -> _T:
        """Return what `work()` returns, or raise what it raises."""


@dataclass(frozen=True, slots=True)
class Workers:
    """Who does which work of a syncer, so that no call waits for a merge, or for another's work.

    Args:
        of_fragment: Makes the worker of one fragment, which does all that changes its versions, one
            piece at a time: merges, commits, expiries, founding, repair.
        notes: Writes the little that calls wait for: incarnations and orders; a piece at a time.
        checks: Verifies and spools what arrives, several pieces at once.
        reads: Reads older versions from the disk, several pieces at once.
        pins: Keeps versions for checkpoints, one piece at a time.
        transfers: Keeps what islands give each other of inner optimizers.
        lanes: Merges lanes side by side, for all fragments.
    """

    of_fragment: Callable[[], Worker]
    notes: Worker
    checks: Worker
    reads: Worker
    pins: Worker
    transfers: Worker
    lanes: Executor = field(default_factory=partial(ThreadPoolExecutor, 1, "lanes"))

    @classmethod
    def all_by(cls, worker: Worker) -> Workers:
        """Have one worker do everything."""
        return cls(lambda: worker, worker, worker, worker, worker, worker)


class Bounded:
    """A worker of which no more than so many of its kind work at once."""

    def __init__(self, worker: Worker, at_once: asyncio.Semaphore) -> None:
        """Assign only; all workers of its kind have the same `at_once`."""
        self._worker, self._at_once = worker, at_once

    async def run(self, work: Callable[[], _T]) -> _T:
        """See `Worker`."""
        async with self._at_once:
            return await self._worker.run(work)


def side_by_side(
    executor: Executor, work: Callable[[_Item], _T], items: Iterable[_Item]
) -> list[_T]:
    """Do work on each item in the threads of an executor; returns the results in their order.

    When it raises what one raises, none of the others is at work any more.
    """
    begun = [executor.submit(work, item) for item in items]
    try:
        return [each.result() for each in begun]
    finally:
        for each in begun:
            each.cancel()
        wait(begun)
