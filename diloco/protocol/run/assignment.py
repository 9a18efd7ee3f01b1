"""Assigns fragments to syncers with the first join, and moves them where an operator says so.

    syncers     fragments of each syncer
    moves       {"number": of the last one, "of": {fragment: [from, to, number, former targets]}}

A move is journalled before anybody is told of it. The second syncer copies the fragment out of the
store of the first; once little is lacking that one lets go of it in its own store; the other takes
it into its own, and serves it. A fragment belongs to the first one until the journal says that the
second has it.

A move that is not done can get another target, under a higher number. The one before may have taken
the fragment already: nobody else takes it before the store of that one says that it never will, and
if its store says that it has it, the move goes on from there. So no two stores have a fragment.

Source: PROTOCOL.md, "Fragments and lanes" and "Moves of fragments".
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from diloco.outer.assignment import assign_fragments
from diloco.outer.fragments import Plan
from diloco.protocol.run.admission import Entries

#: Of the journal's entries; a run with one syncer has none.
ASSIGNED, MOVES = "syncers", "moves"


@dataclass(frozen=True, slots=True)
class Move:
    """A move of a fragment that is under way.

    Args:
        source: Syncer that has it.
        target: Syncer that is to have it; the source itself, where it is to stay after all.
        number: Higher than that of any earlier move.
        former: Syncers that it was to go to before, and that may take it yet.
    """

    source: int
    target: int
    number: int
    former: tuple[int, ...] = ()


@dataclass(slots=True)
class FragmentAssignment:
    """Fragments of each syncer of a run.

    Args:
        shares: Name and share of each syncer of the run, in order, from its first start to its end.
        fragments: Of each syncer, as it was decided; empty before the first join, and for the only
            syncer of a run, which has all of them.
        moves: Of each fragment that moves.
        last_move: Number of the last one that was begun.
    """

    shares: Mapping[str, float] = field(default_factory=lambda: {"syncer": 1.0})
    fragments: tuple[tuple[int, ...], ...] = ()
    moves: Mapping[int, Move] = field(default_factory=dict)
    last_move: int = 0

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
            self.last_move = moves["number"]
            self.moves = {
                int(p): Move(source, target, number, tuple(former))
                for p, (source, target, number, former) in moves["of"].items()
            }

    def moving(self, targets: Mapping[int, int]) -> Entries:
        """Begin to move fragments, each to a syncer, or give their moves these targets."""
        number = self.last_move + 1
        begun = dict(self.moves)
        for p, target in targets.items():
            former = set[int]()
            if (before := self.moves.get(p)) is not None:
                former = {*before.former, before.target} - {target}
            begun[p] = Move(self.owner(p), target, number, tuple(sorted(former)))
        return self._moves(begun, number)

    def found(
        self, syncer_id: int, served: Collection[int], withdrawn: Mapping[int, int]
    ) -> Entries:
        """Say what follows from what the store of a syncer has; none where nothing does.

        Args:
            syncer_id: The syncer.
            served: Fragments that it serves.
            withdrawn: Fragment -> number; no move of it before that one is made there any more.
        """
        own, moves = [set(each) for each in self.fragments], dict(self.moves)
        for p, move in self.moves.items():
            source, former = move.source, tuple(n for n in move.former if n != syncer_id)
            has_taken = p in served and syncer_id not in (source, *former)
            if syncer_id in move.former:
                if has_taken:
                    source = syncer_id
                elif withdrawn.get(p, 0) < move.number:
                    continue
                moves[p] = replace(move, source=source, former=former)
            elif syncer_id == move.target and p in served and not former:
                source = syncer_id
                del moves[p]
            own[move.source].discard(p)
            own[source].add(p)
        if moves == self.moves:
            return ()
        return (ASSIGNED, json.dumps([sorted(each) for each in own])), *self._moves(moves)

    def _moves(self, moves: Mapping[int, Move], number: int | None = None) -> Entries:
        said = {p: [m.source, m.target, m.number, m.former] for p, m in moves.items()}
        number = self.last_move if number is None else number
        return ((MOVES, json.dumps({"number": number, "of": said})),)

    def owner(self, fragment_id: int) -> int:
        """Syncer that has a fragment, of several."""
        return next(n for n, own in enumerate(self.fragments) if fragment_id in own)

    @property
    def owners(self) -> list[int]:
        """Syncer of each fragment, of several; none before the first join."""
        return [self.owner(p) for p in range(sum(map(len, self.fragments)))]

    def destination(self, fragment_id: int) -> int:
        """Syncer that has a fragment, or to which it moves."""
        move = self.moves.get(fragment_id)
        return self.owner(fragment_id) if move is None else move.target

    def coming_to(self, syncer_id: int) -> set[int]:
        """Fragments that a syncer has, or that move to it."""
        return {*self.fragments[syncer_id]} | self.taken_by(syncer_id).keys()

    def taken_by(self, syncer_id: int) -> dict[int, Move]:
        """Moves to a syncer, by fragment."""
        return {p: move for p, move in self.moves.items() if move.target == syncer_id}

    def withdrawn_by(self, syncer_id: int) -> dict[int, Move]:
        """Moves that were to a syncer, and that it may make yet, by fragment."""
        return {p: move for p, move in self.moves.items() if syncer_id in move.former}

    def served_by(self, syncer_id: int, plan_json: str, ready: Collection[int]) -> list[int]:
        """Fragments that a syncer is to serve, as soon as it has them.

        What moves from it is not one of them once it is `ready` at the other, which may take it.
        What moved to it before is: it may serve that already, and let go of it while nobody knows.
        """
        moves = self.moves.items()
        leaving = {p for p, m in moves if p in ready and m.target != syncer_id and not m.former}
        return [p for p in self.may_serve(syncer_id, plan_json) if p not in leaving]

    def may_serve(self, syncer_id: int, plan_json: str) -> list[int]:
        """Fragments of which a syncer may speak: that it has still, or may have already."""
        own = {*self.of(syncer_id, plan_json)}
        return sorted(own | self.taken_by(syncer_id).keys() | self.withdrawn_by(syncer_id).keys())

    def elsewhere(self, syncer_id: int) -> list[int]:
        """Fragments that others have, and that do not move to a syncer, nor may have done so."""
        others = (own for n, own in enumerate(self.fragments) if n != syncer_id)
        coming = self.taken_by(syncer_id).keys() | self.withdrawn_by(syncer_id).keys()
        return sorted({p for own in others for p in own} - coming)

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


@functools.lru_cache(maxsize=4)
def _num_fragments(plan_json: str) -> int:
    """Count a plan's fragments; a large plan takes a while to read, and is asked for often."""
    return len(json.loads(plan_json)["fragments"])
