"""Rounds under any history: kills, late lanes, new starts, declines, in any order."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from diloco.protocol.rounds.state import FragmentRounds
from diloco.protocol.rounds.terms import (
    Admission,
    Close,
    DropLanes,
    Inclusion,
    Instruction,
    LaneArrival,
    Lost,
    Opened,
    OutcomeKind,
    PastRound,
    Phase,
    RecordExpiry,
    Roster,
    RoundKey,
    RoundRules,
)
from diloco.protocol.rounds.timing import MeasuredTiming, StepTimes, TimingRules
from diloco.protocol.rounds.transitions import TRANSITIONS, RoundEvent

ISLANDS = ("a", "b", "c")
TIMING = TimingRules(
    inner_steps_per_round=4,
    overlap_steps=2,
    grace_share=0.5,
    grace_cap_s=5.0,
    deadline_floor_s=1.0,
    deadline_cap_s=10.0,
)

Identity = tuple[RoundKey, str, int]
Move = tuple[Phase, RoundEvent, Phase]


class Watched(FragmentRounds):
    """Rounds whose moves are noted; a phase that changes in another way is a defect."""

    moves: set[Move]
    _event: RoundEvent | None = None

    @property  # type: ignore[override]
    def phase(self) -> Phase:
        return self._phase

    @phase.setter
    def phase(self, phase: Phase) -> None:
        if hasattr(self, "_phase"):
            assert self._event is not None, f"{self._phase} became {phase} besides the table"
            self.moves.add((self._phase, self._event, phase))
        self._phase = phase

    def _move(self, event: RoundEvent) -> None:
        self._event = event
        super()._move(event)
        self._event = None


class AnyHistory(RuleBasedStateMachine):
    """Islands, a syncer that may be killed at any moment, and time, in any order.

    What is durable is kept apart: the version, the next attempt, the outcomes of past rounds and
    the incarnations. A kill forgets all else. `moves` are those of all histories.
    """

    moves: ClassVar[set[Move]] = set()
    lanes = Bundle("lanes")

    @initialize(
        quorum=st.sampled_from([None, 2]),
        grace_s=st.sampled_from([0.0, 5.0]),
        most_expired=st.sampled_from([3, 99, 99, 99]),
    )
    def begin(self, quorum: int | None, grace_s: float, most_expired: int) -> None:
        self.rules = RoundRules(
            ISLANDS,
            2,
            10.0,
            min_contributions=quorum,
            grace_s=grace_s,
            max_expired_in_a_row=most_expired,
        )
        self.retained = 10**6
        self.may_be_lost = most_expired == 3
        self.steps: StepTimes | None = None
        self.start()

    def start(self) -> None:
        self.now = 0.0
        self.live: tuple[str, ...] = ISLANDS
        self.fenced: dict[str, int] = {}
        self.is_finishing = self.is_over = False
        self.durable_included: dict[str, Inclusion] = {}
        self.durable_version, self.durable_attempt = 0, 0
        self.durable_past: dict[int, PastRound] = {}
        self.incarnations = dict.fromkeys(ISLANDS, 1)
        self.ends: dict[Identity, OutcomeKind] = {}
        self.sent: set[Identity] = set()
        self.counted: set[tuple[int, str]] = set()
        self.bytes_of: dict[Identity, dict[int, bytes]] = {}
        self.pending: list[Instruction] = []
        self.restart()

    def orders(self) -> Roster:
        return Roster(self.live, self.fenced)

    def least(self, close: Close) -> int:
        """How many contributions this close needs."""
        return self.rules.min_contributions or len(ISLANDS) - len(close.refused)

    def restart(self) -> None:
        self.pending = []
        self.verifying: list[LaneArrival] = []
        self.overtaken: list[LaneArrival] = []  # still verified when their attempt closed
        timing = self.steps and MeasuredTiming(TIMING, self.steps, self.now)
        self.rounds = Watched(0, 0, self.rules, timing)
        self.rounds.moves = self.moves
        self.perform(self.rounds.set_roster(self.orders(), self.now))
        if self.is_finishing:
            self.rounds.finishing()
        if self.is_over:
            self.rounds.end()
        for island, incarnation in self.incarnations.items():
            self.rounds.granted(island, incarnation, self.now)
        self.perform(
            self.rounds.founded(
                self.durable_version,
                self.durable_attempt,
                self.durable_past,
                self.now,
                last_included=self.durable_included,
            )
        )

    def perform(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Close() | RecordExpiry():
                    assert not self.pending, "one durable write at a time"
                    self.pending.append(instruction)
                    self.overtaken += self.verifying
                    self.verifying = []
                case DropLanes(key, island, incarnation):
                    self.bytes_of.pop((key, island, incarnation), None)
                case Lost():  # a restart of the syncer, after which it counts again
                    assert self.rules.max_expired_in_a_row in (None, 3)
                    assert self.rounds.phase is Phase.LOST
                    assert self.rounds.next_wake == math.inf

    @rule(
        target=lanes,
        island=st.sampled_from(ISLANDS),
        is_flush=st.booleans(),
        is_stale=st.booleans(),
        tokens=st.integers(1, 3),
    )
    def send(self, island: str, is_flush: bool, is_stale: bool, tokens: int) -> object:
        """An island makes a contribution; its lanes arrive whenever `deliver` takes them."""
        key = self.rounds.key
        if is_stale and key.version:
            key = replace(key, version=key.version - 1, attempt=0)
        arrival = LaneArrival(
            key, island, self.incarnations[island], 0, b"", tokens, 1, 1, is_flush
        )
        return multiple(
            *(replace(arrival, lane_id=i, digest=f"{island}{tokens}{i}".encode()) for i in (0, 1))
        )

    @rule(arrival=lanes)
    def arrive(self, arrival: LaneArrival) -> None:
        """Whatever was sent, whenever."""
        self.deliver(arrival)

    def deliver(self, arrival: LaneArrival) -> None:
        """A lane arrives: once, twice, late, of an older start."""
        identity = (arrival.key, arrival.island, arrival.incarnation)
        judged = self.rounds.admit(arrival)
        admission, instructions = self.rounds.lane_received(arrival, self.now)
        assert admission is judged
        if admission is Admission.ACCEPTED:
            self.sent.add(identity)
            self.bytes_of.setdefault(identity, {})[arrival.lane_id] = arrival.digest
        is_old = arrival.incarnation < self.incarnations[arrival.island]
        assert (admission is Admission.FENCED) == is_old
        self.perform(instructions)

    @rule(arrival=lanes)
    def arrive_unverified(self, arrival: LaneArrival) -> None:
        """All of a lane is here, maybe not for the first time: does it count? Nobody knows yet."""
        arrival = replace(arrival)  # each call makes its own
        is_accepted = self.rounds.admit(arrival) is Admission.ACCEPTED
        is_in_time = is_accepted and self.now <= self.rounds._ends_at
        (self.verifying if is_in_time else self.overtaken).append(arrival)
        self.rounds.lane_arrived(arrival, self.now)

    @rule(island=st.sampled_from(ISLANDS))
    def send_whole_unverified(self, island: str) -> None:
        """A whole contribution that is still to be verified: hardly ever by chance."""
        rounds = self.rounds
        for n in (0, 1):
            digest = f"{island}{n}".encode()
            self.arrive_unverified(
                LaneArrival(
                    rounds.key, island, self.incarnations[island], n, digest, 1, 1, 1,
                    rounds.current.takes_flush,
                )
            )  # fmt: skip

    @precondition(lambda self: self.verifying or self.overtaken)
    @rule(number=st.integers(0, 5), is_cut=st.booleans())
    def verify(self, number: int, is_cut: bool) -> None:
        arrivals = self.verifying or self.overtaken
        arrival = arrivals.pop(number % len(arrivals))
        if is_cut:
            self.perform(self.rounds.lane_given_up(arrival, self.now))
        else:
            self.deliver(arrival)

    def held_up(self) -> set[str]:
        """Who came whole, in time, and is not verified."""
        rounds, held = self.rounds, set()
        for island in set(rounds.current.members) - set(rounds.current.left):
            start = self.incarnations[island]
            lanes = {v.lane_id for v in self.verifying if is_of(v, rounds.key, island, start)}
            came = rounds.current.contributions.get(island)
            verified = came.lanes.keys() if came else set()
            if lanes - verified and len(lanes | verified) == 2:
                held.add(island)
        return held

    @invariant()
    def an_attempt_is_held_up_by_what_came_whole_and_by_nothing_else(self) -> None:
        if self.rounds.is_open:
            assert self.rounds.current.is_held_up == bool(self.held_up())

    @invariant()
    def an_open_attempt_has_nothing_of_a_start_that_is_fenced(self) -> None:
        rounds = self.rounds
        if rounds.is_open:
            fenced = rounds.participants.is_fenced
            held = rounds.current.contributions
            assert not [i for i, c in held.items() if fenced(i, c.incarnation)]
            staying = set(rounds.current.members) - set(rounds.current.left)
            assert not [i for i in staying if fenced(i, rounds.participants.incarnations[i])]

    @rule(is_verified_first=st.booleans())
    def guard_refuses_while_a_lane_is_verified(self, is_verified_first: bool) -> None:
        """All that came is refused, and the attempt goes on: hardly ever by chance."""
        rounds = self.rounds
        is_fresh = (
            rounds.phase is Phase.OPEN
            and not rounds.current.contributions
            and not rounds.current.left
        )
        if not is_fresh or len(rounds.current.members) < 3 or self.rules.min_contributions != 1:
            return
        first, *_, last = rounds.current.members
        key, flush = rounds.key, rounds.current.takes_flush
        sent = [
            LaneArrival(key, last, self.incarnations[last], n, b"%d" % n, 1, 1, 1, flush)
            for n in (0, 1)
        ]
        self.arrive_unverified(sent[0])
        self.send_whole({first})
        self.wait(5.1)
        if rounds.phase is not Phase.CLOSING:
            return
        if is_verified_first:
            self.verify(len(self.overtaken) - 1, is_cut=False)
        self.write(is_killed=False, is_broken=True, outlier="c", is_rejected=True)
        self.deliver(sent[1])

    @rule(islands=st.sets(st.sampled_from(ISLANDS), min_size=1))
    def send_whole(self, islands: set[str]) -> None:
        """Contributions arrive undisturbed: without these hardly a round would close."""
        for island in sorted(islands):
            if island in self.rounds.current.contributions or not self.rounds.is_open:
                continue
            key, incarnation = self.rounds.key, self.incarnations[island]
            is_flush = self.rounds.current.takes_flush
            for lane_id in (0, 1):
                digest = f"{island}{lane_id}".encode()
                self.deliver(
                    LaneArrival(key, island, incarnation, lane_id, digest, 1, 1, 1, is_flush)
                )

    @rule(arrival=lanes)
    def decline(self, arrival: LaneArrival) -> None:
        self.sent.add((arrival.key, arrival.island, arrival.incarnation))
        reason = "declined: it says so"
        self.perform(
            self.rounds.refused(arrival.key, arrival.island, arrival.incarnation, reason, self.now)
        )

    @rule(island=st.sampled_from(ISLANDS))
    def start_again(self, island: str) -> None:
        self.incarnations[island] += 1
        self.perform(self.rounds.granted(island, self.incarnations[island], self.now))

    @rule(seconds=st.sampled_from([0.1, 3.0, 11.0]))
    def wait(self, seconds: float) -> None:
        held = self.held_up()
        self.now += seconds
        if held:
            assert not self.rounds.tick(self.now), f"{held} came whole and in time"
        elif self.now >= self.rounds.next_wake:
            self.perform(self.rounds.tick(self.now))

    @precondition(lambda self: self.pending)
    @rule(
        is_killed=st.booleans(),
        is_broken=st.booleans(),
        is_rejected=st.booleans(),
        outlier=st.sampled_from(ISLANDS),
    )
    def write(
        self, is_killed: bool, is_broken: bool, outlier: str, is_rejected: bool = False
    ) -> None:
        """The durable write ends; the syncer may die before it tells anybody."""
        instruction = self.pending.pop()
        version = self.rounds.version
        match instruction:
            case Close(key, contributors) if is_broken and is_rejected:
                refused = {c.island: "guard" for c in contributors}
                self.perform(self.rounds.rejected(key, refused, self.now))
                return
            case Close(key) if is_broken:
                self.perform(self.rounds.result_broken(key, "not finite", self.now))
                return
            case Close(key, contributors, _, refused):
                self.check_close(instruction)
                self.durable_version, self.durable_attempt = key.version + 1, 0
                names = {c.island for c in contributors}
                rejected = {outlier: "norm"} if outlier in names and len(names) > 2 else {}
                who = frozenset(
                    (c.island, c.incarnation) for c in contributors if c.island not in rejected
                )
                self.durable_past[key.version] = PastRound(key.attempt, who, refused, rejected)
                for old in [v for v in self.durable_past if v <= key.version - self.retained]:
                    del self.durable_past[old]
                counted = {
                    island: Inclusion(incarnation, key.version, key.attempt)
                    for island, incarnation in who
                }
                self.durable_included = {**self.durable_included, **counted}
                tell = functools.partial(self.rounds.committed, rejected=rejected)
                if self.is_finishing and instruction.is_flush:
                    self.is_over = True
                    self.rounds.end()
            case RecordExpiry(key):
                self.durable_attempt = key.attempt + 1
                tell = self.rounds.expiry_recorded
            case _:
                raise AssertionError(instruction)
        assert self.rounds.version == version, "nothing moves before the write has ended"
        if is_killed:
            self.restart()
        else:
            self.perform(tell(key, self.now))
            self.rounds.past.forget_before(self.durable_version - self.retained)

    def check_close(self, close: Close) -> None:
        names = [c.island for c in close.contributors]
        assert names == sorted(names)
        assert names
        assert not set(names) & set(close.refused)
        assert len(names) >= self.least(close)
        for contributor in close.contributors:
            assert (close.key.version, contributor.island) not in self.counted, "counted twice"
            self.counted.add((close.key.version, contributor.island))
            held = self.bytes_of[close.key, contributor.island, contributor.incarnation]
            assert contributor.lane_digests == (held[0], held[1])

    @precondition(lambda self: self.may_be_lost and self.rounds.version > 1)
    @rule()
    def nothing_can_be_used(self) -> None:
        """Three rounds in a row whose results are of no use end the run."""
        for _ in range(3):
            self.wait(11.0)
            self.send_whole(set(ISLANDS))
            self.wait(11.0)
            if self.pending:
                self.write(is_killed=False, is_broken=True, outlier="c")
            if self.pending:
                self.write(is_killed=False, is_broken=False, outlier="c")

    @rule()
    def kill(self) -> None:
        self.restart()

    @invariant()
    def every_contribution_has_at_most_one_end(self) -> None:
        for identity in self.sent:
            outcome = self.rounds.outcome(*identity)
            if self.is_forgotten(identity):
                # What nobody remembers is told alike whether it expired or came too late; an
                # island hears of its newest one, and it was counted, or it was not.
                if identity in self.newest_sent() and identity in self.ends:
                    was_included = self.ends[identity] is OutcomeKind.INCLUDED
                    assert outcome is not None
                    assert (outcome.kind is OutcomeKind.INCLUDED) == was_included, identity
                continue
            before = self.ends.get(identity)
            if outcome is None:
                # Only a refusal, which ends nothing before its round does, can be forgotten.
                assert before in (None, OutcomeKind.REFUSED), identity
                continue
            if before is not OutcomeKind.REFUSED:
                assert before in (None, outcome.kind), identity
            self.ends[identity] = outcome.kind

    def is_forgotten(self, identity: Identity) -> bool:
        version = identity[0].version
        return version < self.rounds.version and version not in self.rounds.past.by_base

    def newest_sent(self) -> set[Identity]:
        """Give what is asked about: by the newest start of each island, of its newest round."""
        newest: dict[str, Identity] = {}
        for identity in sorted(self.sent, key=lambda sent: (sent[2], sent[0])):
            newest[identity[1]] = identity
        return set(newest.values())

    @invariant()
    def the_machine_stands_where_the_durable_truth_does(self) -> None:
        assert self.rounds.version == self.durable_version
        assert self.rounds.attempt == self.durable_attempt
        assert self.rounds.next_wake > self.now or self.rounds.phase is Phase.WAITING

    @invariant()
    def what_is_over_has_an_end(self) -> None:
        for key, island, incarnation in self.sent:
            if (key.version, key.attempt) < (self.rounds.version, self.rounds.attempt):
                assert self.rounds.outcome(key, island, incarnation) is not None


class MembersComeAndGo(AnyHistory):
    """The same where islands come, go, lapse and are kicked, and times are measured."""

    @initialize(quorum=st.integers(1, 3), min_members=st.integers(1, 2), retained=st.integers(1, 2))
    def begin(self, quorum: int, min_members: int, retained: int) -> None:  # type: ignore[override]
        self.rules = RoundRules(
            ISLANDS,
            2,
            10.0,
            min_contributions=quorum,
            max_expired_in_a_row=None,
            min_members=min_members,
        )
        self.retained = retained
        self.steps = StepTimes()
        self.is_paused, self.may_be_lost = False, retained == 1
        self.start()

    def orders(self) -> Roster:
        return Roster(self.live, self.fenced, self.is_paused)

    @rule(islands=st.sets(st.sampled_from(ISLANDS), min_size=1))
    def round_trip(self, islands: set[str]) -> None:
        """What mostly happens: all step, a round opens, some answer, it ends and is written."""
        for island in ISLANDS:
            self.step(island, 1.0)
        self.is_paused = False
        self.roster(set(ISLANDS))
        self.wait(11.0)
        self.send_whole(islands)
        self.wait(11.0)
        if self.pending:
            self.write(is_killed=False, is_broken=False, outlier="c")

    @rule(island=st.sampled_from(ISLANDS[:2]))
    def quorum_goes(self, island: str) -> None:
        """Two make a quorum, and one of them starts again in the grace: hardly ever by chance."""
        self.policy(2)
        for each in ISLANDS:
            self.step(each, 1.0)
        self.is_paused = False
        self.roster(set(ISLANDS))
        self.wait(11.0)
        self.send_whole(set(ISLANDS[:2]))
        self.start_again(island)

    @rule(island=st.sampled_from(ISLANDS), step_s=st.sampled_from([0.5, 1.0, 2.0]))
    def step(self, island: str, step_s: float) -> None:
        assert self.steps is not None
        self.steps.stepped(island, step_s)

    @rule(live=st.sets(st.sampled_from(ISLANDS)))
    def roster(self, live: set[str]) -> None:
        self.live = tuple(live)
        self.perform(self.rounds.set_roster(self.orders(), self.now))

    @rule(is_paused=st.booleans())
    def pause(self, is_paused: bool) -> None:
        self.is_paused = is_paused
        self.perform(self.rounds.set_roster(self.orders(), self.now))

    @rule(quorum=st.sampled_from([None, 1, 2, 3]))
    def policy(self, quorum: int | None) -> None:
        """An operator sets another quorum: what is open keeps its own."""
        before = self.rounds.rules.min_contributions
        self.rules = replace(self.rules, min_contributions=quorum)
        is_between = self.rounds.is_between
        self.perform(self.rounds.set_rules(self.rules, TIMING, self.now))
        assert self.rounds.rules.min_contributions == (quorum if is_between else before)

    @rule()
    def fetch(self) -> None:
        self.rounds.fetched(self.now)

    @precondition(lambda self: self.rounds.version > 1)
    @rule()
    def finish(self) -> None:
        """All tokens are merged: from the next opening on there are flushes only."""
        self.is_finishing = True
        self.rounds.finishing()

    def least(self, close: Close) -> int:
        return 1 if close.is_flush else self.rounds.rules.min_contributions or 1

    @rule(islands=st.sets(st.sampled_from(ISLANDS), min_size=1))
    def kick(self, islands: set[str]) -> None:
        """An operator kicks some, and one report says so; they may join again at once."""
        for island in islands:
            self.fenced[island] = self.incarnations[island] + 1
        self.live = tuple(name for name in self.live if name not in islands)
        self.perform(self.rounds.set_roster(self.orders(), self.now))
        for island in islands:
            self.incarnations[island] += 1

    def perform(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Close):  # who is kicked later was counted
                assert {c.island for c in instruction.contributors} <= set(
                    self.rounds.current.members
                )
                for contributor in instruction.contributors:
                    assert contributor.incarnation >= self.fenced.get(contributor.island, 0)
            if isinstance(instruction, Opened):
                assert not self.is_paused and not self.is_over
                assert instruction.is_flush == self.is_finishing
                here = {i for i in ISLANDS if self.incarnations[i] >= self.fenced.get(i, 0)}
                assert set(instruction.members) <= set(self.live) & here
                least = max(self.rules.min_members or 1, self.rules.min_contributions or 1)
                assert len(instruction.members) >= least
        super().perform(instructions)

    @invariant()
    def nobody_waits_for_ever(self) -> None:
        """What is open with a contribution has an end; what waits knows for what."""
        rounds = self.rounds
        is_waiting = rounds.is_open and not self.held_up()
        if is_waiting and any(len(c.lanes) == 2 for c in rounds.current.contributions.values()):
            assert rounds.next_wake < self.now + 11.0
        assert rounds.phase is not Phase.LOST or rounds._broken_in_a_row >= 3
        if is_waiting and not set(rounds.current.members) & set(self.live):
            assert rounds.next_wake < self.now + 11.0, "nobody is left who could answer"


def is_of(arrival: LaneArrival, key: RoundKey, island: str, incarnation: int) -> bool:
    return (arrival.key, arrival.island, arrival.incarnation) == (key, island, incarnation)


class LongHistories(MembersComeAndGo):
    """The same, 10,000 steps of it and more."""


def run_histories(*histories: type[AnyHistory], max_examples: int, num_steps: int) -> None:
    """Run histories; together they make every move of the table, and no other."""
    AnyHistory.moves.clear()

    for history in histories:
        run_state_machine_as_test(
            history,
            settings=settings(
                max_examples=max_examples,
                stateful_step_count=num_steps,
                deadline=None,
                derandomize=True,
            ),
        )

    listed = {(t.before, t.event, t.after) for t in TRANSITIONS}
    assert AnyHistory.moves == listed, f"never made: {listed - AnyHistory.moves}"


def test_any_history_makes_the_moves_of_the_table_and_no_other() -> None:
    run_histories(AnyHistory, MembersComeAndGo, max_examples=300, num_steps=40)


@pytest.mark.slow
def test_long_histories() -> None:
    run_histories(AnyHistory, LongHistories, max_examples=200, num_steps=80)
