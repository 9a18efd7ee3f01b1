"""The sections of synchronisation between islands: schedule, codecs, outer step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from diloco.config.classes import Identity, Local, Named, Needs, Policy, Section
from diloco.config.fields import (
    MOST_STEPS,
    AutoPause,
    Beta,
    Deadline,
    Duration,
    Problem,
    several_problems,
    tuples,
    with_preset,
)

Names: TypeAlias = Annotated[tuple[tuple[str, ...], ...], BeforeValidator(tuples)]

#: Codecs of diloco itself; `diloco.compression.registry` has them.
OWN_CODECS = (
    "float32", "float16", "bfloat16", "int8", "int4", "e2m1", "e3m0", "int2", "int4-stochastic",
    "e2m1-stochastic", "e3m0-stochastic", "topk64", "topk128",
)  # fmt: skip
_CODECS = Named("diloco.codecs", OWN_CODECS)
CodecName: TypeAlias = Annotated[str, _CODECS]
_MERGE_RULES = Named("diloco.merge_rules", ("mean", "radial_directional"))
_BY_TENSOR = Needs("merge_rule", "radial_directional", or_added=_MERGE_RULES)

#: Codecs that lose too much of a pseudo-gradient to forget it.
_COARSE = ("int2", "topk64", "topk128")
_SPARSE = ("topk64", "topk128")
#: What sparse codecs bring: error feedback that decays is in the place of the outer momentum.
_OF_SPARSE = {"name": "sgd", "lr": 1.0}
_SPARSE_DECAY = 0.95
#: Outer momentum up to which top-k with error feedback was measured to learn; at 0.9 it diverges.
MOST_SPARSE_MOMENTUM = 0.5

#: Contributions of a round below which none is compared with their median.
FEWEST_OF_A_MEDIAN = 3

_OUTER_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "classic": {"num_fragments": 1},
    "streaming": {
        "overlap_steps": 1,
        "uplink_codec": "int4",
        "downlink_codec": "int4",
    },
    "decoupled": {
        "merge": "on_arrival",
        "min_contributions": 1,
        "grace": "auto",
        "overlap_steps": 2,
        "merge_rule": "radial_directional",
        "uplink_codec": "int4",
        "downlink_codec": "int4",
    },
}


def _check_quorum(value: Any) -> Any:
    """Accept "all" or a number of contributions."""
    if value != "all" and (type(value) is not int or value < 1):
        raise ValueError('must be "all" or a whole number from 1 on')
    return value


Quorum: TypeAlias = Annotated[str | int, BeforeValidator(_check_quorum)]


def _check_local_mix(value: Any) -> Any:
    """Accept a share or "since_send"."""
    if value == "since_send":
        return value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= 1:
        raise ValueError('must be a number >= 0 and <= 1, or "since_send"')
    return float(value)


LocalMix: TypeAlias = Annotated[float | Literal["since_send"], BeforeValidator(_check_local_mix)]


def _check_momentum(value: Any) -> Any:
    """Accept a share below 1, or two: until it falls, and at the end."""
    falls = isinstance(value, list | tuple)
    both = value if falls else (value,)
    are_numbers = all(isinstance(mu, int | float) and not isinstance(mu, bool) for mu in both)
    if len(both) != 1 + falls or not are_numbers or not all(0 <= mu < 1 for mu in both):
        raise ValueError("must be a number >= 0 and < 1, or a list of two")
    return tuple(map(float, both)) if falls else float(value)


Momentum: TypeAlias = Annotated[float | tuple[float, float], BeforeValidator(_check_momentum)]
Patterns: TypeAlias = Annotated[tuple[str, ...], BeforeValidator(tuples)]


class OuterOptimizerConfig(Section):
    """The outer step: SGD on pseudo-gradients, with or without (Nesterov) momentum, or Adam.

    With the defaults eight islands that train from scratch by Muon lose least to data parallel, or
    at most 0.2 % more than with what does, in 30 and in 100 rounds; four lost 1.3 % less with 1.0,
    0.5 and no ramp in 30 (`diloco lab suite from-scratch`, with Muon's momentum at 0.95). Momentum
    pays off late and costs early, so it grows. At the end it costs again: with [0.8, 0.5] eight
    islands lost 0.45 +- 0.37 % less after 100 rounds (three seeds), nothing after 30. That is not
    the default, for only a scheduled run knows its rounds. DiLoCo (arXiv 2311.08105) has 0.7, 0.9
    and no ramp.
    """

    name: Policy[Literal["nesterov", "momentum", "sgd", "adam"]] = Field(
        default="nesterov",
        description="Algorithm of the outer step; no run changes to or from adam",
    )
    lr: Policy[float] = Field(default=0.9, gt=0, description="Outer learning rate")
    momentum: Policy[Momentum] = Field(
        default=0.8,
        description="Outer momentum, >= 0 and < 1, once ramped up; sgd, adam: 0. Two, such as "
        "[0.8, 0.5]: in the last 30 % of the rounds of a scheduled run it falls from the first to "
        "the second",
    )
    momentum_ramp_rounds: Policy[int] = Field(
        default=20,
        ge=0,
        description="Rounds in which momentum grows from 0, of inner_steps_per_round each: as many "
        "more as the first ones are shorter; 0: no ramp; sgd, adam: 0",
    )
    betas: Annotated[Policy[tuple[Beta, Beta]], BeforeValidator(tuples), Needs("name", "adam")] = (
        Field(
            default=(0.9, 0.95),
            description="Decay of adam's first and second moment, each in [0, 1)",
        )
    )
    eps: Annotated[Policy[float], Needs("name", "adam")] = Field(
        default=0.1, gt=0, description="Added to the root of adam's second moment"
    )

    @model_validator(mode="before")
    @classmethod
    def _default_to_no_momentum(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("name") in ("sgd", "adam"):
            data = {"momentum": 0.0, "momentum_ramp_rounds": 0, **data}
        return data

    @field_validator("momentum", "momentum_ramp_rounds")
    @classmethod
    def _refuse_momentum(cls, value: Momentum, info: ValidationInfo) -> Momentum:
        name = info.data.get("name")
        if value and name in ("sgd", "adam"):
            raise ValueError(
                f"{name} has no momentum"
                f"{' (its first beta takes that place)' if name == 'adam' else ''}: "
                'leave it out, or choose name = "nesterov" or "momentum"'
            )
        return value

    @property
    def momenta(self) -> tuple[float, float | None]:
        """The momentum, and what it falls to; None: it does not."""
        return self.momentum if isinstance(self.momentum, tuple) else (self.momentum, None)


def _with_sparse(data: Mapping[str, Any]) -> dict[str, Any]:
    """Give what a sparse uplink needs to what was not said."""
    optimizer = data.get("optimizer", {})
    if isinstance(optimizer, Mapping) and not {"name", "momentum"}.intersection(optimizer):
        optimizer = {**_OF_SPARSE, **optimizer}
    decay = {"error_feedback_decay": _SPARSE_DECAY} if data.get("error_feedback") is True else {}
    return {**decay, **data, "optimizer": optimizer}


class OuterConfig(Section):
    """Synchronisation between islands; `preset` gives defaults, explicit keys win.

    A coarse uplink_codec (int2, topk64, topk128) brings error_feedback = true; a sparse one (topk)
    also error_feedback_decay = 0.95 and optimizer = { name = "sgd", lr = 1.0 }, for with outer
    momentum it diverges. Held-out nats a byte, 131k parameters, M = 2, H = 5, 200 steps, one seed
    (`diloco lab configs/simulations/lab.toml` with lab.num_islands=2, lab.warm_steps=0,
    run.inner_steps=200, outer.inner_steps_per_round=5, swept); lr/momentum, off: without:

        uplink    decay  nesterov .7/.9  nesterov .7/.5  sgd .7  sgd 1.0
        float32   off    2.817           2.426           -       2.264
        int2      off    2.792           -               -       2.292
        int2      1      2.773           2.408           2.313   2.263
        int2      .95    2.801           2.378           2.306   2.280
        int2      .9     2.769           2.406           2.315   2.275
        topk64    off    2.619           -               -       3.132
        topk64    1      3.527           2.486           2.548   2.486
        topk64    .95    3.451           2.442           2.554   2.471
        topk64    .9     3.026           2.447           2.627   2.492
        topk128   off    2.581           -               -       2.764
        topk128   1      3.717           2.461           2.495   2.456
        topk128   .95    3.320           2.418           2.480   2.410
        topk128   .9     3.168           2.406           2.504   2.421
    """

    preset: Local[Literal["classic", "streaming", "decoupled"]] = Field(
        description="Defaults: classic (P=1, tau=0, float32), streaming (P given, tau=1, int4) or "
        "decoupled (merge on_arrival, a quorum of 1 with grace, radial_directional, tau=2, int4)"
    )
    inner_steps_per_round: Identity[int] = Field(
        ge=1, le=MOST_STEPS, description="H: inner steps between sends of a fragment"
    )
    first_inner_steps_per_round: Identity[int] = Field(
        default=0,
        ge=0,
        le=MOST_STEPS,
        description="H of the first round: each is one inner step longer than the one before, up "
        "to inner_steps_per_round; 0: all have that",
    )
    num_fragments: Identity[int] = Field(ge=1, description="P: fragments of the model; classic: 1")
    fragment_pattern: Identity[Literal["balanced", "strided", "sequential", "explicit"]] = Field(
        default="balanced", description="How parameters are dealt to fragments"
    )
    embedding_alone: Identity[bool] = Field(
        default=False, description="Whether the embedding is a fragment of its own, counted in P"
    )
    explicit_fragments: Identity[Names] = Field(
        default=(), description='Parameter names of each fragment, for fragment_pattern "explicit"'
    )
    overlap_steps: Identity[int] = Field(
        default=0,
        ge=0,
        description="tau: inner steps from a send to its merge, 0 <= tau < H, also the first; "
        "streaming: 1",
    )
    local_mix: Identity[LocalMix] = Field(
        default=0.0,
        description="alpha: weight of the local parameters at a merge, 0 to 1; since_send: all of "
        "what was trained since the send is kept, on top of what was published",
    )
    merge: Identity[Literal["scheduled", "on_arrival"]] = Field(
        default="scheduled",
        description="When an island sends and merges: at inner steps known beforehand, a result "
        "exactly tau after its send; or a send when a round opens, a result when it is there, so "
        "that no island waits for another",
    )
    phases: Annotated[
        Identity[tuple[int, ...]], BeforeValidator(tuples), Needs("merge", "scheduled")
    ] = Field(
        default=(),
        description="Inner step of each fragment's first send, 0 to H; empty: evenly spread",
    )
    num_lanes: Identity[int] = Field(
        default=16, ge=1, le=65536, description="Lanes of a fragment, at most"
    )
    optimizer: OuterOptimizerConfig = Field(
        default=OuterOptimizerConfig(), description="The outer step"
    )
    uplink_codec: Policy[CodecName] = Field(
        default="float32", description="Encoding of pseudo-gradients; streaming: int4"
    )
    downlink_codec: Policy[CodecName] = Field(
        default="float32", description="Encoding of published versions; streaming: int4"
    )
    codec_by_name: Annotated[Policy[tuple[str, ...]], BeforeValidator(tuples), _CODECS] = Field(
        default=(),
        description="Codecs of single tensors, both ways: PATTERN=CODEC (* and ?), the first that "
        'matches counts; norms and biases like ["*norm.weight=float32", "*.bias=bfloat16"]',
    )
    error_feedback: Policy[bool] = Field(
        default=False,
        description="Whether a quantisation error joins the next pseudo-gradient; true, "
        "unless given, if int2 or topk is the uplink_codec or in codec_by_name",
    )
    error_feedback_decay: Annotated[Policy[float], Needs("error_feedback")] = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Share of the quantisation error that joins the next pseudo-gradient; topk: "
        "0.95 unless given",
    )
    weighting: Policy[Literal["tokens", "tokens_times_rate"]] = Field(
        default="tokens",
        description="Weight of a contribution: its tokens, or its tokens times tokens a step",
    )
    merge_rule: Annotated[Identity[str], _MERGE_RULES] = Field(
        default="mean",
        description="What contributions become: their weighted mean, or by tensor the mean of "
        "their directions with the mean of their norms, which does not shrink with many islands, "
        "or what the rule of another package makes of them",
    )
    plain_mean: Annotated[Identity[Patterns], _BY_TENSOR] = Field(
        default=("*embed*",),
        description="Tensors by name (* and ?) that every merge_rule leaves to the plain mean",
    )
    experts: Annotated[Identity[Patterns], _BY_TENSOR] = Field(
        default=("*experts*",),
        description="Tensors by name (* and ?), of three or more dims, of which "
        "merge_rule takes each index of dim 0 on its own",
    )
    clip_norm_ratio: Policy[float] = Field(
        default=0.0,
        ge=0,
        description="A contribution whose norm is over this times the median of its round's is "
        "scaled down to it, with three or more; 0: none is",
    )
    guard: Policy[bool] = Field(
        default=True,
        description="Whether a syncer refuses contributions that are not of this training: a "
        "tensor's norm or largest value far beyond what is usual for it, or with three or more a "
        "direction that is not that of the others. Who is refused is counted and told the "
        "numbers",
    )
    min_contributions: Annotated[Policy[Quorum], Needs("merge", "on_arrival")] = Field(
        default="all",
        description="Quorum: contributions that close a round; fewer than all with merge "
        "on_arrival only",
    )
    grace: Annotated[Policy[AutoPause], Needs("merge", "on_arrival")] = Field(
        default=Duration("0s"),
        description="Time from a quorum that is not everybody to the close; auto: grace_share of "
        "what tau inner steps of the slowest member leave, at most grace_cap; decoupled: auto",
    )
    grace_share: Annotated[Policy[float], Needs("grace", "auto")] = Field(
        default=0.5, ge=0, le=1, description="gamma: share of the slack that a grace of auto spends"
    )
    grace_cap: Annotated[Policy[Deadline], Needs("grace", "auto")] = Field(
        default=Duration("10s"), description="Longest grace of auto"
    )
    round_deadline: Policy[Deadline] = Field(
        default=Duration("60s"),
        description="Time after the first complete contribution at which a round without quorum "
        "ends, the longest with merge on_arrival, which measures",
    )
    on_member_lost: Annotated[
        Policy[Literal["stop", "wait", "shrink"]], Needs("merge", "scheduled")
    ] = Field(
        default="stop",
        description="What a scheduled run does when an island stays away for coordinator.lease: "
        "stop with the command to go on, wait for it, or go on without it; with merge on_arrival "
        "nobody waits",
    )
    flush: Policy[bool] = Field(
        default=True, description="Whether the end of the run averages what was not yet sent"
    )
    retained_versions: Policy[int] = Field(
        default=4, ge=1, description="Versions whose records and contributions a syncer keeps"
    )
    snapshot_rounds: Policy[int] = Field(
        default=1,
        ge=1,
        le=1024,
        description="Every how many versions of a fragment a syncer writes all state (12 bytes a "
        "parameter and more); of those between it writes what was contributed and published (with "
        "int4 and M islands about 0.5 (M+1) bytes), and a start recomputes their state",
    )
    keep_contributions: Policy[Literal["retained", "all"]] = Field(
        default="retained",
        description="Whether a syncer keeps what every version of the run was made of, so that all "
        "can be recomputed, or that of retained_versions",
    )

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, data: Any) -> Any:
        data = with_preset(data, _OUTER_PRESETS)
        if isinstance(data, Mapping):
            rules = data.get("codec_by_name", ())
            codecs = [str(data.get("uplink_codec"))]
            if isinstance(rules, list | tuple):
                codecs += [str(rule).rpartition("=")[2] for rule in rules]
            if not set(_COARSE).isdisjoint(codecs):
                data = {"error_feedback": True, **data}
            if not set(_SPARSE).isdisjoint(codecs):
                data = _with_sparse(data)
        return data

    @model_validator(mode="after")
    def _check_kept(self) -> OuterConfig:
        """Refuse a local_mix by which nothing is kept, and what a run on arrival cannot have."""
        problems: list[Problem] = []
        if self.local_mix == "since_send":
            if not (self.overlap_steps or self.is_on_arrival):
                message = "needs an overlap_steps of 1 or more: nothing is trained before the merge"
                problems.append(("local_mix", self.local_mix, message))
            if self.uplink_codec in _COARSE and not self.error_feedback:
                message = "needs error_feedback = true, or what is not sent stays here alone"
                problems.append(("local_mix", self.local_mix, message))
        if self.is_on_arrival and isinstance(self.optimizer.momentum, tuple):
            message = 'falls by rounds, which only merge = "scheduled" counts: give one number'
            problems.append(("optimizer.momentum", self.optimizer.momentum, message))
        if self.is_on_arrival and not self.flush:
            message = 'ends a run of merge = "on_arrival": leave it out'
            problems.append(("flush", self.flush, message))
        if problems:
            raise several_problems(problems)
        return self

    @property
    def sparse_problem(self) -> str:
        """Say why a sparse uplink does not go with the rest, and what to set; empty: it does.

        By what was measured: the table above.
        """
        codecs = {self.uplink_codec, *(rule.rpartition("=")[2] for rule in self.codec_by_name)}
        sparse, optimizer = sorted(codecs.intersection(_SPARSE)), self.optimizer
        if not sparse:
            return ""
        momentum, _ = optimizer.momenta
        if momentum > MOST_SPARSE_MOMENTUM and self.error_feedback:
            return (
                f"outer.uplink_codec = {sparse[0]!r} with outer.optimizer.name = "
                f"{optimizer.name!r}, momentum = {momentum:g}, error feedback: diverges "
                f"(measured: 3.0 to 3.7 nats a byte at 0.9, 2.4 to 2.5 at 0.5 and with sgd): set "
                f'optimizer = {{ name = "sgd", lr = 1.0 }}, or leave outer.optimizer out'
            )
        if not self.error_feedback:
            return (
                f"outer.uplink_codec = {sparse[0]!r} without error feedback learns little "
                f"(measured: 2.6 to 3.1 nats a byte, 2.4 to 2.5 with it): leave "
                f"outer.error_feedback out"
            )
        if optimizer.name == "adam":
            return (
                f"outer.uplink_codec = {sparse[0]!r} with outer adam was never measured: set "
                f'optimizer = {{ name = "sgd", lr = 1.0 }}'
            )
        return ""

    @property
    def is_on_arrival(self) -> bool:
        """Whether islands send and merge as rounds open and close, not at known inner steps."""
        return self.merge == "on_arrival"

    @property
    def quorum(self) -> int | None:
        """Contributions that close a round; None: those of all members."""
        return self.min_contributions if isinstance(self.min_contributions, int) else None

    @property
    def uplink(self) -> str:
        """What contributions are coded by, as `diloco.compression.lanes` names it."""
        return " ".join((self.uplink_codec, *self.codec_by_name))

    @property
    def downlink(self) -> str:
        """The same of published versions."""
        return " ".join((self.downlink_codec, *self.codec_by_name))

    @field_validator("codec_by_name")
    @classmethod
    def _check_codec_by_name(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for rule in value:
            pattern, _, codec = rule.rpartition("=")
            if not pattern or len(rule.split()) != 1:
                raise ValueError(f"{rule!r} must be PATTERN=CODEC without blanks")
            try:
                _CODECS.checked(codec)
            except ValueError as error:
                raise ValueError(f"{rule!r}: codec {codec!r} {error}") from error
        return value

    @field_validator("clip_norm_ratio")
    @classmethod
    def _check_ratio(cls, value: float) -> float:
        if 0 < value < 1:
            raise ValueError("must be at least 1, the median itself, or 0 for none")
        return value

    @field_validator("phases")
    @classmethod
    def _check_phases(cls, value: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        num_fragments = info.data.get("num_fragments")
        if value and num_fragments is not None and len(value) != num_fragments:
            raise ValueError(f"{len(value)} phases, but num_fragments = {num_fragments}")
        steps = info.data.get("inner_steps_per_round")
        if steps is not None and not all(0 <= phase <= steps for phase in value):
            raise ValueError(f"each must be from 0 to inner_steps_per_round = {steps}")
        return value

    @field_validator("overlap_steps")
    @classmethod
    def _check_overlap(cls, value: int, info: ValidationInfo) -> int:
        for key in ("inner_steps_per_round", "first_inner_steps_per_round"):
            if (steps := info.data.get(key)) and value >= steps:
                raise ValueError(f"must be smaller than {key} = {steps}")
        return value

    @field_validator("first_inner_steps_per_round")
    @classmethod
    def _check_first_round(cls, value: int, info: ValidationInfo) -> int:
        steps = info.data.get("inner_steps_per_round")
        if steps is not None and value > steps:
            raise ValueError(f"must be at most inner_steps_per_round = {steps}")
        return value
