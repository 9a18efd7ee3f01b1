"""Islands that compute in another type than they keep their parameters in."""

import numpy as np
import pytest

from diloco.config.compute import Compute
from diloco.config.mesh import MeshConfig
from diloco.inner.mesh import make_mesh
from tests.distributed import run_ranks
from tests.inner.small_island import CPU, make_trainer, whole_parameters

INNER_STEPS = 5
BFLOAT16 = Compute(precision="bfloat16")


def _train(rank, mesh, micro_batches):
    trainer = make_trainer(
        make_mesh(CPU, mesh, is_cast=True),
        compute=BFLOAT16,
        micro_batches=micro_batches,
        clip_norm=1e9,
    )
    losses = [trainer.inner_step(step).loss for step in range(INNER_STEPS)]
    dtypes = {str(parameter.dtype) for parameter in trainer.model.parameters()}
    moments = {
        str(value.dtype)
        for state in trainer.optimizer.state.values()
        for name, value in state.items()
        if name != "step"
    }
    return losses, trainer.evaluate(), whole_parameters(trainer.model), dtypes | moments


def test_one_rank_computes_in_bfloat16_what_two_compute():
    """To the last bit: a half of the batch is a rank's, or a micro-batch.

    Its gradient is rounded to bfloat16, both are added in float32, and what scales them is a power
    of two. Nothing is clipped, since a norm is summed in another order over two ranks.
    """
    ((losses, evaluation, trained, dtypes),) = run_ranks(_train, 1, MeshConfig(), 2)
    (other, *_) = run_ranks(_train, 2, MeshConfig(dp_shard=2), 1)

    assert dtypes == {"torch.float32"}
    assert losses == other[0]
    assert evaluation == pytest.approx(other[1], abs=1e-9), "summed in another order"
    for name, value in trained.items():
        np.testing.assert_array_equal(value, other[2][name], name)
