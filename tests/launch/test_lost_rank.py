"""Who is to blame when a collective fails: what two real ranks say of each other."""

from __future__ import annotations

import torch
import torch.distributed as dist

from diloco.island.groups import make_groups
from diloco.launch.rank.job import limit_collectives
from diloco.launch.rank.lost_rank import call_roll, is_of_collective
from tests.distributed import run_ranks

PATIENCE_S = 0.5


def call_rolls(island_rank: int) -> list[dict[int, str]]:
    """Rank 1 hangs in the first roll call, fails by itself in the second, is left in the third."""
    found = []
    for name, own_error in (("hangs", None), ("fails", "ValueError('no')"), ("left", "")):
        store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        if island_rank == 1 and own_error is None:
            found.append({})
        else:
            error = own_error or "" if island_rank == 1 else ""
            patience_s = PATIENCE_S if own_error is None else 30.0  # ended by the other's answer
            found.append(
                call_roll(
                    store,
                    island_rank=island_rank,
                    num_ranks=2,
                    own_error=error,
                    patience_s=patience_s,
                )
            )
    return found


def test_ranks_that_hang_or_failed_by_themselves_are_named_and_those_that_were_left_are_not() -> (
    None
):
    first, second = run_ranks(call_rolls, 2, timeout_s=50)

    assert first == [
        {1: "it neither came nor answered the others' roll call"},
        {1: "it failed of ValueError('no')"},
        {},
    ]
    assert second == [{}, {}, {}]


def timeouts_s(island_rank: int) -> list[float]:
    """Of the default group, one that an optimizer made, and the loop's for starts."""
    loop = make_groups(None, patience_s=30.0, collective_s=7.0).start
    groups = [dist.group.WORLD, dist.new_group([0, 1]), loop]
    limit_collectives(7.0)
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    return [backend.options._timeout.total_seconds() for backend in backends]


def test_a_rank_is_given_up_in_every_group_but_the_loops_have_their_own_patience() -> None:
    assert run_ranks(timeouts_s, 2, timeout_s=50) == [[7.0, 7.0, 37.0]] * 2


def test_an_error_of_this_rank_is_not_taken_for_a_lost_one() -> None:
    assert is_of_collective(RuntimeError("[/third_party/gloo/tcp/pair.cc] Connection closed"))
    assert is_of_collective(dist.DistNetworkError("reset"))
    assert not is_of_collective(RuntimeError("shapes do not match"))
    assert not is_of_collective(ValueError("gloo"))
