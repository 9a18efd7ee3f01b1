"""The section of the decoder: presets are the models they are named after, misfits are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from diloco.config.mesh import MeshConfig, mesh_problems
from diloco.config.model import ModelConfig
from diloco.trainer.models.model import LlamaShape, parameter_shapes

PARAMETERS = {
    "10M": 26_024_192,  # 9,640,192 without embedding and head
    "150M": 214_983_680,  # 149,447,680 without
    "1B": 1_100_048_384,
    "llama3-8B": 8_030_261_248,
    "llama3-70B": 70_553_706_496,
    "llama3-405B": 405_853_388_800,
}
SIZES = {"dim": 48, "num_layers": 3, "num_heads": 6, "num_kv_heads": 3, "ffn_dim": 80}
EXPERTS = {"num_experts": 8, "experts_per_token": 2, "expert_dim": 16}
LATENT = {"kv_rank": 8, "rope_dim": 4, "nope_dim": 6, "value_dim": 6}
LLAMA3 = {"kind": "llama3", "factor": 8.0, "original_max_sequence_length": 64}


def config(**changes: Any) -> ModelConfig:
    return ModelConfig.model_validate({**SIZES, **changes})


@pytest.mark.parametrize("preset", PARAMETERS)
def test_presets_have_the_parameters_of_what_they_are_named_after(preset: str) -> None:
    shape = LlamaShape.from_config(ModelConfig.model_validate({"preset": preset}))

    assert sum(map(math.prod, parameter_shapes(shape).values())) == PARAMETERS[preset]


def test_one_key_of_a_presets_table_may_be_changed() -> None:
    changed = ModelConfig.model_validate({"preset": "llama3-8B", "rope_scaling": {"factor": 32.0}})

    assert changed.rope_scaling.factor == 32.0
    assert changed.rope_scaling.kind == "llama3"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_heads": 5}, "2 x num_heads must divide dim = 48, or give head_dim"),
        ({"head_dim": 7}, "6 or 8"),
        ({"experts": {**EXPERTS, "experts_per_token": 9}}, r"= 9 is outside \[1, 8\]"),
        ({"experts": {**EXPERTS, "num_groups": 3}}, "num_groups = 3 does not divide"),
        (
            {"experts": {**EXPERTS, "num_groups": 4, "experts_per_token": 3}},
            r"outside \[1, 2\]: a token chooses among 1 of 4 groups",
        ),
        ({"experts": {**EXPERTS, "num_groups": 2, "groups_per_token": 3}}, "above num_groups = 2"),
        ({"experts": {**EXPERTS, "expert_dim": 0}}, "needs expert_dim of at least 1"),
        ({"experts": {**EXPERTS, "first_dense_layers": 3}}, "use at most 2"),
        ({"experts": {**EXPERTS, "expert_dim": 20}}, "multiple of 8 with experts: 16 or 24"),
        (
            {"experts": {"route_scale": 2.0}},
            "route_scale\n.*needs num_experts, and it is 0: set that",
        ),
        ({"latent_attention": LATENT}, "must be num_heads = 6 with latent_attention"),
        ({"latent_attention": {**LATENT, "rope_dim": 3}}, "rope_dim = 3 must be even"),
        ({"latent_attention": {**LATENT, "value_dim": 0}}, "needs value_dim of at least 1"),
        ({"latent_attention": {"q_rank": 4}}, "q_rank\n.*needs kv_rank, and it is 0: set that"),
        ({"latent_attention": LATENT, "head_dim": 8}, "which has widths of its own"),
        (
            {"latent_attention": LATENT, "num_kv_heads": 6, "qk_norm": True},
            "which has norms of its own",
        ),
        (
            {"rope_scaling": {"factor": 2.0}},
            'needs kind = "linear" or "llama3" or "yarn", and it is "none"',
        ),
        (
            {"rope_scaling": {"kind": "linear", "factor": 2.0, "beta_fast": 8.0}},
            r'beta_fast\n.*needs kind = "yarn", and it is "linear"',
        ),
        ({"rope_scaling": {"kind": "yarn", "factor": 2.0}}, "needs original_max_sequence_length"),
        (
            {"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}},
            "low_freq_factor = 4.0 must be below high_freq_factor = 4.0",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        config(**changes)


@pytest.mark.parametrize(
    "changes", [{"experts": EXPERTS}, {"latent_attention": LATENT, "num_kv_heads": 6}]
)
def test_tensor_parallelism_without_a_plan_is_refused_by_name(changes: dict[str, Any]) -> None:
    ((path, value, problem),) = mesh_problems(MeshConfig(tp=2), {"model": config(**changes)})

    assert (path, value) == ("mesh.tp", 2)
    assert "model.experts.num_experts = 8" in problem or "kv_rank = 8" in problem
