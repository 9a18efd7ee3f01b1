"""The syncer of a run under the virtual clock: the project's own rounds, fed with simulated time.

Who is counted, when a round opens, closes and expires is decided by `diloco.protocol.rounds.state`
and `diloco.protocol.rounds.timing`; what an island learns by the real poll messages and `is_news`.
Here is only when things happen: one worker a syncer, whose time `HostCosts` says. What the real
syncer would take in its place is said in `islands`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import simpy

from diloco.outer.fragments import Fragment
from diloco.protocol.island.ledger import Outstanding
from diloco.protocol.rounds.messages import outcome_message
from diloco.protocol.rounds.state import FragmentRounds
from diloco.protocol.rounds.terms import (
    Admission,
    Close,
    Instruction,
    LaneArrival,
    Lost,
    Published,
    RecordExpiry,
    Roster,
    RoundKey,
)
from diloco.protocol.rounds.timing import MeasuredTiming, StepTimes
from diloco.protos import fragment_pb2 as wire
from diloco.simulations.engine.clock import Engine, Signal, Steps, WakeUps
from diloco.simulations.engine.timeline import Span
from diloco.simulations.runs.costs import HostCosts
from diloco.syncer.polls import is_news
from diloco.syncer.rules import SyncerRules

_EPOCH = 1


@dataclass(slots=True)
class _Served:
    """A fragment at its syncer."""

    fragment: Fragment
    rounds: FragmentRounds
    timing: MeasuredTiming | None
    merged_tokens: int = 0
    sent_at_inner_step: int = 0
    is_flush: bool = False
    contributors: tuple[str, ...] = ()
    unfetched: set[str] = field(default_factory=set)
    shown: tuple[object, ...] = ()
    members: frozenset[str] = frozenset()
    #: As those see it who are not members of the open attempt, and as those who are.
    states: tuple[wire.FragmentState, ...] = (wire.FragmentState(),) * 2


@dataclass(frozen=True, slots=True)
class Publication:
    """A version that was published, and when its round opened, closed, and was durable.

    `tokens` are those that it counted.
    """

    fragment_id: int
    version: int
    contributors: tuple[str, ...]
    tokens: int
    opened_s: float
    closed_s: float
    published_s: float
    is_flush: bool


class SimulatedSyncer:
    """Serves the rounds of some fragments.

    `publications` are in order; `lost` says why the run cannot go on, once it cannot.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        fragments: Iterable[Fragment],
        rules: SyncerRules,
        costs: HostCosts,
        *,
        num_fragments: int,
        record: Callable[[Span], None],
        threads: int = 1,
        written: float = 1.0,
    ) -> None:
        """Found version 0 of every fragment, with all islands of the rules at work.

        `threads` verify and merge the lanes of a fragment side by side; `written` is the share of a
        whole record that a version writes, on average.
        """
        self._engine, self.name, self._costs, self._record = engine, name, costs, record
        self._rules, self._threads, self._written = rules, threads, written
        self.changed = Signal(engine)
        self.publications: list[Publication] = []
        self.num_expired = 0
        self.lost = ""
        self._steps = StepTimes()
        self._live: set[str] = set()
        self._worker = simpy.Resource(engine, 1)
        self._alarms = WakeUps(engine)
        self._served: dict[int, _Served] = {}
        for fragment in fragments:
            own = rules.of_fragment(fragment, num_fragments)
            timing = None
            if own.timing is not None:
                timing = MeasuredTiming(own.timing, self._steps, engine.now)
            p = fragment.fragment_id
            rounds = FragmentRounds(p, rules.timeline, own.rounds, timing)
            self._served[p] = _Served(fragment, rounds, timing)

    def found(self, here: Sequence[str], islands: Sequence[str]) -> None:
        """Begin: version 0 is durable, and those that are here of all islands hold their grants."""
        self._live = set(here if self._rules.min_members is not None else islands)
        now = self._engine.now
        for served in self._served.values():
            served.rounds.set_roster(Roster(tuple(sorted(self._live))), now)
            for island in here:
                self._perform(served, served.rounds.granted(island, 1, now))
            self._perform(served, served.rounds.founded(0, 0, {}, now))

    @property
    def fragment_ids(self) -> tuple[int, ...]:
        """Fragments that it serves."""
        return tuple(self._served)

    @property
    def is_over(self) -> bool:
        """Whether every fragment has merged the run's tokens, where these end it."""
        return all(served.rounds.is_over for served in self._served.values())

    def states(self, island: str) -> list[wire.FragmentState]:
        """What an island sees of every fragment."""
        return [served.states[island in served.members] for served in self._served.values()]

    @property
    def is_steady(self) -> bool:
        """Whether what is published stays the newest until somebody contributes, or for good."""
        return all(served.rounds.is_open or served.is_flush for served in self._served.values())

    # -- what islands ask ------------------------------------------------------------------------

    def stepped(self, island: str, step_s: float) -> None:
        """Record how long an island's inner steps take."""
        if self._rules.timing is not None and step_s > 0:
            self._steps.stepped(island, step_s)
            for served in self._served.values():
                self._perform(served, served.rounds.tick(self._engine.now))

    def granted(self, island: str, incarnation: int) -> None:
        """Record a start of an island."""
        self._steps.forget(island)
        for served in self._served.values():
            self._perform(served, served.rounds.granted(island, incarnation, self._engine.now))

    def live(self, island: str, *, is_live: bool) -> None:
        """Record that an island's lease ended, or began; a scheduled run waits for it anyway."""
        if self._rules.min_members is None:
            return
        self._live = self._live | {island} if is_live else self._live - {island}
        for served in self._served.values():
            served.unfetched &= self._live
            roster = Roster(tuple(sorted(self._live)))
            self._perform(served, served.rounds.set_roster(roster, self._engine.now))

    def answer(
        self, request: wire.PollRequest, island: str, incarnation: int, keys: Iterable[RoundKey]
    ) -> wire.PollReply | None:
        """Answer a poll; None: there is nothing new, and it waits for `changed`."""
        reply = wire.PollReply(syncer_epoch=_EPOCH, fragments=self.states(island))
        for key in keys:
            served = self._served.get(key.fragment_id)
            outcome = served and served.rounds.outcome(key, island, incarnation)
            if outcome:
                reply.outcomes.append(outcome_message(outcome))
        contributed = [
            p for p, s in self._served.items() if s.rounds.current.has_whole(island, incarnation)
        ]
        return reply if is_news(request, reply, contributed) else None

    def receive(
        self, island: str, incarnation: int, sent: Outstanding, spread_s: float = 0.0
    ) -> Generator[simpy.Event, Any, Admission]:  # what it is sent is of the events' own types
        """Take a contribution that has arrived whole; returns the answer to its last lane.

        Lanes that came one after another, over the last `spread_s`, were verified meanwhile.
        """
        served = self._served[sent.key.fragment_id]
        fragment = served.fragment
        n, num_lanes = fragment.padded_numel, len(fragment.lanes)
        verify_s = self._costs.of(n, num_lanes).verify_s * n / min(self._threads, num_lanes)
        yield from self._work(left_over(verify_s, spread_s, num_lanes))
        admission = Admission.ACCEPTED
        for lane in served.fragment.lanes:
            arrival = LaneArrival(
                sent.key,
                island,
                incarnation,
                lane.lane_id,
                b"",
                sent.weight_tokens,
                sent.weight_steps,
                sent.sent_at_inner_step,
                sent.is_flush,
            )
            admission, instructions = served.rounds.lane_received(arrival, self._engine.now)
            self._perform(served, instructions)
        return admission

    def refuse(self, island: str, incarnation: int, key: RoundKey, reason: str) -> None:
        """Take a decline."""
        served = self._served[key.fragment_id]
        now = self._engine.now
        self._perform(served, served.rounds.refused(key, island, incarnation, reason, now))

    def fetched(self, island: str, fragment_id: int, version: int) -> None:
        """Record that an island was sent a version whole."""
        served = self._served[fragment_id]
        if served.rounds.version == version and island in served.unfetched:
            served.unfetched.discard(island)
            if not served.unfetched:
                served.rounds.fetched(self._engine.now)

    # -- what rounds decide ----------------------------------------------------------------------

    def _state(self, served: _Served, *, is_member: bool) -> wire.FragmentState:
        rounds = served.rounds
        return wire.FragmentState(
            fragment_id=served.fragment.fragment_id,
            version=rounds.version,
            attempt=rounds.attempt,
            is_open=rounds.is_open,
            is_founded=True,
            is_member=is_member,
            takes_flush=rounds.is_open and rounds.current.takes_flush,
            contributors=served.contributors,
            sent_at_inner_step=served.sent_at_inner_step,
            is_flush=served.is_flush,
            merged_tokens=served.merged_tokens,
        )

    def _perform(self, served: _Served, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Close():
                    self._engine.process(self._merge(served, instruction))
                case RecordExpiry():
                    self.num_expired += 1
                    self._engine.process(self._expire(served, instruction))
                case Lost():
                    self.lost = self.lost or instruction.reason
                    self._engine.has_stopped = True
                case Published():
                    pass
        rounds = served.rounds
        self._alarms.set(
            rounds.fragment_id,
            rounds.next_wake,
            lambda now: self._perform(served, rounds.tick(now)),
        )
        shown = (
            rounds.version,
            rounds.attempt,
            rounds.phase,
            len(rounds.current.left),
            rounds.is_over,
        )
        if shown != served.shown:  # most lanes that arrive change nothing that islands see
            served.shown = shown
            served.members = frozenset(rounds.current.members if rounds.is_open else ())
            served.states = tuple(self._state(served, is_member=m) for m in (False, True))
            self.changed.set()

    def _merge(self, served: _Served, close: Close) -> Steps:
        rounds, n = served.rounds, served.fragment.padded_numel
        costs = self._costs.of(n, len(served.fragment.lanes))
        opened_s, closed_s = rounds.opened_at, self._engine.now
        num_contributions = len(close.contributors)
        seconds = costs.decode_s * num_contributions + costs.outer_s + costs.publish_s
        seconds /= min(self._threads, len(served.fragment.lanes))
        yield from self._work(
            n * (seconds + self._written * costs.commit_s) + costs.commit_round_s,
            served.fragment.fragment_id,
        )
        served.contributors = tuple(each.island for each in close.contributors)
        served.unfetched = set(served.contributors)
        served.sent_at_inner_step = max(each.sent_at_inner_step for each in close.contributors)
        served.is_flush = close.is_flush
        tokens = sum(each.weight_tokens for each in close.contributors)
        served.merged_tokens += tokens
        total = self._rules.total_tokens
        if total and served.merged_tokens >= total:
            rounds.end()
        self.publications.append(
            Publication(
                close.key.fragment_id,
                close.key.version + 1,
                served.contributors,
                tokens,
                opened_s,
                closed_s,
                self._engine.now,
                close.is_flush,
            )
        )
        self._perform(served, rounds.committed(close.key, self._engine.now))

    def _expire(self, served: _Served, expiry: RecordExpiry) -> Steps:
        yield from self._work(self._costs.commit_round_s)
        self._perform(served, served.rounds.expiry_recorded(expiry.key, self._engine.now))

    def _work(self, seconds: float, fragment_id: int | None = None) -> Steps:
        """Have the one worker do something; a span if it is of a fragment."""
        with self._worker.request() as turn:
            yield turn
            began = self._engine.now
            yield self._engine.timeout(seconds)
        if fragment_id is not None:
            self._record(Span(self.name, None, fragment_id, "merge", began, self._engine.now))


def left_over(seconds: float, spread_s: float, num_parts: int) -> float:
    """Give what is left of some work when its last part has come.

    Args:
        seconds: All of it.
        spread_s: Time over which the parts came, one after another.
        num_parts: Of them the last is never done before.
    """
    return seconds - min(spread_s, seconds * (1 - 1 / num_parts))
