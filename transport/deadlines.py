"""Deadlines of a transport's calls, and of a server's waits for its callers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from diloco.transport.errors import DeadlineExceeded, TransportClosed


class Deadlines:
    """Calls in progress to one peer."""

    def __init__(self, peer: str) -> None:
        """Make one that is open; `peer` is for messages."""
        self._peer = peer
        self._scopes: set[asyncio.Timeout] = set()
        self._is_closed = False

    @contextlib.asynccontextmanager
    async def within(self, method: str, deadline_s: float) -> AsyncIterator[asyncio.Timeout]:
        """Give what is inside `deadline_s` seconds.

        Raises:
            DeadlineExceeded: If it took longer; a `TimeoutError` from inside is left as it is.
            TransportClosed: If `close` was called before or meanwhile.
        """
        self._check_open(method)
        scope = asyncio.timeout(deadline_s)
        self._scopes.add(scope)
        try:
            async with scope:
                yield scope
        except TimeoutError:
            if not scope.expired():  # somebody else's, such as the kernel's ETIMEDOUT
                raise
            self._check_open(method)
            message = f"no answer within {deadline_s:g} s"
            raise DeadlineExceeded(message, peer=self._peer, method=method) from None
        finally:
            self._scopes.discard(scope)

    def close(self) -> None:
        """End what is in progress, and refuse what comes."""
        self._is_closed = True
        for scope in self._scopes:
            if not scope.expired():
                scope.reschedule(asyncio.get_running_loop().time())

    def _check_open(self, method: str) -> None:
        if self._is_closed:
            raise TransportClosed("this transport was closed", peer=self._peer, method=method)


#: Silences for which a stream may be still while others of its connection move.
STILL = 4
#: Looks within a silence: of a pause of this process, no more than the time of one look counts.
_LOOKS = 4


@dataclass(slots=True, weakref_slot=True)
class Movement:
    """When a connection moved last, either way, in seconds of its loop's clock.

    Attributes:
        at: That time; a message that has moved is noted by the one that waits for it.
        has_moved: Says whether a part of a message has moved since it was last asked, where that
            can be known; a message may need longer than a silence, or wait behind others.
    """

    at: float = float("-inf")
    has_moved: Callable[[], bool] = lambda: False

    @contextlib.asynccontextmanager
    async def within(self, silence_s: float) -> AsyncIterator[Callable[[], None]]:
        """Wait for messages of one stream until the connection has been silent for so long.

        Where many streams share a line, the message of each may be long on its way; a stream that
        is still `STILL` times as long is given up although others move. One that waits for several
        messages calls what is given as each has come. Time in which this loop had no turn is
        nobody's silence: words that came meanwhile wait to be read.

        Raises:
            TimeoutError: If it was.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        looking: asyncio.TimerHandle | None = None

        def due() -> float:
            return min(max(began, self.at) + silence_s, began + STILL * silence_s)

        def look(planned: float) -> None:
            nonlocal began, looking
            now = loop.time()
            missed_s = now - planned
            began, self.at = began + missed_s, min(self.at + missed_s, now)
            if due() <= now and self.has_moved():
                self.at = now
            if due() > now:
                at = min(due(), now + silence_s / _LOOKS)
                looking = loop.call_at(at, look, at)
            else:
                looking = None
                scope.reschedule(due())

        def moved() -> None:
            nonlocal began
            self.at = began = loop.time()

        async with asyncio.timeout(None) as scope:
            look(began)
            try:
                yield moved
            finally:
                if looking is not None:
                    looking.cancel()
        self.at = loop.time()


def restart(scope: asyncio.Timeout, deadline_s: float) -> None:
    """Count a deadline from now on; one that has passed has the last word."""
    if not scope.expired():
        scope.reschedule(asyncio.get_running_loop().time() + deadline_s)


def seconds_left(scope: asyncio.Timeout) -> float:
    """How long `scope` still has, never 0: at the very end the scope has the last word."""
    until = scope.when()
    assert until is not None
    return max(until - asyncio.get_running_loop().time(), 1e-9)
