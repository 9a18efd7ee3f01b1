"""One rank of `diloco bench allreduce`, a process of its own; its only argument is JSON."""

from __future__ import annotations

import time
from typing import Any

import torch

from diloco.baseline.reduction import GradientReduction, all_reduce, padded_numel
from diloco.baseline.site import BaselineSite, Channel, SiteOrder, run_member
from diloco.errors import DilocoError
from diloco.security.security import Security
from diloco.transport.shaping.link import Link, LinkProfile

_FLOAT_BYTES = 4


def _timed(
    site: BaselineSite,
    reduction: GradientReduction,
    num_bytes: int,
    repetitions: int,
    num_members: int,
) -> list[tuple[float, float]]:
    """Sum vectors of ones; when each began and ended, on the clock that all processes share.

    Raises:
        DilocoError: If a sum is not the number of members.
    """
    values = torch.empty(padded_numel(reduction, num_bytes // _FLOAT_BYTES))
    ready = torch.zeros(reduction.chunk_numel)
    spans = []
    for _ in range(1 + repetitions):
        values.fill_(1.0)
        all_reduce(reduction, ready)  # nobody begins long before the others
        site.barrier()
        began = time.monotonic()
        all_reduce(reduction, values)
        spans.append((began, time.monotonic()))
        if not bool((values == num_members).all()):
            raise DilocoError(
                f"a sum of {num_members} vectors of ones is {values.min():g} to {values.max():g}"
            )
    return spans[1:]


def measure(order: dict[str, Any], channel: Channel) -> dict[str, Any]:
    """Measure as one member."""
    chosen = order["link"]
    link = Link(chosen["bandwidth_bps"], chosen["delay_s"]) if chosen else None
    profile = LinkProfile("measured", link, link, "diloco bench allreduce") if link else None
    security = Security(insecure=True)
    site = BaselineSite(
        SiteOrder(**order["site"]),
        security,
        profile,
        channel,
        channels=0,
    )
    place, repetitions = site.place, order["repetitions"]
    num_bytes = site.order.most_bytes
    found: dict[str, dict[int, list[tuple[float, float]]]] = {"took_s": {}, "inside_s": {}}
    for size in site.order.chunks_bytes:
        everywhere = site.reduction(size)
        num_members = len(place.members)
        found["took_s"][size] = _timed(site, everywhere, num_bytes, repetitions, num_members)
        if not site.order.is_flat:
            inside = site.reduction(size, only_inside=True)
            alone = _timed(site, inside, num_bytes, repetitions, place.num_ranks)
            found["inside_s"][size] = alone
    site.close()
    return found


if __name__ == "__main__":
    run_member(measure)
