"""Threads for work on a device next to the training thread: streams of their own, and their order.

On CUDA work runs on a stream of its own, so that training goes on meanwhile. The work of a
`DeviceThread` begins when what was submitted to the device before it is there, and is done when the
device has done it: anyone who waits for it may use what it wrote on any stream. Another thread, the
IO thread, takes a stream (`take_stream`), and waits for what was `launched` before. The training
thread itself launches on a `SideStream` what is to be done next to its own work.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_T = TypeVar("_T")


def take_stream(device: torch.device) -> None:
    """Let what this thread submits to a device run on a stream of its own from now on."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


def launched(device: torch.device) -> Callable[[], None]:
    """Mark what this thread has submitted to a device so far.

    Returns:
        To be called in another thread: what that submits from then on begins when this is done. No
        thread waits.
    """
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.current_stream(device).record_event()
    return lambda: torch.cuda.current_stream(device).wait_event(event)


def wait_until_done(device: torch.device) -> None:
    """Wait until a device has done what this thread has submitted to its stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class SideStream:
    """A stream next to that on which a thread computes, for work that this thread launches itself.

    On a CPU there is none: work is done when `submit` returns.
    """

    def __init__(self, device: torch.device) -> None:
        """Assign only."""
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._done: torch.cuda.Event | None = None

    def submit(self, work: Callable[[], object], *, at_once: bool = False) -> Callable[[], None]:
        """Launch some work, to begin after what this thread has submitted to the device so far.

        Args:
            work: Called here.
            at_once: Whether it begins without that: it reads host memory, and writes to new.

        Returns:
            Waits, in any thread, until the device has done it.
        """
        if self._device.type != "cuda":
            work()
            return lambda: None
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        if not at_once:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._done = self._stream.record_event(done)
        return self._done.synchronize

    def precede(self) -> None:
        """Let what this thread submits from now on begin when all work is done; no thread waits."""
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)


class DeviceThread:
    """One thread, and on CUDA one stream; work is done in order."""

    def __init__(self, name: str) -> None:
        """Name the thread; it starts with the first work."""
        self._pool = ThreadPoolExecutor(1, name)
        self._stream: torch.cuda.Stream | None = None

    def submit(
        self, device: torch.device, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> Future[_T]:
        """Do some work after what was submitted earlier.

        Args:
            device: On which; one and the same in all calls.
            work: Called in the thread with what follows.
            args: Of the work.
            kwargs: Of the work.
        """
        if device.type != "cuda":
            return self._pool.submit(work, *args, **kwargs)
        written = torch.cuda.current_stream(device).record_event()

        def on_stream() -> _T:
            torch.cuda.set_device(device)
            if self._stream is None:
                self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(written)
                try:
                    return work(*args, **kwargs)
                finally:  # also where it fails: nobody uses memory again that it still writes to
                    self._stream.synchronize()

        return self._pool.submit(on_stream)
