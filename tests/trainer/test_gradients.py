"""Settling and clipping of gradients whose tensors lie on no mesh, on one, or on several.

Besides them the gradients of a loss whose logits lie on two ranks.
"""

import math
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from diloco.config.mesh import MeshConfig
from diloco.trainer.gradients import clip_gradients_, settle_gradients_
from diloco.trainer.models.cross_entropy import split_log_sum_exp
from diloco.trainer.parallel.mesh import make_mesh
from diloco.trainer.parallel.tensor_parallel import partial_parameters
from tests.distributed import run_ranks
from tests.trainer.small_island import CPU, debug_shape, make_model, one_rank, small_data, whole

SHAPES = {"plain": (3, 5), "split": (5, 4), "copied": (7,), "grid": (6, 2), "by column": (2, 3)}


def whole_gradients():
    generator = torch.Generator().manual_seed(2)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def clip_everything(max_norm):
    """Clip plain gradients besides DTensors of a line and of a 2 x 1 grid, on 2 ranks."""
    line = init_device_mesh("cpu", (2,), mesh_dim_names=("line",))
    grid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("rows", "columns"))
    layouts = {
        "split": (line, [Shard(0)]),  # 5 rows over 2 ranks: uneven
        "copied": (line, [Replicate()]),
        "grid": (grid, [Shard(0), Shard(1)]),
        "by column": (grid, [Replicate(), Shard(1)]),
    }
    parameters = {}
    for name, grad in whole_gradients().items():
        if name in layouts:
            grad = distribute_tensor(grad, *layouts[name], src_data_rank=None)
        parameters[name] = nn.Parameter(torch.zeros_like(grad))
        parameters[name].grad = grad
    unused = nn.Parameter(torch.zeros(2))
    norm = clip_gradients_([*parameters.values(), unused], max_norm)
    return norm.item(), {name: whole(p.grad) for name, p in parameters.items()}


def settle_by_hand(island_rank):
    mesh = init_device_mesh("cpu", (2,))
    summed = nn.Parameter(distribute_tensor(torch.zeros(3), mesh, [Replicate()]))
    also = nn.Parameter(distribute_tensor(torch.zeros(2, 2), mesh, [Replicate()]))
    split = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))
    ours = float(island_rank + 1)
    # Labelled as FSDP2 labels them: nothing says that they are parts of a sum.
    summed.grad = DTensor.from_local(torch.tensor([ours, 0.0, 1.0]), mesh, [Replicate()])
    also.grad = DTensor.from_local(torch.full((2, 2), ours), mesh, [Replicate()])
    split.grad = DTensor.from_local(torch.arange(4.0), mesh, [Replicate()])
    plain, unused = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    plain.grad = torch.tensor([ours])
    parameters = [summed, split, also, plain, unused]
    settle_gradients_(parameters, partial=[summed, also, unused], group=mesh.get_group())
    placements_agree = all(p.grad.placements == p.placements for p in (summed, split, also))
    values = [p.grad.to_local().tolist() for p in (summed, split, also)]
    return placements_agree, values, plain.grad.tolist(), unused.grad


def model_gradients(mesh, is_tied):
    """Gradients of one batch as this rank's optimizer sees them, and unsharded."""
    model = make_model(mesh, debug_shape(is_tied=is_tied))
    tokens = small_data().batch(0, 0, 4)
    logits = model(tokens[:, :-1], torch.arange(tokens.shape[1] - 1))
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    settle_gradients_(model.parameters(), partial=partial_parameters(model), group=mesh.tp_group)
    local = {
        name: (p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad).numpy().copy()
        for name, p in model.named_parameters()
    }
    return local, {name: whole(p.grad) for name, p in model.named_parameters()}


def logits_and_targets():
    """Logits up to 600, far beyond exp's range, of targets in both halves of the vocabulary."""
    generator = torch.Generator().manual_seed(3)
    logits_NV = torch.randn((6, 8), generator=generator) * 200.0
    return logits_NV.requires_grad_(), torch.tensor([0, 3, 4, 7, 5, 2])


