"""The IO thread of a rank: one event loop next to the training thread.

It moves bytes; it computes nothing, never issues a collective and never touches a parameter.

Source: PROTOCOL.md, "Agreement of ranks".
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar

logger = logging.getLogger(__name__)

#: Steps of niceness above training: a third of its CPU time where both want it.
_NICE = 5
#: Seconds for cancelled work to clean up, with what it wrote to disk under way.
_END_S = 30.0

_T = TypeVar("_T")

#: What a step of the outer loop is: it yields whatever has to be waited for, and returns a value.
Waits: TypeAlias = Generator[Coroutine[Any, Any, None], None, _T]


class IoThread:
    """An event loop in a thread of its own. `start` and `stop` bracket its life."""

    def __init__(self) -> None:
        """Assign only."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="diloco-io", daemon=True)
        self._broken: Exception | None = None

    def start(self) -> None:
        """Begin to run the loop."""
        self._thread.start()

    def post(self, action: Callable[..., object], *arguments: object) -> None:
        """Run `action(*arguments)` in the loop soon; actions run in the order posted.

        What an action raises, the next `run` raises in the training thread.
        """
        self._loop.call_soon_threadsafe(self._perform, action, arguments)

    def begin(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Run `work` in the loop, after what was posted; the caller goes on."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run `work` in the loop, after what was posted, and wait for its result.

        Raises:
            RuntimeError: If a posted action raised before; its error is the cause.
        """
        result = self.begin(work).result()
        broken, self._broken = self._broken, None  # told once: the rank still says farewell
        if broken is not None:
            raise RuntimeError(
                f"an action posted to the IO thread failed: {type(broken).__name__}: {broken}"
            ) from broken
        return result

    def drive(self, waits: Waits[_T]) -> _T:
        """Await whatever a generator of the outer loop yields in the loop; return its value."""
        while True:
            try:
                wait = next(waits)
            except StopIteration as end:
                value: _T = end.value
                return value
            self.run(wait)

    def stop(self) -> None:
        """Stop the loop and end the thread; unfinished tasks are cancelled."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=_END_S)
        if self._thread.is_alive():
            logger.error("the IO thread has not ended within %g s and is left behind", _END_S)

    def _perform(self, action: Callable[..., object], arguments: tuple[object, ...]) -> None:
        try:
            action(*arguments)
        except Exception as error:
            logger.exception("action failed, action=%s", action)
            self._broken = self._broken or error

    def _run(self) -> None:
        _yield_to_training()
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(_cancel_all())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()


def _yield_to_training() -> None:
    """Let the training thread have the CPU where both want it; this thread's children, too."""
    if sys.platform == "linux":  # elsewhere a priority is that of the whole process
        thread = threading.get_native_id()
        nice = os.getpriority(os.PRIO_PROCESS, thread) + _NICE
        os.setpriority(os.PRIO_PROCESS, thread, min(nice, 19))


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
