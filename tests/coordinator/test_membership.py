"""Joins, incarnations, departures and the plan, without clock, disk or network."""

from __future__ import annotations

import json

import pytest

from diloco.config.classes import identity_difference
from diloco.coordinator.membership import Joined, JoinVerdict, Membership
from diloco.outer.fragments import TensorSpec, make_plan

PLAN = make_plan([TensorSpec("a", (3, 5)), TensorSpec("b", (7,))], num_fragments=2).to_json()
OTHER_PLAN = make_plan([TensorSpec("a", (3, 6)), TensorSpec("b", (7,))], num_fragments=2).to_json()
IDENTITY = json.dumps({"outer.overlap_steps": 1, "run.seed": 7})


def machine() -> Membership:
    return Membership("demo", ("east", "west"), IDENTITY, identity_difference)


def join(membership: Membership, island: str = "east", start_id: str = "a", **changes) -> Joined:
    """Join as the coordinator does it: decide, write, apply."""
    request = {"run": "demo", "identity_json": IDENTITY, "plan_json": PLAN, **changes}
    request.setdefault("corpus_sha256", "5a")
    joined = membership.join(island=island, start_id=start_id, **request)
    membership.apply(joined.entries)
    return joined


def test_slots_follow_the_order_of_the_configuration() -> None:
    assert {name: m.slot for name, m in machine().members.items()} == {"east": 0, "west": 1}


def test_every_start_gets_the_next_incarnation_and_keeps_it() -> None:
    membership = machine()

    joins = [join(membership, start_id=start_id) for start_id in ("a", "a", "b", "a", "c", "b")]

    assert [joined.incarnation for joined in joins] == [1, 1, 2, 1, 3, 2]
    assert membership.is_current("east", 3)
    assert not membership.is_current("east", 2)
    assert not membership.is_current("north", 0)


def test_join_that_was_not_applied_has_changed_nothing() -> None:
    membership = machine()

    first = membership.join(
        run="demo",
        island="east",
        identity_json=IDENTITY,
        plan_json=PLAN,
        corpus_sha256="5a",
        start_id="a",
    )
    second = join(membership, plan_json=OTHER_PLAN)

    assert first.entries
    assert (first.incarnation, second.incarnation) == (1, 1)
    assert membership.plan_json == OTHER_PLAN


def test_repeated_join_has_nothing_to_write() -> None:
    membership = machine()

    assert [key for key, _ in join(membership).entries] == ["plan", "corpus", "island/east"]
    assert [key for key, _ in join(membership, "west").entries] == ["island/west"]
    assert join(membership).entries == ()


@pytest.mark.parametrize(
    ("island", "changes", "verdict", "words"),
    [
        ("east", {"run": "other"}, JoinVerdict.WRONG_RUN, ["'demo'", "'other'"]),
        ("north", {}, JoinVerdict.UNKNOWN_ISLAND, ["'north'", "east, west"]),
        (
            "east",
            {"identity_json": json.dumps({"outer.overlap_steps": 2, "run.seed": 7})},
            JoinVerdict.FINGERPRINT_MISMATCH,
            ["'east'", "outer.overlap_steps: 1 here, 2 there"],
        ),
        (
            "east",
            {"identity_json": json.dumps({"outer.overlap_steps": 1})},
            JoinVerdict.FINGERPRINT_MISMATCH,
            ["run.seed: 7 here, absent there"],
        ),
        (
            "east",
            {"plan_json": OTHER_PLAN},
            JoinVerdict.PLAN_MISMATCH,
            ["'east'", "tensors[0].shape[1]: 5 here, 6 there"],
        ),
        (
            "east",
            {"corpus_sha256": "5b"},
            JoinVerdict.FINGERPRINT_MISMATCH,
            ["'east'", "5b (there)", "5a (here)", "same release of Python"],
        ),
        ("east", {"plan_json": ""}, JoinVerdict.PLAN_MISMATCH, ["no usable plan"]),
        ("east", {"plan_json": "{}"}, JoinVerdict.PLAN_MISMATCH, ["no usable plan"]),
    ],
    ids=["run", "island", "identity", "key", "plan", "text", "plan-empty", "plan-malformed"],
)
def test_mismatch_is_refused_naming_both_values_and_leaves_no_trace(
    island: str, changes: dict[str, str], verdict: JoinVerdict, words: list[str]
) -> None:
    membership = machine()
    join(membership, "west")

    refused = join(membership, island, **changes)

    assert refused.verdict is verdict
    assert (refused.incarnation, refused.entries) == (0, ())
    assert all(word in refused.message for word in words), refused.message
    assert membership.members["east"].incarnation == 0


def test_malformed_plan_cannot_found_a_run() -> None:
    membership = machine()

    refused = join(membership, plan_json="[]")

    assert refused.verdict is JoinVerdict.PLAN_MISMATCH
    assert membership.plan_json == ""


def test_restart_takes_back_plan_incarnations_and_departures() -> None:
    before, entries = machine(), {}
    for island, start_id in [("east", "a"), ("east", "b"), ("west", "c")]:
        entries.update(join(before, island, start_id).entries)
    entries.update(before.left("east", 2, 0))

    after = machine()
    after.apply({**entries, "island/gone": "{}", "later": "kind of entry"}.items())

    assert after.plan_json == PLAN
    assert join(after, "east", "a").incarnation == 1
    assert join(after, "west", "c").incarnation == 1
    assert after.members["east"].exit_code == 0
    assert not after.is_finished
    after.apply(after.left("west", 1, 0))
    assert after.is_finished


@pytest.mark.parametrize(
    ("exits", "is_finished", "is_deserted"),
    [
        ({}, False, False),
        ({"east": 0}, False, False),
        ({"east": 0, "west": 0}, True, True),
        ({"east": 0, "west": 40}, False, True),
    ],
    ids=["none", "one", "both", "one-failed"],
)
def test_run_is_finished_when_all_left_well_and_deserted_when_all_left(
    exits: dict[str, int], is_finished: bool, is_deserted: bool
) -> None:
    membership = machine()
    join(membership, "east")
    join(membership, "west")

    for island, exit_code in exits.items():
        membership.apply(membership.left(island, 1, exit_code))

    assert (membership.is_finished, membership.is_deserted) == (is_finished, is_deserted)


def test_new_start_is_at_work_again_and_its_forerunner_cannot_say_otherwise() -> None:
    membership = machine()
    join(membership, start_id="a")
    membership.apply(membership.left("east", 1, 40))

    join(membership, start_id="b")
    stale = membership.left("east", 1, 0)

    assert stale == ()
    assert membership.members["east"].exit_code is None


def test_first_reason_of_a_failure_stays() -> None:
    membership = machine()

    membership.failed("quorum lost", 50)
    membership.failed("syncer ended", 1)

    assert (membership.fatal_reason, membership.fatal_exit_code) == ("quorum lost", 50)
