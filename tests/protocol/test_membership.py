"""Joins, incarnations, departures and the plan, without clock, disk or network."""

from __future__ import annotations

import json

import pytest

from diloco.config.classes import identity_difference
from diloco.outer.fragments import TensorSpec, make_plan
from diloco.protocol.run.admission import Entries, Joined, JoinVerdict
from diloco.protocol.run.assignment import FragmentAssignment
from diloco.protocol.run.members import REMEMBERED_STARTS
from diloco.protocol.run.membership import Membership
from diloco.refusals import Cause

PLAN = make_plan([TensorSpec("a", (3, 5)), TensorSpec("b", (7,))], num_fragments=2).to_json()
OTHER_PLAN = make_plan([TensorSpec("a", (3, 6)), TensorSpec("b", (7,))], num_fragments=2).to_json()
IDENTITY = json.dumps({"outer.overlap_steps": 1, "run.seed": 7})


def machine() -> Membership:
    return Membership(
        "demo",
        ("east", "west"),
        IDENTITY,
        identity_difference,
        inner_steps=100,
        num_checkpoints=2,
    )


def join(membership: Membership, island: str = "east", start_id: str = "a", **changes) -> Joined:
    """Join as the coordinator does it: decide, write, apply."""
    joined = decided(membership, island, start_id, **changes)
    membership.apply(joined.entries)
    return joined


def decided(membership: Membership, island: str, start_id: str, **changes) -> Joined:
    request = {"run": "demo", "identity_json": IDENTITY, "plan_json": PLAN, **changes}
    request.setdefault("corpus_sha256", "5a")
    request.setdefault("tokenizer_digest", "bytes")
    request.setdefault("start_step", 0)
    return membership.join(island=island, start_id=start_id, **request)


def test_slots_follow_the_order_of_the_configuration() -> None:
    assert {name: m.slot for name, m in machine().members.items()} == {"east": 0, "west": 1}


def test_every_start_gets_the_next_incarnation_and_keeps_it() -> None:
    membership = machine()

    joins = [join(membership, start_id=start_id) for start_id in ("a", "a", "b", "a", "c", "b")]

    assert [joined.incarnation for joined in joins] == [1, 1, 2, 1, 3, 2]
    assert membership.is_current("east", 3, 0)
    assert not membership.is_current("east", 2, 0)
    assert not membership.is_current("east", 3, 1)
    assert not membership.is_current("north", 0, 0)


def test_an_island_that_starts_again_and_again_is_remembered_by_its_newest_starts() -> None:
    membership, sizes = machine(), []

    for n in range(3 * REMEMBERED_STARTS):
        joined = join(membership, start_id=f"{n:032x}")
        assert joined.incarnation == n + 1
        sizes.append(sum(len(value) for key, value in joined.entries if key == "island/east"))

    assert sizes[-1] < 1.01 * sizes[2 * REMEMBERED_STARTS] < 50 * REMEMBERED_STARTS
    newest, oldest = membership.members["east"].incarnation, 2 * REMEMBERED_STARTS
    assert newest == 3 * REMEMBERED_STARTS
    assert join(membership, start_id=f"{oldest:032x}").incarnation == oldest + 1
    assert membership.is_current("east", newest, 0)
    again = machine()
    again.apply([("island/east", joined.entries[0][1])])
    assert again.members == membership.members


def test_join_that_was_not_applied_has_changed_nothing() -> None:
    membership = machine()

    first = membership.join(
        run="demo",
        island="east",
        identity_json=IDENTITY,
        plan_json=PLAN,
        corpus_sha256="5a",
        tokenizer_digest="bytes",
        start_step=0,
        start_id="a",
    )
    second = join(membership, plan_json=OTHER_PLAN)

    assert first.entries
    assert (first.incarnation, second.incarnation) == (1, 1)
    assert membership.plan_json == OTHER_PLAN


