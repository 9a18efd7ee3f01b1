"""One rank's inner steps: accumulation, counting, clipping, time, and evaluation."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from diloco.config.inner import InnerOptimizerConfig
from diloco.errors import ConfigError
from diloco.trainer.optimizers.optimizer import learning_rate
from tests.trainer.small_island import (
    BATCH_SIZE,
    INNER_STEPS,
    SEQUENCE_LENGTH,
    make_model,
    make_trainer,
    one_rank,
    small_data,
    whole_parameters,
)


@pytest.mark.parametrize("micro_batches", [2, 8])
def test_accumulated_micro_batches_equal_one_batch(micro_batches):
    one, many = make_trainer(one_rank()), make_trainer(one_rank(), micro_batches=micro_batches)

    for step in range(4):
        expected, metrics = one.inner_step(step).read(), many.inner_step(step).read()

        # Float32 sums in another order, as between layouts.
        assert metrics.loss == pytest.approx(expected.loss, abs=5e-6)
        assert metrics.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
    ours = whole_parameters(many.model)
    for name, value in whole_parameters(one.model).items():
        assert np.abs(ours[name] - value).max() <= 1e-4, name


def test_first_steps_are_those_of_a_plain_loop():
    trainer = make_trainer(one_rank(), clip_norm=0.5)
    model, data = make_model(one_rank()), small_data()
    config = InnerOptimizerConfig(lr=2e-3, warmup_steps=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.1)
    optimizer.param_groups[0]["params"] = [p for p in model.parameters() if p.ndim == 2]
    norms = [p for p in model.parameters() if p.ndim == 1]
    optimizer.add_param_group({"params": norms, "weight_decay": 0.0})

    for step in range(3):
        metrics = trainer.inner_step(step).read()

        tokens = data.batch(1, step, BATCH_SIZE)
        logits = model(tokens[:, :-1], torch.arange(SEQUENCE_LENGTH))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step, INNER_STEPS)
        optimizer.step()
        assert metrics.loss == pytest.approx(loss.item(), abs=1e-6)
        assert metrics.grad_norm == pytest.approx(norm.item(), rel=1e-5)


def test_metrics_count_completed_steps_tokens_and_time():
    metrics = make_trainer(one_rank()).inner_step(3).read()

    assert metrics.inner_step == 4
    assert metrics.num_tokens == BATCH_SIZE * SEQUENCE_LENGTH
    assert metrics.duration_s == 1  # the clock of the tests moves by 1 at each look
    assert metrics.learning_rate == pytest.approx(2e-3 * (0.1 + 0.9 * 0.9330127))


def test_a_step_leaves_no_gradient():
    trainer = make_trainer(one_rank())

    trainer.inner_step(0)

    assert all(p.grad is None for p in trainer.model.parameters())


def test_same_trainer_twice_is_the_same_to_the_bit():
    runs = []
    for _ in range(2):
        trainer = make_trainer(one_rank())
        metrics = [trainer.inner_step(step).read() for step in range(3)]
        runs.append((metrics, whole_parameters(trainer.model)))

    (metrics, parameters), (other_metrics, other_parameters) = runs
    assert metrics == other_metrics
    for name, value in parameters.items():
        assert np.array_equal(value, other_parameters[name])


@pytest.mark.parametrize("num_sequences", [1, 8, 11])
def test_evaluation_is_the_mean_over_the_held_out_sequences(num_sequences):
    trainer = make_trainer(one_rank(), num_evaluated=num_sequences)
    tokens = small_data().evaluation(num_sequences).tokens
    with torch.no_grad():
        logits = trainer.model(tokens[:, :-1], torch.arange(SEQUENCE_LENGTH))
        expected = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    assert trainer.evaluate() == pytest.approx(expected.item(), abs=1e-6)


def test_evaluation_is_a_byte_of_text_not_a_token():
    trainer = make_trainer(one_rank())
    a_token = trainer.evaluate()
    evaluation = small_data().evaluation(4)
    coarse = dataclasses.replace(evaluation, num_bytes=3 * evaluation.num_bytes)

    trainer = make_trainer(one_rank(), evaluation=coarse)

    assert trainer.evaluate() == pytest.approx(a_token / 3)


def test_evaluation_changes_nothing():
    trainer, undisturbed = make_trainer(one_rank()), make_trainer(one_rank())

    trainer.evaluate()

    assert dataclasses.replace(trainer.inner_step(0).read(), duration_s=0) == dataclasses.replace(
        undisturbed.inner_step(0).read(), duration_s=0
    )


def test_indivisible_batch_is_refused():
    with pytest.raises(
        ConfigError, match=r"8 sequences cannot be divided into .*micro_batches = 3"
    ):
        make_trainer(one_rank(), micro_batches=3)
