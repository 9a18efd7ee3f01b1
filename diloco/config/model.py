"""The section of the decoder: its family and dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from diloco.config.classes import Identity, Local, Needs, Section
from diloco.config.fields import with_preset
from diloco.config.hugging_face import FAMILY as HUGGING_FACE
from diloco.config.hugging_face import with_sizes

_LLAMA_3 = {
    "vocab_size": 128_256,
    "max_sequence_length": 131_072,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "kind": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_sequence_length": 8192,
    },
}
_WORDS: Mapping[str, Any] = {"vocab_size": 32_000}
_DIMS = ("dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim")
#: 150M and 1B are those of OpenDiLoCo (arXiv 2407.07852), 10M is a small one in their manner. 10M
#: (9.6M) and 150M (149.4M; 215.0M with embedding and head) count what is not embedding or head; 1B,
#: the shape of TinyLlama, counts all: 1.10B. The last three are Llama 3.1 (arXiv 2407.21783).
_MODEL_PRESETS: Mapping[str, Mapping[str, Any]] = {
    name: {**more, **dict(zip(_DIMS, dims, strict=True))}
    for name, more, *dims in (
        ("debug", {}, 128, 4, 4, 2, 416),
        ("tiny", {}, 32, 2, 4, 2, 96),
        ("10M", _WORDS, 256, 12, 4, 4, 704),
        ("150M", _WORDS, 1024, 12, 16, 16, 2688),
        ("1B", _WORDS, 2048, 22, 32, 4, 5632),
        ("llama3-8B", _LLAMA_3, 4096, 32, 32, 8, 14_336),
        ("llama3-70B", _LLAMA_3, 8192, 80, 64, 8, 28_672),
        ("llama3-405B", _LLAMA_3, 16_384, 126, 128, 8, 53_248),
    )
}


class RopeScalingConfig(Section):
    """How rotary frequencies are stretched for sequences longer than those of the first training.

    Source: position interpolation (arXiv 2306.15595), YaRN (arXiv 2309.00071), Llama 3
    (arXiv 2407.21783).
    """

    kind: Identity[Literal["none", "linear", "llama3", "yarn"]] = Field(
        default="none",
        description="none; linear: all frequencies divided by factor; llama3, yarn: the slow ones",
    )
    factor: Annotated[Identity[float], Needs("kind", "linear", "llama3", "yarn")] = Field(
        default=1.0, ge=1, description="Stretch of the slowest"
    )
    original_max_sequence_length: Annotated[Identity[int], Needs("kind", "llama3", "yarn")] = Field(
        default=0, ge=0, description="Tokens of the first training's sequences; llama3, yarn"
    )
    low_freq_factor: Annotated[Identity[float], Needs("kind", "llama3")] = Field(
        default=1.0, gt=0, description="Turns in that length below which all is stretched; llama3"
    )
    high_freq_factor: Annotated[Identity[float], Needs("kind", "llama3")] = Field(
        default=4.0, gt=0, description="Turns in that length above which nothing is; llama3"
    )
    beta_fast: Annotated[Identity[float], Needs("kind", "yarn")] = Field(
        default=32.0, gt=0, description="Turns in that length above which nothing is; yarn"
    )
    beta_slow: Annotated[Identity[float], Needs("kind", "yarn")] = Field(
        default=1.0, gt=0, description="Turns in that length below which all is stretched; yarn"
    )
    attention_factor: Annotated[Identity[float], Needs("kind", "yarn")] = Field(
        default=0.0, ge=0, description="Times cosine and sine; 0: 0.1 ln(factor) + 1; yarn"
    )

    @property
    def used_keys(self) -> tuple[str, ...]:
        """The keys that the kind has a use for."""
        fields = type(self).model_fields.items()
        marks = [(name, mark) for name, field in fields for mark in field.metadata]
        return tuple(n for n, m in marks if isinstance(m, Needs) and m.is_met(self.kind))

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        """Refuse a kind that lacks a key, and bounds that are not one below the other."""
        if self.kind in ("llama3", "yarn") and not self.original_max_sequence_length:
            raise ValueError(f'kind = "{self.kind}" needs original_max_sequence_length')
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            if getattr(self, low) >= getattr(self, high):
                raise ValueError(
                    f"{low} = {getattr(self, low)} must be below {high} = {getattr(self, high)}"
                )
        return self


class LatentAttentionConfig(Section):
    """Multi-head latent attention: keys and values out of one narrow vector a position.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
    """

    kv_rank: Identity[int] = Field(
        default=0, ge=0, description="Width of that vector; 0: grouped-query attention instead"
    )
    q_rank: Annotated[Identity[int], Needs("kv_rank")] = Field(
        default=0, ge=0, description="Width out of which queries are made; 0: out of dim itself"
    )
    rope_dim: Annotated[Identity[int], Needs("kv_rank")] = Field(
        default=0, ge=0, description="Values of a head that are rotated, even"
    )
    nope_dim: Annotated[Identity[int], Needs("kv_rank")] = Field(
        default=0, ge=0, description="Values of a query or key head that are not"
    )
    value_dim: Annotated[Identity[int], Needs("kv_rank")] = Field(
        default=0, ge=0, description="Values of a value head"
    )

    @model_validator(mode="after")
    def _check_dims(self) -> Self:
        if not self.kv_rank:
            return self
        for name in ("rope_dim", "nope_dim", "value_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"kv_rank = {self.kv_rank} needs {name} of at least 1")
        if self.rope_dim % 2:
            raise ValueError(f"rope_dim = {self.rope_dim} must be even, {self.rope_dim + 1} is")
        return self


class ExpertsConfig(Section):
    """Routed and shared experts in place of the feed-forward layers; no token is ever dropped.

    Source: DeepSeekMoE (arXiv 2401.06066), DeepSeek-V3 (arXiv 2412.19437), section 2.1.2.
    """

    num_experts: Identity[int] = Field(
        default=0, ge=0, description="Routed experts of a layer; 0: every layer is dense"
    )
    experts_per_token: Annotated[Identity[int], Needs("num_experts")] = Field(
        default=0, ge=0, description="Routed experts that a token goes through"
    )
    expert_dim: Annotated[Identity[int], Needs("num_experts")] = Field(
        default=0, ge=0, description="Hidden width of one expert's SwiGLU"
    )
    num_shared: Annotated[Identity[int], Needs("num_experts")] = Field(
        default=0,
        ge=0,
        description="Experts that every token goes through, in addition to the routed",
    )
    first_dense_layers: Annotated[Identity[int], Needs("num_experts")] = Field(
        default=0, ge=0, description="Layers before the first one with experts"
    )
    route: Annotated[Identity[Literal["sigmoid", "softmax"]], Needs("num_experts")] = Field(
        default="sigmoid", description="What makes scores of the router's outputs"
    )
    normalise: Annotated[Identity[bool], Needs("num_experts")] = Field(
        default=True, description="Whether the scores of a token's experts are made to sum to 1"
    )
    route_scale: Annotated[Identity[float], Needs("num_experts")] = Field(
        default=1.0, gt=0, description="Times these scores"
    )
    num_groups: Annotated[Identity[int], Needs("num_experts")] = Field(
        default=1, ge=1, description="Groups of neighbouring experts; divides num_experts"
    )
    groups_per_token: Annotated[Identity[int], Needs("num_experts")] = Field(
        default=1, ge=1, description="Groups that a token's experts are chosen from"
    )

    @model_validator(mode="after")
    def _check_numbers(self) -> Self:
        if not self.num_experts:
            return self
        if self.expert_dim < 1:
            raise ValueError(f"num_experts = {self.num_experts} needs expert_dim of at least 1")
        if self.num_experts % self.num_groups:
            raise ValueError(
                f"num_groups = {self.num_groups} does not divide num_experts = {self.num_experts}"
            )
        if self.groups_per_token > self.num_groups:
            raise ValueError(
                f"groups_per_token = {self.groups_per_token} is above num_groups = "
                f"{self.num_groups}"
            )
        most = self.num_experts // self.num_groups * self.groups_per_token
        if not 1 <= self.experts_per_token <= most:
            raise ValueError(
                f"experts_per_token = {self.experts_per_token} is outside [1, {most}]: a token "
                f"chooses among {self.groups_per_token} of {self.num_groups} groups of "
                f"{self.num_experts} experts"
            )
        return self


def _check_defaults(section: Section, used: set[str], why: str) -> None:
    """Refuse explicit values that would do nothing."""
    for name, field in type(section).model_fields.items():
        if name not in used and getattr(section, name) != field.default:
            raise ValueError(f"{name} = {getattr(section, name)} has no meaning with {why}")


def without_tp_plan(experts: ExpertsConfig, latent: LatentAttentionConfig) -> str:
    """Name what of a model tensor parallelism cannot spread; empty if it can all."""
    parts = (
        ("model.experts.num_experts", experts.num_experts),
        ("model.latent_attention.kv_rank", latent.kv_rank),
    )
    return ", ".join(f"{name} = {value}" for name, value in parts if value)


class ModelConfig(Section):
    """The decoder; `preset` gives dimensions, explicit keys win."""

    family: Identity[Literal["llama", "hf", "own"]] = Field(
        default="llama",
        description="Architecture: llama (RoPE, grouped queries, SwiGLU, RMSNorm); hf: a dense "
        "causal model of transformers; own: that of a loop with diloco.DiLoCo, which may read the "
        "sizes",
    )
    name: Local[str] = Field(
        default="",
        description="With family hf: the directory of the model's config.json, or its hub name; "
        "weights come from run.warm_start, or from the seed",
    )
    hf_config: Identity[dict[str, str]] = Field(
        default={},
        description="With family hf: keys of config.json that are to be other than there, or with "
        "model_type all of them; values as JSON",
    )
    transformers: Identity[str] = Field(
        default="",
        description="With family hf: version of transformers, whose defaults and code the model "
        "is; left out: the installed one",
    )
    preset: Local[
        Literal[
            "debug", "tiny", "10M", "150M", "1B", "llama3-8B", "llama3-70B", "llama3-405B", "custom"
        ]
    ] = Field(
        default="custom",
        description="Dimensions of debug (0.9M parameters), tiny (tests), 10M, 150M and 1B (the "
        "last two those of OpenDiLoCo), Llama 3.1, custom (none)",
    )
    vocab_size: Identity[int] = Field(
        default=256, ge=256, description="Tokens; the first 256 are byte values"
    )
    dim: Identity[int] = Field(ge=1, description="Width of the residual stream")
    num_layers: Identity[int] = Field(ge=1, le=10_000, description="Decoder layers")
    latent_attention: LatentAttentionConfig = Field(
        default=LatentAttentionConfig(), description="Multi-head latent attention"
    )
    head_dim: Identity[int] = Field(
        default=0, ge=0, description="Width of a head, even; 0: dim / num_heads"
    )
    num_heads: Identity[int] = Field(ge=1, description="Query heads")
    num_kv_heads: Identity[int] = Field(ge=1, description="Key and value heads; divides num_heads")
    ffn_dim: Identity[int] = Field(ge=1, description="Hidden width of the SwiGLU")
    max_sequence_length: Identity[int] = Field(
        default=2048, ge=1, description="Longest sequence, tokens"
    )
    rope_theta: Identity[float] = Field(
        default=10000.0, gt=0, description="Base of the rotary frequencies"
    )
    rope_scaling: RopeScalingConfig = Field(
        default=RopeScalingConfig(), description="Rotary frequencies of long sequences"
    )
    norm_eps: Identity[float] = Field(
        default=1e-5, gt=0, description="Added to the mean square in RMSNorm"
    )
    qk_norm: Identity[bool] = Field(
        default=False, description="Whether every query and key head goes through an RMSNorm"
    )
    tie_embeddings: Identity[bool] = Field(
        default=False, description="Output projection is the embedding"
    )
    experts: ExpertsConfig = Field(
        default=ExpertsConfig(), description="Experts in place of feed-forward layers"
    )

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("family") == "own":
            data = {**_MODEL_PRESETS["tiny"], **data}  # a loop need not say what only it knows
        if isinstance(data, Mapping) and data.get("family") == HUGGING_FACE:
            return with_sizes(data)
        return with_preset(data, _MODEL_PRESETS)

    @field_validator("head_dim")
    @classmethod
    def _check_head_dim(cls, value: int, info: ValidationInfo) -> int:
        latent = info.data.get("latent_attention")
        if value and latent is not None and latent.kv_rank:
            raise ValueError("has no meaning with latent_attention, which has widths of its own")
        if value % 2:
            raise ValueError(f"must be even (RoPE rotates pairs): {value - 1} or {value + 1}")
        return value

    @field_validator("num_heads")
    @classmethod
    def _check_heads(cls, value: int, info: ValidationInfo) -> int:
        dim, latent = info.data.get("dim"), info.data.get("latent_attention")
        has_width = info.data.get("head_dim") or (latent is not None and latent.kv_rank)
        is_llama = info.data.get("family") == "llama"
        if is_llama and dim is not None and not has_width and dim % (2 * value):
            raise ValueError(f"2 x num_heads must divide dim = {dim}, or give head_dim")
        return value

    @field_validator("num_kv_heads")
    @classmethod
    def _check_kv_heads(cls, value: int, info: ValidationInfo) -> int:
        num_heads, latent = info.data.get("num_heads"), info.data.get("latent_attention")
        if num_heads is not None and num_heads % value:
            raise ValueError(f"must divide num_heads = {num_heads}")
        if latent is not None and latent.kv_rank and num_heads not in (None, value):
            raise ValueError(
                f"must be num_heads = {num_heads} with latent_attention, which shares no heads"
            )
        return value

    @field_validator("rope_scaling")
    @classmethod
    def _check_rope_theta(cls, value: RopeScalingConfig, info: ValidationInfo) -> RopeScalingConfig:
        theta = info.data.get("rope_theta")
        if value.kind == "yarn" and theta is not None and theta <= 1:
            raise ValueError(f'kind = "yarn" needs rope_theta above 1, it is {theta}')
        return value

    @field_validator("qk_norm")
    @classmethod
    def _check_qk_norm(cls, value: bool, info: ValidationInfo) -> bool:
        latent = info.data.get("latent_attention")
        if value and latent is not None and latent.kv_rank:
            raise ValueError("has no meaning with latent_attention, which has norms of its own")
        return value

    @field_validator("experts")
    @classmethod
    def _check_experts(cls, value: ExpertsConfig, info: ValidationInfo) -> ExpertsConfig:
        num_layers, dim = info.data.get("num_layers"), info.data.get("dim")
        for key, width in (("dim", dim), ("experts.expert_dim", value.expert_dim)):
            # Rows of the grouped product begin at multiples of 16 bytes, in bfloat16 too.
            if value.num_experts and width is not None and width % 8:
                raise ValueError(
                    f"{key} = {width} must be a multiple of 8 with experts: "
                    + (f"{width // 8 * 8} or " if width > 8 else "")
                    + f"{width // 8 * 8 + 8}"
                )
        if value.num_experts and num_layers is not None and value.first_dense_layers >= num_layers:
            raise ValueError(
                f"first_dense_layers = {value.first_dense_layers} leaves none of num_layers = "
                f"{num_layers} for experts: use at most {num_layers - 1}"
            )
        return value

    @model_validator(mode="after")
    def _check_family(self) -> Self:
        """Refuse what the family has no use for."""
        if self.family == HUGGING_FACE:
            _check_defaults(self, _OF_HUGGING_FACE, 'family = "hf": config.json says it')
            return self
        for key in ("name", "hf_config", "transformers"):
            if getattr(self, key):
                raise ValueError(f'{key} is of family = "hf", and this is "{self.family}"')
        return self


#: What a model of transformers has: its config.json, and the sizes that are taken from there.
_OF_HUGGING_FACE = {
    "family", "name", "hf_config", "transformers", "vocab_size", "dim", "num_layers", "head_dim",
    "num_heads", "num_kv_heads", "ffn_dim", "max_sequence_length",
}  # fmt: skip
