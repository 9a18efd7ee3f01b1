"""One rank whose inner steps `diloco plan --measure` times: a process of its own.

    python -m diloco.simulations.planner.timed_rank ORDER        # JSON, see `measure`

Trains the island's own model, text and layout as a run does, without an outer loop.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from diloco.baseline.site import Channel, meet_others, run_member
from diloco.config.load import load_config
from diloco.data.open import open_data
from diloco.launch.rank.device import backend_of, rank_device
from diloco.launch.rank.job import Job
from diloco.trainer.island_trainer import island_trainer, own_batches
from diloco.trainer.parallel.mesh import make_mesh


def measure(order: dict[str, Any], channel: Channel) -> dict[str, Any]:
    """Time inner steps as one rank of an island."""
    config = load_config(order["run_file"], island=order["island"])
    torch.set_num_threads(config.island.threads)
    rank, num_ranks = order["island_rank"], config.island.ranks
    job = Job(rank, num_ranks, "", local_rank=rank, num_local_ranks=num_ranks)
    device = rank_device(config.island.device, job, island=config.island_id)
    meet_others(channel, job, "127.0.0.1", backend=backend_of(device))
    mesh = make_mesh(device, config.island.mesh)
    data = open_data(config)
    slot = sorted(config.islands).index(config.island_id)
    trainer = island_trainer(config, data, own_batches(config, data, slot, mesh), mesh)
    durations = []
    for step in range(order["warmup_steps"] + order["timed_steps"]):
        began = time.monotonic()
        trainer.inner_step(step).read()
        durations.append(time.monotonic() - began)
    if dist.is_initialized():
        dist.barrier()  # nobody ends while another still needs its connections
    return {"step_s": median(durations[order["warmup_steps"] :]), "device": str(device)}


if __name__ == "__main__":
    run_member(measure)
