"""Retries, while the disk is full, what a process must write when it starts or ends.

A coordinator or a syncer at work answers its callers meanwhile (`coordinator.journal`,
`rounds.room`); these writes are before the first call, or after the last.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator
from typing import TypeVar

from diloco.durable import DiskFull

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_AGAIN_S = 1.0


def _tries(
    what: str, work: Callable[[], _T], is_given_up: Callable[[], bool]
) -> Generator[float, None, _T]:
    """Do `work` until there is room; yields the seconds to wait before it is done again."""
    is_told = False
    while True:
        try:
            done = work()
        except DiskFull as error:
            if is_given_up():
                raise
            if not is_told:
                is_told = True
                logger.error("the disk is full, %s waits for room: make some: %s", what, error)
            yield _AGAIN_S
        else:
            if is_told:
                logger.info("there is room on the disk again for %s", what)
            return done


def retry_disk_full(what: str, work: Callable[[], _T], sleep: Callable[[float], None]) -> _T:
    """Do as `retry_disk_full_async`, in a program without an event loop.

    Args:
        what: Is written, in words.
        work: As for `retry_disk_full_async`.
        sleep: Waits so many seconds; what it raises ends the wait.
    """
    tries = _tries(what, work, lambda: False)
    while True:
        try:
            wait_s = next(tries)
        except StopIteration as end:
            done: _T = end.value
            return done
        sleep(wait_s)


async def retry_disk_full_async(
    what: str, work: Callable[[], _T], *, given_up: asyncio.Event | None = None
) -> _T:
    """Return what `work` returns, done again each second while the disk is full.

    Args:
        what: Is written, in words.
        work: May be done any number of times; a failed one has changed nothing that counts.
        given_up: Once set, room is waited for no more; None: for ever.

    Raises:
        DiskFull: If there is no room and `given_up` is set.
    """
    tries = _tries(what, work, lambda: given_up is not None and given_up.is_set())
    while True:
        try:
            wait_s = next(tries)
        except StopIteration as end:
            done: _T = end.value
            return done
        await asyncio.sleep(wait_s)
