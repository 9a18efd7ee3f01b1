"""Owns the built-in decoder: a Llama-style language model and its initial values.

RoPE in float32 at explicit positions (rotating the two halves of a head, as Hugging Face's Llama
does), grouped-query or latent attention, SwiGLU or experts, RMSNorm, no biases. The module knows
nothing of meshes; `parallelize` rewires it. Of its buffers only those that a module names in
`synchronised_buffers` (the bias of experts) are state; they start as zeros.

Shape legend: B sequences, S positions, D width, V vocabulary.

Source: Llama (arXiv 2302.13971).
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diloco.config.model import (
    ExpertsConfig,
    LatentAttentionConfig,
    ModelConfig,
    RopeScalingConfig,
)
from diloco.errors import ConfigError
from diloco.island.lanes.boxes import stored, stored_box, whole_shape, write_stored_
from diloco.island.lanes.parameters import synchronised_buffers
from diloco.trainer.models.attention import Attention, LatentAttention
from diloco.trainer.models.experts import ExpertLayer
from diloco.trainer.models.rope import rope_table

#: Standard deviation of initial weights; projections into the residual stream have less.
INIT_STD = 0.02
_RESIDUAL = (".attention.o", ".down")
_PLAIN_ROPE, _NO_EXPERTS, _NO_LATENT = RopeScalingConfig(), ExpertsConfig(), LatentAttentionConfig()


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Sizes of a decoder, as `ModelConfig` has checked them.

    Attributes:
        vocab_size: Number of token ids.
        dim: Width of the residual stream, a multiple of `num_heads`.
        num_layers: Number of blocks.
        num_heads: Query heads.
        num_kv_heads: Key and value heads, a divisor of `num_heads`.
        ffn_dim: Width inside a dense feed-forward layer.
        rope_theta: Base of the rotary frequencies.
        norm_eps: Added to the mean square in RMSNorm.
        tie_embeddings: True uses one matrix as embedding and as output head.
        head_dim: Width of a head, even (RoPE rotates pairs); 0 becomes dim / num_heads. With
            latent attention always 0.
        qk_norm: Whether query and key heads go through an RMSNorm.
        rope_scaling: Of the rotary frequencies.
        experts: Of the layers from `first_dense_layers` on; off without `num_experts`.
        latent_attention: Off without `kv_rank`.
    """

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_dim: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    head_dim: int = 0
    qk_norm: bool = False
    rope_scaling: RopeScalingConfig = _PLAIN_ROPE
    experts: ExpertsConfig = _NO_EXPERTS
    latent_attention: LatentAttentionConfig = _NO_LATENT

    def __post_init__(self) -> None:
        """Derive the width of a head, so that equal models have equal shapes."""
        if self.latent_attention.kv_rank:
            object.__setattr__(self, "head_dim", 0)  # it has widths of its own
        elif not self.head_dim:
            object.__setattr__(self, "head_dim", self.dim // self.num_heads)

    @property
    def rotated_dim(self) -> int:
        """How many values of a head are rotated."""
        return self.latent_attention.rope_dim or self.head_dim

    @classmethod
    def from_config(cls, config: ModelConfig) -> LlamaShape:
        """Take the sizes from a model configuration.

        Raises:
            ConfigError: If the model is not this module's.
        """
        if config.family == "hf":
            raise ConfigError(
                'model.family = "hf": this takes the built-in model only; set model.family = '
                '"llama"'
            )
        if config.family == "own":
            raise ConfigError(
                'model.family = "own": only the loop that builds this model can train and read it, '
                'with diloco.DiLoCo; for the built-in model set model.family = "llama"'
            )
        return cls(**{name: getattr(config, name) for name in cls.__dataclass_fields__})

    def has_experts(self, layer: int) -> bool:
        """Whether that layer has experts in place of a feed-forward layer."""
        return self.experts.num_experts > 0 and layer >= self.experts.first_dense_layers


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        """Create the three projections."""
        super().__init__()
        self.gate = nn.Linear(dim, hidden_dim, bias=False)
        self.up = nn.Linear(dim, hidden_dim, bias=False)
        self.down = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Apply the layer position by position."""
        out_BSD: Tensor = self.down(F.silu(self.gate(x_BSD)) * self.up(x_BSD))
        return out_BSD


class Block(nn.Module):
    """Pre-norm residual block.

    Attributes:
        recompute: Calls what it is given so that the backward computes it again; None: everything
            is kept. From `activation_checkpointing`.
    """

    def __init__(self, shape: LlamaShape, layer: int) -> None:
        """Create both halves and their norms.

        Args:
            shape: Of the model.
            layer: Index of the layer; the first ones may be dense though others have experts.
        """
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.attention = _attention(shape)
        self.ffn_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.feed_forward = (
            _experts(shape) if shape.has_experts(layer) else FeedForward(shape.dim, shape.ffn_dim)
        )
        self.recompute: Callable[..., Tensor] | None = None

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Add attention, then the feed-forward layer, to the residual stream."""
        if self.recompute is None or not torch.is_grad_enabled():
            return self._apply_halves(x_BSD, cos, sin)
        return self.recompute(self._apply_halves, x_BSD, cos, sin)

    def _apply_halves(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), cos, sin)
        out_BSD: Tensor = x_BSD + self.feed_forward(self.ffn_norm(x_BSD))
        return out_BSD


