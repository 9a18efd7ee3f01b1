"""Islands that do not wait, of a scenario: the product's rounds and paces, without a run file."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from diloco.config.outer import OuterConfig
from diloco.outer.fragments import Plan
from diloco.outer.optimizer import OuterOptimizer
from diloco.outer.schedule import Schedule
from diloco.rounds.publication import PublicationRules
from diloco.rounds.rules import SyncerRules
from diloco.rounds.timing import TimingRules
from simulations.actors import SimulatedSyncer
from simulations.costs import FREE
from simulations.engine import Engine, Steps
from simulations.islands import (
    Exchanging,
    FragmentSize,
    SimulatedIsland,
    StepDraws,
    Sums,
    Training,
)
from simulations.network import Network, Path, Pipe, Tcp
from simulations.scenario import Scenario
from simulations.timeline import Span
from transport.link import LinkProfile
from transport.units import parse_duration

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
    """
    unlimited = replace(
        profile,
        up=replace(profile.up, bandwidth_bps=_UNLIMITED_BPS),
        down=replace(profile.down, bandwidth_bps=_UNLIMITED_BPS),
    )
    pace = _simulate(scenario, profile, plan, seed, rounds, scenario.syncer_bps)
    most = _simulate(scenario, unlimited, plan, seed, rounds, math.inf)
    return pace, min(1.0, pace.versions / most.versions) if most.versions else 1.0


def _simulate(
    scenario: Scenario,
    profile: LinkProfile,
    plan: Plan,
    seed: int,
    rounds: int,
    syncer_bps: float,
) -> Pace:
    engine = Engine(seed)
    network = Network(engine)
    spans: list[Span] = []
    names = tuple(f"island-{i:04d}" for i in range(scenario.islands))
    syncer = SimulatedSyncer(
        engine,
        "syncer",
        plan.fragments,
        _rules(scenario, names),
        FREE,
        num_fragments=len(plan.fragments),
        record=spans.append,
    )
    common = _common(scenario, plan, rounds)
    hub = Pipe("hub-in", syncer_bps), Pipe("hub-out", syncer_bps)
    rtt_s = profile.up.delay_s + profile.down.delay_s
    tcp = Tcp(scenario.tcp_loss, scenario.window_bytes) if scenario.has_tcp else None
    islands = []
    for index, name in enumerate(names):
        step_s = scenario.step_s * (1 + scenario.step_skew * index / (scenario.islands - 1))
        up_pipe = Pipe(f"{name}-up", profile.up.bandwidth_bps)
        down_pipe = Pipe(f"{name}-down", profile.down.bandwidth_bps)
        up = Path(f"{name}-up", (up_pipe, hub[0]), profile.up, rtt_s, tcp)
        down = Path(f"{name}-down", (down_pipe, hub[1]), profile.down, rtt_s, tcp)
        draws = StepDraws(step_s, scenario.step_noise, engine.stream("step", name))
        islands.append(
            SimulatedIsland(
                engine,
                network,
                name,
                Training(tokens=1, ranks=1, step_s=draws),
                common,
                FREE,
                {syncer: (up, down)},
                record=spans.append,
            )
        )
    syncer.found(names, names)
    slowest_s = scenario.step_s * (1 + scenario.step_skew)
    period_s = scenario.inner_steps_per_round * slowest_s
    end_s = rounds * period_s

    last: dict[str, Sums] = {}

    def train(island: SimulatedIsland) -> Steps:
        """Train to the end, and for two rounds at least; keep what was done by then."""
        yield from island.train(lambda: engine.now >= end_s and len(island.rounds) > 1)
        last[island.name] = island.sums.copy(engine.now)

    for island in islands:
        island.start()
    ends = [engine.process(train(island)) for island in islands]
    engine.run(engine.all_of(ends))
    pairs = [(island.rounds[0], last[island.name]) for island in islands]
    shares = [(b.compute_s - a.compute_s) / (b.at_s - a.at_s) for a, b in pairs]
    return Pace(
        utilisation=min(1.0, sum(shares) / len(shares)),
        round_s=max((b.at_s - a.at_s) / (b.inner_steps - a.inner_steps) for a, b in pairs)
        * scenario.inner_steps_per_round,
        bits_up=8 * max(b.bytes_up for _, b in pairs) / rounds,
        bits_down=8 * max(b.bytes_down for _, b in pairs) / rounds,
        versions=sum(period_s < each.published_s <= end_s for each in syncer.publications),
        spans=tuple(spans),
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


def _common(scenario: Scenario, plan: Plan, rounds: int) -> Exchanging:
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
        inner_steps=rounds * scenario.inner_steps_per_round,
        flush=False,
    )
    return Exchanging(
        schedule,
        sizes,
        local_mix=0.0,
        on_arrival=True,
        is_carried=False,
        plain_up=False,
        plain_down=False,
    )
