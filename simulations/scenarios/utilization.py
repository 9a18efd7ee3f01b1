"""Compute utilisation of a scenario, by the run model: who waits how long for which fragment.

A scenario becomes what `diloco.simulations.runs` simulates: the product's schedule, fragments,
rounds and islands on hosts that take no time. What a run file has not is given in addition:

    pieces      a payload leaves piece by piece while the backward pass of the sending step reaches
                its layers; an island's pieces leave its line one after the other
    lines       of an ideal all-reduce, which is a syncer on no line of its own: 2 (M - 1) / M of a
                payload cross from each island to the next one of a ring, whose delay counts once;
                or of a syncer a site, each of its share of the fragments
    no calls    where islands wait for each other, polls and requests take no time, as in the
                papers' closed forms: only payloads cross lines

Source: Streaming DiLoCo (arXiv 2501.18512), its model of compute utilisation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from diloco.baseline.time_model import MSS_BYTES, PACKET_BYTES, ReductionTime
from diloco.config.outer import OuterConfig
from diloco.errors import ConfigError
from diloco.outer.fragments import Fragment, Plan, TensorSpec, make_plan
from diloco.outer.optimizer import OuterOptimizer
from diloco.outer.schedule import Schedule
from diloco.protocol.rounds.timing import TimingRules
from diloco.simulations.engine.clock import Engine
from diloco.simulations.engine.lives import Absence
from diloco.simulations.engine.network import Network, Path, Pipe, Tcp
from diloco.simulations.engine.timeline import Span
from diloco.simulations.runs.actors import SimulatedSyncer
from diloco.simulations.runs.costs import FREE
from diloco.simulations.runs.islands import (
    Exchanging,
    FragmentSize,
    IslandTraining,
    Piece,
    SimulatedIsland,
    StepDraws,
)
from diloco.simulations.runs.run_model import Recorder, SimulatedRun, run_to_the_end
from diloco.simulations.runs.sites import Site
from diloco.simulations.scenarios.scenario import Scenario, at_bandwidth
from diloco.simulations.scenarios.wallclock import FORWARD_SHARE, ring_latency_s
from diloco.syncer.rules import SyncerRules
from diloco.transport.shaping.link import Link, LinkProfile
from diloco.versions.publication import PublicationRules

#: Rounds, and how many of them warm up, where one fragment at a time is under way; and where
#: several are, which fill a link that is a little too thin only after tau steps more than it has.
_ONE_AT_A_TIME, _SEVERAL = (3, 1), (32, 16)
_DEFAULTS = OuterConfig.model_fields
#: A line that is no bottleneck.
_UNLIMITED_BPS = 1e18

#: Told (inner steps made by the first island, of how many).
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Utilisation:
    """What a scenario comes to, in the rounds after those that warm up.

    Attributes:
        utilisation: Share of the time in inner steps, mean over islands.
        stall_s: Seconds a round for which the slowest island stood still.
        round_s: Wall time of a round.
        bits_up: Payload that the busiest island's line sends a round, its own syncer's included.
        bits_down: Payload that it receives.
        pace: Versions that were published over those that the schedule has; 1 where islands wait.
    """

    utilisation: float
    stall_s: float
    round_s: float
    bits_up: float
    bits_down: float
    pace: float = 1.0

    @property
    def useful(self) -> float:
        """Share of the time in inner steps, where rounds keep pace; what bandwidth is needed for.

        Islands of a decoupled run train at any bandwidth; it decides how often they hear of each
        other.
        """
        return min(self.utilisation, self.pace)


def simulate(
    scenario: Scenario,
    *,
    link: LinkProfile | None = None,
    seed: int = 0,
    rounds: int = 0,
    on_progress: OnProgress = lambda done, total: None,
) -> Utilisation:
    """Simulate some rounds of a scenario.

    Args:
        scenario: What is simulated.
        link: The line of every island in place of the scenario's.
        seed: Of steps, jitter and loss.
        rounds: At least 2, of which the first is not counted; 0: as many as it takes to be steady.
        on_progress: Told, where islands wait for each other.

    Raises:
        ConfigError: If islands do not wait and nothing is published in so many rounds.
    """
    profile, plan = link or scenario.profile, layered_plan(scenario)
    if scenario.method == "decoupled":
        rounds = rounds or _ONE_AT_A_TIME[0]
        run, num_versions = _decoupled(scenario, profile, plan, seed, rounds)
        _, most = _decoupled(scenario, at_bandwidth(profile, _UNLIMITED_BPS), plan, seed, rounds)
        if not most:
            raise ConfigError(
                f"--rounds {rounds}: nothing is published in "
                f"{rounds * scenario.inner_steps_per_round} inner steps of {scenario.step_time}, "
                "at any bandwidth: delays are longer; simulate more rounds"
            )
        return _figures(scenario, plan, run, rounds, pace=min(1.0, num_versions / most))
    usual = _ONE_AT_A_TIME if _schedule(scenario, 1).is_one_at_a_time else _SEVERAL
    num_rounds, warm_up = (rounds, 1) if rounds else usual
    run = simulate_scenario(
        scenario,
        profile,
        plan,
        seed,
        rounds=num_rounds,
        warm_up_rounds=warm_up,
        syncer_bps=scenario.syncer_bps,
        on_progress=on_progress,
    )
    return _figures(scenario, plan, run, num_rounds)


def layered_plan(scenario: Scenario) -> Plan:
    """Cut a model of equal layers into fragments, as the product does."""
    shape = (scenario.layer_numel,)
    return make_plan(
        [TensorSpec(f"layers.{layer}.weight", shape) for layer in range(scenario.layers)],
        num_fragments=scenario.fragments,
        pattern=scenario.fragment_pattern,
        num_lanes=1,
    )


def simulate_scenario(
    scenario: Scenario,
    profile: LinkProfile,
    plan: Plan,
    seed: int,
    *,
    rounds: int = 1,
    warm_up_rounds: int = 1,
    syncer_bps: float,
    end_s: float = 0.0,
    absences: Mapping[str, Sequence[Absence]] | None = None,
    on_progress: OnProgress = lambda done, total: None,
) -> SimulatedRun:
    """Simulate a scenario as a run.

    Args:
        scenario: What is simulated.
        profile: The line of every island.
        plan: Fragments.
        seed: Of steps, jitter and loss.
        rounds: Times H inner steps, where islands wait for each other.
        warm_up_rounds: Of these, that are not steady.
        syncer_bps: Of the line at the middle of a star, each way.
        end_s: Seconds until which islands train that do not wait, for two rounds at least.
        absences: When islands are away that do not wait, by name.
        on_progress: Called after inner steps.
    """
    engine, names, spans = Engine(seed), island_names(scenario), list[Span]()
    record, network = Recorder(spans), Network(engine)
    lines = _ScenarioLines(scenario, profile, names, syncer_bps)
    # Where nothing that hosts do takes time, one a fragment is the same as one of all, and faster.
    served = [plan.fragments] if scenario.method == "decoupled" else [[f] for f in plan.fragments]
    syncers = [
        SimulatedSyncer(
            engine,
            f"syncer-{number}",
            fragments,
            syncer_rules(scenario, names),
            FREE,
            num_fragments=len(plan.fragments),
            record=record,
        )
        for number, fragments in enumerate(served)
    ]
    schedule = _schedule(scenario, rounds)

    def hear(span: Span) -> None:
        record(span)
        if span.kind == "compute" and span.island == names[0]:
            on_progress(sites[0].island.inner_step, schedule.inner_steps)

    def is_over(island: SimulatedIsland) -> bool:
        return engine.now >= end_s and len(island.rounds) > 1

    sites: list[Site] = []
    for slot, name in enumerate(names):
        step_s = scenario.step_s * (1 + scenario.step_skew * slot / (len(names) - 1))
        draws = StepDraws(step_s, scenario.step_noise, engine.stream("step", name))
        build = functools.partial(
            SimulatedIsland,
            engine,
            network,
            name,
            IslandTraining(tokens=1, ranks=1, step_s=draws),
            _exchanging(scenario, plan, schedule, lines.home(slot)),
            FREE,
            {syncer: lines.paths(slot, number) for number, syncer in enumerate(syncers)},
            record=hear,
        )
        away = (absences or {}).get(name, ())
        sites.append(Site(engine, name, build, syncers, away, math.inf, is_over=is_over))
    here = [site.name for site in sites if site.is_here]
    for syncer in syncers:
        syncer.found(here, names)
    return run_to_the_end(
        engine,
        sites,
        syncers,
        spans,
        scenario.inner_steps_per_round,
        warm_up_rounds=warm_up_rounds,
    )


def island_names(scenario: Scenario) -> tuple[str, ...]:
    """Name the islands, in their order."""
    return tuple(f"island-{slot:04d}" for slot in range(scenario.islands))


def syncer_rules(scenario: Scenario, names: tuple[str, ...]) -> SyncerRules:
    """Give the rules of a scenario's rounds: of all, or what the preset decoupled gives."""
    rules = SyncerRules(
        timeline=0,
        islands=names,
        publication=PublicationRules(
            "float32", "float32", OuterOptimizer("sgd", 1.0, 0.0, 0), seed=0
        ),
        round_deadline_s=math.inf,
        num_unsure_pins=0,
    )
    if scenario.method != "decoupled":
        return rules
    cap_s, deadline_s = (
        _DEFAULTS[name].default.seconds for name in ("grace_cap", "round_deadline")
    )
    period = scenario.inner_steps_per_round
    timing = TimingRules(
        inner_steps_per_round=period,
        overlap_steps=scenario.overlap_steps,
        grace_share=_DEFAULTS["grace_share"].default,
        grace_cap_s=cap_s,
        deadline_cap_s=max(deadline_s, period * scenario.step_s),
    )
    return replace(
        rules,
        round_deadline_s=deadline_s,
        min_members=1,
        quorum=scenario.quorum or None,
        timing=timing,
    )


