"""Deals lanes to the ranks of an island that carry them over the WAN, hosts first.

A carrier holds its lanes' anchors and residuals, encodes them, and moves their bytes: what hosts
have of that should be as even as their number allows. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from diloco.outer.fragments import Fragment


def hosts_first(hosts: Sequence[str], most: int = 0) -> tuple[int, ...]:
    """Order ranks: first one of each host, then a second one of each, and so on.

    Args:
        hosts: Of every rank, by name.
        most: Hosts whose ranks are taken, the first so many; 0: all.
    """
    counts = Counter[str]()
    order = []
    for rank, host in enumerate(hosts):
        if not most or host in counts or len(counts) < most:
            order.append((counts[host], rank))
            counts[host] += 1
    return tuple(rank for _, rank in sorted(order))


def carriers_of(
    fragments: Iterable[Fragment], ranks: Sequence[int]
) -> Mapping[tuple[int, int], int]:
    """Deal lanes in turn: the first one of a fragment follows the last one of the one before.

    Args:
        fragments: Of the plan, all and in order.
        ranks: That carry lanes, in the order in which they are dealt to; at least one.

    Returns:
        The rank of each lane, by fragment id and lane id.
    """
    lanes = [(f.fragment_id, lane.lane_id) for f in fragments for lane in f.lanes]
    return {lane: ranks[number % len(ranks)] for number, lane in enumerate(lanes)}
