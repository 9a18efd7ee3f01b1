"""Sees moves of fragments through: a move is done once the store of the second syncer says so.

What syncers say makes the stores be looked at sooner, and decides nothing. One that is to give up
all it has, and is silent, is taken for lost: its chain is closed in its place. So is one that is
silent, and might yet take a fragment that goes to another one now.

Source: PROTOCOL.md, "Moves of fragments".
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from functools import partial
from typing import Protocol

from diloco.coordinator.run_status import SILENT_S, RunStatus
from diloco.durable import DiskFull
from diloco.loop_clock import loop_now
from diloco.objects.store import ObjectLost
from diloco.protocol.run.admission import Entries
from diloco.protocol.run.membership import Change, Membership

logger = logging.getLogger(__name__)

#: Seconds between looks at the stores where a syncer says that it is done, and otherwise. A look
#: lists the log of a chain, and reads what is new there: six lists a minute of each syncer.
_LOOK_S, _QUIET_LOOK_S = 1.0, 10.0


class SyncerStores(Protocol):
    """The stores of a run's syncers, as the object store has them; all calls block."""

    def read(self, syncer_id: int) -> tuple[list[int] | None, dict[int, int]]:
        """Read which fragments a syncer serves, and which moves it does not make any more.

        Returns:
            The fragments; None: it has never said it. And of each fragment of which it makes no
            move before one, the number of that.
        """

    def let_go_for_lost(self, syncer_id: int, fragment_ids: Collection[int]) -> None:
        """Have a syncer serve none of these fragments, nor write anything, any more."""

    def withdraw_for_lost(self, syncer_id: int, moves: Mapping[int, int]) -> None:
        """Have a syncer make no move of some fragments before these; the start it had is fenced."""


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
        looked = loop_now()
        while True:
            await asyncio.sleep(_LOOK_S)
            if self._run_status.is_a_move_done or loop_now() - looked >= _QUIET_LOOK_S:
                await self.look()
                looked = loop_now()

    async def look(self) -> None:
        """End the moves that are done, and let go of fragments for who is lost.

        What the object store does not say of one syncer is looked at again, and holds up no other.
        """
        moves = self._membership.assignment.moves.values()
        former = {n for move in moves for n in move.former}
        targets = {move.target for move in moves}
        looks = [partial(self._find, each) for each in sorted(targets | former)]
        looks += [partial(self._withdraw, each) for each in sorted(former)]
        looks += [partial(self._let_go, each) for each in sorted({move.source for move in moves})]
        for look in looks:
            try:
                await look()
            except (DiskFull, ObjectLost) as error:
                logger.warning("moves of fragments wait: %s", error)

    async def _find(self, syncer_id: int) -> None:
        """Take over what a store says of moves."""
        served, withdrawn = await asyncio.to_thread(self._stores.read, syncer_id)

        def found(membership: Membership) -> Entries:
            return membership.assignment.found(syncer_id, served or (), withdrawn)

        before = self._membership.assignment.moves
        await self._change(found)
        if done := before.keys() - self._membership.assignment.moves.keys():
            logger.info("fragments %s have moved to syncer %d", sorted(done), syncer_id)

    async def _withdraw(self, former: int) -> None:
        """Withdraw moves to a syncer that is lost, and that go to others now."""
        moves = self._membership.assignment.withdrawn_by(former)
        if moves and self._run_status.silent_s(former) >= SILENT_S:
            numbers = {p: move.number for p, move in moves.items()}
            await asyncio.to_thread(self._stores.withdraw_for_lost, former, numbers)
            logger.warning("syncer %d is lost: fragments %s go to others", former, sorted(numbers))

    async def _let_go(self, source: int) -> None:
        """Do it if the syncer is lost; one that has not said yet what it serves has it all."""
        assignment = self._membership.assignment
        if not assignment.is_given_up(source) or self._run_status.silent_s(source) < SILENT_S:
            return
        served, _ = await asyncio.to_thread(self._stores.read, source)
        own = assignment.fragments[source]
        if served is None or not set(own).isdisjoint(served):
            await asyncio.to_thread(self._stores.let_go_for_lost, source, own)
            logger.warning("syncer %d is lost: its fragments go to others", source)
