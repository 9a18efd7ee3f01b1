"""The island of `diloco bench memory`: counts what is on a device beside its parameters.

A real session of one rank; its inner step adds seeded noise, since what is computed there is none
of the outer loop's. Runs in a process of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

import diloco
from diloco.bench.outer_loop.counted_device import CountedDevice
from diloco.telemetry.events import Event, FragmentMerged
from diloco.trainer.models.model import LlamaShape, parameter_shapes

ISLAND = "bench"
_NOISE = 1e-3


class Device(Protocol):
    """Where parameters lie; `peak_bytes` is the most since `reset_peak`."""

    @property
    def live_bytes(self) -> int:
        """Bytes of tensors there now."""

    @property
    def peak_bytes(self) -> int:
        """Bytes of tensors there at most."""

    def place(self, values: Tensor) -> Tensor:
        """Put a copy of a CPU tensor there."""

    def reset_peak(self) -> None:
        """Count the peak anew."""


class CudaDevice:
    """The current CUDA device, as PyTorch's allocator counts it."""

    @property
    def live_bytes(self) -> int:
        """Bytes that are allocated, rounded up as the allocator does."""
        return torch.cuda.memory_allocated()

    @property
    def peak_bytes(self) -> int:
        """Bytes that were allocated at most."""
        return torch.cuda.max_memory_allocated()

    def place(self, values: Tensor) -> Tensor:
        """Put a copy of a CPU tensor there."""
        return values.cuda()

    def reset_peak(self) -> None:
        """Count the peak anew."""
        torch.cuda.reset_peak_memory_stats()


@dataclass(slots=True)
class Measured:
    """Bytes on the device beyond the parameters, at most, by what the outer loop did.

    Attributes:
        device: "cuda", or "counted".
        num_merges: Merges that were looked at.
        largest_fragment_bytes: Of its parameters.
        largest_tensor_bytes: Of the parameters.
        parameter_bytes: Of all of them.
        extra_bytes: At most, by phase; what stays there when a step is over is "flight" where
            fragments are in flight, prefetched ones among them, and else "between".
    """

    device: str
    num_merges: int = 0
    largest_fragment_bytes: int = 0
    largest_tensor_bytes: int = 0
    parameter_bytes: int = 0
    extra_bytes: dict[str, int] = field(default_factory=dict)

    def extra(self, phase: str, num_bytes: int) -> None:
        """Keep the most of a phase."""
        self.extra_bytes[phase] = max(self.extra_bytes.get(phase, 0), num_bytes)


def measure(run_file: Path) -> Measured:
    """Join as the run's only island, and make all its inner steps.

    Args:
        run_file: The run; its island is `ISLAND`.
    """
    torch.set_num_threads(1)
    config = diloco.load_config(run_file, island=ISLAND)
    is_cuda = torch.cuda.is_available()
    device: Device = CudaDevice() if is_cuda else CountedDevice()
    found = Measured("cuda" if is_cuda else "counted")
    generator = torch.Generator().manual_seed(config.run.seed)
    shapes = parameter_shapes(LlamaShape.from_config(config.model))
    parameters = {
        name: device.place(torch.randn(shape, generator=generator)).requires_grad_()
        for name, shape in shapes.items()
    }
    merged: list[FragmentMerged] = []

    def hear(event: Event) -> None:
        if isinstance(event, FragmentMerged):
            merged.append(event)

    at_rest = device.live_bytes

    @contextmanager
    def counting(*phases: str) -> Iterator[None]:
        device.reset_peak()
        yield
        for phase in phases or _phases(merged, outer.num_in_flight - in_flight):
            found.extra(phase, device.peak_bytes - at_rest)
        found.extra("flight" if outer.num_in_flight else "between", device.live_bytes - at_rest)
        found.num_merges += len(merged)
        merged.clear()

    in_flight = 0
    with diloco.connect(config) as connection:
        with counting("start"):
            outer = diloco.DiLoCo(parameters, config.outer, transport=connection, on_event=hear)
        for _ in range(config.run.inner_steps):
            _train_(parameters, generator)
            in_flight = outer.num_in_flight
            with counting():
                outer.step(num_tokens=config.island.tokens_per_inner_step)
        with counting("finish"):
            outer.finish()
        with counting("evaluate"), outer.global_parameters():
            pass
        fragments = outer.plan.fragments
    found.largest_fragment_bytes = 4 * max(fragment.numel for fragment in fragments)
    found.largest_tensor_bytes = 4 * max(map(math.prod, shapes.values()))
    found.parameter_bytes = 4 * sum(map(math.prod, shapes.values()))
    return found


def _phases(merged: list[FragmentMerged], more_in_flight: int) -> list[str]:
    """Say what a step did: a merge ends what is in flight, a send begins it."""
    phases = ["merge"] if merged else []
    return [*phases, "send"] if more_in_flight + len(merged) > 0 else phases


@torch.no_grad()
def _train_(parameters: dict[str, Tensor], generator: torch.Generator) -> None:
    for parameter in parameters.values():
        noise = torch.randn(parameter.shape, generator=generator).mul_(_NOISE)
        parameter.add_(noise.to(parameter.device))
