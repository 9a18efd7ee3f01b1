"""The moves of a fragment's rounds as one table, and the diagrams that are drawn from tables.

`FragmentRounds` goes from phase to phase through this table alone. `python -m
diloco.rounds.transitions` prints what stands between the marks of diloco/PROTOCOL.md: this
table, that of outcomes (`diloco.sync.ledger`) and that of leases (`diloco.coordinator.leases`).

Source: PROTOCOL.md, "State machines".
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple

from diloco.rounds.terms import Phase


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
        "too many attempts in a row came to nothing; the run ends, nothing published is lost",
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
        "one of the quorum has started anew, was fenced, or contradicted itself",
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
        "the deadline, what came whole by then being verified, or nobody is left who could answer",
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


_MERGED = {True: "v+1, or the newest", False: "nothing"}


def after(before: Phase, event: RoundEvent) -> Phase | None:
    """Give the phase that follows; None: `event` cannot happen in `before`."""
    return _AFTER.get((before, event))


def diagrams() -> str:
    """Draw rounds, outcomes and leases, in Markdown with Mermaid's state diagrams."""
    # Here, for whoever moves through one table needs no other.
    from diloco.coordinator.leases import TRANSITIONS as LEASES
    from diloco.coordinator.leases import Lease
    from diloco.sync.ledger import OUTCOMES

    rounds = [(t.before, t.event, t.after) for t in TRANSITIONS]
    leases = [(before, event, then) for (before, event), then in LEASES.items() if then != before]
    return "\n\n".join(
        [
            "### A fragment's round",
            _diagram(Phase.UNFOUNDED, rounds),
            _rows(("phase", "event", "then", "when"), TRANSITIONS),
            "### A contribution",
            _rows(
                ("outcome", "`outer.late`", "merges", "counters, alpha = 0", "alpha > 0"),
                [
                    (o.verdict, o.late or "any", _MERGED[o.merges], o.counters, o.mixed)
                    for o in OUTCOMES
                ],
            ),
            "### A lease",
            _diagram(Lease.ABSENT, leases),
        ]
    )


def _diagram(first: str, moves: Iterable[tuple[str, str, str]]) -> str:
    events: dict[tuple[str, str], list[str]] = {}
    for before, event, then in moves:
        events.setdefault((before, then), []).append(event)
    arrows = [f"    {a} --> {b}: {', '.join(names)}" for (a, b), names in events.items()]
    return "\n".join(["```mermaid", "stateDiagram-v2", f"    [*] --> {first}", *arrows, "```"])


def _rows(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    cells = [list(head), *(list(row) for row in rows)]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([lines[0], f"| {' | '.join('---' for _ in cells[0])} |", *lines[1:]])


if __name__ == "__main__":
    sys.stdout.write(diagrams() + "\n")
