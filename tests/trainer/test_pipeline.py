"""Stages of a pipeline: where they are, what they are called, and their checkpoints elsewhere.

What training them gives is in test_layouts.
"""

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from diloco.checkpoint.checkpoint_writer import CheckpointWriter
from diloco.checkpoint.checkpoints import Checkpoint
from diloco.config.mesh import MeshConfig
from diloco.island.lanes.parameters import canonical_parameters, tensor_specs
from diloco.outer.fragments import make_plan
from diloco.trainer.models.model import LlamaShape, parameter_shapes
from diloco.trainer.parallel.mesh import make_mesh
from diloco.trainer.parallel.pipeline import Pipeline, stage_ranks
from diloco.trainer.state import (
    load_moments_,
    load_parameters_,
    optimizer_step,
    training_tensors,
)
from tests.distributed import run_ranks
from tests.trainer.layout_case import MODEL, Case
from tests.trainer.layouts import looped
from tests.trainer.small_island import CPU, one_rank, whole

LOOPED = Case("looped", looped("interleaved-1f1b"), micro_batches=2)
V = Case("v", looped("zbv"), micro_batches=2)
ISLAND = "east"


@pytest.mark.parametrize(
    ("schedule", "ranks"),
    [("gpipe", (0, 1, 2)), ("bfs", (0, 1, 2, 0, 1, 2)), ("zbv", (0, 1, 2, 2, 1, 0))],
)
def test_stages_are_dealt_in_loops_or_there_and_back(schedule, ranks):
    assert stage_ranks(schedule, 3, len(ranks) // 3) == ranks


def bits(trainer):
    """Parameters and moments of this rank, as bytes by section and canonical name."""
    sections = training_tensors(trainer.model, trainer.optimizer)
    return {
        (section, name): whole(tensor).tobytes()
        for section, tensors in sections.items()
        for name, tensor in tensors.items()
    }


def load(trainer, directory):
    checkpoint = Checkpoint.open(directory, ISLAND, 2)
    load_parameters_(trainer.model, checkpoint.read)
    age = checkpoint.manifest["optimizer_step"]
    load_moments_(trainer.model, trainer.optimizer, checkpoint.read, step=age)
    return bits(trainer)


def pass_on(island_rank, directory):
    """Train looped stages, write their checkpoint, and read it at the other placement."""
    looped_mesh = make_mesh(CPU, LOOPED.mesh)
    trainer = LOOPED.make_trainer(looped_mesh)
    for step in range(2):
        trainer.inner_step(step)
    parameters = canonical_parameters(trainer.model)
    specs = tensor_specs(parameters, group=dist.group.WORLD)
    assert {spec.name: spec.shape for spec in specs} == parameter_shapes(
        LlamaShape.from_config(MODEL)
    )
    writer = CheckpointWriter(
        directory, ISLAND, make_plan(specs, num_fragments=3), group=dist.group.WORLD
    )
    writer.write(
        2,
        training=training_tensors(trainer.model, trainer.optimizer),
        outer={"meta": torch.tensor([2])},
        about={"optimizer_step": optimizer_step(trainer.optimizer)},
    )
    other = V.make_trainer(make_mesh(CPU, V.mesh))
    return bits(trainer), load(other, directory)


def test_what_stages_wrote_other_stages_and_one_rank_read_to_the_bit():
    with tempfile.TemporaryDirectory() as temporary:
        ranks = run_ranks(pass_on, 2, Path(temporary))
        alone = load(LOOPED.alone.make_trainer(one_rank()), Path(temporary))

    written = {name: value for looped_bits, _ in ranks for name, value in looped_bits.items()}
    read = {name: value for _, v_bits in ranks for name, value in v_bits.items()}
    assert written == read == alone
    looped_names, v_names = ({name for _, name in rank} for rank in ranks[0])
    assert {"layers.0.ffn_norm.weight", "layers.2.ffn_norm.weight"} <= looped_names
    assert {"layers.0.ffn_norm.weight", "layers.3.ffn_norm.weight", "head.weight"} <= v_names


def tied_ends(island_rank):
    tied = Case("", MeshConfig(pp=4), model={"tie_embeddings": True}, micro_batches=4)
    trainer = tied.make_trainer(make_mesh(CPU, tied.mesh))
    assert isinstance(trainer.model, Pipeline)
    trainer.inner_step(0)
    ends = [name for name in canonical_parameters(trainer.model) if "layers" not in name]
    return ends, {n: v for n, v in bits(trainer).items() if n[1] == "embed.weight"}


def test_tied_ends_are_one_parameter_with_one_value_and_one_state():
    (first, *middle, last) = run_ranks(tied_ends, 4)

    assert first[0] == ["embed.weight"] and last[0] == ["embed.weight", "norm.weight"]
    assert [names for names, _ in middle] == [[], []]
    assert first[1] == last[1] and len(first[1]) == 3
