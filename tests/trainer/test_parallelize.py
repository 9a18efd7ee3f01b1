"""Meshes, and layouts that are refused; what the accepted ones do is in test_layouts."""

import dataclasses

import pytest
import torch

from diloco.config.compute import Compute
from diloco.config.mesh import MeshConfig
from diloco.errors import ConfigError
from diloco.trainer.models.model import build_model
from diloco.trainer.parallel import parallelize
from diloco.trainer.parallel.mesh import IslandMesh, make_mesh
from tests.distributed import run_ranks
from tests.trainer.layouts import EXPERTS, LARGEST_DIFFERENCES
from tests.trainer.small_island import (
    CPU,
    SEQUENCE_LENGTH,
    debug_shape,
    make_trainer,
    one_rank,
)

REFUSED_UNDER_TP = {
    "model.ffn_dim = 97": {"ffn_dim": 97},
    "model.num_kv_heads = 1": {"num_kv_heads": 1},
    "model.vocab_size = 257": {"vocab_size": 257},
    "data.sequence_length = 33": {"sequence_length": 33},
}


def test_one_rank_needs_no_process_group():
    mesh = make_mesh(CPU, MeshConfig())

    assert mesh == IslandMesh(CPU, MeshConfig())
    assert (mesh.tp_size, mesh.dp_size, mesh.dp_coordinate) == (1, 1, 0)
    assert mesh.loss_group is None and mesh.tp_group is None


@pytest.mark.parametrize(("dp_replicate", "dp_shard", "tp"), [(1, 2, 1), (1, 1, 2), (2, 2, 2)])
def test_mesh_of_more_ranks_than_there_are_is_refused(dp_replicate, dp_shard, tp):
    config = MeshConfig(dp_replicate=dp_replicate, dp_shard=dp_shard, tp=tp)
    message = rf"mesh .* needs {dp_replicate * dp_shard * tp} ranks, the island has 1"

    with pytest.raises(ConfigError, match=message):
        make_mesh(CPU, config)


def place(config):
    """Say where a rank is: what it shares with which others."""
    mesh = make_mesh(CPU, config)
    groups = (mesh.tp_group, mesh.loss_group)
    neighbours = [group and torch.distributed.get_process_group_ranks(group) for group in groups]
    return (mesh.dp_coordinate, *neighbours)


def places(island_rank):
    return [
        place(MeshConfig(dp_shard=2, tp=2)),
        place(MeshConfig(dp_replicate=2, dp_shard=2)),
        place(MeshConfig(dp_replicate=2, tp=2)),
    ]


def test_ranks_of_a_grid_share_sequences_along_tp_and_only_there():
    sharded, hybrid, replicated = zip(*run_ranks(places, 4), strict=True)

    in_pairs = ((0, [0, 1], [0, 2]), (0, [0, 1], [1, 3]), (1, [2, 3], [0, 2]), (1, [2, 3], [1, 3]))
    assert sharded == replicated == in_pairs
    assert hybrid == tuple((rank, None, [0, 1, 2, 3]) for rank in range(4))


def describe(island_rank):
    """Sizes and coordinates of both meshes of 2 ranks, and how a tensor-parallel island refuses."""
    rows = []
    for axis in ("dp_shard", "tp"):
        mesh = make_mesh(CPU, MeshConfig(**{axis: 2}))
        has_group = mesh.loss_group is not None
        rows.append((mesh.tp_size, mesh.dp_size, mesh.dp_coordinate, has_group))
    refusals = {}
    for path, change in REFUSED_UNDER_TP.items():
        sequence_length = change.get("sequence_length", SEQUENCE_LENGTH)
        sizes = {key: value for key, value in change.items() if key != "sequence_length"}
        model = build_model(dataclasses.replace(debug_shape(), **sizes))
        try:
            parallelize.parallelize(
                model, make_mesh(CPU, MeshConfig(tp=2)), sequence_length=sequence_length
            )
        except ConfigError as error:
            refusals[path] = str(error)
    return rows, refusals


def test_two_ranks_take_other_sequences_under_fsdp_and_the_same_under_tp():
    for island_rank, (rows, refusals) in enumerate(run_ranks(describe, 2)):
        assert rows == [(1, 2, island_rank, True), (2, 1, 0, False)]
        assert refusals == {
            path: f"{path} is not a multiple of the mesh's tp = 2; change one of them"
            for path in REFUSED_UNDER_TP
        }


@pytest.mark.parametrize("is_tied", [False, True])
def test_model_on_one_rank_is_materialised_and_tied_as_declared(is_tied):
    model = build_model(debug_shape(is_tied=is_tied))
    assert {p.device.type for p in model.parameters()} == {"meta"}

    parallelize.parallelize(model, make_mesh(CPU, MeshConfig()), sequence_length=SEQUENCE_LENGTH)

    assert {p.device for p in model.parameters()} == {CPU}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert (model.head.weight is model.embed.weight) == is_tied


def train_compiled_ahead(island_rank, axes):
    mesh, compute = make_mesh(CPU, axes), Compute("none", "aot_eager")
    ours = make_trainer(mesh, micro_batches=2, compute=compute, is_compiled_ahead=True)
    expected = make_trainer(mesh, micro_batches=2)
    graphs = torch._dynamo.utils.counters["stats"]
    made = graphs["unique_graphs"]
    has_gradients = any(parameter.grad is not None for parameter in ours.model.parameters())
    losses = [[trainer.inner_step(n).read().loss for n in range(2)] for trainer in (ours, expected)]
    return made, graphs["unique_graphs"], has_gradients, losses


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes",
    [MeshConfig(), MeshConfig(cp=2, context="all-gather"), MeshConfig(pp=2)],
    ids=["one", "cp", "pp"],
)
def test_what_is_compiled_ahead_is_not_compiled_in_the_first_inner_steps(axes):
    (*_, last) = run_ranks(train_compiled_ahead, axes.num_ranks, axes)
    ahead, in_all, has_gradients, (losses, expected) = last

    assert ahead == in_all > 0
    assert not has_gradients
    # Compiled, which may sum in another order.
    assert losses == pytest.approx(expected, abs=LARGEST_DIFFERENCES["float32"])


def test_what_compiles_ahead_counts_for_no_expert():
    shape = dataclasses.replace(debug_shape(), **EXPERTS)

    ahead, plain = (
        make_trainer(one_rank(), shape=shape, is_compiled_ahead=is_ahead).inner_step(0).read()
        for is_ahead in (True, False)
    )

    assert ahead.expert_loads == plain.expert_loads
    assert ahead.loss == plain.loss
