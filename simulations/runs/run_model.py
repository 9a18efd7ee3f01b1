"""A run of a run file, predicted: the real schedule, plan, rounds and codecs on a virtual clock.

    diloco.config -> plan, schedule, rules (the product's own) -> syncers and islands on an Engine
    -> utilisation, seconds a round, blocked seconds, bytes, spans

Nothing is trained: an inner step is its duration. What hosts take besides it is `HostCosts`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.forecast.build import build_syncer_rules, link_profile
from diloco.forecast.disk import forecast_disk
from diloco.forecast.traffic import fragment_bytes
from diloco.island.lanes.parameters import canonical_parameters, tensor_specs
from diloco.island.layout import build_plan, build_schedule
from diloco.outer.assignment import assign_fragments
from diloco.outer.fragments import Plan
from diloco.simulations.engine.clock import Engine
from diloco.simulations.engine.lives import Absence, Failures, check_absences
from diloco.simulations.engine.network import Network, Path, Tcp
from diloco.simulations.engine.timeline import Span
from diloco.simulations.runs.actors import Publication, SimulatedSyncer
from diloco.simulations.runs.costs import MEASURED, HostCosts
from diloco.simulations.runs.islands import (
    Exchanging,
    FragmentSize,
    IslandTraining,
    SimulatedIsland,
    Sums,
)
from diloco.simulations.runs.sites import SharedLine, Site
from diloco.syncer.rules import SyncerRules
from diloco.trainer.models.families import build_model, shape_of
from diloco.transport.shaping.link import LinkProfile


@dataclass(frozen=True, slots=True)
class IslandFigures:
    """What an island did in some part of a run; durations in seconds, sizes in bytes.

    Attributes:
        inner_steps: That it made.
        wall_s: That they took, all included.
        compute_s: Of these, in inner steps.
        blocked_s: For which training stood still for an outcome.
        copied_s: For which training copied fragments out of the ranks and into them.
        bytes_up: Payload sent.
        bytes_down: Payload received.
        merges: Versions merged.
        lost_steps: Inner steps made again, or never counted, after returns.
        rounds: `inner_steps` over H.
    """

    inner_steps: int
    wall_s: float
    compute_s: float
    blocked_s: float
    copied_s: float
    bytes_up: float
    bytes_down: float
    merges: int
    lost_steps: int
    rounds: float

    @property
    def utilisation(self) -> float:
        """Share of the time in inner steps; 1 where nothing was made."""
        return self.compute_s / self.wall_s if self.wall_s else 1.0

    @property
    def seconds_per_round(self) -> float:
        """Wall time of H inner steps with all that belongs to them."""
        return self.wall_s / self.rounds if self.rounds else 0.0

    @property
    def blocked_s_per_round(self) -> float:
        """Seconds a round for which training stood still."""
        return self.blocked_s / self.rounds if self.rounds else 0.0


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """A run that was simulated.

    Attributes:
        wall_s: From the first inner step to the last island's end, flush included.
        whole: Figures of the whole run, by island.
        steady: The same of its rounds (H inner steps) after those that warm up, without the flush
            and, where there are two more, the round before it, which leaves sends to it; of the
            whole run where it has not two rounds.
        publications: Versions, in the order in which they were durable.
        num_expired: Attempts that expired.
        lost: Why the run ended early; empty: it did not.
        spans: What happened when.
        absences: Which have begun, by island.
    """

    wall_s: float
    whole: Mapping[str, IslandFigures]
    steady: Mapping[str, IslandFigures]
    publications: tuple[Publication, ...]
    num_expired: int
    lost: str
    spans: tuple[Span, ...]
    absences: Mapping[str, tuple[Absence, ...]]

    @property
    def stalled_s(self) -> float:
        """Seconds in which no island was in an inner step."""
        stalled_s, until_s = 0.0, 0.0
        steps = sorted((s.begin_s, s.end_s) for s in self.spans if s.kind == "compute")
        for begin_s, end_s in (*steps, (self.wall_s, self.wall_s)):
            stalled_s += max(0.0, begin_s - until_s)
            until_s = max(until_s, end_s)
        return stalled_s

    def num_without(self, island: str) -> int:
        """Count the rounds that were closed without an island, flushes left out."""
        ordinary = (each for each in self.publications if not each.is_flush)
        return sum(island not in each.contributors for each in ordinary)

    @property
    def utilisation(self) -> float:
        """Share of the time in inner steps, in the steady rounds, mean over islands."""
        return sum(each.utilisation for each in self.steady.values()) / len(self.steady)

    @property
    def seconds_per_round(self) -> float:
        """Wall time of H inner steps of the slowest island, in the steady rounds."""
        return max(each.seconds_per_round for each in self.steady.values())


def simulate_run(
    config: Config,
    *,
    step_s: Mapping[str, float],
    links: Mapping[str, LinkProfile] | LinkProfile | None = None,
    seed: int = 0,
    costs: HostCosts = MEASURED,
    rounds: int = 0,
    warm_up_rounds: int = 1,
    syncer_link: LinkProfile | None = None,
    tcp: Tcp | None = None,
    absences: Mapping[str, Sequence[Absence]] | None = None,
    failures: Failures | None = None,
    plan: Plan | None = None,
    syncer_threads: int = 1,
) -> SimulatedRun:
    """Simulate the run of a run file.

    Args:
        config: The run; its islands, model, schedule, codecs, quorum, deadlines and syncers count.
        step_s: Seconds of an undisturbed inner step of every island.
        links: Of every island, or the one that all have a line of; None: `transport.link`.
        seed: Of jitter, loss and failures.
        costs: What hosts take besides inner steps.
        rounds: Simulate only so many times H inner steps, without a flush; 0: the whole run.
        warm_up_rounds: At the beginning that are not steady; of a short run at most half of it.
        syncer_link: The line of the site where syncers are, which all islands share; None: it is
            no bottleneck, and adds no delay.
        tcp: Ceilings of a connection; None: a transfer fills its share of a link.
        absences: When islands are away, by island, ascending; on arrival also from the start.
        failures: Draws when all others are away; None: they never are.
        plan: Fragments; None: those of the run's model.
        syncer_threads: Of each syncer, on cores of its own.

    Raises:
        ConfigError: If something is missing or impossible, by its dotted path.
    """
    _check(config, step_s, rounds)
    if rounds:
        config = _shortened(config, rounds)
    given = dict(absences or {})
    check_absences(given, sorted(config.islands), on_arrival=config.outer.is_on_arrival)
    plan = plan or run_plan(config)
    rules = build_syncer_rules(config, timeline=0)
    if rounds and rules.total_tokens:
        rules = replace(rules, total_tokens=config.total_tokens)
    engine = Engine(seed)
    away: dict[str, Iterable[Absence]] = dict(given)
    if failures is not None:
        for name in config.islands.keys() - given.keys():
            away[name] = failures.draw(engine.stream("failures", name))
    parts = _RunParts(
        config,
        plan,
        rules,
        costs,
        engine,
        Network(engine),
        _profiles(config, links),
        step_s,
        away,
        warm_up_rounds,
        not rounds and config.outer.flush and not config.outer.is_on_arrival,
        [],
    )
    return _run_syncers(parts, SharedLine(syncer_link), tcp, syncer_threads)


@dataclass(frozen=True, slots=True)
class _RunParts:
    """The parts of a simulation."""

    config: Config
    plan: Plan
    rules: SyncerRules
    costs: HostCosts
    engine: Engine
    network: Network
    profiles: Mapping[str, LinkProfile]
    step_s: Mapping[str, float]
    absences: Mapping[str, Iterable[Absence]]
    warm_up_rounds: int
    is_flushed: bool
    spans: list[Span]

    def exchanging(self, sizes: Sequence[FragmentSize]) -> Exchanging:
        """Give what all islands have in common; `sizes` cross the link to the server."""
        outer = self.config.outer
        return Exchanging(
            schedule=build_schedule(outer, self.config.run.inner_steps),
            sizes=sizes,
            local_mix=outer.local_mix,
            on_arrival=outer.is_on_arrival,
            plain_up=outer.uplink == "float32",
            plain_down=outer.downlink == "float32",
        )

    def building(
        self,
        name: str,
        common: Exchanging,
        paths: Mapping[SimulatedSyncer, tuple[Path, Path]],
        record: Callable[[Span], None],
    ) -> Callable[..., SimulatedIsland]:
        """Give what makes the starts of an island."""
        island = self.config.islands[name]
        return functools.partial(
            SimulatedIsland,
            self.engine,
            self.network,
            name,
            IslandTraining(island.tokens_per_inner_step, island.ranks, lambda: self.step_s[name]),
            common,
            self.costs,
            paths,
            record=record,
        )

    def run(self, sites: Sequence[Site], syncers: Sequence[SimulatedSyncer]) -> SimulatedRun:
        """Run to the end of all islands."""
        return run_to_the_end(
            self.engine,
            sites,
            syncers,
            self.spans,
            self.config.outer.inner_steps_per_round,
            warm_up_rounds=self.warm_up_rounds,
            is_flushed=self.is_flushed,
        )


def _run_syncers(parts: _RunParts, line: SharedLine, tcp: Tcp | None, threads: int) -> SimulatedRun:
    config, engine, plan = parts.config, parts.engine, parts.plan
    record = Recorder(parts.spans)
    disk = forecast_disk(config, sum(fragment.numel for fragment in plan.fragments))
    syncers = [
        SimulatedSyncer(
            engine,
            name,
            [plan.fragments[p] for p in own],
            parts.rules,
            parts.costs,
            num_fragments=len(plan.fragments),
            record=record,
            threads=threads,
            written=disk.written_bytes / disk.record_bytes,
        )
        for name, own in zip(
            config.syncer_shares, assign_fragments(plan, config.shares), strict=True
        )
    ]
    common = parts.exchanging(fragment_sizes(config, plan))
    sites = []
    for name in sorted(config.islands):
        paths = line.paths(name, parts.profiles[name], tcp)
        build = parts.building(name, common, dict.fromkeys(syncers, paths), record)
        away = parts.absences.get(name, ())
        sites.append(Site(engine, name, build, syncers, away, config.lease_s))
    here = [site for site in sites if site.is_here]
    for syncer in syncers:
        syncer.found([site.name for site in here], [site.name for site in sites])
    return parts.run(sites, syncers)


def run_plan(config: Config) -> Plan:
    """Cut the run's model into fragments; allocates no parameter."""
    model = build_model(shape_of(config.model))
    return build_plan(config.outer, tensor_specs(canonical_parameters(model)))


