"""One row of `diloco bench parity`: train it, and measure what it ends with. Runs in a process.

Source: see `diloco.bench.training.parity`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diloco.bench.counted_process import count_one
from diloco.bench.loopback_run import run_islands
from diloco.compression.blocks import BLOCK_NUMEL
from diloco.config.schema import Config
from diloco.data.batches import Data
from diloco.data.open import open_data
from diloco.island.lanes.shards import canonical_parameters
from diloco.trainer.island_trainer import island_trainer, load_training, save_training
from diloco.trainer.trainer import InnerMetrics

#: Names of islands, by slot.
SLOT = "island-{}"
#: For what is built alike in all rows; a row's own [outer] is for its run.
_NO_OUTER: Mapping[str, Any] = {"preset": "classic", "inner_steps_per_round": 1}


@dataclass(frozen=True, slots=True)
class Task:
    """What all rows train: a Llama of 0.87M parameters on bytes, and for how long."""

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


@dataclass(frozen=True, slots=True)
class Row:
    """One way to train.

    Attributes:
        name: What `--rows` and the table call it.
        num_islands: M; each takes `Task.sequences` / M sequences a step.
        outer: Section [outer] of a run file; None trains without an outer loop: data parallel.
        is_warm: Whether it goes on from the data-parallel run's middle, or from the seed.
    """

    name: str
    num_islands: int
    outer: Mapping[str, Any] | None
    is_warm: bool


@dataclass(frozen=True, slots=True)
class RowResult:
    """What a row came to: held-out loss in nats a byte, and what it took."""

    row: str
    seed: int
    loss: float
    train_s: float
    num_parameters: int
    data_digest: str


def write_start(task: Task, seed: int, path: Path) -> None:
    """Train data parallel up to the warm start and write weights and moments to `path`."""
    training = RowTraining(task, seed, open_row_data(task, seed), num_islands=1, island_slot=0)
    for inner_step in range(task.warm_start_step):
        training.inner_step(inner_step, inner_step)
    training.save(path)


def train_row(task: Task, row: Row, seed: int, start: Path) -> RowResult:
    """Train one row to its end and evaluate it.

    Args:
        task: What is trained.
        row: How.
        seed: Of initial parameters and text.
        start: What `write_start` wrote for this seed; not read by a row that is not warm.
    """
    began = time.process_time()
    start_step = task.warm_start_step if row.is_warm else 0
    data = open_row_data(task, seed)
    trainings = [
        RowTraining(task, seed, data, num_islands=row.num_islands, island_slot=slot)
        for slot in range(row.num_islands)
    ]
    for training in trainings:
        if row.is_warm:
            training.load(start, start_step)
    if row.outer is None:
        (alone,) = trainings
        for inner_step in range(start_step, task.inner_steps):
            alone.inner_step(inner_step, inner_step)
        loss = alone.evaluate()
    else:
        with tempfile.TemporaryDirectory(prefix="diloco-parity-") as directory:
            loss = run_islands(
                row_config(task, seed, row.num_islands, row.outer),
                {SLOT.format(slot): training for slot, training in enumerate(trainings)},
                directory=Path(directory),
                start_step=start_step,
            ).figure
    return RowResult(
        row=row.name,
        seed=seed,
        loss=loss,
        train_s=time.process_time() - began,
        num_parameters=sum(p.numel() for p in trainings[0].parameters.values()),
        data_digest=data.digest,
    )


def pseudo_gradient(task: Task, seed: int, *, first: int, inner_steps: int) -> Tensor:
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
    training = RowTraining(task, seed, open_row_data(task, seed), num_islands=1, island_slot=0)
    for inner_step in range(first):
        training.inner_step(inner_step, inner_step)
    anchor = training.blocks()
    for inner_step in range(first, first + inner_steps):
        training.inner_step(inner_step, inner_step)
    return anchor - training.blocks()


class RowTraining:
    """One island's model, optimizer and its part of the global batch."""

    def __init__(
        self, task: Task, seed: int, data: Data, *, num_islands: int, island_slot: int
    ) -> None:
        """Build them, with the values that the seed gives."""
        config = row_config(task, seed, num_islands, _NO_OUTER)
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
        self._is_counted = island_slot == 0
        self.parameters: Mapping[str, Tensor] = canonical_parameters(self._trainer.model)

    def inner_step(self, inner_step: int, schedule_step: float) -> InnerMetrics:
        """See `loopback_run.Training`."""
        if self._is_counted:
            count_one()
        return self._trainer.inner_step(inner_step, schedule_step)

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


def open_row_data(task: Task, seed: int) -> Data:
    """Open the text of a seed, the same for all rows."""
    return open_data(row_config(task, seed, 1, _NO_OUTER))


def row_config(task: Task, seed: int, num_islands: int, outer: Mapping[str, Any]) -> Config:
    """Give the configuration of a row with this section [outer]."""
    tokens = task.sequences // num_islands * task.sequence_length
    island = {"ranks": 1, "tokens_per_inner_step": tokens}
    return Config.model_validate(
        {
            "run": {"name": "parity", "seed": seed, "inner_steps": task.inner_steps},
            "model": dict(task.model),
            "data": {"sequence_length": task.sequence_length},
            "inner": {
                "optimizer": {"lr": task.lr, "warmup_steps": task.warmup_steps},
                "clip_norm": task.clip_norm,
            },
            "outer": {**outer, "retained_versions": 1},
            "coordinator": {"state_dir": "unused"},
            "evaluation": {"num_sequences": task.evaluation_sequences},
            "islands": {SLOT.format(slot): island for slot in range(num_islands)},
        }
    )