def combined(lse_N, picked_N):
    """A cross entropy and a penalty of large sums, as a loss uses both values."""
    return ((lse_N - picked_N) + 1e-3 * lse_N.square()).mean()


def split_loss(mesh, island_rank):
    logits_NV, targets_N = logits_and_targets()
    half_NV = logits_NV.detach().chunk(2, dim=1)[island_rank].clone().requires_grad_()
    loss = combined(*split_log_sum_exp(half_NV, targets_N, mesh.tp_group))
    loss.backward()
    return loss.item(), half_NV.grad.numpy().copy()


def on_each_rank(island_rank):
    mesh = make_mesh(CPU, MeshConfig(tp=2))
    return {
        "clip": {max_norm: clip_everything(max_norm) for max_norm in (0.5, 100.0, math.inf)},
        "settle": settle_by_hand(island_rank),
        "loss": split_loss(mesh, island_rank),
        "model": {is_tied: model_gradients(mesh, is_tied) for is_tied in (False, True)},
    }


@cache
def two_ranks():
    return run_ranks(on_each_rank, 2)


@pytest.mark.parametrize("max_norm", [0.5, 100.0, math.inf])
def test_clipping_over_mixed_meshes_is_that_of_one_process(max_norm):
    parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    for name, grad in whole_gradients().items():
        parameters[name].grad = grad
    expected = nn.utils.clip_grad_norm_(parameters.values(), max_norm).item()

    (norm, grads), (other_norm, other_grads) = (result["clip"][max_norm] for result in two_ranks())

    assert norm == other_norm == pytest.approx(expected, rel=1e-6)
    for name, parameter in parameters.items():
        np.testing.assert_allclose(grads[name], parameter.grad.numpy(), rtol=1e-6)
        np.testing.assert_array_equal(grads[name], other_grads[name])


def test_non_finite_gradient_gives_non_finite_norm():
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([1.0, math.nan])

    assert math.isnan(clip_gradients_([parameter], 1.0))


def test_model_without_gradients_has_norm_zero():
    assert clip_gradients_([nn.Parameter(torch.zeros(2))], 1.0) == 0.0


def test_settled_gradients_have_the_placements_of_their_parameters_and_the_sum_of_the_parts():
    for island_rank, result in enumerate(two_ranks()):
        placements_agree, values, plain, unused = result["settle"]

        assert placements_agree
        assert values == [
            [3.0, 0.0, 2.0],
            [[0.0, 1.0], [2.0, 3.0]][island_rank],
            [[3.0, 3.0], [3.0, 3.0]],
        ]
        assert plain == [island_rank + 1]
        assert unused is None


def test_split_logits_give_the_loss_and_the_gradients_of_whole_ones():
    logits_NV, targets_N = logits_and_targets()
    expected = combined(logits_NV.logsumexp(1), logits_NV.gather(1, targets_N[:, None])[:, 0])
    expected.backward()

    (loss, left), (other_loss, right) = (result["loss"] for result in two_ranks())

    assert loss == other_loss == pytest.approx(expected.item(), rel=1e-6)
    np.testing.assert_allclose(np.hstack([left, right]), logits_NV.grad.numpy(), rtol=1e-5)


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_replicated_norms_under_tp_have_equal_gradients_on_both_ranks(is_tied):
    (first, _), (second, _) = (result["model"][is_tied] for result in two_ranks())
    norms = [name for name in first if "norm" in name]

    assert len(norms) == 9
    for name in norms:
        assert np.abs(first[name]).max() > 0
        np.testing.assert_array_equal(first[name], second[name])


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_gradients_under_tp_are_those_of_one_rank(is_tied):
    _, expected = model_gradients(one_rank(), is_tied)

    for result in two_ranks():
        _, ours = result["model"][is_tied]

        assert ours.keys() == expected.keys()
        for name, grad in expected.items():
            np.testing.assert_allclose(ours[name], grad, rtol=0, atol=1e-5 * np.abs(grad).max())
