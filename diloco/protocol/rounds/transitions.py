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
    REJECTED = "rejected"
    EXPIRED = "expired"
    RECORDED = "recorded"
    LOST = "lost"


class Transition(NamedTuple):
    """One move: where from, by what, where to, and when in words."""

    before: Phase
    event: RoundEvent
    after: Phase
    when: str


#: All there are: before, event, after, and when.
_TABLE = """
unfounded | founded     | waiting  | version 0 is durable, or a restart has found what is
waiting   | opened      | open     | enough islands are here, the floor has passed, and neither a \
pause nor a full disk holds
waiting   | lost        | lost     | too many attempts in a row have expired; the run ends, \
nothing published is lost
open      | quorum      | grace    | `min_contributions` are complete, others may still come
grace     | quorum gone | open     | one of the quorum has started again, was fenced, or \
contradicted itself
open      | closed      | closing  | all that are awaited are complete; a flush of a decoupled \
run: its deadline
grace     | closed      | closing  | the last one came, or the grace window is over and what came \
whole in it is verified
closing   | committed   | waiting  | version v+1 is durable: publish it
closing   | rejected    | open     | the guard of the merge refuses all that came; the attempt \
goes on without it
open      | expired     | expiring | the deadline, what came whole by then being verified, or no \
member is left
closing   | expired     | expiring | the result is not finite, or a codec fails in the merge
expiring  | recorded    | waiting  | the expiry is durable: announce it; attempt + 1 is next
"""


def _read(row: str) -> Transition:
    before, event, then, when = map(str.strip, row.split("|"))
    return Transition(Phase(before), RoundEvent(event), Phase(then), when)


TRANSITIONS = tuple(map(_read, _TABLE.strip().splitlines()))

_AFTER: Mapping[tuple[Phase, RoundEvent], Phase] = {
    (t.before, t.event): t.after for t in TRANSITIONS
}


def after(before: Phase, event: RoundEvent) -> Phase | None:
    """Give the phase that follows; None: `event` cannot happen in `before`."""
    return _AFTER.get((before, event))
