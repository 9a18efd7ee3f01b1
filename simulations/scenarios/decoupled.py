"""Islands that do not wait, of a scenario: the product's rounds and paces, without a run file."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from diloco.config.outer import OuterConfig
from diloco.errors import ConfigError
from diloco.outer.fragments import Plan
from diloco.outer.optimizer import OuterOptimizer
from diloco.outer.schedule import Schedule
from diloco.protocol.rounds.timing import TimingRules
from diloco.simulations.engine.clock import Engine, Steps
from diloco.simulations.engine.lives import Absence
from diloco.simulations.engine.network import Network, Path, Pipe, Tcp
from diloco.simulations.engine.timeline import Span
from diloco.simulations.runs.actors import SimulatedSyncer
from diloco.simulations.runs.costs import FREE
from diloco.simulations.runs.islands import (
    Exchanging,
    FragmentSize,
    SimulatedIsland,
    StepDraws,
    Sums,
    Training,
)
from diloco.simulations.runs.sites import Site
from diloco.simulations.scenarios.scenario import Scenario
from diloco.syncer.rules import SyncerRules
from diloco.transport.shaping.link import LinkProfile
from diloco.transport.units import parse_duration
from diloco.versions.publication import PublicationRules

_DEFAULTS = OuterConfig.model_fields
#: Of a run file that says nothing: share of the slack spent on stragglers, its cap, deadlines.
_GRACE_SHARE: float = _DEFAULTS["grace_share"].default
_GRACE_CAP_S, _DEADLINE_FLOOR_S, _DEADLINE_CAP_S = (
    parse_duration(_DEFAULTS[name].default)
    for name in ("grace_cap", "round_deadline_floor", "round_deadline")
)
#: A line that is no bottleneck.
_UNLIMITED_BPS = 1e18


@dataclass(frozen=True, slots=True)
class Pace:
    """What islands that do not wait have done after the first round's time.

    Attributes:
        utilisation: Share of the time in inner steps, mean over islands.
        round_s: Time of H inner steps of the slowest island.
        bits_up: Payload that an island sent in that time.
        bits_down: Payload that it received.
        versions: That were published, of all fragments.
        spans: What happened when, of the whole simulation.
    """

    utilisation: float
    round_s: float
    bits_up: float
    bits_down: float
    versions: int
    spans: tuple[Span, ...]


def decoupled_pace(
    scenario: Scenario, profile: LinkProfile, plan: Plan, seed: int, rounds: int
) -> tuple[Pace, float]:
    """Simulate so many times H inner steps of the slowest island.

    Returns:
        What was done, and the versions over those on lines of unlimited bandwidth.

    Raises:
        ConfigError: If there are none on these either: there is nothing to hold against.
    """
    unlimited = replace(
        profile,
        up=replace(profile.up, bandwidth_bps=_UNLIMITED_BPS),
        down=replace(profile.down, bandwidth_bps=_UNLIMITED_BPS),
    )
    pace = _simulate(scenario, profile, plan, seed, rounds, scenario.syncer_bps)
    most = _simulate(scenario, unlimited, plan, seed, rounds, math.inf)
    if not most.versions:
        steps = rounds * scenario.inner_steps_per_round
        raise ConfigError(
            f"--rounds {rounds}: nothing is published in {steps} inner steps of "
            f"{scenario.step_time}, at any bandwidth: delays are longer; simulate more rounds"
        )
    return pace, min(1.0, pace.versions / most.versions)


class DecoupledRun:
    """A scenario's islands, their syncer and their lines on an engine of their own, to be begun."""

    def __init__(
        self,
        scenario: Scenario,
        profile: LinkProfile,
        plan: Plan,
        seed: int,
        *,
        syncer_bps: float,
        is_over: Callable[[SimulatedIsland], bool],
        absences: Mapping[str, Sequence[Absence]] | None = None,
    ) -> None:
        """Found version 0, with the islands that are there.

        Args:
            scenario: What is simulated.
            profile: The line of every island.
            plan: Fragments.
            seed: Of steps, jitter and loss.
            syncer_bps: Of the line at the middle, each way.
            is_over: Whether an island has trained enough.
            absences: When islands are away, by name.
        """
        self.engine = Engine(seed)
        self.spans: list[Span] = []
        names = tuple(f"island-{i:04d}" for i in range(scenario.islands))
        self.syncer = SimulatedSyncer(
            self.engine,
            "syncer",
            plan.fragments,
            _rules(scenario, names),
            FREE,
            num_fragments=len(plan.fragments),
            record=self.spans.append,
        )
        self._scenario, self._profile = scenario, profile
        self._network = Network(self.engine)
        self._common = _common(scenario, plan)
        self._hub = Pipe("hub-in", syncer_bps), Pipe("hub-out", syncer_bps)
        away = absences or {}
        self.sites = [
            Site(
                self.engine,
                name,
                self._island(index, name),
                [self.syncer],
                away.get(name, ()),
                math.inf,
                is_over=is_over,
            )
            for index, name in enumerate(names)
        ]
        self.syncer.found([site.name for site in self.sites if site.is_here], names)

    def _island(self, index: int, name: str) -> Callable[..., SimulatedIsland]:
        """Give what makes a start of an island."""
        scenario, up, down = self._scenario, self._profile.up, self._profile.down
        step_s = scenario.step_s * (1 + scenario.step_skew * index / (scenario.islands - 1))
        rtt_s = up.delay_s + down.delay_s
        tcp = Tcp(scenario.tcp_loss, scenario.window_bytes) if scenario.has_tcp else None
        up_pipe = Pipe(f"{name}-up", up.bandwidth_bps)
        down_pipe = Pipe(f"{name}-down", down.bandwidth_bps)
        paths = (
            Path(f"{name}-up", (up_pipe, self._hub[0]), up, rtt_s, tcp),
            Path(f"{name}-down", (down_pipe, self._hub[1]), down, rtt_s, tcp),
        )
        draws = StepDraws(step_s, scenario.step_noise, self.engine.stream("step", name))
        return functools.partial(
            SimulatedIsland,
            self.engine,
            self._network,
            name,
            Training(tokens=1, ranks=1, step_s=draws),
            self._common,
            FREE,
            {self.syncer: paths},
            record=self.spans.append,
        )


