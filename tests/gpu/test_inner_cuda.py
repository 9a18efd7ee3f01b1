"""Inner steps of one rank on an accelerator, against the same on the processor."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from diloco.config.mesh import MeshConfig
from diloco.data.corpus import TextCorpus, TextData
from diloco.data.prefetch import PrefetchedBatches
from diloco.launch.rank.device import backend_of, rank_device
from diloco.launch.rank.job import Job
from diloco.trainer.parallel.mesh import make_mesh
from tests.trainer.small_island import make_trainer, one_rank

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_batches_for_cuda_are_made_ahead_in_pinned_memory() -> None:
    corpus = TextCorpus.from_documents([b"x" * 99, b"y" * 99, b"z" * 99])
    data = TextData(corpus, sequence_length=8, seed=1)
    options = {"num_slots": 1, "batch_size": 4, "dp_coordinate": 0, "dp_size": 1}
    plain, ours = (data.batches(slots=(0,), **options) for _ in range(2))
    ahead = PrefetchedBatches(ours, torch.device("cuda", 0))

    for step in range(4):
        tokens = ahead.batch(step)
        assert tokens.is_pinned()
        uploaded = tokens.to(torch.device("cuda", 0), non_blocking=True)
        assert torch.equal(uploaded.cpu(), plain.batch(step))
    ahead.close()


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
