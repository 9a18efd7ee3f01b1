"""The outcome table of a contribution: what happens to version, attempt and counters."""

from __future__ import annotations

import pytest

from diloco.protocol.island.ledger import FragmentLedger, LocalMix, Settled, Target, Verdict
from diloco.protocol.rounds.terms import RoundKey

TOKENS = 100


def ledger(*, before: int = 4, after: int = 2, attempt: int = 0) -> FragmentLedger:
    """Version 3; `before` inner steps, a send, then `after` more."""
    made = FragmentLedger(timeline=1, fragment_id=2, version=3, attempt=attempt)
    for _ in range(before):
        made.count(TOKENS)
    made.send(24, is_flush=False)
    for _ in range(after):
        made.count(TOKENS)
    return made


def test_a_send_carries_key_and_counters_of_its_moment() -> None:
    sent = ledger(attempt=5).outstanding

    assert sent is not None
    assert sent.key == RoundKey(1, 2, 3, 5)
    assert (sent.sent_at_inner_step, sent.weight_tokens, sent.weight_steps) == (24, 400, 4)
    assert not sent.is_flush


# verdict, local_mix -> version, attempt, steps counted, steps overwritten, steps dropped
TABLE = {
    (Verdict.INCLUDED, 0.0): (4, 0, 2, 2, 0),
    (Verdict.INCLUDED, 0.5): (4, 0, 2, 0, 0),
    (Verdict.NOT_INCLUDED, 0.0): (4, 0, 0, 6, 6),
    (Verdict.NOT_INCLUDED, 0.5): (4, 0, 2, 0, 4),
    (Verdict.REFUSED, 0.0): (4, 0, 0, 6, 6),
    (Verdict.REFUSED, 0.5): (4, 0, 6, 0, 0),
    (Verdict.DECLINED, 0.0): (4, 0, 0, 6, 6),
    (Verdict.DECLINED, 0.5): (4, 0, 6, 0, 0),
    (Verdict.EXPIRED, 0.0): (3, 1, 6, 0, 0),
    (Verdict.EXPIRED, 0.5): (3, 1, 6, 0, 0),
    (Verdict.REFUSED_EXPIRED, 0.0): (3, 1, 6, 0, 0),
    (Verdict.REFUSED_EXPIRED, 0.5): (3, 1, 6, 0, 0),
}


@pytest.mark.parametrize(("verdict", "local_mix"), TABLE, ids=str)
def test_the_outcome_table(verdict: Verdict, local_mix: float) -> None:
    version, attempt, steps, overwritten, dropped = TABLE[verdict, local_mix]
    made = ledger()

    settled = made.settle(verdict, attempt=0, local_mix=local_mix)

    assert settled == Settled(overwritten, dropped * TOKENS)
    assert (made.version, made.attempt) == (version, attempt)
    assert (made.steps, made.tokens) == (steps, steps * TOKENS)
    assert made.outstanding is None


# (what came, local_mix) -> steps counted, steps overwritten, steps dropped
LATE = {
    (Verdict.NOT_INCLUDED, 0.0): (0, 6, 6),
    (Verdict.NOT_INCLUDED, 0.5): (2, 0, 4),
    (Verdict.ABSENT, 0.0): (0, 6, 6),
    (Verdict.ABSENT, 0.5): (6, 0, 0),
}


@pytest.mark.parametrize(("verdict", "local_mix"), LATE, ids=str)
def test_a_merge_several_versions_ahead_drops_late_work(verdict: Verdict, local_mix: float) -> None:
    steps, overwritten, dropped = LATE[verdict, local_mix]
    made = ledger()
    if verdict is Verdict.ABSENT:
        made.outstanding = None

    settled = made.settle(
        verdict,
        attempt=0,
        local_mix=local_mix,
        merged=Target(9, merged_tokens=77),
    )

    assert settled == Settled(overwritten, dropped * TOKENS)
    assert (made.version, made.attempt, made.merged_tokens) == (9, 0, 77)
    assert (made.steps, made.tokens) == (steps, steps * TOKENS)


