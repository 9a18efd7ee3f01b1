"""Calls inside one process, and a loop whose clock is virtual.

`VirtualClockLoop` never waits: when nothing is ready its clock jumps to the next timer, so hours
of a run take milliseconds and every time is exact. `LoopbackNetwork` joins clients to named
servers in the running loop, virtual or real, with the errors a real network would give.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

from diloco.transport.calls.dispatch import dispatch
from diloco.transport.calls.limits import Limits, Lines
from diloco.transport.contracts import Buffer, Handlers, Reply, Server, Transport
from diloco.transport.errors import (
    ConnectError,
    DeadlineExceeded,
    MessageTooLarge,
    PeerReset,
    TransportClosed,
)
from diloco.transport.framing import check_call
from diloco.transport.transfer import Transfer

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")

#: Real seconds that other threads get to wake a loop that has nothing left to do.
DEADLOCK_GRACE_S = 1.0


class VirtualDeadlock(RuntimeError):
    """Tasks wait for each other: nothing is ready, nothing is scheduled, no thread is at work."""


class _JumpingSelector(selectors.DefaultSelector):
    """Where an event loop would sleep, this moves its clock instead."""

    now = 0.0
    num_outside = 0
    loop: asyncio.AbstractEventLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.num_outside and timeout != 0:
            return super().select(None)
        if timeout is not None:
            events = super().select(0)
            if not events:
                self.now += max(timeout, 0.0)
            return events
        events = super().select(DEADLOCK_GRACE_S)
        if not events:
            raise VirtualDeadlock(
                f"at virtual time {self.now:g} s nothing is ready and nothing is scheduled, but "
                "these wait: " + "; ".join(map(repr, asyncio.all_tasks(self.loop)))
            )
        return events


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """Event loop whose `time()` starts at 0 and jumps to the next timer when nothing is ready.

    Work in executors takes no virtual time: while any runs, the clock stands and the loop really
    waits for it. Other threads may use `call_soon_threadsafe`, but the clock does not wait for
    them. Sockets of the outside world have no place here: time would jump past them.

    A loop that can never go on raises `VirtualDeadlock`, naming the tasks.
    """

    def __init__(self) -> None:
        """Make the loop with its clock at 0 seconds."""
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._jumping.loop = self

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jumping.now

    def run_in_executor(
        self,
        executor: Executor | None,
        func: Callable[[*_Ts], _T],
        *args: *_Ts,
    ) -> asyncio.Future[_T]:
        """Run `func` in a thread; the clock stands until its future is done."""
        future = super().run_in_executor(executor, func, *args)
        self._jumping.num_outside += 1
        future.add_done_callback(self._came_back)
        return future

    async def shutdown_default_executor(self) -> None:
        """Wait, in real time, for the threads of the default executor to end."""
        self._jumping.num_outside += 1
        try:
            await super().shutdown_default_executor()
        finally:
            self._jumping.num_outside -= 1

    def _came_back(self, _: asyncio.Future[Any]) -> None:
        self._jumping.num_outside -= 1


def run_virtual(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine to its end in a fresh `VirtualClockLoop`, as `asyncio.run` would.

    Raises:
        VirtualDeadlock: If it can never end.
    """
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(coroutine)


class LoopbackNetwork:
    """Named servers and the ways to them, within one event loop."""

    def __init__(self, reply_bps: float = math.inf) -> None:
        """Make a network without servers; payloads of replies take their time at `reply_bps`."""
        self._reply_bps = reply_bps
        self._running: dict[str, _LoopbackServer] = {}

    def server(self, name: str, handlers: Handlers) -> Server:
        """Make a server; it can be called once started, and replaced once stopped."""
        return _LoopbackServer(self._running, name, handlers, self._reply_bps)

    def connect(self, name: str) -> Transport:
        """Make a way to whichever server runs under `name` at the moment of each call."""
        return _LoopbackTransport(self._running, name)