def _schedule(scenario: Scenario, rounds: int) -> Schedule:
    """Give so many rounds, and the steps after which the last fragments are merged."""
    return Schedule.make(
        inner_steps_per_round=scenario.inner_steps_per_round,
        num_fragments=scenario.fragments,
        overlap_steps=scenario.overlap_steps,
        inner_steps=rounds * scenario.inner_steps_per_round + scenario.overlap_steps,
        flush=False,
    )


# -- what islands do not wait for ------------------------------------------------------------------


def _decoupled(
    scenario: Scenario, profile: LinkProfile, plan: Plan, seed: int, rounds: int
) -> tuple[SimulatedRun, int]:
    """Simulate so many times H inner steps of the slowest island.

    Returns:
        The run, and the versions that were published after the first of these times.
    """
    is_limited = profile.up.bandwidth_bps < _UNLIMITED_BPS
    period_s = scenario.inner_steps_per_round * scenario.step_s * (1 + scenario.step_skew)
    end_s = rounds * period_s
    run = simulate_scenario(
        scenario,
        profile,
        plan,
        seed,
        syncer_bps=scenario.syncer_bps if is_limited else math.inf,
        end_s=end_s,
    )
    return run, sum(period_s < each.published_s <= end_s for each in run.publications)


# -- payloads and lines ----------------------------------------------------------------------------


