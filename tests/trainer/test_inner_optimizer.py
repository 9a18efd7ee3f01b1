"""AdamW's groups, and the learning rate, computed from the inner step alone."""

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from diloco.config.inner import InnerOptimizerConfig, wsd_problems
from diloco.errors import ConfigError
from diloco.trainer.optimizers.optimizer import (
    build_optimizer,
    check_names,
    learning_rate,
    set_learning_rate_,
)

COSINE = InnerOptimizerConfig(lr=2.0, warmup_steps=4, min_lr_ratio=0.1)
CONSTANT = InnerOptimizerConfig(lr=2.0, warmup_steps=4, schedule="constant")
WSD = InnerOptimizerConfig(
    lr=2.0, warmup_steps=4, schedule="wsd", decay_ratio=0.25, decay_shape="linear", min_lr_ratio=0.1
)
ROOT = WSD.model_copy(update={"decay_shape": "1-sqrt"})
AT_ONCE = InnerOptimizerConfig(lr=2.0, min_lr_ratio=0.0)


@pytest.mark.parametrize(
    ("config", "inner_step", "expected"),
    [
        pytest.param(COSINE, 0, 0.5, id="first-step-is-not-lost"),
        pytest.param(COSINE, 3, 2.0, id="warm-up-ends"),
        pytest.param(COSINE, 4, 2.0, id="cosine-starts-at-the-peak"),
        pytest.param(COSINE, 4 + 25, 0.2 + 1.8 * (1 + 0.5**0.5) / 2, id="quarter"),
        pytest.param(COSINE, 4 + 50, 1.1, id="half"),
        pytest.param(COSINE, 104, 0.2, id="end"),
        pytest.param(COSINE, 500, 0.2, id="beyond-the-end"),
        pytest.param(CONSTANT, 1, 1.0, id="constant-warms-up"),
        pytest.param(CONSTANT, 100, 2.0, id="constant-stays"),
        pytest.param(WSD, 1, 1.0, id="wsd-warms-up"),
        pytest.param(WSD, 78, 2.0, id="wsd-is-stable-until-the-last-quarter"),
        pytest.param(WSD, 78 + 13, 1.1, id="wsd-half-of-the-decay"),
        pytest.param(WSD, 104, 0.2, id="wsd-end"),
        pytest.param(WSD, 500, 0.2, id="wsd-beyond-the-end"),
        pytest.param(ROOT, 78 + 6.5, 1.1, id="wsd-root-is-half-way-at-a-quarter"),
        pytest.param(ROOT, 104, 0.2, id="wsd-root-ends-there-too"),
        pytest.param(AT_ONCE, 0, 2.0, id="no-warm-up"),
        pytest.param(AT_ONCE, 104, 0.0, id="down-to-zero"),
    ],
)
def test_learning_rate(config, inner_step, expected):
    assert learning_rate(config, inner_step, 104) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("inner_steps", [1, 3, 4])
def test_run_that_ends_within_the_warm_up_has_a_rate_everywhere(inner_steps):
    rates = [learning_rate(COSINE, step, inner_steps) for step in range(6)]

    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert all(0.2 <= rate <= 2.0 for rate in rates)


def test_step_is_adamw_that_decays_matrices_and_not_vectors():
    config = InnerOptimizerConfig(
        name="adamw", lr=0.5, betas=(0.8, 0.9), weight_decay=0.2, eps=1e-3
    )
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(3.0)
        model.bias.fill_(3.0)
    optimizer = build_optimizer(model, config)
    set_learning_rate_(optimizer, 0.25)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)

    optimizer.step()

    # First step: bias-corrected moments are g and g^2, so the update is lr g / (|g| + eps).
    update = 0.25 * 2.0 / (2.0 + 1e-3)
    torch.testing.assert_close(model.bias, torch.full((2,), 3.0 - update))
    torch.testing.assert_close(model.weight, torch.full((2, 2), 3.0 * (1 - 0.25 * 0.2) - update))


def test_patterns_set_rates_and_decays_of_single_parameters():
    config = InnerOptimizerConfig(
        lr=0.5,
        weight_decay=0.2,
        lr_by_name=["0.*=0.5", "*bias=0"],
        weight_decay_by_name=["1.weight=0.4", "1.*=0.3"],
    )
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    check_names(config, {name: tuple(p.shape) for name, p in model.named_parameters()})
    optimizer = build_optimizer(model, config)

    set_learning_rate_(optimizer, 0.25)

    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {
        names[p]: (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]
    }
    assert found == {
        "0.weight": (0.125, 0.2),
        "0.bias": (0.125, 0.0),  # the first rule that matches counts
        "1.weight": (0.25, 0.4),
        "1.bias": (0.0, 0.3),
    }


@pytest.mark.parametrize("key", ["lr_by_name", "weight_decay_by_name"])
def test_a_pattern_that_matches_no_parameter_is_refused(key):
    config = InnerOptimizerConfig(lr=0.5, **{key: ["*nrm*=0.5"]})

    with pytest.raises(ConfigError, match=rf"inner.optimizer.{key}: .*matches no parameter"):
        check_names(config, {"norm.weight": (2,)})


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"decay_ratio": 0.5}, 'needs schedule = "wsd"'),
        ({"name": "adamw", "momentum": 0.8}, 'needs name = "muon"'),
        ({"name": "adamw", "adamw_by_name": ["*"]}, 'needs name = "muon"'),
        ({"lr_by_name": ["*norm"]}, "must be PATTERN=NUMBER"),
        ({"lr_by_name": ["*norm=-1"]}, "must be PATTERN=NUMBER"),
        ({"weight_decay_by_name": ["*norm=nan"]}, "must be PATTERN=NUMBER"),
    ],
    ids=str,
)
def test_settings_that_do_nothing_or_are_none_are_refused(settings, why):
    with pytest.raises(ValidationError, match=why):
        InnerOptimizerConfig(lr=1.0, **settings)


def test_a_decay_that_begins_within_the_warm_up_is_refused():
    config = WSD.model_copy(update={"warmup_steps": 79})

    ((key, value, message),) = wsd_problems(config, 104)

    assert (key, value) == ("warmup_steps", 79)
    assert "begins after 78 of run.inner_steps = 104, within the warm-up: at most 78" in message
    assert not wsd_problems(WSD, 104)
