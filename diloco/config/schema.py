"""The run file's schema: one frozen model a component, every field described and classified.

Descriptions are what `diloco config --explain` prints and what a refused value is answered with.
Cross-field rules sit in the smallest model that sees all fields, as validators of the later field,
so that one wrong field hides no other. What only the parameters can tell (names, number of
tensors) is checked when the plan is made. Raw tables before validation are `Any`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from diloco.config.classes import Identity, Local, Policy, Section
from diloco.config.data import DataConfig
from diloco.config.fields import (
    Chunk,
    Deadline,
    IslandName,
    Memory,
    Name,
    Problem,
    Rate,
    Wait,
    later,
    several_problems,
    tuples,
    with_preset,
)
from diloco.errors import ConfigError
from transport.addresses import is_loopback, split_address
from transport.framing import MAX_HEADER_BYTES
from transport.hivemind_address import is_peer_address, parse_peer_address
from transport.units import parse_bandwidth, parse_bytes, parse_duration

Beta: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
Names: TypeAlias = Annotated[tuple[tuple[str, ...], ...], BeforeValidator(tuples)]
CodecName: TypeAlias = Literal[
    "float32",
    "float16",
    "bfloat16",
    "int8",
    "int4",
    "e2m1",
    "e3m0",
    "int2",
    "int4-stochastic",
    "e2m1-stochastic",
    "e3m0-stochastic",
    "topk64",
    "topk128",
]
#: Codecs that lose too much of a pseudo-gradient to forget it.
_COARSE = ("int2", "topk64", "topk128")

#: More than any run makes, and less than what integers on the wire hold.
_MOST_STEPS = 10**9

#: Islands of one all-reduce: every one talks with every other.
MAX_PEERS = 16

_NOT_LOOPBACK = (
    "is not on this machine's loopback, and there are no certificates: make them (diloco certs "
    "init RUN.toml) and set transport.certs, or set transport.insecure = true on a network that "
    "you trust"
)
_UNKNOWN_CALLERS = (
    "is not on this machine's loopback, and hivemind encrypts but knows no callers: make tokens "
    "(diloco certs token) and set transport.tokens, or set transport.insecure = true on a network "
    "that you trust"
)
_NO_TOKEN = "is not on this machine's loopback: set metrics_token to a file with a token"
_MODEL_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "debug": {"dim": 128, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 416},
    "tiny": {"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 96},
}
_OUTER_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "classic": {"num_fragments": 1},
    "streaming": {
        "overlap_steps": 1,
        "uplink_codec": "int4",
        "downlink_codec": "int4",
        "optimizer": {"momentum_ramp_rounds": 5},
    },
}


class RunConfig(Section):
    """What the run is called, how it starts and how long it lasts."""

    name: Identity[Name] = Field(description="Name of the run; an island of another run is refused")
    seed: Identity[int] = Field(ge=0, lt=2**63, description="Seed of initial parameters and data")
    inner_steps: Policy[int] = Field(
        ge=1, le=_MOST_STEPS, description="Inner steps of every island; ends the schedule"
    )
    warm_start: Local[str] = Field(
        default="",
        description="Start from these weights: a directory (export, Hugging Face model, state_dir "
        "of a run, checkpoint) or a hub name; empty: from the seed",
    )


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
    micro_batches: Local[int] = Field(
        default=1, ge=1, description="Parts in which a rank computes its batch of one inner step"
    )


class OuterOptimizerConfig(Section):
    """The outer step: SGD on pseudo-gradients, with or without (Nesterov) momentum."""

    name: Policy[Literal["nesterov", "momentum", "sgd"]] = Field(
        default="nesterov", description="Algorithm of the outer step"
    )
    lr: Policy[float] = Field(default=0.7, gt=0, description="Outer learning rate")
    momentum: Policy[float] = Field(
        default=0.9, ge=0, lt=1, description="Outer momentum, once ramped up; sgd: 0"
    )
    momentum_ramp_rounds: Policy[int] = Field(
        default=0,
        ge=0,
        description="Rounds in which momentum grows from 0; 0: no ramp, streaming: 5",
    )

    @model_validator(mode="before")
    @classmethod
    def _default_to_no_momentum(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("name") == "sgd":
            data = {"momentum": 0.0, **data}
        return data

    @field_validator("momentum")
    @classmethod
    def _check_momentum(cls, value: float, info: ValidationInfo) -> float:
        if value and info.data.get("name") == "sgd":
            raise ValueError(
                'sgd has none: leave it out, or choose name = "nesterov" or "momentum"'
            )
        return value


class OuterConfig(Section):
    """Synchronisation between islands; `preset` gives defaults, explicit keys win."""

    preset: Local[Annotated[Literal["classic", "streaming"], later("decoupled")]] = Field(
        description="Defaults: classic (P=1, tau=0, float32) or streaming (P given, tau=1, int4)"
    )
    inner_steps_per_round: Identity[int] = Field(
        ge=1, le=_MOST_STEPS, description="H: inner steps between sends of a fragment"
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
    phases: Identity[Annotated[tuple[int, ...], BeforeValidator(tuples)]] = Field(
        default=(),
        description="Inner step of each fragment's first send, 0 to H; empty: evenly spread",
    )
    overlap_steps: Identity[int] = Field(
        default=0,
        ge=0,
        description="tau: inner steps from a send to its merge, 0 <= tau < H; streaming: 1",
    )
    local_mix: Identity[float] = Field(
        default=0.0, ge=0, le=1, description="alpha: weight of the local parameters at a merge"
    )
    merge: Identity[Annotated[Literal["scheduled"], later("on_arrival")]] = Field(
        default="scheduled",
        description="When a result is merged: exactly tau inner steps after the send",
    )
    num_lanes: Identity[int] = Field(
        default=16, ge=1, le=65536, description="Lanes of a fragment, at most"
    )
    exchange: Identity[Literal["syncer", "allreduce"]] = Field(
        default="syncer",
        description="Who merges: a syncer, or the islands among themselves (reduce-scatter and "
        "all-gather; each holds all outer state, the coordinator's journal decides)",
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
    codec_by_name: Policy[Annotated[tuple[str, ...], BeforeValidator(tuples)]] = Field(
        default=(),
        description="Codecs of single tensors, both ways: PATTERN=CODEC (* and ?), the first that "
        'matches counts; norms and biases like ["*norm.weight=float32", "*.bias=bfloat16"]',
    )
    error_feedback: Policy[bool] = Field(
        default=False,
        description="Whether a quantisation error joins the next pseudo-gradient; true, "
        "unless given, if int2 or topk is the uplink_codec or in codec_by_name",
    )
    weighting: Policy[Annotated[Literal["tokens"], later("tokens_times_rate")]] = Field(
        default="tokens", description="Weight of a contribution"
    )
    min_contributions: Policy[Annotated[Literal["all"], later(int)]] = Field(
        default="all", description="Quorum: contributions that close a round"
    )
    round_deadline: Policy[Deadline] = Field(
        default="60s",
        description="Time after the first complete contribution at which a round without quorum "
        "ends; in an all-reduce also the time from the close to the commit",
    )
    on_member_lost: Policy[Annotated[Literal["stop"], later("wait", "shrink")]] = Field(
        default="stop", description="What happens when an island stays away: all islands stop"
    )
    flush: Policy[bool] = Field(
        default=True, description="Whether the end of the run averages what was not yet sent"
    )
    retained_versions: Policy[int] = Field(
        default=4, ge=1, description="Versions whose records and contributions a syncer keeps"
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
        return data

    @property
    def round_deadline_s(self) -> float:
        """Seconds after which a round without quorum expires."""
        return parse_duration(self.round_deadline)

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
            if not pattern or len(rule.split()) != 1 or codec not in get_args(CodecName):
                raise ValueError(
                    f"{rule!r} must be PATTERN=CODEC without blanks, the codec one of "
                    f"{', '.join(get_args(CodecName))}"
                )
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
        steps = info.data.get("inner_steps_per_round")
        if steps is not None and value >= steps:
            raise ValueError(f"must be smaller than inner_steps_per_round = {steps}")
        return value


class RetryConfig(Section):
    """Waiting between attempts of one call; the budget is `transport.unreachable`."""

    first_wait: Local[Wait] = Field(default="100ms", description="Wait after the first failure")
    max_wait: Local[Wait] = Field(default="1s", description="Longest wait between two attempts")

    @field_validator("max_wait")
    @classmethod
    def _check_max_wait(cls, value: str, info: ValidationInfo) -> str:
        first = info.data.get("first_wait")
        if first is not None and parse_duration(value) < parse_duration(first):
            raise ValueError(f"must not be shorter than first_wait = {first}")
        return value

    @property
    def first_wait_s(self) -> float:
        """Wait after the first failure, in seconds."""
        return parse_duration(self.first_wait)

    @property
    def max_wait_s(self) -> float:
        """Longest wait between two attempts, in seconds."""
        return parse_duration(self.max_wait)


class HivemindConfig(Section):
    """The peer-to-peer network, where `transport.kind` is hivemind."""

    initial_peers: Local[Annotated[tuple[str, ...], BeforeValidator(tuples)]] = Field(
        default=(),
        description="Multiaddrs (/ip4/.../tcp/.../p2p/IDENTITY) of peers through which others are "
        "found, and which relay; the coordinator is always one",
    )
    relayed: Local[bool] = Field(
        default=False,
        description="Whether coordinator and syncer have initial_peers relay calls to them: behind "
        "NAT, where nobody can dial them; a relayed connection is cut after 128 KiB or two "
        "minutes, so only a syncer that can be dialled gets contributions",
    )
    map_port: Local[bool] = Field(
        default=False,
        description="Whether coordinator and syncer ask their router to forward their ports "
        "(UPnP, NAT-PMP)",
    )

    @field_validator("initial_peers")
    @classmethod
    def _check_peers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for peer in value:
            if not parse_peer_address(peer).ways:
                raise ValueError(f"{peer} does not say where the first peers are: /ip4/.../p2p/...")
        return value

    @field_validator("relayed")
    @classmethod
    def _check_relayed(cls, value: bool, info: ValidationInfo) -> bool:
        if value and not info.data.get("initial_peers", True):
            raise ValueError("somebody must relay: set transport.hivemind.initial_peers")
        return value


class TransportConfig(Section):
    """How bytes travel."""

    kind: Local[Literal["grpc", "hivemind"]] = Field(
        default="grpc", description="Wire between islands, coordinator and syncer"
    )
    hivemind: HivemindConfig = Field(
        default=HivemindConfig(), description="The peer-to-peer network of kind hivemind"
    )
    certs: Local[str] = Field(
        default="",
        description="Directory of this site's certificates (diloco certs); empty: none, which "
        "loopback needs not",
    )
    tokens: Local[str] = Field(
        default="",
        description="Directory of this site's tokens (diloco certs token); empty: none are asked "
        "for or sent",
    )
    insecure: Local[bool] = Field(
        default=False,
        description="Whether unencrypted traffic beyond this machine is accepted; it is warned of",
    )
    link: Local[Annotated[str, Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]*)?$")]] = Field(
        default="",
        description="Profile of configs/links that shapes the traffic; empty: the real link",
    )
    chunk: Local[Chunk] = Field(
        default="1MiB", description="Piece of a payload in one message, at most"
    )
    rate: Local[Rate] = Field(
        default="",
        description="Bandwidth that payloads may take together, headers of all kinds included: an "
        "island's, divided evenly among its carriers, or the syncer's; some per cent below the "
        "link's, it keeps queues short and heartbeats quick; empty: what TCP takes",
    )
    snapshot_rate: Local[Rate] = Field(
        default="",
        description="The same for whole models, which at all times let payloads of rounds go "
        "first; empty: what those leave",
    )
    channels: Local[int | Literal["auto"]] = Field(
        default="auto",
        description="Connections that carry payloads to a peer; auto: 1 to 16, by the loss that "
        "the kernel counts on them",
    )
    rpc_timeout: Local[Deadline] = Field(
        default="60s",
        description="Deadline of one call, besides its payload's time at 1 Mbit/s; a call that "
        "breaks goes on where it was",
    )
    unreachable: Local[Deadline] = Field(
        default="600s",
        description="Time without coordinator and syncer after which an island stops",
    )
    retry: RetryConfig = Field(
        default=RetryConfig(), description="Waiting between attempts of one call"
    )

    @field_validator("insecure")
    @classmethod
    def _check_insecure(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("certs"):
            raise ValueError("transport.certs is set, so traffic is encrypted: leave one of them")
        return value

    @field_validator("channels", mode="before")
    @classmethod
    def _check_channels(cls, value: object, info: ValidationInfo) -> object:
        if value != "auto" and not (type(value) is int and 1 <= value <= 64):
            raise ValueError('must be "auto" or a whole number from 1 to 64')
        if info.data.get("kind") == "hivemind" and value not in ("auto", 1):
            raise ValueError("hivemind has one connection to a peer: leave it out")
        return value

    @property
    def num_channels(self) -> int:
        """Connections for payloads; 0: chosen by the loss."""
        return 0 if self.channels == "auto" else self.channels

    @property
    def rate_bps(self) -> float:
        """Bits per second that payloads may take; 0: no limit."""
        return parse_bandwidth(self.rate) if self.rate else 0.0

    @property
    def snapshot_rate_bps(self) -> float:
        """Bits per second that whole models may take; 0: no limit of their own."""
        return parse_bandwidth(self.snapshot_rate) if self.snapshot_rate else 0.0

    @property
    def chunk_bytes(self) -> int:
        """Size of a chunk in bytes."""
        return parse_bytes(self.chunk)

    @property
    def rpc_timeout_s(self) -> float:
        """Deadline of one call, in seconds."""
        return parse_duration(self.rpc_timeout)

    @property
    def unreachable_s(self) -> float:
        """Seconds without coordinator and syncer after which an island stops."""
        return parse_duration(self.unreachable)


class CoordinatorConfig(Section):
    """Where coordinator and syncer listen, and what they keep."""

    listen: Local[str] = Field(
        default="127.0.0.1:0",
        description="HOST:PORT of the coordinator; port 0: any free one, then kept",
    )
    syncer_listen: Local[str] = Field(
        default="127.0.0.1:0", description="HOST:PORT of the syncer it starts; port 0: any free one"
    )
    address: Local[str] = Field(
        default="",
        description="HOST:PORT at which islands reach the coordinator, or several, separated by "
        "commas, that they try in order, or its multiaddr (hivemind); empty: from state_dir",
    )
    syncer_address: Local[str] = Field(
        default="",
        description="HOST:PORT at which islands reach the syncer, or several; empty: the hosts of "
        "address, if any, and the port it listens on; port 0: that port",
    )
    state_dir: Local[str] = Field(
        min_length=1, description="Directory of journal, records and logs; survives restarts"
    )
    spool_memory: Local[Memory] = Field(
        default="1GiB",
        description="Contributions that a syncer keeps in memory until their rounds close, beyond "
        "it on disk; as much again may be arriving",
    )

    @property
    def spool_bytes(self) -> int:
        """Contributions in a syncer's memory, in bytes."""
        return parse_bytes(self.spool_memory)

    @field_validator("listen", "syncer_listen", "address", "syncer_address")
    @classmethod
    def _check_address(cls, value: str, info: ValidationInfo) -> str:
        is_bind = info.field_name in ("listen", "syncer_listen")
        if not is_bind and is_peer_address(value):
            parse_peer_address(value)
            return value
        for address in [value] if is_bind else value.split(",") if value else []:
            _host_of(address.strip())
        return value