def test_steps_overwritten_once_are_not_counted_again() -> None:
    made = ledger()
    made.settle(Verdict.DECLINED, attempt=0, local_mix=0.0)
    made.count(TOKENS)
    made.send(31, is_flush=False)

    assert made.steps == 1
    assert made.settle(Verdict.DECLINED, attempt=0, local_mix=0.0) == Settled(1, TOKENS)


@pytest.mark.parametrize("verdict", [v for v in Verdict if not v.has_expired])
@pytest.mark.parametrize("local_mix", [0.0, 0.5, "since_send"])
def test_the_work_since_a_send_is_kept_only_where_what_was_sent_is_included(
    verdict: Verdict, local_mix: LocalMix
) -> None:
    made = FragmentLedger(timeline=1, fragment_id=2)
    expected = local_mix if verdict is Verdict.INCLUDED or local_mix != "since_send" else 0.0

    assert made.mix_of(verdict, local_mix, is_flush=False) == expected
    assert made.mix_of(verdict, local_mix, is_flush=True) == 0.0
    made.is_void = True
    if local_mix == "since_send":
        assert made.mix_of(verdict, local_mix, is_flush=False) == 0.0


def test_every_verdict_is_in_the_table() -> None:
    assert {verdict for verdict, _ in (*TABLE, *LATE)} == set(Verdict)


@pytest.mark.parametrize(
    ("sent_attempt", "announced", "expected"),
    [(0, 1, 1), (0, 2, 1), (0, 3, 1), (0, 4, 4), (2, 0, 3), (7, 65536, 65536)],
    ids=["next", "late", "very-late", "skipped", "not-heard-yet", "after-damage"],
)
def test_after_an_expiry_the_next_due_step_serves_the_next_attempt_that_was_not_skipped(
    sent_attempt: int, announced: int, expected: int
) -> None:
    made = ledger(attempt=sent_attempt)

    made.settle(Verdict.EXPIRED, attempt=announced, local_mix=0.0)

    assert made.send(48, is_flush=False).key == RoundKey(1, 2, 3, expected)


def test_after_an_expiry_the_next_send_carries_the_work_of_both() -> None:
    made = ledger()
    made.settle(Verdict.EXPIRED, attempt=1, local_mix=0.0)
    made.count(TOKENS)

    sent = made.send(48, is_flush=True)

    assert (sent.weight_tokens, sent.weight_steps) == (700, 7)


def test_only_one_contribution_is_outstanding() -> None:
    with pytest.raises(AssertionError, match="has one outstanding"):
        ledger().send(48, is_flush=False)


def test_nothing_is_settled_twice() -> None:
    made = ledger()
    made.settle(Verdict.INCLUDED, attempt=0, local_mix=0.0)

    with pytest.raises(AssertionError, match="nothing outstanding"):
        made.settle(Verdict.INCLUDED, attempt=0, local_mix=0.0)


def test_due_steps_behind_a_return_and_flushed_fragments_are_not_sent() -> None:
    returned = FragmentLedger(0, 0, version=2, sent_until=8)

    assert [returned.is_sending(step) for step in (7, 8, 9)] == [False, False, True]
    assert not FragmentLedger(0, 0, version=2, is_flushed=True).is_sending(12)


@pytest.mark.parametrize(
    ("is_flush", "verdict", "is_flushed"),
    [
        (False, Verdict.INCLUDED, False),
        (True, Verdict.INCLUDED, True),
        (True, Verdict.DECLINED, True),
        (True, Verdict.EXPIRED, False),
    ],
)
def test_a_merged_flush_is_the_last_version(
    is_flush: bool, verdict: Verdict, is_flushed: bool
) -> None:
    made = FragmentLedger(timeline=1, fragment_id=2)
    made.send(24, is_flush=is_flush)

    made.settle(verdict, attempt=0, local_mix=0.0)

    assert made.is_flushed is is_flushed
