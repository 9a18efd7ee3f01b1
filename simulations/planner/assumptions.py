"""What a plan takes for granted of machines and links, and where each figure comes from.

Seconds of an inner step, in this order: told, measured on this machine, or estimated:

    operations of a rank / (peak of its device * the share that is reached)

with dense peaks of the makers' data sheets (`diloco.trainer.flops`) and 40 % of them (INTELLECT-1,
arXiv 2412.01152, reached 36 to 41 %); of a CPU 20 Gflop/s a thread, which one core of a server
reaches in this trainer's float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from diloco.config.links import find_profile
from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.forecast.build import link_profile
from diloco.forecast.rank_memory import RankForecast
from diloco.simulations.engine.network import Tcp
from diloco.simulations.runs.costs import MEASURED, HostCosts
from diloco.trainer.flops import PEAK_FLOPS
from diloco.transport.shaping.link import Link, LinkProfile
from diloco.transport.units import (
    format_bandwidth,
    format_duration,
    parse_bandwidth,
    parse_bytes,
    parse_duration,
)

_T = TypeVar("_T")

CPU_FLOPS = 20e9
#: Stands for the threads of a rank without an accelerator.
CPU = "cpu"
REACHED = 0.4


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Inputs of a prediction; durations in seconds.

    Attributes:
        step_s: Of an undisturbed inner step of every island.
        links: Of every island; None: the figures of the real links are not known.
        costs: What hosts take besides inner steps.
        tcp: Ceilings of a connection; None: a transfer fills its share of a link.
        syncer_link: Line of the site where syncers are, which islands share; None: no bottleneck.
        syncer_threads: With which each syncer merges the lanes of a fragment side by side.
        inside_bps: Of a rank inside its island, for the all-reduces; infinite: no bottleneck.
        origins: What each figure is and where it comes from, for people.
    """

    step_s: Mapping[str, float]
    links: Mapping[str, LinkProfile] | None
    costs: HostCosts = MEASURED
    tcp: Tcp | None = None
    syncer_link: LinkProfile | None = None
    syncer_threads: int = 1
    inside_bps: float = math.inf
    origins: tuple[str, ...] = ()

    def with_steps(self, factor: float) -> Assumptions:
        """Return them with every inner step so many times as long."""
        return replace(self, step_s={name: factor * s for name, s in self.step_s.items()})

    def with_links(self, *, bandwidth: float = 1.0, delay: float = 1.0) -> Assumptions:
        """Return them with all bandwidths and delays so many times as large."""
        assert self.links is not None, "there are no links to change"

        def change(link: Link) -> Link:
            return replace(
                link, bandwidth_bps=bandwidth * link.bandwidth_bps, delay_s=delay * link.delay_s
            )

        def changed(profile: LinkProfile) -> LinkProfile:
            return replace(profile, up=change(profile.up), down=change(profile.down))

        return replace(
            self,
            links={name: changed(profile) for name, profile in self.links.items()},
            syncer_link=self.syncer_link and changed(self.syncer_link),
        )


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What options of `diloco plan` say of machines and links, as texts with units.

    Attributes:
        step_times: "ISLAND=0.8s", or "0.8s" of all others.
        links: "ISLAND=PROFILE", or "PROFILE" of all others.
        bandwidths: "ISLAND=200Mbit/s", or "200Mbit/s"; of both directions, in place of a profile's.
        round_trips: "ISLAND=80ms", or "80ms"; in place of a profile's.
        syncer_link: Profile of the line of the syncers' site; empty: it is no bottleneck.
        tcp_loss: Share of packets that TCP loses; 0: it bounds no connection.
        tcp_window: Most that a connection has on its way; empty: no bound.
        inside_bandwidth: Of a rank inside its island; empty: no bottleneck.
        device: Whose peak counts where a step is estimated: a part of its name, or "cpu"; empty:
            what `islands.NAME.device` says, an H100 for cuda, and a CPU for auto.
        reached: Share of the peak of an accelerator; None: `REACHED`.
    """

    step_times: Sequence[str] = ()
    links: Sequence[str] = ()
    bandwidths: Sequence[str] = ()
    round_trips: Sequence[str] = ()
    syncer_link: str = ""
    tcp_loss: float = 0.0
    tcp_window: str = ""
    inside_bandwidth: str = ""
    device: str = ""
    reached: float | None = None

    @property
    def share(self) -> float:
        """Of an accelerator's peak.

        Raises:
            ConfigError: If it is none.
        """
        share = REACHED if self.reached is None else self.reached
        if not 0 < share <= 1:
            raise ConfigError(f"--mfu {share:g} is outside (0, 1]: a share of the device's peak")
        return share

    @property
    def tcp(self) -> Tcp | None:
        """Ceilings of a connection; None: there are none.

        Raises:
            ConfigError: If one is none.
        """
        if not 0 <= self.tcp_loss < 1:
            raise ConfigError(f"--tcp-loss {self.tcp_loss:g} is outside [0, 1): a share of packets")
        if not (self.tcp_loss or self.tcp_window):
            return None
        window = math.inf
        if self.tcp_window:
            window = parsed("--tcp-window", self.tcp_window, positive_bytes)
        return Tcp(self.tcp_loss, window)

    @property
    def syncer_line(self) -> LinkProfile | None:
        """Line of the syncers' site; None: it is no bottleneck.

        Raises:
            ConfigError: If there is none of that name.
        """
        return _profile("--syncer-link", self.syncer_link) if self.syncer_link else None

    @property
    def inside_bps(self) -> float:
        """Of a rank inside its island; infinite: no bottleneck.

        Raises:
            ConfigError: If it is no bandwidth.
        """
        text = self.inside_bandwidth
        return parsed("--inside-bandwidth", text, parse_bandwidth) if text else math.inf


def told_steps(config: Config, told: PlanOptions) -> dict[str, float]:
    """Return the seconds of inner steps that were told, by island.

    Raises:
        ConfigError: If an island is not of the run, or a time is none.
    """
    texts = _by_island(config, "--step-time", told.step_times, "0.8s")
    return {
        name: parsed("--step-time", text, lambda t: parse_duration(t, is_positive=True))
        for name, text in texts.items()
    }


def estimated_step(
    config: Config, island: str, planned: RankForecast, told: PlanOptions
) -> tuple[float, str]:
    """Estimate the seconds of an inner step of an island from its operations; and say how.

    Raises:
        ConfigError: If the device is unknown, or the share is none.
    """
    reached = told.share
    device = device_of(config, island, told)
    if device == CPU:
        threads = config.islands[island].threads
        rate = CPU_FLOPS * threads
        how = f"{threads} thread{'s' * (threads > 1)} of {CPU_FLOPS / 1e9:g} Gflop/s"
    else:
        rate = reached * PEAK_FLOPS[device]
        how = f"{reached:.0%} of the {PEAK_FLOPS[device] / 1e12:g} Tflop/s of {device}"
    seconds = planned.flops_per_inner_step / rate
    return seconds, f"{planned.flops_per_inner_step:.3g} operations a rank, {how}"


def device_of(config: Config, island: str, told: PlanOptions) -> str:
    """Name the device whose peak an island's estimated step has.

    Raises:
        ConfigError: If the one that was told is unknown.
    """
    device = told.device or ("H100" if config.islands[island].device == "cuda" else CPU)
    if device != CPU and device not in PEAK_FLOPS:
        raise ConfigError(f"--device {device} is unknown: choose {CPU}, {', '.join(PEAK_FLOPS)}")
    return device


def find_links(config: Config, told: PlanOptions) -> dict[str, LinkProfile] | None:
    """Return the link of every island, from what was told or `transport.link`.

    Returns:
        None if nothing is known of at least one.

    Raises:
        ConfigError: If an island or a profile is unknown, or a figure is none.
    """
    own = link_profile(config)
    names = _by_island(config, "--link", told.links, "ocean-100M-150ms")
    rates = _by_island(config, "--bandwidth", told.bandwidths, "200Mbit/s")
    trips = _by_island(config, "--rtt", told.round_trips, "80ms")
    links: dict[str, LinkProfile] = {}
    for island in sorted(config.islands):
        profile = _profile("--link", names[island]) if island in names else own
        rate = parsed("--bandwidth", rates[island], parse_bandwidth) if island in rates else 0.0
        trip = parsed("--rtt", trips[island], parse_duration) if island in trips else None
        if profile is None:
            if not rate:
                return None
            line = Link(rate, (trip or 0.0) / 2)
            links[island] = LinkProfile(_link_name(line), line, line, "told")
            continue
        links[island] = _replaced(profile, rate, trip)
    return links


def _replaced(profile: LinkProfile, rate: float, trip_s: float | None) -> LinkProfile:
    """Put another bandwidth (0: none) and round trip (None: none) in the place of a profile's."""
    if not rate and trip_s is None:
        return profile
    up, down = (
        replace(
            link,
            bandwidth_bps=rate or link.bandwidth_bps,
            delay_s=link.delay_s if trip_s is None else trip_s / 2,
        )
        for link in (profile.up, profile.down)
    )
    return LinkProfile(_link_name(up), up, down, "told")


