"""The blocks of `diloco bench plain`: two loops train in turns, and are timed. Runs in a process.

See `diloco.bench.training.plain`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from diloco.bench.counted_process import count_one
from diloco.bench.training.plain_loop import PlainLlama, PlainLoop
from diloco.config.schema import Config
from diloco.data.open import open_data
from diloco.trainer.island_trainer import island_trainer, own_batches

#: Makes the inner step that follows so many, and returns its loss.
Step = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class Block:
    """Some inner steps in a row: how long they took, on the wall and of the CPU, and their loss."""

    wall_s: float
    cpu_s: float
    losses: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Cycle:
    """The same inner steps of both loops."""

    native: Block
    plain: Block


@dataclass(frozen=True, slots=True)
class Measured:
    """All cycles, the first one included, which warms up, and the size of the model."""

    num_parameters: int
    cycles: tuple[Cycle, ...]


def measure(config: Config, *, block_steps: int, num_cycles: int) -> Measured:
    """Train both loops from the same values on the same sequences, block by block.

    Args:
        config: With an island of one rank selected.
        block_steps: Inner steps of a block.
        num_cycles: Of two blocks each; who is first alternates.
    """
    data = open_data(config)
    trainer = island_trainer(config, data, own_batches(config, data, 0))
    model = PlainLlama(config.model, config.data.sequence_length)
    with torch.no_grad():
        for ours, native in zip(model.parameters(), trainer.model.parameters(), strict=True):
            ours.copy_(native)
    batches = own_batches(config, data, 0)
    ready = [batches.batch(step) for step in range(block_steps * num_cycles)]
    loop = PlainLoop(model, config.inner)
    steps: dict[str, Step] = {
        "native": lambda step: trainer.inner_step(step).loss,
        "plain": lambda step: loop.step(ready[step]),
    }
    cycles = []
    for number in range(num_cycles):
        order = sorted(steps, reverse=bool(number % 2))
        first = number * block_steps
        blocks = {name: _block(steps[name], first, block_steps) for name in order}
        cycles.append(Cycle(**blocks))
        count_one()
    return Measured(sum(p.numel() for p in model.parameters()), tuple(cycles))


def _block(step: Step, first: int, num_steps: int) -> Block:
    began, began_cpu = time.perf_counter(), time.process_time()
    losses = [step(number) for number in range(first, first + num_steps)]
    return Block(time.perf_counter() - began, time.process_time() - began_cpu, tuple(losses))
