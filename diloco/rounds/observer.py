"""What an observer slept through is nobody's silence: pure, with the observer's own clock.

Whoever ends leases looks at its clock again and again. A process that was frozen, or whose machine
stood still, looks late: words that were said to it meanwhile wait in its sockets, and the time
between two looks says nothing of those who are silent. So of that time no more counts than a share
of the term, however long it was: one that is gone loses its lease after a few looks all the same,
though every one of them is late.

Source: protocol.md section 8.
"""

from __future__ import annotations

#: Share of a term that counts between two looks, at most. A look belongs at least this often.
COUNTED_SHARE = 0.25


class Observer:
    """When somebody who ends leases last looked; told the time in seconds of one clock."""

    def __init__(self) -> None:
        """Begin without a look."""
        self._looked: float | None = None

    def missed_s(self, now: float, term_s: float) -> float:
        """Look, and say how many of the seconds since the last look are nobody's silence.

        missed = max(0, now - last look - COUNTED_SHARE * term); 0 at the first look.
        """
        away_s = 0.0 if self._looked is None else now - self._looked
        self._looked = now
        return max(0.0, away_s - COUNTED_SHARE * term_s)
