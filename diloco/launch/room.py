"""Room on the disk of a process that starts or ends: what it must write waits for it, and says so.

A coordinator or a syncer at work answers its callers meanwhile (`coordinator.journal`,
`rounds.room`); these writes are before the first call, or after the last.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from diloco.durable import DiskFull

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_AGAIN_S = 1.0


async def having_room(
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
    is_told = False
    while True:
        try:
            done = work()
        except DiskFull as error:
            if given_up is not None and given_up.is_set():
                raise
            if not is_told:
                is_told = True
                logger.error("the disk is full, %s waits for room: make some: %s", what, error)
            await asyncio.sleep(_AGAIN_S)
        else:
            if is_told:
                logger.info("there is room on the disk again for %s", what)
            return done
