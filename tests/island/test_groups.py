"""What the ranks of an island share besides their model's collectives."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from diloco.errors import ConfigError, PlanMismatch, RunStopped
from diloco.island.groups import Groups, make_groups
from tests.distributed import run_ranks


def refuse() -> str:
    raise PlanMismatch("the plan differs")


def find_it_stopped() -> str:
    raise RunStopped("the run is stopped")


def break_down() -> str:
    raise ValueError("a defect")


def share(island_rank: int) -> dict[str, Any]:
    groups = make_groups(None, patience_s=1.0)
    seen: dict[str, Any] = {
        "place": (groups.island_rank, groups.num_ranks, groups.is_leader),
        "says": groups.leader_says("could not", lambda: f"rank {island_rank}"),
        "sum": groups.sum([island_rank + 1, 10]),
        "all": [groups.all_say(True), groups.all_say(island_rank == 0)],
    }
    try:
        groups.leader_says("could not join", refuse)
    except Exception as error:
        seen["refused"] = (type(error).__name__, error.exit_code, str(error))  # type: ignore[attr-defined]
    try:
        groups.leader_says("cannot join", find_it_stopped)
    except RunStopped as stopped:
        seen["stopped"] = str(stopped)
    try:
        groups.leader_says("could not join", break_down)
    except Exception as error:
        seen["broken"] = (type(error).__name__, str(error))
    pair = dist.new_group([0, 1])
    seen["again"] = make_groups(pair, patience_s=1.0).sum([1])
    alone = dist.new_group([1])
    if island_rank == 1:
        seen["alone"] = make_groups(alone, patience_s=1.0) == Groups()
    try:
        make_groups(pair, patience_s=1.0)
    except ConfigError as error:
        seen["unequal"] = str(error)
    return seen


def test_ranks_share_what_the_leader_finds_and_how_it_fails() -> None:
    first, second = run_ranks(share, 2)

    assert (first["place"], second["place"]) == ((0, 2, True), (1, 2, False))
    for seen in (first, second):
        assert seen["says"] == "rank 0"
        assert seen["sum"] == [3, 20]
        assert seen["all"] == [True, False]
        assert seen["again"] == [2]
        assert "are members of [8, 9] process groups" in seen["unequal"]
    assert first["refused"] == ("PlanMismatch", 10, "the plan differs")
    told = "the leader of this island could not join: the plan differs"
    assert second["refused"] == ("IslandFailed", 10, told)
    assert first["stopped"] == "the run is stopped"
    assert second["stopped"] == "the leader of this island cannot join: the run is stopped"
    assert first["broken"] == ("ValueError", "a defect")
    told = "the leader of this island could not join: ValueError('a defect')"
    assert second["broken"] == ("IslandFailed", told), "at once, not when a collective times out"
    assert second["alone"]


def test_one_rank_has_no_groups_and_shares_with_itself() -> None:
    groups = make_groups(None, patience_s=1.0)

    assert groups == Groups()
    assert (groups.island_rank, groups.num_ranks, groups.is_leader) == (0, 1, True)
    assert groups.leader_says("could not", lambda: 3) == 3
    assert groups.sum([1, 2]) == [1, 2]
    assert [groups.all_say(True), groups.all_say(False)] == [True, False]
