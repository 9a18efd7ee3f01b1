"""The sections of training inside an island."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from diloco.config.classes import Policy, Section
from diloco.config.fields import Beta, tuples


class InnerOptimizerConfig(Section):
    """The optimizer of inner steps."""

    name: Policy[Literal["adamw"]] = Field(default="adamw", description="Algorithm")
    lr: Policy[float] = Field(gt=0, description="Largest learning rate")
    schedule: Policy[Literal["cosine", "constant"]] = Field(
        default="cosine", description="Learning rate after the warm-up, until inner_steps"
    )
    warmup_steps: Policy[int] = Field(
        default=0, ge=0, description="Inner steps of linear warm-up from 0"
    )
    min_lr_ratio: Policy[float] = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Learning rate at the end of the cosine, as a share of lr",
    )
    betas: Policy[Annotated[tuple[Beta, Beta], BeforeValidator(tuples)]] = Field(
        default=(0.9, 0.95), description="Decay of the first and second moment, each in [0, 1)"
    )
    weight_decay: Policy[float] = Field(default=0.1, ge=0, description="Decoupled weight decay")
    eps: Policy[float] = Field(
        default=1e-8, gt=0, description="Added to the root of the second moment"
    )


class InnerConfig(Section):
    """Training inside an island."""

    optimizer: InnerOptimizerConfig = Field(description="The optimizer of inner steps")
    clip_norm: Policy[float] = Field(
        default=1.0,
        gt=0,
        description="Largest gradient norm of an inner step, over the whole island",
    )
    expert_bias_speed: Policy[float] = Field(
        default=0.001,
        ge=0,
        description="What an inner step adds to the bias of an expert with less than the mean load",
    )
