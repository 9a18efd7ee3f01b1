"""Experts against a loop over tokens; the choice, the balance, and initial values of stacks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from diloco.config.inner import InnerOptimizerConfig
from diloco.config.model import ExpertsConfig
from diloco.trainer.models.experts import ExpertLayer, Router, balance_, imbalances
from diloco.trainer.models.model import FeedForward, Llama, LlamaShape, build_model, initialise_
from diloco.trainer.optimizers.optimizer import build_optimizer
from diloco.trainer.state import load_moments_, load_parameters_, training_tensors

DIM, HIDDEN = 12, 20


def make_layer(**changes: Any) -> ExpertLayer:
    settings = {"num_experts": 6, "experts_per_token": 2, "expert_dim": HIDDEN, "num_shared": 1}
    experts = ExpertsConfig(**{**settings, **changes})
    shared = FeedForward(DIM, experts.num_shared * HIDDEN) if experts.num_shared else None
    layer = ExpertLayer(DIM, experts, shared)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.5, generator=generator)
        layer.router.expert_bias.normal_(std=0.3, generator=generator)
    return layer


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return down @ (F.silu(gate @ x) * (up @ x))


def by_hand(layer: ExpertLayer, x_TD: Tensor, experts: ExpertsConfig) -> Tensor:
    """One token and one expert after the other; scores sorted in Python."""
    router, stacks, rows = layer.router, layer.experts, []
    for x in x_TD:
        logits = router.weight @ x
        scores = logits.sigmoid() if experts.route == "sigmoid" else logits.softmax(0)
        ranked = (scores + router.expert_bias).tolist()
        size = experts.num_experts // experts.num_groups
        groups = [range(i * size, (i + 1) * size) for i in range(experts.num_groups)]
        groups.sort(key=lambda group: -sum(sorted(ranked[e] for e in group)[-2:]))
        candidates = [e for group in groups[: experts.groups_per_token] for e in group]
        chosen = sorted(candidates, key=lambda e: -ranked[e])[: experts.experts_per_token]
        total = sum(scores[e] for e in chosen) if experts.normalise else 1.0
        row = torch.zeros(DIM)
        for e in chosen:
            weight = experts.route_scale * scores[e] / total
            row = row + weight * swiglu(x, stacks.gate[e], stacks.up[e], stacks.down[e])
        if (shared := layer.shared_experts) is not None:
            weights = (shared.gate.weight, shared.up.weight, shared.down.weight)  # type: ignore[union-attr]
            row = row + swiglu(x, *weights)  # type: ignore[arg-type]
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"route": "softmax", "normalise": False, "num_shared": 0},
        {"route_scale": 2.5, "experts_per_token": 1, "num_shared": 2},
        {"num_groups": 3, "groups_per_token": 2, "experts_per_token": 3},
        {"experts_per_token": 6},
    ],
    ids=["plain", "softmax", "scaled", "grouped", "all"],
)
def test_values_and_gradients_are_those_of_a_loop(changes: dict[str, Any]) -> None:
    layer = make_layer(**changes)
    x_BSD = torch.randn(2, 5, DIM, generator=torch.Generator().manual_seed(4), requires_grad=True)

    out = layer(x_BSD)
    expected = by_hand(layer, x_BSD.flatten(0, 1), layer.router._experts).view_as(x_BSD)

    # Sums of at most 20 products of size 1 in another order: 20 * 2^-24 each, some ten in a row.
    torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-5)
    inputs = [x_BSD, *layer.parameters()]
    # A stride-0 gradient, which the grouped product would refuse, does not reach it.
    ours = torch.autograd.grad(out.sum(), inputs, allow_unused=True)
    theirs = torch.autograd.grad(expected.sum(), inputs, allow_unused=True)
    for mine, other, parameter in zip(ours, theirs, inputs, strict=True):
        zeros = torch.zeros_like(parameter)
        torch.testing.assert_close(
            zeros if mine is None else mine, zeros if other is None else other, rtol=1e-4, atol=1e-4
        )


def test_every_choice_of_training_is_counted_and_none_of_an_evaluation() -> None:
    layer = make_layer()
    x = torch.randn(2, 5, DIM)

    layer(x)
    layer(x)
    with torch.no_grad():
        layer(x)

    assert layer.router.load.sum() == 2 * 10 * 2


def test_bias_moves_against_the_load_and_counting_begins_again() -> None:
    layer = make_layer()
    bias = layer.router.expert_bias.clone()
    layer.router.load.copy_(torch.tensor([4.0, 0.0, 2.0, 2.0, 3.0, 1.0]))

    loads = balance_(layer, 0.25, None)

    assert {name: load.tolist() for name, load in loads.items()} == {"router": [4, 0, 2, 2, 3, 1]}
    moved = layer.router.expert_bias - bias
    torch.testing.assert_close(moved, torch.tensor([-0.25, 0.25, 0.0, 0.0, -0.25, 0.25]))
    assert layer.router.load.sum() == 0
    assert imbalances({"router": (4, 0, 2, 2, 3, 1)}) == {"router": 2.0}
    assert balance_(torch.nn.Linear(2, 2), 0.25, None) == {}


def test_balancing_evens_out_a_router_that_prefers_one_expert() -> None:
    generator = torch.Generator().manual_seed(5)
    router = Router(DIM, ExpertsConfig(num_experts=4, experts_per_token=1, expert_dim=1))
    with torch.no_grad():
        router.weight.normal_(std=0.2, generator=generator)
    x = torch.randn(400, DIM, generator=generator) + 5 * router.weight[0].detach()

    def load() -> Tensor:
        return torch.bincount(router(x)[1].flatten(), minlength=4)

    before = load().max().item()
    for _ in range(200):
        router.load += load()
        balance_(router, 0.01, None)

    # A step moves scores by 0.01; at these spreads that is some tokens of 400 around the mean 100.
    assert before > 200
    assert load().max() < 130


SHAPE = LlamaShape(
    256,
    DIM,
    3,
    2,
    1,
    16,
    experts=ExpertsConfig(
        num_experts=4, experts_per_token=2, expert_dim=HIDDEN, num_shared=1, first_dense_layers=2
    ),
)


def test_names_and_initial_values_of_experts() -> None:
    model = build_model(SHAPE).to_empty(device="cpu")
    initialise_(model, 7)
    again = Llama(SHAPE, range(2, 3))
    initialise_(again, 7)

    names = {n.removeprefix("layers.2.") for n, _ in model.named_parameters() if "layers.2" in n}
    assert names >= {
        "feed_forward.router.weight",
        *(f"feed_forward.experts.{name}" for name in ("gate", "up", "down")),
        *(f"feed_forward.shared_experts.{name}.weight" for name in ("gate", "up", "down")),
    }
    assert isinstance(model.layers["1"].feed_forward, FeedForward)
    gate = model.layers["2"].feed_forward.experts.gate  # type: ignore[union-attr]
    assert torch.equal(gate, again.layers["2"].feed_forward.experts.gate)  # type: ignore
    assert not torch.equal(gate[0], gate[1])
    assert gate.std().item() == pytest.approx(0.02, rel=0.1)  # type: ignore[operator]
    assert model.layers["2"].feed_forward.router.expert_bias.tolist() == [0.0] * 4  # type: ignore


def test_bias_is_stored_with_the_model_and_no_optimizer_takes_it() -> None:
    model, other = (build_model(SHAPE).to_empty(device="cpu") for _ in range(2))
    for each in (model, other):
        initialise_(each, 7)
    name = "layers.2.feed_forward.router.expert_bias"
    model.get_buffer(name).fill_(0.5)
    optimizer = build_optimizer(other, InnerOptimizerConfig(lr=1e-3))

    stored = training_tensors(model, optimizer)
    load_parameters_(other, lambda section, name: stored[section][name])
    load_moments_(other, optimizer, lambda section, name: stored[section][name], step=3)

    assert other.get_buffer(name).tolist() == [0.5] * 4
    assert stored["exp_avg"][name].tolist() == [0.0] * 4
    assert set(optimizer.state) == set(other.parameters())
    optimizer.step()
