"""How a process of the control plane learns that it must end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def stop_on_signals() -> asyncio.Event:
    """Return an event that the first SIGTERM or SIGINT sets; the second one ends the process."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()

    def stop() -> None:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
        stopping.set()

    for number in _SIGNALS:
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
