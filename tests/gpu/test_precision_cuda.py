"""Inner steps of one rank in 16 and 8 bits on an accelerator, besides float32 on the processor."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from diloco.config.compute import FLOAT8, Compute, Precision
from diloco.config.mesh import MeshConfig
from diloco.launch.rank.device import backend_of, capability_problem, rank_device
from diloco.launch.rank.job import Job, meet
from diloco.trainer.parallel.mesh import make_mesh
from tests.trainer.small_island import make_trainer, one_rank

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
INNER_STEPS = 4


@pytest.mark.parametrize("precision", ["bfloat16", *FLOAT8])
def test_rounded_inner_steps_stay_close_to_float32(precision: Precision) -> None:
    device = rank_device("cuda", Job(0, 1, ""), island="east")
    if precision in FLOAT8:
        has = torch.cuda.get_device_capability(device)
        if problem := capability_problem(precision, torch.cuda.get_device_name(device), has):
            pytest.skip(problem)
    meet(Job(0, 1, ""), backend_of(device), is_cast=True)
    try:
        mesh = make_mesh(device, MeshConfig(), is_cast=True)
        ours = make_trainer(mesh, compute=Compute(precision=precision))
        losses = [ours.inner_step(step).read().loss for step in range(INNER_STEPS)]
        dtypes = {parameter.dtype for parameter in ours.model.parameters()}
    finally:
        dist.destroy_process_group()
    expected = make_trainer(one_rank())

    assert dtypes == {torch.float32}
    # As on the processor: bfloat16 to 1e-2, 8 bits to 0.03 of that.
    bar = 0.04 if precision in FLOAT8 else 0.01
    assert losses == pytest.approx(
        [expected.inner_step(step).read().loss for step in range(INNER_STEPS)], abs=bar
    )
