"""Counts what was drawn from the slots of the text, and adds all draws up: pure.

The text is divided for ever into V slots (`run.max_islands`): of the documents of a source after
the held-out ones, slot s has numbers s, s + V, s + 2 V, ... The sequences of a slot are one stream
in a fixed order, no matter which island draws it, so what a slot has given is one number a source,
and an island that goes on with it needs that position and nothing else. An island holds a set of
slots and draws from the one that is furthest behind.

The unit of a draw is a sequence. The standard library is drawn by hash and with replacement: there
nothing repeats by identity, the source is one, "stdlib", and the unit is the slot step, a batch of
the slot. A slot that changes hands goes on at the last position that its holder told: what that one
drew afterwards is drawn twice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from operator import attrgetter
from typing import Any


@dataclass(frozen=True, slots=True)
class SlotPosition:
    """How far a slot has been drawn.

    Attributes:
        drawn: Draws by source; a source that is left out has given none.
        cursor: JSON values from which its stream is opened there; empty at its start.
    """

    drawn: Mapping[str, int] = field(default_factory=dict)
    cursor: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_drawn(self) -> int:
        """Draws from all sources."""
        return sum(self.drawn.values())

    def as_json(self) -> dict[str, Any]:
        """Return JSON values for `from_json`."""
        return {"drawn": dict(self.drawn), "cursor": dict(self.cursor)}

    @classmethod
    def from_json(cls, values: Any) -> SlotPosition:
        """Read what somebody else has said.

        Raises:
            ValueError: If it is no position.
        """
        # Any: it comes from elsewhere.
        if not isinstance(values, dict) or values.keys() != {"drawn", "cursor"}:
            raise ValueError("a position has drawn and cursor")
        drawn, cursor = values["drawn"], values["cursor"]
        if not isinstance(drawn, dict) or not isinstance(cursor, dict):
            raise ValueError("drawn and cursor are objects")
        counts = drawn.values()
        if not all(type(n) is int and n >= 0 for n in counts) or sum(counts) >= 2**63:
            raise ValueError("drawn has numbers from 0 on, in all less than 2^63")
        return cls(drawn, cursor)


def furthest_behind(drawn: Mapping[int, int]) -> int:
    """Choose the slot to draw from: the one with the fewest draws, of several the first.

    Args:
        drawn: Slot -> draws so far; not empty.
    """
    return min(drawn, key=lambda slot: (drawn[slot], slot))


@dataclass(frozen=True, slots=True)
class Holding:
    """What one start of an island has drawn from one slot in a row.

    Attributes:
        timeline: In which it drew.
        slot: The slot.
        begun: Draws by source at which it took the slot.
        ended: Draws by source that it came to.
    """

    timeline: int
    slot: int
    begun: Mapping[str, int]
    ended: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Account:
    """What the draws from one source came to.

    `trained` is all that were trained on, `repeated` those of them that had been trained on before,
    `skipped` what nobody trained on though later ones were: trained - repeated + skipped is how far
    the source was gone through. `abandoned` is drawn besides: beyond where a resume went back to.
    """

    trained: int
    repeated: int
    skipped: int
    abandoned: int = 0


def account(holdings: Iterable[Holding]) -> dict[str, Account]:
    """Add up who has drawn what.

    For each slot and source with intervals [b_i, e_i), of those of earlier timelines only what lies
    before the least b of a later one, the rest being abandoned:

        trained  = sum_i (e_i - b_i)
        repeated = trained - |union|
        skipped  = max(e_i, b_i) - min(b_i) - |union|

    What lies before the first b_i was not of these holdings: a run that took up another's weights
    and cursor begins there.

    Args:
        holdings: Of all islands, in any order; none gives an empty account. Of a slot that a later
            timeline has not taken up nothing is abandoned.

    Returns:
        Source -> account, sorted by source.
    """
    held: dict[int, list[Holding]] = {}
    for holding in holdings:
        held.setdefault(holding.slot, []).append(holding)
    accounts: dict[str, Account] = {}
    for of_slot in held.values():
        for source in {source for each in of_slot for source in (*each.begun, *each.ended)}:
            sums = zip(
                astuple(accounts.get(source, Account(0, 0, 0))),
                astuple(_account(of_slot, source)),
                strict=True,
            )
            accounts[source] = Account(*map(sum, sums))
    return dict(sorted(accounts.items()))


def _account(holdings: Iterable[Holding], source: str) -> Account:
    """Add up the draws of one slot from one source."""
    spans: list[tuple[int, int]] = []
    abandoned, left_at = 0, math.inf
    of_timeline = attrgetter("timeline")
    newest_first = sorted(holdings, key=of_timeline, reverse=True)
    for _, group in itertools.groupby(newest_first, key=of_timeline):
        together = list(group)
        for each in together:
            if source in each.begun or source in each.ended:
                begun, ended = each.begun.get(source, 0), each.ended.get(source, 0)
                stands = int(min(max(begun, ended), left_at))
                if stands >= begun:
                    spans.append((begun, stands))
                abandoned += max(0, ended - max(begun, stands))
        left_at = min(left_at, *(each.begun.get(source, 0) for each in together))
    return _add_up(spans, abandoned)


def _add_up(spans: Sequence[tuple[int, int]], abandoned: int) -> Account:
    trained = repeated = skipped = 0
    reached = min((begun for begun, _ in spans), default=0)
    for begun, ended in sorted(spans):
        trained += ended - begun
        repeated += max(0, min(reached, ended) - begun)
        skipped += max(0, begun - reached)
        reached = max(reached, ended)
    return Account(trained, repeated, skipped, abandoned)