def test_repeated_join_has_nothing_to_write() -> None:
    membership = machine()

    keys = [key for key, _ in join(membership).entries]
    assert keys == ["plan", "corpus", "tokenizer", "start", "island/east", "generation"]
    assert [key for key, _ in join(membership, "west").entries] == ["island/west", "generation"]
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
        (
            "east",
            {"tokenizer_digest": "9f/2"},
            JoinVerdict.FINGERPRINT_MISMATCH,
            ["'east'", "data.tokenizer", "'9f/2' (there)", "'bytes' (here)"],
        ),
        (
            "east",
            {"tokenizer_digest": "x" * 1000},
            JoinVerdict.FINGERPRINT_MISMATCH,
            ["tokenizer", "1000 characters; 256 are allowed"],
        ),
        (
            "east",
            {"corpus_sha256": "x" * 1000},
            JoinVerdict.FINGERPRINT_MISMATCH,
            ["text", "1000 characters; 256 are allowed"],
        ),
        (
            "east",
            {"start_step": 300},
            JoinVerdict.FINGERPRINT_MISMATCH,
            ["'east'", "inner step 300 (there)", "started at 0 (here)", "run.warm_start"],
        ),
        ("east", {"plan_json": ""}, JoinVerdict.PLAN_MISMATCH, ["no usable plan"]),
        ("east", {"plan_json": "{}"}, JoinVerdict.PLAN_MISMATCH, ["num_lanes: 16 here", "null"]),
    ],
    ids=[
        "run",
        "island",
        "identity",
        "key",
        "plan",
        "text",
        "tokenizer",
        "tokenizer-size",
        "text-size",
        "start",
        "plan-empty",
        "plan-malformed",
    ],
)
def test_mismatch_is_refused_naming_both_values_and_leaves_no_trace(
    island: str, changes: dict[str, object], verdict: JoinVerdict, words: list[str]
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


def test_a_plan_of_another_number_of_fragments_cannot_found_a_run() -> None:
    identity = json.dumps({"outer.num_fragments": 2})
    membership = Membership(
        "demo", ("east", "west"), identity, identity_difference, 100, num_checkpoints=2,
        assignment=FragmentAssignment({"a": 1.0, "b": 1.0}),
    )  # fmt: skip
    of_one = make_plan([TensorSpec("a", (3, 5)), TensorSpec("b", (7,))], num_fragments=1).to_json()

    refused = join(membership, identity_json=identity, plan_json=of_one)
    accepted = join(membership, "west", identity_json=identity)

    assert refused.verdict is JoinVerdict.PLAN_MISMATCH
    assert "1 fragments (there), outer.num_fragments = 2 (here)" in refused.message
    assert (refused.cause, refused.entries) == (Cause.PLAN, ())
    assert accepted.verdict is JoinVerdict.ACCEPTED


def test_restart_takes_back_plan_incarnations_and_departures() -> None:
    before, entries = machine(), {}
    for island, start_id in [("east", "a"), ("east", "b"), ("west", "c")]:
        entries.update(join(before, island, start_id).entries)
    entries.update(before.left("east", 0, is_stopped=False))

    after = machine()
    after.apply({**entries, "island/gone": "{}", "later": "kind of entry"}.items())

    assert after.plan_json == PLAN
    assert join(after, "east", "a").incarnation == 1
    assert join(after, "west", "c").incarnation == 1
    assert after.members["east"].exit_code == 0
    assert not after.is_finished
    after.apply(after.left("west", 0, is_stopped=False))
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
        membership.apply(membership.left(island, exit_code, is_stopped=False))

    assert (membership.is_finished, membership.is_deserted) == (is_finished, is_deserted)


def test_new_start_is_at_work_again() -> None:
    membership = machine()
    join(membership, start_id="a")
    membership.apply(membership.left("east", 40, is_stopped=False))

    join(membership, start_id="b")

    assert membership.members["east"].exit_code is None


def test_first_reason_of_a_failure_stays_also_over_a_restart() -> None:
    membership, after = machine(), machine()

    entries = membership.failed("quorum lost", 50)
    membership.apply(entries)
    after.apply(entries)

    assert membership.failed("syncer ended", 1) == ()
    assert (after.fatal_reason, after.fatal_exit_code) == ("quorum lost", 50)


# -- start step ----------------------------------------------------------------------------------


def test_first_join_fixes_where_the_run_starts() -> None:
    membership = machine()

    first = join(membership, start_step=300)
    second = join(membership, "west", start_step=300)
    other = join(membership, "west", "b", start_step=0)

    assert first.verdict is second.verdict is JoinVerdict.ACCEPTED
    assert membership.start_step == 300
    assert "inner step 0 (there), the run started at 300 (here)" in other.message


# -- stop ----------------------------------------------------------------------------------------


def complete() -> tuple[Membership, dict[str, str]]:
    """Both islands at work, and all entries so far."""
    membership, entries = machine(), {}
    for island in ("east", "west"):
        entries.update(join(membership, island).entries)
    return membership, entries


def do(membership: Membership, entries: Entries, log: dict[str, str] | None = None) -> Entries:
    """Write and apply."""
    membership.apply(entries)
    if log is not None:
        log.update(entries)
    return entries


@pytest.mark.parametrize(
    ("promises", "stop_step"),
    [
        ([], None),
        ([("east", 24)], None),
        ([("east", 24), ("west", 36)], 36),
        ([("east", 36), ("west", 24)], 36),
        ([("east", 24), ("east", 12), ("west", 18)], 24),
        ([("east", 24), ("west", 36), ("east", 48)], 36),
    ],
    ids=["none", "one", "both", "other-order", "one-promise-a-start", "decided-is-decided"],
)
def test_all_stop_after_the_largest_promise(
    promises: list[tuple[str, int]], stop_step: int | None
) -> None:
    membership, _ = complete()
    do(membership, membership.request_stop())

    for island, hold_step in promises:
        do(membership, membership.promise(island, hold_step))

    assert membership.is_stopping
    assert membership.stop_step == stop_step


def test_a_promise_that_nobody_asked_for_counts_for_nothing() -> None:
    membership, _ = complete()

    assert membership.promise("east", 12) == ()
    assert not membership.is_stopping


@pytest.mark.parametrize("event", ["missing", "asked", "deserted"])
def test_there_may_be_nobody_to_ask(event: str) -> None:
    membership = machine()
    join(membership, "east")
    if event != "missing":
        join(membership, "west")
    if event == "asked":
        do(membership, membership.request_stop())
    if event == "deserted":
        for island in ("east", "west"):
            do(membership, membership.left(island, 40, is_stopped=False))

    assert membership.request_stop() == ()
    assert membership.is_stopping is (event == "asked")


def test_a_repeated_promise_writes_nothing() -> None:
    membership, _ = complete()
    do(membership, membership.request_stop())

    assert do(membership, membership.promise("east", 12))
    assert membership.promise("east", 12) == ()


@pytest.mark.parametrize("num_applied", range(10))
def test_a_stop_goes_on_where_it_was_after_a_restart_anywhere(num_applied: int) -> None:
    membership, log = complete()
    story = [
        lambda m: m.request_stop(),
        lambda m: m.promise("west", 36),
        lambda m: m.promise("east", 24),
        lambda m: decided(m, "west", "b").entries,
        lambda m: m.promise("west", 48),
        # Reports come every second, and what is kept is in all of them.
        lambda m: (*m.keeps("west", [48], inner_step=48), *m.keeps("east", [36], inner_step=36)),
        lambda m: (*m.keeps("west", [48], inner_step=48), *m.keeps("east", [48], inner_step=48)),
        lambda m: m.left("west", 0, is_stopped=True),
        lambda m: m.left("east", 0, is_stopped=True),
    ]
    for number, event in enumerate(story):
        if number == num_applied:
            membership = machine()
            membership.apply(log.items())
        do(membership, event(membership), log)

    after = machine()
    after.apply(log.items())
    assert after.is_stopped and not after.is_finished
    assert after.stop_step == 48
    assert after.checkpoints == (48,)


def deciding(east: int, west: int) -> Membership:
    """A run that was asked to stop, with both promises."""
    membership, _ = complete()
    do(membership, membership.request_stop())
    do(membership, membership.promise("east", east))
    do(membership, membership.promise("west", west))
    return membership


@pytest.mark.parametrize(
    ("promise", "stop_step"),
    [(30, 36), (36, 36), (48, 48), (100, 100)],
    ids=["before-it", "at-it", "beyond-it", "no-send-is-left"],
)
def test_a_new_start_promises_again_and_may_move_the_stop_on_but_never_back(
    promise: int, stop_step: int
) -> None:
    membership = deciding(24, 36)
    join(membership, "west", "b")

    assert membership.is_stopping
    assert membership.stop_step is None
    assert membership.promise("east", 24) == (), "it was told 36, and may have passed 24"
    do(membership, membership.promise("west", promise))

    assert membership.stop_step == stop_step


def test_a_new_start_before_all_have_promised_promises_again() -> None:
    membership, _ = complete()
    do(membership, membership.request_stop())
    do(membership, membership.promise("east", 24))
    join(membership, "east", "b")

    do(membership, membership.promise("west", 12))
    assert membership.stop_step is None
    do(membership, membership.promise("east", 18))

    assert membership.stop_step == 18


def test_what_an_earlier_start_has_kept_makes_no_stop_complete() -> None:
    membership = deciding(36, 36)
    do(membership, membership.keeps("west", [36], inner_step=36))
    join(membership, "west", "b")
    do(membership, membership.promise("west", 36))
    do(membership, membership.keeps("east", [36], inner_step=36))

    assert membership.stop_step == 36
    assert not membership.is_stop_complete, "the new start may be writing it"
    do(membership, membership.keeps("west", [36], inner_step=36))
    assert membership.is_stop_complete


@pytest.mark.parametrize("is_restarted", [False, True], ids=["at-once", "after-a-restart"])
@pytest.mark.parametrize(
    ("earlier", "left"), [((20, 36), (20,)), ((42, 48), ()), ((36, 42), ())], ids=str
)
def test_a_stop_is_complete_with_what_is_written_for_it_whatever_earlier_starts_had(
    earlier: tuple[int, ...], left: tuple[int, ...], is_restarted: bool
) -> None:
    """All were killed after steps that were never published, and stop before they are redone."""
    membership, log = complete()
    for island in ("east", "west"):
        do(membership, membership.keeps(island, earlier, inner_step=50), log)
    assert membership.checkpoints == earlier
    for island in ("east", "west"):
        do(membership, decided(membership, island, "b").entries, log)
    do(membership, membership.request_stop(), log)
    do(membership, membership.promise("east", 36), log)
    assert membership.checkpoints == earlier
    do(membership, membership.promise("west", 24), log)
    if is_restarted:
        membership = machine()
        membership.apply(log.items())

    assert (membership.stop_step, membership.checkpoints) == (36, left)
    assert not membership.is_stop_complete, "nobody has written it since"
    for island in ("east", "west"):
        do(membership, membership.keeps(island, [36], inner_step=36), log)

    assert membership.is_stop_complete
    assert membership.checkpoints == (*left, 36), "a resume goes on from the stop"


def test_who_starts_after_a_complete_stop_has_left_in_it() -> None:
    membership = deciding(36, 36)
    for island in ("east", "west"):
        do(membership, membership.keeps(island, [36], inner_step=36))
    do(membership, membership.left("east", 0, is_stopped=True))
    assert not membership.is_stopped

    refused = join(membership, "west", "b")

    assert (refused.verdict, refused.incarnation) == (JoinVerdict.RUN_STOPPED, 0)
    assert "stopped after inner step 36" in refused.message
    assert "diloco coordinator RUN.toml --resume" in refused.message
    assert membership.is_stopped


def test_a_stop_knows_what_silent_islands_owe_it() -> None:
    membership, _ = complete()
    assert membership.stop_lacks(["east", "west"]) == {}
    do(membership, membership.request_stop())
    do(membership, membership.promise("east", 24))
    asked = membership.stop_lacks(["east", "west"])
    do(membership, membership.promise("west", 24))
    told = membership.stop_lacks(["west"])

    assert asked == {"west": "word of the inner step after which it can stop"}
    assert told == {"west": "the checkpoint of inner step 24"}
    do(membership, membership.left("west", 0, is_stopped=False))
    assert membership.stop_lacks(["west"]) == {}, "it has finished"


def test_a_stop_without_islands_is_taken_back_or_done() -> None:
    membership = deciding(24, 24)
    do(membership, membership.stop_without(["west"]))
    assert not membership.is_stopping

    membership = deciding(24, 24)
    for island in ("east", "west"):
        do(membership, membership.keeps(island, [24], inner_step=24))
    do(membership, membership.left("east", 0, is_stopped=True))
    do(membership, membership.stop_without(["west"]))
    assert membership.is_stopped


def test_who_resumes_before_there_is_a_checkpoint_takes_a_stop_back() -> None:
    membership = deciding(24, 24)
    timeline = membership.timeline

    do(membership, membership.stop_taken_back())

    assert not membership.is_stopping
    assert membership.timeline == timeline


def test_a_stop_at_the_last_step_is_a_finish() -> None:
    membership, _ = complete()
    do(membership, membership.request_stop())
    for island in ("east", "west"):
        do(membership, membership.promise(island, 100))

    for island in ("east", "west"):
        do(membership, membership.left(island, 0, is_stopped=False))

    assert membership.is_finished and not membership.is_stopped


def test_who_has_finished_before_the_others_cannot_be_asked_and_need_not() -> None:
    membership, _ = complete()
    do(membership, membership.left("west", 0, is_stopped=False))
    do(membership, membership.request_stop())

    assert membership.stop_step is None
    do(membership, membership.promise("east", 96))

    assert membership.stop_step == 100, "the run goes on to its end"


# -- checkpoints ---------------------------------------------------------------------------------


def test_a_checkpoint_is_complete_once_every_island_keeps_it_and_the_newest_are_remembered() -> (
    None
):
    membership, _ = complete()
    seen = []
    for island, steps in [
        ("east", [10]),
        ("west", []),
        ("west", [10]),
        ("east", [10, 20, 30]),
        ("west", [10, 20]),
        ("west", [20, 30]),
        ("east", [30, 40]),
        ("west", [30, 40]),
    ]:
        do(membership, membership.keeps(island, steps, inner_step=max(steps, default=0)))
        seen.append(membership.checkpoints)

    assert seen == [(), (), (10,), (10,), (10, 20), (20, 30), (20, 30), (30, 40)]


def test_repeated_reports_write_nothing() -> None:
    membership, _ = complete()
    for island in ("east", "west"):
        do(membership, membership.keeps(island, [10], inner_step=15))

    assert membership.keeps("east", [10], inner_step=16) == ()


def test_what_is_complete_stays_so_while_islands_have_not_reported_yet() -> None:
    membership, log = complete()
    for island in ("east", "west"):
        do(membership, membership.keeps(island, [10], inner_step=15), log)
    after = machine()
    after.apply(log.items())

    assert after.keeps("east", [10], inner_step=0) == ()
    assert after.checkpoints == (10,)


# -- timelines -----------------------------------------------------------------------------------


def resumed(step: int = 20) -> tuple[Membership, dict[str, str]]:
    """A run that was stopped after inner step 36 and taken back to an inner step."""
    membership, log = complete()
    do(membership, membership.request_stop(), log)
    for island in ("east", "west"):
        do(membership, membership.keeps(island, [20], inner_step=25), log)
        do(membership, membership.promise(island, 36), log)
        do(membership, membership.left(island, 0, is_stopped=True), log)
    do(membership, membership.failed("quorum lost", 50), log)
    do(membership, membership.resumed(step), log)
    return membership, log


@pytest.mark.parametrize("is_restarted", [False, True], ids=["at-once", "after-a-restart"])
def test_in_a_new_timeline_everybody_must_join_again(is_restarted: bool) -> None:
    membership, log = resumed()
    if is_restarted:
        membership = machine()
        membership.apply(log.items())

    assert (membership.timeline, membership.resume_step) == (1, 20)
    assert membership.checkpoints == (20,)
    assert not (membership.is_stopping or membership.is_stopped or membership.is_finished)
    assert not membership.fatal_reason
    assert not membership.have_all_joined
    assert not membership.is_current("east", 1, 0)
    assert not membership.is_current("east", 1, 1)

    assert join(membership, "east", "b").incarnation == 2
    assert not membership.have_all_joined
    assert join(membership, "west", "b").incarnation == 2
    assert membership.have_all_joined
    assert membership.is_current("east", 2, 1)
    assert not membership.is_finished


def test_the_same_start_may_join_the_new_timeline_unless_a_later_one_has_fenced_it() -> None:
    membership, _ = complete()
    join(membership, "east", "b")
    do(membership, membership.resumed(20))

    fenced = join(membership, "east", "a")
    newest = join(membership, "east", "b")

    assert (fenced.incarnation, fenced.entries) == (1, ())
    assert (newest.incarnation, len(newest.entries)) == (2, 2)
    assert join(membership, "east", "b").entries == ()
    assert membership.is_current("east", 2, 1)


def test_checkpoints_of_an_abandoned_timeline_do_not_count() -> None:
    membership, _ = resumed(20)
    for island in ("east", "west"):
        join(membership, island, "b")

    for island in ("east", "west"):
        do(membership, membership.keeps(island, [20, 36], inner_step=0))
    assert membership.checkpoints == (20,)

    for island in ("east", "west"):
        do(membership, membership.keeps(island, [20, 30], inner_step=31))
    assert membership.checkpoints == (20, 30)


def test_plan_text_and_start_are_those_of_the_run_in_every_timeline() -> None:
    membership, _ = resumed()

    refused = join(membership, "east", "b", plan_json=OTHER_PLAN)

    assert refused.verdict is JoinVerdict.PLAN_MISMATCH
    assert "tensors[0].shape[1]: 5 here, 6 there" in refused.message


def test_of_many_islands_a_few_are_noted_at_once_and_in_turn_all_of_them() -> None:
    names = tuple(f"island-{number:03d}" for number in range(200))
    run = Membership("demo", names, IDENTITY, identity_difference, 100, num_checkpoints=2)
    noted = [do(run, run.positions(dict.fromkeys(names, 50))) for _ in range(5)]

    assert [len(entries) for entries in noted] == [64, 64, 64, 8, 0]
    assert {run.last_inner_step(name) for name in names} == {50}


def test_what_is_applied_to_a_fork_changes_nothing_here() -> None:
    run = machine()
    fork = run.forked()
    do(fork, join(fork).entries)
    do(fork, (*fork.settings.changed("a", 1), *fork.settings.revoked("east", [7])))
    do(fork, (*fork.repairs.ask(0, "east"), *fork.cut(), *fork.positions({"east": 9})))
    do(fork, fork.members.kicked(["east"], "it poisoned"))

    assert run.members["east"].incarnation == 0 and not run.plan_json
    assert (run.settings.revision, run.settings.is_revoked(7), run.repairs.asked) == (0, False, {})
    assert run.cuts.newest(0) is None and run.last_inner_step("east") == 0
    assert run.members.holders == () and run.forked().members.holders == ()
