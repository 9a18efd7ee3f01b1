"""Forecasts a run from its configuration alone: fragments, schedule, traffic. No network.

bytes a round    every fragment once, up and down, in the run's codecs, without headers
bytes a run      by the schedule, flush included
disk             checkpoints of the islands, records of the syncer (`diloco.forecast.disk`)
host memory      copies of an island's inner states, for each of the hosts that keep one
                 (`diloco.checkpoint.host_memory`)
ranks            device and host memory, operations (`diloco.forecast.rank_memory`)
syncers          host memory (`diloco.forecast.syncer_memory`), disk
alternatives     the same schedule in float32; data parallel at every inner step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from diloco.checkpoint.host_memory import kept_bytes
from diloco.config.classes import fingerprint
from diloco.config.schema import Config
from diloco.forecast.build import link_profile
from diloco.forecast.disk import DiskForecast, forecast_disk
from diloco.forecast.rank_memory import RankForecast, forecast_rank
from diloco.forecast.syncer_memory import syncer_memory
from diloco.forecast.traffic import (
    Traffic,
    data_parallel_traffic,
    diloco_traffic,
    fragment_bytes,
)
from diloco.island.lanes.parameters import canonical_parameters, tensor_specs
from diloco.island.layout import build_plan, build_schedule
from diloco.outer.assignment import assign_fragments
from diloco.outer.fragments import Fragment, Plan
from diloco.outer.schedule import Schedule, num_rounds
from diloco.trainer.models.families import build_model, check_mesh, check_optimizer_names, shape_of
from diloco.transport.shaping.link import LinkProfile


@dataclass(frozen=True, slots=True)
class FragmentForecast:
    """One fragment: what it holds, and what one island moves for one round of it."""

    fragment_id: int
    tensors: tuple[str, ...]
    parameters: int
    lanes: int
    bytes_up: int
    bytes_down: int
    float32_bytes: int


@dataclass(frozen=True, slots=True)
class SendForecast:
    """Fragments sent after one inner step, and the inner step after which they are merged."""

    inner_step: int
    fragment_ids: tuple[int, ...]
    merge_step: int


@dataclass(frozen=True, slots=True)
class ArrivalForecast:
    """A run without a schedule, which tokens end.

    `rounds` are those of each fragment, if every one counts all islands and these are equally fast.
    `exchange_s` is the least that a contribution and its version take on the configured link, of
    the largest fragment; None without a link profile. `least_step_s`: a grace of auto is 0 where
    inner steps of the slowest island are shorter; None: it is not auto, or there is no link.
    """

    total_tokens: int
    rounds: int
    grace: str
    overlap_steps: int
    exchange_s: float | None
    least_step_s: float | None


@dataclass(frozen=True, slots=True)
class DirectionForecast:
    """A way of training: payload bytes of one island over the run.

    `transfer_s` is what they take on the configured link, one after the other and nothing
    overlapped; None without a link profile. `times` is the traffic divided by the run's own.
    """

    name: str
    bytes_up: int
    bytes_down: int
    transfers: int
    transfer_s: float | None
    times: float


@dataclass(frozen=True, slots=True)
class SyncerForecast:
    """One syncer: its fragments, their parameters, and what it takes at most.

    `store_bytes` are on disk; `memory_bytes` of its host, with one fragment merged at a time, and
    `merge_bytes` more for each that is merged meanwhile.
    """

    syncer_id: int
    name: str
    fragment_ids: tuple[int, ...]
    parameters: int
    store_bytes: int
    memory_bytes: int
    merge_bytes: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """A run before it starts.

    `sends` lists the first two periods and the last one; it is empty, and `arrival` given, where
    islands send on arrival. `num_sends` and `ways`, which begins with the run itself, are then
    those of the average island.
    `ranks` has of every island the rank that takes most memory, `per_host` how many a host has.
    `kept_bytes` is what the islands that copy their inner states take of host memory, for each of
    their hosts that keeps a copy; `copied_bytes` what a checkpoint behind the training takes of an
    island's hosts together, 0 where there is none.
    """

    run: str
    config_fingerprint: str
    plan_fingerprint: str
    inner_steps: int
    inner_steps_per_round: int
    is_flushed: bool
    tokens: dict[str, int]
    fragments: tuple[FragmentForecast, ...]
    sends: tuple[SendForecast, ...]
    num_sends: int
    round_bytes_up: int
    round_bytes_down: int
    link: str
    directions: tuple[DirectionForecast, ...]
    disk: DiskForecast
    kept_bytes: dict[str, int]
    copied_bytes: dict[str, int]
    ranks: dict[str, RankForecast]
    per_host: dict[str, int]
    syncers: tuple[SyncerForecast, ...]
    arrival: ArrivalForecast | None

    @property
    def parameters(self) -> int:
        """Trained parameters."""
        return sum(fragment.parameters for fragment in self.fragments)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {**asdict(self), "parameters": self.parameters}


def forecast(config: Config, ranks_per_host: dict[str, int] | None = None) -> Forecast:
    """Plan a run; allocates no parameter.

    `ranks_per_host` are those of every island; None: as usual.

    Raises:
        ConfigError: If the model cannot be cut as `outer` says, or be spread over a mesh, or there
            is no such link profile.
    """
    model = build_model(shape_of(config.model))
    for island in config.islands.values():
        check_mesh(model.shape, island.mesh)
    check_optimizer_names(model.shape, config.inner.optimizer)
    plan = build_plan(config.outer, tensor_specs(canonical_parameters(model)))
    schedule = build_schedule(config.outer, config.run.inner_steps)
    link = link_profile(config)
    fragments = tuple(_fragment(config, plan, fragment) for fragment in plan.fragments)
    largest = max(each.parameters for each in fragments)
    num_lanes = sum(len(fragment.lanes) for fragment in plan.fragments)
    per_host = ranks_per_host or {n: each.usual_per_host for n, each in config.islands.items()}
    ranks = {
        name: forecast_rank(config, island, largest, per_host=per_host[name], num_lanes=num_lanes)
        for name, island in sorted(config.islands.items())
    }
    return Forecast(
        run=config.run.name,
        config_fingerprint=fingerprint(config),
        plan_fingerprint=plan.fingerprint(),
        inner_steps=config.run.inner_steps,
        inner_steps_per_round=schedule.inner_steps_per_round,
        is_flushed=schedule.flush,
        tokens={
            name: island.tokens_per_inner_step * config.run.inner_steps
            for name, island in sorted(config.islands.items())
        },
        fragments=fragments,
        sends=() if config.outer.is_on_arrival else _shown_sends(schedule),
        num_sends=sum(map(schedule.num_sends, range(schedule.num_fragments))),
        round_bytes_up=sum(fragment.bytes_up for fragment in fragments),
        round_bytes_down=sum(fragment.bytes_down for fragment in fragments),
        link=link.name if link is not None else "",
        directions=_directions(config, plan, schedule, link),
        disk=forecast_disk(config, sum(fragment.parameters for fragment in fragments)),
        kept_bytes={
            name: kept_bytes(sum(fragment.parameters for fragment in fragments))
            for name, island in sorted(config.islands.items())
            if island.memory_checkpoint_steps
        },
        copied_bytes={
            name: rank.checkpoint_copy_bytes * island.ranks // island.mesh.dp_replicate
            for name, rank in ranks.items()
            for island in (config.islands[name],)
        },
        ranks=ranks,
        per_host=per_host,
        syncers=_syncers(config, plan),
        arrival=_arrival(config, fragments, link) if config.outer.is_on_arrival else None,
    )


def forecast_syncers(config: Config) -> tuple[SyncerForecast, ...]:
    """Foresee what each syncer of a run takes; allocates no parameter.

    Raises:
        ConfigError: If the model cannot be cut as `outer` says.
    """
    model = build_model(shape_of(config.model))
    return _syncers(config, build_plan(config.outer, tensor_specs(canonical_parameters(model))))


def _arrival(
    config: Config, fragments: Sequence[FragmentForecast], link: LinkProfile | None
) -> ArrivalForecast:
    outer = config.outer
    exchange_s = least_step_s = None
    if link is not None:
        exchange_s = max(
            8 * part.bytes_up / link.up.bandwidth_bps
            + 8 * part.bytes_down / link.down.bandwidth_bps
            for part in fragments
        ) + 2 * (link.up.delay_s + link.down.delay_s)
        if outer.grace == "auto" and outer.overlap_steps:
            least_step_s = exchange_s / outer.overlap_steps
    return ArrivalForecast(
        total_tokens=config.total_tokens,
        rounds=num_rounds(
            config.run.inner_steps, outer.inner_steps_per_round, outer.first_inner_steps_per_round
        ),
        grace=outer.grace,
        overlap_steps=outer.overlap_steps,
        exchange_s=exchange_s,
        least_step_s=least_step_s,
    )


def _syncers(config: Config, plan: Plan) -> tuple[SyncerForecast, ...]:
    """Foresee who has which fragments."""
    syncers = []
    for syncer_id, own in enumerate(assign_fragments(plan, config.shares)):
        parameters = sum(plan.fragments[p].numel for p in own)
        store_bytes = forecast_disk(config, parameters).store_bytes
        memory = syncer_memory(config, [plan.fragments[p] for p in own])
        syncers.append(
            SyncerForecast(
                syncer_id,
                list(config.syncer_shares)[syncer_id],
                own,
                parameters,
                store_bytes,
                memory.least_bytes,
                memory.merge_bytes,
            )
        )
    return tuple(syncers)


def _fragment(config: Config, plan: Plan, fragment: Fragment) -> FragmentForecast:
    p, up, down = fragment.fragment_id, config.outer.uplink, config.outer.downlink
    return FragmentForecast(
        fragment_id=p,
        tensors=tuple(entry.name for entry in fragment.entries),
        parameters=fragment.numel,
        lanes=len(fragment.lanes),
        bytes_up=fragment_bytes(plan, p, up),
        bytes_down=fragment_bytes(plan, p, down),
        float32_bytes=fragment_bytes(plan, p, "float32"),
    )


def _shown_sends(schedule: Schedule) -> tuple[SendForecast, ...]:
    """List the sends of the first two periods and of the last one, however long the run is."""
    steps: set[int] = set()
    for p in range(schedule.num_fragments):
        first = schedule.next_due(p, 0)
        second = None if first is None else schedule.next_due(p, first)
        steps.update(step for step in (first, second, schedule.last_due(p)) if step is not None)
    return tuple(
        SendForecast(step, schedule.due(step), schedule.merge_step(step)) for step in sorted(steps)
    )


def _directions(
    config: Config, plan: Plan, schedule: Schedule, link: LinkProfile | None
) -> tuple[DirectionForecast, ...]:
    up, down = config.outer.uplink, config.outer.downlink
    traffics = {
        "this run": diloco_traffic(plan, schedule, uplink_codec=up, downlink_codec=down),
        "float32 DiLoCo": diloco_traffic(
            plan, schedule, uplink_codec="float32", downlink_codec="float32"
        ),
        "data parallel": data_parallel_traffic(plan, schedule.inner_steps),
    }
    own = _bytes(traffics["this run"])
    return tuple(
        DirectionForecast(
            name=name,
            bytes_up=traffic.bytes_up,
            bytes_down=traffic.bytes_down,
            transfers=traffic.transfers,
            transfer_s=traffic.transfer_s(link) if link is not None else None,
            times=_bytes(traffic) / own if own else 0.0,
        )
        for name, traffic in traffics.items()
    )


def _bytes(traffic: Traffic) -> int:
    return traffic.bytes_up + traffic.bytes_down
