"""Owns the figures of an inner step: on the device first, on the host a step later.

On an accelerator the host only launches a step. Loss, norm and loads are copied behind it into
pinned memory, with an event, so that the host can launch the next step before it waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from diloco.protocol.island.soundness import StepBound

_UNBOUNDED = StepBound()


@dataclass(frozen=True, slots=True)
class InnerMetrics:
    """Figures of one inner step of an island; equal on all its ranks, the duration excepted.

    Attributes:
        inner_step: Completed inner steps, this one included.
        loss: Mean over the island's whole batch, in nats a token, before the update.
        grad_norm: Global norm of the gradient before clipping; where it is not finite, no update
            was made.
        learning_rate: Rate used.
        num_tokens: Predicted tokens of the island's whole batch.
        duration_s: Seconds from the batch to the updated parameters, on this rank's device.
        expert_loads: Tokens that chose each expert of a layer, over the island's whole batch, by
            the name of the layer's router.
        bound: How far the update can have moved a value, whatever the gradients.
    """

    inner_step: int
    loss: float
    grad_norm: float
    learning_rate: float
    num_tokens: int
    duration_s: float
    expert_loads: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    bound: StepBound = _UNBOUNDED


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """An inner step that the device has, or will have, made.

    Attributes:
        num_tokens: As in `InnerMetrics`.
        bound: Likewise.
        is_known: Whether `read` waits for nothing, as on a CPU.
        read: Waits until the device has made this step, not for later ones, and gives its figures.
    """

    num_tokens: int
    bound: StepBound
    is_known: bool
    read: Callable[[], InnerMetrics]


class HostCopy:
    """Values of a device, on their way to the host."""

    def __init__(self, values: Tensor, began: Callable[[], float] | torch.cuda.Event) -> None:
        """Launch the copy.

        Args:
            values: Shape [N], float64.
            began: What `begin_measuring` returned.
        """
        self._here = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
        self._here.copy_(values, non_blocking=True)
        self._began = began
        if isinstance(began, torch.cuda.Event):
            self._ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._ended.record()
            self.is_known = False
        else:
            self._duration_s = began()
            self.is_known = True

    def read(self) -> tuple[list[float], float]:
        """Wait for the copy; returns the values, and seconds since `begin_measuring`."""
        if isinstance(self._began, torch.cuda.Event):
            self._ended.synchronize()
            self._duration_s = self._began.elapsed_time(self._ended) / 1e3
        values: list[float] = self._here.tolist()
        return values, self._duration_s


def begin_measuring(
    device: torch.device, clock: Callable[[], float]
) -> Callable[[], float] | torch.cuda.Event:
    """Take the time at which a device begins with what follows.

    Args:
        device: Which.
        clock: Monotonic seconds of the host, for a CPU.

    Returns:
        On CUDA an event; else a function that gives the seconds since.
    """
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
    began = clock()
    return lambda: clock() - began
