"""Owns the built-in decoder: a Llama-style language model and its initial values.

RoPE in float32 at explicit positions (rotating the two halves of a head, as Hugging Face's Llama
does), grouped-query attention, SwiGLU, RMSNorm, no biases. The module knows nothing of meshes;
`parallelize` rewires it. It keeps no buffers, so nothing but parameters has to be synchronised.

Shape legend: B sequences, S positions, D width, N query heads, K key/value heads, E values of a
head, V vocabulary.

Source: Llama (arXiv 2302.13971), RoFormer (arXiv 2104.09864), GQA (arXiv 2305.13245).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from diloco.config.model import ModelConfig
from diloco.errors import ConfigError

#: Standard deviation of initial weights; projections into the residual stream have less.
INIT_STD = 0.02


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Sizes of a decoder, as `ModelConfig` has checked them.

    Attributes:
        vocab_size: Number of token ids.
        dim: Width of the residual stream, a multiple of `num_heads`.
        num_layers: Number of blocks.
        num_heads: Query heads; `dim / num_heads` must be even (RoPE rotates pairs).
        num_kv_heads: Key and value heads, a divisor of `num_heads`.
        ffn_dim: Width inside the feed-forward layer.
        rope_theta: Base of the rotary frequencies.
        norm_eps: Added to the mean square in RMSNorm.
        tie_embeddings: True uses one matrix as embedding and as output head.
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

    @classmethod
    def from_config(cls, config: ModelConfig) -> LlamaShape:
        """Take the sizes from a model configuration.

        Raises:
            ConfigError: If the model is not this module's but a loop's own.
        """
        if config.family == "own":
            raise ConfigError(
                'model.family = "own": only the loop that builds this model can train and read it, '
                'with diloco.DiLoCo; for the built-in model set model.family = "llama"'
            )
        return cls(**{name: getattr(config, name) for name in cls.__dataclass_fields__})

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.num_heads


def rope_table(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Compute cosine and sine of the rotary angles, angle[s, i] = positions[s] theta^(-2i/E).

    Args:
        positions: Absolute positions, shape [S], integer.
        head_dim: Width E of a head, even.
        theta: Base of the frequencies.

    Returns:
        cos and sin, each of shape [S, 1, E/2], float32, on the device of `positions`.

    Source: RoFormer (arXiv 2104.09864), Eq. 15.
    """
    pairs = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions.to(torch.float32)[:, None, None] * theta ** (-pairs / head_dim)
    return angles.cos(), angles.sin()


def apply_rope(x_BSNE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + E/2]) of every head, in float32; returns the type of `x`."""
    first, second = x_BSNE.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.type_as(x_BSNE)


class Attention(nn.Module):
    """Causal grouped-query attention; the number of heads here follows from the weights."""

    def __init__(self, shape: LlamaShape) -> None:
        """Create the four projections."""
        super().__init__()
        self.head_dim = shape.head_dim
        kv_dim = shape.num_kv_heads * shape.head_dim
        self.q = nn.Linear(shape.dim, shape.dim, bias=False)
        self.k = nn.Linear(shape.dim, kv_dim, bias=False)
        self.v = nn.Linear(shape.dim, kv_dim, bias=False)
        self.o = nn.Linear(shape.dim, shape.dim, bias=False)

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend from every position to itself and to those before it."""
        # A rank of a tensor-parallel island sees only its own heads, hence the -1.
        q_BSNE = apply_rope(self.q(x_BSD).unflatten(-1, (-1, self.head_dim)), cos, sin)
        k_BSKE = apply_rope(self.k(x_BSD).unflatten(-1, (-1, self.head_dim)), cos, sin)
        v_BSKE = self.v(x_BSD).unflatten(-1, (-1, self.head_dim))
        out_BNSE = F.scaled_dot_product_attention(
            q_BSNE.transpose(1, 2),
            k_BSKE.transpose(1, 2),
            v_BSKE.transpose(1, 2),
            is_causal=True,
            enable_gqa=True,
        )
        out_BSD: Tensor = self.o(out_BNSE.transpose(1, 2).flatten(2))
        return out_BSD


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: LlamaShape) -> None:
        """Create the three projections."""
        super().__init__()
        self.gate = nn.Linear(shape.dim, shape.ffn_dim, bias=False)
        self.up = nn.Linear(shape.dim, shape.ffn_dim, bias=False)
        self.down = nn.Linear(shape.ffn_dim, shape.dim, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Apply the layer position by position."""
        out_BSD: Tensor = self.down(F.silu(self.gate(x_BSD)) * self.up(x_BSD))
        return out_BSD


class Block(nn.Module):
    """Pre-norm residual block."""

    def __init__(self, shape: LlamaShape) -> None:
        """Create both halves and their norms."""
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.attention = Attention(shape)
        self.ffn_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.feed_forward = FeedForward(shape)

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Add attention, then the feed-forward layer, to the residual stream."""
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), cos, sin)
        out_BSD: Tensor = x_BSD + self.feed_forward(self.ffn_norm(x_BSD))
        return out_BSD


