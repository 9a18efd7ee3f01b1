"""Ends leases of islands that were silent for a term: pure, by the observer's own clock.

Who holds one is durable; when it was last heard of is memory, by a monotonic clock, so that no
jump of the wall clock changes who takes part. An observer that was away, or stood still, was not
there to hear: words that were said to it meanwhile wait in its sockets, and what it missed is
nobody's silence. So of the time between two looks no more counts than a share of the term, however
long it was. One that is gone loses its lease after a few looks all the same, though every look is
late.

Source: PROTOCOL.md, "Leases and clocks".
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum

#: Share of a term that counts between two looks, at most: a look belongs at least so often.
COUNTED_SHARE = 0.25


class Lease(StrEnum):
    """How an island stands in the run."""

    ABSENT = "absent"  # has not joined this timeline
    ACTIVE = "active"  # counts from the next opening on
    LAPSED = "lapsed"  # was not heard of for a term; its next report brings it back
    DRAINING = "draining"  # finishes what is outstanding, then leaves for good
    LEFT = "left"  # for good, unless it is started again
    KICKED = "kicked"  # its starts are refused


class LeaseEvent(StrEnum):
    """What changes how an island stands."""

    JOINED = "joined"
    REPORTED = "reported"
    EXPIRED = "expired"
    FAILED = "failed"
    LEFT = "left"
    DRAINED = "drained"
    KICKED = "kicked"
    READMITTED = "readmitted"


#: Before, what happens, after. `-`: it cannot happen, or is refused, and changes nothing. Where the
#: islands are fixed a failure is not told apart from silence: the lease goes on to its end.
_TABLE = """
event        ABSENT    ACTIVE    LAPSED    DRAINING  LEFT      KICKED
joined       ACTIVE    ACTIVE    ACTIVE    DRAINING  ACTIVE    -
reported     ACTIVE    ACTIVE    ACTIVE    DRAINING  LEFT      -
expired      -         LAPSED    -         LEFT      -         -
failed       -         LAPSED    LAPSED    DRAINING  LEFT      -
left         -         LEFT      LEFT      LEFT      LEFT      -
drained      -         DRAINING  LEFT      DRAINING  LEFT      -
kicked       KICKED    KICKED    KICKED    KICKED    KICKED    KICKED
readmitted   -         -         -         -         -         ABSENT
"""


def _read(table: str) -> dict[tuple[Lease, LeaseEvent], Lease]:
    head, *rows = [line.split() for line in table.strip().splitlines()]
    return {
        (Lease(before.lower()), LeaseEvent(row[0])): Lease(after.lower())
        for row in rows
        for before, after in zip(head[1:], row[1:], strict=True)
        if after != "-"
    }


TRANSITIONS: Mapping[tuple[Lease, LeaseEvent], Lease] = _read(_TABLE)


class Leases:
    """When each island was last heard of.

    Every method is told the time, in seconds of one monotonic clock.
    """

    def __init__(self, term_s: float) -> None:
        """Begin with nobody; `term_s` seconds without a word end a lease, and may be changed."""
        self.term_s = term_s
        self._last_report: dict[str, float] = {}
        self._looked: float | None = None

    def renewed(self, island: str, now: float) -> None:
        """Record a word of an island.

        Where nobody was there, nobody was waited for: the others get a term to come, too.
        """
        if all(now - heard >= self.term_s for heard in self._last_report.values()):
            self.restarted(self._last_report, now)
        self._last_report[island] = now

    def restarted(self, islands: Iterable[str], now: float) -> None:
        """Give everybody a full term: the observer has not been there."""
        self._last_report.update(dict.fromkeys(islands, now))

    def looked(self, now: float) -> None:
        """Record that the observer is there; what it missed is nobody's silence."""
        away_s = 0.0 if self._looked is None else now - self._looked
        if (missed_s := away_s - COUNTED_SHARE * self.term_s) > 0:
            self._last_report = {
                i: min(now, heard + missed_s) for i, heard in self._last_report.items()
            }
        self._looked = now

    def silent_s(self, island: str, now: float) -> float:
        """Seconds since the last word of an island; 0 for one never heard of."""
        return now - self._last_report.get(island, now)

    def left_s(self, island: str, now: float) -> float:
        """Seconds after which the lease of an island ends if it stays silent; at least 0."""
        return max(0.0, self.term_s - self.silent_s(island, now))

    def expired(self, holders: Collection[str], now: float) -> tuple[str, ...]:
        """Name the holders that were silent for a term, sorted."""
        return tuple(sorted(i for i in holders if self.silent_s(i, now) >= self.term_s))
