"""Makes what calls decide durable, then true: many share a transaction, and none holds the loop.

A decision says which entries follow from the membership as it stands. What the calls of a moment
decide is decided in their order on a copy of it, each on top of those before; that is written as
one transaction; then the membership takes it over, and they are answered. Calls that come
meanwhile share the next one. So the membership, from which everything is answered, never has
anything that a restarted coordinator would not know; and a transaction that fails has changed
nothing, and all that it was of are to be repeated.

Source: PROTOCOL.md, "Durable before answered".
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from diloco.coordinator.audit_log import audit_entries_of
from diloco.coordinator.journal import AuditEntry, Journal, RoundRow
from diloco.protocol.run.membership import Decide, Membership


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """What one call asks to be made durable; `done` is set once it is, or cannot be."""

    decisions: tuple[Decide, ...]
    rounds: tuple[RoundRow, ...]
    told: tuple[AuditEntry, ...]
    done: asyncio.Future[None]


class Changes:
    """All changes of one run's membership."""

    def __init__(
        self, membership: Membership, journal: Journal, *, on_made: Callable[[int], None]
    ) -> None:
        """Assign only.

        Args:
            membership: That is changed.
            journal: Where that is durable first.
            on_made: Called after each transaction, with the number of versions in it that
                contradict what is indexed.
        """
        self._membership = membership
        self._journal = journal
        self._on_made = on_made
        self._asked: list[_Asked] = []
        self._writing: asyncio.Task[None] | None = None

    async def make(
        self,
        *decisions: Decide,
        rounds: Iterable[RoundRow] = (),
        told: Iterable[AuditEntry] = (),
    ) -> None:
        """Return once it is durable and true; at once where nothing follows from what is durable.

        Args:
            decisions: Each is taken on top of those before; how often does not matter.
            rounds: To index.
            told: For the audit log, besides what it keeps of the entries.

        Raises:
            DiskFull: If there is no room for it: nothing has changed.
        """
        rounds, told = tuple(rounds), tuple(told)
        if rounds or told or any(decide(self._membership) for decide in decisions):
            await asyncio.shield(self.begin(*decisions, rounds=rounds, told=told))

    def begin(
        self,
        *decisions: Decide,
        rounds: Iterable[RoundRow] = (),
        told: Iterable[AuditEntry] = (),
    ) -> asyncio.Future[None]:
        """Do as `make`, with the next transaction, whether anybody waits for that or not."""
        done = asyncio.get_running_loop().create_future()
        done.add_done_callback(lambda _: done.exception())  # perhaps nobody waits for it any more
        self._asked.append(_Asked(decisions, tuple(rounds), tuple(told), done))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())
        return done

    async def settled(self) -> None:
        """Return once all that was asked for so far is durable, or could not be."""
        if self._writing is not None:
            await asyncio.wait([self._writing])

    async def _write(self) -> None:
        while self._asked:
            asked, self._asked = self._asked, []
            try:
                entries, told = await self._decided(asked)
                rounds = [row for each in asked for row in each.rounds]
                num_conflicts = 0
                if entries or rounds or told:
                    num_conflicts = await self._journal.commit(entries, rounds, told)
                self._membership.apply(entries)
                self._on_made(num_conflicts)
            except Exception as error:  # each caller gets it
                for each in asked:
                    each.done.set_exception(error)
            else:
                for each in asked:
                    each.done.set_result(None)

    async def _decided(self, asked: list[_Asked]) -> tuple[list[tuple[str, str]], list[AuditEntry]]:
        """Decide one after the other; who asks for what cannot be decided gets that error."""
        entries, told = list[tuple[str, str]](), list[AuditEntry]()
        fork = self._membership.forked()
        for each in asked:
            await asyncio.sleep(0)  # a thousand calls may have come at once
            try:
                for decide in each.decisions:
                    new = decide(fork)
                    while new:
                        entries += new
                        told += audit_entries_of(new)
                        fork.apply(new)
                        new = fork.follow_ups(new)
            except Exception as error:
                each.done.set_exception(error)
                asked.remove(each)
                return await self._decided(asked)  # without the half of it
            told += each.told
        return entries, told