class _LoopbackServer:
    def __init__(
        self, running: dict[str, _LoopbackServer], name: str, handlers: Handlers, reply_bps: float
    ) -> None:
        self._running = running
        self._name = name
        self._handlers = handlers
        self._reply_bps = reply_bps
        self._tasks: set[asyncio.Task[Reply]] = set()
        self._failures = Lines(Limits().refusals_logged_per_s)

    @property
    def address(self) -> str:
        return self._name

    async def start(self) -> None:
        if self._name in self._running:
            raise OSError(f"a server named {self._name!r} is already running on this network")
        self._running[self._name] = self

    async def stop(self, drain_timeout_s: float) -> None:
        if self._running.get(self._name) is self:
            del self._running[self._name]
        if self._tasks and drain_timeout_s > 0:
            await asyncio.wait(self._tasks, timeout=drain_timeout_s)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def begin(self, call: _LoopbackCall) -> asyncio.Task[Reply]:
        task = asyncio.get_running_loop().create_task(self._serve(call))
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Reply]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may be gone: nobody else looks at it then

    async def _serve(self, call: _LoopbackCall) -> Reply:
        reply = await dispatch(self._handlers, call, self._failures)
        payload = bytearray(reply.payload)
        if (crossing_s := 8 * len(payload) / self._reply_bps) > 0:
            await asyncio.sleep(crossing_s)
        reply.on_sent()
        return Reply(bytes(reply.header), payload)


class _LoopbackCall:
    def __init__(self, method: str, header: bytes, payload: bytearray, has_asked: bool) -> None:
        self.method = method
        self.header = header
        self.has_asked = has_asked
        self.peer = "loopback"
        self.caller = None
        self.is_local = True
        self.payload_bytes = len(payload)
        self._payload: bytearray | None = payload

    async def read_payload(self) -> Buffer:
        payload, self._payload = self._payload, None
        assert payload is not None, "read_payload called twice"
        return payload


class _LoopbackTransport:
    def __init__(self, running: dict[str, _LoopbackServer], name: str) -> None:
        self._running = running
        self._name = name
        self._tasks: set[asyncio.Task[Reply]] = set()
        self._is_closed = False

    @property
    def peer(self) -> str:
        return self._name

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
        check_call(header, deadline_s=deadline_s, max_reply_bytes=max_reply_bytes)
        where = {"peer": self._name, "method": method}
        self._check_open(method)
        server = self._running.get(self._name)
        if server is None:
            raise ConnectError(f"no server named {self._name!r} is running", **where)
        if transfer is not None:  # nothing breaks half-way here
            transfer.sent_bytes += memoryview(payload).nbytes
        has_asked = transfer is not None and transfer.asks_first
        task = server.begin(_LoopbackCall(method, bytes(header), bytearray(payload), has_asked))
        self._tasks.add(task)
        try:
            await asyncio.wait({task}, timeout=deadline_s)
        finally:
            self._tasks.discard(task)
            is_late = not task.done()
            task.cancel()
        if is_late:
            raise DeadlineExceeded(f"no answer within {deadline_s:g} s", **where)
        if task.cancelled():
            self._check_open(method)
            raise PeerReset("the server stopped during the call", **where)
        error = task.exception()
        if error is not None:
            raise type(error)(*error.args, **where) from error
        reply = task.result()
        num_bytes = len(reply.payload)
        if num_bytes > max_reply_bytes:
            raise MessageTooLarge(
                f"the reply has {num_bytes} bytes; {max_reply_bytes} are allowed", **where
            )
        if transfer is not None:
            transfer.received_bytes += num_bytes
        return reply

    async def close(self) -> None:
        self._is_closed = True
        for task in self._tasks:
            task.cancel()

    def _check_open(self, method: str) -> None:
        if self._is_closed:
            raise TransportClosed("this transport was closed", peer=self._name, method=method)