def line_bits(scenario: Scenario) -> float:
    """Bits that a parameter of a contribution puts on an island's line."""
    if scenario.method == "data-parallel":
        n = scenario.islands * scenario.ranks
        return scenario.bits_up * 2 * (n - 1) / n
    share = (scenario.islands - 1) / scenario.islands
    if scenario.method == "hierarchical":
        return scenario.bits_up * 2 * share
    if scenario.topology == "allreduce":
        return (scenario.bits_up + scenario.down_bits) * share
    return scenario.bits_up


def _exchanging(
    scenario: Scenario, plan: Plan, schedule: Schedule, home: Callable[[int], bool]
) -> Exchanging:
    """Give what an island exchanges; `home` says which fragments its own site merges."""
    is_decoupled, up_bits = scenario.method == "decoupled", line_bits(scenario)
    down_bits = 0.0 if scenario.topology == "allreduce" else scenario.down_bits
    sizes = []
    for fragment in plan.fragments:
        n = 0 if home(fragment.fragment_id) else fragment.numel
        sizes.append(
            FragmentSize(
                numel=fragment.numel,
                lanes=scenario.streams,
                bytes_up=n * up_bits / 8,
                bytes_down=n * down_bits / 8,
                float32_bytes=4 * fragment.numel,
            )
        )
    return Exchanging(
        schedule,
        sizes,
        local_mix=0.0,
        on_arrival=is_decoupled,
        plain_up=False,
        plain_down=False,
        pieces=[] if is_decoupled else [_pieces(scenario, each) for each in plan.fragments],
        has_calls=is_decoupled,
    )


def _pieces(scenario: Scenario, fragment: Fragment) -> list[Piece]:
    """Cut a fragment into what is released together, in the order of the backward pass."""
    if scenario.buckets:
        numel = fragment.numel / scenario.buckets
        reached = [((j + 1) / scenario.buckets, numel) for j in range(scenario.buckets)]
    else:
        reached = [
            (1 - int(entry.name.split(".")[1]) / scenario.layers, float(entry.end - entry.start))
            for entry in fragment.entries
        ]
    reached.sort(key=lambda piece: piece[0])
    return [
        Piece(
            1.0 if scenario.release == "step" else FORWARD_SHARE + at * (1 - FORWARD_SHARE),
            numel / fragment.numel,
            _ring(scenario, numel * scenario.bits_up).inside_s
            if scenario.method == "hierarchical"
            else 0.0,
        )
        for at, numel in reached
    ]


