"""Grouped-query and latent attention, and where what spreads positions over ranks puts its own.

Latent attention makes keys and values of all heads out of one narrow vector a position. In training
the vector is expanded and attention is as usual; a head of a query or key has a part that is
rotated, for keys the same of all heads, and a part that is not.

Shape legend: B sequences, S positions, D width, N query heads, K key/value heads, E values of a
head; of latent attention C width of the narrow vector (`kv_rank`), R rotated values of a head, P
others, V values of a value head.

Source: GQA (arXiv 2305.13245); norms of queries and keys: arXiv 2302.05442, as Qwen3 has them;
latent attention: DeepSeek-V2 (arXiv 2405.04434), section 2.1, Eqs. 9 to 19.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diloco.config.model import LatentAttentionConfig
from diloco.trainer.models.rope import apply_rope

#: (queries [B, S, N, E], keys [B, S, K, E], values [B, S, K, E']) -> [B, S, N, E'].
Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


def causal_attention(q_BSNE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor) -> Tensor:
    """Attend from every position to itself and to those before it, with scale 1 / sqrt(E)."""
    out_BNSE = F.scaled_dot_product_attention(
        q_BSNE.transpose(1, 2),
        k_BSKE.transpose(1, 2),
        v_BSKE.transpose(1, 2),
        is_causal=True,
        enable_gqa=True,
    )
    return out_BNSE.transpose(1, 2)


class Attention(nn.Module):
    """Causal grouped-query attention; the number of heads here follows from the weights.

    Attributes:
        attend: Computes attention out of queries, keys and values; replaced by what spreads
            positions over ranks.
    """

    attend: Attend

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qk_norm_eps: float | None,
    ) -> None:
        """Create the four projections, and the norms of queries and keys unless eps is None."""
        super().__init__()
        self.head_dim = head_dim
        self.attend = causal_attention
        self.q = nn.Linear(dim, num_heads * head_dim, bias=False)
        self.k = nn.Linear(dim, num_kv_heads * head_dim, bias=False)
        self.v = nn.Linear(dim, num_kv_heads * head_dim, bias=False)
        self.o = nn.Linear(num_heads * head_dim, dim, bias=False)
        self.q_norm: nn.RMSNorm | None = None
        self.k_norm: nn.RMSNorm | None = None
        if qk_norm_eps is not None:
            self.q_norm = nn.RMSNorm(head_dim, eps=qk_norm_eps)
            self.k_norm = nn.RMSNorm(head_dim, eps=qk_norm_eps)

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend from every position to itself and to those before it."""
        # A rank of a tensor-parallel island sees only its own heads, hence the -1.
        q_BSNE = self.q(x_BSD).unflatten(-1, (-1, self.head_dim))
        k_BSKE = self.k(x_BSD).unflatten(-1, (-1, self.head_dim))
        v_BSKE = self.v(x_BSD).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q_BSNE, k_BSKE = self.q_norm(q_BSNE), self.k_norm(k_BSKE)
        out_BSNE = self.attend(apply_rope(q_BSNE, cos, sin), apply_rope(k_BSKE, cos, sin), v_BSKE)
        out_BSD: Tensor = self.o(out_BSNE.flatten(2))
        return out_BSD


#: Of the norms of the narrow vectors, whatever that of the model: as DeepSeek's are.
LATENT_NORM_EPS = 1e-6


class LatentAttention(nn.Module):
    """Causal multi-head latent attention.

    Attributes:
        attend: Computes attention out of queries, keys and values; replaced by what spreads
            positions over ranks.
    """

    attend: Attend

    def __init__(self, dim: int, num_heads: int, latent: LatentAttentionConfig) -> None:
        """Create the projections; without `q_rank` queries come out of the residual stream."""
        super().__init__()
        self._num_heads = num_heads
        self._latent = latent
        self.attend = causal_attention
        q_dim = num_heads * (latent.nope_dim + latent.rope_dim)
        kv_dim = num_heads * (latent.nope_dim + latent.value_dim)
        if latent.q_rank:
            self.q_down = nn.Linear(dim, latent.q_rank, bias=False)
            self.q_norm = nn.RMSNorm(latent.q_rank, eps=LATENT_NORM_EPS)
            self.q_up = nn.Linear(latent.q_rank, q_dim, bias=False)
        else:
            self.q = nn.Linear(dim, q_dim, bias=False)
        self.kv_down = nn.Linear(dim, latent.kv_rank + latent.rope_dim, bias=False)
        self.kv_norm = nn.RMSNorm(latent.kv_rank, eps=LATENT_NORM_EPS)
        self.kv_up = nn.Linear(latent.kv_rank, kv_dim, bias=False)
        self.o = nn.Linear(num_heads * latent.value_dim, dim, bias=False)

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend from every position to itself and to those before it."""
        latent, heads = self._latent, (self._num_heads, -1)
        if latent.q_rank:
            q_BSNE = self.q_up(self.q_norm(self.q_down(x_BSD))).unflatten(-1, heads)
        else:
            q_BSNE = self.q(x_BSD).unflatten(-1, heads)
        q_BSNP, q_BSNR = q_BSNE.split([latent.nope_dim, latent.rope_dim], dim=-1)
        kv_BSC, k_BSR = self.kv_down(x_BSD).split([latent.kv_rank, latent.rope_dim], dim=-1)
        kv_BSNE = self.kv_up(self.kv_norm(kv_BSC)).unflatten(-1, heads)
        k_BSNP, v_BSNV = kv_BSNE.split([latent.nope_dim, latent.value_dim], dim=-1)
        k_BSNR = apply_rope(k_BSR[:, :, None], cos, sin).expand(-1, -1, self._num_heads, -1)
        out_BSNV = self.attend(
            torch.cat((q_BSNP, apply_rope(q_BSNR, cos, sin)), dim=-1),
            torch.cat((k_BSNP, k_BSNR), dim=-1),
            v_BSNV,
        )
        out_BSD: Tensor = self.o(out_BSNV.flatten(2))
        return out_BSD
