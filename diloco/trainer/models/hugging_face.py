"""The built-in decoder in Hugging Face's words: names of its tensors, and config.json.

    llama          dense, without norms of queries and keys
    qwen3          dense, with them
    glm4_moe       experts, grouped-query attention
    deepseek_v3    latent attention, with or without experts

Pure: reads and writes no file and needs no `transformers`. A parameter has the same values under
either name, but for two things: stacked experts are one tensor each there, and what is rotated
under latent attention lies in interleaved pairs there, in halves here.

See the configurations and models of transformers 5 (config.json of 4 is read too).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from diloco.config.model import ExpertsConfig, LatentAttentionConfig, RopeScalingConfig
from diloco.errors import ConfigError
from diloco.trainer.models.model import LlamaShape, parameter_shapes

#: What `read_shape` takes when config.json of an older version says nothing.
_ROPE_THETA = 10_000.0

_TOP = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attention_norm.weight": "input_layernorm.weight",
    **{f"attention.{name}.weight": f"self_attn.{name}_proj.weight" for name in "qkvo"},
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.router.weight": "mlp.gate.weight",
    "feed_forward.router.expert_bias": "mlp.gate.e_score_correction_bias",
    **{
        f"feed_forward.{part}{name}.weight": f"mlp.{part}{name}_proj.weight"
        for part in ("", "shared_experts.")
        for name in ("gate", "up", "down")
    },
}
_IN_LATENT_LAYER = {
    **_IN_LAYER,
    "attention.q_down.weight": "self_attn.q_a_proj.weight",
    "attention.q_norm.weight": "self_attn.q_a_layernorm.weight",
    "attention.q_up.weight": "self_attn.q_b_proj.weight",
    "attention.kv_down.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attention.kv_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attention.kv_up.weight": "self_attn.kv_b_proj.weight",
}
_EXPERTS = "feed_forward.experts."
#: LlamaShape's sizes -> those of config.json.
_SIZES = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "ffn_dim": "intermediate_size",
}
_LATENT = {
    "kv_rank": "kv_lora_rank",
    "q_rank": "q_lora_rank",
    "rope_dim": "qk_rope_head_dim",
    "nope_dim": "qk_nope_head_dim",
    "value_dim": "v_head_dim",
}
_OF_EXPERTS = {
    "num_experts": "n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_dim": "moe_intermediate_size",
    "num_shared": "n_shared_experts",
    "first_dense_layers": "first_k_dense_replace",
    "normalise": "norm_topk_prob",
    "route_scale": "routed_scaling_factor",
    "num_groups": "n_group",
    "groups_per_token": "topk_group",
}
#: RopeScalingConfig's keys -> those of rope_parameters.
_ROPE = {
    "factor": "factor",
    "original_max_sequence_length": "original_max_position_embeddings",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
}


@dataclass(frozen=True, slots=True)
class _Family:
    """An architecture of transformers.

    Attributes:
        architecture: Name of its class.
        fixed: What the built-in decoder is, where its configuration leaves a choice; absent in
            config.json = this.
        norm_eps: What its configuration has where config.json says nothing; `rotated_share`, too.
        head_dim: Likewise; 0: dim / num_heads.
        rotated_share: Likewise.
    """

    architecture: str
    fixed: Mapping[str, Any] = field(default_factory=dict)
    norm_eps: float = 1e-6
    head_dim: int = 0
    rotated_share: float = 1.0


_COMMON: Mapping[str, Any] = {"hidden_act": "silu", "attention_bias": False}
_WITH_EXPERTS: Mapping[str, Any] = {**_COMMON, "num_nextn_predict_layers": 0}
_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family("LlamaForCausalLM", {**_COMMON, "mlp_bias": False}),
    "qwen3": _Family("Qwen3ForCausalLM", {**_COMMON, "use_sliding_window": False}, head_dim=128),
    "glm4_moe": _Family("Glm4MoeForCausalLM", _WITH_EXPERTS, norm_eps=1e-5, rotated_share=0.5),
    "deepseek_v3": _Family("DeepseekV3ForCausalLM", {**_WITH_EXPERTS, "rope_interleave": True}),
}


# -- tensors ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a model file: the whole of one of ours, or one expert of a stack.

    Attributes:
        name: In the file.
        shape: In the file.
        expert: Index of dim 0 of ours; None: it is the whole.
        rotated: (R, width): of every `width` rows the last R are rotated, and lie in interleaved
            pairs in the file; None: as here.
    """

    name: str
    shape: tuple[int, ...]
    expert: int | None = None
    rotated: tuple[int, int] | None = None

    def from_ours(self, values: Tensor) -> Tensor:
        """Give its values out of those of ours, contiguous; a copy where they are not all of it."""
        if self.expert is not None:
            return values[self.expert].clone()
        if self.rotated is None:
            return values
        return self._reordered(values, (2, -1))

    def to_ours(self, values: Tensor) -> Tensor:
        """Give what it is of ours."""
        if self.rotated is None:
            return values
        return self._reordered(values, (-1, 2))

    def _reordered(self, values: Tensor, order: tuple[int, int]) -> Tensor:
        """Read the rotated rows of every head as a matrix of that shape, and transpose it."""
        assert self.rotated is not None, "only what is rotated is reordered"
        rotated, width = self.rotated
        heads = values.view(-1, width, values.shape[1])
        kept, turned = heads[:, : width - rotated], heads[:, width - rotated :]
        turned = turned.reshape(len(heads), *order, values.shape[1]).transpose(1, 2).flatten(1, 2)
        return torch.cat((kept, turned), dim=1).flatten(0, 1)


