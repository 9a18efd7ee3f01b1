"""What an island does at a step boundary, on arrival: targets, merges, sends. Integers only."""

from __future__ import annotations

import pytest

from diloco.protocol.island.ledger import FragmentLedger, Target, Verdict
from diloco.protocol.island.pace import ArrivalPace, aim, arrival_vote
from diloco.protocol.island.votes import (
    GONE,
    NOTHING_STAGED,
    AnnouncedVersion,
    FragmentView,
    FragmentVote,
    IslandVote,
)
from diloco.protocol.rounds.terms import RoundKey

PACE = ArrivalPace()


def ledger(*, version: int = 3, tokens: int = 10, target: Target | None = None) -> FragmentLedger:
    return FragmentLedger(0, 0, version=version, tokens=tokens, steps=1, target=target)


def sending(made: FragmentLedger) -> FragmentLedger:
    made.send(24, is_flush=False)
    return made


# what is outstanding, vote -> how it is settled
ARRIVALS = [
    (False, FragmentVote(NOTHING_STAGED, None, 0), None),
    (False, FragmentVote(5, None, 0), Verdict.ABSENT),
    (False, FragmentVote(4, None, 0), None),
    (True, FragmentVote(5, None, 0), None),
    (True, FragmentVote(5, Verdict.INCLUDED, 0), Verdict.INCLUDED),
    (True, FragmentVote(NOTHING_STAGED, Verdict.INCLUDED, 0), None),
    (True, FragmentVote(NOTHING_STAGED, Verdict.EXPIRED, 1), Verdict.EXPIRED),
    (True, FragmentVote(5, Verdict.EXPIRED, 1), Verdict.EXPIRED),
    (True, FragmentVote(GONE, Verdict.NOT_INCLUDED, 0), None),
]


@pytest.mark.parametrize(("has_sent", "vote", "verdict"), ARRIVALS)
def test_a_version_is_merged_when_all_ranks_have_the_target_staged(
    has_sent: bool, vote: FragmentVote, verdict: Verdict | None
) -> None:
    made = ledger(target=Target(5))

    assert PACE.arrived(sending(made) if has_sent else made, vote) is verdict


# vote, is_over -> whether it is sent
OPENINGS = [
    (FragmentVote(-1, None, 0, open_version=3), False, True),
    (FragmentVote(-1, None, 1, open_version=3), False, False),  # attempt 2 is owed
    (FragmentVote(-1, None, 0, open_version=4), False, False),  # merge first
    (FragmentVote(-1, None, 0), False, False),
    (FragmentVote(-1, None, 0, open_version=3, is_ending=True), False, False),
    (FragmentVote(-1, None, 0, open_version=3, is_ending=True), True, True),
]


@pytest.mark.parametrize(("vote", "is_over", "is_sent"), OPENINGS)
def test_a_fragment_is_sent_to_the_attempt_that_waits_for_it(
    vote: FragmentVote, is_over: bool, is_sent: bool
) -> None:
    made = ledger()
    made.attempt = 2 if vote.attempt == 1 else 0

    assert PACE.due([made], 9, IslandVote(0, (vote,)), is_over=is_over) == [0] * is_sent
    assert PACE.due([sending(made)], 9, IslandVote(0, (vote,)), is_over=is_over) == []
    assert PACE.due([made], 9, None, is_over=is_over) == []


def test_a_target_is_never_lowered_and_raised_only_where_it_is_gone() -> None:
    made = ledger()
    view = FragmentView(version=5, staging=AnnouncedVersion(Target(5, 50)), anchor_version=3)

    assert aim(made, arrival_vote(made, view))
    assert made.target == Target(5, 50)

    # Newer versions come, and the leader's own exchange has turned to one: the target stays.
    newer = FragmentView(version=9, merged_tokens=90, staging=AnnouncedVersion(Target(9, 90)))
    assert arrival_vote(made, newer).target == Target(5, 50)
    assert not aim(made, FragmentVote(-1, None, 0, Target(4)))
    assert not aim(made, FragmentVote(-1, None, 0, Target(5, 50)))

    # One rank hears that it is gone: all know after the next word, and the leader names another.
    gone = FragmentView(version=9, merged_tokens=90, gone_version=5)
    assert arrival_vote(made, gone).staged_version == GONE
    assert not aim(made, FragmentVote(GONE, None, 0, Target(5, 50)))
    assert made.is_target_gone
    assert arrival_vote(made, newer).target == Target(9, 90)
    assert aim(made, arrival_vote(made, newer))
    assert made.target == Target(9, 90) and not made.is_target_gone


def test_what_the_exchange_shows_of_before_a_merge_counts_nothing() -> None:
    made = sending(ledger(version=5))
    stale = FragmentView(
        key=RoundKey(0, 0, 3, 0),
        verdict=Verdict.EXPIRED,
        version=5,
        staged_version=5,
        staging=AnnouncedVersion(Target(5)),
        is_open=True,
    )

    vote = arrival_vote(made, stale)

    assert vote == FragmentVote(NOTHING_STAGED, None, 0)
