"""A causal model of `transformers` as the trainer takes it: built, materialised and initialised.

The model's own code computes; nothing of it is copied or changed. Parameters keep the names that
transformers gives them, a tied head is called by its embedding's. Buffers (rotary frequencies) are
computed, never synchronised.

See transformers 5.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from diloco.config.hugging_face import content_of, content_problems
from diloco.config.model import ExpertsConfig, LatentAttentionConfig, ModelConfig
from diloco.errors import ConfigError
from diloco.island.lanes.boxes import write_stored_
from diloco.island.lanes.parameters import canonical_parameters
from diloco.trainer.models.model import draw


@dataclass(frozen=True, slots=True)
class TransformersShape:
    """Name and sizes of the model, as `ModelConfig` has checked them.

    Attributes:
        hf_config: Pairs of key and JSON of config.json, sorted by key.
        vocab_size: Number of token ids.
        dim: Width of the residual stream.
        num_layers: Number of blocks.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        ffn_dim: Width inside a feed-forward layer.
        head_dim: Width of a head.
    """

    hf_config: tuple[tuple[str, str], ...]
    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_dim: int
    head_dim: int

    @classmethod
    def from_config(cls, config: ModelConfig) -> TransformersShape:
        """Take config.json and sizes from a model configuration of family "hf"."""
        return cls(
            hf_config=tuple(sorted(config.hf_config.items())),
            vocab_size=config.vocab_size,
            dim=config.dim,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            ffn_dim=config.ffn_dim,
            head_dim=config.head_dim or config.dim // config.num_heads,
        )

    @property
    def experts(self) -> ExpertsConfig:
        """None: models with experts are refused."""
        return ExpertsConfig()

    @property
    def latent_attention(self) -> LatentAttentionConfig:
        """None that is counted as such."""
        return LatentAttentionConfig()

    def has_experts(self, layer: int) -> bool:
        """Whether that layer has experts: none has."""
        return False


class TransformersModel(nn.Module):
    """The model without memory for parameters, which are on the meta device; buffers are real.

    Attributes:
        shape: Of the model.
        decoder: What transformers built.
        tied_parameters: Which parameter is which other one, by canonical name.
    """

    #: The decoder's parameters are called as in transformers.
    unnamed_modules = ("decoder",)

    def __init__(self, shape: TransformersShape) -> None:
        """Create the modules; values come from `initialise_transformers_`.

        Raises:
            ConfigError: If transformers has no such causal model, or cannot read its config.json.
        """
        super().__init__()
        self.shape = shape
        self.decoder = _build(shape)
        self.tied_parameters = _tied(self.decoder)
        kinds = self.decoder._no_split_modules or ()
        blocks = [m for m in self.decoder.modules() if type(m).__name__ in kinds]
        self._blocks = tuple(blocks)
        if len(blocks) != shape.num_layers:
            raise ConfigError(
                f"{type(self.decoder).__name__} of transformers names {len(blocks)} blocks "
                f"(_no_split_modules) for {shape.num_layers} layers: it cannot be trained here; "
                "take another model"
            )

    @property
    def blocks(self) -> tuple[nn.Module, ...]:
        """The layers, in order: what is sharded, compiled and recomputed as a unit."""
        return self._blocks

    def forward(self, input_: Tensor, positions_S: Tensor) -> Tensor:
        """Compute logits of the next token.

        Args:
            input_: Token ids, shape [B, S], int64.
            positions_S: 0 to S - 1, which the model counts by itself.

        Returns:
            Logits of shape [B, S, V].
        """
        logits_BSV: Tensor = self.decoder(input_ids=input_, use_cache=False).logits
        return logits_BSV

    def to_empty(self, *, device: torch.device | str | int | None, recurse: bool = True) -> Self:
        """Give the model memory; buffers keep their values, parameters are undefined."""
        held = [(module, dict(module._buffers)) for module in self.modules()]
        super().to_empty(device=device, recurse=recurse)
        for module, buffers in held:
            for name, buffer in buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
        return self

    def tie_(self) -> None:
        """Let tied parameters be one again, after whatever replaced them."""
        for name, source in self.tied_parameters.items():
            path, _, attribute = name.rpartition(".")
            setattr(self.decoder.get_submodule(path), attribute, self.decoder.get_parameter(source))

    def assert_tied(self) -> None:
        """Assert that what is tied is one parameter."""
        for name, source in self.tied_parameters.items():
            is_tied = self.decoder.get_parameter(name) is self.decoder.get_parameter(source)
            assert is_tied, f"{name} and {source}: tying was lost"


def _build(shape: TransformersShape) -> Any:  # transformers' classes are made at run time
    transformers, accelerate = map(importlib.import_module, ("transformers", "accelerate"))
    config = _filled(content_of(dict(shape.hf_config)))
    # What config.json leaves out, dropout say, transformers fills in.
    for problem in content_problems(config.to_dict()):
        raise ConfigError(f"model.{problem}")
    with _refusing(config.model_type), accelerate.init_empty_weights(include_buffers=False):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if any(getattr(module, "is_causal", True) is False for module in model.modules()):
        raise ConfigError(
            f'model.hf_config of model_type "{config.model_type}": tokens would see those after '
            f"them; set model.hf_config.is_decoder = true, or take a causal model"
        )
    model.tie_weights()
    return model


def filled_content(content: Mapping[str, Any]) -> dict[str, Any]:
    """Write out a config.json: keys of older versions as this one has them, and all defaults.

    Raises:
        ConfigError: If transformers cannot read it.
    """
    filled: dict[str, Any] = _filled(content).to_dict()
    return filled


def _filled(content: Mapping[str, Any]) -> Any:
    transformers = importlib.import_module("transformers")
    kind = content["model_type"]
    if kind not in transformers.CONFIG_MAPPING:
        raise ConfigError(
            f'model.hf_config.model_type = "{kind}" is unknown to transformers '
            f"{transformers.__version__}: install a newer one, or take another model"
        )
    with _refusing(kind):
        return transformers.CONFIG_MAPPING[kind].from_dict(dict(content))


@contextlib.contextmanager
def _refusing(kind: str) -> Iterator[None]:
    """Tell of what transformers cannot make a model of as of a mistake in the configuration."""
    transformers = importlib.import_module("transformers")
    errors = importlib.import_module("huggingface_hub.errors")
    mistakes = (TypeError, ValueError, KeyError, AttributeError, errors.StrictDataclassError)
    try:
        with _warnings_only():
            yield
    except mistakes as error:
        raise ConfigError(
            f'model.hf_config of model_type "{kind}": transformers {transformers.__version__} '
            f"makes no causal model of it: {error}"
        ) from error


@contextlib.contextmanager
def _warnings_only() -> Iterator[None]:
    """Keep what transformers says of token ids, which training has no use for, out of the log."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _tied(decoder: Any) -> dict[str, str]:
    """Find which names are one parameter; the input embedding's is the one that counts."""
    names: dict[int, list[str]] = {}
    for name, parameter in decoder.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    embedding = id(decoder.get_input_embeddings().weight)
    tied: dict[str, str] = {}
    for key, (first, *others) in names.items():
        group = sorted([first, *others])
        source = group[0]
        if key == embedding:
            of_table = [n for n in group if _is_table(decoder, n)]
            source = of_table[0]
        tied |= dict.fromkeys((name for name in group if name != source), source)
    return tied


