"""Islands that compute in another type than they keep their parameters in."""

import numpy as np
import pytest
import torch
from torch import nn

from diloco.config.compute import FLOAT8, Compute
from diloco.config.mesh import MeshConfig
from diloco.errors import ConfigError
from diloco.trainer.models.float8 import multiply_in_float8
from diloco.trainer.parallel.mesh import make_mesh
from tests.distributed import run_ranks
from tests.trainer.small_island import CPU, make_trainer, whole_parameters

INNER_STEPS = 5
BFLOAT16 = Compute(precision="bfloat16")


def _train(rank, mesh, micro_batches, compute=BFLOAT16):
    trainer = make_trainer(
        make_mesh(CPU, mesh, is_cast=True),
        compute=compute,
        micro_batches=micro_batches,
        clip_norm=1e9,
    )
    losses = [trainer.inner_step(step).read().loss for step in range(INNER_STEPS)]
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


def _train_in_float8(rank):
    return {
        precision: _train(rank, MeshConfig(), 2, Compute(precision=precision))
        for precision in FLOAT8
    }


@pytest.mark.slow
def test_float8_trains_close_to_bfloat16_and_keeps_float32_parameters():
    (expected,) = run_ranks(_train, 1, MeshConfig(), 2)

    (trained,) = run_ranks(_train_in_float8, 1)

    for precision, (losses, evaluation, parameters, dtypes) in trained.items():
        assert dtypes == {"torch.float32"}, precision
        assert parameters.keys() == expected[2].keys(), precision
        assert losses != expected[0], "something is rounded to 8 bits"
        # E4M3 keeps 4 bits of a value, 6 % at most, which average out over a row of 128.
        assert losses == pytest.approx(expected[0], abs=0.03), precision
        assert evaluation == pytest.approx(expected[1], abs=0.03), precision


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("precision", FLOAT8)
@pytest.mark.parametrize("mesh", [MeshConfig(dp_shard=2, tp=2), MeshConfig(pp=2)], ids=["tp", "pp"])
def test_float8_with_other_axes_trains_close_to_bfloat16(precision, mesh):
    (expected,) = run_ranks(_train, 1, MeshConfig(), 2)

    compute = Compute("full", "aot_eager", precision)
    (*_, last) = run_ranks(_train, mesh.num_ranks, mesh, 2, compute, timeout_s=120)

    losses, evaluation, _, dtypes = last
    assert dtypes == {"torch.float32"}
    assert losses != expected[0]
    assert losses == pytest.approx(expected[0], abs=0.03)
    assert evaluation == pytest.approx(expected[1], abs=0.03)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "compute",
    [
        Compute(precision="float8-rowwise"),
        Compute(precision="float8-tensorwise"),
        Compute("selective", precision="float8-rowwise"),
        Compute("full", precision="mxfp8"),
        Compute("none", "aot_eager", "float8-rowwise"),
    ],
    ids=["rowwise", "tensorwise", "selective", "mxfp8-full", "compiled"],
)
def test_two_ranks_compute_in_float8_what_one_does(compute):
    """To the last bit, where eager: scales are of rows, or of what a rank has whole."""
    ((losses, _, trained, _),) = run_ranks(_train, 1, MeshConfig(), 2, compute, timeout_s=90)
    (other, *_) = run_ranks(_train, 2, MeshConfig(dp_shard=2), 1, compute, timeout_s=90)

    assert losses == other[0]
    for name, value in trained.items():
        np.testing.assert_array_equal(value, other[2][name], name)


def test_layers_of_odd_widths_stay_and_a_model_of_them_is_refused():
    def block(*widths):
        with torch.device("meta"):
            return nn.ModuleDict({f"to-{n}": nn.Linear(64, n, bias=False) for n in widths})

    odd, mixed = block(24), block(24, 48, 96)
    weight = mixed["to-48"].weight

    assert multiply_in_float8([mixed], "float8-rowwise", CPU) == ("to-48", "to-96")
    assert type(mixed["to-24"]) is nn.Linear and type(mixed["to-48"]) is not nn.Linear
    assert mixed["to-48"].weight is weight
    assert multiply_in_float8([block(48, 96)], "mxfp8", CPU) == ("to-96",)
    assert multiply_in_float8([block(48, 96)], "float8-rowwise", CPU, tp=2) == ("to-96",)
    with pytest.raises(ConfigError, match="widths that are multiples of 16; set it to"):
        multiply_in_float8([odd], "float8-tensorwise", CPU)
