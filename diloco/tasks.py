"""Pieces of work that run side by side in one loop: their first failure, and their news.

Belongs to the loop that it is used in; nothing here knows what the work is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from diloco.errors import DilocoError

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class Tasks:
    """Running work; `failure` is the first reason why it cannot go on, and stays.

    `on_news` is called at every change that others may see, before those who wait are woken.
    """

    def __init__(self, on_news: Callable[[], None]) -> None:
        """Assign only."""
        self.failure: DilocoError | None = None
        self._on_news = on_news
        self._news = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def news(self) -> asyncio.Event:
        """What the next change sets."""
        return self._news

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` next to the rest; its error is a failure, its cancellation is none."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    async def finish(self, work: Coroutine[Any, Any, None], what: str) -> None:
        """Do `work` to its end; its error is a failure, and nobody else's.

        Args:
            work: To do now.
            what: It does, after "cannot", for an error.
        """
        try:
            await work
        except DilocoError as error:
            self.fail(error)
        except Exception as error:  # of a thread that computes, or of its device
            logger.error("cannot %s", what, exc_info=error)
            self.fail(
                DilocoError(
                    f"cannot {what}: {error!r}. Start the island again; if that fails too, look at "
                    f"the machine's memory and device (dmesg, nvidia-smi -q)"
                )
            )

    async def stop(self) -> None:
        """Cancel everything that runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def fail(self, error: DilocoError) -> None:
        """Stop being able to go on; the first error stays."""
        if self.failure is None:
            logger.error("exchange failed: %s", error)
            self.failure = error
        self.notify()

    def notify(self) -> None:
        """Tell the news, and wake anyone who waits for some."""
        self._on_news()
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def wait_until(self, is_so: Callable[[], bool], at_most_s: float) -> None:
        """Wait until something is so, or until a failure, or for time to pass."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(at_most_s):
                while self.failure is None and not is_so():
                    await self._news.wait()

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not isinstance(error, DilocoError):
            logger.error("exchange task failed", exc_info=error)
            error = DilocoError(f"the exchange with the syncer failed: {error!r}")
        self.fail(error)


async def wait_for(news: asyncio.Event, at_most_s: float) -> None:
    """Wait for news or for time to pass, whichever is first."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(at_most_s):
            await news.wait()


async def all_of(work: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Do all `work` at once, and none of it any more once a piece has failed."""
    tasks = [asyncio.create_task(piece) for piece in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
