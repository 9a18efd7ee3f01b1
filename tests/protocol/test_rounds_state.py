"""The rounds of one fragment, as a pure machine: every rule of admission, closing and expiry."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from diloco.protocol.rounds.members import Attempt
from diloco.protocol.rounds.state import FragmentRounds, InvalidTransition
from diloco.protocol.rounds.terms import (
    Admission,
    Close,
    DropLanes,
    Instruction,
    LaneArrival,
    Lost,
    Opened,
    Outcome,
    OutcomeKind,
    PastRound,
    Phase,
    Published,
    RecordExpiry,
    Roster,
    RoundKey,
    RoundRules,
)

NUM_LANES = 2
DEADLINE_S = 60.0


def machine(*, granted: str = "ab", **rules: Any) -> FragmentRounds:
    """A founded fragment; with all grants held its first attempt is open at 0 s."""
    values = {"members": ("a", "b"), "num_lanes": NUM_LANES, "deadline_s": DEADLINE_S} | rules
    rounds = FragmentRounds(3, 0, RoundRules(**values))
    rounds.founded(0, 0, {}, 0.0)
    for island in granted:
        rounds.granted(island, 1, 0.0)
    return rounds


def unfounded(members: tuple[str, ...] = ("a", "b"), **rules: Any) -> FragmentRounds:
    rounds = FragmentRounds(3, 0, RoundRules(members, NUM_LANES, DEADLINE_S, **rules))
    for island in "ab":
        rounds.granted(island, 1, 0.0)
    return rounds


def lane(rounds: FragmentRounds, island: str, lane_id: int = 0, **changes: Any) -> LaneArrival:
    arrival = LaneArrival(
        key=rounds.key,
        island=island,
        incarnation=1,
        lane_id=lane_id,
        digest=f"{island}{lane_id}".encode(),
        weight_tokens=100,
        weight_steps=10,
        sent_at_inner_step=24,
        is_flush=False,
    )
    return replace(arrival, **changes)


def contribute(
    rounds: FragmentRounds, island: str, now: float = 1.0, **changes: Any
) -> list[Instruction]:
    """Deliver all lanes of a contribution; what the last one leads to."""
    instructions: list[Instruction] = []
    for lane_id in range(rounds.rules.num_lanes):
        arrival = lane(rounds, island, lane_id, **changes)
        admission, instructions = rounds.lane_received(arrival, now)
        assert admission is Admission.ACCEPTED, admission
    return instructions


def refuse(rounds: FragmentRounds, island: str, now: float = 1.0) -> list[Instruction]:
    return rounds.refused(rounds.key, island, 1, "declined: not finite", now)


def publish(rounds: FragmentRounds, now: float = 2.0) -> list[Instruction]:
    """Let both islands contribute and the round be committed."""
    contribute(rounds, "a", now)
    contribute(rounds, "b", now)
    return rounds.committed(rounds.key, now)


def expire(rounds: FragmentRounds, now: float) -> list[Instruction]:
    """Let island a alone contribute and the deadline pass."""
    contribute(rounds, "a", now)
    (instruction,) = rounds.tick(now + DEADLINE_S)
    assert isinstance(instruction, RecordExpiry)
    return rounds.expiry_recorded(instruction.key, now + DEADLINE_S)


def kind_of(
    rounds: FragmentRounds, key: RoundKey, island: str, incarnation: int = 1
) -> OutcomeKind | None:
    outcome = rounds.outcome(key, island, incarnation)
    return None if outcome is None else outcome.kind


# -- opening -------------------------------------------------------------------------------------


def test_nothing_is_accepted_before_version_0_is_durable() -> None:
    rounds = FragmentRounds(3, 0, RoundRules(("a",), NUM_LANES, DEADLINE_S))

    assert rounds.granted("a", 1, 0.0) == []
    assert rounds.admit(lane(rounds, "a")) is Admission.NOT_OPEN
    assert rounds.founded(0, 0, {}, 1.0) == [Opened(RoundKey(0, 3, 0, 0), ("a",))]


def test_no_round_opens_before_every_member_holds_a_grant() -> None:
    rounds = machine(granted="a")

    assert rounds.phase is Phase.WAITING
    assert rounds.admit(lane(rounds, "a")) is Admission.NOT_OPEN
    assert math.isinf(rounds.next_wake)
    assert rounds.granted("b", 1, 5.0) == [Opened(rounds.key, ("a", "b"))]


def test_a_publication_opens_the_next_round_at_once() -> None:
    rounds = machine()
    key = rounds.key

    assert publish(rounds, 2.0) == [Published(key), Opened(RoundKey(0, 3, 1, 0), ("a", "b"))]


def test_the_opening_floor_holds_the_next_round_back_but_not_a_retry() -> None:
    rounds = machine(opening_floor_s=10.0)

    assert publish(rounds, 2.0) == [Published(RoundKey(0, 3, 0, 0))]
    assert rounds.next_wake == 12.0
    assert rounds.tick(11.9) == []
    assert rounds.tick(12.0) == [Opened(RoundKey(0, 3, 1, 0), ("a", "b"))]
    assert expire(rounds, 13.0) == [Opened(RoundKey(0, 3, 1, 1), ("a", "b"))]


def test_a_restart_opens_the_attempt_it_is_given() -> None:
    rounds = FragmentRounds(3, 0, RoundRules(("a",), NUM_LANES, DEADLINE_S))
    rounds.granted("a", 4, 0.0)

    instructions = rounds.founded(7, 2, {}, 0.0)

    assert instructions == [Opened(RoundKey(0, 3, 7, 2), ("a",))]


@pytest.mark.parametrize("members", [(), ("b", "a"), ("a", "a")], ids=str)
def test_members_must_be_sorted_and_distinct(members: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="sorted and distinct"):
        FragmentRounds(3, 0, RoundRules(members, NUM_LANES, DEADLINE_S))


# -- closing -------------------------------------------------------------------------------------


def test_all_complete_contributions_close_the_round_in_sorted_island_order() -> None:
    rounds = machine()
    key = rounds.key

    assert contribute(rounds, "b", weight_tokens=300) == []
    (close,) = contribute(rounds, "a")

    assert isinstance(close, Close)
    assert close.key == key
    assert [(c.island, c.weight_tokens) for c in close.contributors] == [("a", 100), ("b", 300)]
    assert [c.lane_digests for c in close.contributors] == [(b"a0", b"a1"), (b"b0", b"b1")]
    assert not close.is_flush


def test_a_contribution_counts_only_with_all_its_lanes_whatever_their_order() -> None:
    rounds = machine()
    contribute(rounds, "a")

    assert rounds.lane_received(lane(rounds, "b", 1), 2.0) == (Admission.ACCEPTED, [])
    _, (close,) = rounds.lane_received(lane(rounds, "b", 0), 3.0)

    assert isinstance(close, Close)
    assert close.contributors[1].lane_digests == (b"b0", b"b1")


def test_version_and_attempt_move_only_when_the_commit_is_reported() -> None:
    rounds = machine()
    key = rounds.key
    contribute(rounds, "a")
    contribute(rounds, "b")

    assert rounds.phase is Phase.CLOSING
    assert (rounds.version, rounds.attempt) == (0, 0)
    assert kind_of(rounds, key, "a") is None

    rounds.committed(key, 3.0)

    assert (rounds.version, rounds.attempt) == (1, 0)
    assert kind_of(rounds, key, "a") is OutcomeKind.INCLUDED


# -- repeats and conflicts -----------------------------------------------------------------------

OTHERS = [
    pytest.param({"digest": b"other"}, id="digest"),
    pytest.param({"weight_tokens": 101}, id="tokens"),
    pytest.param({"weight_steps": 11}, id="steps"),
    pytest.param({"sent_at_inner_step": 25}, id="inner-step"),
    pytest.param({"is_flush": True}, id="flush"),
]


def test_a_repeat_is_acknowledged_while_open_and_while_closing() -> None:
    rounds = machine()
    contribute(rounds, "a")

    assert rounds.lane_received(lane(rounds, "a"), 2.0) == (Admission.REPEAT, [])
    again = lane(rounds, "a")
    contribute(rounds, "b")
    assert rounds.lane_received(again, 2.0) == (Admission.REPEAT, [])


@pytest.mark.parametrize("change", OTHERS)
def test_a_conflict_refuses_the_whole_contribution(change: dict[str, Any]) -> None:
    rounds = machine()
    rounds.lane_received(lane(rounds, "a", 0), 1.0)
    rounds.lane_received(lane(rounds, "a", 1), 1.0)

    admission, instructions = rounds.lane_received(lane(rounds, "a", 0, **change), 2.0)

    assert admission is Admission.CONFLICT
    assert instructions == [DropLanes(rounds.key, "a", 1)]
    assert kind_of(rounds, rounds.key, "a") is OutcomeKind.REFUSED
    assert rounds.admit(lane(rounds, "a")) is Admission.OVER


@pytest.mark.parametrize("change", OTHERS[1:])
def test_a_conflict_is_seen_between_different_lanes(change: dict[str, Any]) -> None:
    rounds = machine()
    rounds.lane_received(lane(rounds, "a", 0), 1.0)

    assert rounds.admit(lane(rounds, "a", 1, **change)) is Admission.CONFLICT


def test_judging_a_header_changes_nothing() -> None:
    rounds = machine()
    rounds.lane_received(lane(rounds, "a", 0), 1.0)

    for change in ({}, {"digest": b"other"}, {"lane_id": 1}, {"incarnation": 0}):
        rounds.admit(lane(rounds, "a", **change))

    assert [*rounds.current.contributions] == ["a"]
    assert rounds.current.left == {}


# -- refused, declined, malformed ----------------------------------------------------------------


def test_a_refused_or_declined_member_leaves_all() -> None:
    rounds = machine()
    key = rounds.key
    contribute(rounds, "a")

    (close,) = refuse(rounds, "b")
    rounds.committed(key, 2.0)

    assert isinstance(close, Close)
    assert [c.island for c in close.contributors] == ["a"]
    assert close.refused == {"b": "declined: not finite"}
    assert kind_of(rounds, key, "a") is OutcomeKind.INCLUDED
    assert kind_of(rounds, key, "b") is OutcomeKind.REFUSED


def test_a_decline_takes_back_what_had_arrived() -> None:
    rounds = machine()
    rounds.lane_received(lane(rounds, "b", 0), 1.0)

    assert refuse(rounds, "b") == [DropLanes(rounds.key, "b", 1)]
    (close,) = contribute(rounds, "a")

    assert isinstance(close, Close)
    assert [c.island for c in close.contributors] == ["a"]


def test_with_nobody_left_the_attempt_expires_at_once() -> None:
    rounds = machine()
    key = rounds.key

    assert refuse(rounds, "a") == []
    (expiry,) = refuse(rounds, "b")

    left = dict.fromkeys("ab", (0, "declined: not finite"))
    reason = "too few members have anything valid to send"
    assert expiry == RecordExpiry(key, reason, (), refused_at=left)


@pytest.mark.parametrize(
    ("key", "island", "incarnation"),
    [
        (RoundKey(0, 3, 0, 1), "b", 1),
        (RoundKey(0, 3, 0, 0), "c", 1),
        (RoundKey(0, 3, 0, 0), "b", 0),
    ],
    ids=["another-attempt", "no-member", "fenced"],
)
def test_a_refusal_of_something_else_changes_nothing(
    key: RoundKey, island: str, incarnation: int
) -> None:
    rounds = machine()

    assert rounds.refused(key, island, incarnation, "reason", 1.0) == []
    assert rounds.current.left == {}


def test_a_refused_member_counts_again_in_the_next_round() -> None:
    rounds = machine()
    contribute(rounds, "a")
    refuse(rounds, "b")
    rounds.committed(rounds.key, 2.0)

    assert contribute(rounds, "a", 3.0) == []
    assert isinstance(contribute(rounds, "b", 4.0)[0], Close)


@pytest.mark.parametrize(
    ("change", "admission"),
    [
        ({"lane_id": NUM_LANES}, Admission.INVALID),
        ({"lane_id": -1}, Admission.INVALID),
        ({"key": RoundKey(0, 4, 0, 0)}, Admission.INVALID),
        ({"key": RoundKey(0, 3, 0, 1)}, Admission.INVALID),
        ({"weight_tokens": 0}, Admission.INVALID),
        ({"weight_tokens": -1}, Admission.INVALID),
        ({"weight_tokens": 0, "is_flush": True}, Admission.ACCEPTED),
        ({"key": RoundKey(0, 3, 1, 0)}, Admission.NOT_OPEN),
        ({"key": RoundKey(1, 3, 0, 0)}, Admission.FENCED),
        ({"incarnation": 0}, Admission.FENCED),
        ({"island": "c"}, Admission.NOT_OPEN),
    ],
    ids=[
        "lane-over", "lane-under", "other-fragment", "attempt-ahead", "no-tokens",
        "negative-tokens", "flush-without-tokens", "version-ahead", "other-timeline",
        "older-start", "no-member",
    ],
)  # fmt: skip
def test_admission_by_header(change: dict[str, Any], admission: Admission) -> None:
    rounds = machine()

    assert rounds.admit(replace(lane(rounds, "a"), **change)) is admission


# -- late ones -----------------------------------------------------------------------------------


def test_a_stale_base_is_not_included() -> None:
    rounds = machine(min_contributions=1, grace_s=5.0)
    key = rounds.key
    late = lane(rounds, "b")
    contribute(rounds, "a", 1.0)
    rounds.tick(6.0)
    rounds.committed(key, 7.0)

    assert rounds.admit(late) is Admission.OVER
    assert kind_of(rounds, key, "b") is OutcomeKind.NOT_INCLUDED


def test_a_base_older_than_what_is_remembered_is_not_included() -> None:
    rounds = machine()
    key = rounds.key
    for _ in range(3):
        publish(rounds)
    rounds.past.forget_before(2)

    assert [*rounds.past.by_base] == [2]
    assert kind_of(rounds, key, "a") is OutcomeKind.NOT_INCLUDED


def test_outcomes_survive_a_restart() -> None:
    rounds = machine(members=("a", "b", "c"), granted="abc")
    key = rounds.key
    contribute(rounds, "a")
    contribute(rounds, "b")
    (close,) = refuse(rounds, "c")
    assert isinstance(close, Close)
    again = machine(members=("a", "b", "c"), granted="")
    again.phase = Phase.UNFOUNDED

    contributors = frozenset((c.island, c.incarnation) for c in close.contributors)
    past = PastRound(key.attempt, contributors, close.refused)
    again.founded(1, 0, {0: past}, 0.0)
    rounds.committed(key, 2.0)

    for island in "abc":
        assert again.outcome(key, island, 1) == rounds.outcome(key, island, 1)


def test_who_the_merge_left_out_is_refused_and_told_why() -> None:
    rounds = machine(members=("a", "b", "c"), granted="abc")
    key = rounds.key
    for island in "abc":
        contribute(rounds, island)

    rounds.committed(key, 2.0, {"b": "norm 9"})

    assert rounds.outcome(key, "b", 1) == Outcome(key, OutcomeKind.REFUSED, "norm 9")
    assert [kind_of(rounds, key, island) for island in "ac"] == [OutcomeKind.INCLUDED] * 2


# -- expiry --------------------------------------------------------------------------------------


def test_the_deadline_runs_from_the_first_complete_contribution() -> None:
    rounds = machine()

    rounds.lane_received(lane(rounds, "a", 0), 10.0)
    assert math.isinf(rounds.next_wake)
    rounds.lane_received(lane(rounds, "a", 1), 50.0)
    assert rounds.next_wake == 50.0 + DEADLINE_S

    assert rounds.tick(109.9) == []
    (expiry,) = rounds.tick(110.0)
    assert expiry == RecordExpiry(RoundKey(0, 3, 0, 0), "deadline of 60 s; missing: b", ("b",))


def test_the_deadline_stops_when_everybody_who_waited_starts_again() -> None:
    rounds = machine()
    contribute(rounds, "a", 10.0)

    rounds.granted("a", 2, 20.0)

    assert math.isinf(rounds.next_wake)


def test_a_decline_starts_the_deadline_too() -> None:
    # Its island waits for the round's end; without a deadline it would wait for the dead.
    rounds = machine()

    refuse(rounds, "a", 10.0)

    assert rounds.next_wake == 10.0 + DEADLINE_S


def test_an_expiry_moves_nothing_and_is_unknown_until_it_is_durable() -> None:
    rounds = machine()
    key = rounds.key
    contribute(rounds, "a", 0.0)
    rounds.tick(DEADLINE_S)

    assert rounds.phase is Phase.EXPIRING
    assert kind_of(rounds, key, "a") is None
    assert rounds.admit(lane(rounds, "b")) is Admission.NOT_OPEN

    instructions = rounds.expiry_recorded(key, 61.0)

    assert instructions == [Opened(RoundKey(0, 3, 0, 1), ("a", "b"))]
    assert kind_of(rounds, key, "a") is OutcomeKind.EXPIRED
    assert rounds.version == 0


def test_a_retry_after_an_expiry_is_not_taken_for_a_repeat() -> None:
    rounds = machine()
    first = lane(rounds, "a")
    expire(rounds, 0.0)

    same_bytes = lane(rounds, "a")

    assert same_bytes.digest == first.digest
    assert rounds.admit(same_bytes) is Admission.ACCEPTED
    assert rounds.admit(first) is Admission.OVER


def test_a_late_lane_of_an_expired_attempt_is_answered_expired_even_after_publication() -> None:
    rounds = machine()
    key = rounds.key
    expire(rounds, 0.0)
    publish(rounds, 70.0)

    assert kind_of(rounds, key, "a") is OutcomeKind.EXPIRED
    assert kind_of(rounds, replace(key, attempt=1), "a") is OutcomeKind.INCLUDED


def test_a_new_attempt_gets_a_new_deadline() -> None:
    rounds = machine()
    expire(rounds, 0.0)

    assert math.isinf(rounds.next_wake)
    contribute(rounds, "a", 100.0)
    assert rounds.next_wake == 100.0 + DEADLINE_S


def test_three_expiries_in_a_row_lose_the_run_and_name_the_missing() -> None:
    rounds = machine(members=("a", "b", "c"), granted="abc")
    expire(rounds, 0.0)
    expire(rounds, 100.0)

    (lost,) = expire(rounds, 200.0)

    assert isinstance(lost, Lost)
    assert (lost.key.attempt, lost.missing, lost.is_numeric) == (2, ("b", "c"), False)
    assert "missing: b, c" in lost.reason
    assert rounds.phase is Phase.LOST
    assert rounds.tick(1e9) == []


def test_what_was_refused_is_in_the_reason_for_which_a_run_is_lost() -> None:
    rounds = machine()
    for now in (0.0, 100.0, 200.0):
        refuse(rounds, "a", now)
        (expiry,) = refuse(rounds, "b", now)
        assert isinstance(expiry, RecordExpiry)
        end = rounds.expiry_recorded(expiry.key, now)

    (lost,) = end
    assert isinstance(lost, Lost)
    assert lost.reason == (
        f"3 attempts in a row expired, the last, {lost.key}: too few members have anything valid "
        f"to send; of attempt 2 a was out: declined: not finite; of attempt 2 b was out: declined: "
        f"not finite"
    )


def test_a_publication_starts_the_count_of_expiries_again() -> None:
    rounds = machine()
    for now in (0.0, 100.0):
        expire(rounds, now)
    publish(rounds, 200.0)

    for now in (300.0, 400.0):
        assert isinstance(expire(rounds, now)[0], Opened)


def test_three_results_in_a_row_that_are_not_finite_lose_the_run() -> None:
    rounds = machine()
    instructions: list[Instruction] = []
    for attempt in range(3):
        key = RoundKey(0, 3, 0, attempt)
        contribute(rounds, "a", attempt)
        contribute(rounds, "b", attempt)
        (expiry,) = rounds.result_broken(key, "theta is not finite", attempt)
        reason = "result not usable: theta is not finite"
        assert expiry == RecordExpiry(key, reason, (), broken_in_a_row=attempt + 1)
        assert rounds.version == 0
        instructions = rounds.expiry_recorded(key, attempt)

    (lost,) = instructions
    assert isinstance(lost, Lost)
    assert lost.is_numeric
    assert lost.missing == ()
    assert lost.reason.endswith("theta is not finite")


def test_results_that_could_not_be_used_count_over_a_restart() -> None:
    for num_before, is_lost in ((1, False), (2, True)):
        rounds = unfounded()
        rounds.founded(
            0, num_before, {}, 0.0, expired_in_a_row=num_before, broken_in_a_row=num_before
        )
        contribute(rounds, "a", 1.0)
        contribute(rounds, "b", 1.0)
        rounds.result_broken(rounds.key, "theta is not finite", 1.0)

        (end,) = rounds.expiry_recorded(rounds.key, 1.0)

        assert (isinstance(end, Lost) and end.is_numeric) == is_lost


@pytest.mark.parametrize("limit", [3, None])
@pytest.mark.parametrize("reason", ["theta is not finite", ""])
def test_a_run_that_was_lost_for_its_numbers_is_so_after_a_restart(
    limit: int | None, reason: str
) -> None:
    rounds = unfounded(max_expired_in_a_row=limit)

    (lost,) = rounds.founded(0, 4, {}, 0.0, expired_in_a_row=4, broken_in_a_row=3, reason=reason)

    assert isinstance(lost, Lost)
    assert lost.is_numeric
    assert lost.reason.endswith(reason or "results not usable")


def test_expiries_that_end_no_run_end_none_after_a_restart() -> None:
    rounds = unfounded(max_expired_in_a_row=None)

    rounds.founded(0, 9, {}, 0.0, expired_in_a_row=9, broken_in_a_row=2, missing=("b",))

    assert rounds.key.attempt == 9
    assert rounds.is_open


def rejected(rounds: FragmentRounds, now: float) -> tuple[RecordExpiry, list[Instruction]]:
    """Let a alone contribute, and the guard of the merge refuse it; returns what follows."""
    contribute(rounds, "a", now)
    _, expiry = rounds.rejected(rounds.key, {"a": f"too large at {now:g}"}, now)
    assert isinstance(expiry, RecordExpiry)
    return expiry, rounds.expiry_recorded(expiry.key, now)


def test_what_the_guard_refuses_is_no_expiry_in_a_row_also_not_after_a_restart() -> None:
    rounds = machine(members=("a",), granted="a")
    for n in range(7):
        expiry, (opened,) = rejected(rounds, n)
        assert isinstance(opened, Opened), "the run goes on"
        assert (expiry.rejected_in_a_row, expiry.missing) == (n + 1, ())

    again = unfounded(("a",))
    again.founded(0, 7, {}, 0.0, rejected_in_a_row=7, refused_at=expiry.refused_at)
    (close,) = contribute(again, "a", 8.0)

    assert isinstance(close, Close)
    assert close.rejected_in_a_row == 7
    again.committed(close.key, 8.0)
    (close,) = contribute(again, "a", 9.0)
    assert isinstance(close, Close)
    assert close.rejected_in_a_row == 0, "it was published meanwhile"


def test_what_the_guard_refuses_is_an_expiry_in_a_row_where_another_member_was_away() -> None:
    rounds = machine(min_contributions=1)
    for n in range(3):
        contribute(rounds, "a", 0.0)
        rounds.rejected(rounds.key, {"a": "too large"}, 0.0)
        (expiry,) = rounds.tick(DEADLINE_S)
        assert isinstance(expiry, RecordExpiry)
        assert (expiry.rejected_in_a_row, expiry.missing) == (0, ("b",))
        (last,) = rounds.expiry_recorded(expiry.key, 0.0)
        assert isinstance(last, Lost if n == 2 else Opened)


@pytest.mark.parametrize(("refused", "counted"), [("a", 0), ("ab", 2)])
def test_refusals_of_an_island_that_was_alone_change_nothing_for_a_round_with_another(
    refused: str, counted: int
) -> None:
    rounds = unfounded(min_contributions=1)
    rounds.founded(0, 2, {}, 0.0, rejected_in_a_row=2, refused_at=dict.fromkeys(refused, (1, "")))

    (close,) = contribute(rounds, "a")

    assert isinstance(close, Close)
    assert close.rejected_in_a_row == counted


def test_who_was_refused_hears_it_of_that_attempt_also_after_a_restart() -> None:
    rounds = machine(members=("a",), granted="a")
    first, second = RoundKey(0, 3, 0, 0), RoundKey(0, 3, 0, 1)
    rejected(rounds, 0.0)
    assert kind_of(rounds, first, "a") is OutcomeKind.REFUSED
    expiry, _ = rejected(rounds, 1.0)
    again = unfounded(("a",))
    again.founded(0, 2, {}, 0.0, rejected_in_a_row=2, refused_at=expiry.refused_at)

    for each in (rounds, again):
        assert each.outcome(second, "a", 1) == Outcome(
            second, OutcomeKind.REFUSED, "too large at 1"
        )
        assert kind_of(each, first, "a") is OutcomeKind.EXPIRED, "one is outstanding, the last"
        assert kind_of(each, second, "b") is OutcomeKind.EXPIRED


# -- flush ---------------------------------------------------------------------------------------


def test_a_flush_closes_only_with_everybodys_flush() -> None:
    rounds = machine(members=("a", "b", "c"), granted="abc", min_contributions=1, grace_s=0.0)

    assert contribute(rounds, "a", is_flush=True) == []
    assert contribute(rounds, "b", is_flush=True) == []
    (close,) = contribute(rounds, "c", is_flush=True)

    assert isinstance(close, Close)
    assert close.is_flush


def test_flush_and_ordinary_contributions_wait_for_the_deadline() -> None:
    rounds = machine()

    assert contribute(rounds, "a", 0.0, is_flush=True) == []
    assert contribute(rounds, "b", 1.0) == []
    (expiry,) = rounds.tick(DEADLINE_S)

    assert isinstance(expiry, RecordExpiry)
    assert "flush and ordinary ones are mixed" in expiry.reason


def test_a_flush_without_the_declined_closes() -> None:
    rounds = machine()
    contribute(rounds, "a", is_flush=True)

    (close,) = refuse(rounds, "b")

    assert isinstance(close, Close)
    assert close.is_flush


# -- fencing -------------------------------------------------------------------------------------


def test_a_newer_start_drops_the_lanes_of_the_older_and_fences_it() -> None:
    rounds = machine()
    contribute(rounds, "b")
    old = lane(rounds, "b", 1)

    assert rounds.granted("b", 2, 2.0) == [DropLanes(rounds.key, "b", 1)]

    assert rounds.participants.is_fenced("b", 1)
    assert rounds.admit(old) is Admission.FENCED
    assert rounds.lane_received(old, 3.0) == (Admission.FENCED, [])
    assert contribute(rounds, "a") == []
    (close,) = contribute(rounds, "b", incarnation=2)
    assert isinstance(close, Close)
    assert close.contributors[1].incarnation == 2


def test_a_lane_that_was_admitted_and_then_fenced_is_not_counted() -> None:
    rounds = machine()
    arrival = lane(rounds, "b")
    assert rounds.admit(arrival) is Admission.ACCEPTED

    rounds.granted("b", 2, 1.0)

    assert rounds.lane_received(arrival, 2.0) == (Admission.FENCED, [])
    assert rounds.current.contributions == {}


def test_the_same_grant_again_and_an_older_one_change_nothing() -> None:
    rounds = machine()
    contribute(rounds, "b")
    refuse(rounds, "a")

    rounds.granted("b", 1, 2.0)
    rounds.granted("a", 0, 2.0)

    assert rounds.phase is Phase.CLOSING


def test_what_closes_keeps_its_contributor_when_a_newer_start_appears() -> None:
    rounds = machine()
    key = rounds.key
    contribute(rounds, "a")
    contribute(rounds, "b")

    assert rounds.granted("b", 2, 2.0) == []
    rounds.committed(key, 3.0)

    assert kind_of(rounds, key, "b", 1) is OutcomeKind.INCLUDED
    assert kind_of(rounds, key, "b", 2) is OutcomeKind.NOT_INCLUDED


# -- quorum and grace, for what comes next ---------------------------------------------------------


def quorum(**rules: Any) -> FragmentRounds:
    values = {"min_contributions": 2, "grace_s": 10.0} | rules
    return machine(members=("a", "b", "c"), granted="abc", **values)


def test_grace_begins_at_the_quorum_and_ends_with_those_that_are_complete() -> None:
    rounds = quorum()
    contribute(rounds, "b", 1.0)
    assert contribute(rounds, "a", 5.0) == []
    assert (rounds.phase, rounds.next_wake) == (Phase.GRACE, 15.0)
    rounds.lane_received(lane(rounds, "c", 0), 6.0)

    assert rounds.tick(14.9) == []
    (close,) = rounds.tick(15.0)

    assert isinstance(close, Close)
    assert [c.island for c in close.contributors] == ["a", "b"]
    assert rounds.admit(lane(rounds, "c", 1)) is Admission.NOT_OPEN


def test_a_round_says_for_whom_it_waits_and_how_long() -> None:
    rounds = quorum()
    assert (rounds.waits_for, rounds.left_s(0.5)) == (["a", "b", "c"], math.inf)
    contribute(rounds, "b", 1.0)
    assert (rounds.waits_for, rounds.left_s(2.0)) == (["a", "c"], DEADLINE_S - 1.0)
    contribute(rounds, "a", 5.0)
    rounds.lane_received(lane(rounds, "c", 0), 6.0)
    assert (rounds.waits_for, rounds.left_s(7.0)) == (["c"], 8.0)

    rounds.tick(15.0)
    assert (rounds.waits_for, rounds.left_s(15.0)) == ([], math.inf)


def test_the_last_member_ends_the_grace_window() -> None:
    rounds = quorum()
    for island in "ab":
        contribute(rounds, island, 1.0)

    assert isinstance(contribute(rounds, "c", 2.0)[0], Close)


def test_without_grace_the_quorum_closes_at_once() -> None:
    rounds = quorum(grace_s=0.0)
    contribute(rounds, "a", 1.0)

    assert isinstance(contribute(rounds, "b", 1.0)[0], Close)


def test_a_quorum_that_was_reached_does_not_expire() -> None:
    rounds = quorum(grace_s=100.0)
    contribute(rounds, "a", 0.0)
    contribute(rounds, "b", 59.0)

    assert rounds.next_wake == DEADLINE_S
    assert isinstance(rounds.tick(DEADLINE_S)[0], Close)


@pytest.mark.parametrize(
    "take_away",
    [lambda rounds: refuse(rounds, "a", 3.0), lambda rounds: rounds.granted("a", 2, 3.0)],
    ids=["refused", "fenced"],
)
def test_a_quorum_that_falls_apart_ends_the_grace_window(
    take_away: Callable[[FragmentRounds], object],
) -> None:
    rounds = quorum()
    contribute(rounds, "a", 1.0)
    contribute(rounds, "b", 2.0)

    take_away(rounds)

    assert (rounds.phase, rounds.next_wake) == (Phase.OPEN, 1.0 + DEADLINE_S)
    assert rounds.tick(12.0) == []


def test_a_quorum_that_cannot_be_reached_any_more_expires_at_once() -> None:
    rounds = quorum()
    contribute(rounds, "a", 1.0)
    refuse(rounds, "b")

    assert isinstance(refuse(rounds, "c")[0], RecordExpiry)


# -- members who come and go ---------------------------------------------------------------------


def dynamic(*, granted: str = "abc", **rules: Any) -> FragmentRounds:
    values = {"min_contributions": 1, "min_members": 1, "max_expired_in_a_row": None} | rules
    return machine(members=("a", "b", "c"), granted=granted, **values)


def test_members_are_those_who_live_when_an_attempt_opens() -> None:
    rounds = dynamic(granted="")
    rounds.set_roster(Roster(("a", "c")), 1.0)
    rounds.granted("b", 1, 1.0)
    assert not rounds.is_open

    (opened,) = rounds.granted("c", 1, 2.0)

    assert isinstance(opened, Opened)
    assert opened.members == ("c",)


def test_an_attempt_whose_members_have_all_gone_expires() -> None:
    rounds = dynamic(granted="a")

    (expiry,) = rounds.set_roster(Roster(("b",)), 5.0)

    assert isinstance(expiry, RecordExpiry)
    assert rounds.expiry_recorded(expiry.key, 6.0) == []
    (opened,) = rounds.granted("b", 1, 7.0)
    assert isinstance(opened, Opened)


def test_an_attempt_that_a_member_has_left_has_a_deadline() -> None:
    rounds = dynamic(min_members=3)
    assert rounds.next_wake == math.inf

    assert rounds.set_roster(Roster(("a",)), 5.0) == []

    assert rounds.next_wake == 5.0 + DEADLINE_S


@pytest.mark.parametrize("is_known", [True, False])
def test_a_kicked_start_counts_nothing_and_its_next_one_does(is_known: bool) -> None:
    """Also where the fence is heard of before the start: a syncer that was restarted."""
    rounds = dynamic(granted="b")
    if is_known:
        rounds.granted("a", 1, 0.0)
    rounds.set_roster(Roster(("a", "b"), {"a": 2}), 1.0)

    assert rounds.granted("a", 1, 2.0) == []
    assert rounds.admit(lane(rounds, "a")) is Admission.FENCED
    rounds.granted("a", 2, 3.0)
    contribute(rounds, "b", 4.0)
    rounds.committed(rounds.key, 5.0)

    assert rounds.current.members == ("a", "b")


def test_a_member_may_be_taken_out_while_an_attempt_closes() -> None:
    """Twice, and the guard may refuse what it sent, too."""
    rounds = machine(members=("a", "b", "c"), granted="abc")
    for island in "abc":
        contribute(rounds, island, 1.0)
    assert rounds.phase is Phase.CLOSING
    for is_paused in (False, True):
        assert rounds.set_roster(Roster(("a", "b"), {"c": 2}, is_paused), 2.0) == []
    assert rounds.set_roster(Roster(("a", "b"), {"c": 2}), 2.0) == []

    drop, close = rounds.rejected(rounds.key, {"c": "norm"}, 3.0)

    assert drop == DropLanes(rounds.key, "c", 1)
    assert isinstance(close, Close) and [c.island for c in close.contributors] == ["a", "b"]
    _, opened = rounds.committed(rounds.key, 4.0)
    assert isinstance(opened, Opened) and opened.members == ("a", "b")


def test_an_attempt_whose_members_are_all_fenced_in_its_grace_window_expires() -> None:
    rounds = dynamic(min_members=3, grace_s=5.0)
    contribute(rounds, "a", 1.0)
    assert rounds.phase is Phase.GRACE

    *dropped, expiry = rounds.set_roster(Roster(("a", "b", "c"), dict.fromkeys("abc", 2)), 2.0)

    assert dropped == [DropLanes(rounds.key, "a", 1)]
    assert isinstance(expiry, RecordExpiry)
    assert expiry.reason == "too few members have anything valid to send"


def closing_of_three(now: float = 1.0) -> FragmentRounds:
    rounds = dynamic(min_contributions=None, min_members=3)
    for island in "abc":
        contribute(rounds, island, now)
    assert rounds.phase is Phase.CLOSING
    return rounds


def test_who_is_fenced_while_an_attempt_closes_leaves_it_if_it_opens_again() -> None:
    rounds = closing_of_three()
    assert rounds.set_roster(Roster(("a", "b", "c"), {"b": 2}), 2.0) == []

    *dropped, close = rounds.rejected(rounds.key, {"a": "norm"}, 3.0)

    assert sorted(dropped, key=str) == [DropLanes(rounds.key, i, 1) for i in "ab"]
    assert isinstance(close, Close)
    assert [c.island for c in close.contributors] == ["c"]
    assert close.refused == {"a": "norm", "b": "fenced by the coordinator"}


def test_who_starts_again_while_an_attempt_closes_is_awaited_if_it_opens_again() -> None:
    rounds = closing_of_three()
    rounds.granted("b", 2, 2.0)

    assert rounds.rejected(rounds.key, {"a": "norm"}, 3.0) == [
        DropLanes(rounds.key, "b", 1),
        DropLanes(rounds.key, "a", 1),
    ]
    (close,) = contribute(rounds, "b", 4.0, incarnation=2)

    assert isinstance(close, Close)
    assert [(c.island, c.incarnation) for c in close.contributors] == [("b", 2), ("c", 1)]


def test_what_the_merge_refuses_of_a_start_that_was_fenced_meanwhile_counts_for_no_other() -> None:
    rounds = closing_of_three()
    for island in "abc":
        rounds.granted(island, 2, 2.0)

    dropped = rounds.rejected(rounds.key, dict.fromkeys("abc", "norm"), 3.0)

    assert dropped == [DropLanes(rounds.key, i, 1) for i in "abc"]
    assert math.isinf(rounds.next_wake), "nobody is late: all of them have started again"
    for island in "abc":
        instructions = contribute(rounds, island, 4.0, incarnation=2)
    assert isinstance(instructions[0], Close)


def test_an_attempt_of_which_nobody_lives_when_it_opens_again_expires() -> None:
    rounds = dynamic(min_members=3)
    contribute(rounds, "a", 1.0)
    assert rounds.phase is Phase.CLOSING
    rounds.set_roster(Roster(("a",)), 2.0)

    *_, expiry = rounds.rejected(rounds.key, {"a": "norm"}, 3.0)

    assert isinstance(expiry, RecordExpiry)
    assert expiry.reason == "none of its members lives"


def test_flush_attempts_take_flushes_only_and_close_with_those_that_came() -> None:
    rounds = dynamic(min_contributions=None, min_members=3)
    assert rounds.admit(lane(rounds, "a", is_flush=True)) is Admission.INVALID
    contribute(rounds, "a", 1.0)
    rounds.finishing()
    for island in "bc":  # what was open stays what it was
        contribute(rounds, island, 1.0)
    (_, opened) = rounds.committed(rounds.key, 2.0)
    assert isinstance(opened, Opened)
    assert opened.is_flush

    assert rounds.admit(lane(rounds, "a")) is Admission.INVALID
    contribute(rounds, "a", 3.0, is_flush=True)
    (close,) = rounds.tick(3.0 + DEADLINE_S)

    assert isinstance(close, Close)
    assert close.is_flush
    assert [c.island for c in close.contributors] == ["a"]


# -- misuse --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event",
    [
        lambda rounds: rounds.committed(rounds.key, 0.0),
        lambda rounds: rounds.expiry_recorded(rounds.key, 0.0),
        lambda rounds: rounds.result_broken(rounds.key, "", 0.0),
        lambda rounds: rounds.founded(0, 0, {}, 0.0),
    ],
    ids=["committed", "expiry_recorded", "result_broken", "founded"],
)
def test_an_event_out_of_its_phase_is_an_error_with_the_history(
    event: Callable[[FragmentRounds], object],
) -> None:
    rounds = machine()

    with pytest.raises(InvalidTransition, match=r"(?s)in phase open of t0/f3/v0/a0.*opened"):
        event(rounds)


def test_a_commit_of_another_round_is_an_error() -> None:
    rounds = machine()
    contribute(rounds, "a")
    contribute(rounds, "b")

    with pytest.raises(InvalidTransition):
        rounds.committed(RoundKey(0, 3, 0, 1), 0.0)


def test_whose_lanes_are_all_verified_is_looked_at_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    islands = tuple(f"island-{number:03d}" for number in range(500))
    rounds = FragmentRounds(0, 0, RoundRules(members=islands, num_lanes=1, deadline_s=60.0))
    rounds.founded(0, 0, {}, 0.0)
    looked_at: list[str] = []
    is_here = Attempt._is_here

    def look(attempt: Attempt, island: str) -> bool:
        looked_at.append(island)
        return is_here(attempt, island)

    monkeypatch.setattr(Attempt, "_is_here", look)
    for island in islands:
        rounds.granted(island, 1, 0.0)
    for island in islands:
        arrival = lane(rounds, island)
        rounds.lane_arrived(arrival, 1.0)
        assert rounds.current.is_held_up
        rounds.lane_received(arrival, 1.0)
        assert rounds.phase is Phase.CLOSING or rounds.next_wake > 1.0

    assert set(looked_at) == set(islands)
    assert len(looked_at) < 10 * len(islands)


def test_expiries_in_a_row_are_counted_over_a_restart_of_the_syncer() -> None:
    rules = RoundRules(members=("a", "b"), num_lanes=1, deadline_s=5.0)
    again = FragmentRounds(0, 0, rules)
    lost = FragmentRounds(0, 0, rules)

    again.founded(4, 2, {}, 0.0, expired_in_a_row=2)
    for island in rules.members:
        again.granted(island, 1, 0.0)
    again.refused(again.key, "a", 1, "declined", 1.0)
    again.refused(again.key, "b", 1, "declined", 1.0)
    third = again.expiry_recorded(again.key, 1.0)
    after = lost.founded(
        4, 3, {}, 0.0, expired_in_a_row=3, missing=("b",), refused_at={"a": (2, "its norm")}
    )

    assert [type(instruction) for instruction in (*third, *after)] == [Lost, Lost]
    assert isinstance(after[0], Lost)
    assert after[0].missing == ("b",)
    assert after[0].reason.endswith(
        "before this restart; missing: b; of attempt 2 a was out: its norm"
    )
    assert lost.granted("a", 1, 1.0) == []
    assert not lost.is_open


def test_a_new_start_of_an_island_that_declined_waits_for_the_next_round() -> None:
    rounds = FragmentRounds(0, 0, RoundRules(members=("a", "b"), num_lanes=1, deadline_s=5.0))
    rounds.founded(0, 0, {}, 0.0)
    for island in ("a", "b"):
        rounds.granted(island, 1, 0.0)
    key = rounds.key
    rounds.refused(key, "a", 1, "declined", 1.0)

    assert rounds.granted("a", 2, 2.0) == []

    assert rounds.outcome(key, "a", 2) == Outcome(key, OutcomeKind.REFUSED, "declined")
    _, (close,) = rounds.lane_received(LaneArrival(key, "b", 1, 0, b"", 1, 1, 4, False), 3.0)
    assert isinstance(close, Close)
    assert [c.island for c in close.contributors] == ["b"]
    _, opened = rounds.committed(key, 4.0)
    assert isinstance(opened, Opened) and opened.members == ("a", "b")


# -- verification is nobody's lateness -----------------------------------------------------------


def arrive(rounds: FragmentRounds, island: str, now: float) -> list[LaneArrival]:
    """All lanes of a contribution are here, none is verified."""
    lanes = [lane(rounds, island, lane_id) for lane_id in range(rounds.rules.num_lanes)]
    for each in lanes:
        rounds.lane_arrived(each, now)
    return lanes


def test_what_came_whole_in_the_grace_window_is_counted_however_long_its_verification_takes() -> (
    None
):
    rounds = machine(granted="abc", members=("a", "b", "c"), min_contributions=1, grace_s=5.0)
    contribute(rounds, "a", 1.0)
    lanes = arrive(rounds, "b", 5.9)

    assert rounds.next_wake == math.inf
    assert rounds.tick(500.0) == []
    assert rounds.lane_received(lanes[0], 500.0) == (Admission.ACCEPTED, [])
    _, (close,) = rounds.lane_received(lanes[1], 501.0)

    assert isinstance(close, Close)
    assert [c.island for c in close.contributors] == ["a", "b"]


def test_what_came_whole_by_the_deadline_is_counted() -> None:
    rounds = machine()
    contribute(rounds, "a", 1.0)
    lanes = arrive(rounds, "b", 1.0 + DEADLINE_S)

    assert rounds.tick(500.0) == []
    rounds.lane_received(lanes[1], 500.0)
    _, (close,) = rounds.lane_received(lanes[0], 500.0)

    assert isinstance(close, Close)


def test_a_part_of_a_contribution_and_one_that_came_after_the_end_hold_nothing_up() -> None:
    rounds = machine(granted="abc", members=("a", "b", "c"), min_contributions=1, grace_s=5.0)
    contribute(rounds, "a", 1.0)
    rounds.lane_arrived(lane(rounds, "b", 0), 2.0)
    arrive(rounds, "c", 6.5)

    assert rounds.next_wake == 6.0
    (close,) = rounds.tick(6.6)
    assert isinstance(close, Close)


@pytest.mark.parametrize("how", ["cut", "refused", "started again", "fenced"])
def test_a_round_ends_once_what_held_it_up_does_not_count(how: str) -> None:
    rounds = machine()
    contribute(rounds, "a", 1.0)
    first, _ = arrive(rounds, "b", 2.0)
    assert rounds.tick(500.0) == []

    match how:
        case "cut":
            (instruction,) = rounds.lane_given_up(first, 500.0)
        case "refused":
            (instruction,) = refuse(rounds, "b", 500.0)
        case "started again":
            (instruction,) = rounds.granted("b", 2, 500.0)
        case _:
            (instruction,) = rounds.set_roster(Roster(("a", "b"), {"b": 2}), 500.0)

    if how in ("refused", "fenced"):
        assert isinstance(instruction, Close), "a is all that is left"
    else:
        assert isinstance(instruction, RecordExpiry)
        assert instruction.missing == ("b",)


def test_what_an_earlier_start_sent_releases_nothing_of_the_present_one() -> None:
    rounds = machine()
    contribute(rounds, "a", 1.0)
    earlier, _ = arrive(rounds, "b", 2.0)
    rounds.granted("b", 2, 3.0)
    for lane_id in range(NUM_LANES):
        rounds.lane_arrived(lane(rounds, "b", lane_id, incarnation=2), 4.0)

    assert rounds.lane_given_up(earlier, 5.0) == []
    assert rounds.tick(500.0) == []


def test_what_was_verified_while_the_guard_refused_all_others_holds_nothing_up() -> None:
    rounds = machine(granted="abc", members=("a", "b", "c"), min_contributions=1)
    first = lane(rounds, "c", 0)
    rounds.lane_arrived(first, 0.5)
    contribute(rounds, "a", 1.0)
    assert rounds.phase is Phase.CLOSING
    assert rounds.lane_received(first, 2.0) == (Admission.NOT_OPEN, [])
    (dropped,) = rounds.rejected(rounds.key, {"a": "guard"}, 3.0)
    assert isinstance(dropped, DropLanes)

    rounds.lane_received(lane(rounds, "c", 1), 4.0)

    assert rounds.next_wake == 3.0 + DEADLINE_S, "the merge took 2 s, and nobody was late in these"
    (expiry,) = rounds.tick(3.0 + DEADLINE_S)
    assert isinstance(expiry, RecordExpiry)
    assert expiry.missing == ("b", "c")


def test_of_a_lane_that_came_twice_the_end_of_one_call_releases_the_other_not() -> None:
    rounds = machine()
    contribute(rounds, "a", 1.0)
    lanes = arrive(rounds, "b", 2.0)
    again = lane(rounds, "b", 0)
    rounds.lane_arrived(again, 3.0)

    assert rounds.lane_given_up(again, 500.0) == []
    assert rounds.tick(500.0) == []
    rounds.lane_received(lanes[0], 500.0)
    _, (close,) = rounds.lane_received(lanes[1], 501.0)
    assert isinstance(close, Close)


def test_a_call_that_is_cut_before_its_lane_was_here_releases_nothing() -> None:
    rounds = machine()
    contribute(rounds, "a", 1.0)
    arrive(rounds, "b", 2.0)

    assert rounds.lane_given_up(lane(rounds, "b", 0), 500.0) == []
    assert rounds.tick(500.0) == []


def test_who_lapsed_with_a_whole_contribution_is_waited_for_until_it_is_verified() -> None:
    rounds = dynamic(min_contributions=2)
    contribute(rounds, "a", 1.0)
    lanes = arrive(rounds, "b", 2.0)

    assert rounds.set_roster(Roster(()), 3.0) == []
    rounds.lane_received(lanes[0], 4.0)
    _, (close,) = rounds.lane_received(lanes[1], 4.0)

    assert isinstance(close, Close)
    assert [c.island for c in close.contributors] == ["a", "b"]


def test_members_that_one_roster_takes_out_leave_before_anything_closes() -> None:
    rounds = dynamic(min_contributions=None, min_members=3)
    contribute(rounds, "b", 1.0)
    contribute(rounds, "c", 1.0)

    drop, close = rounds.set_roster(Roster(("a", "b", "c"), {"a": 2, "b": 2}), 2.0)

    assert drop == DropLanes(rounds.key, "b", 1)
    assert isinstance(close, Close)
    assert [c.island for c in close.contributors] == ["c"], "b is fenced as a is"
