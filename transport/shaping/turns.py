"""Limits the payloads of a transport under way at once, so that each of them moves.

What has come of a message counts once the message is whole. Where as many streams as there are
lanes share a thin line, all of their messages are whole at the same late time, and until then
every one of them is silent. Here a payload begins when the line can carry a message of each that
is under way within `MOVE_S`; anyone who waits for that has not called yet, and no deadline counts.

Processes that share a line each measure their share of it, and each has at least one payload under
way. 16 with 1.25 MiB each over 2 Mbit/s needed 84 s, as the line does; 64 with 0.5 MiB each 175 s
instead of 134 s, and 1.3 times their bytes: all came.

`may_begin` and `RateMeter` are pure; `Turns` runs them on the clock of the loop it is used in.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable

from diloco.transport.framing import WHOLE_BYTES

#: Seconds within which a message of each payload under way should move.
MOVE_S = 10.0
#: Bytes of messages under way as long as the line's rate is not known.
START_BYTES = 4 << 20
#: A rate is that of the last messages, so many at least, and of all within so many seconds: those
#: of streams side by side are whole at the same time, and say little of the time between.
_LEAST_MESSAGES = 4
_WINDOW_S = 2 * MOVE_S
#: It is believed after so much time, or so many bytes: buffers before a line swallow some at once.
_LEAST_S = 0.5
_LEAST_BYTES = 16 << 20


def may_begin(
    num_bytes: int, *, under_way: int, under_way_bytes: int, rate_bps: float | None
) -> bool:
    """Say whether another payload may begin to move.

    Args:
        num_bytes: Of one of its messages.
        under_way: Payloads that move; the first may always begin.
        under_way_bytes: Of one message of each.
        rate_bps: Of the line, in bits per second; None: not known.
    """
    together = under_way_bytes + num_bytes
    if under_way == 0:
        return True
    if rate_bps is None:
        return together <= START_BYTES
    return 8 * together <= rate_bps * MOVE_S


class RateMeter:
    """Measures what a line moves while a payload is under way; idle time does not count."""

    def __init__(self) -> None:
        """Begin with nothing measured."""
        self._num_moving = 0
        self._busy_s = 0.0  # up to `_since`
        self._since = 0.0
        self._moved: deque[tuple[float, int]] = deque()  # by busy seconds
        self._bytes = 0  # of all of them
        self._from_s = 0.0  # when the first of them began, at the latest
        self._rate_bps: float | None = None

    def change(self, now: float, by: int) -> None:
        """Note that so many more payloads move, or fewer."""
        self._busy_s, self._since = self._at(now), now
        self._num_moving += by

    def moved(self, now: float, num_bytes: int) -> None:
        """Note that a message of so many bytes has moved."""
        self._bytes += num_bytes
        self._moved.append((self._at(now), num_bytes))

    def rate_bps(self, now: float) -> float | None:
        """Return the rate of the last messages; None before enough has moved."""
        at, moved = self._at(now), self._moved
        while len(moved) > _LEAST_MESSAGES and moved[0][0] < at - _WINDOW_S:
            self._from_s, num_bytes = moved.popleft()
            self._bytes -= num_bytes
        seconds = at - self._from_s
        if self._bytes and (seconds >= _LEAST_S or self._bytes >= _LEAST_BYTES):
            self._rate_bps = 8 * self._bytes / max(seconds, 1e-3)
        return self._rate_bps

    def _at(self, now: float) -> float:
        return self._busy_s + (now - self._since if self._num_moving else 0.0)


class Turn:
    """One payload's place among those of its transport, one way."""

    def __init__(self, turns: Turns, payload_bytes: int) -> None:
        """Assign only; `Turns.take` makes it one that is under way."""
        self.num_bytes = min(payload_bytes, turns.message_bytes)
        self.on_moved: Callable[[], None] | None = None
        self._turns = turns
        self._is_moving = False
        self._is_over = False

    async def take(self) -> None:
        """Return when it may begin to move; `give` must follow."""
        await self._turns.take(self)

    def begin(self) -> None:
        """Note that it begins to move: from now on the line's rate shows in it."""
        if self.num_bytes and not (self._is_moving or self._is_over):
            self._is_moving = True
            self._turns.meter.change(asyncio.get_running_loop().time(), 1)

    def moved(self, num_bytes: int) -> None:
        """Note that a message of it has moved."""
        if self._is_moving:
            self._turns.meter.moved(asyncio.get_running_loop().time(), num_bytes)
            self._turns.look()  # the line may be seen to carry more
        if self.on_moved is not None:
            self.on_moved()

    def give(self) -> None:
        """Note that all of it has moved, or that its call has ended; twice is harmless."""
        self._is_over = True
        if self._is_moving:
            self._is_moving = False
            self._turns.meter.change(asyncio.get_running_loop().time(), -1)
        self._turns.give(self)


