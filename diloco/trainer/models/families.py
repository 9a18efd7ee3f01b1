"""The sources of models that the trainer takes, by `model.family`: the built-in one, transformers'.

What differs between them is decided here, for training, planning and export.
"""

from __future__ import annotations

import math
from typing import TypeAlias

from torch import nn

from diloco.config.hugging_face import FAMILY as HUGGING_FACE
from diloco.config.inner import InnerOptimizerConfig
from diloco.config.mesh import MeshConfig
from diloco.config.model import ModelConfig
from diloco.errors import ConfigError
from diloco.trainer.models import model as built_in
from diloco.trainer.models.model import Llama, LlamaShape
from diloco.trainer.models.transformers_model import (
    TransformersModel,
    TransformersShape,
    edges,
    initialise_transformers_,
    looked_up,
    transformers_shapes,
)
from diloco.trainer.models.transformers_parallel import check_tp_plan
from diloco.trainer.optimizers.optimizer import check_names, is_orthogonalised

Shape: TypeAlias = LlamaShape | TransformersShape
Model: TypeAlias = Llama | TransformersModel


def shape_of(config: ModelConfig) -> Shape:
    """Take what is built from a model configuration.

    Raises:
        ConfigError: If the model is a loop's own.
    """
    if config.family == HUGGING_FACE:
        return TransformersShape.from_config(config)
    return LlamaShape.from_config(config)


def build_model(shape: Shape) -> Model:
    """Build the model without memory, on the meta device; `parallelize` materialises it.

    Raises:
        ConfigError: If transformers cannot build it.
    """
    if isinstance(shape, TransformersShape):
        return TransformersModel(shape)
    return built_in.build_model(shape)


def parameter_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Give the unsharded shape of every tensor of the plan by its canonical name, tied ones once.

    Raises:
        ConfigError: If transformers cannot build it.
    """
    if isinstance(shape, TransformersShape):
        return dict(transformers_shapes(shape))
    return built_in.parameter_shapes(shape)


def check_mesh(shape: Shape, mesh: MeshConfig) -> None:
    """Refuse a mesh that only the model itself can tell not to fit; needs no process group.

    Raises:
        ConfigError: If the mesh has `tp`, and the plan of a model of transformers is not for it.
    """
    if isinstance(shape, TransformersShape) and mesh.tp > 1:
        model = TransformersModel(shape)
        check_tp_plan(model, mesh.tp, keeps_logits_split=mesh.loss_parallel)


def check_optimizer_names(shape: Shape, optimizer: InnerOptimizerConfig) -> None:
    """Check that what the optimizer's settings name is in the model, and that it fits the model.

    Raises:
        ConfigError: As `check_names` does, or if Muon would take an embedding or a head whose name
            in transformers the settings do not foresee.
    """
    shapes = parameter_shapes(shape)
    check_names(optimizer, shapes)
    if optimizer.name == "adamw" or not isinstance(shape, TransformersShape):
        return
    for name in sorted(edges(shape)):
        if is_orthogonalised(optimizer, name, len(shapes[name])):
            raise ConfigError(
                f"inner.optimizer.adamw_by_name = {list(optimizer.adamw_by_name)} leaves {name} to "
                "muon, which is for the matrices between embedding and head: name it there, too"
            )


def initialise_(model: nn.Module, seed: int) -> None:
    """Fill the parameters with values that depend on the seed and their names only."""
    if isinstance(model, TransformersModel):
        initialise_transformers_(model, seed)
    else:
        assert isinstance(model, Llama)
        built_in.initialise_(model, seed)


def num_looked_up(shape: Shape) -> int:
    """Count the values of tables that are looked up in, and that no token is multiplied with."""
    shapes = parameter_shapes(shape)
    if isinstance(shape, TransformersShape):
        return sum(math.prod(shapes[name]) for name in looked_up(shape))
    return 0 if shape.tie_embeddings else math.prod(shapes["embed.weight"])
