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
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import blake3

from diloco.allocator import give_back_holes
from diloco.compression.lanes import lane_codec
from diloco.durable import telling_full
from diloco.outer.fragments import Fragment
from transport.contracts import Buffer

#: Payloads are let go lane by lane, and what a merge makes of them does not fit where they lay. A
#: smaller step costs the vectors of a merge their pages too often.
_GIVEN_BACK_BYTES = 32 << 20


class Spool:
    """Payloads of at most `memory_bytes` in memory, all others in files of `directory`.

    As many bytes again may be arriving; whoever has more waits. What a peer sends before its turn
    stays unread in its stream, as much as gRPC's windows take. So where not all payloads fit
    (`holds`), islands are told to ask first (`Transfer.asks_first`) and send nothing before their
    turn. Of islands that do so all the same, `limits.Limits.calls_per_caller` bounds the streams.
    """

    def __init__(self, directory: Path, memory_bytes: int) -> None:
        """Assign only; `start` touches the disk."""
        self._directory = directory
        self._memory_bytes = memory_bytes
        self._held_bytes = 0
        self._released_bytes = 0  # since the last time that holes were given back
        self._lock = threading.Lock()
        self._names = itertools.count()
        self._arriving_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def start(self) -> None:
        """Make an empty directory: what an earlier start left in it is removed."""
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir(parents=True)

    def holds(self, fragments: Sequence[Fragment], uplink_codec: str, num_islands: int) -> bool:
        """Whether all that islands may send at once arrives without waiting.

        That is a contribution of each to every fragment, or of one the initial parameters.
        """
        lanes = [(fragment, lane) for fragment in fragments for lane in fragment.lanes]

        def coded(name: str) -> int:
            return sum(
                lane_codec(name, f, lane.lane_id).wire_bytes(lane.numel) for f, lane in lanes
            )

        return max(num_islands * coded(uplink_codec), coded("float32")) <= self._memory_bytes

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
            self._released_bytes += num_bytes
            if is_much := self._released_bytes >= _GIVEN_BACK_BYTES:
                self._released_bytes = 0
        if is_much:
            give_back_holes()

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
