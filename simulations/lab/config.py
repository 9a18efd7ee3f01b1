"""The file of a laboratory: a run, and how it is put into one process.

    run = "../runs/demo.toml"           # from where this file is
    set = ["run.inner_steps=200"]
    seeds = [1, 2, 3]
    [step]
    skew = 0.5                          # the slowest island's step takes 1.5 times the first's
    [sweep]
    "outer.inner_steps_per_round" = [12, 24]
    "lab.step.noise" = [0.0, 0.1]

Ranks, meshes, addresses and devices of the run play no part: an island is one rank here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, field_validator, model_validator

from diloco.config.classes import Needs, Range, Section
from diloco.config.fields import (
    Bandwidth,
    Duration,
    IslandName,
    OptionalRate,
    OptionalTime,
    Problem,
    Step,
    several_problems,
    tuples,
)
from diloco.config.links import ProfileName, find_profile
from diloco.config.load import load_section, section_with
from diloco.transport.shaping.link import Link, LinkProfile

#: Prefix of the keys of this file in a sweep; all others are of the run's file.
LAB = "lab."

Texts: TypeAlias = Annotated[tuple[str, ...], BeforeValidator(tuples)]
Seeds: TypeAlias = Annotated[
    tuple[Annotated[int, Field(ge=0, lt=2**63)], ...], BeforeValidator(tuples)
]
#: Whatever a key may be set to, hence `Any`.
Values: TypeAlias = Annotated[tuple[Any, ...], BeforeValidator(tuples)]
#: Above 0, or empty.
OptionalStep: TypeAlias = Annotated[Duration, Range("1us", word="")]


class StepConfig(Section):
    """What an inner step costs in virtual time, whatever it takes to compute."""

    mean: Step = Field(default=Duration("1s"), description="Inner step of the fastest island")
    skew: float = Field(
        default=0.0,
        ge=0,
        le=100,
        description="How much longer the slowest island's takes, as a share of mean; the others "
        "lie evenly between",
    )
    noise: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Every step takes up to this share longer or shorter, uniformly",
    )


class LabLinkConfig(Section):
    """The link of every island to the syncer; empty: that of the run's transport.link, or none."""

    profile: ProfileName = Field(default="", description="Profile of configs/links")
    bandwidth: OptionalRate = Field(
        default=Bandwidth(""),
        description='Each way, instead of a profile, such as "100Mbit/s"; above 0',
    )
    round_trip: OptionalTime = Field(
        default=Duration(""), description='There and back, besides bandwidth, such as "60ms"'
    )

    @property
    def is_given(self) -> bool:
        """Whether it says anything."""
        return bool(self.profile or self.bandwidth)

    def found(self) -> LinkProfile:
        """Give the link that is described.

        Raises:
            ValueError: If there is no such profile.
        """
        if self.profile:
            return find_profile(self.profile)
        one_way = Link(self.bandwidth.bps, self.round_trip.seconds / 2)
        return LinkProfile(f"{self.bandwidth} {self.round_trip}", one_way, one_way, "this file")

    @model_validator(mode="after")
    def _check_one(self) -> LabLinkConfig:
        if self.profile and (self.bandwidth or self.round_trip):
            raise ValueError("give profile, or bandwidth and round_trip, not both")
        if self.round_trip and not self.bandwidth:
            raise ValueError("round_trip needs bandwidth too")
        return self


class FailuresConfig(Section):
    """Who fails when, and what the network loses."""

    mean_time_between: OptionalStep = Field(
        default=Duration(""),
        description="Of an island: mean life between two failures; empty: none",
    )
    mean_repair: Annotated[Step, Needs("mean_time_between")] = Field(
        default=Duration("30s"), description="Mean time until it is started again"
    )
    shape: Annotated[float, Needs("mean_time_between")] = Field(
        default=1.0,
        gt=0,
        le=20,
        description="Of the Weibull distribution of lives; 1: exponential, above: they wear out",
    )
    keeps_optimizer: Annotated[bool, Needs("mean_time_between")] = Field(
        default=False,
        description="Whether the moments of the inner optimizer come back with the island, those "
        "of its last contribution: from a copy in another host's memory",
    )
    syncer_mean_time_between: OptionalStep = Field(
        default=Duration(""),
        description="Of the syncer: mean life between two failures; empty: none",
    )
    syncer_mean_repair: Annotated[Step, Needs("syncer_mean_time_between")] = Field(
        default=Duration("5s"),
        description="Mean time until the syncer serves again, from its records",
    )
    dropped: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of the contributions that do not get through for an outage; flushes do. "
        "With outer.merge on_arrival and a grace below the outage their rounds close without them",
    )
    outage: Annotated[Step, Needs("dropped")] = Field(
        default=Duration("10s"), description="How long such a contribution is held up"
    )