def _is_table(decoder: nn.Module, name: str) -> bool:
    return isinstance(decoder.get_submodule(name.rpartition(".")[0]), nn.Embedding)


@cache
def transformers_shapes(shape: TransformersShape) -> Mapping[str, tuple[int, ...]]:
    """Give the unsharded shape of every parameter by its canonical name, tied ones once."""
    model = TransformersModel(shape)
    return {name: tuple(p.shape) for name, p in canonical_parameters(model).items()}


@cache
def looked_up(shape: TransformersShape) -> frozenset[str]:
    """Name the tables that no token is multiplied with: of embeddings that are not the head's."""
    model = TransformersModel(shape)
    tables = {name for name in transformers_shapes(shape) if _is_table(model.decoder, name)}
    return frozenset(tables - set(model.tied_parameters.values()))


@cache
def edges(shape: TransformersShape) -> frozenset[str]:
    """Name what lies at either end of the layers: tables of embeddings, and the head."""
    model = TransformersModel(shape)
    head = id(model.decoder.get_output_embeddings().weight)
    parameters = canonical_parameters(model).items()
    return frozenset(n for n, p in parameters if id(p) == head or _is_table(model.decoder, n))


# -- initial values --------------------------------------------------------------------------------


@torch.no_grad()
def initialise_transformers_(model: TransformersModel, seed: int) -> None:
    """Fill the parameters as the model's own class does, with bits that depend on seed and name.

    Block by block the class's rule (`_init_weights`) is applied to whole tensors on the CPU, and
    each rank keeps its own part, without communication. Normal values are those of the built-in
    decoder's generator, the same on every processor.

    Args:
        model: Materialised; parameters may be plain tensors or DTensors, float32.
        seed: Seed of the run.

    Raises:
        ConfigError: If the rule leaves values out.
    """
    targets = canonical_parameters(model)
    fresh = TransformersModel(model.shape).decoder
    paths = {id(module): path for path, module in fresh.named_modules()}
    blocks = [m for m in fresh.modules() if type(m).__name__ in fresh._no_split_modules]
    for block in blocks:
        path = paths[id(block)]
        _draw_like(fresh, block.to_empty(device="cpu"), path, seed, targets)
        block.to("meta")
    inside = {id(module) for block in blocks for module in block.modules()}
    for path, module in fresh.named_modules():
        if id(module) not in inside and module._parameters:
            module.to_empty(device="cpu", recurse=False)
            _draw_like(fresh, module, path, seed, targets)


def _draw_like(
    decoder: Any, unit: nn.Module, path: str, seed: int, targets: Mapping[str, Tensor]
) -> None:
    """Apply the rule of `decoder`'s class to a unit with memory, and keep what is ours of it."""
    named = {f"{path}.{name}": parameter for name, parameter in unit.named_parameters()}
    named = {name: p for name, p in named.items() if not p.is_meta}
    for values in named.values():
        values.fill_(torch.nan)  # what the rule forgets is found below
    digest = hashlib.sha256(f"{seed}/{path}".encode()).digest()
    with torch.random.fork_rng(devices=[]), _SameEverywhere(seed, named):
        torch.manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        unit.apply(decoder._init_weights)
    for name, values in named.items():
        if values.isnan().any():
            raise ConfigError(
                f"{type(decoder).__name__} of transformers says no initial values of {name}: begin "
                f"with weights (run.warm_start), or take another model"
            )
        if name in targets:  # of tied ones the first
            write_stored_(targets[name], values.detach())


class _SameEverywhere(TorchDispatchMode):
    """Draws normal values without logarithms and cosines, whose last bits processors differ in."""

    def __init__(self, seed: int, named: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
        self._names = {parameter.data_ptr(): name for name, parameter in named.items()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = self._names.get(args[0].data_ptr()) if func is _NORMAL else None
        if name is None:
            return func(*args, **(kwargs or {}))
        tensor, mean, std = (*args, 0.0, 1.0)[:3] if len(args) < 3 else args[:3]
        return tensor.copy_(draw(tensor.shape, std, self._seed, name).add_(mean))


_NORMAL = torch.ops.aten.normal_.default
