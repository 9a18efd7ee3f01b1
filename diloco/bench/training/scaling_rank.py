"""One rank of `diloco bench scaling`: `python -m diloco.bench.training.scaling_rank ORDER` (JSON).

Trains every strategy of its number of ranks, one after the other, in one process group.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from diloco.baseline.site import Channel, meet_others, run_member
from diloco.bench.run_values import ISLAND
from diloco.config.load import load_config
from diloco.data.open import open_data
from diloco.errors import ConfigError
from diloco.launch.rank.job import Job
from diloco.trainer.island_trainer import island_trainer
from diloco.trainer.parallel.mesh import make_mesh

_NANO = 1e-9
_SCHEDSTAT = "/proc/thread-self/schedstat"
_INTERFACES = "/proc/thread-self/net/dev"


def run_delay_s() -> float:
    """Seconds in which this thread could have run and had no CPU, since it began.

    Raises:
        ConfigError: If the kernel does not tell.

    See Linux, Documentation/scheduler/sched-stats (schedstat of a task, second field).
    """
    try:
        return int(Path(_SCHEDSTAT).read_text().split()[1]) * _NANO
    except (OSError, IndexError) as error:
        raise ConfigError(
            f"cannot read from {_SCHEDSTAT} how long a thread waits for a CPU ({error}): this "
            f"bench needs Linux with CONFIG_SCHED_INFO"
        ) from error


def carried_bytes(interface: str) -> tuple[int, int]:
    """Bytes that came in and went out at an interface of this process's network so far.

    See Linux, /proc/net/dev, first and ninth column.
    """
    for line in Path(_INTERFACES).read_text().splitlines():
        name, _, columns = line.partition(":")
        if name.strip() == interface:
            figures = [int(word) for word in columns.split()]
            return figures[0], figures[8]
    raise ConfigError(f"{_INTERFACES} has no interface {interface}, which ranks were to meet at")


def measure(
    run_file: str, *, interface: str, warmup_steps: int, timed_steps: int
) -> dict[str, float]:
    """Train one strategy; every rank of the process group calls it together.

    Args:
        run_file: A run whose only island is `ISLAND`.
        interface: At which this rank alone meets the others; empty: there is none.
        warmup_steps: Inner steps before the timed ones, which build what is built once.
        timed_steps: Inner steps that are timed.

    Returns:
        In seconds of this rank, from a barrier to the end of the last step: `wall_s`; `cpu_s` of
        all its threads; `exposed_s`, in which the training thread neither ran nor wanted to:
        wall - its CPU time - its wait for a CPU. `moved_bytes` went out of `interface` or came in,
        whichever was more; 0 without one. `loss` is that of the last step, in nats a token.
    """
    config = load_config(run_file, island=ISLAND)
    is_cast = config.island.compute.is_cast
    mesh = make_mesh(torch.device("cpu"), config.island.mesh, is_cast=is_cast)
    data = open_data(config)
    batches = data.batches(
        slots=(0,),
        num_slots=1,
        batch_size=config.island.tokens_per_inner_step // data.sequence_length,
        dp_coordinate=mesh.dp_coordinate,
        dp_size=mesh.dp_size,
    )
    trainer = island_trainer(config, data, batches, mesh)
    for step in range(warmup_steps):
        trainer.inner_step(step).read()
    if dist.is_initialized():
        dist.barrier()
    carried = carried_bytes(interface) if interface else (0, 0)
    began, cpu, own_cpu, delay = _clocks()
    for step in range(warmup_steps, warmup_steps + timed_steps):
        loss = trainer.inner_step(step).read().loss
    ended, cpu_end, own_cpu_end, delay_end = _clocks()
    carried_end = carried_bytes(interface) if interface else (0, 0)
    wall_s = ended - began
    ran_s, delayed_s = own_cpu_end - own_cpu, delay_end - delay
    return {
        "wall_s": wall_s,
        "cpu_s": cpu_end - cpu,
        "exposed_s": max(0.0, wall_s - ran_s - delayed_s),
        "moved_bytes": max(end - begin for begin, end in zip(carried, carried_end, strict=True)),
        "loss": loss,
    }


def _clocks() -> tuple[float, float, float, float]:
    return time.monotonic(), time.process_time(), time.thread_time(), run_delay_s()


def train(order: dict[str, Any], channel: Channel) -> dict[str, Any]:
    """Train every strategy of this number of ranks, as one of them."""
    meet_others(channel, Job(order["island_rank"], order["num_ranks"], ""), order["host"])
    same = {key: order[key] for key in ("interface", "warmup_steps", "timed_steps")}
    found = {name: measure(path, **same) for name, path in order["run_files"].items()}
    if dist.is_initialized():
        dist.barrier()  # nobody ends while another still needs its connections
    return found


if __name__ == "__main__":
    run_member(train)