class CheckpointConfig(Section):
    """Run checkpoints: what a run is resumed from, and what an island returns with."""

    every_inner_steps: Policy[int] = Field(
        default=0,
        ge=0,
        description="Inner steps between run checkpoints; 0: only at a graceful stop",
    )
    keep: Policy[int] = Field(
        default=2, ge=1, description="Complete checkpoints that are kept; older ones are removed"
    )
    dir: Local[str] = Field(
        default="",
        description="Directory of this site's checkpoints, seen by all ranks of its island; empty: "
        "checkpoints in coordinator.state_dir",
    )


class EvaluationConfig(Section):
    """Held-out loss."""

    every_inner_steps: Policy[int] = Field(
        default=0, ge=0, description="Inner steps between evaluations; 0: only at the end"
    )
    num_sequences: Policy[int] = Field(
        default=256, ge=1, description="Held-out sequences of an evaluation"
    )
    max_nats_per_byte: Local[float] = Field(
        default=0.0,
        ge=0,
        description="`diloco local` fails unless the published parameters end below this held-out "
        "loss; 0: whatever it is",
    )


class WandbConfig(Section):
    """Weights & Biases: one run an island, the islands of a run in one group."""

    mode: Local[Literal["disabled", "offline", "online"]] = Field(
        default="disabled",
        description="Whether metrics go there: offline writes files below telemetry.dir for a "
        "later `wandb sync`",
    )
    project: Local[str] = Field(
        default="", description="Project; empty: WANDB_PROJECT, or wandb's own default"
    )
    entity: Local[str] = Field(
        default="", description="User or team; empty: WANDB_ENTITY, or wandb's own default"
    )


