"""The built-in decoder in Hugging Face's words: names of Llama's parameters, and config.json.

Pure: reads and writes no file and needs no `transformers`. Both models rotate the two halves of a
head and store projections alike, so a parameter has the same values under either name.

Source: `LlamaConfig` and `LlamaForCausalLM` of transformers 5 (config.json of 4 is read too).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diloco.errors import ConfigError
from diloco.inner.model import LlamaShape, parameter_shapes

#: What `read_shape` takes when config.json of an older version says nothing.
_ROPE_THETA = 10_000.0
_RMS_NORM_EPS = 1e-6

_TOP = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attention_norm": "input_layernorm",
    **{f"attention.{name}": f"self_attn.{name}_proj" for name in "qkvo"},
    "ffn_norm": "post_attention_layernorm",
    **{f"feed_forward.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
#: LlamaShape's sizes -> LlamaConfig's.
_SIZES = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "ffn_dim": "intermediate_size",
}
#: What the built-in decoder is, where LlamaConfig leaves a choice; absent in config.json = this.
_FIXED: Mapping[str, Any] = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}


def hugging_face_names(shape: LlamaShape) -> dict[str, str]:
    """Give Hugging Face's name of every parameter by its canonical one; a tied head has none."""
    return {name: _name(name) for name in parameter_shapes(shape)}


def _name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    layers, index, rest = name.removesuffix(".weight").split(".", 2)
    return f"model.{layers}.{index}.{_IN_LAYER[rest]}.weight"


def config_json(shape: LlamaShape, *, max_sequence_length: int) -> dict[str, Any]:
    """Give the content of config.json, as `LlamaForCausalLM.from_pretrained` wants it.

    The base of the rotary frequencies stands twice, for transformers 5 and for older ones. No
    token id is special: the model knows none.

    Args:
        shape: Sizes of the model; its values are float32.
        max_sequence_length: Longest sequence, in tokens, that the model was made for.
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        **{theirs: getattr(shape, ours) for ours, theirs in _SIZES.items()},
        "head_dim": shape.head_dim,
        **_FIXED,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "max_position_embeddings": max_sequence_length,
        "tie_word_embeddings": shape.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def read_shape(content: Mapping[str, Any], source: str) -> LlamaShape:
    """Take the sizes of the decoder from the content of a config.json.

    Args:
        content: Parsed JSON, hence any values; what does not change the function is ignored.
        source: Where it was read, for messages.

    Raises:
        ConfigError: If the built-in decoder cannot represent the model; names every reason.
    """
    if (model_type := content.get("model_type")) != "llama":
        raise ConfigError(
            f"{source}: model_type = {model_type!r}, but only Llama models can be loaded: choose a "
            "model whose config.json says model_type = 'llama'"
        )
    sizes: dict[str, Any] = {ours: content.get(theirs) for ours, theirs in _SIZES.items()}
    if sizes["num_kv_heads"] is None:
        sizes["num_kv_heads"] = sizes["num_heads"]
    problems = [
        f"{_SIZES[name]} = {value!r} is not a positive integer"
        for name, value in sizes.items()
        if type(value) is not int or value < 1
    ] or _head_problems(content, **sizes)
    theta, rope_problems = _read_rope(content)
    norm_eps = content.get("rms_norm_eps", _RMS_NORM_EPS)
    problems += rope_problems
    problems += [
        f"{key} = {value!r} is not a positive number"
        for key, value in (("rope_theta", theta), ("rms_norm_eps", norm_eps))
        if type(value) not in (int, float) or value <= 0
    ]
    problems += [
        f"{key} = {content[key]!r}, the built-in decoder has {value!r}"
        for key, value in _FIXED.items()
        if content.get(key, value) != value
    ]
    if content.get("quantization_config") is not None:
        problems.append("quantization_config is set, weights must be float32, bfloat16 or float16")
    if problems:
        raise ConfigError(
            "\n  ".join([f"{source} is a model that this version cannot represent:", *problems])
        )
    return LlamaShape(
        **sizes,
        rope_theta=float(theta),
        norm_eps=float(norm_eps),
        tie_embeddings=bool(content.get("tie_word_embeddings", False)),
    )


def _read_rope(content: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Give the base of the rotary frequencies, unchecked, and what is not plain RoPE."""
    # transformers 4 wrote rope_theta and rope_scaling, 5 writes rope_parameters.
    rope = content.get("rope_parameters") or content.get("rope_scaling") or {}
    theta = rope.get("rope_theta", content.get("rope_theta", _ROPE_THETA))
    kind = rope.get("rope_type", rope.get("type", "default"))
    share = rope.get("partial_rotary_factor", content.get("partial_rotary_factor", 1.0))
    problems = []
    if kind != "default":
        problems.append(f"rope_type = {kind!r}, only plain RoPE ('default') is there, no scaling")
    if share != 1.0:
        problems.append(f"partial_rotary_factor = {share!r}, the whole head is rotated here")
    return theta, problems


def _head_problems(
    content: Mapping[str, Any], *, dim: int, num_heads: int, num_kv_heads: int, **_: int
) -> list[str]:
    problems = []
    if dim % (2 * num_heads):
        problems.append(f"2 x num_attention_heads = {2 * num_heads} does not divide {dim}")
    elif (head_dim := content.get("head_dim")) not in (None, dim // num_heads):
        problems.append(
            f"head_dim = {head_dim}, must be hidden_size / num_attention_heads = {dim // num_heads}"
        )
    if num_heads % num_kv_heads:
        problems.append(
            f"num_key_value_heads = {num_kv_heads} does not divide num_attention_heads = "
            f"{num_heads}"
        )
    return problems
