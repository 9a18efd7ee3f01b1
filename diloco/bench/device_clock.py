"""The clock of a device's work: it has nothing to do at both ends of what is timed."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def settle(device: torch.device) -> None:
    """Wait until a device has done all that was launched; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_s(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds from a device at rest until it has done `work`."""
    settle(device)
    began = time.perf_counter()
    work()
    settle(device)
    return time.perf_counter() - began
