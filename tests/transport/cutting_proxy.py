"""A TCP proxy that cuts connections after so many bytes, and counts what passed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct

_BLOCK_BYTES = 16 << 10
#: Between two blocks, so that what has passed has also been read when the cut comes.
_PAUSE_S = 0.0005


class CuttingProxy:
    """Passes bytes on until its next cut, which resets both sides.

    Attributes:
        up_bytes: Passed from the caller to the server.
        down_bytes: The other way.
        num_cuts: Connections cut so far.
    """

    def __init__(self, target: tuple[str, int], *, up: list[int], down: list[int]) -> None:
        """Cut when so many further bytes have passed up, or down; each number is used once."""
        self._target = target
        self._left = {"up": list(up), "down": list(down)}
        self._budget = {way: self._next(way) for way in ("up", "down")}
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.up_bytes = self.down_bytes = self.num_cuts = 0

    async def __aenter__(self) -> CuttingProxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, onward = await asyncio.open_connection(*self._target)
        ends = (writer, onward)
        self._writers.update(ends)
        for source, sink, way in ((reader, onward, "up"), (there, writer, "down")):
            task = asyncio.create_task(self._pass(source, sink, way, ends))
            self._tasks.add(task)

    async def _pass(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        way: str,
        ends: tuple[asyncio.StreamWriter, ...],
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(_BLOCK_BYTES):
                self._count(way, len(data))
                sink.write(data)
                await sink.drain()
                await asyncio.sleep(_PAUSE_S)
                if self._budget[way] <= 0:
                    self._budget[way] = self._next(way)
                    self.num_cuts += 1
                    for end in ends:
                        _reset(end)
                    return
        sink.close()

    def _count(self, way: str, num_bytes: int) -> None:
        self._budget[way] -= num_bytes
        if way == "up":
            self.up_bytes += num_bytes
        else:
            self.down_bytes += num_bytes

    def _next(self, way: str) -> float:
        return self._left[way].pop(0) if self._left[way] else float("inf")


def _reset(end: asyncio.StreamWriter) -> None:
    """Close with RST: what is unread is lost, as when a path or a host goes away."""
    connection = end.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.transport.abort()