def _attention(shape: LlamaShape) -> Attention | LatentAttention:
    if shape.latent_attention.kv_rank:
        return LatentAttention(shape.dim, shape.num_heads, shape.latent_attention)
    return Attention(
        shape.dim,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        qk_norm_eps=shape.norm_eps if shape.qk_norm else None,
    )


def _experts(shape: LlamaShape) -> ExpertLayer:
    num_shared = shape.experts.num_shared
    shared = FeedForward(shape.dim, num_shared * shape.experts.expert_dim) if num_shared else None
    return ExpertLayer(shape.dim, shape.experts, shared)


class Llama(nn.Module):
    """The decoder, or some of its neighbouring layers: a stage of a pipeline.

    The stage of layer 0 has the embedding, that of the last layer the last norm and the head; where
    they are not, `embed`, or `norm` and `head`, are None. Parameters are named alike in a stage and
    in the whole model: layers keep their index of the whole.

    Attributes:
        shape: Of the whole model.
        layers: The blocks here by their index of the whole model, as text, ascending.
        residual_dtype: Of the residual stream, where it enters and leaves a stage.
    """

    residual_dtype = torch.float32

    def __init__(self, shape: LlamaShape, layers: range | None = None) -> None:
        """Create the modules; values come from `initialise_`.

        Args:
            shape: Of the whole model.
            layers: Indices of the layers to create; None creates the whole model.
        """
        super().__init__()
        self.shape = shape
        here = range(shape.num_layers) if layers is None else layers
        is_first, is_last = 0 in here, shape.num_layers - 1 in here
        self.embed = nn.Embedding(shape.vocab_size, shape.dim) if is_first else None
        self.layers = nn.ModuleDict({str(index): Block(shape, index) for index in here})
        self.norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps) if is_last else None
        self.head = nn.Linear(shape.dim, shape.vocab_size, bias=False) if is_last else None
        self.tie_()

    @property
    def blocks(self) -> tuple[nn.Module, ...]:
        """The layers here, in order: what is sharded, compiled and recomputed as a unit."""
        return tuple(self.layers.values())

    def forward(self, input_: Tensor, positions_S: Tensor) -> Tensor:
        """Compute logits of the next token, or what the stage behind takes.

        Args:
            input_: Token ids, shape [B, S], int64; of a stage without the embedding, the residual
                stream that the stage before returned, shape [B, S, D].
            positions_S: Absolute position of each column, shape [S], int64.

        Returns:
            Logits of shape [B, S, V]; of a stage without the head, the residual stream.
        """
        shape = self.shape
        cos, sin = rope_table(positions_S, shape.rotated_dim, shape.rope_theta, shape.rope_scaling)
        x_BSD = input_ if self.embed is None else self.embed(input_)
        for layer in self.layers.values():
            x_BSD = layer(x_BSD, cos, sin)
        if self.norm is None or self.head is None:
            return x_BSD
        logits_BSV: Tensor = self.head(self.norm(x_BSD))
        return logits_BSV

    def to_empty(self, *, device: torch.device | str | int | None, recurse: bool = True) -> Self:
        """Give a model of the meta device memory; buffers are zeros, parameters undefined."""
        super().to_empty(device=device, recurse=recurse)
        for buffer in self.buffers():
            buffer.zero_()
        return self

    def tie_(self) -> None:
        """Let the head use the embedding's parameter, if the shape says so.

        To be called again after whatever replaces parameters: tensor parallelism and
        materialisation untie them in silence.
        """
        if self.shape.tie_embeddings and self.head is not None and self.embed is not None:
            self.head.weight = self.embed.weight

    @property
    def tied_parameters(self) -> dict[str, str]:
        """Which parameter is which other one, by name: also in a stage that has one of them."""
        return {"head.weight": "embed.weight"} if self.shape.tie_embeddings else {}

    def assert_tied(self) -> None:
        """Assert that embedding and head, where both are, are tied exactly if the shape says so."""
        if self.head is None or self.embed is None:
            return
        is_tied = self.head.weight is self.embed.weight
        assert is_tied == self.shape.tie_embeddings, "embed.weight and head.weight: tying was lost"