def fragment_sizes(config: Config, plan: Plan) -> list[FragmentSize]:
    """Give what every fragment weighs in the run's codecs."""
    sizes = []
    for fragment in plan.fragments:
        up, down, plain = (
            fragment_bytes(plan, fragment.fragment_id, codec)
            for codec in (config.outer.uplink, config.outer.downlink, "float32")
        )
        sizes.append(FragmentSize(fragment.padded_numel, len(fragment.lanes), up, down, plain))
    return sizes


def run_to_the_end(
    engine: Engine,
    sites: Sequence[Site],
    syncers: Sequence[SimulatedSyncer],
    spans: Sequence[Span],
    period: int,
    *,
    warm_up_rounds: int,
    is_flushed: bool = False,
) -> SimulatedRun:
    """Have the islands of a run train, from now to the end of all of them or of the run.

    Args:
        engine: The clock.
        sites: Islands, which have not begun.
        syncers: That decide their rounds.
        spans: Where what happens is recorded.
        period: H.
        warm_up_rounds: See `simulate_run`.
        is_flushed: Whether a flush is the end.
    """
    everybody = engine.all_of([engine.process(site.live()) for site in sites])
    while not (everybody.processed or engine.has_stopped):
        engine.step()
    lost = next((each.lost for each in syncers if each.lost), "")
    # Of islands that are away when the run ends nobody waits for the return.
    ended_s = engine.now if lost else max(site.ended_s for site in sites)
    publications = [each for syncer in syncers for each in syncer.publications]
    whole, steady = {}, {}
    for island in (site.island for site in sites):
        now = island.sums.copy(ended_s)
        whole[island.name] = _figures(Sums(), now, period)
        ends = island.rounds[: -1 if is_flushed and len(island.rounds) > 2 else None]
        steady[island.name] = (
            _figures(ends[max(1, min(warm_up_rounds, len(ends) // 2)) - 1], ends[-1], period)
            if len(ends) > 1
            else whole[island.name]
        )
    return SimulatedRun(
        ended_s,
        whole,
        steady,
        tuple(sorted(publications, key=lambda each: each.published_s)),
        sum(each.num_expired for each in syncers),
        lost,
        tuple(spans),
        {site.name: tuple(site.was_away) for site in sites},
    )


def _figures(first: Sums, last: Sums, period: int) -> IslandFigures:
    moved = {
        each.name: getattr(last, each.name) - getattr(first, each.name) for each in fields(Sums)
    }
    return IslandFigures(**moved, rounds=moved["inner_steps"] / period)


def _check(config: Config, step_s: Mapping[str, float], rounds: int) -> None:
    for name in sorted(config.islands):
        if name not in step_s:
            raise ConfigError(f"step_s.{name} is missing: give the seconds of an inner step")
        if not 0 < step_s[name] < float("inf"):
            raise ConfigError(f"step_s.{name} = {step_s[name]} must be over 0 and finite")
    if rounds < 0:
        raise ConfigError(f"rounds = {rounds} must be 0, the whole run, or more")


def _shortened(config: Config, rounds: int) -> Config:
    """Have a run end after so many periods, so late that all that is sent in them is merged."""
    outer = config.outer
    inner_steps = rounds * outer.inner_steps_per_round
    if not outer.is_on_arrival:
        inner_steps += outer.overlap_steps
    flush = outer.is_on_arrival  # which always has one, and here ends with its tokens
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"inner_steps": inner_steps}),
            "outer": outer.model_copy(update={"flush": flush}),
        }
    )


def _profiles(
    config: Config, links: Mapping[str, LinkProfile] | LinkProfile | None
) -> dict[str, LinkProfile]:
    if links is None:
        links = link_profile(config)
        if links is None:
            raise ConfigError(
                'transport.link = "" is the real link, whose figures are not known: name a profile '
                "of configs/links (--set transport.link=NAME)"
            )
    if isinstance(links, LinkProfile):
        return dict.fromkeys(config.islands, links)
    if missing := sorted(set(config.islands) - links.keys()):
        raise ConfigError(f"links.{missing[0]} is missing: give the link of every island")
    return dict(links)


class Recorder:
    """Keeps spans; inner steps that follow one another are one."""

    def __init__(self, spans: list[Span]) -> None:
        """Append to `spans`."""
        self._spans = spans
        self._computing: dict[str, int] = {}

    def __call__(self, span: Span) -> None:
        """Keep a span that took time."""
        if span.kind == "compute":
            index = self._computing.get(span.island)
            if index is not None and self._spans[index].end_s == span.begin_s:
                self._spans[index] = replace(self._spans[index], end_s=span.end_s)
                return
            self._computing[span.island] = len(self._spans)
        if span.end_s > span.begin_s:
            self._spans.append(span)
