"""Sees moves of fragments through: a move is done once the store of the second syncer says so.

What syncers say decides nothing here, so that nothing that an earlier start says late counts. One
that is to give up all it has, and is silent, is taken for lost: its chain is closed in its place.

Source: PROTOCOL.md, "Moves of fragments".
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from functools import partial
from typing import Protocol

from diloco.coordinator.run_status import SILENT_S, RunStatus
from diloco.durable import DiskFull
from diloco.objects.store import ObjectLost
from diloco.protocol.run.admission import Entries
from diloco.protocol.run.membership import Change, Membership

logger = logging.getLogger(__name__)

_LOOK_S = 1.0


class SyncerStores(Protocol):
    """The stores of a run's syncers, as the object store has them; both calls block."""

    def served_from(self, syncer_id: int) -> list[int] | None:
        """Read which fragments a syncer serves; None: it has never said it."""

    def let_go_for_lost(self, syncer_id: int, fragment_ids: Collection[int]) -> None:
        """Have a syncer serve none of its fragments, nor write anything, any more."""


def _moved(fragment_ids: Collection[int], membership: Membership) -> Entries:
    return membership.assignment.moved(fragment_ids)


class FragmentMoves:
    """The moves under way of one run."""

    def __init__(
        self, membership: Membership, run_status: RunStatus, change: Change, stores: SyncerStores
    ) -> None:
        """Assign only; `change` makes what is decided durable, then true."""
        self._membership, self._run_status = membership, run_status
        self._change, self._stores = change, stores

    async def watch(self) -> None:
        """Look for ever."""
        while True:
            await asyncio.sleep(_LOOK_S)
            await self.look()

    async def look(self) -> None:
        """End the moves that are done, and let go of fragments for who is lost.

        What the object store does not say of one syncer is looked at again, and holds up no other.
        """
        moves = self._membership.assignment.moves.values()
        looks = [partial(self._end, target) for target in sorted({target for _, target in moves})]
        looks += [
            partial(self._let_go, source) for source in sorted({source for source, _ in moves})
        ]
        for look in looks:
            try:
                await look()
            except (DiskFull, ObjectLost) as error:
                logger.warning("moves of fragments wait: %s", error)

    async def _end(self, target: int) -> None:
        served = set(await asyncio.to_thread(self._stores.served_from, target) or ())
        if done := served & self._membership.assignment.taken_by(target).keys():
            await self._change(partial(_moved, done))
            logger.info("fragments %s have moved to syncer %d", sorted(done), target)

    async def _let_go(self, source: int) -> None:
        """Do it if the syncer is lost; one that has not said yet what it serves has it all."""
        assignment = self._membership.assignment
        if not assignment.is_given_up(source) or self._run_status.silent_s(source) < SILENT_S:
            return
        if await asyncio.to_thread(self._stores.served_from, source) != []:
            own = assignment.fragments[source]
            await asyncio.to_thread(self._stores.let_go_for_lost, source, own)
            logger.warning("syncer %d is lost: its fragments go to others", source)
