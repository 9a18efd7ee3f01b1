"""Muon: one process against its definition, and ranks that share matrices against one process."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from diloco.config.inner import InnerOptimizerConfig
from diloco.errors import ConfigError
from diloco.island.lanes.boxes import Box
from diloco.trainer.optimizers import muon
from diloco.trainer.optimizers.muon import orthogonalise
from diloco.trainer.optimizers.optimizer import (
    build_optimizer,
    check_names,
    set_learning_rate_,
    step_bound,
)
from tests.distributed import run_ranks

NUM_STEPS = 3
CONFIG = InnerOptimizerConfig(name="muon", lr=0.02, weight_decay=0.1, momentum=0.95)
#: Uneven for every number of ranks, tall, wide, stacked, a vector, and one for AdamW.
SHAPES = {
    "embed.weight": (11, 6),
    "norm.weight": (6,),
    "a.tall": (10, 6),
    "b.wide": (6, 14),
    "c.experts": (3, 5, 8),
    "d.small": (3, 4),
}


class Parts(nn.Module):
    """Parameters of given names, with values that depend on the name only."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name.replace(".", "_"), nn.Parameter(values(name, shape, 0)))

    def named_parameters(self, *args, **options):
        for name, parameter in super().named_parameters(*args, **options):
            yield name.replace("_", "."), parameter


def values(name, shape, step):
    generator = torch.Generator().manual_seed(1000 * sum(name.encode()) + step)
    return torch.randn(shape, generator=generator)


def train(model, optimizer):
    """Make steps on gradients that are the same in every layout; returns whole parameters."""
    for step in range(1, NUM_STEPS + 1):
        for name, parameter in model.named_parameters():
            grad = values(name, SHAPES[name], step)
            if isinstance(parameter, DTensor):
                grad = distribute_tensor(
                    grad, parameter.device_mesh, parameter.placements, src_data_rank=None
                )
            parameter.grad = grad
        set_learning_rate_(optimizer, CONFIG.lr / step)
        optimizer.step()
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().tolist()
        for name, p in model.named_parameters()
    }


def test_newton_schulz_brings_singular_values_to_about_one():
    matrix = torch.randn((24, 9), generator=torch.Generator().manual_seed(1))

    for each in (matrix, matrix.T):
        result = orthogonalise(each)
        u, _, v = torch.linalg.svd(each, full_matrices=False)

        # Five steps leave them within 0.68 and 1.13, for these coefficients.
        singular = torch.linalg.svdvals(result)
        assert singular.min() > 0.6
        assert singular.max() < 1.2
        # The singular vectors stay: U^T x V is diagonal.
        inner = u.T @ result @ v.T
        assert (inner - inner.diagonal().diag()).abs().max() < 1e-4
    assert not orthogonalise(torch.zeros(3, 4)).any()


def test_a_step_is_that_of_pytorch_for_matrices_and_adamw_for_the_rest():
    model, reference = Parts(), Parts()
    optimizer = build_optimizer(model, CONFIG)
    matrices = [p for n, p in reference.named_parameters() if n in ("a.tall", "b.wide", "d.small")]
    others = [
        {"params": [p], "weight_decay": CONFIG.weight_decay if p.ndim > 1 else 0.0}
        for name, p in reference.named_parameters()
        if name in ("embed.weight", "norm.weight")
    ]
    theirs = [
        torch.optim.Muon(matrices, lr=CONFIG.lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=CONFIG.lr, betas=CONFIG.betas),
    ]
    for each in (model, reference):
        for name, parameter in each.named_parameters():
            parameter.grad = values(name, SHAPES[name], 1)

    optimizer.step()
    for other in theirs:
        other.step()

    found = dict(model.named_parameters())
    for name, parameter in reference.named_parameters():
        if name == "c.experts":
            continue
        # PyTorch's works in bfloat16: 2^-8 of every product, over fifteen of them. An update is
        # about 0.2 lr = 4e-3 an element.
        tolerance = 4e-4 if name in ("a.tall", "b.wide", "d.small") else 1e-7
        torch.testing.assert_close(found[name], parameter, atol=tolerance, rtol=0, msg=name)
    # Every expert is a matrix of its own.
    grad = values("c.experts", SHAPES["c.experts"], 1)
    for expert in range(3):
        nesterov = 0.05 * grad[expert] * (1 + 0.95)  # 0.05 g + 0.95 (0.05 g), but for the factor
        update = 0.2 * math.sqrt(8) * orthogonalise(nesterov)
        before = values("c.experts", SHAPES["c.experts"], 0)[expert] * (1 - 0.02 * 0.1)
        torch.testing.assert_close(found["c.experts"][expert], before - 0.02 * update)


@pytest.mark.parametrize(("algorithm", "nesterov"), [("muon", True), ("muloco", False)])
def test_momentum_and_scale_are_those_of_the_algorithm(algorithm, nesterov):
    model = Parts()
    config = CONFIG.model_copy(update={"name": algorithm, "weight_decay": 0.0})
    optimizer = build_optimizer(model, config)
    expected, moments = {}, {}
    for name in ("a.tall", "b.wide"):
        expected[name], moments[name] = values(name, SHAPES[name], 0), torch.zeros(SHAPES[name])

    for step in (1, 2):
        for name, parameter in model.named_parameters():
            parameter.grad = values(name, SHAPES[name], step)
        optimizer.step()
        for name, moment in moments.items():
            grad = values(name, SHAPES[name], step)
            moment.lerp_(grad, 0.05)
            rows, columns = SHAPES[name]
            factor = 0.2 * max(rows, columns) ** 0.5 if nesterov else (rows / columns) ** 0.5
            update = torch.lerp(grad, moment, 0.95) if nesterov else moment
            expected[name] = expected[name] - 0.02 * factor * orthogonalise(update)

    found = dict(model.named_parameters())
    for name, values_ in expected.items():
        torch.testing.assert_close(found[name].detach(), values_, atol=1e-5, rtol=0)
    changes = [found[name].detach() - values(name, SHAPES[name], 0) for name in expected]
    largest = max(change.abs().max() for change in changes)
    assert largest <= 2 * step_bound(optimizer).update


