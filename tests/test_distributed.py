"""The harness of the distributed tests: results by rank, first failure shown, nothing hangs."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed import RankFailed, run_ranks


def _sum_of_ranks(island_rank: int, offset: int) -> tuple[int, float, int]:
    total = torch.tensor(float(island_rank + offset))
    dist.all_reduce(total)
    return island_rank, total.item(), torch.get_num_threads()


def _fail_in_a_mode(island_rank: int, mode: str) -> None:
    if island_rank == 1 and mode == "raises":
        raise ValueError("the cause")
    if island_rank == 1 and mode == "dies":
        os._exit(7)
    if mode == "hangs":
        time.sleep(600)
    dist.barrier()


def test_every_rank_runs_in_one_group_and_results_come_back_by_rank() -> None:
    assert run_ranks(_sum_of_ranks, 2, 10, timeout_s=50) == [(0, 21.0, 1), (1, 21.0, 1)]


@pytest.mark.parametrize(
    ("mode", "timeout_s", "words"),
    [
        ("raises", 50, "rank 1 of 2: .*_fail_in_a_mode.*ValueError: the cause"),
        ("dies", 50, "rank 1 of 2: died without a word, exit code 7"),
        ("hangs", 1, r"ranks \[0, 1\] of 2 did not finish in 1 s"),
    ],
    ids=lambda value: value if value in ("raises", "dies", "hangs") else "",
)
def test_a_failing_rank_ends_the_call_with_its_history(
    mode: str, timeout_s: float, words: str
) -> None:
    with pytest.raises(RankFailed, match=f"(?s){words}"):
        run_ranks(_fail_in_a_mode, 2, mode, timeout_s=timeout_s)
