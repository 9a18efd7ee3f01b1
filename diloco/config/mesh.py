"""The section of an island's mesh: how its ranks share the model and the text, and what fits.

Every refusal says the numbers and the nearest setting that fits. Imports no torch: whatever numbers
can tell is said before any process starts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from diloco.config.classes import Local, Section
from diloco.config.fields import Problem
from diloco.config.hugging_face import FAMILY as HUGGING_FACE
from diloco.config.model import without_tp_plan
from diloco.config.pipeline import DEFAULT_SCHEDULE, Schedule, stages_problem

#: Axes whose product is the number of ranks, outermost first: neighbours along tp are next to each
#: other, so on one host. `ep` is no axis of its own: it regroups the ranks of dp_shard x cp.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


class MeshConfig(Section):
    """Parallelism inside an island; an axis of 1 is absent."""

    pp: Local[int] = Field(default=1, ge=1, description="Stages that layers are divided into")
    dp_replicate: Local[int] = Field(
        default=1, ge=1, description="Copies of the model, each with sequences of its own"
    )
    dp_shard: Local[int] = Field(
        default=1, ge=1, description="Ranks that share parameters, with sequences of their own"
    )
    cp: Local[int] = Field(
        default=1, ge=1, description="Ranks that share the positions of a sequence"
    )
    tp: Local[int] = Field(
        default=1, ge=1, description="Ranks that share matrices (tensor parallelism)"
    )
    ep: Local[int] = Field(
        default=1, ge=1, description="Ranks that share experts, among those of dp_shard x cp"
    )
    schedule: Local[Schedule] = Field(
        default=DEFAULT_SCHEDULE, description="Order in which micro-batches pass the stages of pp"
    )
    stages_per_rank: Local[int] = Field(
        default=1, ge=1, description="Stages of each rank of pp: 2 for zbv and dualpipev"
    )
    fsdp_unit: Local[Literal["auto", "block", "model"]] = Field(
        default="auto",
        description="What dp_shard and dp_replicate gather and reduce at once: a block, the whole "
        "model, or a block where it is large (2^22 parameters) and the rest together",
    )
    reshard: Local[Literal["auto", "always", "never"]] = Field(
        default="auto",
        description="When dp_shard gives gathered parameters back: always after a forward "
        "(ZeRO-3), never before the inner step's last backward (ZeRO-2), or auto: what is used "
        "next anyhow is kept",
    )
    context: Local[Literal["ring", "all-gather", "ulysses"]] = Field(
        default="ring",
        description="How the ranks of cp attend to each other's positions: keys and values go "
        "around, or are gathered at once, or heads are dealt instead of positions (ulysses)",
    )
    loss_parallel: Local[bool] = Field(
        default=False, description="Whether tp computes the loss with each rank's share of logits"
    )
    async_tp: Local[bool] = Field(
        default=False,
        description="Whether tp hides its collectives under matrix products, of compiled blocks "
        "over symmetric memory of CUDA devices of one host",
    )

    @property
    def num_ranks(self) -> int:
        """Number of ranks: the product of the axes."""
        return math.prod(self.sizes.values())

    @property
    def sizes(self) -> dict[str, int]:
        """Size of every axis of `AXES`."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def dp_size(self) -> int:
        """Number of ranks that take different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def loss_size(self) -> int:
        """Number of ranks that take different tokens: sequences, or positions of them."""
        return self.dp_size * self.cp

    @property
    def shape_text(self) -> str:
        """The axes above 1, for people: "dp_shard 2, tp 4"; empty for one rank."""
        sizes = {**self.sizes, "ep": self.ep}
        return ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)

    @field_validator("ep")
    @classmethod
    def _check_experts(cls, value: int, info: ValidationInfo) -> int:
        shared = info.data.get("dp_shard", 1) * info.data.get("cp", 1)
        if shared % value:
            raise ValueError(f"must divide dp_shard x cp = {shared}; {nearest(value, shared)}")
        return value

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        """Refuse options that would do nothing, and axes that do not go together."""
        if problem := stages_problem(self.schedule, self.pp, self.stages_per_rank):
            raise ValueError(problem)
        if self.pp > 1 and self.reshard != "auto":
            raise ValueError(
                f'reshard = "{self.reshard}" is not for pp = {self.pp}: stages keep parameters '
                "gathered while micro-batches pass them; leave it out"
            )
        if self.reshard != "auto" and self.dp_shard * self.cp == 1:
            raise ValueError(
                f'reshard = "{self.reshard}" is for parameters spread over dp_shard or cp, and '
                "dp_shard x cp = 1: leave it out"
            )
        if self.fsdp_unit != "auto" and self.dp_size * self.cp == 1:
            raise ValueError(
                f'fsdp_unit = "{self.fsdp_unit}" is for data parallelism, and dp_replicate x '
                "dp_shard x cp = 1: leave it out"
            )
        if self.context != "ring" and self.cp == 1:
            raise ValueError(f'context = "{self.context}" is for cp above 1: leave it out')
        if self.loss_parallel and self.tp == 1:
            raise ValueError("loss_parallel = true is for tp above 1, and tp = 1: leave it out")
        return self


def nearest(value: int, *sizes: int) -> str:
    """Say which numbers next to `value` divide every one of `sizes`: "set it to 2 or 4"."""
    common = math.gcd(*sizes)
    divisors = [n for n in range(1, common + 1) if common % n == 0]
    below = [n for n in divisors if n < value][-1:]
    above = [n for n in divisors if n > value][:1]
    return f"set it to {' or '.join(map(str, below + above))}"


def nearest_multiple(value: int, unit: int) -> str:
    """Say which multiples of `unit` are next to `value`: "set it to 64 or 128"."""
    below = value - value % unit
    return f"set it to {' or '.join(str(n) for n in (below, below + unit) if n)}"


def ranks_problem(mesh: MeshConfig, ranks: int) -> str | None:
    """Say why the mesh is not one of so many ranks, and what would be; None if it is."""
    if (product := mesh.num_ranks) == ranks:
        return None
    used = [axis for axis, size in mesh.sizes.items() if size > 1] or ["dp_shard"]
    fitting = [
        f"{axis} = {ranks // others}"
        for axis in used
        if ranks % (others := product // getattr(mesh, axis)) == 0
    ]
    shown = " x ".join(f"{axis} {getattr(mesh, axis)}" for axis in used)
    choices = " or ".join([*fitting, f"ranks = {product}"])
    return (
        f"the product of its axes must equal ranks = {ranks}, and {shown} = {product}: set "
        f"{choices}"
    )


def mesh_problems(mesh: MeshConfig, data: Mapping[str, Any]) -> Iterator[Problem]:
    """Check what an island's mesh owes to the sections of model and data that were valid."""
    if "model" in data and data["model"].family == HUGGING_FACE:
        yield from transformers_problems(mesh)
        return  # what tp must divide, the model's own plan says
    sizes: dict[str, int] = {}
    if "data" in data:
        sizes["data.sequence_length"] = data["data"].sequence_length
    if "model" in data and mesh.tp > 1:
        model = data["model"]
        if planless := without_tp_plan(model.experts, model.latent_attention):
            yield "mesh.tp", mesh.tp, f"has no plan for {planless}; set it to 1 and use dp_shard"
            return
    if "model" in data and data["model"].family == "llama":
        names = ("num_heads", "num_kv_heads", "ffn_dim", "vocab_size")
        sizes |= {f"model.{name}": getattr(data["model"], name) for name in names}
    undivided = {name: size for name, size in sizes.items() if size % mesh.tp}
    if undivided:
        shown = ", ".join(f"{name} = {size}" for name, size in undivided.items())
        yield "mesh.tp", mesh.tp, f"must divide {shown}; {nearest(mesh.tp, *sizes.values())}"
    if "model" in data and mesh.ep > 1:
        yield from _experts_problems(mesh, data["model"].experts.num_experts)
    yield from _context_problems(mesh, data)


