"""The islands that the tests of `diloco.inner` train: the debug model on a little made-up text."""

import hashlib
import itertools

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from diloco.config.compute import PLAIN, Compute
from diloco.config.inner import InnerConfig, InnerOptimizerConfig
from diloco.config.mesh import MeshConfig
from diloco.data.batches import Evaluation
from diloco.data.corpus import TextCorpus, TextData
from diloco.island.lanes.parameters import canonical_parameters
from diloco.trainer.models.model import Llama, LlamaShape, initialise_
from diloco.trainer.parallel.mesh import IslandMesh, make_mesh
from diloco.trainer.parallel.parallelize import compile_ahead, parallelize
from diloco.trainer.parallel.pipeline import Pipeline, build_part, parts_of
from diloco.trainer.trainer import InnerTrainer

Array = npt.NDArray[np.float32]

SEED = 11
SEQUENCE_LENGTH = 32
BATCH_SIZE = 8
INNER_STEPS = 8
CPU = torch.device("cpu")


def debug_shape(*, is_tied: bool = False) -> LlamaShape:
    return LlamaShape(
        vocab_size=256,
        dim=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        ffn_dim=416,
        rope_theta=10_000.0,
        norm_eps=1e-5,
        tie_embeddings=is_tied,
    )


def small_corpus() -> TextCorpus:
    """Twenty documents of 1 kB with some structure, the same everywhere."""
    words = [hashlib.sha256(bytes([n])).hexdigest()[: 3 + n % 5] for n in range(40)]
    picks = itertools.count(7, 13)
    documents = [" ".join(words[next(picks) ** 2 % 37] for _ in range(170)) for _ in range(20)]
    return TextCorpus.from_documents(document.encode() for document in documents)


def small_data() -> TextData:
    return TextData(small_corpus(), sequence_length=SEQUENCE_LENGTH, seed=SEED)


def one_rank() -> IslandMesh:
    return make_mesh(CPU, MeshConfig())


def make_model(
    mesh: IslandMesh, shape: LlamaShape | None = None, compute: Compute = PLAIN
) -> Llama | Pipeline:
    model = build_part(shape or debug_shape(), mesh)
    for part in parts_of(model):
        parallelize(part, mesh, sequence_length=SEQUENCE_LENGTH, compute=compute)
        initialise_(part, SEED)
    return model


def make_trainer(
    mesh: IslandMesh,
    *,
    shape: LlamaShape | None = None,
    optimizer: InnerOptimizerConfig | None = None,
    z_loss: float = 0.0,
    micro_batches: int = 1,
    batch_size: int = BATCH_SIZE,
    clip_norm: float = 0.5,
    num_evaluated: int = 4,
    evaluation: Evaluation | None = None,
    compute: Compute = PLAIN,
    is_compiled_ahead: bool = False,
) -> InnerTrainer:
    config = InnerConfig(
        optimizer=optimizer or InnerOptimizerConfig(name="adamw", lr=2e-3, warmup_steps=2),
        clip_norm=clip_norm,
        z_loss=z_loss,
    )
    data, model = small_data(), make_model(mesh, shape, compute)
    if is_compiled_ahead:
        size = batch_size // mesh.dp_size // micro_batches
        compile_ahead(model, mesh, batch_size=size, sequence_length=SEQUENCE_LENGTH)
    return InnerTrainer(
        model,
        mesh=mesh,
        batches=data.batches(
            slots=(1,),
            num_slots=2,
            batch_size=batch_size,
            dp_coordinate=mesh.dp_coordinate,
            dp_size=mesh.dp_size,
        ),
        evaluation=evaluation or data.evaluation(num_evaluated),
        config=config,
        batch_size=batch_size,
        micro_batches=micro_batches,
        inner_steps=INNER_STEPS,
        clock=iter(range(1_000_000)).__next__,
    )


def whole_parameters(model: nn.Module) -> dict[str, Array]:
    """Unsharded values by canonical name; collective unless the island is one rank."""
    return {name: whole(parameter) for name, parameter in canonical_parameters(model).items()}


def whole(tensor: Tensor) -> Array:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().numpy().copy()  # tensors would not survive the end of their rank
