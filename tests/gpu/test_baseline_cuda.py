"""Hierarchical all-reduce on CUDA devices: what sums are, and that training is what it was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from typer.testing import CliRunner

from diloco.baseline.gradients import GradientSum
from diloco.baseline.group import BaselineGroup, BaselineMember
from diloco.baseline.hops import GroupHop
from diloco.baseline.reduction import HierarchicalReduction, all_reduce
from diloco.cli.main import app
from diloco.compression.registry import get_codec
from diloco.config.mesh import MeshConfig
from diloco.launch.rank.device import backend_of, rank_device
from diloco.launch.rank.job import Job, meet
from diloco.trainer.parallel.mesh import IslandMesh
from tests.baseline.test_reductions import island_batches, make_trainer
from tests.run_files import write_run
from tests.trainer.small_island import BATCH_SIZE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
ALONE = BaselineGroup(BaselineMember("east", 0), {"east": 1})
CHUNK_NUMEL = 1 << 17


@pytest.fixture
def device() -> Iterator[torch.device]:
    """One rank in process groups of its device's backends."""
    device = rank_device("cuda", Job(0, 1, ""), island="east")
    meet(Job(0, 1, ""), backend_of(device), is_cast=True)
    yield device
    dist.destroy_process_group()


def reduction(codec: str) -> HierarchicalReduction:
    world = dist.group.WORLD
    assert world is not None
    return HierarchicalReduction(ALONE, GroupHop(ALONE, world, get_codec(codec)), None, CHUNK_NUMEL)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8"])
def test_sums_over_nccl_are_those_of_the_codec(device: torch.device, name: str) -> None:
    values = torch.randn(4 * CHUNK_NUMEL, generator=torch.Generator().manual_seed(1))
    on_device, codec = values.to(device), get_codec(name)

    all_reduce(reduction(name), on_device)

    chunks = [codec.decode(codec.encode(part), CHUNK_NUMEL) for part in values.split(CHUNK_NUMEL)]
    assert torch.equal(on_device.cpu(), torch.cat(chunks))


def test_gradients_that_are_summed_besides_the_backward_train_as_those_that_are_not(
    device: torch.device,
) -> None:
    mesh = IslandMesh(device, MeshConfig())

    def hook(parameters: list[nn.Parameter]) -> GradientSum:
        return GradientSum(parameters, reduction("float32"), weight=1.0)

    def train(make_hook: Any) -> list[tuple[float, float]]:
        trainer = make_trainer(island_batches(0), BATCH_SIZE, 2, make_hook, mesh)
        metrics = [trainer.inner_step(step).read() for step in range(4)]
        return [(each.loss, each.grad_norm) for each in metrics]

    # Kernels of a backward may add in any order: two runs without a hook differ as much.
    for ours, expected in zip(train(hook), train(None), strict=True):
        assert ours == pytest.approx(expected, abs=5e-5)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
@pytest.mark.timeout(300)
def test_a_baseline_over_nccl_loses_what_one_over_gloo_does(tmp_path: Path) -> None:
    run_file = write_run(tmp_path, {"east": "", "west": ""})
    summaries = {}
    for hop in ("gloo", "nccl"):
        out = tmp_path / hop
        arguments = ["baseline", str(run_file), "--hop", hop, "--out", str(out), "--json"]
        assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
        summaries[hop] = json.loads((out / "summary.json").read_text())

    gloo, nccl = summaries["gloo"], summaries["nccl"]
    assert nccl["losses"] == pytest.approx(gloo["losses"], abs=5e-5)
    assert nccl["islands"] == gloo["islands"]