def build_model(shape: LlamaShape, layers: range | None = None) -> Llama:
    """Build the decoder, or the stage of it that has `layers`, without memory, on the meta device.

    `parallelize` materialises it.
    """
    with torch.device("meta"):
        return Llama(shape, layers)


def parameter_shapes(shape: LlamaShape) -> dict[str, tuple[int, ...]]:
    """Give the unsharded shape of every tensor of the plan by its canonical name, tied ones once.

    These are the parameters, and behind them the buffers that islands synchronise.
    """
    model = build_model(shape)
    parameters = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return parameters | {name: tuple(b.shape) for name, b in synchronised_buffers(model)}


def initialise_(model: Llama, seed: int) -> None:
    """Fill the parameters with values that depend on the seed and their names only.

    Matrices: mean 0, standard deviation 0.02, and 0.02 / sqrt(2 num_layers) for the projections
    into the residual stream (`attention.o`, every `down`). Norms: ones. The bits do not depend on
    layout, device, number of ranks or processor: the full tensor is drawn on the CPU, one parameter
    at a time, stacked experts one expert at a time, and each rank keeps its own part, without
    communication.

    Args:
        model: Materialised model; parameters may be plain tensors or DTensors, float32.
        seed: Seed of the run.

    Residual outputs are scaled as in GPT-2.
    """
    residual_std = INIT_STD / math.sqrt(2 * model.shape.num_layers)
    for name, parameter in model.named_parameters():
        if name == "head.weight" and model.shape.tie_embeddings:
            name = "embed.weight"  # the stage of the head starts with the values of the first one
        is_residual = name.removesuffix(".weight").endswith(_RESIDUAL)
        std = residual_std if is_residual else INIT_STD
        if parameter.ndim == 3:
            _draw_experts_(parameter, std, seed, name)
        elif parameter.ndim == 1:
            write_stored_(parameter, torch.ones(parameter.shape))
        else:
            write_stored_(parameter, draw(parameter.shape, std, seed, name))


@torch.no_grad()
def _draw_experts_(parameter: Tensor, std: float, seed: int, name: str) -> None:
    """Draw those experts of a stack [X, ...] of which this rank holds a part."""
    box, shape = stored_box(parameter), torch.Size(whole_shape(parameter)[1:])
    for local, expert in zip(stored(parameter), itertools.count(box.offsets[0]), strict=False):
        local.copy_(draw(shape, std, seed, f"{name}.{expert}")[box.slices[1:]])


def draw(shape: torch.Size, std: float, seed: int, name: str) -> Tensor:
    """Draw nearly normal values (the sum of four uniform 16-bit integers, scaled), float32.

    They depend on seed and name only, and have mean 0 and the standard deviation `std`.

    Not `normal_`: its logarithms and cosines differ between processors in the last bit, and two
    islands on unlike machines must start from the same bytes. The integer sum is exact in float32,
    so one rounded multiplication is all that remains.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    bits = torch.empty((shape.numel(), 1), dtype=torch.int64)
    bits.random_(-(2**63), None, generator=generator)
    total = bits.view(torch.int16).sum(dim=1, dtype=torch.int32)
    # Four uniforms on -2^15 .. 2^15 - 1: mean -2, variance 4 (2^32 - 1) / 12.
    return (total + 2).to(torch.float32).mul_(std / math.sqrt((2**32 - 1) / 3)).reshape(shape)