class Turns:
    """Which payloads may move now, one way over one line; first come, first served."""

    def __init__(self, message_bytes: int) -> None:
        """Begin with nothing under way; `message_bytes` is the largest of one payload."""
        self.message_bytes = message_bytes
        self.meter = RateMeter()
        self._waiting: deque[tuple[Turn, asyncio.Future[None]]] = deque()
        self._under_way: set[Turn] = set()

    async def take(self, turn: Turn) -> None:
        """Return when a payload, if there is any, may begin to move; `give` must follow."""
        if not turn.num_bytes:
            return
        if not self._waiting and self._may_begin(turn):
            self._under_way.add(turn)
            return
        has_come = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, has_come))
        await has_come

    def give(self, turn: Turn) -> None:
        """Take a payload out, whether it moved or waited."""
        self._under_way.discard(turn)
        self.look()

    def look(self) -> None:
        """Let those begin that may."""
        while self._waiting:
            turn, has_come = self._waiting[0]
            if not has_come.done():
                if not self._may_begin(turn):
                    break
                self._under_way.add(turn)
                has_come.set_result(None)
            self._waiting.popleft()

    def _may_begin(self, turn: Turn) -> bool:
        return may_begin(
            turn.num_bytes,
            under_way=len(self._under_way),
            under_way_bytes=sum(each.num_bytes for each in self._under_way),
            rate_bps=self.meter.rate_bps(asyncio.get_running_loop().time()),
        )


class UnderWay:
    """The two payloads of one call, the caller's and the reply's."""

    def __init__(self, sending: Turn, receiving: Turn) -> None:
        """Assign only."""
        self.sending, self.receiving = sending, receiving

    def on_moved(self, moved: Callable[[], None]) -> None:
        """Call this as each message of the payloads has moved."""
        self.sending.on_moved = self.receiving.on_moved = moved

    def end(self) -> None:
        """Let others begin: this call has ended."""
        for turn in (self.sending, self.receiving):
            turn.on_moved = None
            turn.give()


class LineTurns:
    """The turns of one transport's payloads: both ways, those of rounds and bulk apart.

    And apart those that travel in one message (`WHOLE_BYTES`): they do not wait for large ones.
    """

    def __init__(self, message_bytes: int) -> None:
        """Begin with nothing under way."""
        self._turns: defaultdict[tuple[str, bool, bool], Turns] = defaultdict(
            lambda: Turns(message_bytes)
        )

    def call(self, payload_bytes: int, reply_bytes: int, *, is_bulk: bool) -> UnderWay:
        """Return what a call moves, which has no turn yet."""

        def turn(way: str, num_bytes: int) -> Turn:
            return Turn(self._turns[way, is_bulk, num_bytes <= WHOLE_BYTES], num_bytes)

        return UnderWay(turn("out", payload_bytes), turn("back", reply_bytes))

    @contextlib.asynccontextmanager
    async def turn(
        self, payload_bytes: int, reply_bytes: int, *, is_bulk: bool
    ) -> AsyncIterator[UnderWay]:
        """Wait until a call may begin whose payload and reply have so many bytes, at most."""
        under_way = self.call(payload_bytes, reply_bytes, is_bulk=is_bulk)
        try:
            await under_way.sending.take()
            await under_way.receiving.take()
            yield under_way
        finally:
            under_way.end()
