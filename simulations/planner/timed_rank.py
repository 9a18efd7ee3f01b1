"""One rank whose inner steps `diloco plan --measure` times: a process of its own.

    python -m diloco.simulations.planner.timed_rank ORDER        # JSON, see `measure`

Trains the island's own model, text and layout as a run does, without an outer loop.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from diloco.baseline.site import Channel
from diloco.config.load import load_config
from diloco.data.open import open_data
from diloco.errors import DilocoError
from diloco.launch.process.ending import exit_at_once
from diloco.launch.process.logs import log_to
from diloco.launch.rank.device import backend_of, rank_device
from diloco.launch.rank.job import Job
from diloco.trainer.island_trainer import island_trainer, own_batches
from diloco.trainer.parallel.mesh import make_mesh

logger = logging.getLogger(__name__)

_PATIENCE = timedelta(seconds=300)


def main(order: dict[str, Any]) -> int:
    """Time inner steps as one rank of an island; returns the exit code."""
    log_to(None, logging.WARNING)
    channel = Channel()
    try:
        config = load_config(order["run_file"], island=order["island"])
        torch.set_num_threads(config.island.threads)
        rank, num_ranks = order["island_rank"], config.island.ranks
        job = Job(rank, num_ranks, "", local_rank=rank, num_local_ranks=num_ranks)
        device = rank_device(config.island.device, job, island=config.island_id)
        _meet(job, device, channel)
        mesh = make_mesh(device, config.island.mesh)
        data = open_data(config)
        slot = sorted(config.islands).index(config.island_id)
        trainer = island_trainer(config, data, own_batches(config, data, slot, mesh), mesh)
        durations = []
        for step in range(order["warmup_steps"] + order["timed_steps"]):
            began = time.monotonic()
            trainer.inner_step(step)
            durations.append(time.monotonic() - began)
        if dist.is_initialized():
            dist.barrier()  # nobody ends while another still needs its connections
    except DilocoError as error:
        logger.error("rank stops, exit_code=%d: %s", error.exit_code, error)
        return error.exit_code
    except Exception:
        logger.exception("rank failed")
        return 1
    channel.say({"step_s": median(durations[order["warmup_steps"] :]), "device": str(device)})
    return 0


def _meet(job: Job, device: torch.device, channel: Channel) -> None:
    """Meet the other ranks: the first has the store, and says at which port."""
    store = None
    if job.island_rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_PATIENCE)
    channel.say({"port": store.port if store else 0})
    places = channel.hear()
    if job.num_ranks == 1:
        return
    (port,) = (place["port"] for place in places if place["island_rank"] == 0)
    store = store or TCPStore("127.0.0.1", port, is_master=False, timeout=_PATIENCE)
    dist.init_process_group(
        backend_of(device),
        store=store,
        rank=job.island_rank,
        world_size=job.num_ranks,
        timeout=_PATIENCE,
    )


if __name__ == "__main__":
    exit_at_once(main(json.loads(sys.argv[1])))
