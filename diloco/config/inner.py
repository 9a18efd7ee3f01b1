"""The sections of training inside an island."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator

from diloco.config.classes import Needs, Policy, Section
from diloco.config.fields import Beta, Problem, tuples

#: PATTERN=NUMBER, the first that matches counts.
Rules = Annotated[tuple[str, ...], BeforeValidator(tuples)]


class InnerOptimizerConfig(Section):
    """The optimizer of inner steps.

    Muon's momentum is the best of four with eight islands from scratch: 0.8 loses 1.5 % to it after
    30 rounds, 0.95 loses 0.9 %, after 100 0.6 %, and 0.98 another 3 %; data parallel loses as much
    with 0.9 as with 0.95 (`diloco lab suite from-scratch`). MuLoCo (arXiv 2505.23725) has 0.9.
    """

    name: Policy[Literal["adamw", "muon", "muloco"]] = Field(
        default="muon",
        description="Algorithm. muon, with which islands lose least to data parallel from scratch "
        "(diloco lab suite from-scratch): matrices by Nesterov momentum made orthogonal (stacked "
        "experts one by one), as large as AdamW's updates; adamw_by_name and vectors by AdamW; "
        "adamw: also for weights that it has trained; muloco: the same with plain momentum and "
        "updates of M x N matrices scaled by sqrt(M / N), whose rates serve many widths (of width "
        "d, lr there is 5 lr / sqrt(d) of muon's); no run changes it",
    )
    lr: Policy[float] = Field(gt=0, description="Largest learning rate")
    schedule: Policy[Literal["cosine", "constant", "wsd"]] = Field(
        default="cosine",
        description="Learning rate after the warm-up, until inner_steps; wsd: stable, then a decay",
    )
    warmup_steps: Policy[int] = Field(
        default=0, ge=0, description="Inner steps of linear warm-up from 0"
    )
    min_lr_ratio: Policy[float] = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Learning rate at the end of cosine and wsd, as a share of lr",
    )
    decay_ratio: Annotated[Policy[float], Needs("schedule", "wsd")] = Field(
        default=0.2, gt=0, le=1, description="Share of the run, its last, in which wsd decays"
    )
    decay_shape: Annotated[Policy[Literal["linear", "1-sqrt"]], Needs("schedule", "wsd")] = Field(
        default="1-sqrt", description="How wsd decays: 1 - x or 1 - sqrt(x), x from 0 to 1"
    )
    betas: Policy[Annotated[tuple[Beta, Beta], BeforeValidator(tuples)]] = Field(
        default=(0.9, 0.95), description="Decay of the first and second moment, each in [0, 1)"
    )
    weight_decay: Policy[float] = Field(default=0.1, ge=0, description="Decoupled weight decay")
    eps: Policy[float] = Field(
        default=1e-8, gt=0, description="Added to the root of the second moment"
    )
    momentum: Annotated[Policy[float], Needs("name", "muon", "muloco")] = Field(
        default=0.9, ge=0, lt=1, description="Decay of muon's momentum"
    )
    adamw_by_name: Annotated[Policy[Rules], Needs("name", "muon", "muloco")] = Field(
        default=("*embed*", "*head.weight"),
        description="Matrices by name (* and ?) that muon leaves to AdamW, and tables of GPT-2",
    )
    lr_by_name: Policy[Rules] = Field(
        default=(),
        description="Factors of the learning rate: PATTERN=FACTOR (* and ?), the first that "
        'matches a parameter counts, such as ["*embed*=0.5"]',
    )
    weight_decay_by_name: Policy[Rules] = Field(
        default=(),
        description="Weight decays instead of weight_decay, and of none for vectors: "
        "PATTERN=DECAY, the first that matches counts",
    )

    @field_validator("lr_by_name", "weight_decay_by_name")
    @classmethod
    def _check_rules(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for rule in value:
            pattern, _, number = rule.rpartition("=")
            if not pattern or len(rule.split()) != 1 or not _is_number(number):
                raise ValueError(
                    f"{rule!r} must be PATTERN=NUMBER without blanks, the number finite and at "
                    "least 0"
                )
        return value


def wsd_problems(optimizer: InnerOptimizerConfig, inner_steps: int) -> list[Problem]:
    """Say what is wrong with a decay that begins before the warm-up ends."""
    begin = decay_begin(optimizer, inner_steps)
    if optimizer.schedule != "wsd" or optimizer.warmup_steps <= begin:
        return []
    message = (
        f"the decay of decay_ratio = {optimizer.decay_ratio:g} begins after "
        f"{begin:g} of run.inner_steps = {inner_steps}, within the warm-up: at most "
        f"{math.floor(begin)}, or lower decay_ratio"
    )
    return [("warmup_steps", optimizer.warmup_steps, message)]


def decay_begin(optimizer: InnerOptimizerConfig, inner_steps: int) -> float:
    """Give the completed inner steps after which wsd decays."""
    return (1 - optimizer.decay_ratio) * inner_steps


def _is_number(text: str) -> bool:
    try:
        return 0 <= float(text) < math.inf
    except ValueError:
        return False


class InnerConfig(Section):
    """Training inside an island."""

    optimizer: InnerOptimizerConfig = Field(description="The optimizer of inner steps")
    clip_norm: Policy[float] = Field(
        default=1.0,
        gt=0,
        description="Largest gradient norm of an inner step, over the whole island",
    )
    z_loss: Policy[float] = Field(
        default=0.0,
        ge=0,
        description="Coefficient of the mean square of log Z, Z the sum of exp(logits), in what is "
        "minimised, not in what is reported; PaLM: 1e-4",
    )
    expert_bias_speed: Policy[float] = Field(
        default=0.001,
        ge=0,
        description="What an inner step adds to the bias of an expert with less than the mean load",
    )
