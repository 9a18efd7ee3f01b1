"""How a process learns that it must end, so that nothing it started outlives it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Iterator
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def stop_on_signals() -> asyncio.Event:
    """Return an event that the first SIGTERM, SIGINT or SIGHUP sets; a second ends the process."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    numbers = _heeded()

    def stop() -> None:
        for number in numbers:
            loop.remove_signal_handler(number)
        stopping.set()

    for number in numbers:
        loop.add_signal_handler(number, stop)
    return stopping


async def first_of(*waits: Awaitable[object]) -> None:
    """Wait until one of `waits` returns, cancel the others, and raise what any of them raised."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    for end in ends:
        if isinstance(end, Exception):
            raise end


class Interrupted(BaseException):
    """A signal asked this process to end; carries its number."""

    def __init__(self, number: int) -> None:
        """Keep the number of the signal."""
        super().__init__(number)
        self.number = number

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as shells have it."""
        return 128 + self.number


class Request:
    """Whether a signal has asked for the end."""

    def __init__(self) -> None:
        """Begin unasked."""
        self._number = 0

    def note(self, number: int) -> None:
        """Keep the first signal."""
        self._number = self._number or number

    def check(self) -> None:
        """Raise `Interrupted` once asked.

        To be called where nothing is half done: an exception out of the signal handler could come
        between the birth of a child process and the moment its parent knows it.
        """
        if self._number:
            raise Interrupted(self._number)


@contextlib.contextmanager
def heeding_signals() -> Iterator[Request]:
    """Note the first SIGINT, SIGTERM or SIGHUP; a second one ends the process.

    For programs without an event loop; call it in the main thread.
    """
    request = Request()
    numbers = _heeded()

    def note(number: int, _: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_DFL)
        request.note(number)

    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _heeded() -> list[signal.Signals]:
    """Signals that ask for the end; one that our starter ignores (nohup) stays ignored."""
    return [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
