"""The section of the decoder: its family and dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from diloco.config.classes import Identity, Local, Section
from diloco.config.fields import later, with_preset

_MODEL_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "debug": {"dim": 128, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 416},
    "tiny": {"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 96},
}


class ModelConfig(Section):
    """The decoder; `preset` gives dimensions, explicit keys win."""

    family: Identity[Annotated[Literal["llama", "own"], later("hf")]] = Field(
        default="llama",
        description="Architecture: llama (RoPE, grouped queries, SwiGLU, RMSNorm), or own: that of "
        "a loop with diloco.DiLoCo, which may read the sizes",
    )
    preset: Local[Literal["debug", "tiny", "custom"]] = Field(
        default="custom",
        description="Dimensions of debug (0.9M parameters), tiny (tests), custom (none)",
    )
    vocab_size: Identity[int] = Field(
        default=256, ge=256, description="Tokens; the first 256 are byte values"
    )
    dim: Identity[int] = Field(ge=1, description="Width of the residual stream")
    num_layers: Identity[int] = Field(ge=1, description="Decoder layers")
    num_heads: Identity[int] = Field(ge=1, description="Query heads; dim / num_heads is even")
    num_kv_heads: Identity[int] = Field(ge=1, description="Key and value heads; divides num_heads")
    ffn_dim: Identity[int] = Field(ge=1, description="Hidden width of the SwiGLU")
    max_sequence_length: Identity[int] = Field(
        default=2048, ge=1, description="Longest sequence, tokens"
    )
    rope_theta: Identity[float] = Field(
        default=10000.0, gt=0, description="Base of the rotary frequencies"
    )
    norm_eps: Identity[float] = Field(
        default=1e-5, gt=0, description="Added to the mean square in RMSNorm"
    )
    tie_embeddings: Identity[bool] = Field(
        default=False, description="Output projection is the embedding"
    )

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("family") == "own":
            data = {**_MODEL_PRESETS["tiny"], **data}  # a loop need not say what only it knows
        return with_preset(data, _MODEL_PRESETS)

    @field_validator("num_heads")
    @classmethod
    def _check_heads(cls, value: int, info: ValidationInfo) -> int:
        dim = info.data.get("dim")
        if dim is not None and dim % (2 * value):
            raise ValueError(f"2 x num_heads must divide dim = {dim}")
        return value

    @field_validator("num_kv_heads")
    @classmethod
    def _check_kv_heads(cls, value: int, info: ValidationInfo) -> int:
        num_heads = info.data.get("num_heads")
        if num_heads is not None and num_heads % value:
            raise ValueError(f"must divide num_heads = {num_heads}")
        return value
