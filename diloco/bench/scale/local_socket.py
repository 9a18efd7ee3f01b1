"""Calls over a Unix socket: what is measured is the handlers' work, and little of the calls'.

A server has the limits of the product's own (`Turnstile`), its callers named by their connections,
and counts what it refuses, how long each handler held its loop, and how many calls waited.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import resource
import struct
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.transport.calls.limits import Limits, Turnstile
from diloco.transport.contracts import Buffer, Handlers, Reply
from diloco.transport.errors import DeadlineExceeded, HandlerFailed, NotYet, Overloaded, PeerReset
from diloco.transport.transfer import Transfer

#: Number of the call, length of what follows, of the method (or whether it failed), of the header.
_FRAME = struct.Struct("<IIII")
_WAKE_S = 0.005
#: Method that answers with a server's figures.
FIGURES = "bench.figures"
_ERRORS = {each.__name__: each for each in (NotYet, Overloaded, HandlerFailed)}


class _Frames(asyncio.Protocol):
    """One end of a connection: sends frames, and gives those that come to `on_frame`."""

    def __init__(self, on_frame: Callable[[_Frames, int, int, bytes, bytes], None]) -> None:
        self._on_frame = on_frame
        self._transport: asyncio.Transport | None = None
        self._data = bytearray()
        self.on_lost: Callable[[], None] = lambda: None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self.on_lost()

    def data_received(self, data: bytes) -> None:
        self._data += data
        at = 0
        while len(self._data) - at >= _FRAME.size:
            number, size, kind, header_size = _FRAME.unpack_from(self._data, at)
            begin, end = at + _FRAME.size, at + _FRAME.size + size
            if end > len(self._data):
                break
            header = bytes(self._data[begin : begin + header_size])
            self._on_frame(self, number, kind, header, bytes(self._data[begin + header_size : end]))
            at = end
        del self._data[:at]

    def send(self, number: int, kind: int, header: bytes, rest: Buffer) -> None:
        assert self._transport is not None
        frame = _FRAME.pack(number, len(header) + memoryview(rest).nbytes, kind, len(header))
        if not self._transport.is_closing():
            self._transport.write(b"".join((frame, header, rest)))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


@dataclass(slots=True)
class _Call:
    """A call that came; all of its payload is here."""

    method: str
    header: bytes
    payload: Buffer
    peer: str
    has_asked: bool = True
    caller = None
    is_local = True

    @property
    def payload_bytes(self) -> int:
        return len(self.payload)

    async def read_payload(self) -> Buffer:
        return bytearray(self.payload)


class _Timed:
    """Awaits a handler, and adds up the seconds for which it held the loop."""

    def __init__(self, work: Coroutine[Any, Any, Reply]) -> None:
        self._work = work
        self.held_s = 0.0

    def __await__(self) -> Generator[Any, Any, Reply]:
        sent: Any = None
        raised: BaseException | None = None
        while True:
            began = time.perf_counter()
            try:
                awaited = self._work.send(sent) if raised is None else self._work.throw(raised)
            except StopIteration as end:
                reply: Reply = end.value
                return reply
            finally:
                self.held_s += time.perf_counter() - began
            raised = None
            try:
                sent = yield awaited
            except BaseException as error:  # a cancellation is the handler's
                raised = error


class CountingServer:
    """Serves handlers at a Unix socket, and counts."""

    def __init__(self, handlers: Handlers, limits: Limits) -> None:
        """Assign only; `refusals` may be given more that were refused."""
        self._handlers = handlers
        self._turnstile = Turnstile(limits)
        self._names = itertools.count()
        self._server: asyncio.AbstractServer | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.refusals = Counter[str]()
        self._held_s: dict[str, list[float]] = {}
        self._waiting = self._most_waiting = 0
        self._stall_s = 0.0

    async def start(self, path: Path) -> None:
        """Serve until the process ends."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(self._connected, path, backlog=4096)
        self._begin(self._watch())

    def figures(self) -> dict[str, Any]:
        """Say what was counted so far, JSON values."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "held_s": self._held_s,
            "refusals": dict(self.refusals),
            "most_waiting": self._most_waiting,
            "stall_s": self._stall_s,
            "cpu_s": usage.ru_utime + usage.ru_stime,
            "peak_bytes": _peak_bytes(),
        }

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(_WAKE_S)
            self._stall_s = max(self._stall_s, loop.time() - before - _WAKE_S)

    def _connected(self) -> _Frames:
        name = f"connection-{next(self._names)}"

        def on_frame(frames: _Frames, number: int, kind: int, header: bytes, rest: bytes) -> None:
            method = rest[:kind].decode()
            self._begin(self._answer(frames, number, _Call(method, header, rest[kind:], name)))

        return _Frames(on_frame)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(task := asyncio.get_running_loop().create_task(work))
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, frames: _Frames, number: int, call: _Call) -> None:
        if call.method == FIGURES:
            frames.send(number, 0, json.dumps(self.figures()).encode(), b"")
            return
        try:
            reply = await self._counted(call)
        except Exception as error:
            self.refusals[f"{call.method}: {type(error).__name__}: {str(error)[:120]}"] += 1
            frames.send(number, 1, type(error).__name__.encode(), str(error).encode())
            return
        frames.send(number, 0, reply.header, reply.payload)
        reply.on_sent()

    async def _counted(self, call: _Call) -> Reply:
        turnstile, method = self._turnstile, call.method
        turnstile.enter(call.peer, method, asyncio.get_running_loop().time())
        self._waiting += 1
        self._most_waiting = max(self._most_waiting, self._waiting)
        timed = _Timed(self._handlers[method](call))  # type: ignore[arg-type]  # all are coroutines
        held_bytes = 0
        try:
            held_bytes = turnstile.hold(call.peer, len(call.header))
            return await timed
        finally:
            self._waiting -= 1
            turnstile.leave(call.peer, method, held_bytes)
            self._held_s.setdefault(method, []).append(timed.held_s)


def _peak_bytes() -> int:
    """Give the most that this program has had in memory; rusage has its parent's, too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