class TelemetryConfig(Section):
    """Where events and metrics go; events are always written as lines of JSON."""

    dir: Local[str] = Field(
        default="",
        description="Directory of events and logs; empty: telemetry in coordinator.state_dir",
    )
    tensorboard: Local[bool] = Field(
        default=False, description="Whether metrics go to telemetry.dir/tensorboard, too"
    )
    wandb: WandbConfig = Field(
        default=WandbConfig(), description="Weights & Biases: one run an island"
    )
    coordinator_metrics: Local[str] = Field(
        default="",
        description="HOST:PORT at which the coordinator serves /metrics to Prometheus; empty: "
        "nowhere",
    )
    syncer_metrics: Local[str] = Field(
        default="",
        description="HOST:PORT at which the syncer serves /metrics to Prometheus; empty: nowhere",
    )
    metrics_token: Local[str] = Field(
        default="",
        description="File with the bearer token that /metrics asks for; empty: none, which only "
        "loopback allows",
    )

    @field_validator("coordinator_metrics", "syncer_metrics")
    @classmethod
    def _check_address(cls, value: str) -> str:
        if value:
            _host_of(value)
        return value


class MeshConfig(Section):
    """Parallelism inside an island; an axis of 1 is absent."""

    dp_shard: Local[int] = Field(default=1, ge=1, description="Ranks that share parameters (FSDP2)")
    tp: Local[int] = Field(
        default=1, ge=1, description="Ranks that share matrices (tensor parallelism)"
    )


