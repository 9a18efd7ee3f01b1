"""A TCP proxy that is a bad line: it throttles, flips bits, cuts connections, or falls silent.

It lies below TLS, connections and messages, `diloco.transport.shaping.faulty` above them: what it
damages or delays is left to the transport's own checksums, deadlines and resumption.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import Sequence
from typing import TypeAlias

_BLOCK_BYTES = 4 << 10
#: Of the proxy's sockets: what a real line does not hold on to either.
_BUFFER_BYTES = 64 << 10
#: What sleeps are rounded up to.
_TICK_S = 0.001
#: Seconds in which what has passed is read before its connection is reset.
_READ_S = 0.01

_Ends: TypeAlias = tuple[asyncio.StreamWriter, asyncio.StreamWriter]


class Way:
    """One direction, shared by all connections.

    Attributes:
        num_bytes: Passed so far.
        num_slowed: Blocks so far that met a rate.
        num_flips: Bits flipped so far.
    """

    def __init__(
        self, rate_bps: float, damage_every_bytes: float, cuts: Sequence[int], seed: int
    ) -> None:
        """See `ShapedLine`."""
        self.num_bytes = self.num_slowed = self.num_flips = 0
        self._free = 0.0
        self._rng = random.Random(seed)
        self.change(rate_bps, damage_every_bytes)
        self._cuts = list(cuts)
        self._cut_at: float = self._next_cut()

    def change(self, rate_bps: float, damage_every_bytes: float) -> None:
        """Carry at another rate from now on, and damage otherwise; called in the line's loop."""
        self.rate_bps, self.damage_every_bytes = rate_bps, damage_every_bytes
        self._flip_in = self._draw()

    def _draw(self) -> float:
        mean = self.damage_every_bytes
        return self._rng.uniform(0.5 * mean, 1.5 * mean) if mean else float("inf")

    def _next_cut(self) -> float:
        return self.num_bytes + self._cuts.pop(0) if self._cuts else float("inf")

    async def carry(self, data: bytes) -> bytes:
        """Return what arrives of a block, when it does."""
        loop = asyncio.get_running_loop()
        if self.rate_bps:
            self.num_slowed += 1
            self._free = max(self._free, loop.time()) + 8 * len(data) / self.rate_bps
            if (wait_s := self._free - loop.time()) > _TICK_S:
                await asyncio.sleep(wait_s)
        self.num_bytes += len(data)
        if self._flip_in >= len(data):
            self._flip_in -= len(data)
            return data
        damaged = bytearray(data)
        damaged[int(self._flip_in)] ^= 1 << self._rng.randrange(8)
        self.num_flips += 1
        self._flip_in = self._draw()
        return bytes(damaged)

    def is_cut(self) -> bool:
        """Say whether the next cut is here; each comes once."""
        if self.num_bytes < self._cut_at:
            return False
        self._cut_at = self._next_cut()
        return True


class ShapedLine:
    """Carries bytes between anyone who connects and `target`; `up` is towards the target.

    Attributes:
        num_cuts: Connections cut so far.
    """

    def __init__(
        self,
        target: tuple[str, int],
        *,
        rate_bps: float = 0.0,
        damage_every_bytes: float = 0.0,
        cut_up: Sequence[int] = (),
        cut_down: Sequence[int] = (),
        seed: int = 1,
        besides: ShapedLine | None = None,
    ) -> None:
        """Carry bytes.

        Args:
            target: Host and port.
            rate_bps: Bits per second each way; 0: as fast as they come.
            damage_every_bytes: About so many lie between two flipped bits; 0: none is flipped.
            cut_up: Further bytes upwards after which both sides are reset; each is used once.
            cut_down: The same downwards.
            seed: Of the flips.
            besides: A line to another target that has both ways in common with this one; what they
                do is said there.
        """
        self._target = target
        self.up = Way(rate_bps, damage_every_bytes, cut_up, seed)
        self.down = Way(rate_bps, damage_every_bytes, cut_down, seed + 1)
        if besides is not None:
            self.up, self.down = besides.up, besides.down
        self.num_cuts = 0
        self._open: set[_Ends] = set()
        self._silent: set[_Ends] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> ShapedLine:
        """Listen."""
        listening = _socket()
        listening.bind(("127.0.0.1", 0))
        self._server = await asyncio.start_server(self._accept, sock=listening, limit=_BLOCK_BYTES)
        self.port: int = listening.getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Break what is open."""
        self._server.close()
        for ends in self._open:
            for end in ends:
                end.transport.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def silence(self) -> None:
        """Swallow what travels over the connections that are open now, and keep them open."""
        self._silent |= self._open

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward = _socket()
        onward.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(onward, self._target)
        except OSError:
            onward.close()
            writer.transport.abort()
            return
        there, sink = await asyncio.open_connection(sock=onward, limit=_BLOCK_BYTES)
        ends = writer, sink
        self._open.add(ends)
        for source, end, way in ((reader, sink, self.up), (there, writer, self.down)):
            task = asyncio.create_task(self._pass(source, end, way, ends))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, way: Way, ends: _Ends
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(_BLOCK_BYTES):
                data = await way.carry(data)
                if ends in self._silent:
                    continue
                sink.write(data)
                await sink.drain()
                if way.is_cut():
                    await asyncio.sleep(_READ_S)
                    self.num_cuts += 1
                    for end in ends:
                        _reset(end)
        sink.close()


def _socket() -> socket.socket:
    """Make one that asyncio knows for TCP, and so sends without delay."""
    made = socket.socket(proto=socket.IPPROTO_TCP)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    return made


def _reset(end: asyncio.StreamWriter) -> None:
    """Close with RST: what is unread is lost, as when a path or a host goes away."""
    connection = end.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.transport.abort()
