"""A small model with a trained optimizer, and its checkpoints, for tests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diloco.checkpoint.checkpoint_writer import CheckpointWriter
from diloco.checkpoint.checkpoints import remove_old
from diloco.island.lanes.parameters import canonical_parameters, tensor_specs
from diloco.outer.fragments import Plan, make_plan
from diloco.trainer.state import INNER_OPTIMIZER, optimizer_name, optimizer_step, training_tensors

ISLAND = "east"


class Trained:
    """A model after some steps of AdamW; every element of parameters and moments differs."""

    def __init__(self, seed: int = 1, num_steps: int = 2) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(128, 300), nn.Tanh(), nn.Linear(300, 128))
        self.optimizer = make_optimizer(self.model)
        for _ in range(num_steps):
            self.step()

    def step(self) -> None:
        generator = torch.Generator().manual_seed(optimizer_step(self.optimizer))
        inputs = torch.randn(8, 128, generator=generator)
        (self.model(inputs) - inputs).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def holds(self, weight: Tensor) -> bool:
        """Whether the first parameter has these values."""
        return torch.equal(next(self.model.parameters()), weight)

    def plan(self) -> Plan:
        return make_plan(tensor_specs(canonical_parameters(self.model)), num_fragments=2)

    def outer(self, step: int) -> dict[str, Tensor]:
        """Invent an outer state, of every dtype, with anchors that differ from the parameters."""
        state: dict[str, Any] = {"meta": torch.tensor([1, 0, step])}
        for fragment in self.plan().fragments:
            for lane in fragment.lanes:
                name = f"{fragment.fragment_id}/{lane.lane_id}"
                state[f"anchor/{name}"] = torch.arange(lane.start, lane.end) + 0.5
                state[f"payload/{name}"] = torch.arange(9, dtype=torch.uint8)
        return state

    def write(self, directory: Path, step: int, cut: int = 0) -> int:
        writer = CheckpointWriter(directory, ISLAND, self.plan(), group=None)
        return writer.write(
            step,
            training=training_tensors(self.model, self.optimizer),
            outer=self.outer(step),
            about={
                INNER_OPTIMIZER: optimizer_name(self.optimizer),
                "optimizer_step": optimizer_step(self.optimizer),
                "data": {"step": step},
                "timeline": 0,
            },
            cut=cut,
        )


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def write_until_killed(directory: Path) -> None:
    trained = Trained()
    step = 0
    while True:
        step += 1
        trained.write(directory, step)
        remove_old(directory, ISLAND, newest=step, needed=(), num_unsure=2)


if __name__ == "__main__":
    write_until_killed(Path(sys.argv[1]))