def stored_tensors(shape: LlamaShape) -> dict[str, tuple[StoredTensor, ...]]:
    """Give the tensors of a model file by canonical name; a tied head has none."""
    return {name: _stored(name, size, shape) for name, size in parameter_shapes(shape).items()}


def read_ours(tensors: tuple[StoredTensor, ...], read: Callable[[str], Tensor]) -> Tensor:
    """Put one of ours together.

    Args:
        tensors: Of one canonical name, from `stored_tensors`.
        read: Name in the file -> values.
    """
    if tensors[0].expert is None:
        return tensors[0].to_ours(read(tensors[0].name))
    return torch.stack([tensor.to_ours(read(tensor.name)) for tensor in tensors])


def _stored(name: str, size: tuple[int, ...], shape: LlamaShape) -> tuple[StoredTensor, ...]:
    if name in _TOP:
        return (StoredTensor(_TOP[name], size),)
    layers, index, rest = name.split(".", 2)
    prefix = f"model.{layers}.{index}."
    if rest.startswith(_EXPERTS):
        of_expert = rest.removeprefix(_EXPERTS)
        return tuple(
            StoredTensor(f"{prefix}mlp.experts.{expert}.{of_expert}_proj.weight", size[1:], expert)
            for expert in range(size[0])
        )
    latent = shape.latent_attention
    if not latent.kv_rank:
        return (StoredTensor(prefix + _IN_LAYER[rest], size),)
    rotated = {
        "attention.q.weight": (latent.rope_dim, latent.nope_dim + latent.rope_dim),
        "attention.q_up.weight": (latent.rope_dim, latent.nope_dim + latent.rope_dim),
        "attention.kv_down.weight": (latent.rope_dim, latent.kv_rank + latent.rope_dim),
    }
    return (StoredTensor(prefix + _IN_LATENT_LAYER[rest], size, rotated=rotated.get(rest)),)


# -- config.json -----------------------------------------------------------------------------------


def _family_of(shape: LlamaShape) -> str:
    """Find the architecture that is this model.

    Raises:
        ConfigError: If transformers has none, naming what it lacks.
    """
    experts = shape.experts
    if experts.num_experts and (experts.route != "sigmoid" or not experts.num_shared):
        raise ConfigError(
            f'model.experts.route = "{experts.route}", num_shared = {experts.num_shared}: '
            "transformers has no model with a bias of experts but those that route by sigmoid and "
            "have shared experts; others cannot be exported"
        )
    if shape.latent_attention.kv_rank:
        return "deepseek_v3"
    if experts.num_experts:
        return "glm4_moe"
    return "qwen3" if shape.qk_norm else "llama"


