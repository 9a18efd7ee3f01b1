"""One rank of `diloco bench parity-inner`, a process of its own; its only argument is JSON.

Trains its rows one after the other in one process group, and says what each one lost.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from diloco.baseline.site import Channel
from diloco.bench.collectives import Collectives
from diloco.bench.training.layout_case import INNER_STEPS, Case
from diloco.bench.training.layouts import case_of
from diloco.launch.process.ending import exit_at_once
from diloco.launch.process.logs import log_to
from diloco.trainer.parallel.mesh import IslandMesh, make_mesh

_HOST = "127.0.0.1"
#: A group that is stuck says so; a row takes seconds.
_STUCK_AFTER = timedelta(seconds=300)


def losses_of(case: Case, mesh: IslandMesh) -> dict[str, Any]:
    """Train a row; what every inner step and every evaluation gave, as JSON values; collective.

    Returns:
        `losses`: nats a token of each inner step; `evaluations`: nats a byte before and after
        them; `collectives`: of the last inner step, by name; of a compiled row none are counted.
    """
    trainer = case.make_trainer(mesh)
    evaluations = [trainer.evaluate()]
    losses = [trainer.inner_step(step).loss for step in range(INNER_STEPS)]
    collectives = Collectives()
    # Nothing is compiled under a dispatch mode.
    with contextlib.nullcontext() if case.is_compiled else collectives:
        losses.append(trainer.inner_step(INNER_STEPS).loss)
    evaluations.append(trainer.evaluate())
    counts = dict(collectives.counts)
    return {"losses": losses, "evaluations": evaluations, "collectives": counts}


def _meet(order: dict[str, Any], channel: Channel) -> None:
    """Join the ranks into the default process group; one rank has none."""
    rank, num_ranks = order["rank"], order["num_ranks"]
    is_first = rank == 0
    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False) if is_first else None
    channel.say({"port": store.port if store else None})
    ports = [place["port"] for place in channel.hear()]
    if num_ranks == 1:
        return
    if store is None:
        store = TCPStore(_HOST, ports[0], is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=num_ranks, timeout=_STUCK_AFTER
    )


def main(order: dict[str, Any]) -> int:
    """Train all rows of the order; returns the exit code."""
    log_to(None, logging.ERROR)
    torch.set_num_threads(1)
    channel = Channel()
    _meet(order, channel)
    found = {}
    for row in map(case_of, order["rows"]):
        case = row.alone if order["num_ranks"] == 1 else row
        mesh = make_mesh(torch.device("cpu"), case.mesh, is_cast=case.compute.is_cast)
        found[case.name] = losses_of(case, mesh)
    if dist.is_initialized():
        dist.barrier()  # nobody tears its connections down while another still needs them
    channel.say(found)
    return 0


if __name__ == "__main__":
    exit_at_once(main(json.loads(sys.argv[1])))
