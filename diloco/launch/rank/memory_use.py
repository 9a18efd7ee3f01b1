"""What a rank takes of its host's and its device's memory, now and at most so far."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

from diloco.telemetry.events import MemoryUsed

_PAGE_BYTES = resource.getpagesize()
#: `ru_maxrss` counts KiB, on macOS bytes.
_MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024


def memory_used(inner_step: int, device: torch.device) -> MemoryUsed:
    """Measure this process; microseconds.

    Where there is no /proc, the largest resident size stands for the present one.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_BYTES
    statm = Path("/proc/self/statm")
    resident = int(statm.read_text().split()[1]) * _PAGE_BYTES if statm.exists() else peak
    if device.type != "cuda":
        return MemoryUsed(inner_step, resident, max(peak, resident))
    return MemoryUsed(
        inner_step,
        resident,
        max(peak, resident),
        device_bytes=torch.cuda.memory_allocated(device),
        device_peak_bytes=torch.cuda.max_memory_allocated(device),
        device_reserved_bytes=torch.cuda.memory_reserved(device),
    )
