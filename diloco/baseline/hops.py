"""The hop between islands of a hierarchical all-reduce: our transport, or a plain process group.

Both sum a shard over islands in the same order with the same codec, so all members hold the same
bits whichever it was. Every rank of an island reduces another shard with the ranks of the other
islands that have the same one: its column.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from diloco.baseline.exchange import ValueExchange
from diloco.baseline.group import BaselineGroup, BaselineMember
from diloco.baseline.rings import reduce_directly
from diloco.compression.base import Codec
from diloco.device_thread import DeviceThread
from diloco.errors import IslandFailed
from diloco.io_thread import IoThread


class Hop(Protocol):
    """Sums shards over islands, in place, while training goes on."""

    def begin(self, chunk: int, shard: Tensor) -> Future[None]:
        """Sum the shard of a chunk; every member of the column begins the same ones in order.

        Args:
            chunk: Its number.
            shard: Shape [a multiple of the islands], float32, contiguous; on the CPU, or where the
                hop is made for it.

        Returns:
            Done when `shard` is the sum; fails with IslandFailed if a member is gone, with
            CodecError if a value is not finite.
        """

    def end(self) -> None:
        """End a reduction, all of whose shards are summed."""


class TransportHop:
    """Over any transport, shaped or not, several shards on their way at once."""

    def __init__(
        self, place: BaselineGroup, exchange: ValueExchange, io: IoThread, codec: Codec
    ) -> None:
        """Keep the parts; `io` is where the exchange lives."""
        self._column, self._own = place.column, place.own
        self._exchange, self._io, self._codec = exchange, io, codec

    def begin(self, chunk: int, shard: Tensor) -> Future[None]:
        """See `Hop`."""
        column, own = self._column, self._own
        work = reduce_directly(self._exchange, column, own, chunk, shard, self._codec)
        return self._io.begin(unwrapped(work))

    def end(self) -> None:
        """See `Hop`."""
        end_reduction(self._exchange, self._io)


class GroupHop:
    """Over a process group of the column: all-to-all of parts, all-gather of their sums.

    The plain way inside one cluster, over gloo on CPUs and over NCCL on CUDA devices. One shard
    after the other, in a thread of its own; on CUDA in the caller's: collectives of several groups
    must begin in one order on all devices, or they wait for each other.

    Attributes:
        bytes_up: Payloads sent to other islands.
        bytes_down: Payloads that came; as many.
    """

    def __init__(self, place: BaselineGroup, group: dist.ProcessGroup, codec: Codec) -> None:
        """Keep the parts; ranks of `group` are in the order of the column."""
        self._column, self._own = place.column, place.own
        self._group, self._codec = group, codec
        self._summing = DeviceThread("baseline-between")
        self.bytes_up = 0

    @property
    def bytes_down(self) -> int:
        """Payloads that came from other islands: every part goes both ways."""
        return self.bytes_up

    def begin(self, chunk: int, shard: Tensor) -> Future[None]:
        """See `Hop`."""
        if not shard.is_cuda:
            return self._summing.submit(shard.device, self._sum, chunk, shard)
        done: Future[None] = Future()
        self._sum(chunk, shard)
        done.set_result(None)
        return done

    def end(self) -> None:
        """See `Hop`."""

    def _sum(self, chunk: int, shard: Tensor) -> None:
        size, index, codec = len(self._column), self._column.index(self._own), self._codec
        parts = shard.view(size, -1)
        sent = torch.stack([codec.encode(part) for part in parts])
        came = torch.empty_like(sent)
        try:
            dist.all_to_all_single(came, sent, group=self._group)
            # In the order of the column, this member's own part as it is: as over a transport.
            numel = parts[index].numel()
            first, *others = (
                parts[n] if n == index else codec.decode(payload, numel)
                for n, payload in enumerate(came)
            )
            total = first.clone()
            for other in others:
                total += other
            dist.all_gather_single(came.view(-1), codec.encode(total), group=self._group)
        except RuntimeError as error:
            raise _lost(self._column, self._own, chunk, error) from error
        for part, payload in zip(parts, came, strict=True):
            part.copy_(codec.decode(payload, part.numel()))
        self.bytes_up += 2 * (size - 1) * sent.shape[1]


def _lost(
    column: tuple[BaselineMember, ...], own: BaselineMember, chunk: int, error: Exception
) -> IslandFailed:
    others = ", ".join(str(member) for member in column if member != own)
    return IslandFailed(
        f"summing chunk {chunk} with {others} over their process group failed: {error}. One of "
        f"them is gone, and a baseline does not go on without a member: see their logs, then "
        f"start it again"
    )


def end_reduction(exchange: ValueExchange, io: IoThread) -> None:
    """Go on to the exchange's next reduction, after all that was posted."""
    io.post(exchange.end, exchange.reduction)
    io.run(asyncio.sleep(0))


async def unwrapped(work: Coroutine[Any, Any, None]) -> None:
    """Raise the first error of tasks that belong together, not the group of all of them."""
    try:
        await work
    except ExceptionGroup as group:
        raise group.exceptions[0] from group