class IslandConfig(Section):
    """One island; its neighbours need to know only its name."""

    ranks: Local[int] = Field(ge=1, description="Processes of the island")
    mesh: MeshConfig = Field(default=MeshConfig(), description="Axes whose product is ranks")
    tokens_per_inner_step: Local[int] = Field(
        ge=1, description="Batch of the island: a multiple of sequence_length x dp_shard"
    )
    threads: Local[int] = Field(
        default=1, ge=1, description="Threads of each rank, fixed for the run"
    )
    max_restarts: Local[int] = Field(
        default=3,
        ge=0,
        description="Times in a row that a supervisor starts failed ranks again; training on for "
        "restart_reset gives them back",
    )
    restart_wait: Local[Wait] = Field(
        default="1s", description="Wait before the first restart; it doubles with each, up to 60s"
    )
    restart_reset: Local[Deadline] = Field(
        default="10min", description="Time without a failure after which all restarts are back"
    )
    peer_listen: Local[str] = Field(
        default="127.0.0.1:0",
        description="HOST:PORT at which the island's leader serves the other islands, where "
        "outer.exchange is allreduce; port 0: any free one, then kept",
    )
    peer_address: Local[str] = Field(
        default="",
        description="HOST:PORT at which the other islands reach it, or several; empty: what it "
        "listens on",
    )

    @property
    def restart_wait_s(self) -> float:
        """Seconds before the first restart."""
        return parse_duration(self.restart_wait)

    @property
    def restart_reset_s(self) -> float:
        """Seconds without a failure after which all restarts are back."""
        return parse_duration(self.restart_reset)

    @field_validator("peer_listen", "peer_address")
    @classmethod
    def _check_peer(cls, value: str, info: ValidationInfo) -> str:
        if is_peer_address(value):
            parse_peer_address(value)
        elif value or info.field_name == "peer_listen":
            for address in value.split(","):
                _host_of(address.strip())
        return value

    @field_validator("mesh")
    @classmethod
    def _check_mesh(cls, value: MeshConfig, info: ValidationInfo) -> MeshConfig:
        ranks = info.data.get("ranks")
        if ranks is not None and value.dp_shard * value.tp != ranks:
            raise ValueError(f"the product of its axes must equal ranks = {ranks}")
        if value.dp_shard > 1 and value.tp > 1:
            raise ValueError("dp_shard and tp above 1 in one island comes later")
        return value


