"""The state diagrams of PROTOCOL.md, drawn from the tables that the machines go through.

`python -m diloco.protocol.diagrams` prints what stands between the marks of diloco/PROTOCOL.md:
rounds, outcomes of contributions, and leases.

Source: PROTOCOL.md, "State machines".
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from diloco.protocol.island.ledger import OUTCOMES, SENT
from diloco.protocol.rounds.terms import Phase
from diloco.protocol.rounds.transitions import TRANSITIONS
from diloco.protocol.run.leases import TRANSITIONS as LEASES
from diloco.protocol.run.leases import Lease

_MERGED = {True: "v+1, or the newest", False: "nothing"}


def diagrams() -> str:
    """Draw rounds, outcomes and leases, in Markdown with Mermaid's state diagrams."""
    rounds = [(t.before, t.event, t.after) for t in TRANSITIONS]
    leases = [(before, event, then) for (before, event), then in LEASES.items() if then != before]
    return "\n\n".join(
        [
            "### A fragment's round",
            _diagram(Phase.UNFOUNDED, rounds),
            _rows(("phase", "event", "then", "when"), TRANSITIONS),
            "### A contribution",
            _rows(
                ("outcome", "merges", "counters, alpha = 0", "alpha > 0", "since the send"),
                [
                    (
                        o.verdict,
                        _MERGED[o.merges],
                        o.counters,
                        o.mixed,
                        o.mixed if o.verdict in SENT else o.counters,
                    )
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
