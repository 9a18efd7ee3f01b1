"""The all-reduce exchange under any history: deaths, restarts of the decider, late and double word.

Every version is applied everywhere or nowhere, and every contribution has one outcome.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import blake3
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from diloco.protocol.rounds.allreduce import (
    AllReduceRounds,
    Announced,
    Assigned,
    Assignment,
    Commit,
    DeciderInstruction,
    Duty,
    Prepared,
    Staged,
    duty,
)
from diloco.protocol.rounds.terms import (
    DropLanes,
    LaneArrival,
    OutcomeKind,
    PastRound,
    RecordExpiry,
    RoundKey,
    RoundRules,
)

ISLANDS = ("a", "b", "c")
NUM_LANES = 2
island_names = st.sampled_from(ISLANDS)


def digest(*parts: object) -> bytes:
    return blake3.blake3(repr(parts).encode()).digest()


@dataclass
class Peer:
    """What survives a kill of an island, and what does not."""

    version: int = 0
    state_digest: bytes = digest("initial")
    staged: Staged | None = None
    incarnation: int = 1
    heard: Announced | None = None
    contribution: tuple[RoundKey, tuple[bytes, ...]] | None = None


@dataclass
class Durable:
    """The decider's journal."""

    digests: list[bytes] = field(default_factory=lambda: [digest("initial")])
    attempt: int = 0
    past: dict[int, PastRound] = field(default_factory=dict)
    incarnations: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ISLANDS, 1))