class Llama(nn.Module):
    """The decoder, or some of its neighbouring layers: a stage of a pipeline.

    The stage of layer 0 has the embedding, that of the last layer the last norm and the head; where
    they are not, `embed`, or `norm` and `head`, are None. Parameters are named alike in a stage and
    in the whole model: layers keep their index of the whole.

    Attributes:
        shape: Of the whole model.
        layers: The blocks here by their index of the whole model, as text, ascending.
    """

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
        self.layers = nn.ModuleDict({str(index): Block(shape) for index in here})
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
        cos, sin = rope_table(positions_S, self.shape.head_dim, self.shape.rope_theta)
        x_BSD = input_ if self.embed is None else self.embed(input_)
        for layer in self.layers.values():
            x_BSD = layer(x_BSD, cos, sin)
        if self.norm is None or self.head is None:
            return x_BSD
        logits_BSV: Tensor = self.head(self.norm(x_BSD))
        return logits_BSV

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
    """Give the unsharded shape of every parameter by its canonical name, tied ones once."""
    return {name: tuple(p.shape) for name, p in build_model(shape).named_parameters()}


def initialise_(model: Llama, seed: int) -> None:
    """Fill the parameters with values that depend on the seed and their names only.

    Matrices: mean 0, standard deviation 0.02, and 0.02 / sqrt(2 num_layers) for the two projections
    into the residual stream (`attention.o`, `feed_forward.down`). Norms: ones. The bits do not
    depend on layout, device, number of ranks or processor: the full tensor is drawn on the CPU, one
    parameter at a time, and each rank keeps its own part, without communication.

    Args:
        model: Materialised model; parameters may be plain tensors or DTensors, float32.
        seed: Seed of the run.

    Source: GPT-2's scaled initialisation.
    """
    residual_std = INIT_STD / math.sqrt(2 * model.shape.num_layers)
    for name, parameter in model.named_parameters():
        if name == "head.weight" and model.shape.tie_embeddings:
            name = "embed.weight"  # the stage of the head starts with the values of the first one
        if parameter.ndim == 1:
            full = torch.ones(parameter.shape)
        else:
            is_residual = name.endswith((".attention.o.weight", ".feed_forward.down.weight"))
            full = _draw(parameter.shape, residual_std if is_residual else INIT_STD, seed, name)
        with torch.no_grad():
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                part = distribute_tensor(full, mesh, placements, src_data_rank=None)
                parameter.to_local().copy_(part.to_local())
            else:
                parameter.copy_(full)


def _draw(shape: torch.Size, std: float, seed: int, name: str) -> Tensor:
    """Draw nearly normal values (the sum of four uniform 16-bit integers, scaled), float32.

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
