"""Inner steps of one rank on an accelerator, against the same on the processor."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from diloco.config.mesh import MeshConfig
from diloco.launch.rank.device import backend_of, rank_device
from diloco.launch.rank.job import Job
from diloco.trainer.parallel.mesh import make_mesh
from tests.trainer.small_island import make_trainer, one_rank

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_inner_steps_on_cuda_are_those_on_the_processor() -> None:
    device = rank_device("auto", Job(0, 1, ""), island="east")
    ours, expected = make_trainer(make_mesh(device, MeshConfig())), make_trainer(one_rank())

    assert device == torch.device("cuda", 0)
    assert backend_of(device) == "cpu:gloo,cuda:nccl"
    for step in range(4):
        # Other kernels sum in another order, as other layouts do.
        assert ours.inner_step(step).read().loss == pytest.approx(
            expected.inner_step(step).read().loss, abs=5e-5
        )
    assert ours.evaluate() == pytest.approx(expected.evaluate(), abs=5e-5)
    on_cpu = dict(expected.model.named_parameters())
    for name, parameter in ours.model.named_parameters():
        assert parameter.is_cuda
        difference = np.abs(parameter.detach().cpu().numpy() - on_cpu[name].detach().numpy())
        assert difference.max() <= 1e-3, name
