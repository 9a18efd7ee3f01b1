"""The IO thread of a rank: one event loop beside the training thread.

It moves bytes and runs codecs; it never issues a collective and never touches a parameter.

Source: protocol.md section 6.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class IoThread:
    """An event loop in a thread of its own. `start` and `stop` bracket its life."""

    def __init__(self) -> None:
        """Assign only."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="diloco-io", daemon=True)

    def start(self) -> None:
        """Begin to run the loop."""
        self._thread.start()

    def post(self, action: Callable[..., object], *arguments: object) -> None:
        """Run `action(*arguments)` in the loop soon; actions run in the order posted."""
        self._loop.call_soon_threadsafe(action, *arguments)

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run `work` in the loop, after what was posted, and wait for its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def drive(self, waits: Iterable[Coroutine[Any, Any, None]]) -> None:
        """Run one of the session's generators: whatever it yields is awaited in the loop."""
        for wait in waits:
            self.run(wait)

    def stop(self) -> None:
        """Stop the loop and end the thread; unfinished tasks are cancelled."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(_cancel_all())
            self._loop.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
