"""AdamW and its learning rate, computed from the inner step alone."""

import pytest
import torch
from torch import nn

from diloco.config.inner import InnerOptimizerConfig
from diloco.inner.optimizer import build_optimizer, learning_rate, set_learning_rate_

COSINE = InnerOptimizerConfig(lr=2.0, warmup_steps=4, min_lr_ratio=0.1)
CONSTANT = InnerOptimizerConfig(lr=2.0, warmup_steps=4, schedule="constant")
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
    config = InnerOptimizerConfig(lr=0.5, betas=(0.8, 0.9), weight_decay=0.2, eps=1e-3)
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
