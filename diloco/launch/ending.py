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


class StopSignals:
    """What signals ask of a process with an event loop: a graceful stop first, then any stop.

    Attributes:
        asked: Set by the first SIGTERM, SIGINT or SIGHUP.
        forced: Set by the second; a third one ends the process.
        number: Of the first; 0 before it.
    """

    def __init__(self) -> None:
        """Begin unasked; `heed` installs the handlers."""
        self.asked = asyncio.Event()
        self.forced = asyncio.Event()
        self.number = 0

    def heed(self) -> None:
        """Take over the signals of the running loop's process."""
        loop = asyncio.get_running_loop()
        numbers = _heeded()

        def note(number: int) -> None:
            if self.asked.is_set():
                for each in numbers:
                    loop.remove_signal_handler(each)
                self.forced.set()
            self.number = self.number or number
            self.asked.set()

        for number in numbers:
            loop.add_signal_handler(number, note, number)

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as shells have it; 0 when there was none."""
        return 128 + self.number if self.number else 0


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
    """Whether signals have asked for the end, and how many.

    Args:
        num_graceful: Signals that ask kindly: they are noted, and `check` lets them pass.
    """

    def __init__(self, num_graceful: int = 0) -> None:
        """Begin unasked."""
        self._num_graceful = num_graceful
        self._times = 0
        self.number = 0

    @property
    def is_forced(self) -> bool:
        """Whether more was asked for than a graceful stop."""
        return self._times > self._num_graceful

    def note(self, number: int) -> None:
        """Count a signal; the number of the first one stays in `number`, 0 before it."""
        self.number = self.number or number
        self._times += 1

    def check(self) -> None:
        """Raise `Interrupted` once the end is asked for that waits for nothing.

        To be called where nothing is half done: an exception out of the signal handler could come
        between the birth of a child process and the moment its parent knows it.
        """
        if self.is_forced:
            raise Interrupted(self.number)


@contextlib.contextmanager
def heeding_signals(num_graceful: int = 0) -> Iterator[Request]:
    """Note SIGINT, SIGTERM and SIGHUP; the one after the first forced one ends the process.

    For programs without an event loop; call it in the main thread.
    """
    request = Request(num_graceful)
    numbers = _heeded()

    def note(number: int, _: FrameType | None) -> None:
        request.note(number)
        if request.is_forced:
            for each in numbers:
                signal.signal(each, signal.SIG_DFL)

    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _heeded() -> list[signal.Signals]:
    """Signals that ask for the end; one that our starter ignores (nohup) stays ignored."""
    return [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
