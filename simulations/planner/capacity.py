"""Whether syncers can do what a run asks of them; what cannot be is refused with the remedy.

Syncers run on the coordinator's machine. One merges its fragments one after the other, so that
several, each with fragments of its own (`coordinator.num_syncers`), use several cores; memory,
disk and network card are the machine's, and all syncers together take as much as one would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diloco.config.network import MOST_SYNCERS
from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.outer.assignment import assign_fragments
from diloco.simulations.planner.assumptions import parsed, positive_bytes
from diloco.simulations.planner.prediction import SyncerPrediction
from diloco.simulations.runs.run_model import run_plan
from diloco.transport.units import format_bandwidth, format_bytes, parse_bandwidth


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the machine of the syncers has; 0: not told, so nothing is refused for want of it."""

    cores: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    network_bps: float = 0.0

    @classmethod
    def read(cls, cores: int, memory: str, disk: str, network: str) -> Capacity:
        """Read it from what options say; empty: not told.

        Raises:
            ConfigError: Naming the option that cannot be read.
        """
        return cls(
            cores,
            parsed("--syncer-memory", memory, positive_bytes) if memory else 0,
            parsed("--syncer-disk", disk, positive_bytes) if disk else 0,
            parsed("--syncer-network", network, parse_bandwidth) if network else 0.0,
        )


def check_capacity(config: Config, syncers: Sequence[SyncerPrediction], capacity: Capacity) -> None:
    """Refuse syncers that would be overloaded.

    Raises:
        ConfigError: Naming what is short, `coordinator.num_syncers` and what to change.
    """
    fullest = max(syncers, key=lambda each: each.cores)
    number = config.coordinator.num_syncers
    if fullest.cores > 1:
        raise ConfigError(
            f"coordinator.num_syncers = {number}: syncer {fullest.syncer_id} would merge for "
            f"{fullest.cores:.2f} s of every second, so that rounds pile up; "
            f"{_remedy(config, syncers)}"
        )
    cores = sum(each.cores for each in syncers)
    memory = sum(each.memory_bytes for each in syncers)
    disk = sum(each.store_bytes for each in syncers)
    in_bps, out_bps = (
        sum(each.mean_in_bps for each in syncers),
        sum(each.mean_out_bps for each in syncers),
    )
    shared = "all of them share that machine, so another number of them takes as much"
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
                f"coordinator.num_syncers = {number}: together they take {shown[0]}, and {option} "
                f"says {shown[1]}; {shared}: {remedy}"
            )
    if capacity.network_bps and (most := max(in_bps, out_bps)) > capacity.network_bps:
        raise ConfigError(
            f"coordinator.num_syncers = {number}: together they move {format_bandwidth(most)} on "
            f"average, and --syncer-network says {format_bandwidth(capacity.network_bps)}; "
            f'{shared}: set outer.uplink_codec and outer.downlink_codec = "int4", raise '
            f"outer.inner_steps_per_round, or take a faster card"
        )


def _remedy(config: Config, syncers: Sequence[SyncerPrediction]) -> str:
    """Find the smallest number of syncers that is enough."""
    plan = run_plan(config)
    per_value = sum(each.cores for each in syncers) / sum(f.padded_numel for f in plan.fragments)
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
    total = sum(each.cores for each in syncers)
    return (
        f"coordinator.num_syncers is at most outer.num_fragments = {len(plan.fragments)} and "
        f"{MOST_SYNCERS}, which is not enough: raise outer.num_fragments, or "
        f"outer.inner_steps_per_round = {period} to about {round(period * total) + 1}"
    )
