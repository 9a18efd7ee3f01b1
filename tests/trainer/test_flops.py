"""Operations of a token, against PyTorch's own count of what the model runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from diloco.config.model import ExpertsConfig, LatentAttentionConfig
from diloco.telemetry.meter import ComputeWork
from diloco.trainer.flops import flops_per_token, peak_flops
from diloco.trainer.models.model import LlamaShape, build_model, initialise_

PLAIN = LlamaShape(100, 32, 3, 4, 2, 48)
EXPERTS = ExpertsConfig(
    num_experts=6, experts_per_token=2, expert_dim=40, num_shared=1, first_dense_layers=1
)
LATENT = LatentAttentionConfig(kv_rank=24, q_rank=40, rope_dim=8, nope_dim=16, value_dim=20)


def flops_of_experts(rows: Sequence[int], stack: Sequence[int], *_: Any, **__: Any) -> int:
    """2 R D F: every row goes through the matrix of one expert."""
    return 2 * rows[0] * rows[1] * stack[-1]


@pytest.mark.parametrize(
    "shape",
    [
        PLAIN,
        replace(PLAIN, tie_embeddings=True),
        replace(PLAIN, head_dim=24),
        replace(PLAIN, num_kv_heads=4, latent_attention=LATENT),
        replace(PLAIN, num_kv_heads=4, latent_attention=LATENT.model_copy(update={"q_rank": 0})),
    ],
    ids=["untied", "tied", "wide-heads", "latent", "latent-without-q-rank"],
)
def test_formula_is_what_the_model_runs_with_attention_in_full(shape: LlamaShape) -> None:
    model = build_model(shape)
    model.to_empty(device="cpu")
    model.tie_()
    initialise_(model, 1)
    tokens = torch.zeros(2, 16, dtype=torch.long)

    # Written out in matrices, causal attention costs what the convention counts: all of it.
    with FlopCounterMode(display=False) as counted, sdpa_kernel(SDPBackend.MATH):
        logits = model(tokens, torch.arange(16))
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()

    assert counted.get_total_flops() == flops_per_token(shape, 16) * tokens.numel()


def test_of_routed_experts_those_count_that_a_token_goes_through() -> None:
    shape = replace(PLAIN, experts=EXPERTS)
    model = build_model(shape)
    model.to_empty(device="cpu")
    initialise_(model, 1)
    tokens = torch.zeros(2, 16, dtype=torch.long)
    grouped_mm = {torch.ops.aten._grouped_mm: flops_of_experts}

    with (
        FlopCounterMode(display=False, custom_mapping=grouped_mm) as counted,
        sdpa_kernel(SDPBackend.MATH),
        torch.no_grad(),
    ):
        model(tokens, torch.arange(16))

    # A backward takes twice as much.
    assert 3 * counted.get_total_flops() == flops_per_token(shape, 16) * tokens.numel()


def test_a_share_is_told_of_known_devices_only() -> None:
    assert peak_flops(torch.device("cpu")) == 0
    unknown, known = ComputeWork(2e9, 4), ComputeWork(2e9, 4, 1e12)

    # 1,000 tokens x 2e9 / (4 ranks x 2 s) = 0.25e12 a second and rank.
    assert known.tflops_per_s(1000, 2.0) == unknown.tflops_per_s(1000, 2.0) == 0.25
    assert (known.mfu(1000, 2.0), unknown.mfu(1000, 2.0)) == (0.25, 0.0)
    assert known.tflops_per_s(0, 0.0) == 0
