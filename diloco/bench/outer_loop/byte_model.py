"""A small byte model in training, whose global batch islands share, for benches and tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diloco.bench.run_values import NO_OUTER, run_values
from diloco.compression.blocks import BLOCK_NUMEL
from diloco.config.schema import Config
from diloco.data.batches import Data
from diloco.data.open import open_data
from diloco.island.lanes.parameters import canonical_parameters
from diloco.trainer.island_trainer import island_trainer, load_training, save_training
from diloco.trainer.launched_step import InnerMetrics

#: Names of islands, by slot.
SLOT = "island-{}"


@dataclass(frozen=True, slots=True)
class ByteTask:
    """What is trained: a Llama of 0.87M parameters on bytes, and for how long."""

    inner_steps: int = 600
    warm_start_step: int = 300
    sequences: int = 24
    sequence_length: int = 128
    evaluation_sequences: int = 256
    lr: float = 2e-3
    warmup_steps: int = 60
    clip_norm: float = 1.0
    # The debug preset with a narrower feed-forward layer: 865,408 parameters.
    model: Mapping[str, int] = field(
        default_factory=lambda: {
            "dim": 128,
            "num_layers": 4,
            "num_heads": 4,
            "num_kv_heads": 2,
            "ffn_dim": 392,
        }
    )


def write_start(task: ByteTask, seed: int, path: Path) -> None:
    """Train data parallel up to the warm start and write weights and moments to `path`."""
    training = ByteTraining(task, seed, open_bytes(task, seed), num_islands=1, island_slot=0)
    for inner_step in range(task.warm_start_step):
        training.inner_step(inner_step, inner_step)
    training.save(path)


def pseudo_gradient(task: ByteTask, seed: int, *, first: int, inner_steps: int) -> Tensor:
    """Train one island alone and return what it would send after a round.

    Args:
        task: What is trained.
        seed: Of initial parameters and text.
        first: Inner steps before the round.
        inner_steps: Of the round.

    Returns:
        Delta = anchor - parameters, flat float32, every tensor filled up to whole blocks with zeros
        as in a fragment.
    """
    training = ByteTraining(task, seed, open_bytes(task, seed), num_islands=1, island_slot=0)
    for inner_step in range(first):
        training.inner_step(inner_step, inner_step)
    anchor = training.blocks()
    for inner_step in range(first, first + inner_steps):
        training.inner_step(inner_step, inner_step)
    return anchor - training.blocks()


class ByteTraining:
    """One island's model, optimizer and its part of the global batch."""

    def __init__(
        self, task: ByteTask, seed: int, data: Data, *, num_islands: int, island_slot: int
    ) -> None:
        """Build them, with the values that the seed gives."""
        config = byte_config(task, seed, num_islands, NO_OUTER)
        config = config.model_copy(update={"island_id": SLOT.format(island_slot)})
        # One slot's batch, cut among the islands: the same sequences whatever their number.
        batches = data.batches(
            slots=(0,),
            num_slots=1,
            batch_size=task.sequences,
            dp_coordinate=island_slot,
            dp_size=num_islands,
        )
        self._trainer = island_trainer(config, data, batches)
        self.parameters: Mapping[str, Tensor] = canonical_parameters(self._trainer.model)

    def inner_step(self, inner_step: int, schedule_step: float) -> InnerMetrics:
        """See `loopback_run.Training`."""
        return self._trainer.inner_step(inner_step, schedule_step).read()

    def mend(self, *, is_new: bool) -> int:
        """See `loopback_run.Training`."""
        return self._trainer.mend(is_new=is_new)

    def blocks(self) -> Tensor:
        """All parameters in whole blocks, copied."""
        flat = (self.parameters[name].detach().flatten() for name in sorted(self.parameters))
        padded = [torch.nn.functional.pad(p, (0, -p.numel() % BLOCK_NUMEL)) for p in flat]
        return torch.cat(padded)

    def evaluate(self) -> float:
        """See `loopback_run.Training`."""
        return self._trainer.evaluate()

    def save(self, path: Path) -> None:
        """Write weights and moments."""
        save_training(self._trainer, path)

    def load(self, path: Path, inner_step: int) -> None:
        """Read what `save` wrote after so many inner steps."""
        load_training(self._trainer, path, inner_step)


def open_bytes(task: ByteTask, seed: int) -> Data:
    """Open the text of a seed."""
    return open_data(byte_config(task, seed, 1, NO_OUTER))


def byte_config(task: ByteTask, seed: int, num_islands: int, outer: Mapping[str, Any]) -> Config:
    """Give the configuration of a run with this section [outer]."""
    values = run_values(
        "bench",
        task.model,
        {**outer, "retained_versions": 1},
        sequence_length=task.sequence_length,
        tokens=task.sequences // num_islands * task.sequence_length,
        islands=[SLOT.format(slot) for slot in range(num_islands)],
        run={"name": "bench", "seed": seed, "inner_steps": task.inner_steps},
        inner={
            "optimizer": {"lr": task.lr, "warmup_steps": task.warmup_steps},
            "clip_norm": task.clip_norm,
        },
        evaluation={"num_sequences": task.evaluation_sequences},
    )
    return Config.model_validate(values)