class Config(Section):
    """A whole run file, and the island that this process belongs to, if any."""

    island_id: Local[str] = Field(
        default="",
        description="Island of this process; empty: none (coordinator, syncer, planning)",
    )
    run: RunConfig = Field(description="What the run is called and how long it lasts")
    model: ModelConfig = Field(description="The decoder")
    data: DataConfig = Field(description="Where text comes from")
    inner: InnerConfig = Field(description="Training inside an island")
    outer: OuterConfig = Field(description="Synchronisation between islands")
    transport: TransportConfig = Field(default=TransportConfig(), description="How bytes travel")
    coordinator: CoordinatorConfig = Field(description="Where coordinator and syncer listen")
    checkpoint: CheckpointConfig = Field(
        default=CheckpointConfig(), description="What a run is resumed from"
    )
    evaluation: EvaluationConfig = Field(default=EvaluationConfig(), description="Held-out loss")
    telemetry: TelemetryConfig = Field(
        default=TelemetryConfig(), description="Where events and metrics go"
    )
    islands: Identity[dict[IslandName, IslandConfig]] = Field(
        min_length=1, description="Islands by name; the sorted names must agree everywhere"
    )

    @property
    def island(self) -> IslandConfig:
        """The selected island.

        Raises:
            ConfigError: If no island was selected.
        """
        if not self.island_id:
            choices = " or ".join(sorted(self.islands))
            raise ConfigError(f"no island is selected; choose --island {choices}")
        return self.islands[self.island_id]

    @property
    def telemetry_dir(self) -> Path:
        """Directory of events and logs."""
        chosen = self.telemetry.dir
        return Path(chosen) if chosen else Path(self.coordinator.state_dir) / "telemetry"

    @property
    def checkpoint_dir(self) -> Path:
        """Directory of this site's checkpoints, one below it an island."""
        chosen = self.checkpoint.dir
        return Path(chosen) if chosen else Path(self.coordinator.state_dir) / "checkpoints"

    @field_validator("data")
    @classmethod
    def _check_sequence_length(cls, value: DataConfig, info: ValidationInfo) -> DataConfig:
        model = info.data.get("model")
        if model is not None and value.sequence_length > model.max_sequence_length:
            message = f"must be at most model.max_sequence_length = {model.max_sequence_length}"
            raise several_problems([("sequence_length", value.sequence_length, message)])
        return value

    @field_validator("coordinator")
    @classmethod
    def _check_binds(cls, value: CoordinatorConfig, info: ValidationInfo) -> CoordinatorConfig:
        names = ("listen", "syncer_listen")
        transport = info.data.get("transport")
        if transport is not None and transport.kind == "hivemind":
            is_open = not (transport.tokens or transport.insecure)
            beyond = _beyond_loopback(value, names) if is_open else []
            problems = [(name, getattr(value, name), _UNKNOWN_CALLERS) for name in beyond]
        else:
            problems = _unprotected(value, names, info)
        outer = info.data.get("outer")
        has_syncer = outer is None or outer.exchange == "syncer"
        if not problems and has_syncer and _beyond_loopback(value, names) == ["listen"]:
            message = (
                f"only this machine reaches it, but islands elsewhere reach the coordinator at "
                f"listen = {value.listen} and would be sent here; give it a host like listen's"
            )
            problems = [("syncer_listen", value.syncer_listen, message)]
        problems += _of_a_syncer(value, ("syncer_listen", "syncer_address", "spool_memory"), info)
        if problems:
            raise several_problems(problems)
        return value

    @field_validator("telemetry")
    @classmethod
    def _check_metrics(cls, value: TelemetryConfig, info: ValidationInfo) -> TelemetryConfig:
        names = ("coordinator_metrics", "syncer_metrics")
        problems = _unprotected(value, names, info)
        if not value.metrics_token:
            problems += [(n, getattr(value, n), _NO_TOKEN) for n in _beyond_loopback(value, names)]
        problems += _of_a_syncer(value, ("syncer_metrics",), info)
        if problems:
            raise several_problems(problems)
        return value

    @field_validator("islands")
    @classmethod
    def _check_islands(
        cls, value: dict[str, IslandConfig], info: ValidationInfo
    ) -> dict[str, IslandConfig]:
        problems = [
            (f"{name}.{path}", shown, message)
            for name, island in value.items()
            for path, shown, message in _island_problems(island, info.data)
        ]
        outer = info.data.get("outer")
        if outer is not None and outer.exchange == "allreduce" and len(value) > MAX_PEERS:
            raise ValueError(
                f'{len(value)} islands, and outer.exchange = "allreduce" is for {MAX_PEERS} at '
                f'most: take exchange = "syncer"'
            )
        if outer is not None and outer.exchange == "allreduce":
            size = announced_bytes(outer.num_fragments, outer.num_lanes, value)
            if size > MAX_HEADER_BYTES:
                raise ValueError(
                    f"{len(value)} islands with {outer.num_fragments} fragments of "
                    f"{outer.num_lanes} lanes: in an all-reduce the coordinator announces "
                    f"{size} bytes at once, {MAX_HEADER_BYTES} are allowed: lower outer.num_lanes"
                )
        if problems:
            raise several_problems(problems)
        return value

    @model_validator(mode="after")
    def _check_island_id(self) -> Config:
        if self.island_id and self.island_id not in self.islands:
            message = f"is not an island of this file; islands: {', '.join(sorted(self.islands))}"
            raise several_problems([("island_id", self.island_id, message)])
        return self