class SocketTransport:
    """Calls of one caller."""

    def __init__(self, path: Path) -> None:
        """Assign only; the first call connects."""
        self.peer = str(path)
        self._frames: _Frames | None = None
        self._connecting = asyncio.Lock()
        self._numbers = itertools.count()
        self._awaited: dict[int, asyncio.Future[Reply]] = {}

    async def call(
        self,
        method: str,
        header: bytes,
        payload: Buffer = b"",
        *,
        deadline_s: float,
        max_reply_bytes: int = 0,
        transfer: Transfer | None = None,
    ) -> Reply:
        """See `Transport`."""
        if self._frames is None:
            async with self._connecting:
                if self._frames is None:
                    loop = asyncio.get_running_loop()
                    _, frames = await loop.create_unix_connection(
                        lambda: _Frames(self._answered), self.peer
                    )
                    frames.on_lost = self._lost
                    self._frames = frames
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        number = next(self._numbers)
        self._awaited[number] = answer
        name = method.encode()
        self._frames.send(number, len(name), header, name + bytes(payload))
        try:
            async with asyncio.timeout(deadline_s):
                return await answer
        except TimeoutError:
            raise DeadlineExceeded(f"no answer to {method} within {deadline_s:g} s") from None

    async def close(self) -> None:
        """Release the connection."""
        if self._frames is not None:
            self._frames.close()

    def _answered(self, _: _Frames, number: int, kind: int, header: bytes, rest: bytes) -> None:
        answer = self._awaited.pop(number)
        if answer.done():
            return
        if kind:
            error = _ERRORS.get(header.decode(), HandlerFailed)
            answer.set_exception(error(rest.decode()))
        else:
            answer.set_result(Reply(header, rest))

    def _lost(self) -> None:
        for answer in self._awaited.values():
            if not answer.done():
                answer.set_exception(PeerReset("the bench's server has ended"))


async def ask_figures(path: Path) -> dict[str, Any]:
    """Ask a server what it has counted: JSON values."""
    transport = SocketTransport(path)
    reply = await transport.call(FIGURES, b"", deadline_s=60.0)
    await transport.close()
    figures: dict[str, Any] = json.loads(reply.header)
    return figures
