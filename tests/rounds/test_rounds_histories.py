"""Rounds under any history: kills, late lanes, new starts, declines, in any order."""

from __future__ import annotations

import functools
from dataclasses import replace

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
)

from diloco.rounds.state import (
    Admission,
    Close,
    DropLanes,
    FragmentRounds,
    Instruction,
    LaneArrival,
    Lost,
    OutcomeKind,
    PastRound,
    Phase,
    RecordExpiry,
    RoundKey,
    RoundRules,
)

ISLANDS = ("a", "b", "c")


class AnyHistory(RuleBasedStateMachine):
    """Islands, a syncer that may be killed at any moment, and time, in any order.

    What is durable is kept apart: the version, the next attempt, the outcomes of past rounds and
    the incarnations. A kill forgets all else.
    """

    lanes = Bundle("lanes")

    @initialize(quorum=st.sampled_from([None, 2]), grace_s=st.sampled_from([0.0, 5.0]))
    def begin(self, quorum: int | None, grace_s: float) -> None:
        self.rules = RoundRules(
            ISLANDS, 2, 10.0, min_contributions=quorum, grace_s=grace_s, max_expired_in_a_row=99
        )
        self.now = 0.0
        self.durable_version, self.durable_attempt = 0, 0
        self.durable_past: dict[int, PastRound] = {}
        self.incarnations = dict.fromkeys(ISLANDS, 1)
        self.ends: dict[tuple[RoundKey, str, int], OutcomeKind] = {}
        self.sent: set[tuple[RoundKey, str, int]] = set()
        self.counted: set[tuple[int, str]] = set()
        self.bytes_of: dict[tuple[RoundKey, str, int], dict[int, bytes]] = {}
        self.pending: list[Instruction] = []
        self.restart()

    def restart(self) -> None:
        self.pending = []
        self.rounds = FragmentRounds(0, 0, self.rules)
        for island, incarnation in self.incarnations.items():
            self.rounds.granted(island, incarnation, self.now)
        self.perform(
            self.rounds.founded(
                self.durable_version, self.durable_attempt, self.durable_past, self.now
            )
        )

    def perform(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Close() | RecordExpiry():
                    assert not self.pending, "one durable write at a time"
                    self.pending.append(instruction)
                case DropLanes(key, island, incarnation):
                    self.bytes_of.pop((key, island, incarnation), None)
                case Lost():
                    raise AssertionError("99 in a row")

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
        self.now += seconds
        if self.now >= self.rounds.next_wake:
            self.perform(self.rounds.tick(self.now))

    @precondition(lambda self: self.pending)
    @rule(is_killed=st.booleans(), is_broken=st.booleans(), outlier=st.sampled_from(ISLANDS))
    def write(self, is_killed: bool, is_broken: bool, outlier: str) -> None:
        """The durable write ends; the syncer may die before it tells anybody."""
        instruction = self.pending.pop()
        version = self.rounds.version
        match instruction:
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
                tell = functools.partial(self.rounds.committed, rejected=rejected)
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

    def check_close(self, close: Close) -> None:
        names = [c.island for c in close.contributors]
        assert names == sorted(names)
        assert names
        assert not set(names) & set(close.refused)
        assert len(names) >= (self.rules.min_contributions or len(ISLANDS) - len(close.refused))
        for contributor in close.contributors:
            assert (close.key.version, contributor.island) not in self.counted, "counted twice"
            self.counted.add((close.key.version, contributor.island))
            held = self.bytes_of[close.key, contributor.island, contributor.incarnation]
            assert contributor.lane_digests == (held[0], held[1])

    @rule()
    def kill(self) -> None:
        self.restart()

    @invariant()
    def every_contribution_has_at_most_one_end(self) -> None:
        for identity in self.sent:
            outcome = self.rounds.outcome(*identity)
            before = self.ends.get(identity)
            if outcome is None:
                # Only a refusal, which ends nothing before its round does, can be forgotten.
                assert before in (None, OutcomeKind.REFUSED), identity
                continue
            if before is not OutcomeKind.REFUSED:
                assert before in (None, outcome.kind), identity
            self.ends[identity] = outcome.kind

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


AnyHistory.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True
)
test_any_history = AnyHistory.TestCase
