"""How long a cut waits for islands that report, and bring nothing of it.

Who is silent loses its lease, and the cut goes on without it (`Cuts.without`); who reports while
its training thread hangs does not.

Source: protocol.md section 9.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from diloco.coordinator.admission import Entries
from diloco.coordinator.cuts import Cut
from diloco.coordinator.membership import Membership

logger = logging.getLogger(__name__)

#: Seconds that count between two looks, at most: what nobody saw is nobody's delay.
_MOST_COUNTED_S = 1.0


class CutPatience:
    """Of one run."""

    def __init__(self, membership: Membership, *, keep: Callable[[Entries], None]) -> None:
        """Assign only; `keep` makes what was decided durable, then true."""
        self._membership = membership
        self._keep = keep
        self._waits: tuple[Cut | None, tuple[str, ...]] = None, ()
        self._waited_s, self._looked = 0.0, 0.0

    def look(self, now: float, unreachable_s: float) -> None:
        """Go on without those who have brought nothing of a cut for so long.

        Each part that comes begins the time anew. After a last cut they count as left.

        Raises:
            DiskFull: If there is no room to write it down: it has not happened.
        """
        membership = self._membership
        passed_s, self._looked = min(now - self._looked, _MOST_COUNTED_S), now
        waits = membership.cuts.newest(membership.timeline), membership.awaited_in_cut
        self._waited_s = self._waited_s + passed_s if waits == self._waits else 0.0
        self._waits = cut, awaited = waits
        if cut is None or not awaited or self._waited_s < unreachable_s:
            return
        logger.warning(
            "cut %d goes on without %s: reports came for %g s (transport.unreachable), and nothing "
            "of the cut; see the log there for what hangs",
            cut.number, ", ".join(awaited), unreachable_s,
        )  # fmt: skip
        if cut.is_last:
            self._keep(membership.given_up(awaited))
        else:
            self._keep(membership.cuts.without(membership.timeline, ()))
