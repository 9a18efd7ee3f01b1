"""Parameters and moments by canonical name; what is written to disk is tested with checkpoints."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from diloco.config.inner import InnerOptimizerConfig
from diloco.errors import ConfigError
from diloco.trainer.optimizers.optimizer import build_optimizer, step_bound
from diloco.trainer.state import (
    MOMENTS,
    check_optimizer,
    kept_moments,
    load_moments_,
    load_parameters_,
    mend_moments_,
    optimizer_step,
    training_tensors,
)


def trained(num_steps: int) -> tuple[nn.Module, torch.optim.AdamW]:
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(2, 2)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(num_steps):
        step(model, optimizer)
    return model, optimizer


def with_muon(num_steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _ = trained(0)
    optimizer = build_optimizer(model, InnerOptimizerConfig(name="muon", lr=1e-2))
    for _ in range(num_steps):
        step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.zero_grad()
    model.get_submodule("used")(torch.ones(4, 3)).square().mean().backward()
    optimizer.step()


def test_tensors_are_those_in_use_and_moments_without_a_gradient_are_zero() -> None:
    model, optimizer = trained(2)

    sections = training_tensors(model, optimizer)

    names = ["unused.bias", "unused.weight", "used.bias", "used.weight"]
    assert {section: list(tensors) for section, tensors in sections.items()} == dict.fromkeys(
        ("model", "exp_avg", "exp_avg_sq"), names
    )
    parameter = model.get_submodule("used").weight
    assert sections["model"]["used.weight"] is parameter
    assert sections["exp_avg"]["used.weight"] is optimizer.state[parameter]["exp_avg"]
    assert not sections["exp_avg"]["unused.weight"].any()
    assert sections["exp_avg"]["unused.weight"].shape == (2, 2)


@pytest.mark.parametrize("num_steps", [0, 2])
def test_the_age_of_moments_is_that_of_the_optimizer(num_steps: int) -> None:
    _, optimizer = trained(num_steps)

    assert optimizer_step(optimizer) == num_steps


def test_moments_that_were_loaded_are_those_that_were_read() -> None:
    model, _ = trained(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def read(section: str, name: str) -> Tensor:
        shape = dict(model.named_parameters())[name].shape
        return torch.full(shape, {"exp_avg": 1.0, "exp_avg_sq": 2.0, "model": 3.0}[section])

    load_parameters_(model, read)
    load_moments_(model, optimizer, read, step=7)

    assert optimizer_step(optimizer) == 7
    for parameter in model.parameters():
        assert (parameter == 3.0).all()
        assert (optimizer.state[parameter]["exp_avg"] == 1.0).all()
        assert (optimizer.state[parameter]["exp_avg_sq"] == 2.0).all()


def test_a_tensor_of_another_shape_is_refused() -> None:
    model, _ = trained(0)

    with pytest.raises(ValueError, match=r"shape \[5\] cannot be written into \[2\]"):
        load_parameters_(model, lambda section, name: torch.zeros(5))


def test_muon_keeps_one_moment_of_a_matrix_and_is_stored_like_any() -> None:
    model, optimizer = with_muon(2)

    sections = training_tensors(model, optimizer)

    assert optimizer_step(optimizer) == 2
    assert sections["exp_avg"]["used.weight"].any()
    assert sections["exp_avg_sq"]["used.bias"].any()
    assert not sections["exp_avg_sq"]["used.weight"].any()
    kept = kept_moments(model, optimizer)
    assert {moment: list(tensors) for moment, tensors in kept.items()} == {
        "exp_avg": ["unused.bias", "unused.weight", "used.bias", "used.weight"],
        "exp_avg_sq": ["unused.bias", "used.bias"],
    }

    other_model, other = with_muon(0)
    load_parameters_(other_model, lambda section, name: sections[section][name])
    load_moments_(other_model, other, lambda section, name: sections[section][name], step=2)
    for each, its in ((model, optimizer), (other_model, other)):
        step(each, its)
    for one, another in zip(model.parameters(), other_model.parameters(), strict=True):
        assert torch.equal(one, another), "it goes on bit for bit"


def test_moments_of_another_optimizer_are_refused_by_both_names() -> None:
    _, adamw = trained(0)
    _, muon = with_muon(0)

    check_optimizer(adamw, "adamw", "it")
    with pytest.raises(ConfigError, match=r"it holds .* 'adamw' \(there\), this run has 'muon'"):
        check_optimizer(muon, "adamw", "it")


@pytest.mark.parametrize(
    ("moment", "value"),
    [
        ("exp_avg", 1e35),
        ("exp_avg_sq", math.inf),
        ("exp_avg_sq", 1e-30),
        ("exp_avg", math.nan),
        ("exp_avg_sq", 1e20),
        ("exp_avg_sq", -1.0),
    ],
)
def test_moments_that_no_gradients_make_are_zeroed_and_no_others(moment: str, value: float) -> None:
    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.zeros(50))
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, betas=(0.9, 0.95))
    for step in range(60):
        scale = 1e-9 if step % 7 else 0.1  # rare gradients come near the bound
        parameter.grad = torch.randn(50, generator=generator).clamp(-1, 1) * scale
        optimizer.step()
    assert mend_moments_(optimizer, clip_norm=1.0) == 0
    before = {name: optimizer.state[parameter][name].clone() for name in MOMENTS}

    optimizer.state[parameter][moment][7] = value

    assert mend_moments_(optimizer, clip_norm=1.0) == 1
    for name in MOMENTS:
        now = optimizer.state[parameter][name]
        assert now[7] == 0
        now[7] = before[name][7]
        assert torch.equal(now, before[name])


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999), (0.95, 0.95), (0.0, 0.5)])
def test_no_step_of_adam_goes_beyond_its_bound(betas: tuple[float, float]) -> None:
    parameter = torch.nn.Parameter(torch.full((40,), 3.0))
    optimizer = torch.optim.AdamW([parameter], lr=1e-2, betas=betas, weight_decay=0.1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(200):
        # Growing gradients of one sign are the worst case.
        growth = torch.randn(40, generator=generator).abs() * 1.02 ** torch.arange(40)
        parameter.grad = growth if parameter.grad is None else parameter.grad * 1.05
        bound, before = step_bound(optimizer), parameter.detach().clone()
        optimizer.step()
        most = bound.update + bound.decay * before.abs()
        assert bool(((parameter.detach() - before).abs() <= most).all())
