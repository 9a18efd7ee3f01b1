"""Multi-head latent attention: keys and values of all heads out of one narrow vector a position.

In training the narrow vector is expanded and attention is as usual; a head of a query or key has a
part that is rotated, for keys the same of all heads, and a part that is not.

Shape legend: B sequences, S positions, D width, N heads, C width of the narrow vector (`kv_rank`),
R rotated values of a head, P others, V values of a value head.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1, Eqs. 9 to 19.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from diloco.config.model import LatentAttentionConfig
from diloco.trainer.models.attention import Attend, causal_attention
from diloco.trainer.models.rope import apply_rope

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
