"""Who rounds open with: joins, lapses, drains, kicks, pauses, strangers, and who does not count."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from diloco.config.classes import identity_difference
from diloco.outer.fragments import TensorSpec, make_plan
from diloco.protocol.rounds.terms import Roster
from diloco.protocol.run.admission import Entries, Joined, JoinVerdict
from diloco.protocol.run.leases import Lease, Leases
from diloco.protocol.run.members import MembershipRules
from diloco.protocol.run.membership import Membership
from diloco.refusals import Cause

PLAN = make_plan([TensorSpec("a", (3, 5)), TensorSpec("b", (7,))], num_fragments=2).to_json()
ELASTIC = MembershipRules(is_elastic=True, max_islands=3)
OPEN = replace(ELASTIC, is_open=True, max_islands=4, are_names_shared=False)
NAMES = ("east", "north", "west")


class Run:
    """A membership and what it has written, so that it can be read back."""

    def __init__(self, rules: MembershipRules = ELASTIC, islands: tuple[str, ...] = NAMES) -> None:
        self.rules, self.islands = rules, islands
        self.written: dict[str, str] = {}
        self.membership = self.new()

    def new(self) -> Membership:
        membership = Membership(
            "demo", self.islands, self.identity(self.islands), identity_difference, 100, 2
        )
        membership.members.rules = self.rules
        membership.apply(sorted(self.written.items()))
        return membership

    def identity(self, names: tuple[str, ...], seed: int = 7) -> str:
        return json.dumps({"islands": sorted(names), "run.seed": seed})

    def do(self, entries: Entries) -> bool:
        self.written.update(entries)
        self.membership.apply(entries)
        return bool(entries)

    def join(
        self, island: str, start_id: str = "a", names: tuple[str, ...] = (), seed: int = 7
    ) -> Joined:
        joined = self.membership.join(
            run="demo",
            island=island,
            identity_json=self.identity(names or self.islands, seed),
            plan_json=PLAN,
            corpus_sha256="5a",
            tokenizer_digest="bytes",
            start_step=0,
            start_id=start_id,
        )
        self.do(joined.entries)
        return joined

    @property
    def roster(self) -> Roster:
        roster = self.membership.members.roster()
        assert roster is not None
        return roster


def joined(rules: MembershipRules = ELASTIC) -> Run:
    run = Run(rules)
    for name in NAMES:
        assert run.join(name).verdict is JoinVerdict.ACCEPTED
    return run


# -- leases ----------------------------------------------------------------------------------------


def test_a_lapsed_island_is_out_of_the_roster_and_back_at_its_next_report() -> None:
    run = joined()
    assert run.roster == Roster(NAMES, {}, False, 1, 3)

    run.do(run.membership.members.lapsed(["west"]))

    assert run.roster == Roster(("east", "north"), {}, False, 1, 4)
    assert run.membership.is_current("west", 1, 0), "it is not fenced"
    assert not run.do(run.membership.reported("east"))
    assert run.do(run.membership.reported("west"))
    assert run.roster == Roster(NAMES, {}, False, 1, 5)


def test_an_older_start_does_not_come_back_for_a_newer_one() -> None:
    run = joined()
    run.do(run.membership.members.lapsed(["west"]))

    assert run.join("west", "b").incarnation == 2

    assert run.roster.live == NAMES
    assert not run.membership.is_current("west", 1, 0)


def test_one_that_failed_is_lost_at_once_where_nobody_waits_for_it() -> None:
    elastic, scheduled = joined(), joined(MembershipRules())

    for run in (elastic, scheduled):
        run.do(run.membership.left("west", 40, is_stopped=False))

    assert elastic.roster.live == ("east", "north")
    assert scheduled.membership.members.roster() is None, (
        "rounds wait for all, to the end of its lease"
    )
    assert scheduled.membership.members.holders == NAMES


# -- commands --------------------------------------------------------------------------------------


def test_a_drained_island_is_in_no_opening_until_it_starts_again() -> None:
    run = joined()

    assert run.do(run.membership.members.drained("west"))
    assert not run.do(run.membership.members.drained("west"))
    assert (run.roster.live, run.membership.members.holders) == (("east", "north"), NAMES)
    run.join("west", "b")
    assert run.membership.members.lease_of("west") is Lease.DRAINING, "a restart does not forget it"
    run.do(run.membership.left("west", 0, is_stopped=False))

    assert run.membership.members.lease_of("west") is Lease.LEFT
    assert not run.membership.is_finished
    run.join("west", "c")
    assert run.roster.live == NAMES


def test_a_kicked_island_is_fenced_and_refused_until_it_is_taken_back() -> None:
    run = joined()
    run.join("west", "b")

    assert run.do(run.membership.members.kicked(["west"], "it sends nonsense"))
    assert not run.do(run.membership.members.kicked(["west"], "again"))
    assert (run.roster.live, run.roster.fenced) == (("east", "north"), {"west": 3})
    assert not run.membership.is_current("west", 2, 0)
    refused = run.join("west", "c")
    assert (refused.verdict, refused.entries) == (JoinVerdict.KICKED, ())
    assert "it sends nonsense" in refused.message
    assert "diloco kick HOST:PORT west --undo" in refused.message
    assert run.join("west", "b").verdict is JoinVerdict.KICKED, "a start that was there, too"

    assert run.do(run.membership.members.readmitted("west"))
    assert not run.do(run.membership.members.readmitted("west"))
    assert not run.membership.is_current("west", 2, 0), "what was fenced stays so"
    assert run.join("west", "c").incarnation == 3
    assert (run.roster.live, run.roster.fenced) == (NAMES, {"west": 3})
    assert run.membership.is_current("west", 3, 0)


def test_an_island_can_be_kicked_before_it_joins() -> None:
    run = Run()
    run.do(run.membership.members.kicked(["west"], "not today"))

    assert run.join("west").verdict is JoinVerdict.KICKED
    run.do(run.membership.members.readmitted("west"))
    assert run.join("west").incarnation == 1
    assert run.membership.is_current("west", 1, 0)


def test_a_pause_is_told_and_remembered() -> None:
    run = joined(MembershipRules())
    assert run.membership.members.roster() is None

    assert run.do(run.membership.members.paused(True))
    assert not run.do(run.membership.members.paused(True))
    assert run.roster == Roster(NAMES, {}, True, 3, 4)
    assert run.new().members.is_paused
    run.do(run.membership.members.paused(False))
    assert run.roster == Roster(NAMES, {}, False, 3, 5), "and that it is over, after a restart too"
    assert run.new().members.roster() == run.roster


def test_a_scheduled_run_goes_on_without_one_that_was_taken_out() -> None:
    run = joined(MembershipRules())
    membership = run.membership
    run.do(membership.members.kicked(["west"], "away"))

    assert run.roster.live == ("east", "north"), "be they there or not"
    run.do(membership.members.lapsed(["north"]))
    assert run.roster.live == ("east", "north")
    for island in ("east", "north"):
        run.do(membership.keeps(island, [10], inner_step=10))
    assert membership.checkpoints == (10,)
    run.do(membership.request_stop())
    run.do(membership.promise("east", 12))
    run.do(membership.promise("north", 11))
    assert membership.stop_step == 12
    assert membership.stop_lacks(["west"]) == {}
    for island in ("east", "north"):
        run.do(membership.left(island, 0, is_stopped=False))
    assert membership.is_finished


def test_a_resume_takes_everybody_back() -> None:
    run = joined()
    run.do(run.membership.members.kicked(["west"], "away"))
    run.do(run.membership.members.drained("east"))
    run.do(run.membership.members.paused(True))

    run.do(run.membership.resumed(0))

    assert (run.roster.live, run.roster.is_paused) == ((), False)
    assert [run.membership.members.lease_of(name) for name in NAMES] == [Lease.ABSENT] * 3
    for name in NAMES:
        assert run.join(name, "b").verdict is JoinVerdict.ACCEPTED
    assert run.roster.live == NAMES


# -- the end of a run whose islands come and go ----------------------------------------------------


def test_who_left_or_lapsed_does_not_keep_a_run_from_its_end() -> None:
    run = joined()
    run.do(run.membership.members.drained("west"))
    run.do(run.membership.left("west", 0, is_stopped=False))
    assert not run.membership.is_finished
    run.do(run.membership.members.lapsed(["north"]))
    assert not run.membership.is_finished

    run.do(run.membership.left("east", 0, is_stopped=False))
    run.do(run.membership.all_merged())

    assert run.membership.is_finished


def test_an_island_at_work_is_waited_for() -> None:
    run = joined()
    run.do(run.membership.left("east", 0, is_stopped=False))
    run.do(run.membership.left("north", 0, is_stopped=False))
    run.do(run.membership.all_merged())

    assert not run.membership.is_finished
    run.do(run.membership.members.lapsed(["west"]))
    assert run.membership.is_finished


def test_a_run_that_everybody_was_drained_from_has_not_finished() -> None:
    run = joined()
    for name in NAMES:
        run.do(run.membership.members.drained(name))
        run.do(run.membership.left(name, 0, is_stopped=False))

    assert not run.membership.is_finished


def test_islands_at_different_inner_steps_stop_at_a_cut() -> None:
    ((key, _),) = joined().membership.request_stop()
    assert key == "cut/1"


# -- strangers -------------------------------------------------------------------------------------


def test_an_open_run_takes_islands_that_it_does_not_know_up_to_its_most() -> None:
    run = joined(OPEN)
    south = run.join("south", names=("south",))
    assert (south.verdict, south.incarnation) == (JoinVerdict.ACCEPTED, 1)
    assert run.membership.members["south"].slot == 3

    full = run.join("far", names=("far",))

    assert (full.verdict, full.entries) == (JoinVerdict.RUN_FULL, ())
    assert "run.max_islands: 4 here, island 'far' there would be number 5" in full.message
    assert "east, north, west, south" in full.message
    run.do(run.membership.left("south", 0, is_stopped=False))
    assert run.join("south", "b", names=("south",)).incarnation == 2, "its place is its own"
    after = run.new()
    assert (after.members, after.members.live) == (
        run.membership.members,
        ("east", "north", "south", "west"),
    )


@pytest.mark.parametrize("name", ["", "../x", "South", "a/b", "a\n", "x" * 101, "\0"])
def test_a_stranger_has_a_name_that_every_file_and_message_holds(name: str) -> None:
    run = joined(OPEN)

    refused = run.join(name, names=(name,))

    assert (refused.verdict, refused.entries) == (JoinVerdict.UNKNOWN_ISLAND, ())
    assert refused.cause is Cause.ISLAND
    assert f"island: {name!r} there is no name" in refused.message


def test_a_stranger_must_share_all_but_the_names() -> None:
    run = joined(OPEN)

    refused = run.join("south", names=("south",), seed=8)

    assert refused.verdict is JoinVerdict.FINGERPRINT_MISMATCH
    assert "run.seed: 7 here, 8 there" in refused.message
    assert "islands" not in refused.message
    assert "south" not in run.membership.members


def test_a_guest_stays_known_when_the_run_is_closed() -> None:
    run = joined(OPEN)
    run.join("south", names=("south",))

    run.membership.members.rules = replace(OPEN, is_open=False)

    assert run.join("south", "b", names=("south",)).verdict is JoinVerdict.ACCEPTED
    assert run.join("far", names=("far",)).verdict is JoinVerdict.UNKNOWN_ISLAND


def test_a_closed_run_insists_on_the_same_names() -> None:
    refused = joined().join("east", "b", names=("east", "west"))

    assert refused.verdict is JoinVerdict.FINGERPRINT_MISMATCH
    assert 'islands: ["east", "north", "west"] here' in refused.message


# -- positions and settings ------------------------------------------------------------------------


def test_positions_are_of_one_timeline() -> None:
    run = joined()
    assert run.do(run.membership.positions({"east": 41}))
    assert not run.do(run.membership.positions({"east": 41}))
    assert run.new().last_inner_step("east") == 41
    assert run.membership.last_inner_step("west") == 0

    run.do(run.membership.resumed(20))

    assert run.new().last_inner_step("east") == 0


def test_settings_keep_their_order() -> None:
    run = Run()
    for n in range(1, 12):
        run.do(run.membership.settings.changed("outer.optimizer.lr", n / 10))
    run.do(run.membership.settings.changed("outer.grace", "2s"))

    after = run.new().settings
    assert after.policy == {"outer.optimizer.lr": 1.1, "outer.grace": "2s"}
    assert after.revision == 12


# -- any history -----------------------------------------------------------------------------------

TERM_S = 10.0
names = st.sampled_from(NAMES)


class Histories(RuleBasedStateMachine):
    """Islands that live, freeze, die and return under a coordinator that restarts.

    Those in `alive` say something every second. They are never fenced and never out of the
    roster, whatever the others do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.run = Run()
        self.leases = Leases(TERM_S)
        self.now = 0.0
        self.num_starts = 0
        self.alive: dict[str, int] = {}  # island -> incarnation of a process that reports
        self.frozen: dict[str, int] = {}
        self.out: set[str] = set()  # drained or kicked
        for island in NAMES:
            self.start(island)

    def start(self, island: str) -> None:
        self.num_starts += 1
        joined = self.run.join(island, str(self.num_starts))
        if joined.verdict is JoinVerdict.ACCEPTED:
            self.leases.renewed(island, self.now)
            self.alive[island] = joined.incarnation
            self.frozen.pop(island, None)
            if self.run.membership.members.lease_of(island) is Lease.ACTIVE:
                self.out.discard(island)

    def report(self, island: str, incarnation: int) -> bool:
        membership = self.run.membership
        if not membership.is_current(island, incarnation, 0):
            return False
        self.leases.renewed(island, self.now)
        self.run.do(membership.reported(island))
        return True

    @rule(island=names)
    def starts(self, island: str) -> None:
        self.start(island)

    @rule(island=names)
    def dies(self, island: str) -> None:
        self.alive.pop(island, None)

    @rule(island=names)
    def freezes(self, island: str) -> None:
        if island in self.alive:
            self.frozen[island] = self.alive.pop(island)

    @precondition(lambda self: self.frozen)
    @rule(data=st.data())
    def thaws(self, data: st.DataObject) -> None:
        island = data.draw(st.sampled_from(sorted(self.frozen)))
        incarnation = self.frozen.pop(island)
        if self.report(island, incarnation):
            self.alive[island] = incarnation

    @rule(island=names, seconds=st.sampled_from([6, 12]))
    def stands_still(self, island: str, seconds: int) -> None:
        if island in self.alive:
            incarnation = self.alive.pop(island)
            self.time_passes(seconds)
            assert self.report(island, incarnation), "it was fenced because it stood still"
            self.alive[island] = incarnation

    @rule(island=names, exit_code=st.sampled_from([0, 40]))
    def leaves(self, island: str, exit_code: int) -> None:
        if self.alive.pop(island, None) is not None:
            self.run.do(self.run.membership.left(island, exit_code, is_stopped=False))

    @rule(island=names)
    def drains(self, island: str) -> None:
        if self.run.do(self.run.membership.members.drained(island)):
            self.out.add(island)

    @rule(island=names)
    def kicks(self, island: str) -> None:
        self.run.do(self.run.membership.members.kicked([island], "why"))
        self.out.add(island)
        self.alive.pop(island, None)
        self.frozen.pop(island, None)

    @rule(island=names)
    def takes_back(self, island: str) -> None:
        self.run.do(self.run.membership.members.readmitted(island))

    @rule(paused=st.booleans())
    def pauses(self, paused: bool) -> None:
        self.run.do(self.run.membership.members.paused(paused))

    @rule(seconds=st.sampled_from([1, 6, 12]))
    def time_passes(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1.0
            self.leases.looked(self.now)
            for island, incarnation in self.alive.items():
                assert self.report(island, incarnation), "a healthy island is fenced"
            holders = self.run.membership.members.holders
            self.run.do(self.run.membership.members.lapsed(self.leases.expired(holders, self.now)))

    @rule(away_s=st.floats(0, 100))
    def coordinator_restarts(self, away_s: float) -> None:
        self.now += away_s
        before = self.run.membership
        self.run.membership = after = self.run.new()
        assert (after.members, after.members.roster()) == (before.members, before.members.roster())
        self.leases = Leases(TERM_S)
        self.leases.restarted(after.members, self.now)

    @precondition(lambda self: self.alive)
    @rule()
    def a_write_fails(self) -> None:
        island = sorted(self.alive)[0]
        before = self.run.new()
        self.run.membership.members.kicked([island], "never written")
        self.run.membership.left(island, 0, is_stopped=False)
        assert self.run.membership.members == before.members

    @invariant()
    def the_healthy_count_and_nobody_else_for_long(self) -> None:
        membership = self.run.membership
        live = set(membership.members.live)
        assert self.alive.keys() - self.out <= live
        for island in live - self.alive.keys():
            assert self.leases.silent_s(island, self.now) < TERM_S
        assert all(membership.is_current(i, n, 0) for i, n in self.alive.items())
        assert not live & {i for i in NAMES if membership.members.lease_of(i) is Lease.KICKED}
        assert self.run.roster.generation >= self.generation_seen
        self.generation_seen = self.run.roster.generation

    generation_seen = 0


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_long_histories_of_islands_that_come_and_go() -> None:
    run_state_machine_as_test(
        Histories, settings=settings(max_examples=1000, stateful_step_count=100, deadline=None)
    )
