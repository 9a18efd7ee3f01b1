"""The decider of an all-reduce under the virtual clock: the real rounds, and its journal's time.

Who is counted, what is assigned, committed and given up is `diloco.protocol.rounds.allreduce`; here
is only when things happen. One loop serves all calls one after the other, and a durable write holds
it, as in `diloco.coordinator.decider`; what the real one would take is said in `fragment_peer`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import simpy

from diloco.outer.fragments import Fragment
from diloco.protocol.rounds.allreduce import (
    AllReduceRounds,
    Announced,
    Commit,
    DeciderInstruction,
    Prepared,
)
from diloco.protocol.rounds.terms import (
    Admission,
    LaneArrival,
    Lost,
    Outcome,
    RecordExpiry,
    RoundKey,
    RoundRules,
)
from diloco.simulations.engine.clock import Engine, Signal, Steps, WakeUps
from diloco.simulations.runs.actors import Publication
from diloco.simulations.runs.costs import HostCosts
from diloco.syncer.rules import SyncerRules

_T = TypeVar("_T")
#: A call that is answered: yields events, receives their values (hence `Any`: SimPy's own type).
Call = Generator[simpy.Event, Any, _T]


@dataclass(slots=True)
class _Standing:
    """A fragment's machine, and the digest of its newest version."""

    rounds: AllReduceRounds
    state_digest: bytes = b""


@dataclass(frozen=True, slots=True)
class News:
    """What a poll is answered: how fragments stand, which of them are open, and ends."""

    sequence: int
    announced: Mapping[int, Announced]
    is_open: Mapping[int, bool]
    outcomes: Sequence[Outcome]


class SimulatedDecider:
    """Decides the rounds of all fragments; `lost` says why the run cannot go on, once it cannot."""

    def __init__(
        self, engine: Engine, fragments: Iterable[Fragment], rules: SyncerRules, costs: HostCosts
    ) -> None:
        """Found version 0 of every fragment, with the first starts of all islands."""
        self._engine, self._costs = engine, costs
        self.publications: list[Publication] = []
        self.num_expired = 0
        self.lost = ""
        self._sequence = 0
        self._changed = Signal(engine)
        self._loop = simpy.Resource(engine, 1)
        self._alarms = WakeUps(engine)
        self._standings: dict[int, _Standing] = {}
        for fragment in fragments:
            p = fragment.fragment_id
            own = RoundRules(rules.islands, len(fragment.lanes), rules.round_deadline_s)
            standing = self._standings[p] = _Standing(AllReduceRounds(p, rules.timeline, own))
            for island in rules.islands:
                standing.rounds.granted(island, 1, engine.now)
            standing.rounds.rounds.founded(0, 0, {}, engine.now)

    # -- what peers ask --------------------------------------------------------------------------

    def poll(
        self, sequence: int, keys: Sequence[RoundKey], island: str, incarnation: int
    ) -> Call[News]:
        """Wait until there is news for an island that has heard `sequence`.

        The first one tells of its start, which fences the one before.
        """
        with self._loop.request() as turn:
            yield turn
            for standing in self._standings.values():
                now = self._engine.now
                if instructions := standing.rounds.granted(island, incarnation, now):
                    yield from self._perform(standing, instructions)
        while True:
            changed = self._changed.next
            with self._loop.request() as turn:
                yield turn
            outcomes = self._outcomes(keys, island, incarnation)
            if outcomes or sequence != self._sequence:
                break
            yield changed
        return News(
            self._sequence,
            {p: self._announced(standing) for p, standing in self._standings.items()},
            {p: standing.rounds.rounds.is_open for p, standing in self._standings.items()},
            outcomes,
        )

    def declare(self, lanes: Sequence[LaneArrival]) -> Call[tuple[Admission, Outcome | None]]:
        """Record a contribution that its island holds; returns the answer, and its end if any."""
        first = lanes[0]
        standing = self._standings[first.key.fragment_id]
        with self._loop.request() as turn:
            yield turn
            admission, instructions = standing.rounds.declared(lanes, self._engine.now)
            yield from self._perform(standing, instructions)
            rounds = standing.rounds.rounds
            return admission, rounds.outcome(first.key, first.island, first.incarnation)

    def refuse(self, key: RoundKey, island: str, incarnation: int, reason: str) -> Steps:
        """Take a decline."""
        standing = self._standings[key.fragment_id]
        with self._loop.request() as turn:
            yield turn
            now = self._engine.now
            instructions = standing.rounds.refused(key, island, incarnation, reason, now)
            yield from self._perform(standing, instructions)

    def prepared(
        self,
        fragment_id: int,
        island: str,
        incarnation: int,
        assignment_id: bytes,
        prepared: Prepared,
    ) -> Steps:
        """Record that an island has staged a result durably."""
        standing = self._standings[fragment_id]
        with self._loop.request() as turn:
            yield turn
            now = self._engine.now
            instructions = standing.rounds.prepared(
                island, incarnation, assignment_id, prepared, now
            )
            yield from self._perform(standing, instructions)

    def record(self, fragment_id: int) -> Call[bytes]:
        """Give the digest of the newest version of a fragment."""
        with self._loop.request() as turn:
            yield turn
        return self._standings[fragment_id].state_digest

    def _announced(self, standing: _Standing) -> Announced:
        rounds = standing.rounds.rounds
        return Announced(
            rounds.version, standing.state_digest, rounds.attempt, standing.rounds.assignment
        )

    def _outcomes(
        self, keys: Iterable[RoundKey], island: str, incarnation: int
    ) -> tuple[Outcome, ...]:
        found = (
            self._standings[key.fragment_id].rounds.rounds.outcome(key, island, incarnation)
            for key in keys
        )
        return tuple(outcome for outcome in found if outcome is not None)

    # -- what rounds decide ----------------------------------------------------------------------

    def _perform(self, standing: _Standing, instructions: Iterable[DeciderInstruction]) -> Steps:
        """Carry out what a machine decided, in the loop; then tell the news."""
        rounds = standing.rounds
        for instruction in instructions:
            match instruction:
                case Commit():
                    yield from self._commit(standing, instruction)
                case RecordExpiry(key=key):
                    self.num_expired += 1
                    yield self._engine.timeout(self._costs.commit_round_s)
                    follow = rounds.expiry_recorded(key, self._engine.now)
                    yield from self._perform(standing, follow)
                case Lost(reason=reason):
                    self.lost = self.lost or reason
                    self._engine.has_stopped = True
        self._sequence += 1
        self._changed.set()
        self._alarms.set(
            rounds.rounds.fragment_id,
            rounds.next_wake,
            lambda now: self._engine.process(self._tick(standing, now)),
        )

    def _commit(self, standing: _Standing, commit: Commit) -> Steps:
        rounds, assignment = standing.rounds, commit.assignment
        opened_s, closed_s = rounds.rounds.opened_at, rounds.rounds.closed_at
        yield self._engine.timeout(self._costs.commit_round_s)
        standing.state_digest = commit.prepared.state_digest
        self.publications.append(
            Publication(
                assignment.key.fragment_id,
                assignment.key.version + 1,
                tuple(each.island for each in assignment.contributors),
                sum(each.weight_tokens for each in assignment.contributors),
                opened_s,
                closed_s,
                self._engine.now,
                assignment.is_flush,
            )
        )
        yield from self._perform(standing, rounds.committed(assignment.key, self._engine.now))

    def _tick(self, standing: _Standing, when: float) -> Steps:
        with self._loop.request() as turn:
            yield turn
            now = max(self._engine.now, when)
            yield from self._perform(standing, standing.rounds.tick(now))