def _ring(scenario: Scenario, bits: float, rtt_s: float = 0.0) -> ReductionTime:
    return ReductionTime(
        num_islands=scenario.islands,
        num_ranks=scenario.ranks,
        num_bytes=round(bits / 8),
        wan_bps=1.0,
        rtt_s=rtt_s,
        inside_bps=scenario.inside_bps,
    )


class _ScenarioLines:
    """The lines of a scenario's islands, and where its syncers are on them."""

    def __init__(
        self, scenario: Scenario, profile: LinkProfile, names: Sequence[str], syncer_bps: float
    ) -> None:
        self._scenario, self._profile, self._names = scenario, profile, names
        self._outs = [Pipe(f"{name}-up", profile.up.bandwidth_bps) for name in names]
        self._ins = [Pipe(f"{name}-down", profile.down.bandwidth_bps) for name in names]
        self._hub = Pipe("hub-in", syncer_bps), Pipe("hub-out", syncer_bps)
        self._within = Pipe("within", math.inf)
        self._rtt_s = profile.up.delay_s + profile.down.delay_s
        self._tcp = Tcp(scenario.tcp_loss, scenario.window_bytes) if scenario.has_tcp else None
        # Inside an island a rate is of payload: the line's TCP headers take nothing of it.
        inside_bps = scenario.inside_bps * (PACKET_BYTES / MSS_BYTES if self._tcp else 1.0)
        self._ranks = [Pipe(f"{name}-ranks", inside_bps) for name in names]

    def home(self, slot: int) -> Callable[[int], bool]:
        """Tell which fragments an island's own site merges."""
        is_sites, num_sites = self._scenario.topology == "sites", self._scenario.islands
        return lambda p: is_sites and p % num_sites == slot

    def paths(self, slot: int, syncer: int) -> tuple[Path, Path]:
        """Give the two directions between an island and a syncer."""
        scenario, up, down = self._scenario, self._profile.up, self._profile.down
        if scenario.topology == "star":
            return (
                self._path(slot, syncer, "up", (self._outs[slot], self._hub[0]), up),
                self._path(slot, syncer, "down", (self._hub[1], self._ins[slot]), down),
            )
        # From one line into another.
        up = replace(up, bandwidth_bps=min(up.bandwidth_bps, down.bandwidth_bps))
        if scenario.topology == "sites":
            site = syncer % scenario.islands
            if site == slot:
                return self._inside(slot), self._inside(slot)
            return (
                self._path(slot, syncer, "up", (self._outs[slot], self._ins[site]), up),
                self._path(slot, syncer, "down", (self._outs[site], self._ins[slot]), down),
            )
        # To the next one of a ring, which for data parallel goes through its ranks, too.
        pipes: tuple[Pipe, ...] = (self._outs[slot], self._ins[(slot + 1) % scenario.islands])
        latency_s = self._rtt_s
        if scenario.method == "data-parallel":
            pipes = (*pipes, self._ranks[slot])
            latency_s = ring_latency_s(scenario.islands, scenario.ranks, self._rtt_s)
        elif scenario.method == "hierarchical":
            latency_s = _ring(scenario, 0.0, self._rtt_s).latency_s
        around = replace(up, delay_s=latency_s)
        return self._path(slot, syncer, "up", pipes, around), self._inside(slot)

    def _path(self, slot: int, syncer: int, way: str, pipes: tuple[Pipe, ...], link: Link) -> Path:
        return Path(f"{self._names[slot]}-{way}-{syncer}", pipes, link, self._rtt_s, self._tcp)

    def _inside(self, slot: int) -> Path:
        return Path(f"{self._names[slot]}-inside", (self._within,), Link(_UNLIMITED_BPS, 0.0), 0.0)


def _figures(
    scenario: Scenario, plan: Plan, run: SimulatedRun, rounds: int, *, pace: float = 1.0
) -> Utilisation:
    """Sum up a run; lines of sites carry what their own syncers exchange with the others, too."""
    steady, others = run.steady.values(), scenario.islands - 1
    ups = [each.bytes_up for each in run.whole.values()]
    downs = [each.bytes_down for each in run.whole.values()]
    if scenario.topology == "allreduce":
        downs = ups
    elif scenario.topology == "sites":
        for each in run.publications:
            home = each.fragment_id % scenario.islands
            n = others * plan.fragments[each.fragment_id].numel
            ups[home] += n * scenario.down_bits / 8
            downs[home] += n * scenario.bits_up / 8
    return Utilisation(
        utilisation=min(1.0, run.utilisation),
        stall_s=max((each.wall_s - each.compute_s) / each.rounds for each in steady),
        round_s=run.seconds_per_round,
        bits_up=8 * max(ups) / rounds,
        bits_down=8 * max(downs) / rounds,
        pace=pace,
    )
