"""Latent attention against a loop in float64 over heads and positions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from diloco.config.model import LatentAttentionConfig, RopeScalingConfig
from diloco.trainer.models.attention import LATENT_NORM_EPS, LatentAttention
from diloco.trainer.models.rope import rope_table

DIM, HEADS, THETA = 14, 3, 50.0


def by_hand(layer: LatentAttention, latent: LatentAttentionConfig, x_SD: Tensor) -> Tensor:
    weights = {name: p.detach().double() for name, p in layer.named_parameters()}
    x_SD = x_SD.double()

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + LATENT_NORM_EPS).sqrt() * weights[name]

    def rotate(x: Tensor, position: int) -> Tensor:
        half = len(x) // 2
        turned = []
        for i in range(half):
            angle = position * THETA ** (-i / half)
            z = complex(x[i].item(), x[i + half].item()) * complex(math.cos(angle), math.sin(angle))
            turned.append(z)
        return torch.tensor([z.real for z in turned] + [z.imag for z in turned]).double()

    rows = []
    for s in range(len(x_SD)):
        out = []
        for head in range(HEADS):

            def query(position: int, head: int = head) -> Tensor:
                x = x_SD[position]
                if latent.q_rank:
                    q = weights["q_up.weight"] @ norm(weights["q_down.weight"] @ x, "q_norm.weight")
                else:
                    q = weights["q.weight"] @ x
                width = latent.nope_dim + latent.rope_dim
                q = q[head * width : (head + 1) * width]
                return torch.cat((q[: latent.nope_dim], rotate(q[latent.nope_dim :], position)))

            def key_value(position: int, head: int = head) -> tuple[Tensor, Tensor]:
                down = weights["kv_down.weight"] @ x_SD[position]
                up = weights["kv_up.weight"] @ norm(down[: latent.kv_rank], "kv_norm.weight")
                width = latent.nope_dim + latent.value_dim
                own = up[head * width : (head + 1) * width]
                rotated = rotate(down[latent.kv_rank :], position)
                return torch.cat((own[: latent.nope_dim], rotated)), own[latent.nope_dim :]

            pairs = [key_value(t) for t in range(s + 1)]
            scores = torch.stack([key @ query(s) for key, _ in pairs])
            scores = scores / math.sqrt(latent.nope_dim + latent.rope_dim)
            values = torch.stack([value for _, value in pairs])
            out.append(scores.softmax(0) @ values)
        rows.append(weights["o.weight"] @ torch.cat(out))
    return torch.stack(rows)


@pytest.mark.parametrize("q_rank", [0, 6])
def test_latent_attention_is_that_of_the_loop(q_rank: int) -> None:
    latent = LatentAttentionConfig(kv_rank=5, q_rank=q_rank, rope_dim=4, nope_dim=3, value_dim=6)
    layer = LatentAttention(DIM, HEADS, latent)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.6, generator=generator)
    x = torch.randn(2, 7, DIM, generator=generator)
    positions = torch.arange(7)

    out = layer(x, *rope_table(positions, latent.rope_dim, THETA, RopeScalingConfig()))

    for row, ours in zip(x, out, strict=True):
        torch.testing.assert_close(ours.double(), by_hand(layer, latent, row), rtol=1e-4, atol=1e-4)
