"""Signals that ask a process to end, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Iterator
from types import FrameType
from typing import NoReturn

#: Exit code of a process whose starter died.
_STARTER_DIED = 40
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal asked this process to end; carries its number."""

    def __init__(self, number: int) -> None:
        """Keep the number of the signal."""
        super().__init__(number)
        self.exit_code = _exit_code(number)
        self.number = number


class StopRequest:
    """The stops that signals asked for: a graceful one first, then one that waits for nothing.

    Args:
        num_graceful: Signals that ask kindly.

    Attributes:
        asked: Set by the first signal.
        forced: Set by the first one that does not ask kindly.
        number: Of the first one; 0 before it.
    """

    def __init__(self, num_graceful: int = 0) -> None:
        """Begin unasked."""
        self._num_left = num_graceful
        self.asked = asyncio.Event()
        self.forced = asyncio.Event()
        self.number = 0

    @property
    def exit_code(self) -> int:
        """128 + the first signal's number, as shells have it; 0 when there was none."""
        return _exit_code(self.number) if self.number else 0

    def note(self, number: int) -> None:
        """Count a signal."""
        self.number = self.number or number
        self.asked.set()
        self._num_left -= 1
        if self._num_left < 0:
            self.forced.set()

    def check(self) -> None:
        """Raise `Interrupted` once the end is asked for that waits for nothing.

        To be called where nothing is half done: an exception out of the signal handler could come
        between the birth of a child process and the moment its parent knows it.
        """
        if self.forced.is_set():
            raise Interrupted(self.number)


def note_signals_async(num_graceful: int = 0) -> StopRequest:
    """Note SIGINT, SIGTERM and SIGHUP of a program with an event loop, which runs.

    A signal after the first forced one ends the process.
    """
    loop = asyncio.get_running_loop()
    request = StopRequest(num_graceful)
    numbers = _ending_signals()

    def note(number: int) -> None:
        request.note(number)
        if request.forced.is_set():
            for each in numbers:
                loop.remove_signal_handler(each)

    for number in numbers:
        loop.add_signal_handler(number, note, number)
    return request


@contextlib.contextmanager
def note_signals(num_graceful: int = 0) -> Iterator[StopRequest]:
    """Note signals as `note_signals_async` does, in a program without an event loop.

    Call it in the main thread.
    """
    request = StopRequest(num_graceful)
    numbers = _ending_signals()

    def note(number: int, _: FrameType | None) -> None:
        request.note(number)
        if request.forced.is_set():
            for each in numbers:
                signal.signal(each, signal.SIG_DFL)

    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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


def end_with_starter() -> None:
    """End this process when standard input ends, which its starter holds open while it lives."""

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        os._exit(_STARTER_DIED)

    threading.Thread(target=wait, daemon=True).start()


def exit_at_once(code: int) -> NoReturn:
    """End this process, whatever its threads wait for.

    The destructor of a process group waits for collectives that a failed rank will never join.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _ending_signals() -> list[signal.Signals]:
    """Signals that ask for the end; one that our starter ignores (nohup) stays ignored."""
    return [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]


def _exit_code(number: int) -> int:
    """What a shell reports of a process that a signal ended."""
    return 128 + number
