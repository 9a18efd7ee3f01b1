"""A gradient that is not finite changes no bit of parameters and optimizer, and steps read late."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from diloco.config.inner import InnerOptimizerConfig
from diloco.config.mesh import MeshConfig
from diloco.island.lanes.boxes import stored
from diloco.trainer.parallel.mesh import make_mesh
from diloco.trainer.state import optimizer_step, training_tensors
from diloco.trainer.trainer import InnerTrainer
from tests.distributed import run_ranks
from tests.trainer.small_island import CPU, make_trainer

NUM_STEPS = 3


def state_of(trainer: InnerTrainer) -> dict[str, bytes]:
    """Bits of what this rank stores of parameters and moments."""
    return {
        f"{section}/{name}": stored(tensor).detach().contiguous().numpy().tobytes()
        for section, tensors in training_tensors(trainer.model, trainer.optimizer).items()
        for name, tensor in tensors.items()
    }


def spoil(trainer: InnerTrainer) -> float:
    """Make one more inner step with a NaN in a parameter, which comes back; gives its norm."""
    values = stored(next(iter(trainer.model.parameters())))
    before = values.detach().clone()
    with torch.no_grad():
        values.fill_(math.nan)
    norm = trainer.inner_step(7).read().grad_norm
    with torch.no_grad():
        assert values.isnan().all()
        values.copy_(before)
    return norm


def train_with_and_without(_: int, mesh: dict[str, Any], name: Any) -> list[bool]:
    """Train twice, once with steps in between that are not made: the first step among them."""
    optimizer = InnerOptimizerConfig(name=name, lr=2e-3, warmup_steps=2)
    trainers = [
        make_trainer(make_mesh(CPU, MeshConfig(**mesh)), optimizer=optimizer) for _ in range(2)
    ]
    ours, expected = trainers
    found = []
    for step in range(NUM_STEPS):
        found.append(math.isnan(spoil(ours)))
        late = ours.inner_step(step)
        theirs = expected.inner_step(step).read()
        found.append(state_of(ours) == state_of(expected))
        spoil(ours)
        read = late.read()  # after a later step was launched
        found.append((read.loss, read.grad_norm) == (theirs.loss, theirs.grad_norm))
    steps = [optimizer_step(trainer.optimizer) for trainer in trainers]
    return [*found, steps == [NUM_STEPS, NUM_STEPS]]


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("mesh", [{}, {"dp_shard": 2}], ids=["one-rank", "fsdp"])
def test_a_step_with_a_gradient_that_is_not_finite_changes_no_bit(
    mesh: dict[str, int], name: str
) -> None:
    num_ranks = max(mesh.values(), default=1)

    for found in run_ranks(train_with_and_without, num_ranks, mesh, name):
        assert all(found), found
