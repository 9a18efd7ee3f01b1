"""Retries, while the disk is full, what a process must write when it starts or ends.

A coordinator or a syncer at work answers its callers meanwhile (`coordinator.journal`,
`syncer.disk_full`); these writes are before the first call, or after the last.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Generic, TypeVar

from diloco.durable import DiskFull

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_AGAIN_S = 1.0


class _Work(Generic[_T]):
    """Work that is tried until the disk has room for it."""

    done: _T

    def __init__(self, what: str, work: Callable[[], _T]) -> None:
        self._what, self._work, self._is_reported = what, work, False

    def is_tried(self, *, is_last: bool = False) -> bool:
        """Try once; false if the disk is full, which the last try raises."""
        try:
            self.done = self._work()
        except DiskFull as error:
            if is_last:
                raise
            if not self._is_reported:
                self._is_reported = True
                logger.error("%s, %s waits: %s: %s", error.lack, self._what, error.remedy, error)
            return False
        if self._is_reported:
            logger.info("%s can be written again", self._what)
        return True


def retry_disk_full(what: str, work: Callable[[], _T], sleep: Callable[[float], None]) -> _T:
    """Do as `retry_disk_full_async`, in a program without an event loop.

    Args:
        what: Is written, in words.
        work: As for `retry_disk_full_async`.
        sleep: Waits so many seconds; what it raises ends the wait.
    """
    tried = _Work(what, work)
    while not tried.is_tried():
        sleep(_AGAIN_S)
    return tried.done


async def retry_disk_full_async(
    what: str, work: Callable[[], _T], *, given_up: asyncio.Event | None = None
) -> _T:
    """Return what `work` returns, done again each second while the disk is full.

    Args:
        what: Is written, in words.
        work: Is done in a thread, and may be done any number of times; a failed one has changed
            nothing that counts.
        given_up: Once set, room is waited for no more; None: for ever.

    Raises:
        DiskFull: If there is no room and `given_up` is set.
    """
    tried = _Work(what, work)
    while not await asyncio.to_thread(
        tried.is_tried, is_last=given_up is not None and given_up.is_set()
    ):
        await asyncio.sleep(_AGAIN_S)
    return tried.done
