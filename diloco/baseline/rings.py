"""All-reduce of one chunk over members that are far apart, value by value the same on all of them.

The owner of a part of the chunk adds it up, encodes the sum once, and decodes what it sends: so all
members hold the same bits, whatever the codec is.

Source: ring all-reduce, Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms" (2009).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from diloco.baseline.exchange import Key, ValueExchange
from diloco.baseline.group import BaselineMember
from diloco.compression.base import Codec, from_bytes, to_bytes
from diloco.transport.contracts import Buffer


def split_evenly(values: Tensor, num_parts: int) -> list[Tensor]:
    """View a flat tensor as parts whose sizes differ by one element at most; some may be empty."""
    numel = values.numel()
    ends = [numel * n // num_parts for n in range(num_parts + 1)]
    return [values[first:end] for first, end in pairwise(ends)]


async def reduce_directly(
    exchange: ValueExchange,
    members: Sequence[BaselineMember],
    own: BaselineMember,
    chunk: int,
    values: Tensor,
    codec: Codec,
) -> None:
    """Sum one chunk over members, every one sending to every other; two hops, in place.

    Each member owns a part, gets it from all, adds in the order of `members`, and sends the sum to
    all: 2 (D - 1) / D of the chunk each way, and sums that do not depend on who came first.

    Args:
        exchange: This member's end.
        members: All that take part, in the order of the sum.
        own: This one.
        chunk: Number of the chunk.
        values: Shape [numel], float32, CPU; contiguous.
        codec: How parts and sums are sent.

    Raises:
        IslandFailed: If a member is gone.
        CodecError: If a value is not finite.
    """
    index, others = members.index(own), [member for member in members if member != own]
    parts = split_evenly(values, len(members))
    scatter: Key = (exchange.reduction, chunk, 0)
    gather: Key = (exchange.reduction, chunk, 1)
    async with asyncio.TaskGroup() as sending:
        for member, part in zip(members, parts, strict=True):
            if member != own:
                sending.create_task(exchange.send(member, scatter, _encoded(codec, part)))
        total: Tensor | None = None
        mine = parts[index].clone()
        for member in members:
            theirs = mine
            if member != own:
                theirs = _decoded(codec, await exchange.receive(member, scatter), mine.numel())
            total = theirs if total is None else total.add_(theirs)
        assert total is not None
        payload = _encoded(codec, total)
        for member in others:
            sending.create_task(exchange.send(member, gather, payload))
        parts[index].copy_(_decoded(codec, payload, mine.numel()))
        for member, part in zip(members, parts, strict=True):
            if member != own:
                payload = await exchange.receive(member, gather)
                part.copy_(_decoded(codec, payload, part.numel()))


async def reduce_in_a_ring(
    exchange: ValueExchange,
    members: Sequence[BaselineMember],
    own: BaselineMember,
    chunk: int,
    values: Tensor,
    codec: Codec,
) -> None:
    """Sum one chunk over members, each sending to the next one only; 2 (N - 1) hops, in place.

    Part n is added up from member n + 1 around to member n, then handed around: an order that does
    not depend on time. Arguments and errors as `reduce_directly`.
    """
    size, index = len(members), members.index(own)
    after, before = members[(index + 1) % size], members[index - 1]
    parts = split_evenly(values, size)
    payload: Buffer = b""
    async with asyncio.TaskGroup() as sending:
        for hop in range(size - 1):
            key: Key = (exchange.reduction, chunk, hop)
            part = parts[(index - 1 - hop) % size]
            sending.create_task(exchange.send(after, key, _encoded(codec, part)))
            part = parts[(index - 2 - hop) % size]
            received = await exchange.receive(before, key)
            part.copy_(_decoded(codec, received, part.numel()).add_(part))
        payload = _encoded(codec, parts[index])
        parts[index].copy_(_decoded(codec, payload, parts[index].numel()))
        for hop in range(size - 1):
            key = (exchange.reduction, chunk, size - 1 + hop)
            sending.create_task(exchange.send(after, key, payload))
            payload = await exchange.receive(before, key)
            part = parts[(index - 1 - hop) % size]
            part.copy_(_decoded(codec, payload, part.numel()))


def _encoded(codec: Codec, values: Tensor) -> Buffer:
    return to_bytes(codec.encode(values))


def _decoded(codec: Codec, payload: Buffer, numel: int) -> Tensor:
    return codec.decode(from_bytes(payload), numel)
