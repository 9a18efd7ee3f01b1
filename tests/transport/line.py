"""A TCP proxy that is a bad line: a rate each way, and a flipped bit now and then."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket

_BLOCK_BYTES = 4 << 10
#: Of the proxy's sockets: what a real line does not hold on to either.
_BUFFER_BYTES = 64 << 10


class _Way:
    """One direction, shared by all connections.

    Attributes:
        num_bytes: Passed so far.
        num_flips: Bits flipped so far.
    """

    def __init__(self, rate_bps: float, damage_every_bytes: float, seed: int) -> None:
        self.rate_bps, self.damage_every_bytes = rate_bps, damage_every_bytes
        self.num_bytes = self.num_flips = 0
        self._free = 0.0
        self._rng = random.Random(seed)
        self._flip_in = self._draw()

    def _draw(self) -> float:
        mean = self.damage_every_bytes
        return self._rng.uniform(0.5 * mean, 1.5 * mean) if mean else float("inf")

    async def carry(self, data: bytes) -> bytes:
        """Return what arrives of a block, when it does."""
        loop = asyncio.get_running_loop()
        if self.rate_bps:
            self._free = max(self._free, loop.time()) + 8 * len(data) / self.rate_bps
            await asyncio.sleep(self._free - loop.time())
        self.num_bytes += len(data)
        if self._flip_in >= len(data):
            self._flip_in -= len(data)
            return data
        damaged = bytearray(data)
        damaged[int(self._flip_in)] ^= 1 << self._rng.randrange(8)
        self.num_flips += 1
        self._flip_in = self._draw()
        return bytes(damaged)


class Line:
    """Carries bytes between whoever connects and `target`; `up` is towards the target.

    Attributes:
        is_dead: Nothing passes any more while it is true; connections stay open.
    """

    def __init__(
        self,
        target: tuple[str, int],
        *,
        rate_bps: float = 0.0,
        damage_every_bytes: float = 0.0,
        seed: int = 1,
    ) -> None:
        """Carry at `rate_bps` each way, flipping a bit about every so many bytes; 0: neither."""
        self._target = target
        self.up = _Way(rate_bps, damage_every_bytes, seed)
        self.down = _Way(rate_bps, damage_every_bytes, seed + 1)
        self.is_dead = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Line:
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        listening.bind(("127.0.0.1", 0))
        self._server = await asyncio.start_server(self._accept, sock=listening, limit=_BLOCK_BYTES)
        self.port: int = listening.getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward = socket.socket()
        onward.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        onward.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(onward, self._target)
        except OSError:
            onward.close()
            writer.transport.abort()
            return
        there, sink = await asyncio.open_connection(sock=onward, limit=_BLOCK_BYTES)
        self._writers.update((writer, sink))
        for source, end, way in ((reader, sink, self.up), (there, writer, self.down)):
            task = asyncio.create_task(self._pass(source, end, way))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, way: _Way
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(_BLOCK_BYTES):
                sink.write(await way.carry(data))
                while self.is_dead:
                    await asyncio.sleep(0.05)
                await sink.drain()
        sink.close()
