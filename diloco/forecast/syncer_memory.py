"""Forecasts the memory of a syncer, from configuration and plan, and bounds it.

Of each of its parameters, and of the values n of its largest fragment:

    state       12         theta, published, momentum; 16 with outer Adam
    payloads    wire       what is published of the newest version
    arrived     uplink     of every island, in coordinator.spool_memory at most
    arriving    uplink     as much again, or 64 MiB
    a merge     (4 + wire) n    next published values and their payload, for each merge at once
                           and what the guard samples of all contributions, 64 MiB at most
    lanes       12 n       decoded, summed and changed: of lanes that threads have in hand at once;
                           where angles decide, parts of all contributions to a lane if that is
                           more: 16 MiB, and a tile of each

Merges at once are as many as cores allow, and as fit in what is available besides the rest. Without
the interpreter, its libraries, and what gRPC reads ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diloco.checkpoint.host_memory import check_memory
from diloco.config.schema import Config
from diloco.forecast.disk import payload_bytes
from diloco.outer.assignment import assign_fragments
from diloco.outer.combination import MergeRule
from diloco.outer.fragments import Fragment, Plan
from diloco.outer.guard import samples_bytes
from diloco.syncer.spool import LEAST_ARRIVING_BYTES

#: Lanes of a merge keep so many cores busy, at least while others wait for the disk.
_CORES_OF_A_MERGE = 4
_LANE_BYTES = 12


@dataclass(frozen=True, slots=True)
class SyncerMemory:
    """Bytes of one syncer: `lasting_bytes` whatever it does, `merge_bytes` for a merge at once."""

    lasting_bytes: int
    merge_bytes: int

    @property
    def least_bytes(self) -> int:
        """With which it can serve: one fragment after the other is merged."""
        return self.lasting_bytes + self.merge_bytes

    def merges_at_once(self, num_threads: int, available_bytes: int | None) -> int:
        """Bound merges at once by cores and by memory; one is always made.

        Args:
            num_threads: That merge lanes.
            available_bytes: Of the host, before the syncer has taken anything; None: not known.
        """
        most = max(1, num_threads // _CORES_OF_A_MERGE)
        if available_bytes is None:
            return most
        return max(1, min(most, (available_bytes - self.lasting_bytes) // self.merge_bytes))


def syncer_memory(config: Config, fragments: Sequence[Fragment]) -> SyncerMemory:
    """Foresee what the syncer of these fragments takes."""
    outer = config.outer
    uplink, downlink = payload_bytes(outer.uplink_codec), payload_bytes(outer.downlink_codec)
    num_values = sum(fragment.padded_numel for fragment in fragments)
    largest = max(fragment.padded_numel for fragment in fragments)
    coded = round(config.max_islands * uplink * num_values)
    spool_bytes = config.coordinator.spool_memory.num_bytes
    spooled = min(coded, spool_bytes) + min(coded, max(spool_bytes, LEAST_ARRIVING_BYTES))
    state = 16 if outer.optimizer.name == "adam" else 12
    sampled = samples_bytes(largest, config.max_islands) if outer.guard else 0
    lanes = max(_lanes_bytes(config, fragment) for fragment in fragments)
    return SyncerMemory(
        lasting_bytes=round(num_values * (state + downlink)) + spooled + lanes,
        merge_bytes=round((4 + downlink) * largest) + sampled,
    )


def _lanes_bytes(config: Config, fragment: Fragment) -> int:
    """Foresee what all lanes of a fragment take that are merged at once."""
    if not MergeRule(config.outer.merge_rule).is_by_unit(is_flush=False):
        return _LANE_BYTES * fragment.padded_numel
    from diloco.outer.aggregate import products_bytes  # torch, which no start waits for

    return sum(
        max(_LANE_BYTES * lane.numel, products_bytes(lane.numel, config.max_islands))
        for lane in fragment.lanes
    )


def check_syncer_memory(config: Config, plan: Plan, syncer_id: int) -> None:
    """Refuse to begin a run whose syncers do not fit into this host: all, or one that is alone.

    Args:
        config: The run.
        plan: Its plan.
        syncer_id: Of the one that asks; it is alone on a machine of its own.

    Raises:
        ConfigError: With what they take, and what there is.
    """
    assigned = assign_fragments(plan, config.shares)
    parts = [[plan.fragments[p] for p in own] for own in assigned]
    if config.syncers:
        parts = [parts[syncer_id]]
    check_memory(
        f"coordinator.spool_memory = {config.coordinator.spool_memory}",
        "the state, contributions and one merge of each syncer",
        sum(syncer_memory(config, part).least_bytes for part in parts),
        "give it less, or start the coordinator, whose syncers share its host, where there is more"
        if not config.syncers
        else "give it less memory, a smaller share, or a machine with more",
    )
