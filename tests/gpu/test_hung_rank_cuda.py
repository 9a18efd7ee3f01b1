"""Collectives of NCCL: what its recorder says on one device, and a rank that hangs, on two."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from diloco.launch.rank.flight_recorder import FlightRecorders
from diloco.launch.rank.job import Job, limit_collectives, meet
from tests.faults.test_hung_rank import check_hang
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_what_nccl_has_recorded_is_written_and_its_timeout_is_later(tmp_path: Path) -> None:
    meet(Job(0, 1, ""), "cpu:gloo,cuda:nccl", is_cast=True)
    try:
        limit_collectives(7.0)
        dist.all_reduce(torch.ones(3, device="cuda"))
        torch.cuda.synchronize()
        recorders = FlightRecorders(has_nccl=True)
        recorders.write(tmp_path / "collectives.json")
        wait_until(lambda: not recorders.completed(), 20)
        backend = dist.group.WORLD._get_backend(torch.device("cuda"))
        assert backend.options._timeout.total_seconds() == 67.0
    finally:
        dist.destroy_process_group()

    written = json.loads((tmp_path / "collectives.json").read_text())
    assert written["nccl"]["entries"][-1]["profiling_name"] == "nccl:all_reduce"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="a hang takes two CUDA devices")
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGUSR1], ids=["frozen", "asleep"])
def test_a_rank_that_hangs_under_nccl_is_named_and_the_run_ends(
    tmp_path: Path, number: signal.Signals
) -> None:
    check_hang(tmp_path, number, island_rank=1, device="cuda")