def announced_bytes(num_fragments: int, num_lanes: int, islands: Collection[str]) -> int:
    """Bound what the decider of an all-reduce says at once, in bytes.

    Either every fragment closes with a contribution of every island (a poll's reply: 34 bytes a
    lane's digest), or one commit record is asked for (JSON: 68 bytes a digest).
    """
    names = sum(map(len, islands))
    num_digests = num_lanes * len(islands)
    closing = 160 + 3 * names + 80 * len(islands) + 34 * num_digests
    known = 500 + 2 * names + 200 * len(islands)
    record = 500 + names + 200 * len(islands) + 68 * (num_digests + num_lanes)
    return max(num_fragments * closing + known, record)


def _beyond_loopback(section: Section, names: Sequence[str]) -> list[str]:
    """Give those fields of a section whose HOST:PORT other machines reach."""
    addresses = {name: getattr(section, name) for name in names}
    return [n for n, address in addresses.items() if address and not is_loopback(_host_of(address))]


def _unprotected(section: Section, names: Sequence[str], info: ValidationInfo) -> list[Problem]:
    """Name the addresses that need certificates, or the word that the network is trusted."""
    transport = info.data.get("transport")
    if transport is None or transport.certs or transport.insecure:
        return []
    beyond = _beyond_loopback(section, names)
    return [(name, getattr(section, name), _NOT_LOOPBACK) for name in beyond]


