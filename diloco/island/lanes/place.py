"""Where lanes are: collected, passed between ranks and computed in one place, kept in one.

    no accelerator               both are the CPU
    there is room for all        both are the device; nothing is copied
    for what comes and goes      computed on the device, kept in pinned host memory: copied up to be
                                 computed with and down to be kept, a lane at a time, on the stream
                                 of the thread that asks, and no thread waits
    for nothing                  both are the CPU

Work on values that the exchange needs is done by a thread of its own: the loop of the exchange, in
which calls are answered, neither computes nor waits for a device.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

import torch
from torch import Tensor

from diloco.device_thread import DeviceThread
from diloco.pinned_memory import PinnedRooms

_T = TypeVar("_T")
_CPU = torch.device("cpu")


class LanePlace:
    """Where lanes are computed and where they are kept; the default is the CPU, and no thread.

    Attributes:
        device: Where they are collected, passed and computed.
        is_apart: Whether they are kept in host memory, and that is elsewhere.

    Args:
        device: See the attributes.
        is_apart: See the attributes.
        thread: Does the work of `run`; None: the caller does.
    """

    def __init__(
        self,
        device: torch.device = _CPU,
        *,
        is_apart: bool = False,
        thread: DeviceThread | None = None,
    ) -> None:
        """Assign only."""
        self.device = device
        self.is_apart = is_apart
        self._thread = thread
        self._rooms = PinnedRooms(device)
        self._copied: deque[tuple[torch.cuda.Event, Tensor]] = deque()
        self._copying = threading.Lock()

    def there(self, values: Tensor, device: torch.device | None = None) -> Tensor:
        """Return values where they are computed with, or on a device, in this thread's stream.

        Values that are there already are nobody else's before that stream has read them.
        """
        device = device or self.device
        if values.is_cuda:
            values.record_stream(torch.cuda.current_stream(values.device))
        copy = values.to(device, non_blocking=True)
        if copy.is_cuda and copy is not values:
            event = torch.cuda.current_stream(device).record_event()
            with self._copying:  # held until they are copied: they may be of `PinnedRooms`
                self._copied.append((event, values))
                while self._copied and self._copied[0][0].query():  # type: ignore[no-untyped-call]
                    self._copied.popleft()
        return copy

    def kept(self, values: Tensor) -> Tensor:
        """Return what was computed where it is kept; there once this thread's stream is done."""
        return self.copied(values) if self.is_apart else values

    def copied(self, values: Tensor) -> Tensor:
        """Copy values from anywhere to where they are kept; likewise."""
        if self.is_apart:
            return self._rooms.take(values.numel()).copy_(values, non_blocking=True)
        return values.to(self.device, copy=True, memory_format=torch.contiguous_format)

    def release(self) -> None:
        """Give back host memory for lanes that nobody holds."""
        self._rooms.release()

    def run(self, work: Callable[[], _T]) -> Awaitable[_T]:
        """Do some work, to be awaited: return what it returns, or raise what it raises.

        What is submitted is done in order. It begins when what was submitted to the device before
        is there, and is done when the device has done it.
        """
        if self._thread is None:
            done = asyncio.get_running_loop().create_future()
            done.set_result(work())
            return done
        return asyncio.wrap_future(self._thread.submit(self.device, work))
