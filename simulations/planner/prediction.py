"""What a run will be like on its links: time, utilisation, bandwidth, and what its syncers carry.

Everything comes from the event simulation of the run itself (`diloco.simulations.runs.run_model`);
of a long run its beginning and its end are simulated, and the rounds between counted:

    seconds = those of some rounds, the rest of the last one and the flush
            + rounds left out * seconds of a steady round

Where every fragment is merged before the next is sent, nothing lasts from one to the next and the
second round is as any: 4 are simulated. With several under way, waits on a full link come in
cycles of up to a dozen rounds, and it takes some to fill the link: 32, of which 8 warm up.

On arrival tokens end a run: a steady round is then the time in which the tokens of H inner steps of
every island are counted, by its publications; a faster one makes more of them, and not all
are counted.

Of a syncer: busy are its seconds of merging a round over those of H inner steps (of the fastest
island on arrival, else of the slowest); memory

    (12 B, of adam 16) a parameter + 1.25 * 12 B a parameter of its largest fragment
    + 2 * what may be held of contributions (`coordinator.spool_memory`, or all that are under way)

whose 1.25 is the bar of `diloco bench syncer`; without code and libraries, some 0.4 GiB a process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.forecast.disk import forecast_disk
from diloco.island.layout import build_schedule
from diloco.outer.assignment import assign_fragments
from diloco.outer.fragments import Plan
from diloco.outer.schedule import grown_steps
from diloco.simulations.planner.assumptions import Assumptions
from diloco.simulations.runs.actors import Publication
from diloco.simulations.runs.run_model import SimulatedRun, fragment_sizes, simulate_run
from diloco.simulations.scenarios.bandwidth import needed_bps
from diloco.simulations.scenarios.scenario import at_bandwidth

#: Rounds that are simulated of a longer run, and how many of them warm up: where one fragment at a
#: time is under way, where several are, and on arrival (see the module's text).
_ONE_AT_A_TIME, _SEVERAL, _ON_ARRIVAL = (4, 1), (32, 8), (16, 1)
#: "Enough" bandwidth, and how many rounds are simulated to find it.
ENOUGH = 0.99
_FEW = 6
#: Lengths of rounds that grow of which some are simulated; the time of others lies between.
_LENGTHS = 8
_STATE_BYTES, _SECOND_MOMENT_BYTES = 12, 4
_EXTRA = 1.25


@dataclass(frozen=True, slots=True)
class IslandPrediction:
    """One island; rates in bits a second of payload, means over steady rounds.

    Attributes:
        step_s: Seconds of an undisturbed inner step.
        link: Name of its link.
        utilisation: Share of the time in inner steps, in steady rounds.
        blocked_s: Seconds a round for which training stands still.
        mean_up_bps: Sent.
        mean_down_bps: Received.
        peak_up_bps: While something is sent: what the link lets through.
        peak_down_bps: While something is received.
    """

    step_s: float
    link: str
    utilisation: float
    blocked_s: float
    mean_up_bps: float
    mean_down_bps: float
    peak_up_bps: float
    peak_down_bps: float


@dataclass(frozen=True, slots=True)
class SyncerPrediction:
    """One syncer; rates in bits a second of payload.

    Attributes:
        syncer_id: Which.
        name: Of its store.
        fragment_ids: Its own.
        busy: Seconds for which it merges a second, if training never waits for it.
        memory_bytes: At most, without code.
        store_bytes: Its store on disk, at most.
        written_bytes_per_s: To that.
        stored_bytes_per_s: To the object store: the same, less contributions that are there.
        mean_in_bps: Contributions.
        mean_out_bps: Versions, once for each island, or by bucket once.
        peak_in_bps: If all islands send at once.
        peak_out_bps: If all fetch at once.
    """

    syncer_id: int
    name: str
    fragment_ids: tuple[int, ...]
    busy: float
    memory_bytes: int
    store_bytes: int
    written_bytes_per_s: float
    stored_bytes_per_s: float
    mean_in_bps: float
    mean_out_bps: float
    peak_in_bps: float
    peak_out_bps: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """A whole run.

    Attributes:
        wall_s: From the first inner step to the end, flush included.
        utilisation: Mean over islands, in steady rounds.
        round_s: Seconds of H inner steps of the slowest island.
        enough_bps: Bandwidth of all islands, each way, with which the slowest one trains 99 % of
            the time; None: see `enough_bandwidth`.
        islands: By name.
        syncers: By number.
        run: What was simulated of it.
    """

    wall_s: float
    utilisation: float
    round_s: float
    enough_bps: float | None
    islands: Mapping[str, IslandPrediction]
    syncers: tuple[SyncerPrediction, ...]
    run: SimulatedRun


def predict(config: Config, plan: Plan, assumed: Assumptions) -> Prediction:
    """Predict a run whose links are known.

    Raises:
        ConfigError: If it is none that can be simulated, or would lose its rounds.
    """
    run, wall_s = simulate_whole(config, plan, assumed)
    assert assumed.links is not None, "nothing is predicted without links"
    islands = {
        name: IslandPrediction(
            step_s=assumed.step_s[name],
            link=assumed.links[name].name,
            utilisation=figures.utilisation,
            blocked_s=figures.blocked_s_per_round,
            mean_up_bps=8 * figures.bytes_up / figures.wall_s,
            mean_down_bps=8 * figures.bytes_down / figures.wall_s,
            peak_up_bps=assumed.links[name].up.bandwidth_bps,
            peak_down_bps=assumed.links[name].down.bandwidth_bps,
        )
        for name, figures in run.steady.items()
    }
    return Prediction(
        wall_s=wall_s,
        utilisation=run.utilisation,
        round_s=run.seconds_per_round,
        enough_bps=enough_bandwidth(config, plan, assumed),
        islands=islands,
        syncers=_syncers(config, plan, assumed, run, islands),
        run=run,
    )


def simulate_whole(
    config: Config, plan: Plan, assumed: Assumptions, most_rounds: int = 0
) -> tuple[SimulatedRun, float]:
    """Simulate a run, of a long one some rounds and the end; returns it and the run's seconds.

    Rounds that grow are simulated by themselves, and what is returned is of those that do not.

    Args:
        config: The run.
        plan: Its fragments.
        assumed: Inputs.
        most_rounds: That are simulated; 0: as many as it takes to be steady.

    Raises:
        ConfigError: If it is none that can be simulated, or would lose its rounds.
    """
    period, inner_steps = config.outer.inner_steps_per_round, config.run.inner_steps
    grown = grown_steps(period, config.outer.first_inner_steps_per_round)
    if 0 < grown < inner_steps:
        steady = _steady(config, inner_steps - grown, period)
        run, wall_s = simulate_whole(steady, plan, assumed, most_rounds)
        return run, wall_s + _growing_s(config, plan, assumed)
    rounds, warm_up = _length(config)
    left_out = 0 if grown else max(0, inner_steps // period - (most_rounds or rounds))
    shown = config.run.model_copy(update={"inner_steps": inner_steps - left_out * period})
    run = _simulate(config.model_copy(update={"run": shown}), plan, assumed, warm_up_rounds=warm_up)
    if not left_out:
        return run, run.wall_s
    round_s = run.seconds_per_round
    if config.outer.is_on_arrival:
        round_s = _counted_s(config, run) or run.wall_s * period / shown.inner_steps
    return run, run.wall_s + left_out * round_s


def _steady(config: Config, inner_steps: int, period: int) -> Config:
    """Give a run of so many inner steps, all rounds of which have as many."""
    outer: dict[str, object] = {
        "inner_steps_per_round": period,
        "first_inner_steps_per_round": 0,
    }
    if period != config.outer.inner_steps_per_round:
        outer["phases"] = ()
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"inner_steps": inner_steps}),
            "outer": config.outer.model_copy(update=outer),
        }
    )


def _growing_s(config: Config, plan: Plan, assumed: Assumptions) -> float:
    """Give the seconds of the rounds that grow, from those of some lengths of rounds."""
    lengths = range(config.outer.first_inner_steps_per_round, config.outer.inner_steps_per_round)
    shown = sorted({lengths[len(lengths) * i // _LENGTHS] for i in range(_LENGTHS)} | {lengths[-1]})
    seconds = []
    for length in shown:
        steady = _steady(config, _FEW * length, length)
        run, _ = simulate_whole(steady, plan, assumed, _FEW)
        round_s = _counted_s(steady, run) if config.outer.is_on_arrival else run.seconds_per_round
        seconds.append(round_s or run.wall_s / _FEW)
    return float(np.interp(lengths, shown, seconds).sum())


def _simulate(
    config: Config, plan: Plan, assumed: Assumptions, *, warm_up_rounds: int
) -> SimulatedRun:
    run = simulate_run(
        config,
        step_s=assumed.step_s,
        links=assumed.links,
        costs=assumed.costs,
        syncer_link=assumed.syncer_link,
        tcp=assumed.tcp,
        plan=plan,
        syncer_threads=assumed.syncer_threads,
        warm_up_rounds=warm_up_rounds,
    )
    if run.lost:
        raise ConfigError(
            f"this run would not get through on these links: {run.lost}; raise "
            f"outer.round_deadline = {config.outer.round_deadline}, or send less "
            f"(outer.uplink_codec, outer.inner_steps_per_round)"
        )
    return run


def _length(config: Config) -> tuple[int, int]:
    """Return how many rounds of a long run are simulated, and how many of them warm up."""
    if config.outer.is_on_arrival:
        return _ON_ARRIVAL
    schedule = build_schedule(config.outer, config.run.inner_steps)
    return _ONE_AT_A_TIME if schedule.is_one_at_a_time else _SEVERAL


def _counted_s(config: Config, run: SimulatedRun) -> float:
    """Give the seconds in which the tokens of H inner steps of every island are counted.

    All fragments count all tokens, each in rounds of its own: a mean over them, of the second half
    of the time, as the first rounds are slower. 0: too little was published to know it.
    """
    seconds, tokens = 0.0, 0
    published: dict[int, Publication] = {}
    for each in run.publications:
        if each.is_flush or each.published_s < run.wall_s / 2:
            continue
        if before := published.get(each.fragment_id):
            seconds += each.published_s - before.published_s
            tokens += each.tokens
        published[each.fragment_id] = each
    of_step = sum(island.tokens_per_inner_step for island in config.islands.values())
    return config.outer.inner_steps_per_round * of_step * seconds / tokens if tokens else 0.0


def enough_bandwidth(config: Config, plan: Plan, assumed: Assumptions) -> float | None:
    """Find the bandwidth of all, each way, with which the slowest island trains 99 % of the time.

    Returns:
        Bits a second, within 0.5 %; None: there is none, whatever the bandwidth; or nobody waits
        for a link at all (`outer.merge = "on_arrival"`), so that any is enough for that.
    """
    if config.outer.is_on_arrival:
        return None

    outer, inner_steps = config.outer, config.run.inner_steps
    grown = grown_steps(outer.inner_steps_per_round, outer.first_inner_steps_per_round)
    steady = inner_steps - grown if grown < inner_steps else inner_steps
    config = _steady(config, steady, outer.inner_steps_per_round)
    trained_s = outer.inner_steps_per_round * max(assumed.step_s.values())
    sizes = fragment_sizes(config, plan)
    bits = 8 * max(sum(size.bytes_up for size in sizes), sum(size.bytes_down for size in sizes))

    def share(bandwidth_bps: float) -> float:
        assert assumed.links is not None, "nothing is predicted without links"
        links = {name: at_bandwidth(each, bandwidth_bps) for name, each in assumed.links.items()}
        try:
            run, _ = simulate_whole(config, plan, replace(assumed, links=links), _FEW)
        except ConfigError:  # too thin for its deadlines
            return 0.0
        return trained_s / run.seconds_per_round

    # A line that carries a round's bits in less than a round; few rounds would not see it fill.
    return needed_bps(share, ENOUGH, least_bps=ENOUGH * bits / trained_s)


def _syncers(
    config: Config,
    plan: Plan,
    assumed: Assumptions,
    run: SimulatedRun,
    islands: Mapping[str, IslandPrediction],
) -> tuple[SyncerPrediction, ...]:
    sizes = fragment_sizes(config, plan)
    total_up, total_down = (sum(s.bytes_up for s in sizes), sum(s.bytes_down for s in sizes))
    # On arrival the fastest island opens rounds, else all wait for the slowest.
    step_s = (min if config.outer.is_on_arrival else max)(assumed.step_s.values())
    trained_s = config.outer.inner_steps_per_round * step_s
    round_s = trained_s if config.outer.is_on_arrival else run.seconds_per_round
    by_bucket = config.transport.payloads == "bucket"
    in_bps = sum(each.mean_up_bps for each in islands.values())
    out_bps = (max if by_bucket else sum)([each.mean_down_bps for each in islands.values()])
    peaks_down = [each.peak_down_bps for each in islands.values()]
    found = []
    for syncer_id, own in enumerate(assign_fragments(plan, config.shares)):
        parameters = sum(plan.fragments[p].numel for p in own)
        disk = forecast_disk(config, parameters)
        share_up = sum(sizes[p].bytes_up for p in own) / total_up
        share_down = sum(sizes[p].bytes_down for p in own) / total_down
        found.append(
            SyncerPrediction(
                syncer_id=syncer_id,
                name=list(config.syncer_shares)[syncer_id],
                fragment_ids=own,
                busy=_merging_s(run, own, assumed.costs.commit_round_s) / trained_s,
                memory_bytes=syncer_memory(config, plan, own),
                store_bytes=disk.store_bytes,
                written_bytes_per_s=(written := disk.written_bytes / round_s),
                stored_bytes_per_s=max(0.0, written - by_bucket * share_up * in_bps / 8)
                if config.run.state
                else 0.0,
                mean_in_bps=share_up * in_bps,
                mean_out_bps=share_down * out_bps,
                peak_in_bps=_shared(assumed, [i.peak_up_bps for i in islands.values()], is_in=True),
                peak_out_bps=_shared(
                    assumed, [max(peaks_down)] if by_bucket else peaks_down, is_in=False
                ),
            )
        )
    return tuple(found)


def _merging_s(run: SimulatedRun, own: Sequence[int], flush_s: float) -> float:
    """Return the seconds of work in which a syncer merges each of its fragments once.

    Each merge ends with flushes of the disk, for which no core works: they take `flush_s`.
    """
    seconds = 0.0
    for p in own:
        # Islands merge versions, too: those spans bear their names.
        merged = [
            s.end_s - s.begin_s - flush_s
            for s in run.spans
            if s.kind == "merge" and s.fragment == p and s.island not in run.whole
        ]
        seconds += sum(merged) / max(len(merged), 1)
    return seconds


def _shared(assumed: Assumptions, rates_bps: Sequence[float], *, is_in: bool) -> float:
    """Add up what arrives or leaves at once, at most what a shared line carries."""
    line = assumed.syncer_link
    most = math.inf if line is None else (line.down if is_in else line.up).bandwidth_bps
    return min(sum(rates_bps), most)


def syncer_memory(config: Config, plan: Plan, own: Sequence[int]) -> int:
    """Bound the bytes of a syncer with these fragments; see the module's formula."""
    outer, sizes = config.outer, fragment_sizes(config, plan)
    second = _SECOND_MOMENT_BYTES if outer.optimizer.name == "adam" else 0
    state = (_STATE_BYTES + second) * sum(plan.fragments[p].padded_numel for p in own)
    largest = max(own, key=lambda p: sizes[p].numel)
    period = outer.first_inner_steps_per_round or outer.inner_steps_per_round
    under_way = 1 + outer.overlap_steps * outer.num_fragments // period
    at_once = min(len(own), under_way) * len(config.islands) * sizes[largest].bytes_up
    held = 2 * min(config.coordinator.spool_memory.num_bytes, at_once)
    return state + round(_EXTRA * _STATE_BYTES * sizes[largest].numel + held)