def config_json(shape: LlamaShape, *, max_sequence_length: int) -> dict[str, Any]:
    """Give the content of config.json, as `from_pretrained` of transformers wants it.

    The base of the rotary frequencies stands twice, for transformers 5 and for older ones. No
    token id is special: the model knows none.

    Args:
        shape: Sizes of the model; its values are float32.
        max_sequence_length: Longest sequence, in tokens, that the model was made for.

    Raises:
        ConfigError: If transformers has no such model.
    """
    model_type = _family_of(shape)
    family = _FAMILIES[model_type]
    return {
        "architectures": [family.architecture],
        "model_type": model_type,
        "dtype": "float32",
        **{theirs: getattr(shape, ours) for ours, theirs in _SIZES.items()},
        **_own_content(shape, model_type),
        **family.fixed,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": _rope_content(shape),
        "max_position_embeddings": max_sequence_length,
        "tie_word_embeddings": shape.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def _own_content(shape: LlamaShape, model_type: str) -> dict[str, Any]:
    """Give what only some architectures have."""
    content: dict[str, Any] = {}
    if model_type == "deepseek_v3":
        content |= {
            theirs: getattr(shape.latent_attention, ours) for ours, theirs in _LATENT.items()
        }
        content["q_lora_rank"] = shape.latent_attention.q_rank or None
    else:
        content["head_dim"] = shape.head_dim
    if model_type == "glm4_moe":
        content |= {"use_qk_norm": shape.qk_norm, "partial_rotary_factor": 1.0}
    if shape.experts.num_experts:
        content |= {theirs: getattr(shape.experts, ours) for ours, theirs in _OF_EXPERTS.items()}
    elif model_type == "deepseek_v3":  # it has no word for none but that all layers are dense
        content |= dict.fromkeys(_OF_EXPERTS.values(), 1)
        content |= {"first_k_dense_replace": shape.num_layers, "norm_topk_prob": True}
        content["routed_scaling_factor"] = 1.0  # of this type, or it is refused
    return content


def _rope_content(shape: LlamaShape) -> dict[str, Any]:
    scaling = shape.rope_scaling
    content = {"rope_type": "default", "rope_theta": shape.rope_theta}
    if scaling.kind != "none":
        content["rope_type"] = scaling.kind
        content |= {_ROPE[name]: getattr(scaling, name) for name in scaling.used_keys}
    if content.get("attention_factor") == 0:
        del content["attention_factor"]  # theirs follows from the factor, as ours does
    if _family_of(shape) == "glm4_moe":
        content["partial_rotary_factor"] = 1.0
    return content


def read_shape(content: Mapping[str, Any], source: str) -> LlamaShape:
    """Take the sizes of the decoder from the content of a config.json.

    Args:
        content: Parsed JSON, hence any values; what does not change the function is ignored.
        source: Where it was read, for messages.

    Raises:
        ConfigError: If the built-in decoder cannot represent the model; names every reason.
    """
    model_type = str(content.get("model_type"))
    if model_type not in _FAMILIES:
        known = ", ".join(repr(name) for name in _FAMILIES)
        raise ConfigError(
            f"{source}: model_type = {model_type!r}, but only these can be loaded: {known}; choose "
            "a model whose config.json says one of them"
        )
    family, problems = _FAMILIES[model_type], list[str]()
    sizes: dict[str, Any] = {ours: content.get(theirs) for ours, theirs in _SIZES.items()}
    if sizes["num_kv_heads"] is None:
        sizes["num_kv_heads"] = sizes["num_heads"]
    problems += [
        f"{_SIZES[name]} = {value!r} is not a positive integer"
        for name, value in sizes.items()
        if type(value) is not int or value < 1
    ]
    theta, scaling, rope_problems = _read_rope(content, family)
    norm_eps = content.get("rms_norm_eps", family.norm_eps)
    latent = experts = None
    head_dim = 0
    if not problems:
        if model_type == "deepseek_v3":
            latent = _section(LatentAttentionConfig, _LATENT, content, problems)
            if sizes["num_kv_heads"] != sizes["num_heads"]:
                problems.append("num_key_value_heads differs from num_attention_heads")
        else:
            head_dim = _read_head_dim(content, family, problems, **sizes)
        if model_type in ("glm4_moe", "deepseek_v3"):
            experts = _read_experts(content, sizes["num_layers"], problems)
    problems += rope_problems
    problems += [
        f"{key} = {value!r} is not a positive number"
        for key, value in (("rope_theta", theta), ("rms_norm_eps", norm_eps))
        if type(value) not in (int, float) or value <= 0
    ]
    problems += [
        f"{key} = {content[key]!r}, the built-in decoder has {value!r}"
        for key, value in family.fixed.items()
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
        head_dim=head_dim,
        qk_norm=model_type == "qwen3" or bool(content.get("use_qk_norm", False)),
        rope_scaling=scaling,
        experts=experts or ExpertsConfig(),
        latent_attention=latent or LatentAttentionConfig(),
    )


def _section(
    section: type[Any], names: Mapping[str, str], content: Mapping[str, Any], problems: list[str]
) -> Any:
    """Build a section of ours, of any type (hence Any), of what is there; None with a problem."""
    found = {
        ours: content[theirs] for ours, theirs in names.items() if content.get(theirs) is not None
    }
    try:
        return section(**found)
    except ValidationError as error:
        problems += [
            f"{', '.join(names.values())}: {each['msg'].removeprefix('Value error, ')}"
            for each in error.errors()
        ]
        return None


def _read_experts(
    content: Mapping[str, Any], num_layers: int, problems: list[str]
) -> ExpertsConfig | None:
    first = content.get("first_k_dense_replace", 0)
    if type(first) is int and first >= num_layers:
        return None  # every layer is dense
    said = {"norm_topk_prob": True, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1}
    content = {**said, **content}
    if missing := [name for name in _OF_EXPERTS.values() if name not in content]:
        problems.append(f"{', '.join(missing)}: not said")
        return None
    read: ExpertsConfig | None = _section(ExpertsConfig, _OF_EXPERTS, content, problems)
    return read


def _read_rope(
    content: Mapping[str, Any], family: _Family
) -> tuple[Any, RopeScalingConfig, list[str]]:
    """Give the base of the rotary frequencies, unchecked, their scaling, and what is neither."""
    # transformers 4 wrote rope_theta and rope_scaling, 5 writes rope_parameters.
    rope = content.get("rope_parameters") or content.get("rope_scaling") or {}
    theta = rope.get("rope_theta", content.get("rope_theta", _ROPE_THETA))
    kind = rope.get("rope_type", rope.get("type", "default"))
    share = rope.get(
        "partial_rotary_factor", content.get("partial_rotary_factor", family.rotated_share)
    )
    problems: list[str] = []
    scaling = RopeScalingConfig()
    if kind in ("linear", "llama3", "yarn"):
        missing = [] if rope.get("factor") else ["factor: not said"]
        problems += [f"rope_type = {kind!r}: {each}" for each in missing]
        scaling = (
            _section(RopeScalingConfig, {"kind": "kind", **_ROPE}, {**rope, "kind": kind}, problems)
            or RopeScalingConfig()
        )
        problems += [
            f"{key} = {rope[key]!r} of rope_type = {kind!r} is not there"
            for key, plain in (("mscale", None), ("mscale_all_dim", None), ("truncate", True))
            if rope.get(key, plain) != plain
        ]
    elif kind != "default":
        problems.append(f"rope_type = {kind!r}, only default, linear, llama3 and yarn are there")
    if share != 1.0:
        problems.append(f"partial_rotary_factor = {share!r}, the whole head is rotated here")
    return theta, scaling, problems


def _read_head_dim(
    content: Mapping[str, Any],
    family: _Family,
    problems: list[str],
    *,
    dim: int,
    num_heads: int,
    num_kv_heads: int,
    **_: int,
) -> int:
    head_dim = content.get("head_dim") or family.head_dim
    if not head_dim and dim % (2 * num_heads):
        problems.append(f"2 x num_attention_heads = {2 * num_heads} does not divide {dim}")
    elif type(head_dim) is not int or head_dim % 2:
        problems.append(f"head_dim = {head_dim!r} is not a positive even integer")
    if num_heads % num_kv_heads:
        problems.append(
            f"num_key_value_heads = {num_kv_heads} does not divide num_attention_heads = "
            f"{num_heads}"
        )
    return head_dim if type(head_dim) is int else 0
