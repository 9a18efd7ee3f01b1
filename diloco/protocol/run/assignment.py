"""Assigns fragments to syncers with the first join, and moves them where an operator says so.

    syncers     fragments of each syncer
    moves       {fragment: [from, to]} of the moves under way

A move is journalled before anybody is told of it. The syncer that has the fragment lets go of it in
its own store; the other takes it out of that store into its own, and serves it. A fragment belongs
to the first one until the journal says that the second has it.

Source: PROTOCOL.md, "Fragments and lanes" and "Moves of fragments".
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from diloco.outer.assignment import assign_fragments
from diloco.outer.fragments import Plan
from diloco.protocol.run.admission import Entries

#: Of the journal's entries; a run with one syncer has none.
ASSIGNED, MOVES = "syncers", "moves"


@dataclass(slots=True)
class FragmentAssignment:
    """Fragments of each syncer of a run.

    Args:
        shares: Name and share of each syncer of the run, in order, from its first start to its end.
        fragments: Of each syncer, as it was decided; empty before the first join, and for the only
            syncer of a run, which has all of them.
        moves: Of each fragment that moves, the syncers from and to which it does.
    """

    shares: Mapping[str, float] = field(default_factory=lambda: {"syncer": 1.0})
    fragments: tuple[tuple[int, ...], ...] = ()
    moves: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def num_syncers(self) -> int:
        """How many syncers the run has."""
        return len(tuple(self.shares.values()))

    def decided(self, plan_json: str) -> Entries:
        """Spread the fragments of a new run's plan; no entry where there is nothing to decide.

        Raises:
            ConfigError: If there are more syncers than fragments.
            PlanMismatch: If it is no plan.
        """
        if self.num_syncers == 1:
            return ()
        assigned = assign_fragments(Plan.from_json(plan_json), tuple(self.shares.values()))
        return ((ASSIGNED, json.dumps(assigned)),)

    def apply(self, entries: Mapping[str, str]) -> None:
        """Take over what is durable."""
        if ASSIGNED in entries:
            self.fragments = tuple(map(tuple, json.loads(entries[ASSIGNED])))
        if MOVES in entries:
            moves = json.loads(entries[MOVES])
            self.moves = {int(p): (source, target) for p, (source, target) in moves.items()}

    def moving(self, targets: Mapping[int, int]) -> Entries:
        """Begin to move fragments, each to a syncer; none of them moves already."""
        begun = {p: (self.owner(p), target) for p, target in targets.items()}
        return _moves({**self.moves, **begun})

    def moved(self, fragment_ids: Collection[int]) -> Entries:
        """End the moves of fragments that the other syncer has durably; none where there is none.

        One whose move is not under way (any more) stays where it is.
        """
        if not (ended := {p: self.moves[p] for p in fragment_ids if p in self.moves}):
            return ()
        own = [set(each) for each in self.fragments]
        for p, (source, target) in ended.items():
            own[source].discard(p)
            own[target].add(p)
        left = {p: move for p, move in self.moves.items() if p not in ended}
        return (ASSIGNED, json.dumps([sorted(each) for each in own])), *_moves(left)

    def owner(self, fragment_id: int) -> int:
        """Syncer that has a fragment, of several."""
        return next(n for n, own in enumerate(self.fragments) if fragment_id in own)

    @property
    def owners(self) -> list[int]:
        """Syncer of each fragment, of several; none before the first join."""
        return [self.owner(p) for p in range(sum(map(len, self.fragments)))]

    def taken_by(self, syncer_id: int) -> dict[int, int]:
        """Fragments that a syncer is to take, each with the syncer that has it still."""
        return {p: source for p, (source, target) in self.moves.items() if target == syncer_id}

    def served_by(self, syncer_id: int, plan_json: str, heard: Collection[int]) -> list[int]:
        """Fragments that a syncer is to serve, as soon as it has them.

        What moves from it is not one of them once the other syncer is `heard` of.
        """
        leaving = {p for p, (_, target) in self.moves.items() if target in heard}
        kept = [p for p in self.of(syncer_id, plan_json) if p not in leaving]
        return sorted([*kept, *self.taken_by(syncer_id)])

    def elsewhere(self, syncer_id: int) -> list[int]:
        """Fragments that others have, and that do not move to a syncer."""
        others = (own for n, own in enumerate(self.fragments) if n != syncer_id)
        return sorted({p for own in others for p in own} - self.taken_by(syncer_id).keys())

    def is_given_up(self, syncer_id: int) -> bool:
        """Whether a syncer is to have no fragment any more: all that it has move."""
        own = self.fragments[syncer_id]
        return bool(own) and self.moves.keys() >= set(own) and not self.taken_by(syncer_id)

    def of(self, syncer_id: int, plan_json: str) -> list[int]:
        """Give the fragments of one syncer; none before the first join."""
        if self.fragments:
            return list(self.fragments[syncer_id])
        if not plan_json or self.num_syncers > 1:
            return []
        return list(range(_num_fragments(plan_json)))

    def of_all(self, plan_json: str) -> list[int]:
        """Give the fragments of the run; none before the first join."""
        return sorted(p for n in range(self.num_syncers) for p in self.of(n, plan_json))


def _moves(moves: Mapping[int, tuple[int, int]]) -> Entries:
    return ((MOVES, json.dumps(moves)),)


@functools.lru_cache(maxsize=4)
def _num_fragments(plan_json: str) -> int:
    """Count a plan's fragments; a large plan takes a while to read, and is asked for often."""
    return len(json.loads(plan_json)["fragments"])
