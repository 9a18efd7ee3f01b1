"""Decides which rank an island has lost, from what the ranks last said of themselves. Pure.

A rank that hangs, is frozen or died is seen by the others as a collective that does not end, or as
an error of one; neither says who it was.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Sign:
    """What a rank says of itself, about once a second, from a thread that only does that.

    Args:
        beat: Counts the signs of this process.
        host: On which it runs, with its process id.
        inner_step: Completed inner steps.
        where: The line of this package in which its training thread is.
        still_s: Seconds for which neither of them has changed, by its own clock.
        waits_in: The collective that it has waited in for long; empty: in none.
        error: What it failed of by itself.
        has_left: Whether a collective of it has failed, so that it is no culprit.
    """

    beat: int
    host: str
    inner_step: int
    where: str
    still_s: float
    waits_in: str = ""
    error: str = ""
    has_left: bool = False

    def to_json(self) -> str:
        """For the others."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Sign:
        """As another rank has sent it."""
        return cls(**json.loads(text))

    def __str__(self) -> str:
        """Say where it stands, for messages."""
        waits = f", and waits in {self.waits_in}" if self.waits_in else ""
        return (
            f"on {self.host}, after inner step {self.inner_step}, for {self.still_s:.1f} s in "
            f"{self.where}{waits}"
        )


@dataclass(frozen=True, slots=True)
class Seen:
    """A rank as another one sees it.

    Args:
        sign: The last one; None: it has never given any.
        silent_s: For how long no new one came, by the clock of the one that sees it.
    """

    sign: Sign | None
    silent_s: float


def find_culprits(others: Mapping[int, Seen], *, silent_s: float, is_overdue: bool) -> list[int]:
    """Find the ranks that a rank waits for, or that have left it.

    Those that failed by themselves; else those without a sign of life; else, of those that wait in
    no collective themselves, the furthest behind.

    Args:
        others: All other ranks of the island.
        silent_s: From when on a rank counts as frozen or gone.
        is_overdue: Whether this rank has waited for long, so that others should be waiting, too.

    Returns:
        In order; empty where all others wait as well, for a device or a network.
    """
    known = {rank: seen.sign for rank, seen in others.items() if seen.sign is not None}
    if failed := [rank for rank, sign in known.items() if sign.error]:
        return sorted(failed)
    silent = [
        rank
        for rank, seen in others.items()
        if seen.silent_s >= silent_s and not (seen.sign and seen.sign.has_left)
    ]
    if silent or not is_overdue:
        return sorted(silent)
    behind = {
        rank: sign.inner_step
        for rank, sign in known.items()
        if not (sign.waits_in or sign.has_left)
    }
    return sorted(rank for rank, step in behind.items() if step == min(behind.values()))


def describe(seen: Seen, silent_s: float) -> str:
    """Say what is known of a culprit; `silent_s` as for `find_culprits`."""
    if seen.sign is None:
        return "it has given no sign of life since the start"
    if seen.sign.error:
        return f"it failed of {seen.sign.error} ({seen.sign})"
    if seen.silent_s >= silent_s:
        return (
            f"no sign of life for {seen.silent_s:.1f} s, it is frozen, gone or cut off; last seen "
            f"{seen.sign}"
        )
    return f"it lives, and comes to no collective: {seen.sign}"