class AnyHistory(RuleBasedStateMachine):
    """Three islands and a decider, each of which may die between any two events."""

    @initialize()
    def begin(self) -> None:
        self.now = 0.0
        self.peers = {name: Peer() for name in ISLANDS}
        self.durable = Durable()
        self.declared: list[tuple[LaneArrival, ...]] = []
        self.votes: list[tuple[str, int, bytes, Prepared]] = []
        self.ends: dict[tuple[RoundKey, str, int], OutcomeKind] = {}
        self.counted: set[tuple[int, str]] = set()
        self.restart_decider()

    # -- the decider -----------------------------------------------------------------------------

    @rule()
    def restart_decider(self) -> None:
        """What it had not written is as if it had never happened."""
        self.pending: DeciderInstruction | None = None
        rules = RoundRules(ISLANDS, NUM_LANES, 10.0, max_expired_in_a_row=10**6)
        self.decider = AllReduceRounds(0, 0, rules)
        for name, incarnation in self.durable.incarnations.items():
            self.decider.granted(name, incarnation, self.now)
        durable = self.durable
        version = len(durable.digests) - 1
        self.decider.rounds.founded(version, durable.attempt, durable.past, self.now)

    def perform(self, instructions: list[DeciderInstruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Commit | RecordExpiry):
                assert self.pending is None, "one durable write at a time"
                self.pending = instruction

    @rule(is_told=st.booleans())
    def write(self, is_told: bool) -> None:
        """A durable write happens; the decider may die before it hears of it."""
        pending, self.pending = self.pending, None
        if isinstance(pending, Commit):
            assignment = pending.assignment
            for contributor in assignment.contributors:
                counted = (assignment.key.version, contributor.island)
                assert counted not in self.counted, "counted twice"
                self.counted.add(counted)
            self.durable.past[assignment.key.version] = PastRound(
                assignment.key.attempt,
                frozenset((c.island, c.incarnation) for c in assignment.contributors),
                dict(assignment.refused),
            )
            self.durable.digests.append(pending.prepared.state_digest)
            self.durable.attempt = 0
            if is_told:
                self.perform(self.decider.committed(assignment.key, self.now))
        elif isinstance(pending, RecordExpiry):
            self.durable.attempt = pending.key.attempt + 1
            if is_told:
                self.perform(self.decider.expiry_recorded(pending.key, self.now))
        if pending is not None and not is_told:
            self.restart_decider()

    @rule(seconds=st.sampled_from([1.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        if self.pending is None:
            self.perform(self.decider.tick(self.now))

    @rule(data=st.data())
    def hear_declared(self, data: st.DataObject) -> None:
        """Any declaration that was ever sent arrives, perhaps again."""
        if self.declared and self.pending is None:
            lanes = data.draw(st.sampled_from(self.declared))
            _, instructions = self.decider.declared(lanes, self.now)
            self.perform(instructions)

    @rule(data=st.data())
    def hear_vote(self, data: st.DataObject) -> None:
        if self.votes and self.pending is None:
            vote = data.draw(st.sampled_from(self.votes))
            self.perform(self.decider.prepared(*vote, self.now))

    @rule(name=island_names, other=island_names)
    def hear_malformed(self, name: str, other: str) -> None:
        peer = self.peers[name]
        if self.pending is None and peer.heard is not None and peer.heard.assignment is not None:
            voted = name, peer.incarnation, peer.heard.assignment.id
            self.perform(self.decider.broken(*voted, "?", self.now, malformed=other))

    # -- the peers -------------------------------------------------------------------------------

    @rule(name=island_names, loses_disk=st.booleans())
    def restart_island(self, name: str, loses_disk: bool) -> None:
        if self.pending is not None:
            return
        peer, incarnation = self.peers[name], self.durable.incarnations[name] + 1
        self.durable.incarnations[name] = incarnation
        staged = peer.staged and replace(peer.staged, assignment_id=b"")
        self.peers[name] = Peer(peer.version, peer.state_digest, staged, incarnation)
        others = [p for other, p in self.peers.items() if other != name]
        if loses_disk and all(p.version == self.version for p in others):
            self.peers[name] = Peer(-1, b"", None, incarnation)
        self.perform(self.decider.granted(name, incarnation, self.now))

    @rule(name=island_names, weight=st.integers(1, 3))
    def contribute(self, name: str, weight: int) -> None:
        peer, heard = self.peers[name], self.peers[name].heard
        if heard is None or peer.version != heard.version:
            return
        key = RoundKey(0, 0, heard.version, heard.attempt)
        if peer.contribution is not None and peer.contribution[0] == key:
            return
        digests = tuple(digest(name, peer.incarnation, key, n) for n in range(NUM_LANES))
        peer.contribution = key, digests
        self.declared.append(
            tuple(
                LaneArrival(key, name, peer.incarnation, n, digests[n], weight, 1, 1, False)
                for n in range(NUM_LANES)
            )
        )

    @rule(name=island_names)
    def poll(self, name: str) -> None:
        self.peers[name].heard = self.announced()

    @rule(name=island_names)
    def act(self, name: str) -> None:
        """A peer does what follows from the last word it had, which may be an old one."""
        peer = self.peers[name]
        if peer.heard is None:
            return
        todo = duty(peer.version, peer.state_digest, peer.staged, peer.heard)
        assert todo is not Duty.STOP
        match todo:
            case Duty.REDUCE:
                assert peer.heard.assignment is not None
                self.reduce(name, peer.heard.assignment)
            case Duty.REPORT:
                assert peer.staged is not None
                self.vote(name, peer.staged)
            case Duty.PROMOTE:
                assert peer.staged is not None
                peer.version, peer.state_digest = peer.staged.version, peer.staged.state_digest
                peer.staged = None
            case Duty.HEAL:
                self.heal(name, peer.heard)

    def reduce(self, name: str, assignment: Assignment) -> None:
        """Stage the result, if all that it is made from can be had."""
        for contributor in assignment.contributors:
            held = self.peers[contributor.island].contribution
            if held != (assignment.key, contributor.lane_digests):
                return
        peer = self.peers[name]
        made_from = [(c.weight_tokens, c.lane_digests) for c in assignment.contributors]
        result = digest(peer.state_digest, assignment.key, made_from)
        peer.staged = Staged(assignment.key.version + 1, result, assignment.id)
        self.vote(name, peer.staged)

    def vote(self, name: str, staged: Staged) -> None:
        prepared = Prepared((staged.state_digest,), staged.state_digest)
        self.votes.append((name, self.peers[name].incarnation, staged.assignment_id, prepared))

    def heal(self, name: str, heard: Announced) -> None:
        """Take the committed state from a member that has it."""
        for other in self.peers.values():
            if (other.version, other.state_digest) == (heard.version, heard.state_digest):
                self.peers[name].version = other.version
                self.peers[name].state_digest = other.state_digest

    # -- what must hold --------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return len(self.durable.digests) - 1

    def announced(self) -> Announced:
        rounds = self.decider.rounds
        return Announced(
            rounds.version,
            self.durable.digests[rounds.version],
            rounds.attempt,
            self.decider.assignment,
        )

    @invariant()
    def who_holds_a_version_holds_the_committed_one(self) -> None:
        for peer in self.peers.values():
            assert peer.version <= self.version
            assert peer.version < 0 or peer.state_digest == self.durable.digests[peer.version]

    @invariant()
    def a_contribution_has_one_outcome(self) -> None:
        for lanes in self.declared:
            lane = lanes[0]
            end = self.decider.rounds.outcome(lane.key, lane.island, lane.incarnation)
            if end is not None and end.kind is not OutcomeKind.REFUSED:
                identity = (lane.key, lane.island, lane.incarnation)
                assert self.ends.setdefault(identity, end.kind) is end.kind

    def teardown(self) -> None:
        """Once nobody dies any more, all end at one version, and the next is published."""
        if not hasattr(self, "decider"):
            return
        self.write(is_told=True)
        self.time_passes(11.0)
        self.write(is_told=True)
        target = self.version + 1
        for _ in range(6):
            for name in ISLANDS:
                self.poll(name)
                self.act(name)
                self.contribute(name, 1)
            for lanes in {sent[0].island: sent for sent in self.declared}.values():
                _, instructions = self.decider.declared(lanes, self.now)
                self.perform(instructions)
            for vote in {sent[0]: sent for sent in self.votes}.values():
                if self.pending is None:
                    self.perform(self.decider.prepared(*vote, self.now))
            self.write(is_told=True)
        assert self.version >= target
        for name in ISLANDS:
            self.poll(name)
            self.act(name)
        assert {peer.version for peer in self.peers.values()} == {self.version}


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)


def two_closed(now: float = 0.0) -> tuple[AllReduceRounds, Assignment]:
    """Both islands have declared; returns the decider and what it assigned."""
    return closed("ab", now)


def closed(names: str, now: float = 0.0) -> tuple[AllReduceRounds, Assignment]:
    """All islands have declared; returns the decider and what it assigned."""
    decider = AllReduceRounds(0, 0, RoundRules(tuple(names), 1, 10.0))
    for name in names:
        decider.granted(name, 1, now)
    decider.rounds.founded(0, 0, {}, now)
    key, found = decider.rounds.key, None
    for name in names:
        lane = LaneArrival(key, name, 1, 0, digest(name), 1, 1, 1, False)
        _, instructions = decider.declared((lane,), now)
        found = next((i.assignment for i in instructions if isinstance(i, Assigned)), found)
    assert found is not None
    return decider, found


def prepared(name: str) -> Prepared:
    return Prepared((digest(name),), digest(name))


def test_all_members_with_one_digest_commit() -> None:
    decider, assignment = two_closed()

    first = decider.prepared("a", 1, assignment.id, prepared("same"), 1.0)
    last = decider.prepared("b", 1, assignment.id, prepared("same"), 2.0)

    assert first == []
    assert last == [Commit(assignment, prepared("same"))]
    assert decider.tick(100.0) == [], "decided: no deadline any more"


def test_different_results_are_never_committed() -> None:
    decider, assignment = two_closed()
    decider.prepared("a", 1, assignment.id, prepared("one"), 1.0)

    end = decider.prepared("b", 1, assignment.id, prepared("other"), 2.0)

    assert [type(i) for i in end] == [RecordExpiry]


@pytest.mark.parametrize("is_broken", [False, True], ids=["another-result", "none"])
@pytest.mark.parametrize("order", ["abc", "bca", "cab"])
def test_what_one_of_three_has_staged_alone_keeps_nobody_from_a_version(
    order: str, is_broken: bool
) -> None:
    decider, assignment = closed("abc")
    if is_broken:
        again = decider.broken("b", 1, assignment.id, "not finite", 1.0)[-1]
        assert isinstance(again, Assigned)
        assignment = again.assignment
        assert [c.island for c in assignment.contributors] == ["a", "c"], "it reduces no lane"
    ends = []
    for name in order:
        if name == "b" and is_broken:
            ends.append(decider.broken("b", 1, assignment.id, "not finite", 1.0))
        else:
            staged = prepared("other" if name == "b" else "same")
            ends.append(decider.prepared(name, 1, assignment.id, staged, 1.0))

    assert ends == [[], [], [Commit(assignment, prepared("same"))]]


def test_where_no_result_is_that_of_most_the_attempt_expires_as_soon_as_that_is_known() -> None:
    for names, votes, num_needed in (
        ("abc", ("one", "two", "three"), 3),
        ("abcd", ("one", "one", "two", "two"), 4),
        ("abcd", ("one", "two", "three"), 3),
    ):
        decider, assignment = closed(names)
        ends = []
        for name, vote in zip(names, votes, strict=False):
            ends += decider.prepared(name, 1, assignment.id, prepared(vote), 1.0)
            assert bool(ends) == (name == names[num_needed - 1]), (names, votes, name)
        assert [type(end) for end in ends] == [RecordExpiry]


def test_a_result_that_most_cannot_use_expires_the_attempt() -> None:
    decider, first = closed("abc")
    second = decider.broken("a", 1, first.id, "not finite", 1.0)[-1]
    assert isinstance(second, Assigned)
    third = decider.broken("b", 1, second.assignment.id, "not finite", 1.0)[-1]
    assert isinstance(third, Assigned)

    assert decider.broken("a", 1, third.assignment.id, "not finite", 1.0) == []
    (end,) = decider.broken("b", 1, third.assignment.id, "not finite", 1.0)

    assert isinstance(end, RecordExpiry)
    assert end.broken_in_a_row == 1


def test_who_calls_two_others_malformed_is_refused_itself() -> None:
    decider, assignment = closed("abc")
    again = decider.broken("a", 1, assignment.id, "NaN", 1.0, malformed="b")[-1]
    assert isinstance(again, Assigned)

    last = decider.broken("a", 1, again.assignment.id, "NaN", 2.0, malformed="c")[-1]

    assert isinstance(last, Assigned)
    assert [c.island for c in last.assignment.contributors] == ["c"]
    assert "calls 'b' and 'c' malformed" in last.assignment.refused["a"]
    assert decider.broken("a", 1, last.assignment.id, "NaN", 3.0, malformed="c") == []
    decider.prepared("b", 1, last.assignment.id, prepared("same"), 4.0)
    end = decider.prepared("c", 1, last.assignment.id, prepared("same"), 4.0)
    assert end == [Commit(last.assignment, prepared("same"))]


def test_a_member_that_is_not_prepared_in_time_is_named() -> None:
    decider, assignment = two_closed()
    decider.prepared("a", 1, assignment.id, prepared("same"), 1.0)

    (expiry,) = decider.tick(10.0)

    assert isinstance(expiry, RecordExpiry)
    assert "not prepared: b" in expiry.reason


def test_one_that_never_votes_is_left_out_at_the_deadline() -> None:
    decider, assignment = closed("abc")
    for name in "ab":
        assert decider.prepared(name, 1, assignment.id, prepared("same"), 1.0) == []

    assert decider.tick(9.9) == [], "it may still vote"
    assert decider.tick(10.0) == [Commit(assignment, prepared("same"))]
    assert decider.prepared("c", 1, assignment.id, prepared("other"), 10.1) == [], "too late"
    decider.committed(assignment.key, 10.2)

    published = Announced(1, digest("same"))
    other = Staged(1, digest("other"), assignment.id)
    assert duty(0, digest("initial"), None, published) is Duty.HEAL, "the usual way"
    assert duty(0, digest("initial"), other, published) is Duty.HEAL
    outcome = decider.rounds.outcome(assignment.key, "c", 1)
    assert outcome is not None
    assert outcome.kind is OutcomeKind.INCLUDED, "its contribution is in what the others staged"


@pytest.mark.parametrize(
    ("names", "votes"),
    [
        pytest.param("abcd", {"a": "same", "b": "same"}, id="half-is-not-most"),
        pytest.param("abc", {"a": "one", "b": "other"}, id="two-results-of-three"),
        pytest.param("abc", {}, id="nobody"),
    ],
)
def test_without_most_the_deadline_ends_the_attempt(names: str, votes: dict[str, str]) -> None:
    decider, assignment = closed(names)
    for name, vote in votes.items():
        decider.prepared(name, 1, assignment.id, prepared(vote), 1.0)

    (expiry,) = decider.tick(10.0)

    assert isinstance(expiry, RecordExpiry)
    assert expiry.missing == tuple(name for name in names if name not in votes)


def test_a_malformed_contribution_is_refused_and_the_attempt_goes_on_without_it() -> None:
    decider, assignment = two_closed()
    decider.prepared("b", 1, assignment.id, prepared("one"), 1.0)

    dropped, again = decider.broken("a", 1, assignment.id, "NaN", 11.0, malformed="b")

    assert isinstance(dropped, DropLanes)
    assert isinstance(again, Assigned)
    assert again.assignment.key == assignment.key
    assert [c.island for c in again.assignment.contributors] == ["a"]
    assert again.assignment.members == ("a", "b"), "it must be prepared too"
    assert again.assignment.refused == {"b": "island 'a': NaN"}
    assert decider.prepared("b", 1, assignment.id, prepared("one"), 12.0) == [], "of the first"
    outcome = decider.rounds.outcome(assignment.key, "b", 1)
    assert outcome is not None
    assert outcome.kind is OutcomeKind.REFUSED
    decider.prepared("b", 1, again.assignment.id, prepared("two"), 12.0)
    end = decider.prepared("a", 1, again.assignment.id, prepared("two"), 12.0)
    assert end == [Commit(again.assignment, prepared("two"))]


@pytest.mark.parametrize("malformed", ["", "z"])
def test_a_result_that_is_nobodys_fault_expires_the_attempt(malformed: str) -> None:
    decider, assignment = two_closed()

    end = decider.broken("a", 1, assignment.id, "theta is not finite", 1.0, malformed=malformed)

    assert [type(i) for i in end] == [RecordExpiry]


def test_a_zombie_cannot_vote() -> None:
    decider, assignment = two_closed()
    decider.prepared("a", 1, assignment.id, prepared("same"), 1.0)

    (expiry,) = decider.granted("b", 2, 2.0)

    assert isinstance(expiry, RecordExpiry)
    assert decider.prepared("b", 1, assignment.id, prepared("same"), 3.0) == []


def test_the_same_contributions_are_the_same_assignment_after_a_restart() -> None:
    assert two_closed()[1].id == two_closed(now=50.0)[1].id


def test_lanes_are_dealt_to_all_contributors_and_move_with_the_generation() -> None:
    _, assignment = two_closed()

    owners = [assignment.owner(lane_id) for lane_id in range(4)]
    moved = replace(assignment, generation=assignment.generation + 1)

    assert owners == ["a", "b", "a", "b"]
    assert [moved.owner(lane_id) for lane_id in range(4)] == ["b", "a", "b", "a"]
    assert moved.id != assignment.id
