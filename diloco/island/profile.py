"""Traces some inner steps of one rank with torch.profiler, the phases of a run named.

    diloco/inner/batch, /forward, /backward, /clip, /optimizer      an inner step
    diloco/inner/pipeline       in place of forward and backward; PyTorch names the stages' in it
    diloco/inner/gradient_hook, /balance    gradients of more ranks; the bias of experts
    diloco/collect, /encode                                         a fragment leaves
    diloco/agree, /wait                                             ranks compare notes, or wait
    diloco/decode, /merge, /distribute                              a published version comes in

Encoding and decoding happen in a thread of their own; all threads are in the trace. Open it in
ui.perfetto.dev or chrome://tracing. Steps take about twice as long while they are traced.
"""

from __future__ import annotations

import logging
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from diloco.config.records import ProfileConfig
from diloco.telemetry.events import Event, MemoryUsed, ProfileWritten

logger = logging.getLogger(__name__)

#: Allocations and frees that a snapshot of a GPU's memory remembers.
_MOST_ALLOCATIONS = 100_000


class StepProfile:
    """The trace of one rank's steps; belongs to the training thread.

    Args:
        config: Which steps, and whether memory.
        stem: Of the files, without the steps: directory, island and rank.
        device: Of the model.
        on_event: Called with the event of each file.
    """

    def __init__(
        self,
        config: ProfileConfig,
        stem: Path,
        device: torch.device,
        on_event: Callable[[Event], None],
    ) -> None:
        """Assign only."""
        self._config = config
        self._stem = stem
        self._device = device
        self._on_event = on_event
        self._profiler: profile | None = None
        self._first = 0
        self._last = 0

    def before(self, inner_step: int) -> None:
        """Begin, if the step that follows `inner_step` completed ones is to be traced."""
        start, num_steps = self._config.start_step, self._config.num_steps
        if self._profiler is not None or not start <= inner_step < start + num_steps:
            return
        has_cuda = self._device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_cuda else [])]
        if self._config.memory and has_cuda:
            torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS)
        self._first = self._last = inner_step
        self._profiler = profile(
            activities=activities,
            profile_memory=self._config.memory,
            acc_events=True,
            experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True),
        )
        self._profiler.start()

    def after(self, inner_step: int) -> None:
        """End, if the step just made, the `inner_step`-th, was the last of them."""
        if self._profiler is None:
            return
        self._last = inner_step
        if inner_step >= self._config.start_step + self._config.num_steps:
            self.close()

    def close(self) -> None:
        """Write what there is, also where a run ends among the steps; nothing is done twice."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        profiler.stop()
        self._stem.parent.mkdir(parents=True, exist_ok=True)
        steps = f"{self._stem}-steps-{self._first + 1}-{self._last}"
        path, snapshot = f"{steps}.json.gz", ""
        profiler.export_chrome_trace(path)
        if self._config.memory and self._device.type == "cuda":
            snapshot = f"{steps}-memory.pickle"
            torch.cuda.memory._dump_snapshot(snapshot)  # type: ignore[no-untyped-call]
            torch.cuda.memory._record_memory_history(enabled=None)
        logger.info("trace written, path=%s", path)
        self._on_event(ProfileWritten(self._last, self._first + 1, path, snapshot))


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
