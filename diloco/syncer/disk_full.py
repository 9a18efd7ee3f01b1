"""Repeats work of a syncer until its disk has room, and says once who waits.

A version or an expiry that finds no room stays under way and is written when there is room;
meanwhile no round opens at its syncer. A caller that cannot be answered durably has to call again.

Source: PROTOCOL.md, "Full disk".
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from diloco.durable import DiskFull
from diloco.protocol.rounds.terms import RoundKey
from diloco.syncer.worker import Worker
from diloco.telemetry.syncer_meter import SyncerMeter

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

#: What the phase of a round says while its version finds no room.
WAITING_FOR_DISK = "waiting for disk"

_AGAIN_S = 1.0


class DiskFullRetry:
    """Repeats work while the disk is full; `waiting` are the fragments whose work is repeated.

    `on_change` is called when the first one begins to wait and when none does any more. `let_go` is
    called whenever room is missing, to free some if it can; it must not block.
    """

    def __init__(
        self,
        meter: SyncerMeter,
        on_change: Callable[[bool], None],
        let_go: Callable[[], None],
    ) -> None:
        """Assign only."""
        self._meter = meter
        self._on_change = on_change
        self._let_go = let_go
        self.waiting: set[int] = set()
        self._refused: RoundKey | None = None

    async def run(
        self, fragment_id: int, worker: Worker, work: Callable[[], _T], *, at_most_s: float = 0.0
    ) -> _T:
        """Return what `work()` returns in a worker, done again while the disk is full.

        Each second; `at_most_s` is more for long work: the wait doubles up to that.
        """
        wait_s = _AGAIN_S
        try:
            while True:
                try:
                    return await worker.run(work)
                except DiskFull as error:
                    if error.is_room:
                        self._let_go()
                    self._lack(fragment_id, error)
                await asyncio.sleep(wait_s)
                wait_s = max(_AGAIN_S, min(2 * wait_s, at_most_s))
        finally:
            self._found(fragment_id)

    def refuse_lane(self, key: RoundKey, error: DiskFull) -> None:
        """Say, once a round, that contributions beyond the spool's memory find no room."""
        if error.is_room:
            self._let_go()
        if key != self._refused:
            self._refused = key
            logger.error("%s, lanes are not taken now, key=%s: %s", error.lack, key, error)

    def _lack(self, fragment_id: int, error: DiskFull) -> None:
        if fragment_id in self.waiting:
            return
        self.waiting.add(fragment_id)
        self._meter.disk_full(fragment_id)
        if len(self.waiting) == 1:
            logger.error(
                "%s, rounds wait: %s, fragment=%d: %s",
                error.lack, error.remedy, fragment_id, error,
            )  # fmt: skip
            self._on_change(True)

    def _found(self, fragment_id: int) -> None:
        if fragment_id not in self.waiting:
            return
        self.waiting.remove(fragment_id)
        self._meter.disk_free(fragment_id)
        if not self.waiting:
            logger.info("what is to be durable can be written again, rounds go on")
            self._on_change(False)
