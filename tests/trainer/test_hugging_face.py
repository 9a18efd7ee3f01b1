"""Names and config.json of Llama: every parameter has one name, every misfit its reason."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from diloco.errors import ConfigError
from diloco.trainer.models.hugging_face import config_json, read_shape, stored_tensors
from diloco.trainer.models.model import LlamaShape

SHAPE = LlamaShape(
    vocab_size=300,
    dim=48,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    ffn_dim=80,
    rope_theta=5e5,
    norm_eps=1e-6,
)
LAYER = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}


def content(**changes: Any) -> dict[str, Any]:
    """config.json of SHAPE after a round trip through a file."""
    written: dict[str, Any] = json.loads(json.dumps(config_json(SHAPE, max_sequence_length=64)))
    return written | changes


def names_of(shape: LlamaShape) -> dict[str, str]:
    return {ours: tensor.name for ours, (tensor,) in stored_tensors(shape).items()}


def test_every_parameter_has_its_name_in_llama() -> None:
    names = names_of(SHAPE)

    assert names == {
        "embed.weight": "model.embed_tokens.weight",
        **{
            f"layers.{n}.{ours}.weight": f"model.layers.{n}.{theirs}.weight"
            for n in range(2)
            for ours, theirs in LAYER.items()
        },
        "norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    }


def test_a_tied_head_has_no_name() -> None:
    names = names_of(replace(SHAPE, tie_embeddings=True))

    assert names_of(SHAPE).keys() - names.keys() == {"head.weight"}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_shape_is_read_back_from_what_was_written(tied: bool) -> None:
    shape = replace(SHAPE, tie_embeddings=tied)

    assert read_shape(config_json(shape, max_sequence_length=64), "here") == shape


def test_length_and_type_are_written_and_no_token_is_special() -> None:
    written = content()

    assert written["max_position_embeddings"] == 64
    assert written["dtype"] == "float32"
    assert {written[f"{name}_token_id"] for name in ("bos", "eos", "pad")} == {None}


def test_what_older_versions_left_out_has_the_value_it_had() -> None:
    older = {
        "model_type": "llama",
        "vocab_size": 300,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
    }

    assert read_shape(older, "here") == replace(
        SHAPE, num_kv_heads=6, rope_theta=10_000.0, norm_eps=1e-6
    )
    of_version_4 = older | {"rope_theta": 5e5, "rope_scaling": None}
    assert read_shape(of_version_4, "here").rope_theta == 5e5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mistral"}, ["model_type", "mistral", "llama"]),
        ({"model_type": None}, ["model_type"]),
        ({"attention_bias": True}, ["attention_bias", "True"]),
        ({"mlp_bias": True}, ["mlp_bias"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}},
            ["llama3", "original_max_sequence_length"],
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, ["linear", "factor: not said"]),
        ({"rope_parameters": {"rope_type": "longrope"}}, ["rope_type = 'longrope'", "yarn"]),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 2.0,
                    "original_max_position_embeddings": 64,
                    "mscale_all_dim": 1.0,
                }
            },
            ["mscale_all_dim = 1.0"],
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            ["partial_rotary_factor", "0.5"],
        ),
        ({"rope_parameters": {"rope_theta": "x"}}, ["rope_theta", "'x'"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps"]),
        ({"head_dim": 15}, ["head_dim = 15", "even"]),
        ({"hidden_size": 50, "head_dim": None}, ["2 x num_attention_heads = 12", "50"]),
        ({"num_key_value_heads": 4}, ["num_key_value_heads = 4", "num_attention_heads = 6"]),
        ({"hidden_size": None}, ["hidden_size = None"]),
        ({"vocab_size": 0}, ["vocab_size = 0"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_the_decoder_cannot_represent_is_refused(
    changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as refusal:
        read_shape(content(**changes), "a/config.json")

    assert all(word in str(refusal.value) for word in ["a/config.json", *words])


def test_all_reasons_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as refusal:
        read_shape(content(mlp_bias=True, hidden_act="relu", head_dim=3), "here")

    assert len(str(refusal.value).splitlines()) == 4