def place(model, mesh, placements):
    """Replace every parameter by a DTensor; what a placement cannot shard lies whole."""
    for name, parameter in list(nn.Module.named_parameters(model)):
        fitting = [
            placement if placement.is_replicate() or placement.dim < parameter.ndim else Replicate()
            for placement in placements
        ]
        spread = distribute_tensor(parameter.detach(), mesh, fitting, src_data_rank=None)
        setattr(model, name, nn.Parameter(spread))


def fsdp_of_tp(mesh):
    """A column- and a row-wise layer, sharded once more by FSDP2: strided shards."""
    model = nn.Sequential(nn.Linear(6, 10, bias=False), nn.Linear(10, 6, bias=False))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values(name, parameter.shape, 0))
    if mesh is None:
        return model
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return model


def strided(mesh):
    """Steps of `fsdp_of_tp`, on gradients that every rank knows whole."""
    model = fsdp_of_tp(mesh)
    optimizer = build_optimizer(model, CONFIG)
    for step in range(1, NUM_STEPS + 1):
        for name, parameter in model.named_parameters():
            grad = values(name, parameter.shape, step)
            if isinstance(parameter, DTensor):
                part = grad[muon.stored_box(parameter).slices]
                grad = DTensor.from_local(
                    part,
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
            parameter.grad = grad
        optimizer.step()
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().tolist()
        for name, p in model.named_parameters()
    }


def train_in_every_layout(island_rank, num_ranks):
    flat = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("dp",))
    layouts = {
        "rows": (flat, [Shard(0)]),
        "columns": (flat, [Shard(1)]),
        "copies": (flat, [Replicate()]),
    }
    found = {}
    if num_ranks == 4:
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        layouts |= {
            "copies-of-rows": (square, [Replicate(), Shard(0)]),
            "columns-of-copies": (square, [Shard(1), Replicate()]),
            "rows-and-columns": (square, [Shard(0), Shard(1)]),
        }
        found["strided"] = strided(square)
    for name, (mesh, placements) in layouts.items():
        for bucket_numel in (muon.BUCKET_NUMEL, 40):
            model = Parts()
            place(model, mesh, placements)
            muon.BUCKET_NUMEL, usual = bucket_numel, muon.BUCKET_NUMEL
            optimizer = build_optimizer(model, CONFIG)
            muon.BUCKET_NUMEL = usual
            counted = []
            real = muon.orthogonalise
            muon.orthogonalise = lambda x, real=real, counted=counted: counted.append(0) or real(x)
            found[f"{name}-{bucket_numel}"] = train(model, optimizer)
            muon.orthogonalise = real
            num_made = torch.tensor(len(counted))
            dist.all_reduce(num_made)
            assert num_made.item() == 6 * NUM_STEPS, "each matrix once, on one rank"
    return found


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_that_share_matrices_make_the_steps_of_one_process(num_ranks):
    model = Parts()
    alone = train(model, build_optimizer(model, CONFIG))
    alone_strided = strided(None)

    results = run_ranks(train_in_every_layout, num_ranks, num_ranks)

    for found in results:
        for layout, parameters in found.items():
            expected = alone_strided if layout == "strided" else alone
            assert parameters.keys() == expected.keys()
            for name, whole in parameters.items():
                # The same float32 operations on the same values: only how a library blocks a
                # product of other alignment may differ, in the last bits of values of about 1.
                difference = (torch.tensor(whole) - torch.tensor(expected[name])).abs().max()
                assert difference <= 2e-6, (layout, name)


def test_settings_that_leave_no_matrix_are_refused():
    config = CONFIG.model_copy(update={"adamw_by_name": ("*",)})

    with pytest.raises(ConfigError, match="leaves no matrix to muon"):
        check_names(config, SHAPES)
    with pytest.raises(ConfigError, match="matches no parameter of the model"):
        check_names(CONFIG.model_copy(update={"adamw_by_name": ("*router*",)}), SHAPES)


@pytest.mark.parametrize("is_whole_everywhere", [True, False])
def test_of_a_bucket_no_rank_owns_or_holds_more_than_the_largest_matrix_has(
    monkeypatch, is_whole_everywhere
):
    monkeypatch.setattr(muon, "BUCKET_NUMEL", 600)
    num_ranks, shapes = 4, [(64, 32), *[(32, 32)] * 8, *[(4, 8)] * 40]
    matrices = [
        muon._Matrix(
            (number, None),
            shape,
            {
                rank: Box((0, 0), shape)
                if is_whole_everywhere
                else Box((rank * shape[0] // 4, 0), (shape[0] // 4, shape[1]))
                for rank in range(num_ranks)
            },
        )
        for number, shape in enumerate(shapes)
    ]

    buckets = muon.deal(matrices, num_ranks)

    assert sorted(m.key[0] for bucket in buckets for m, _ in bucket) == [*range(len(shapes))]
    for bucket in buckets:
        for rank in range(num_ranks):
            owned = [m.shape[0] * m.shape[1] for m, owner in bucket if owner == rank]
            held = [m.boxes[rank].numel for m, _ in bucket]
            assert max(sum(owned), sum(held)) <= 64 * 32
    if not is_whole_everywhere:
        assert {owner for _, owner in buckets[0]} == {0, 1, 2, 3}, "large ones of all ranks at once"
