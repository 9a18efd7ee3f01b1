"""Bounds how long a cut waits for islands that report but bring no part of it.

Who is silent loses its lease, and the cut goes on without it (`Cuts.without`); who reports while
its training thread hangs does not. Who says that it writes its part is waited for as long as that
takes, up to a bound: a slow disk is no reason to go without, one that hangs for ever is.

Source: PROTOCOL.md, "Cuts".
"""

from __future__ import annotations

import logging

from diloco.protocol.run.cuts import Cut
from diloco.protocol.run.membership import Change, Membership
from diloco.protos.control_pb2 import CutPart

logger = logging.getLogger(__name__)

#: Seconds that count between two looks, at most: what nobody saw is nobody's delay.
_MOST_COUNTED_S = 1.0
#: Times `transport.unreachable` for which a cut waits for parts that are said to be written.
MOST_WRITING = 16


class CutPatience:
    """Of one run."""

    def __init__(self, membership: Membership, *, change: Change) -> None:
        """Assign only; `change` takes a decision, and makes it durable, then true."""
        self._membership = membership
        self._change = change
        self._writing: set[str] = set()
        self._waits: tuple[Cut | None, tuple[str, ...]] = None, ()
        self._waited_s, self._looked = 0.0, 0.0
        self._number, self._of_cut_s = 0, 0.0

    def reported(self, island: str, part: CutPart) -> None:
        """Record what a report says of a cut."""
        (self._writing.add if part.is_being_written else self._writing.discard)(island)

    async def look(self, now: float, unreachable_s: float) -> None:
        """Go on without those who have brought nothing of a cut for so long.

        Each part that is begun, or comes, begins the time again. After a last cut they count as
        left.

        Raises:
            DiskFull: If there is no room to write it down: it has not happened.
        """
        membership = self._membership
        passed_s, self._looked = min(now - self._looked, _MOST_COUNTED_S), now
        cut = membership.cuts.newest(membership.timeline)
        number = 0 if cut is None else cut.number
        self._of_cut_s = self._of_cut_s + passed_s if number == self._number else 0.0
        self._number = number
        writing = self._writing if self._of_cut_s < MOST_WRITING * unreachable_s else set()
        awaited = tuple(i for i in membership.awaited_in_cut if i not in writing)
        waits = cut, awaited
        self._waited_s = self._waited_s + passed_s if waits == self._waits else 0.0
        self._waits = waits
        if cut is None or not awaited or self._waited_s < unreachable_s:
            return
        logger.warning(
            "cut %d goes on without %s: reports came for %g s (transport.unreachable), and nothing "
            "of the cut; see the log there for what hangs",
            cut.number, ", ".join(awaited), unreachable_s,
        )  # fmt: skip
        if cut.is_last:
            await self._change(
                lambda m: m.members.given_up(i for i in awaited if i in m.awaited_in_cut)
            )
        else:
            await self._change(lambda m: m.cuts.without(m.timeline, writing))