def _simulate(
    scenario: Scenario,
    profile: LinkProfile,
    plan: Plan,
    seed: int,
    rounds: int,
    syncer_bps: float,
) -> Pace:
    period_s = scenario.inner_steps_per_round * scenario.step_s * (1 + scenario.step_skew)
    end_s = rounds * period_s

    def is_over(island: SimulatedIsland) -> bool:
        """To the end, and for two rounds at least."""
        return engine.now >= end_s and len(island.rounds) > 1

    run = DecoupledRun(scenario, profile, plan, seed, syncer_bps=syncer_bps, is_over=is_over)
    engine, last = run.engine, dict[str, Sums]()

    def train(site: Site) -> Steps:
        """Train; keep what was done by the end."""
        yield from site.live()
        last[site.name] = site.island.sums.copy(engine.now)

    engine.run(engine.all_of([engine.process(train(site)) for site in run.sites]))
    pairs = [(site.island.rounds[0], last[site.name]) for site in run.sites]
    shares = [(b.compute_s - a.compute_s) / (b.at_s - a.at_s) for a, b in pairs]
    return Pace(
        utilisation=min(1.0, sum(shares) / len(shares)),
        round_s=max((b.at_s - a.at_s) / (b.inner_steps - a.inner_steps) for a, b in pairs)
        * scenario.inner_steps_per_round,
        bits_up=8 * max(b.bytes_up for _, b in pairs) / rounds,
        bits_down=8 * max(b.bytes_down for _, b in pairs) / rounds,
        versions=sum(period_s < each.published_s <= end_s for each in run.syncer.publications),
        spans=tuple(run.spans),
    )


def _rules(scenario: Scenario, names: tuple[str, ...]) -> SyncerRules:
    """Give what the preset decoupled gives, with the scenario's quorum, H and tau."""
    return SyncerRules(
        timeline=0,
        islands=names,
        publication=PublicationRules(
            "float32", "float32", OuterOptimizer("sgd", 1.0, 0.0, 0), seed=0
        ),
        round_deadline_s=_DEADLINE_CAP_S,
        num_unsure_pins=0,
        min_members=1,
        quorum=scenario.quorum or None,
        timing=TimingRules(
            inner_steps_per_round=scenario.inner_steps_per_round,
            overlap_steps=scenario.overlap_steps,
            grace_share=_GRACE_SHARE,
            grace_cap_s=_GRACE_CAP_S,
            deadline_floor_s=_DEADLINE_FLOOR_S,
            deadline_cap_s=max(_DEADLINE_CAP_S, scenario.inner_steps_per_round * scenario.step_s),
        ),
    )


def _common(scenario: Scenario, plan: Plan) -> Exchanging:
    sizes = [
        FragmentSize(
            numel=fragment.numel,
            lanes=scenario.streams,
            bytes_up=fragment.numel * scenario.bits_up / 8,
            bytes_down=fragment.numel * scenario.down_bits / 8,
            float32_bytes=4 * fragment.numel,
        )
        for fragment in plan.fragments
    ]
    schedule = Schedule.make(
        inner_steps_per_round=scenario.inner_steps_per_round,
        num_fragments=len(sizes),
        overlap_steps=scenario.overlap_steps,
        inner_steps=scenario.inner_steps_per_round,
        flush=False,
    )
    return Exchanging(
        schedule,
        sizes,
        local_mix=0.0,
        on_arrival=True,
        plain_up=False,
        plain_down=False,
    )
