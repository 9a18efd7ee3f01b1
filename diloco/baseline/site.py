"""One member of a baseline: its server, connections, process groups and reductions.

The composition root of what `diloco.baseline` needs, for the trainer (`diloco.baseline.member`) and
for `diloco bench allreduce` alike.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import IO, Any, NoReturn

import torch
import torch.distributed as dist

from diloco.baseline.exchange import Bounds, ValueExchange
from diloco.baseline.group import BaselineGroup, BaselineMember
from diloco.baseline.hops import GroupHop, TransportHop
from diloco.baseline.reduction import (
    FlatReduction,
    GradientReduction,
    HierarchicalReduction,
    Inside,
)
from diloco.compression.registry import get_codec
from diloco.errors import DilocoError
from diloco.forecast.build import carrier_link
from diloco.io_thread import IoThread
from diloco.launch.process.ending import end_with_starter, exit_at_once
from diloco.launch.process.logs import log_to
from diloco.launch.rank.device import backend_of
from diloco.launch.rank.job import Job, meet
from diloco.security.access import guarded
from diloco.security.security import Security
from diloco.transport.addresses import split_address
from diloco.transport.calls.limits import Limits
from diloco.transport.contracts import Server, Transport
from diloco.transport.identity import Role
from diloco.transport.shaping.link import LinkProfile
from diloco.transport.shaping.shaped import ShapedTransport

logger = logging.getLogger(__name__)

#: Of the values that are reduced.
FLOAT_BYTES = 4
#: Members know each other, and each sends what the others wait for.
_LIMITS = Limits(calls_per_s=1e6, burst=1_000_000)


@dataclass(frozen=True, slots=True)
class SiteOrder:
    """The order that one member is started with; JSON values.

    Attributes:
        start: Drawn for all members together.
        island: Of this member.
        island_rank: Of this member.
        islands: Number of ranks by island.
        is_flat: Whether there is one ring through all ranks; else islands reduce first.
        codec: Of what crosses between islands (flat: all that the ring carries).
        chunks_bytes: Sizes of the chunks that will be asked for, of float32 values.
        streams: Vectors under way to one other member at once.
        bind: HOST:PORT to serve at.
        patience_s: Silence after which a member counts as gone.
        most_bytes: Of the largest vector that is reduced, for what may be waiting at once.
    """

    start: str
    island: str
    island_rank: int
    islands: Mapping[str, int]
    is_flat: bool
    codec: str
    chunks_bytes: Sequence[int]
    streams: int
    bind: str
    patience_s: float
    most_bytes: int

    @property
    def place(self) -> BaselineGroup:
        """This member among all."""
        return BaselineGroup(BaselineMember(self.island, self.island_rank), self.islands)

    @property
    def bounds(self) -> Bounds:
        """What it bears from others: parts of chunks, of two reductions at once."""
        place = self.place
        # A chunk is divided among all members, in whole values.
        largest = math.ceil(max(self.chunks_bytes) / FLOAT_BYTES / len(place.members))
        num_chunks = math.ceil(self.most_bytes / min(self.chunks_bytes))
        return Bounds(
            max_bytes=get_codec(self.codec).wire_bytes(largest),
            max_vectors=4 * num_chunks * len(place.members),
            patience_s=self.patience_s,
            streams=self.streams,
        )


class Channel:
    """Lines of JSON between a member and its parent."""

    def __init__(self) -> None:
        """Keep standard output for the lines; whatever else is printed goes to standard error."""
        self._out: IO[str] = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(self, message: Mapping[str, Any]) -> None:
        """Write one line."""
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()

    def hear(self) -> Any:
        """Read one line; from then on the end of standard input ends this process."""
        heard = json.loads(sys.stdin.buffer.readline())
        end_with_starter()
        return heard


def run_member(
    work: Callable[[dict[str, Any], Channel], Mapping[str, Any]], level: int = logging.WARNING
) -> NoReturn:
    """Be a rank that `BaselineProcesses` started: do `work`, say what it returns, and end.

    Args:
        work: Gets the order, and the channel to the process that gave it.
        level: Of what is logged.
    """
    log_to(None, level)
    torch.set_num_threads(1)
    channel, code = Channel(), 0
    try:
        channel.say(work(json.loads(sys.argv[1]), channel))
    except DilocoError as error:
        code = error.exit_code
        logger.error("rank stops, exit_code=%d: %s", code, error)
    except Exception:
        code = 1
        logger.exception("rank failed")
    exit_at_once(code)


def meet_others(
    channel: Channel,
    job: Job,
    host: str,
    *,
    island: str = "",
    address: str = "",
    backend: str = "gloo",
) -> list[dict[str, Any]]:
    """Say where this rank is, learn where all are, and make the default process group.

    Args:
        channel: To the parent.
        job: Which rank of how many; rank 0 serves the store.
        host: Of rank 0.
        island: Whose ranks are one job; empty: those of all islands.
        address: That others are to know of this rank.
        backend: Of the group.

    Returns:
        What every rank has said, with its `island` and `island_rank`.
    """
    listener = socket.create_server((host, 0)) if job.island_rank == 0 else None
    store = f"tcp://{host}:{listener.getsockname()[1]}" if listener else ""
    channel.say({"address": address, "store": store})
    places: list[dict[str, Any]] = channel.hear()
    store = next(p["store"] for p in places if p["store"] and island in ("", p["island"]))
    served = f"?descriptor={listener.detach()}" if listener else ""
    meet(replace(job, rendezvous=store + served), backend)
    return places


class BaselineSite:
    """One member, open; it ends with its process."""

    def __init__(
        self,
        order: SiteOrder,
        security: Security,
        profile: LinkProfile | None,
        channel: Channel,
        *,
        channels: int,
    ) -> None:
        """Serve, say where, and meet the others.

        Args:
            order: What this member is.
            security: What it shows and asks for.
            profile: That shapes what leaves the island; None: the real link.
            channel: To the parent.
            channels: Connections to one other member; 0: by the loss.
        """
        self.place, self.order = order.place, order
        self.io = IoThread()
        self.io.start()
        place = self.place
        self.exchange = ValueExchange(
            place.own, order.start, frozenset(place.members), order.bounds
        )
        self._security = security
        self._channels = channels
        server = security.server(order.bind, guarded(self.exchange.handlers), limits=_LIMITS)
        self.io.run(server.start())
        self._server: Server = server
        job, island = Job(place.own.island_rank, place.num_ranks, ""), place.own.island
        places = meet_others(channel, job, "127.0.0.1", island=island, address=server.address)
        addresses = {BaselineMember(p["island"], p["island_rank"]): p["address"] for p in places}
        self.exchange.connect(self._open_transports(addresses, profile))
        self._inside = self._groups()

    def reduction(self, chunk_bytes: int, *, only_inside: bool = False) -> GradientReduction:
        """Make what sums over all members, or over this island's ranks.

        Args:
            chunk_bytes: Of float32 values that are reduced at once; one of the order's.
            only_inside: Whether the other islands are left out; not of a flat ring.
        """
        order, place = self.order, self.place
        codec, chunk_numel = get_codec(order.codec), chunk_bytes // FLOAT_BYTES
        if order.is_flat:
            return FlatReduction(place, self.exchange, self.io, codec, chunk_numel)
        is_alone = only_inside or len(place.islands) == 1
        hop = None if is_alone else TransportHop(place, self.exchange, self.io, codec)
        return HierarchicalReduction(place, hop, self._inside, chunk_numel)

    @property
    def bytes_up(self) -> int:
        """Payloads sent to other islands."""
        return self.exchange.bytes_up

    @property
    def bytes_down(self) -> int:
        """Payloads that came from other islands."""
        return self.exchange.bytes_down

    def barrier(self) -> None:
        """Wait for the ranks of the island."""
        if dist.is_initialized():
            dist.barrier()

    def close(self) -> None:
        """Leave, once all members have what they need of this one."""
        self.barrier()
        self.io.run(self._server.stop(1.0))
        self.io.run(self.exchange.close())
        self.io.stop()

    def _groups(self) -> Inside | None:
        if not dist.is_initialized():
            return None
        timeout = timedelta(seconds=self.order.bounds.silence_s)
        scatter, gather = (dist.new_group(backend="gloo", timeout=timeout) for _ in range(2))
        return Inside(scatter, gather)

    def _open_transports(
        self, addresses: Mapping[BaselineMember, str], profile: LinkProfile | None
    ) -> dict[BaselineMember, Transport]:
        """Open the connections in use: to the next of the ring, or to the others of the column."""
        place, own = self.place, self.place.own
        if self.order.is_flat:
            members = place.members
            used = [members[(members.index(own) + 1) % len(members)]]
            carriers = range(1)  # the last rank of each island has its link to itself
        else:
            used, carriers = list(place.column), range(place.num_ranks)
        link = None
        if profile is not None:
            seed = random.Random(f"{self.order.start}/{own}").getrandbits(64)
            link = carrier_link(profile, carriers).states(seed)
        transports: dict[BaselineMember, Transport] = {}
        for member in used:
            if member == own:
                continue
            within = member.island == own.island
            security = self._security.within_site() if within else self._security
            transport = security.transport(
                addresses[member],
                Role.ISLAND,
                channels=1 if within else self._channels,
            )
            is_shaped = link is not None and not within
            transports[member] = (
                ShapedTransport(transport, *link) if is_shaped and link else transport
            )
        return transports


class GroupSite:
    """One member that uses plain process groups only, gloo or NCCL: all members are one job.

    Nothing is served, shaped, encrypted or authenticated, as in a cluster's own data parallelism.
    """

    def __init__(self, order: SiteOrder, channel: Channel, device: torch.device) -> None:
        """Say where the first member's store is, and meet all others there.

        Args:
            order: What this member is; its `streams` are of a transport.
            channel: To the parent.
            device: That its values are on, which says the backend.
        """
        self.place, self.order = order.place, order
        members = self.place.members
        job = Job(members.index(self.place.own), len(members), "")
        meet_others(channel, job, split_address(order.bind)[0], backend=backend_of(device))
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
