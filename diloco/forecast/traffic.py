"""Bytes an island moves over its link, counted from the plan: for planning and for comparison.

    DiLoCo           every contribution up and every published version down, one a send
    data parallel    a float32 gradient up and the average down at every inner step

Both are counted through a star, in payload bytes; a transfer's time is the slower direction at the
link's bandwidth plus a round trip, nothing overlapped with training.
"""

from __future__ import annotations

from dataclasses import dataclass

from diloco.compression.lanes import lane_codec
from diloco.outer.fragments import Plan
from diloco.outer.schedule import Schedule
from diloco.transport.shaping.link import LinkProfile


@dataclass(frozen=True, slots=True)
class Traffic:
    """Payload bytes of one island over a run, in `transfers` exchanges one after the other."""

    bytes_up: int
    bytes_down: int
    transfers: int

    def transfer_s(self, link: LinkProfile) -> float:
        """Seconds that all transfers take on an otherwise idle link."""
        up_s = 8 * self.bytes_up / link.up.bandwidth_bps
        down_s = 8 * self.bytes_down / link.down.bandwidth_bps
        return max(up_s, down_s) + self.transfers * (link.up.delay_s + link.down.delay_s)


def diloco_traffic(
    plan: Plan, schedule: Schedule, *, uplink_codec: str, downlink_codec: str, start_step: int = 0
) -> Traffic:
    """Count a run's contributions and publications; a flush is published in float32.

    `start_step` is the inner step at which the run started: above 0 after a warm start.
    """
    up = down = transfers = 0
    for fragment in plan.fragments:
        p = fragment.fragment_id
        num_sends = schedule.num_sends(p, start_step)
        up += fragment_bytes(plan, p, uplink_codec) * (num_sends + schedule.flush)
        down += fragment_bytes(plan, p, downlink_codec) * num_sends
        down += fragment_bytes(plan, p, "float32") * schedule.flush
        transfers += num_sends + schedule.flush
    return Traffic(up, down, transfers)


def data_parallel_traffic(plan: Plan, inner_steps: int) -> Traffic:
    """Count one float32 all-reduce of the whole gradient at every inner step."""
    num_bytes = 4 * sum(fragment.numel for fragment in plan.fragments) * inner_steps
    return Traffic(num_bytes, num_bytes, inner_steps)


def fragment_bytes(plan: Plan, fragment_id: int, codec: str) -> int:
    """Payload bytes of one fragment, all lanes together."""
    fragment = plan.fragments[fragment_id]
    return sum(
        lane_codec(codec, fragment, lane.lane_id).wire_bytes(lane.numel) for lane in fragment.lanes
    )
