"""Coded lanes from their arrival to the close of their round: in memory, beyond a limit on disk.

A spool serves all fragments of a syncer. Nothing in it is durable: islands keep what they sent
until its outcome, so files are neither synced nor read by a later start, which removes them.

Source: protocol.md section 4 (reduction).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import blake3

from diloco.durable import telling_full
from transport.contracts import Buffer


class Spool:
    """Payloads of at most `memory_bytes` in memory, all others in files of `directory`.

    As many bytes again may be arriving; whoever has more waits, with what its stream holds unread:
    a payload of at most `framing.WHOLE_BYTES`, which came with its header, and of a larger one what
    the stream lets a peer send ahead. That is bounded by the calls that a server lets in
    (`limits.Limits.calls_per_caller`, `calls`), and not by `memory_bytes`.
    """

    def __init__(self, directory: Path, memory_bytes: int) -> None:
        """Assign only; `start` touches the disk."""
        self._directory = directory
        self._memory_bytes = memory_bytes
        self._held_bytes = 0
        self._lock = threading.Lock()
        self._names = itertools.count()
        self._arriving_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def start(self) -> None:
        """Make an empty directory: what an earlier start left in it is removed."""
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir(parents=True)

    @contextlib.asynccontextmanager
    async def arrival(self, num_bytes: int) -> AsyncIterator[None]:
        """Hold room for a payload from its first byte until it was put; first come, first served.

        A payload over the limit arrives alone. On the event loop only.
        """
        if self._waiting or not self._has_room(num_bytes):
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append((num_bytes, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._leave(num_bytes)
                else:
                    # Let in and cancelled in one step of the loop, it waits no longer.
                    with contextlib.suppress(ValueError):
                        self._waiting.remove((num_bytes, turn))
                    self._admit()
                raise
        else:
            self._arriving_bytes += num_bytes
        try:
            yield
        finally:
            self._leave(num_bytes)

    def put(self, payload: Buffer, digest: bytes) -> SpooledLane:
        """Keep a payload that matches its blake3 digest; runs in the worker.

        Raises:
            DiskFull: If there is no room for it.
            OSError: If the disk does not take it.
        """
        size = len(payload)
        with self._lock:
            is_held = self._held_bytes + size <= self._memory_bytes
            if is_held:
                self._held_bytes += size
        if is_held:
            return SpooledLane(self, size, digest, payload)
        path = self._directory / f"{next(self._names):012d}"
        try:
            with telling_full():
                path.write_bytes(payload)
        except OSError:
            path.unlink(missing_ok=True)  # a full disk gets its room back
            raise
        return SpooledLane(self, size, digest, path)

    def release(self, num_bytes: int) -> None:
        """Take note that a payload in memory was dropped; any thread."""
        with self._lock:
            self._held_bytes -= num_bytes

    def hold(self, num_bytes: int) -> None:
        """Take note that a payload is in memory again, limit or not; any thread."""
        with self._lock:
            self._held_bytes += num_bytes

    def _has_room(self, num_bytes: int) -> bool:
        return not self._arriving_bytes or self._arriving_bytes + num_bytes <= self._memory_bytes

    def _leave(self, num_bytes: int) -> None:
        self._arriving_bytes -= num_bytes
        self._admit()

    def _admit(self) -> None:
        """Let in whoever waits and has room, in their order."""
        while self._waiting and self._has_room(self._waiting[0][0]):
            num_bytes, turn = self._waiting.popleft()
            if not turn.done():
                self._arriving_bytes += num_bytes
                turn.set_result(None)


class SpooledLane:
    """One payload in a spool; dropped once, by whoever needs it no longer."""

    def __init__(self, spool: Spool, num_bytes: int, digest: bytes, kept: Buffer | Path) -> None:
        """Assign only; `kept` is the payload or its file."""
        self.num_bytes = num_bytes
        self.digest = digest
        self._spool = spool
        self._kept: Buffer | Path | Callable[[], Buffer] | None = kept

    def __del__(self) -> None:
        """Drop what nobody took: its call was cancelled while the worker put it."""
        self.drop()

    def read(self) -> Buffer:
        """Return the payload, from a file verified anew.

        Raises:
            OSError: If its file cannot be read or does not match its digest any more.
        """
        kept = self._kept
        assert kept is not None, "a lane is read after it was dropped"
        if callable(kept):
            return kept()
        if not isinstance(kept, Path):
            return kept
        payload = kept.read_bytes()
        if blake3.blake3(payload).digest() != self.digest:
            raise OSError(f"{kept} is not what was written into it: check that disk")
        return payload

    def lend(self, read: Callable[[], Buffer]) -> None:
        """Let go of the memory: it has been written elsewhere, where `read` finds it."""
        if self._kept is not None and not isinstance(self._kept, Path) and not callable(self._kept):
            self._kept = read
            self._spool.release(self.num_bytes)

    def take_back(self) -> None:
        """Have what was lent in memory again, before it goes where it was written.

        Raises:
            OSError: If it cannot be read back as it was.
        """
        if callable(self._kept):
            self._kept = self._kept()
            self._spool.hold(self.num_bytes)

    def drop(self) -> None:
        """Let go of memory or file; dropping twice is harmless."""
        kept, self._kept = self._kept, None
        if isinstance(kept, Path):
            kept.unlink(missing_ok=True)
        elif kept is not None and not callable(kept):
            self._spool.release(self.num_bytes)
