"""A way to train on some islands, in figures: what `diloco sim utilization|bandwidth` are asked.

For any model and method, without a run file: nothing of a scenario is trained or synchronised.
Files have one table, [scenario], whose keys are the commands' flags; flags win.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import Field, ValidationInfo, field_validator, model_validator

from diloco.config.classes import Range, Section
from diloco.config.fields import Bandwidth, Duration, Problem, Size, several_problems
from diloco.config.links import ProfileName, find_profile
from diloco.config.load import section_with, values_of
from diloco.transport.shaping.link import Link, LinkProfile

Method: TypeAlias = Literal[
    "data-parallel", "hierarchical", "diloco", "streaming", "overlap", "4-bit", "decoupled"
]
METHODS: tuple[Method, ...] = get_args(Method)
Topology: TypeAlias = Literal["allreduce", "star", "sites"]

#: What a method is, where nothing else is said. Streaming DiLoCo: fragments of three layers.
_LAYERS_PER_FRAGMENT = 3
_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "data-parallel": {"inner_steps_per_round": 1},
    "hierarchical": {"inner_steps_per_round": 1},
    "diloco": {},
    "streaming": {},
    "overlap": {"overlap_steps": 1},
    "4-bit": {"overlap_steps": 1, "bits_up": 4.0},
    "decoupled": {
        "inner_steps_per_round": 24,
        "num_fragments": 24,
        "overlap_steps": 2,
        "bits_up": 4.0,
        "quorum": 1,
        "topology": "star",
        "fragment_pattern": "balanced",
    },
}
#: Which send everything at every step, and which everything at once.
_EVERY_STEP = ("data-parallel", "hierarchical")
_WHOLE = (*_EVERY_STEP, "diloco")


#: Keys that only some scenarios have a use for.
_OF_LINK = ("bandwidth", "bandwidth_down", "rtt", "jitter", "loss")
_OF_RINGS = ("ranks", "inside_bandwidth")
_OF_RELEASE = ("buckets", "release")
_OF_TCP = ("tcp_loss", "tcp_window")
#: Up to 1000 h, where a sum of many still has its digits.
StepTime: TypeAlias = Annotated[Duration, Range("1us", "1000h")]
Delay: TypeAlias = Annotated[Duration, Range("0s", "1000h")]
Line: TypeAlias = Annotated[Bandwidth, Range("1bit/s", "100000Tbit/s")]
OptionalLine: TypeAlias = Annotated[Bandwidth, Range("1bit/s", "100000Tbit/s", "")]
Window: TypeAlias = Annotated[Size, Range("1B", word="")]


class Scenario(Section):
    """Model, method, islands and links; `method` gives defaults, explicit keys win."""

    method: Method = Field(
        default="streaming",
        description="Gradients at every step (data-parallel: one ring; hierarchical: inside, "
        "between, inside, in chunks), diloco, streaming (tau 0), overlap (tau 1), 4-bit (tau 1, "
        "4 bits), decoupled (on arrival, a quorum of 1, H = P = 24, tau 2, 4 bits)",
    )
    params: float = Field(default=1e9, ge=1, le=1e15, description="N, parameters of the model")
    layers: int = Field(default=24, ge=1, le=10_000, description="L, of equal size")
    step_time: StepTime = Field(default=Duration("1s"), description="Of an inner step, undisturbed")
    step_skew: float = Field(
        default=0.0, ge=0, le=100, description="How much longer the slowest island's steps take"
    )
    step_noise: float = Field(
        default=0.0, ge=0, lt=1, description="Standard deviation of a step over its mean"
    )
    islands: int = Field(default=2, ge=2, le=4096, description="M")
    inner_steps_per_round: int = Field(
        default=100, ge=1, le=1_000_000, description="H; of gradients at every step 1"
    )
    num_fragments: int = Field(
        default=0,
        ge=0,
        le=10_000,
        description="P; 0: one for every three layers, one of methods that send everything at once",
    )
    overlap_steps: int = Field(default=0, ge=0, description="tau, smaller than H")
    fragment_pattern: Literal["strided", "sequential", "balanced"] = Field(
        default="strided", description="How layers are dealt to fragments"
    )
    bits_up: float = Field(
        default=16.0, gt=0, le=64, description="Of a parameter of a contribution or gradient"
    )
    bits_down: float = Field(
        default=0.0, ge=0, le=64, description="Of a parameter of what is published; 0: bits_up"
    )
    topology: Topology = Field(
        default="allreduce",
        description="Who merges. allreduce: the islands among themselves (2 (M - 1)/M of the "
        "payload each way); star: one syncer in the middle; sites: one a site, each of its share "
        "of the fragments",
    )
    quorum: int = Field(
        default=0, ge=0, description="K, contributions that close a round, of decoupled; 0: all"
    )
    link: ProfileName = Field(
        default="", description="Profile of configs/links; empty: as said below"
    )
    bandwidth: Line = Field(
        default=Bandwidth("1Gbit/s"), description="Of every island's line, both ways at once"
    )
    bandwidth_down: OptionalLine = Field(
        default=Bandwidth(""), description="Towards the island; empty: as bandwidth"
    )
    rtt: Delay = Field(
        default=Duration("0s"), description="Round trip of the line, to its other end"
    )
    jitter: Delay = Field(
        default=Duration("0s"), description="A transfer arrives up to this much later"
    )
    loss: float = Field(default=0.0, ge=0, lt=1, description="Share of what is sent twice")
    syncer_bandwidth: OptionalLine = Field(
        default=Bandwidth(""),
        description="Of the line at the middle of a star, each way; empty: unlimited",
    )
    tcp_loss: float = Field(
        default=0.0, ge=0, lt=1, description="Packets that TCP loses (Mathis); 0: no such ceiling"
    )
    tcp_window: Window = Field(
        default=Size(""),
        description="Most that a connection has on its way; empty: no such ceiling",
    )
    streams: int = Field(default=1, ge=1, le=1024, description="Connections of a transfer")
    ranks: int = Field(
        default=1, ge=1, le=1_000_000, description="g of an island, in rings of gradients"
    )
    inside_bandwidth: OptionalLine = Field(
        default=Bandwidth(""),
        description="Of a rank inside its island; empty: nothing is waited for inside",
    )
    buckets: int = Field(
        default=0,
        ge=0,
        le=10_000,
        description="Equal pieces in which a payload is released, chunks of hierarchical; 0: one "
        "a layer",
    )
    release: Literal["backward", "step"] = Field(
        default="backward",
        description="When: each as the backward of the sending step has reached it (a third of a "
        "step is forward), as in Streaming DiLoCo's model; or all at the end of that step",
    )

    @model_validator(mode="before")
    @classmethod
    def _lay_method(cls, data: Any) -> Any:  # raw values of a file
        if not isinstance(data, Mapping):
            return data
        method = data.get("method", cls.model_fields["method"].default)
        return {**_PRESETS.get(str(method), {}), **data}

    @field_validator("inner_steps_per_round")
    @classmethod
    def _check_period(cls, value: int, info: ValidationInfo) -> int:
        method = info.data.get("method")
        if method in _EVERY_STEP and value != 1:
            raise ValueError(f"{method} sends at every step: leave it out, or choose diloco")
        return value

    @field_validator("num_fragments")
    @classmethod
    def _check_fragments(cls, value: int, info: ValidationInfo) -> int:
        method = info.data.get("method")
        if method in _WHOLE and value > 1:
            raise ValueError(f"{method} sends everything at once: leave it out, or take streaming")
        return value

    @field_validator("overlap_steps")
    @classmethod
    def _check_overlap(cls, value: int, info: ValidationInfo) -> int:
        period = info.data.get("inner_steps_per_round")
        if period is not None and value >= period:
            raise ValueError(
                f"must be in [0, {period}): a result is merged before its fragment is due again; "
                "lower it or raise inner_steps_per_round"
            )
        return value

    @field_validator("topology")
    @classmethod
    def _check_topology(cls, value: str, info: ValidationInfo) -> str:
        method = info.data.get("method")
        if method in _EVERY_STEP and value != "allreduce":
            raise ValueError(f"{method} has no syncer: leave it out")
        if method == "decoupled" and value != "star":
            raise ValueError("decoupled is simulated with the syncer in the middle: leave it out")
        return value

    @field_validator("quorum")
    @classmethod
    def _check_quorum(cls, value: int, info: ValidationInfo) -> int:
        islands = info.data.get("islands")
        if islands is not None and value > islands:
            raise ValueError(f"must be in [0, {islands}]: there are {islands} islands")
        if value and info.data.get("method") not in ("decoupled", None):
            raise ValueError("only decoupled has it: leave it out, all are waited for")
        return value

    @model_validator(mode="after")
    def _check_used(self) -> Scenario:
        """Refuse what cannot be with the rest, and what was said and would change nothing."""
        has_delay = self.profile.up.delay_s + self.profile.down.delay_s > 0
        cases = (
            (bool(self.link), _OF_LINK, f"link = {self.link} says it"),
            (self.topology != "star", ("syncer_bandwidth",), 'is of topology = "star"'),
            (self.method not in _EVERY_STEP, _OF_RINGS, "is of gradients at every step"),
            (self.method == "decoupled", _OF_RELEASE, "decoupled sends after its steps"),
            (not has_delay, _OF_TCP, "bounds nothing without a round trip (rtt, or a link)"),
            (not self.has_tcp, ("streams",), "counts with tcp_loss or tcp_window only"),
        )
        fields = type(self).model_fields
        problems: list[Problem] = [
            (key, value, f"{why}: leave it out")
            for is_case, keys, why in cases
            for key in keys
            if is_case and (value := getattr(self, key)) != fields[key].default
        ]
        if self.layers > self.params:
            message = f"must be in [1, {self.params:g}]: a layer has at least one of the params"
            problems.append(("layers", self.layers, message))
        elif self.num_fragments > (most := self._most_fragments):
            message = (
                f"must be in [0, {most}]: {self.fragment_pattern} deals so many, at least one each"
            )
            if self.fragment_pattern != "balanced":
                message += "; lower num_fragments, or choose balanced, which cuts layers"
            problems.append(("num_fragments", self.num_fragments, message))
        if problems:
            raise several_problems(problems)
        return self

    @property
    def layer_numel(self) -> int:
        """Parameters of a layer."""
        return round(self.params / self.layers)

    @property
    def _most_fragments(self) -> int:
        """Pieces that there are to deal: layers, or parameters where layers are cut."""
        whole = self.fragment_pattern != "balanced"
        return self.layers if whole else self.layers * self.layer_numel

    @property
    def step_s(self) -> float:
        """T, seconds."""
        return self.step_time.seconds

    @property
    def fragments(self) -> int:
        """P."""
        if self.method in _WHOLE:
            return 1
        return self.num_fragments or max(1, self.layers // _LAYERS_PER_FRAGMENT)

    @property
    def down_bits(self) -> float:
        """Of a parameter of what is published."""
        return self.bits_down or self.bits_up

    @property
    def profile(self) -> LinkProfile:
        """The line of an island."""
        if self.link:
            return find_profile(self.link)
        delay_s, jitter_s = self.rtt.seconds / 2, self.jitter.seconds
        up, down = (
            Link(rate.bps, delay_s, jitter_s, self.loss)
            for rate in (self.bandwidth, self.bandwidth_down or self.bandwidth)
        )
        return LinkProfile("scenario", up, down, "the scenario")

    @property
    def inside_bps(self) -> float:
        """Of a rank inside its island."""
        return self.inside_bandwidth.bps if self.inside_bandwidth else float("inf")

    @property
    def syncer_bps(self) -> float:
        """Of the line at the middle of a star."""
        return self.syncer_bandwidth.bps if self.syncer_bandwidth else float("inf")

    @property
    def has_tcp(self) -> bool:
        """Whether TCP bounds a transfer."""
        return self.tcp_loss > 0 or bool(self.tcp_window)

    @property
    def window_bytes(self) -> float:
        """Most that a connection has on its way."""
        return self.tcp_window.num_bytes if self.tcp_window else float("inf")


class ScenarioFile(Section):
    """The file of a scenario."""

    scenario: Scenario = Field(default=Scenario(), description="What is predicted")


#: Keys that a method has no use for, left out where every method is asked for.
_FOREIGN: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        _EVERY_STEP,
        (
            "inner_steps_per_round",
            "num_fragments",
            "overlap_steps",
            "topology",
            "quorum",
            "syncer_bandwidth",
        ),
    ),
    "diloco": ("num_fragments", "overlap_steps", "quorum", *_OF_RINGS),
    "streaming": ("overlap_steps", "quorum", *_OF_RINGS),
    "overlap": ("quorum", *_OF_RINGS),
    "4-bit": ("bits_up", "bits_down", "quorum", *_OF_RINGS),
    "decoupled": ("topology", *_OF_RINGS, *_OF_RELEASE),
}


def make_scenarios(path: Path | None, flags: Mapping[str, Any]) -> list[Scenario]:
    """Make the scenario of a file, if any, and of flags that win; one a method if none is named.

    Args:
        path: A file with a table [scenario]; None: flags say all.
        flags: Keys and raw values.

    Raises:
        ConfigError: If the file cannot be read, or there are problems: one a line, by dotted path.
    """
    raw = values_of(path, ScenarioFile) if path else {}
    given = raw.get("scenario", {})
    if isinstance(given, dict):
        given = {**given, **flags}
    attempt = f"cannot predict {path}" if path else "cannot predict this scenario"
    if not isinstance(given, dict) or "method" in given:
        return [section_with({**raw, "scenario": given}, ScenarioFile, attempt).scenario]
    made = []
    for method in METHODS:
        own = {key: value for key, value in given.items() if key not in _FOREIGN[method]}
        whole = {**raw, "scenario": {"method": method, **own}}
        made.append(section_with(whole, ScenarioFile, attempt).scenario)
    return made


def at_bandwidth(profile: LinkProfile, bandwidth_bps: float) -> LinkProfile:
    """Give a line of another rate, both ways."""
    return replace(
        profile,
        up=replace(profile.up, bandwidth_bps=bandwidth_bps),
        down=replace(profile.down, bandwidth_bps=bandwidth_bps),
    )
