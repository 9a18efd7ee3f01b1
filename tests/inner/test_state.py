"""Parameters and moments by canonical name; what is written to disk is tested with checkpoints."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from diloco.config.inner import InnerOptimizerConfig
from diloco.errors import ConfigError
from diloco.inner.optimizer import build_optimizer
from diloco.inner.state import (
    insist_on_optimizer,
    kept_moments,
    load_moments_,
    load_parameters_,
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

    insist_on_optimizer(adamw, "adamw", "it")
    with pytest.raises(ConfigError, match=r"it holds .* 'adamw' \(there\), this run has 'muon'"):
        insist_on_optimizer(muon, "adamw", "it")