def transformers_problems(mesh: MeshConfig) -> Iterator[Problem]:
    """Name the axes that a model of transformers cannot be spread over."""
    for axis in ("pp", "cp", "ep"):
        if (size := getattr(mesh, axis)) > 1:
            remedy = "set it to 1, and dp_shard or tp higher"
            yield f"mesh.{axis}", size, f'is not for model.family = "hf": {remedy}'


def _experts_problems(mesh: MeshConfig, num_experts: int) -> Iterator[Problem]:
    """Check what the ranks of ep must divide."""
    if not num_experts:
        yield (
            "mesh.ep",
            mesh.ep,
            "spreads experts, and model.experts.num_experts = 0 (none): set it to 1",
        )
    elif num_experts % mesh.ep:
        nearby = nearest(mesh.ep, num_experts, mesh.dp_shard * mesh.cp)
        yield "mesh.ep", mesh.ep, f"must divide model.experts.num_experts = {num_experts}; {nearby}"


def _context_problems(mesh: MeshConfig, data: Mapping[str, Any]) -> Iterator[Problem]:
    """Check what the ranks of cp must divide."""
    if mesh.cp == 1:
        return
    if "data" in data and (problem := positions_problem(mesh, data["data"].sequence_length)):
        yield "mesh.cp", mesh.cp, problem
    if "model" in data and data["model"].family == "llama":
        model = data["model"]
        is_latent = model.latent_attention.kv_rank > 0
        num_kv_heads = model.num_heads if is_latent else model.num_kv_heads
        if problem := heads_problem(mesh, num_kv_heads, is_latent=is_latent):
            yield "mesh.context", mesh.context, problem


def positions_problem(mesh: MeshConfig, sequence_length: int) -> str | None:
    """Say why the ranks of cp cannot share a sequence; None if they can."""
    unit = math.lcm(2 * mesh.cp, mesh.cp * mesh.tp)
    if sequence_length % unit == 0:
        return None
    return (
        f"data.sequence_length = {sequence_length} must be a multiple of {unit}, so that each of "
        f"cp = {mesh.cp} ranks has two equal chunks, in tp = {mesh.tp} parts: "
        f"{nearest_multiple(sequence_length, unit)}"
    )


def heads_problem(mesh: MeshConfig, num_kv_heads: int, *, is_latent: bool) -> str | None:
    """Say why the model's heads do not allow this way of attending; None if they do.

    Args:
        mesh: With cp above 1.
        num_kv_heads: Key and value heads.
        is_latent: Whether values have another width than keys.
    """
    if is_latent and mesh.context != "ulysses":
        return 'takes keys and values of one width, and latent attention has two: set "ulysses"'
    here = num_kv_heads // mesh.tp
    if mesh.context == "ulysses" and here % mesh.cp:
        return (
            f"deals {here} key and value heads (of each rank of tp) to cp = {mesh.cp} ranks: cp "
            f'must divide them; {nearest(mesh.cp, here)}, or context = "ring"'
        )
    return None
