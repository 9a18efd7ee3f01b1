"""The common word of an island's ranks, over real gloo."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from diloco.errors import CodecError, DilocoError, Fenced
from diloco.island.agreement import Agreement
from diloco.protocol.island.ledger import Target, Verdict
from diloco.protocol.island.votes import NOT_MINE, FragmentVote, IslandVote
from tests.distributed import run_ranks


def test_an_island_of_one_rank_agrees_with_itself() -> None:
    agreement = Agreement(None)
    vote = FragmentVote(3, Verdict.EXPIRED, 2, Target(4, 9, asks_trial=True))

    assert agreement.read() is None
    agreement.start(
        IslandVote(
            0,
            (
                vote,
                FragmentVote(-1, None, 0),
            ),
        )
    )

    assert agreement.read() == IslandVote(0, (vote, FragmentVote(-1, None, 0)))
    assert agreement.read() is None
    assert agreement.now(IslandVote(20, ())) == IslandVote(20, ())
    assert agreement.smallest([3, -1]) == [3, -1]
    assert agreement.is_leader


def test_every_verdict_survives_the_message() -> None:
    for verdict in (None, *Verdict):
        (agreed,) = Agreement(None).now(IslandVote(0, (FragmentVote(0, verdict, 7),))).votes
        assert agreed == FragmentVote(0, verdict, 7)


def agree(island_rank: int) -> dict[str, object]:
    agreement = Agreement(dist.new_group(backend="gloo"))
    is_leader = island_rank == 0
    heard: dict[str, object] = {}

    # The leader has staged 5 and 6, the other rank 5 and nothing.
    staged = (5, 6) if is_leader else (5, -1)
    # Of what only the leader follows, the other rank has nothing to stage.
    heard["followed by one"] = agreement.now(
        IslandVote(0, (FragmentVote(4 if is_leader else NOT_MINE, None, 2),))
    )

    # The other rank's own idea of verdict and attempt must not show.
    verdict = Verdict.NOT_INCLUDED if is_leader else Verdict.INCLUDED
    heard["votes"] = agreement.now(
        IslandVote(0, tuple([FragmentVote(s, verdict, 9 if is_leader else 1) for s in staged]))
    )

    heard["undecided"] = agreement.now(
        IslandVote(0, (FragmentVote(1, None if is_leader else Verdict.EXPIRED, 0),))
    )

    heard["one fails"] = agreement.now(IslandVote(0 if is_leader else 20, ())).exit_code
    heard["both fail"] = agreement.now(IslandVote(30 if is_leader else 20, ())).exit_code

    # While another is on its way, as at a checkpoint between two steps.
    agreement.start(IslandVote(0, (FragmentVote(8, None, 3),)))
    heard["smallest"] = agreement.smallest([island_rank, -island_rank, 7])
    heard["on its way"] = agreement.read()

    # Started by both, read by one long before the other comes to it: no barrier in `start`.
    agreement.start(IslandVote(0, (FragmentVote(island_rank, Verdict.EXPIRED, 4),)))
    dist.barrier()
    heard["read later"] = agreement.read()
    return heard


def test_the_smallest_staged_version_counts_and_the_leader_speaks() -> None:
    first, second = run_ranks(agree, 2)

    assert first == second
    assert first == {
        "votes": IslandVote(
            0, (FragmentVote(5, Verdict.NOT_INCLUDED, 9), FragmentVote(-1, Verdict.NOT_INCLUDED, 9))
        ),
        "undecided": IslandVote(0, (FragmentVote(1, None, 0),)),
        "followed by one": IslandVote(0, (FragmentVote(4, None, 2),)),
        "one fails": 20,
        "both fail": 30,
        "smallest": [0, -1, 7],
        "on its way": IslandVote(0, (FragmentVote(8, None, 3),)),
        "read later": IslandVote(0, (FragmentVote(-1, Verdict.EXPIRED, 4),)),
    }


def hear(island_rank: int) -> list[int]:
    agreement = Agreement(dist.new_group(backend="gloo"))
    num_told = 0
    heard: list[int] = []

    def on_heard() -> None:
        nonlocal num_told
        num_told += 1

    agreement.on_heard = on_heard
    for num_heard in (0, 2, 2, 3):
        agreement.num_heard = lambda: num_heard if island_rank == 0 else 99  # noqa: B023
        agreement.now(IslandVote(0, (FragmentVote(-1, None, 0),)))
        heard.append(num_told)
    agreement.num_heard = lambda: 4
    assert agreement.smallest([5 + island_rank]) == [5]
    return [*heard, num_told]


def test_all_ranks_hear_that_the_leader_has_an_answer_of_the_coordinator() -> None:
    assert run_ranks(hear, 2) == [[0, 0, 0, 0, 0], [0, 1, 1, 2, 3]]


def test_the_message_is_one_small_integer_vector() -> None:
    vector = Agreement(None)._encode(IslandVote(0, (FragmentVote(0, None, 0),) * 24))

    assert vector.dtype == torch.int64
    assert vector.numel() == 5 + 9 * 24


def test_a_failure_is_raised_where_ranks_agree_that_there_is_one() -> None:
    agreement, own = Agreement(None), CodecError("a lane is broken")
    agreement.raise_failure(own, 0)

    with pytest.raises(CodecError, match="a lane is broken"):
        agreement.raise_failure(own, 20)


def raise_where_the_other_does_not_come(island_rank: int) -> str:
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=0.5))
    if island_rank == 1:
        return ""
    with pytest.raises(DilocoError) as caught:
        Agreement(group).raise_failure(Fenced("a newer start is there"), Fenced.exit_code)
    return repr(caught.value)


def test_a_rank_ends_with_its_own_failure_also_where_another_does_not_come() -> None:
    first, _ = run_ranks(raise_where_the_other_does_not_come, 2)

    assert first == "Fenced('a newer start is there')"
