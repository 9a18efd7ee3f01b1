"""The file of an emulated network: who is where, and what joins them.

A link is named: one of the file's own `[links.NAME]`, or a profile of configs/links. "up" is away
from the island (in a mesh: from the first to the second of `between`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from diloco.config.classes import Section
from diloco.config.fields import (
    Bandwidth,
    Duration,
    IslandName,
    Name,
    OptionalRate,
    OptionalSize,
    OptionalTime,
    Problem,
    Size,
    Time,
    several_problems,
    tuples,
)
from diloco.config.links import LinkConfig, find_profile
from diloco.config.load import load_section
from diloco.errors import ConfigError
from diloco.transport.shaping.link import Link, LinkProfile

#: The node in the middle of a star and of two tiers; it has the coordinator unless told otherwise.
CORE = "core"


class SiteConfig(Section):
    """An island's place in the network."""

    link: str = Field(
        default="",
        description="Name of the link that joins it to the core, or to its region's router; empty "
        "in a mesh",
    )
    region: str = Field(default="", description="Its region; two-tier only")


class RegionConfig(Section):
    """A router that islands of a region share."""

    link: str = Field(min_length=1, description="Name of the link that joins it to the core")


class PathConfig(Section):
    """A pair of islands in a mesh whose link is not the common one."""

    between: Annotated[tuple[IslandName, IslandName], BeforeValidator(tuples)] = Field(
        description="The two islands; up is from the first to the second"
    )
    link: str = Field(min_length=1, description="Name of the link that joins them")


class TcpConfig(Section):
    """TCP of every island and of the coordinator; empty: as the kernel has it."""

    congestion_control: str = Field(
        default="", description='Algorithm of every route, such as "cubic" or "bbr"'
    )
    max_buffer: OptionalSize = Field(
        default=Size(""),
        description='Largest send and receive buffer of a connection, such as "64MiB"',
    )
    slow_start_after_idle: bool = Field(
        default=True, description="Whether a connection begins slowly again after a pause"
    )


class ChangeConfig(Section):
    """What happens to a link while the command runs; what is left out stays as it is."""

    at: Time = Field(description="Time since the command was started")
    lasts: OptionalTime = Field(
        default=Duration(""), description="For how long; empty: until the end"
    )
    link: str = Field(
        min_length=1, description="The island or region whose link it is; in a mesh A/B"
    )
    direction: Literal["both", "up", "down"] = Field(default="both", description="Which way")
    outage: bool = Field(default=False, description="Whether every packet is lost")
    bandwidth: OptionalRate = Field(default=Bandwidth(""), description="Another rate")
    delay: OptionalTime = Field(default=Duration(""), description="Another delay one way")
    jitter: OptionalTime = Field(default=Duration(""), description="Another jitter")
    loss: float = Field(default=-1.0, ge=-1, lt=1, description="Another loss; -1: as it is")

    @property
    def until_s(self) -> float:
        """Seconds from the start of the command to the end of the change; infinite: none."""
        return self.at.seconds + self.lasts.seconds if self.lasts else float("inf")

    def applied_to(self, link: Link) -> Link:
        """Give the link as it is while the change lasts."""
        if self.bandwidth:
            link = replace(link, bandwidth_bps=self.bandwidth.bps)
        if self.delay:
            link = replace(link, delay_s=self.delay.seconds)
        if self.jitter:
            link = replace(link, jitter_s=self.jitter.seconds)
        return replace(link, loss=self.loss) if self.loss >= 0 else link


class WanConfig(Section):
    """A whole emulated network."""

    topology: Literal["star", "mesh", "two-tier"] = Field(
        description="star: a link from every island to the core; mesh: one between every two "
        "islands; two-tier: islands to their region's router, that to the core"
    )
    seed: int = Field(default=1, ge=0, lt=2**32, description="Of jitter and loss")
    coordinator_at: str = Field(
        default=CORE,
        min_length=1,
        description="Where coordinator and syncer run: core, or at an island (in a mesh: that)",
    )
    delay_by: Literal["auto", "netem", "relay"] = Field(
        default="auto",
        description="What holds packets back: the kernel's netem, our relay, or netem if this "
        "kernel has it",
    )
    queue: OptionalTime = Field(
        default=Duration(""),
        description="Longest wait in front of a full link; empty: the longest round trip, at "
        "least 10ms",
    )
    link: str = Field(default="", description="Mesh: name of the link of every pair not in paths")
    tcp: TcpConfig = Field(default=TcpConfig(), description="TCP of every island")
    links: dict[Name, LinkConfig] = Field(default={}, description="Links of this file")
    islands: dict[IslandName, SiteConfig] = Field(min_length=1, description="Islands by name")
    regions: dict[IslandName, RegionConfig] = Field(
        default={}, description="Regions by name; two-tier only"
    )
    paths: dict[IslandName, PathConfig] = Field(
        default={}, description="Pairs of a mesh with a link of their own, by any name"
    )
    changes: dict[IslandName, ChangeConfig] = Field(
        default={}, description="What happens to links while the command runs, by any name"
    )

    @model_validator(mode="after")
    def _check_topology(self) -> WanConfig:
        problems = list(_problems(self))
        if problems:
            raise several_problems(problems)
        return self

    @field_validator("islands", "regions")
    @classmethod
    def _check_names(cls, value: dict[str, Any]) -> dict[str, Any]:
        problems = [
            (name, name, "is the name of the node in the middle") for name in value if name == CORE
        ]
        if problems:
            raise several_problems(problems)
        return value


