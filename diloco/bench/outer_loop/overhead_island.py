"""The island of `diloco bench overhead`: trains in blocks, and times them. Runs in a process.

See `diloco.bench.outer_loop.overhead`.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import diloco
from diloco.bench.counted_process import count_one
from diloco.bench.outer_loop.phases import PhaseClock
from diloco.data.open import open_data
from diloco.island.lanes.shards import canonical_parameters
from diloco.trainer.island_trainer import island_trainer, own_batches
from diloco.trainer.trainer import InnerTrainer

ISLAND = "bench"


@dataclass(frozen=True, slots=True)
class Block:
    """Some inner steps in a row.

    Attributes:
        steps_s: Duration of each, `DiLoCo.step` included where there is one.
        cpu_s: CPU seconds of the whole process.
        trained_cpu_s: CPU seconds of the training thread in the inner steps themselves.
        outer_s: Seconds inside `DiLoCo.step`, waiting for outcomes not counted.
        outer_cpu_s: CPU seconds of the training thread there.
        phases_s: CPU seconds of each phase of the outer loop.
    """

    steps_s: tuple[float, ...]
    cpu_s: float
    trained_cpu_s: float
    outer_s: float
    outer_cpu_s: float
    phases_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class Cycle:
    """Blocks in the order in which they ran; in `flying` each fragment is sent and merged once."""

    plain: Block
    idle: Block
    plain_again: Block
    flying: Block


@dataclass(frozen=True, slots=True)
class Measured:
    """What the island measured, and the size of its model."""

    num_parameters: int
    cycles: tuple[Cycle, ...]


def measure(
    run_file: Path, *, training_cpu: int, other_cpu: int, block_steps: int, num_cycles: int
) -> Measured:
    """Join as the run's only island and train to its end.

    Args:
        run_file: A run of `num_cycles` rounds of 2 `block_steps` inner steps; nothing is due or in
            flight in the first half of a round.
        training_cpu: CPU of the training thread.
        other_cpu: CPU of all other threads.
        block_steps: Inner steps of a block.
        num_cycles: Cycles; the first one warms up and is dropped.
    """
    os.sched_setaffinity(0, {other_cpu})  # threads started from here on stay there
    torch.set_num_threads(1)
    clock = PhaseClock()
    clock.install()
    config = diloco.load_config(run_file, island=ISLAND)
    data = open_data(config)
    trainer = island_trainer(config, data, own_batches(config, data, island_slot=0))
    cycles = []
    with diloco.connect(config) as connection:
        outer = diloco.DiLoCo(trainer.model, config.outer, transport=connection)
        os.sched_setaffinity(0, {training_cpu})  # of this thread alone
        loop = _Loop(trainer, outer, clock, block_steps)
        for _ in range(num_cycles):
            cycles.append(
                Cycle(
                    plain=loop.block(has_outer=False),
                    idle=loop.block(has_outer=True),
                    plain_again=loop.block(has_outer=False),
                    flying=loop.block(has_outer=True),
                )
            )
            assert outer.num_in_flight == 0, "a block ended with fragments in flight"
            count_one()
        outer.finish()
    parameters = canonical_parameters(trainer.model).values()
    return Measured(sum(p.numel() for p in parameters), tuple(cycles[1:]))


class _Loop:
    def __init__(
        self, trainer: InnerTrainer, outer: diloco.DiLoCo, clock: PhaseClock, block_steps: int
    ) -> None:
        self._trainer = trainer
        self._outer = outer
        self._clock = clock
        self._block_steps = block_steps
        self._inner_step = 0

    def block(self, *, has_outer: bool) -> Block:
        """Make and time the inner steps of one block."""
        outer, steps_s, outer_s, outer_cpu_s = self._outer, [], 0.0, 0.0
        trained_cpu_s = 0.0
        blocked_before, phases_before = outer.blocked_s, self._clock.read()
        cpu_before = time.process_time()
        for _ in range(self._block_steps):
            began, began_cpu = time.perf_counter(), time.thread_time()
            metrics = self._trainer.inner_step(self._inner_step)
            trained_cpu = time.thread_time()
            trained_cpu_s += trained_cpu - began_cpu
            if has_outer:
                trained = time.perf_counter()
                outer.step(num_tokens=metrics.num_tokens)
                outer_s += time.perf_counter() - trained
                outer_cpu_s += time.thread_time() - trained_cpu
            steps_s.append(time.perf_counter() - began)
            self._inner_step += 1
        return Block(
            steps_s=tuple(steps_s),
            cpu_s=time.process_time() - cpu_before,
            trained_cpu_s=trained_cpu_s,
            outer_s=outer_s - (outer.blocked_s - blocked_before),
            outer_cpu_s=outer_cpu_s,
            phases_s={
                phase: seconds - phases_before[phase]
                for phase, seconds in self._clock.read().items()
            },
        )