def has_delay(profile: LinkProfile) -> bool:
    """Say whether a round trip takes any time."""
    return profile.up.delay_s + profile.down.delay_s > 0


def _link_name(link: Link) -> str:
    return f"{format_bandwidth(link.bandwidth_bps)}, {format_duration(2 * link.delay_s)}"


def _profile(option: str, name: str) -> LinkProfile:
    try:
        return find_profile(name)
    except ConfigError as error:
        raise ConfigError(f"{option} {name}: {error}") from error


def _by_island(config: Config, option: str, texts: Sequence[str], example: str) -> dict[str, str]:
    """Read ISLAND=VALUE texts; a bare VALUE is that of all islands that none names."""
    found: dict[str, str] = {}
    others = sorted(config.islands.keys() - _named(texts))
    for text in texts:
        island, is_named, value = text.rpartition("=")
        if is_named and island not in config.islands:
            raise ConfigError(
                f"{option} {text}: {island!r} is not an island of this run; islands: "
                f"{', '.join(sorted(config.islands))}; write ISLAND={example}, or {example}"
            )
        if not is_named and not others:
            raise ConfigError(f"{option} {text} is of no island, as each is named: leave it out")
        for name in [island] if is_named else others:
            if name in found:
                raise ConfigError(f"{option} {text}: {found[name]} was said of {name}, too")
            found[name] = value
    return found


def _named(texts: Sequence[str]) -> set[str]:
    return {island for island, is_named, _ in (text.rpartition("=") for text in texts) if is_named}


def positive_bytes(text: str) -> int:
    """Read a size that is over 0."""
    return parse_bytes(text, is_positive=True)


def parsed(option: str, text: str, parse: Callable[[str], _T]) -> _T:
    """Read what an option says.

    Raises:
        ConfigError: Naming the option, if it cannot be read.
    """
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from error