def _problems(config: WanConfig) -> Iterator[Problem]:
    """What the fields owe to each other."""
    is_mesh, is_tiered = config.topology == "mesh", config.topology == "two-tier"
    nodes = {*config.islands} if is_mesh else {*config.islands, CORE}
    if config.coordinator_at not in nodes:
        yield "coordinator_at", config.coordinator_at, f"must be one of {', '.join(sorted(nodes))}"
    for name, site in config.islands.items():
        path = f"islands.{name}"
        if is_mesh and site.link:
            yield f"{path}.link", site.link, "in a mesh pairs have links: use link and paths"
        if not is_mesh and not site.link:
            yield f"{path}.link", site.link, f"must be given in topology {config.topology}"
        if is_tiered and site.region not in config.regions:
            known = ", ".join(config.regions) or "none is given: add [regions.NAME]"
            yield f"{path}.region", site.region, f"must be a region of this file: {known}"
        if not is_tiered and site.region:
            yield f"{path}.region", site.region, 'has a meaning in topology "two-tier" only'
    if config.regions and not is_tiered:
        shown = sorted(config.regions)
        yield "regions", shown, 'has a meaning in topology "two-tier" only'
    for name in config.regions.keys() & config.islands.keys():
        yield f"regions.{name}", name, "is an island's name, too"
    wires = _wire_names(config)
    for name, change in config.changes.items():
        if change.link not in wires:
            yield f"changes.{name}.link", change.link, f"must be one of {', '.join(wires)}"
    if not is_mesh:
        if config.link:
            yield "link", config.link, 'has a meaning in topology "mesh" only'
        if config.paths:
            yield "paths", [*config.paths], 'has a meaning in topology "mesh" only'
        return
    yield from _mesh_problems(config)


def _wire_names(config: WanConfig) -> list[str]:
    """Names of all links in use, as changes name them."""
    if config.topology != "mesh":
        return sorted({*config.islands, *config.regions})
    own = {frozenset(path.between): path.between for path in config.paths.values()}
    pairs = itertools.combinations(sorted(config.islands), 2)
    return ["/".join(own.get(frozenset(pair), pair)) for pair in pairs]


def _mesh_problems(config: WanConfig) -> Iterator[Problem]:
    given: set[frozenset[str]] = set()
    for name, path in config.paths.items():
        pair = frozenset(path.between)
        if len(pair) != 2 or not pair <= config.islands.keys() or pair in given:
            names = ", ".join(config.islands)
            message = f"must be two islands, each pair once; islands: {names}"
            yield f"paths.{name}.between", [*path.between], message
        given.add(pair)
    missing = [
        f"{a}/{b}"
        for a, b in itertools.combinations(sorted(config.islands), 2)
        if frozenset((a, b)) not in given
    ]
    if missing and not config.link:
        yield "link", config.link, f"must be given: no paths for {', '.join(missing)}"


@dataclass(frozen=True, slots=True)
class Wan:
    """A loaded file: the configuration, and every link it names."""

    path: Path
    config: WanConfig
    profiles: dict[str, LinkProfile]


def load_wan(path: Path) -> Wan:
    """Read a file, check everything, and look up the profiles it names.

    Raises:
        ConfigError: If it cannot be used: every problem on a line of its own.
    """
    config = load_section(path, WanConfig)
    profiles = {name: link.profile(name) for name, link in config.links.items()}
    problems = []
    for key, name in _named_links(config):
        try:
            profiles.setdefault(name, profiles.get(name) or find_profile(name))
        except ConfigError as error:
            own = ", ".join(config.links) or "none"
            problems.append(f"{key}: {error}; links of this file: {own}")
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError("\n  ".join([f"cannot load {path}: {count}", *problems]))
    return Wan(path, config, profiles)


def _named_links(config: WanConfig) -> Iterator[tuple[str, str]]:
    """Every place that names a link, and the name."""
    if config.link:
        yield "link", config.link
    for name, site in config.islands.items():
        if site.link:
            yield f"islands.{name}.link", site.link
    for name, region in config.regions.items():
        yield f"regions.{name}.link", region.link
    for name, path in config.paths.items():
        yield f"paths.{name}.link", path.link
