"""One member of a baseline that uses plain process groups only: all members are one job.

Does what a cluster's own data parallelism does, with the chunks and the pipeline of
`BaselineSite`, over gloo on CPUs or over NCCL with a CUDA device for each member. Nothing is
served, shaped, encrypted or authenticated.
See `diloco.baseline.hops`.
"""

from __future__ import annotations

import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from diloco.baseline.hops import GroupHop
from diloco.baseline.reduction import GradientReduction, HierarchicalReduction, Inside
from diloco.baseline.site import FLOAT_BYTES, Channel, SiteOrder
from diloco.compression.registry import get_codec
from diloco.launch.rank.device import backend_of
from diloco.launch.rank.job import Job, meet
from diloco.transport.addresses import split_address


class GroupSite:
    """One member, open; it ends with its process."""

    def __init__(self, order: SiteOrder, channel: Channel, device: torch.device) -> None:
        """Say where the first member's store is, and meet all others there.

        Args:
            order: What this member is; its `streams` are of a transport.
            channel: To the parent.
            device: That its values are on, which says the backend.
        """
        self.place, self.order = order.place, order
        members = self.place.members
        index, (host, _) = members.index(self.place.own), split_address(order.bind)
        listener = socket.create_server((host, 0)) if index == 0 else None
        store = f"tcp://{host}:{listener.getsockname()[1]}" if listener else ""
        channel.say({"store": store})
        (store,) = (place["store"] for place in channel.hear() if place["store"])
        served = f"?descriptor={listener.detach()}" if listener else ""
        meet(Job(index, len(members), store + served), backend_of(device))
        self._inside: Inside | None = None
        self._hop: GroupHop | None = None
        if dist.is_initialized():
            self._make_groups()

    def reduction(self, chunk_bytes: int, *, only_inside: bool = False) -> GradientReduction:
        """See `BaselineSite.reduction`."""
        hop = None if only_inside else self._hop
        return HierarchicalReduction(self.place, hop, self._inside, chunk_bytes // FLOAT_BYTES)

    @property
    def bytes_up(self) -> int:
        """Payloads sent to other islands."""
        return self._hop.bytes_up if self._hop else 0

    @property
    def bytes_down(self) -> int:
        """Payloads that came from other islands."""
        return self._hop.bytes_down if self._hop else 0

    def close(self) -> None:
        """Leave, once all members have what they need of this one."""
        if dist.is_initialized():
            dist.barrier()

    def _make_groups(self) -> None:
        """Join the ranks of every island twice, and of every column; each member makes them all."""
        place, own = self.place, self.place.own
        number = {member: index for index, member in enumerate(place.members)}
        timeout = timedelta(seconds=self.order.bounds.silence_s)
        for island in sorted(place.islands):
            ranks = [number[member] for member in place.members if member.island == island]
            scatter, gather = (dist.new_group(ranks, timeout=timeout) for _ in range(2))
            if island == own.island and len(ranks) > 1:
                self._inside = Inside(scatter, gather)
        for island_rank in range(place.num_ranks):
            ranks = [number[m] for m in place.members if m.island_rank == island_rank]
            column = dist.new_group(ranks, timeout=timeout)
            if island_rank == own.island_rank and len(ranks) > 1:
                self._hop = GroupHop(place, column, get_codec(self.order.codec))
