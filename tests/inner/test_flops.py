"""Operations of a token, against PyTorch's own count of what the model runs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from diloco.inner.flops import flops_per_token, peak_flops
from diloco.inner.model import LlamaShape, build_model, initialise_
from diloco.telemetry.compute import Compute


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_formula_is_what_the_model_runs_with_attention_in_full(tied: bool) -> None:
    shape = LlamaShape(100, 32, 3, 4, 2, 48, tie_embeddings=tied)
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


def test_a_share_is_told_of_known_devices_only() -> None:
    assert peak_flops(torch.device("cpu")) == 0
    unknown, known = Compute(2e9, 4), Compute(2e9, 4, 1e12)

    # 1,000 tokens x 2e9 / (4 ranks x 2 s) = 0.25e12 a second and rank.
    assert known.tflops_per_s(1000, 2.0) == unknown.tflops_per_s(1000, 2.0) == 0.25
    assert (known.mfu(1000, 2.0), unknown.mfu(1000, 2.0)) == (0.25, 0.0)
    assert known.tflops_per_s(0, 0.0) == 0
