"""The table of all moves from phase to phase; `FragmentRounds` goes by this table alone.

Source: PROTOCOL.md, "State machines".
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from diloco.protocol.rounds.terms import Phase


class RoundEvent(StrEnum):
    """What moves a fragment's rounds from one phase to another."""

    FOUNDED = "founded"
    OPENED = "opened"
    QUORUM = "quorum"
    QUORUM_GONE = "quorum gone"
    CLOSED = "closed"
    COMMITTED = "committed"
    MALFORMED = "malformed"
    EXPIRED = "expired"
    RECORDED = "recorded"
    LOST = "lost"


class Transition(NamedTuple):
    """One move: where from, by what, where to, and when in words."""

    before: Phase
    event: RoundEvent
    after: Phase
    when: str


#: All there are.
TRANSITIONS = (
    Transition(
        Phase.UNFOUNDED,
        RoundEvent.FOUNDED,
        Phase.WAITING,
        "version 0 is durable, or a restart has found what is",
    ),
    Transition(
        Phase.WAITING,
        RoundEvent.OPENED,
        Phase.OPEN,
        "enough islands are here, the floor has passed, and neither a pause nor a full disk holds",
    ),
    Transition(
        Phase.WAITING,
        RoundEvent.LOST,
        Phase.LOST,
        "too many attempts in a row have expired; the run ends, nothing published is lost",
    ),
    Transition(
        Phase.OPEN,
        RoundEvent.QUORUM,
        Phase.GRACE,
        "`min_contributions` are complete, others may still come",
    ),
    Transition(
        Phase.GRACE,
        RoundEvent.QUORUM_GONE,
        Phase.OPEN,
        "one of the quorum has started again, was fenced, or contradicted itself",
    ),
    Transition(
        Phase.OPEN,
        RoundEvent.CLOSED,
        Phase.CLOSING,
        "all that are awaited are complete; a flush of a decoupled run: its deadline",
    ),
    Transition(
        Phase.GRACE,
        RoundEvent.CLOSED,
        Phase.CLOSING,
        "the last one came, or the grace window is over and what came whole in it is verified",
    ),
    Transition(
        Phase.CLOSING, RoundEvent.COMMITTED, Phase.WAITING, "version v+1 is durable: publish it"
    ),
    Transition(
        Phase.CLOSING,
        RoundEvent.MALFORMED,
        Phase.OPEN,
        "nothing that came can be merged: the guard refuses it, or, in an all-reduce, it does not "
        "decode; the attempt goes on without it",
    ),
    Transition(
        Phase.OPEN,
        RoundEvent.EXPIRED,
        Phase.EXPIRING,
        "the deadline, what came whole by then being verified, or no member is left",
    ),
    Transition(
        Phase.CLOSING,
        RoundEvent.EXPIRED,
        Phase.EXPIRING,
        "the result is not finite; all-reduce: a member is missing, or results differ",
    ),
    Transition(
        Phase.EXPIRING,
        RoundEvent.RECORDED,
        Phase.WAITING,
        "the expiry is durable: announce it; attempt + 1 is next",
    ),
)

_AFTER: Mapping[tuple[Phase, RoundEvent], Phase] = {
    (t.before, t.event): t.after for t in TRANSITIONS
}


def after(before: Phase, event: RoundEvent) -> Phase | None:
    """Give the phase that follows; None: `event` cannot happen in `before`."""
    return _AFTER.get((before, event))