class PruneConfig(Section):
    """What islands leave out of their pseudo-gradients, before codec and error feedback."""

    share: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Of every neuron's row of a pseudo-gradient: this share of its values, rounded "
        "down, is sent as zero, in as many bytes as before",
    )
    by: Annotated[Literal["sign", "size"], Needs("share")] = Field(
        default="sign",
        description="sign: first the values whose sign is not that of their row's sum, then the "
        "others, the smallest of each first; size: the smallest",
    )


class LabDataConfig(Section):
    """Who sees which text."""

    split: Literal["iid", "topics"] = Field(
        default="iid",
        description="iid: every island samples all text; topics: the standard library's sources, "
        "in the order of their paths, are cut into one contiguous part an island, so that packages "
        "stay together",
    )


class LabIslandConfig(Section):
    """What one island has of its own."""

    step: OptionalStep = Field(
        default=Duration(""),
        description="Mean of its inner step; empty: by step.mean and step.skew",
    )
    link: LabLinkConfig = Field(
        default=LabLinkConfig(), description="Its link; empty: the common one"
    )


class LabConfig(Section):
    """A laboratory: one run, or a sweep over several, in virtual time."""

    run: str = Field(min_length=1, description="The run's file, from where this file is")
    set: Texts = Field(default=(), description="Overrides of the run's file, KEY=VALUE")
    seeds: Seeds = Field(default=(), description="run.seed of the points; empty: the run file's")
    method: Literal["diloco", "data_parallel"] = Field(
        default="diloco",
        description="data_parallel: all islands' batches are one, gradients are averaged in "
        "float32 by a ring over the same links at every step",
    )
    num_islands: int = Field(
        default=0,
        ge=0,
        le=64,
        description="Equal islands in place of the run file's; 0: those of the file",
    )
    tokens_per_inner_step: int = Field(
        default=0,
        ge=0,
        description="Of all these islands together; 0: as many as the file's have together",
    )
    warm_steps: int = Field(
        default=0,
        ge=0,
        description="First inner steps, which all islands make together, data parallel; figures "
        "of time and bytes begin after them",
    )
    points: int = Field(
        default=20, ge=1, le=1000, description="Evaluations of the published parameters, evenly"
    )
    threads: int = Field(
        default=2, ge=1, le=256, description="Threads of an operation; figures depend on them"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where all islands compute; auto: cuda where there is one"
    )
    step: StepConfig = Field(default=StepConfig(), description="Time of an inner step")
    link: LabLinkConfig = Field(default=LabLinkConfig(), description="Links of the islands")
    data: LabDataConfig = Field(default=LabDataConfig(), description="Who sees which text")
    failures: FailuresConfig = Field(default=FailuresConfig(), description="Who fails when")
    prune: PruneConfig = Field(default=PruneConfig(), description="What islands leave out")
    islands: dict[IslandName, LabIslandConfig] = Field(
        default={}, description="What single islands have of their own, by name"
    )
    sweep: dict[str, Values] = Field(
        default={},
        description="Dotted key -> values that are tried, each with each; keys of this file begin "
        "with lab.",
    )

    @field_validator("sweep")
    @classmethod
    def _check_sweep(cls, value: dict[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
        barred = ("run", "set", "seeds", "sweep")
        problems: list[Problem] = []
        for key, values in value.items():
            if not values:
                problems.append((key, [], "must name at least one value"))
            top = key.removeprefix(LAB).split(".")[0]
            if key.startswith(LAB) and (top in barred or top not in cls.model_fields):
                known = ", ".join(LAB + name for name in cls.model_fields if name not in barred)
                problems.append((key, list(values), f"no key to sweep; known here: {known}"))
            if key == "run.seed":
                problems.append((key, list(values), "is what seeds says: move it there"))
        if problems:
            raise several_problems(problems)
        return value


@dataclass(frozen=True, slots=True)
class Flags:
    """What the command line says besides a laboratory's file.

    Args:
        overrides: Of keys of that file, KEY=VALUE.
        settings: Of keys of the run's file, after those of `set`.
        sweep: More of `sweep`.
    """

    overrides: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    sweep: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


def load_lab(path: Path | None, flags: Flags) -> LabConfig:
    """Read a laboratory's file, its run's path made one from here; None: the flags say all.

    Raises:
        ConfigError: If it cannot be used: every problem on a line of its own.
    """
    lab = load_section(path, LabConfig, flags.overrides)
    is_flag = any(text.partition("=")[0].strip() == "run" for text in flags.overrides)
    run = lab.run if path is None or is_flag else str(path.parent / lab.run)
    values = lab.model_dump()
    values |= {
        "run": run,
        "set": (*lab.set, *flags.settings),
        "sweep": {**lab.sweep, **flags.sweep},
    }
    return section_with(values, LabConfig, f"cannot use {path or 'what the flags say'}")
