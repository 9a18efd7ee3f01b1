"""The only island of a row of `diloco bench gpu`, in a process of its own, on a device.

Everything is timed from a device at rest: blocks of inner steps to its end of them, sends, merges
and checkpoints until the training thread may launch the next inner step and the device begin it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

import diloco
from diloco.bench.device_clock import device_s, settle
from diloco.bench.processes import count_one
from diloco.bench.run_values import ISLAND
from diloco.bench.training.device import operation_of
from diloco.bench.training.plain import MeasuredLoops, compare
from diloco.checkpoint.checkpoint_writer import CheckpointWriter
from diloco.checkpoint.state_copy import StateCopier
from diloco.config.schema import Config
from diloco.data.batches import Data
from diloco.data.open import open_data
from diloco.data.prefetch import PrefetchedBatches
from diloco.island.lanes.parameters import canonical_parameters, tensor_specs
from diloco.island.layout import build_plan
from diloco.launch.rank.device import backend_of, rank_device
from diloco.launch.rank.job import Job, meet
from diloco.trainer.island_trainer import island_trainer, own_batches
from diloco.trainer.launched_step import LaunchedStep
from diloco.trainer.models.families import parameter_shapes, shape_of
from diloco.trainer.parallel.mesh import make_mesh
from diloco.trainer.parallel.parallelize import compile_ahead
from diloco.trainer.state import kept_tensors
from diloco.trainer.trainer import InnerTrainer

DeviceKind = Literal["cpu", "cuda"]
_ALONE = Job(0, 1, "")


@dataclass(frozen=True, slots=True)
class _DeviceIsland:
    """The parts of an island of one rank, as `diloco.launch.rank` builds them."""

    device: torch.device
    data: Data
    trainer: InnerTrainer


@contextmanager
def _island(config: Config, kind: DeviceKind) -> Iterator[_DeviceIsland]:
    """Build the selected island on a device, its blocks compiled if they are to be."""
    compute = config.island.compute
    device = rank_device(kind, _ALONE, island=config.island_id)
    meet(_ALONE, backend_of(device), is_cast=compute.is_cast)
    mesh = make_mesh(device, config.island.mesh, is_cast=compute.is_cast)
    data = open_data(config)
    batches = PrefetchedBatches(own_batches(config, data, 0, mesh), device)
    try:
        trainer = island_trainer(config, data, batches, mesh)
        if compute.compile_backend:
            batch_size = config.island.tokens_per_inner_step // data.sequence_length
            compile_ahead(
                trainer.model, mesh, batch_size=batch_size, sequence_length=data.sequence_length
            )
        yield _DeviceIsland(device, data, trainer)
    finally:
        batches.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def measure_steps(
    config: Config, kind: DeviceKind, *, block_steps: int, num_cycles: int
) -> MeasuredLoops:
    """Train with the native trainer and with a plain loop, in turns; see `plain.compare`."""
    with _island(config, kind) as island:
        return compare(
            config,
            island.data,
            island.trainer,
            device=island.device,
            dtype=torch.bfloat16 if config.island.compute.is_cast else torch.float32,
            block_steps=block_steps,
            num_cycles=num_cycles,
        )


# -- blocks with and without an outer loop ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BlockTimes:
    """Seconds of the blocks of a cycle, in their order; each fragment is in flight in the last."""

    plain_s: float
    idle_s: float
    plain_again_s: float
    flying_s: float

    def over_plain(self, block_s: float) -> float:
        """Divide one of them by the plain ones next to it."""
        return 2 * block_s / (self.plain_s + self.plain_again_s)


def measure_blocks(
    run_file: Path, kind: DeviceKind, *, block_steps: int, num_cycles: int
) -> tuple[BlockTimes, ...]:
    """Join as the run's only island and train to its end; the first cycle warms up, and is dropped.

    Args:
        run_file: As for `overhead.measure`.
        kind: Where it trains.
        block_steps: Inner steps of a block.
        num_cycles: Cycles.
    """
    config = diloco.load_config(run_file, island=ISLAND)
    cycles = []
    with _island(config, kind) as island, diloco.connect(config) as connection:
        outer = diloco.DiLoCo(island.trainer.model, config.outer, transport=connection)
        loop = _BlockLoop(island, outer, block_steps)
        for _ in range(num_cycles):
            blocks = [loop.block_s(has_outer=has_outer) for has_outer in (False, True) * 2]
            cycles.append(BlockTimes(*blocks))
            assert outer.num_in_flight == 0, "a block ended with fragments in flight"
            count_one()
        outer.finish()
    return tuple(cycles[1:])


class _BlockLoop:
    """Makes inner steps as a rank does: their figures are read when the next one is launched."""

    def __init__(self, island: _DeviceIsland, outer: diloco.DiLoCo, block_steps: int) -> None:
        self._island = island
        self._outer = outer
        self._block_steps = block_steps
        self._inner_step = 0

    def block_s(self, *, has_outer: bool) -> float:
        """Time the inner steps of one block."""
        return device_s(self._island.device, self._train_with if has_outer else self._train)

    def _launch(self) -> LaunchedStep:
        launched = self._island.trainer.inner_step(self._inner_step)
        self._inner_step += 1
        return launched

    def _train(self) -> None:
        before = self._launch()
        for _ in range(self._block_steps - 1):
            launched = self._launch()
            before.read()
            before = launched

    def _train_with(self) -> None:
        for _ in range(self._block_steps):
            launched = self._launch()
            self._outer.log_later(functools.partial(_loss, launched))
            self._outer.step(num_tokens=launched.num_tokens, bound=launched.bound)


def _loss(launched: LaunchedStep) -> Mapping[str, float]:
    return {"loss": launched.read().loss}


# -- one send, one merge ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BlockedTimes:
    """What sends and merges held the training thread, waits for an outcome not counted.

    Attributes:
        num_values: Of the fragment.
        seconds: By operation, one a round.
    """

    num_values: int
    seconds: Mapping[str, tuple[float, ...]]


def measure_blocked(run_file: Path, kind: DeviceKind, *, step_s: float) -> BlockedTimes:
    """Join as the run's only island, and make all its inner steps, which add noise.

    Args:
        run_file: A run of one fragment, which no step both sends and merges.
        kind: Where the parameters are.
        step_s: Seconds that an inner step takes, in which fragments are encoded, sent and staged.
    """
    config = diloco.load_config(run_file, island=ISLAND)
    device = rank_device(kind, _ALONE, island=config.island_id)
    parameters = {
        name: torch.randn(shape, device=device).requires_grad_()
        for name, shape in parameter_shapes(shape_of(config.model)).items()
    }
    seconds: dict[str, list[float]] = {"send": [], "merge": []}
    with diloco.connect(config) as connection:
        outer = diloco.DiLoCo(parameters, config.outer, transport=connection)
        while not outer.is_over:
            with torch.no_grad():
                for parameter in parameters.values():
                    parameter.add_(torch.randn_like(parameter), alpha=1e-3)
            time.sleep(step_s)
            settle(device)
            began, blocked_s = time.perf_counter(), outer.blocked_s
            events = outer.step(num_tokens=config.island.tokens_per_inner_step)
            if device.type == "cuda":  # what other streams copy does not keep the next step back
                torch.cuda.current_stream(device).synchronize()
            took_s = time.perf_counter() - began - (outer.blocked_s - blocked_s)
            operation, _, _ = operation_of(events)
            if operation in seconds:
                seconds[operation].append(took_s)
            count_one()
        outer.finish()
    num_values = sum(parameter.numel() for parameter in parameters.values())
    return BlockedTimes(num_values, {name: tuple(each) for name, each in seconds.items()})


# -- a checkpoint ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CheckpointTimes:
    """What a checkpoint held the training thread, and what its thread took to write it.

    Attributes:
        num_bytes: Of parameters and moments, on the device.
        taken_s: Of each launch of a copy to host memory, which the training thread makes.
        copied_s: Until the device could make the next update, had it nothing to do before.
        saved_s: Of the file, written behind training.
    """

    num_bytes: int
    taken_s: tuple[float, ...]
    copied_s: tuple[float, ...]
    saved_s: float


def measure_checkpoint(
    config: Config, kind: DeviceKind, directory: Path, *, repetitions: int
) -> CheckpointTimes:
    """Make an inner step, then take checkpoints of it, and write the last one.

    Outer state is not copied for a checkpoint, and is not there.

    Args:
        config: With the island selected.
        kind: Where it trains.
        directory: For the file.
        repetitions: Checkpoints.
    """
    with _island(config, kind) as island:
        island.trainer.inner_step(0).read()
        plan = build_plan(config.outer, tensor_specs(canonical_parameters(island.trainer.model)))
        writer = CheckpointWriter(directory, ISLAND, plan, group=None)
        copier = StateCopier(island.trainer.optimizer)
        training = kept_tensors(island.trainer.model, island.trainer.optimizer)
        num_bytes = sum(x.nbytes for tensors in training.values() for x in tensors.values())
        taken_s: list[float] = []
        copied_s: list[float] = []
        for _ in range(repetitions):
            settle(island.device)
            began = time.perf_counter()
            part = writer.take(training, {}, copier=copier, group=None)
            taken_s.append(time.perf_counter() - began)
            settle(island.device)
            copied_s.append(time.perf_counter() - began)
            count_one()
        began = time.perf_counter()
        writer.save(1, part, about={}, cut=0)
        saved_s = time.perf_counter() - began
        return CheckpointTimes(num_bytes, tuple(taken_s), tuple(copied_s), saved_s)