def _of_a_syncer(section: Section, names: Sequence[str], info: ValidationInfo) -> list[Problem]:
    """Name what is set for a syncer in a run that has none."""
    outer = info.data.get("outer")
    if outer is None or outer.exchange == "syncer":
        return []
    defaults = {name: type(section).model_fields[name].default for name in names}
    message = 'is of a syncer, and with outer.exchange = "allreduce" there is none: leave it out'
    return [
        (name, getattr(section, name), message)
        for name in names
        if getattr(section, name) != defaults[name]
    ]


def _host_of(address: str) -> str:
    """Give the host of HOST:PORT."""
    try:
        host, _ = split_address(address)
    except ValueError:
        raise ValueError('must be HOST:PORT, such as "127.0.0.1:0", port 0 to 65535') from None
    return host


def _peer_problems(
    island: IslandConfig, outer: OuterConfig, transport: TransportConfig
) -> Iterator[Problem]:
    """Check where other islands reach this one."""
    if outer.exchange == "syncer":
        fields = type(island).model_fields
        for name in ("peer_listen", "peer_address"):
            if (value := getattr(island, name)) != fields[name].default:
                yield name, value, 'is of outer.exchange = "allreduce": with a syncer, leave it out'
    elif _beyond_loopback(island, ("peer_listen",)) and not transport.insecure:
        if transport.kind == "hivemind" and not transport.tokens:
            yield "peer_listen", island.peer_listen, _UNKNOWN_CALLERS
        elif transport.kind == "grpc" and not transport.certs:
            yield "peer_listen", island.peer_listen, _NOT_LOOPBACK


def _island_problems(island: IslandConfig, data: Mapping[str, Any]) -> Iterator[Problem]:
    """Check what an island's batch, mesh and addresses owe to the sections that were valid."""
    if "outer" in data and "transport" in data:
        yield from _peer_problems(island, data["outer"], data["transport"])
    tokens, mesh = island.tokens_per_inner_step, island.mesh
    if "data" in data:
        length = data["data"].sequence_length
        unit = length * mesh.dp_shard * (data["inner"].micro_batches if "inner" in data else 1)
        if tokens % unit:
            yield (
                "tokens_per_inner_step",
                tokens,
                f"must be a multiple of sequence_length x dp_shard x micro_batches = {unit}",
            )
        if length % mesh.tp:
            yield "mesh.tp", mesh.tp, f"must divide data.sequence_length = {length}"
    if "model" in data:
        for name in ("num_heads", "num_kv_heads", "ffn_dim"):
            if (size := getattr(data["model"], name)) % mesh.tp:
                yield "mesh.tp", mesh.tp, f"must divide model.{name} = {size}"
