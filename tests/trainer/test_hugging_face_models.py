"""Every family of transformers that the built-in decoder is: the same logits, both directions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from diloco.config.model import ExpertsConfig, LatentAttentionConfig, RopeScalingConfig
from diloco.errors import ConfigError
from diloco.trainer.models.hugging_face import config_json, read_ours, read_shape, stored_tensors
from diloco.trainer.models.model import Llama, LlamaShape, parameter_shapes
from diloco.trainer.state import load_parameters_

DENSE = LlamaShape(300, 48, 3, 6, 3, 80, rope_theta=500.0, norm_eps=1e-4)
EXPERTS = ExpertsConfig(
    num_experts=8,
    experts_per_token=3,
    expert_dim=40,
    num_shared=2,
    first_dense_layers=1,
    route_scale=2.5,
    num_groups=4,
    groups_per_token=2,
)
LATENT = LatentAttentionConfig(kv_rank=16, q_rank=24, rope_dim=8, nope_dim=12, value_dim=10)
LLAMA3 = RopeScalingConfig(kind="llama3", factor=8.0, original_max_sequence_length=64)
YARN = RopeScalingConfig(kind="yarn", factor=4.0, original_max_sequence_length=32)
SHAPES = {
    "llama-linear": replace(DENSE, rope_scaling=RopeScalingConfig(kind="linear", factor=4.0)),
    "llama-llama3": replace(DENSE, rope_scaling=LLAMA3, head_dim=16),
    "qwen3-yarn": replace(DENSE, qk_norm=True, head_dim=12, rope_scaling=YARN),
    "glm4_moe": replace(DENSE, qk_norm=True, experts=EXPERTS),
    "deepseek_v3": replace(DENSE, num_kv_heads=6, experts=EXPERTS, latent_attention=LATENT),
    "deepseek_v3-dense": replace(
        DENSE,
        num_kv_heads=6,
        latent_attention=LATENT.model_copy(update={"q_rank": 0}),
        tie_embeddings=True,
    ),
}


@pytest.fixture(scope="module")
def transformers() -> Any:
    """The package, imported when a test needs it and not when tests are collected."""
    import transformers

    return transformers


def model_of(shape: LlamaShape, values: Mapping[str, Tensor]) -> Llama:
    model = Llama(shape)
    load_parameters_(model, lambda section, name: values[name])
    return model


def random_values(shape: LlamaShape) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        name: torch.randn(size, generator=generator) * 0.1 + ("norm" in name)
        for name, size in parameter_shapes(shape).items()
    }


def assert_same_function(ours: Llama, theirs: Any) -> None:
    tokens = torch.randint(0, 300, (2, 100), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = theirs(tokens).logits
        logits = ours(tokens, torch.arange(100))

    # Sums in another order, each of the about 20 in a row off by at most 100 * 2^-24, relative.
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("name", SHAPES)
def test_what_we_write_is_the_same_function_in_transformers_and_back(
    transformers: Any, tmp_path: Path, name: str
) -> None:
    shape = SHAPES[name]
    values = random_values(shape)
    written = {
        tensor.name: tensor.from_ours(values[ours])
        for ours, tensors in stored_tensors(shape).items()
        for tensor in tensors
    }
    save_file(written, tmp_path / "model.safetensors", metadata={"format": "pt"})
    content = config_json(shape, max_sequence_length=128)
    (tmp_path / "config.json").write_text(json.dumps(content))

    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)

    assert type(theirs).__name__ == content["architectures"][0]
    assert_same_function(model_of(shape, values), theirs)
    theirs.save_pretrained(tmp_path / "theirs")
    their_content = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert read_shape(their_content, "theirs") == read_shape(content, "ours") == shape
    files = load_file(tmp_path / "theirs" / "model.safetensors")
    for ours, tensors in stored_tensors(shape).items():
        assert torch.equal(read_ours(tensors, files.__getitem__), values[ours]), ours


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"route": "softmax"}, 'route = "softmax"'), ({"num_shared": 0}, "num_shared = 0")],
)
def test_experts_that_transformers_does_not_have_are_not_exported(
    changes: dict[str, Any], words: str
) -> None:
    shape = replace(DENSE, experts=EXPERTS.model_copy(update=changes))

    with pytest.raises(ConfigError, match=words):
        config_json(shape, max_sequence_length=64)
