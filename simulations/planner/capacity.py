"""Whether syncers can do what a run asks of them; what cannot be is refused with the remedy.

Syncers run on the coordinator's machine, or each on one of its own ([syncers.NAME]). One merges its
fragments one after the other, the lanes of each side by side on the cores that it has; memory, disk
and network card are the machine's, and all syncers of one machine together take as much as one
would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from diloco.config.network import MOST_SYNCERS
from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.forecast.disk import forecast_disk
from diloco.outer.assignment import assign_fragments
from diloco.simulations.planner.assumptions import Assumptions, parsed, positive_bytes
from diloco.simulations.planner.prediction import SyncerPrediction
from diloco.simulations.runs.run_model import run_plan
from diloco.transport.units import format_bandwidth, format_bytes, parse_bandwidth


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a machine of syncers has; 0: not told, so nothing is refused for want of it."""

    cores: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    network_bps: float = 0.0
    disk_bps: float = 0.0

    def threads(self, config: Config) -> int:
        """Give the threads with which each syncer merges: those of its machine, dealt evenly."""
        return max(1, self.cores // max(1, len(config.own_syncers)))

    def known_to(self, assumed: Assumptions, config: Config) -> Assumptions:
        """Return the inputs of a prediction with what is told of the syncers' machine."""
        costs = assumed.costs
        if self.disk_bps:
            commit_s = 8e-6 * forecast_disk(config, 10**6).record_bytes / self.disk_bps
            eager = costs.eager and replace(costs.eager, commit_s=commit_s)
            costs = replace(costs, commit_s=commit_s, eager=eager)
        return replace(assumed, costs=costs, syncer_threads=self.threads(config))

    @classmethod
    def read(
        cls, cores: int, memory: str, disk: str, network: str, disk_rate: str = ""
    ) -> Capacity:
        """Read it from what options say; empty: not told.

        Raises:
            ConfigError: Naming the option that cannot be read.
        """
        return cls(
            cores,
            parsed("--syncer-memory", memory, positive_bytes) if memory else 0,
            parsed("--syncer-disk", disk, positive_bytes) if disk else 0,
            parsed("--syncer-network", network, parse_bandwidth) if network else 0.0,
            parsed("--syncer-disk-rate", disk_rate, parse_bandwidth) if disk_rate else 0.0,
        )


def check_capacity(config: Config, syncers: Sequence[SyncerPrediction], capacity: Capacity) -> None:
    """Refuse syncers that would be overloaded.

    Raises:
        ConfigError: Naming what is short, `coordinator.num_syncers` and what to change.
    """
    fullest = max(syncers, key=lambda each: each.busy)
    if fullest.busy > 1:
        raise ConfigError(
            f"{_key(config)}: {fullest.name} would merge for "
            f"{fullest.busy:.2f} s of every second with {capacity.threads(config)} threads, so "
            f"that rounds pile up; {_remedy(config, syncers)}"
        )
    # Each has a machine of its own, or all have one.
    for machine in [[each] for each in syncers] if config.syncers else [syncers]:
        _check_machine(config, machine, capacity)


def _key(config: Config) -> str:
    """Name the setting that says how many syncers there are."""
    placed = ", ".join(f"[syncers.{name}]" for name in sorted(config.syncers))
    return placed or f"coordinator.num_syncers = {config.coordinator.num_syncers}"


def _check_machine(config: Config, syncers: Sequence[SyncerPrediction], capacity: Capacity) -> None:
    """Refuse what the machine of these syncers cannot hold."""
    cores = capacity.threads(config) * sum(each.busy for each in syncers)
    memory = sum(each.memory_bytes for each in syncers)
    disk = sum(each.store_bytes for each in syncers)
    in_bps, out_bps = (
        sum(each.mean_in_bps for each in syncers),
        sum(each.mean_out_bps + 8 * each.stored_bytes_per_s for each in syncers),
    )
    whose, shared = (
        ("together they", "all of them share that machine, so another number of them takes as much")
        if not config.syncers
        else (
            syncers[0].name,
            "lower its share (syncers.NAME.share), or add another syncer",
        )
    )
    does = "" if not config.syncers else "s"
    for option, needed, there, text, remedy in (
        ("--syncer-cores", cores, capacity.cores, "{:.2g} cores", "raise "
         "outer.inner_steps_per_round, or take a machine with more"),
        ("--syncer-memory", memory, capacity.memory_bytes, "", "lower coordinator.spool_memory or "
         "outer.num_lanes, or take a machine with more"),
        ("--syncer-disk", disk, capacity.disk_bytes, "", "raise "
         "outer.snapshot_rounds, lower outer.retained_versions, or take a larger disk"),
    ):  # fmt: skip
        if there and needed > there:
            shown = [text.format(n) if text else format_bytes(round(n)) for n in (needed, there)]
            raise ConfigError(
                f"{_key(config)}: {whose} take{does} {shown[0]}, and {option} says {shown[1]}; "
                f"{shared}: {remedy}"
            )
    if capacity.network_bps and (most := max(in_bps, out_bps)) > capacity.network_bps:
        raise ConfigError(
            f"{_key(config)}: {whose} move{does} {format_bandwidth(most)} on average, and "
            f"--syncer-network says {format_bandwidth(capacity.network_bps)}; "
            f'{shared}: set outer.uplink_codec and outer.downlink_codec = "int4", raise '
            f"outer.inner_steps_per_round, or take a faster card"
        )


def _remedy(config: Config, syncers: Sequence[SyncerPrediction]) -> str:
    """Find the smallest number of syncers that is enough."""
    if config.syncers:
        return (
            "take a machine with more cores (--syncer-cores), raise outer.snapshot_rounds, add a "
            "table [syncers.NAME], lower its share, or raise outer.inner_steps_per_round"
        )
    plan = run_plan(config)
    per_value = sum(each.busy for each in syncers) / sum(f.padded_numel for f in plan.fragments)
    for number in range(config.coordinator.num_syncers + 1, len(plan.fragments) + 1):
        if number > MOST_SYNCERS:
            break
        assigned = assign_fragments(plan, (1.0,) * number)
        loads = [per_value * sum(plan.fragments[p].padded_numel for p in own) for own in assigned]
        if max(loads) <= 1:
            return (
                f"set coordinator.num_syncers = {number} (--set coordinator.num_syncers={number})"
            )
    period = config.outer.inner_steps_per_round
    total = sum(each.busy for each in syncers)
    return (
        f"coordinator.num_syncers is at most outer.num_fragments = {len(plan.fragments)} and "
        f"{MOST_SYNCERS}, which is not enough: raise outer.num_fragments, or "
        f"outer.inner_steps_per_round = {period} to about {round(period * total) + 1}"
    )
