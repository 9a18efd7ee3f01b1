"""The built-in training loop of an island, from a configuration."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from diloco.config.schema import Config
from diloco.data.batches import Batches, Data
from diloco.trainer.models.families import check_optimizer_names, initialise_, shape_of
from diloco.trainer.parallel.mesh import IslandMesh, make_mesh
from diloco.trainer.parallel.parallelize import parallelize
from diloco.trainer.parallel.pipeline import build_part, parts_of
from diloco.trainer.state import load_moments_, load_parameters_, training_tensors
from diloco.trainer.trainer import InnerTrainer


def island_trainer(
    config: Config, data: Data, batches: Batches, mesh: IslandMesh | None = None
) -> InnerTrainer:
    """Build model, inner optimizer and loop of the selected island; values come from the seed.

    Args:
        config: With an island selected.
        data: Text, for the evaluation.
        batches: What this rank trains on.
        mesh: The island's ranks; None: it has one.
    """
    mesh = mesh or make_mesh(
        torch.device("cpu"), config.island.mesh, is_cast=config.island.compute.is_cast
    )
    check_optimizer_names(shape_of(config.model), config.inner.optimizer)
    model = build_part(shape_of(config.model), mesh)
    for part in parts_of(model):
        parallelize(
            part,
            mesh,
            sequence_length=config.data.sequence_length,
            compute=config.island.compute,
        )
        initialise_(part, config.run.seed)
    return InnerTrainer(
        model,
        mesh=mesh,
        batches=batches,
        evaluation=data.evaluation(config.evaluation.num_sequences),
        config=config.inner,
        batch_size=config.island.tokens_per_inner_step // config.data.sequence_length,
        micro_batches=config.island.micro_batches,
        inner_steps=config.run.inner_steps,
        clock=time.monotonic,
    )


def own_batches(
    config: Config, data: Data, island_slot: int, mesh: IslandMesh | None = None
) -> Batches:
    """Give the batches that the selected island has in an ordinary run.

    Args:
        config: With an island selected.
        data: Text of the run.
        island_slot: Of the island.
        mesh: The island's ranks, of which this one takes its share; None: there is one.
    """
    return data.batches(
        slots=(island_slot,),
        num_slots=config.max_islands,
        batch_size=config.island.tokens_per_inner_step // config.data.sequence_length,
        dp_coordinate=mesh.dp_coordinate if mesh else 0,
        dp_size=mesh.dp_size if mesh else 1,
    )


def save_training(trainer: InnerTrainer, path: Path) -> None:
    """Write weights and moments."""
    sections = training_tensors(trainer.model, trainer.optimizer)
    save_file(
        {
            f"{section}/{name}": tensor.detach().contiguous()
            for section, tensors in sections.items()
            for name, tensor in tensors.items()
        },
        path,
    )


def load_training(trainer: InnerTrainer, path: Path, inner_step: int) -> None:
    """Read what `save_training` wrote after so many inner steps."""
    tensors = load_file(path)

    def read(section: str, name: str) -> Tensor:
        return tensors[f"{section}/{name}"]

    load_parameters_(trainer.model, read)
    load_moments_(trainer.model, trainer.optimizer, read, step=inner_step)
