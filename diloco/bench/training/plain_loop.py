"""A Llama and its training loop as one writes them straight in PyTorch: what ours is held against.

It knows nothing of islands, meshes, micro-batches or schedules, and its sequences lie ready in
memory. Parameters come in the order of `diloco.trainer.models.model.Llama`'s, so that values can be
copied.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diloco.config.inner import InnerConfig
from diloco.config.model import ModelConfig


class _PlainBlock(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        dim, head_dim = config.dim, config.dim // config.num_heads
        self.head_dim = head_dim
        self.attention_norm = nn.RMSNorm(dim, eps=config.norm_eps)
        self.q = nn.Linear(dim, config.num_heads * head_dim, bias=False)
        self.k = nn.Linear(dim, config.num_kv_heads * head_dim, bias=False)
        self.v = nn.Linear(dim, config.num_kv_heads * head_dim, bias=False)
        self.o = nn.Linear(config.num_heads * head_dim, dim, bias=False)
        self.ffn_norm = nn.RMSNorm(dim, eps=config.norm_eps)
        self.gate = nn.Linear(dim, config.ffn_dim, bias=False)
        self.up = nn.Linear(dim, config.ffn_dim, bias=False)
        self.down = nn.Linear(config.ffn_dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.attention_norm(x)
        q, k, v = (
            each(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(
            _rotate(q, cos, sin), _rotate(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        h = self.ffn_norm(x)
        out: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return out


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.type_as(x)


class PlainLlama(nn.Module):
    """The decoder of a configuration without experts, latent attention and other options."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, sequence_length: int) -> None:
        """Create the modules, and the rotations of so many positions."""
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(_PlainBlock(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        head_dim = config.dim // config.num_heads
        frequencies = config.rope_theta ** (-torch.arange(0, head_dim, 2) / head_dim)
        angles = torch.outer(torch.arange(sequence_length, dtype=torch.float32), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute the logits of the next token, shape [B, S, V], of ids of shape [B, S]."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits: Tensor = self.head(self.norm(x))
        return logits


class PlainLoop:
    """Model, fused AdamW and clipping, at a constant learning rate."""

    def __init__(
        self, model: PlainLlama, config: InnerConfig, dtype: torch.dtype = torch.float32
    ) -> None:
        """Build the optimizer; matrices are decayed, vectors are not.

        In another type than float32 the model computes with copies of what is trained.
        """
        chosen = config.optimizer
        self._model, self._clip_norm = model, config.clip_norm
        self._computing: list[Tensor] = list(model.parameters())
        self._trained = self._computing
        if dtype != torch.float32:
            self._trained = [nn.Parameter(p.detach().clone()) for p in self._computing]
            for parameter in self._computing:
                parameter.data = parameter.data.to(dtype)
        matrices = [p for p in self._trained if p.ndim >= 2]
        vectors = [p for p in self._trained if p.ndim < 2]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": chosen.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=chosen.lr,
            betas=chosen.betas,
            eps=chosen.eps,
            fused=True,
        )

    def step(self, tokens: Tensor) -> Tensor:
        """Train on ids of shape [B, S + 1]; returns the loss in nats a token, on the device."""
        logits = self._model(tokens[:, :-1]).float()
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        torch.autograd.backward(loss)
        has_copies = self._trained is not self._computing
        if has_copies:
            for trained, computing in zip(self._trained, self._computing, strict=True):
                assert computing.grad is not None
                trained.grad, computing.grad = computing.grad.float(), None
        nn.utils.clip_grad_norm_(self._trained, self._clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if has_copies:
            with torch.no_grad():
                torch._foreach_copy_(self._computing, self._trained)
        return loss.detach()
