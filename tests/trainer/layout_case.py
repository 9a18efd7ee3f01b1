"""One layout of an island: the run that trains it, and how it is trained in this process.

A case is configuration only, checked as a run file is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal, TypeAlias

import torch

from diloco.config.compute import PLAIN, Compute
from diloco.config.inner import InnerOptimizerConfig
from diloco.config.mesh import MeshConfig
from diloco.config.model import ModelConfig
from diloco.config.schema import Config
from diloco.data.batches import Data
from diloco.data.open import open_data
from diloco.trainer.island_trainer import island_trainer, own_batches
from diloco.trainer.parallel.mesh import IslandMesh
from diloco.trainer.trainer import InnerTrainer

#: What a row needs besides torch.
Loads: TypeAlias = Literal["", "compiler", "transformers"]

INNER_STEPS = 5

#: Small, and awkward: half of ffn_dim, a rank's share under tp = 2, divides by no other 2.
MODEL = ModelConfig(dim=64, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=210)
OPTIMIZER = InnerOptimizerConfig(name="adamw", lr=2e-3, warmup_steps=2)

_ISLAND = "bench"
_SEED = 11
_SEQUENCE_LENGTH = 32
_BATCH_SIZE = 8
_EVALUATED = 7  # divides neither by ranks nor by the micro-batch


@dataclass(frozen=True)
class Case:
    """One layout.

    Attributes:
        name: Of the row.
        mesh: Axes and options; their product is the number of ranks.
        model: What differs from `MODEL`.
        optimizer: What differs from `OPTIMIZER`.
        z_loss: Coefficient of the penalty of log Z.
        micro_batches: Parts of a rank's batch; one rank trains in one part.
        collectives: Collectives of a rank and inner step, where they are counted.
        compute: How blocks are computed; one rank computes them plainly.
    """

    name: str
    mesh: MeshConfig
    model: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    z_loss: float = 0.0
    micro_batches: int = 1
    collectives: Mapping[str, int] | None = None
    compute: Compute = PLAIN

    @property
    def num_ranks(self) -> int:
        """Number of ranks that train it."""
        return self.mesh.num_ranks

    @property
    def is_compiled(self) -> bool:
        """Whether blocks are compiled."""
        return self.compute.compile_backend != ""

    @property
    def loads(self) -> Loads:
        """What is loaded for it; either takes longer than many rows."""
        if self.is_compiled:
            return "compiler"
        return "transformers" if self.model.get("family") == "hf" else ""

    @property
    def what(self) -> str:
        """What is trained, whatever the layout: rows of one such text are held against one run."""
        return repr((sorted(self.model.items()), sorted(self.optimizer.items()), self.z_loss))

    @property
    def alone(self) -> Case:
        """What it is held against: the same on one rank, in float32, with everything kept."""
        return replace(self, mesh=MeshConfig(), micro_batches=1, collectives=None, compute=PLAIN)

    def config(self) -> Config:
        """Write the run that trains it; its only island is selected.

        Raises:
            ValueError: If a run file with these values would be refused.
        """
        compiled = {"compile": True, "compile_backend": self.compute.compile_backend}
        return Config.model_validate(
            {
                "run": {"name": "layouts", "seed": _SEED, "inner_steps": INNER_STEPS + 3},
                "model": {**MODEL.model_dump(exclude_unset=True), **self.model},
                "data": {"sequence_length": _SEQUENCE_LENGTH},
                "inner": {
                    "optimizer": {**OPTIMIZER.model_dump(exclude_unset=True), **self.optimizer},
                    "clip_norm": 0.5,
                    "z_loss": self.z_loss,
                },
                "outer": {"preset": "classic", "inner_steps_per_round": 1},
                "coordinator": {"state_dir": "unused"},
                "evaluation": {"num_sequences": _EVALUATED},
                "islands": {
                    _ISLAND: {
                        "ranks": self.num_ranks,
                        "tokens_per_inner_step": _BATCH_SIZE * _SEQUENCE_LENGTH,
                        "mesh": self.mesh,
                        "micro_batches": self.micro_batches,
                        "activation_checkpointing": self.compute.activation_checkpointing,
                        **(compiled if self.is_compiled else {}),
                        "precision": self.compute.precision,
                    }
                },
                "island_id": _ISLAND,
            }
        )

    def make_trainer(self, mesh: IslandMesh) -> InnerTrainer:
        """Build model, optimizer and loop; collective.

        Args:
            mesh: From `make_mesh` of this row's.
        """
        if self.is_compiled:
            torch.compiler.reset()  # compiled as in a process of its own
        config, data = self.config(), _text()
        return island_trainer(config, data, own_batches(config, data, 0, mesh), mesh)


@cache
def _text() -> Data:
    """Open the text, which is that of every row, once a process."""
    return open_data(Case("", MeshConfig()).config())
