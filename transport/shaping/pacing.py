"""Paces payloads: one rate for a process, payloads of rounds before bulk transfers.

    next departure = departure + 8 bytes WIRE_SHARE / rate        (`link.LinkQueue`, no delay)

Payloads of rounds go before those of bulk transfers (whole models). A bulk chunk leaves when no
payload of a round is moving, or when it has waited `BULK_PATIENCE_S` and none has left for as
long, so that a busy run does not keep an island out for ever, however many wait. Only payloads
are paced: calls without one, such as heartbeats, never wait here.

`Departures` is pure; `Pacer` runs it on the clock of the loop that it is used in.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from diloco.transport.framing import MAX_CHUNKS, SMALL_CHUNK_BYTES
from diloco.transport.shaping.link import Link, LinkQueue

#: What a payload byte costs on the wire: TCP/IP, HTTP/2 and TLS headers in packets of 1500 bytes.
WIRE_SHARE = 1.05
#: Time that one message takes at the configured rate, at most: what others may have to wait.
TURN_S = 0.010
_MIN_CHUNK_BYTES = 4 << 10
#: Chunk of a bulk transfer: what a round may have to wait for where no rate is configured.
BULK_CHUNK_BYTES = 256 << 10
BULK_PATIENCE_S = 1.0
#: A payload of a round of which nothing has left for so long is stuck, and holds nobody up.
STUCK_S = 5.0


class Departures:
    """Decides how long the next chunk of either class has to wait."""

    def __init__(self, rate_bps: float, bulk_rate_bps: float) -> None:
        """Pace everything to the first rate, bulk to the second as well; 0: no such limit."""
        self._line = _line(rate_bps)
        self._bulk_line = _line(bulk_rate_bps)
        self._free = self._bulk_free = self._last_round = self._last_bulk = float("-inf")

    def wait_s(self, now: float) -> float:
        """Say how long a chunk of a round has to wait; 0: it may leave now."""
        return max(self._free - now, 0.0)

    def bulk_wait_s(self, now: float, since: float, *, rounds_moving: bool) -> float:
        """Say how long a bulk chunk has to wait that has done so `since` then, as things are."""
        until = max(self._free, self._bulk_free)
        if rounds_moving:
            until = max(until, min(self._last_round + STUCK_S, self.patient_from(since)))
        return max(until - now, 0.0)

    def patient_from(self, since: float) -> float:
        """Say when a bulk chunk that waits `since` then goes before rounds, if none leaves."""
        return max(since, self._last_bulk) + BULK_PATIENCE_S

    def leave(self, now: float, num_bytes: int, *, is_bulk: bool) -> None:
        """Note that a chunk leaves."""
        on_wire = round(num_bytes * WIRE_SHARE)
        if self._line is not None:
            self._free, _ = self._line.reserve(now, on_wire)
        if not is_bulk:
            self._last_round = now
            return
        self._last_bulk = now
        if self._bulk_line is not None:
            self._bulk_free, _ = self._bulk_line.reserve(now, on_wire)


def _line(rate_bps: float) -> LinkQueue | None:
    return LinkQueue(Link(rate_bps, 0.0), seed=0) if rate_bps else None


@dataclass(slots=True)
class _Waiter:
    num_bytes: int
    since: float
    may_leave: asyncio.Future[None]


class Pacer:
    """Paces all payloads that one process sends, over whatever connections."""

    def __init__(self, rate_bps: float = 0.0, bulk_rate_bps: float = 0.0) -> None:
        """Keep the rates, in bits per second on the wire; 0: no limit."""
        self.rate_bps = rate_bps
        self.bulk_rate_bps = bulk_rate_bps
        self._departures = Departures(rate_bps, bulk_rate_bps)
        self._rounds: deque[_Waiter] = deque()
        self._bulk: deque[_Waiter] = deque()
        self._num_moving = 0
        self._news = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None

    def chunk_bytes(
        self, largest: int, payload_bytes: int, *, is_bulk: bool, is_small: bool = False
    ) -> int:
        """Choose a chunk size, such that one chunk takes at most `TURN_S` at the rate.

        Args:
            largest: Chunk size of the configuration.
            payload_bytes: A large payload must not have too many chunks.
            is_bulk: Bulk chunks are smaller even without a rate.
            is_small: Whether they shall be `SMALL_CHUNK_BYTES`, or as small as a payload allows.
        """
        rates = [self.rate_bps, self.bulk_rate_bps if is_bulk else 0.0]
        turns = [int(rate * TURN_S / 8) for rate in rates if rate]
        if is_bulk:
            turns.append(BULK_CHUNK_BYTES)
        if is_small:
            turns.append(SMALL_CHUNK_BYTES)
        wanted = min([largest, *turns])
        fewest = -(-payload_bytes // MAX_CHUNKS)
        return min(max(wanted, _MIN_CHUNK_BYTES, fewest), largest)

    def s_per_byte(self, *, is_bulk: bool) -> float:
        """Return the seconds that the rate leaves a payload's byte; 0: no limit."""
        rates = [self.rate_bps, self.bulk_rate_bps if is_bulk else 0.0]
        return max((8 * WIRE_SHARE / rate for rate in rates if rate), default=0.0)

    @contextlib.contextmanager
    def moving(self, *, is_bulk: bool) -> Iterator[None]:
        """Declare that a payload moves as long as this lasts; bulk waits for rounds."""
        self._num_moving += not is_bulk
        try:
            yield
        finally:
            self._num_moving -= not is_bulk
            self._news.set()

    async def admit(self, num_bytes: int, *, is_bulk: bool) -> None:
        """Return when so many bytes of a payload may leave."""
        loop = asyncio.get_running_loop()
        if not (is_bulk or self.rate_bps):
            self._departures.leave(loop.time(), num_bytes, is_bulk=False)
            return
        waiter = _Waiter(num_bytes, loop.time(), loop.create_future())
        (self._bulk if is_bulk else self._rounds).append(waiter)
        self._news.set()
        if self._serving is None or self._serving.done():
            self._serving = loop.create_task(self._serve())
        await waiter.may_leave

    async def _serve(self) -> None:
        """Let waiters leave, one by one, until there are none."""
        loop = asyncio.get_running_loop()
        while self._drop_ended():
            now = loop.time()
            waits = {line is self._bulk: self._wait_s(line, now) for line in self._waiting()}
            wait_s = min(waits.values())
            if wait_s > 0:
                self._news.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._news.wait()
                continue
            patient_from = self._departures.patient_from
            is_patient = bool(self._bulk) and now >= patient_from(self._bulk[0].since)
            is_bulk = waits.get(True, 1.0) <= 0 and (is_patient or waits.get(False, 1.0) > 0)
            waiter = (self._bulk if is_bulk else self._rounds).popleft()
            self._departures.leave(now, waiter.num_bytes, is_bulk=is_bulk)
            waiter.may_leave.set_result(None)

    def _wait_s(self, line: deque[_Waiter], now: float) -> float:
        if line is self._rounds:
            return self._departures.wait_s(now)
        return self._departures.bulk_wait_s(now, line[0].since, rounds_moving=self._num_moving > 0)

    def _waiting(self) -> list[deque[_Waiter]]:
        return [line for line in (self._rounds, self._bulk) if line]

    def _drop_ended(self) -> bool:
        """Forget whose calls have ended; whether anybody waits still."""
        for line in self._waiting():
            while line and line[0].may_leave.done():
                line.popleft()
        return bool(self._waiting())
