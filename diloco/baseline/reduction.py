"""All-reduce of a flat vector, chunk by chunk, while its later chunks are still being computed.

    hierarchical   inside: reduce-scatter of chunk i+1   | each in a thread of its own, in order:
                   between islands: all-reduce of chunk i | what is inside is hidden behind what is
                   inside: all-gather of chunk i-1        | between, or the other way round
    flat           one ring through all ranks of all islands, all chunks on their way at once

The inside phases are collectives of the island's process groups, issued in the order of chunks by
one thread a group, so every rank issues the same ones; what is between goes over a `Hop`. On CUDA
one thread issues all of them, phase by phase of a chunk: hidden behind backward, not behind each
other. All members end with the same bits.

As the hierarchical all-reduce of NeMo 25.02 / Megatron-Core 0.11 (NVIDIA, long-haul training).
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from diloco.baseline.exchange import ValueExchange
from diloco.baseline.group import BaselineGroup
from diloco.baseline.hops import Hop, end_reduction, unwrapped
from diloco.baseline.rings import reduce_in_a_ring
from diloco.compression.base import Codec
from diloco.device_thread import DeviceThread
from diloco.errors import IslandFailed
from diloco.io_thread import IoThread


class GradientReduction(Protocol):
    """Sums a vector over its members, in group.

    Attributes:
        chunk_numel: Values of a chunk; a vector is a multiple of it.
    """

    chunk_numel: int

    def begin(self, values: Tensor) -> None:
        """Take a vector of shape [n * chunk_numel], float32, none of whose chunks is ready."""

    def ready(self, chunk: int) -> None:
        """Reduce a chunk as soon as possible; chunks become ready in order, each once."""

    def finish(self) -> None:
        """Return when every chunk that was ready is the sum over all members.

        Raises:
            IslandFailed: If a member is gone.
            CodecError: If a value is not finite.
        """


def all_reduce(reduction: GradientReduction, values: Tensor) -> None:
    """Sum a whole vector, in place; see `GradientReduction`."""
    reduction.begin(values)
    for chunk in range(values.numel() // reduction.chunk_numel):
        reduction.ready(chunk)
    reduction.finish()


def padded_numel(reduction: GradientReduction, numel: int) -> int:
    """Size of the vector of whole chunks that holds so many values."""
    return -(-numel // reduction.chunk_numel) * reduction.chunk_numel


@dataclass(frozen=True, slots=True)
class Inside:
    """Process groups of the ranks of one island, one for each phase."""

    scatter: dist.ProcessGroup
    gather: dist.ProcessGroup


class FlatReduction:
    """A ring through all ranks of all islands."""

    def __init__(
        self,
        group: BaselineGroup,
        exchange: ValueExchange,
        io: IoThread,
        codec: Codec,
        chunk_numel: int,
    ) -> None:
        """Keep the parts; chunks have `chunk_numel` values or some more, so that they divide."""
        self._own, self._members = group.own, group.members
        self._exchange, self._io, self._codec = exchange, io, codec
        self._values = torch.empty(0)
        self._under_way: list[Future[None]] = []
        self.chunk_numel = -(-chunk_numel // len(self._members)) * len(self._members)

    def begin(self, values: Tensor) -> None:
        """See `GradientReduction`."""
        self._values = values

    def ready(self, chunk: int) -> None:
        """See `GradientReduction`."""
        if len(self._members) == 1:
            return
        part = _chunk(self._values, chunk, self.chunk_numel)
        ring = reduce_in_a_ring(self._exchange, self._members, self._own, chunk, part, self._codec)
        self._under_way.append(self._io.begin(unwrapped(ring)))

    def finish(self) -> None:
        """See `GradientReduction`."""
        under_way, self._under_way = self._under_way, []
        for each in under_way:
            each.result()
        end_reduction(self._exchange, self._io)


class HierarchicalReduction:
    """Reduce-scatter inside, all-reduce of shards between islands, all-gather inside."""

    def __init__(
        self, group: BaselineGroup, hop: Hop | None, inside: Inside | None, chunk_numel: int
    ) -> None:
        """Keep the parts.

        Args:
            group: This member's.
            hop: To the other islands; None: only the island's own ranks are reduced over.
            inside: Groups of the island; None: it is one rank.
            chunk_numel: Values of a chunk; some more, so that shards and their parts are equal.
        """
        self._group, self._hop, self._inside = group, hop, inside
        unit = group.num_ranks * len(group.column)
        self.chunk_numel = -(-chunk_numel // unit) * unit
        self._values = torch.empty(0)
        self._gathered: list[Future[None]] = []
        self._scattering = DeviceThread("baseline-scatter")
        self._gathering = DeviceThread("baseline-gather")

    def begin(self, values: Tensor) -> None:
        """See `GradientReduction`."""
        self._values = values

    def ready(self, chunk: int) -> None:
        """See `GradientReduction`."""
        whole = _chunk(self._values, chunk, self.chunk_numel)
        shards = torch.chunk(whole, self._group.num_ranks)
        shard = shards[self._group.own.island_rank]
        device = whole.device
        scattered = self._scattering.submit(device, self._scatter, chunk, whole, shard)
        gathering = self._scattering if whole.is_cuda else self._gathering
        self._gathered.append(gathering.submit(device, self._gather, scattered, whole, shard))

    def finish(self) -> None:
        """See `GradientReduction`."""
        gathered, self._gathered = self._gathered, []
        for each in gathered:
            each.result()
        if self._hop is not None:
            self._hop.end()

    def _scatter(self, chunk: int, whole: Tensor, shard: Tensor) -> Future[None] | None:
        """Sum this rank's shard over the island, and begin to sum it over islands."""
        if self._inside is not None:
            total = torch.empty_like(shard)
            with _named("reduce-scatter", self._group):
                dist.reduce_scatter_single(total, whole, group=self._inside.scatter)
            shard.copy_(total)
        return None if self._hop is None else self._hop.begin(chunk, shard)

    def _gather(self, scattered: Future[Future[None] | None], whole: Tensor, shard: Tensor) -> None:
        """Hand the sums of all shards to all ranks of the island."""
        between = scattered.result()
        if between is not None:
            between.result()
        if self._inside is not None:
            with _named("all-gather", self._group):
                dist.all_gather_single(whole, shard.clone(), group=self._inside.gather)


@contextmanager
def _named(phase: str, group: BaselineGroup) -> Iterator[None]:
    """Say which island's collective failed, and what that means."""
    try:
        yield
    except RuntimeError as error:
        raise IslandFailed(
            f"the {phase} inside island {group.own.island} failed: {error}. One of its "
            f"{group.num_ranks} ranks is gone, and a baseline does not go on without a member: see "
            f"their logs, then start it again"
        ) from error


def _chunk(values: Tensor, chunk: int, chunk_numel: int) -> Tensor:
    return values[chunk * chunk_numel : (chunk + 1) * chunk_numel]
