"""Keeps coded lanes from their arrival to the close: in memory, beyond a limit on disk.

A spool serves all fragments of a syncer. Nothing in it is durable: islands keep what they sent
until its outcome, so files are neither synced nor read by a later start, which removes them.

Source: PROTOCOL.md, "Acknowledgement".
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import mmap
import queue
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Hashable
from dataclasses import dataclass
from pathlib import Path

import blake3

from diloco.allocator import give_back_holes
from diloco.durable import raising_disk_full
from diloco.loop_clock import loop_now
from diloco.transport.contracts import Buffer
from diloco.transport.errors import NotYet

#: Of any spool: where less arrives at once, each lane costs a round trip.
LEAST_ARRIVING_BYTES = 64 << 20
#: Seconds for which a call waits for its turn before its caller hears that it is waited for; less
#: than any deadline of a call.
_TURN_S = 5.0
#: Seconds for which the place of a call is kept that comes again (`retry.RetryPolicy.max_wait_s`).
_KEPT_S = 15.0
#: Seconds between two payloads that are let in to see whether a full disk has room again.
_FULL_S = 5.0

#: Payloads are let go lane by lane, and what a merge makes of them does not fit where they lay. A
#: smaller step costs the vectors of a merge their pages too often.
_GIVEN_BACK_BYTES = 32 << 20
#: Of payloads that get pages of their own: a process may have some 65,000 mappings.
_APART_BYTES = 256 << 10


class Spool:
    """Payloads of at most `memory_bytes` in memory, all others in files of `directory`.

    As many bytes again may be arriving, at least `LEAST_ARRIVING_BYTES`; anyone who has more waits,
    with nothing of it sent: islands are told to ask first (`Transfer.asks_first`) where not all
    that may come at once is let in, and of those that do not ask only what has room at once is
    read. Every payload has a name; it arrives, and waits, but once at a time.
    """

    def __init__(self, directory: Path, memory_bytes: int) -> None:
        """Assign only; `start` touches the disk."""
        self._directory = directory
        self._memory_bytes = memory_bytes
        self._held_bytes = 0
        self._released_bytes = 0  # from memory, since the last time that holes were given back
        self._lock = threading.Lock()
        #: Changes of the two above, until the lock is held: a lane may be collected at any moment,
        #: in the middle of any line of any thread, and `put` alone is safe from there.
        self._noted: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._names = itertools.count()
        self._arriving_bytes = 0
        self._arriving: set[Hashable] = set()
        #: In their order. Who has been told `NotYet` is awaited for a while.
        self._waiting: dict[Hashable, _Place] = {}
        self._is_full = False
        self._tried_at = 0.0

    def start(self) -> None:
        """Make an empty directory: what an earlier start left in it is removed."""
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir(parents=True)

    def lets_in(self, num_bytes: int) -> bool:
        """Whether so many bytes may arrive at once."""
        return num_bytes <= max(self._memory_bytes, LEAST_ARRIVING_BYTES)

    @property
    def is_full(self) -> bool:
        """Whether the disk had no room for the last payload that was to go there."""
        return self._is_full

    def found_full(self) -> None:
        """Record that the disk has no room; on the event loop."""
        self._is_full, self._tried_at = True, loop_now()

    def check_room(self, num_bytes: int) -> None:
        """Check that a payload may find room, before anything of it is read.

        While the disk is full, that is what fits in memory, and one payload every `_FULL_S`.

        Raises:
            NotYet: If it may not.
        """
        if not self._is_full or self._held_bytes + num_bytes <= self._memory_bytes:
            return
        now = loop_now()
        if now < self._tried_at + _FULL_S:
            raise NotYet(
                f"the syncer's disk is full, {num_bytes} bytes have no room: call again, and ask "
                f"before sending"
            )
        self._tried_at = now

    @contextlib.asynccontextmanager
    async def arrival(
        self, name: Hashable, num_bytes: int, *, has_asked: bool
    ) -> AsyncIterator[None]:
        """Hold room for a payload from its first byte until it was put; first come, first served.

        A payload over the limit arrives alone. On the event loop only.

        Args:
            name: The payload's; anyone who comes again with it takes the place that it left.
            num_bytes: Its size.
            has_asked: Whether nothing of it is on its way yet. If not, it does not wait here.

        Raises:
            NotYet: If there was no room for `_TURN_S` seconds, or none at once for a payload that
                is on its way already; its place is kept for `_KEPT_S`. While the same payload
                arrives in another call there is none.
        """
        turn = asyncio.get_running_loop().create_future()
        place = self._waiting.setdefault(name, _Place(num_bytes))
        place.leave("a newer call for the same lane waits in its place")
        place.turn = turn
        self._admit()
        try:
            if has_asked and not turn.done():
                await asyncio.wait({turn}, timeout=_TURN_S)
            if not turn.done():
                turn.set_exception(
                    NotYet(f"no room for {num_bytes} bytes yet: call again, and ask before sending")
                )
            await turn  # is done
            yield
        finally:
            if turn.done() and not turn.exception():
                self._arriving_bytes -= place.num_bytes
                self._arriving.remove(name)
            elif place.turn is turn:
                place.turn = None
                place.kept_until = loop_now() + _KEPT_S
            self._admit()

    def put(self, payload: Buffer, digest: bytes) -> SpooledLane:
        """Keep a payload that matches its blake3 digest; runs in the worker.

        Raises:
            DiskFull: If there is no room for it.
            OSError: If the disk does not take it.
        """
        size = len(payload)
        self.passed(size)  # it came in pieces, which lay between what stays
        self.give_back()
        with self._lock:
            self._count()
            is_held = self._held_bytes + size <= self._memory_bytes
            if is_held:
                self._held_bytes += size
        if is_held:
            return SpooledLane(self, size, digest, _apart(payload))
        path = self._directory / f"{next(self._names):012d}"
        try:
            with raising_disk_full():
                path.write_bytes(payload)
        except OSError:
            path.unlink(missing_ok=True)  # a full disk gets its room back
            raise
        self._is_full = False
        return SpooledLane(self, size, digest, path)

    def release(self, num_bytes: int) -> None:
        """Record that a payload in memory was let go of; any thread, whatever it holds."""
        self._noted.put((-num_bytes, num_bytes))

    def passed(self, num_bytes: int) -> None:
        """Record memory that a payload took for a while; any thread, whatever it holds."""
        self._noted.put((0, num_bytes))

    def hold(self, num_bytes: int) -> None:
        """Record that a payload is in memory again, limit or not; any thread."""
        self._noted.put((num_bytes, 0))

    def give_back(self) -> None:
        """Give the memory of what was let go of back, if that is much; not on an event loop."""
        with self._lock:
            self._count()
            if is_much := self._released_bytes >= _GIVEN_BACK_BYTES:
                self._released_bytes = 0
        if is_much:
            give_back_holes()

    def _count(self) -> None:
        """Count what has been noted; the lock is held."""
        with contextlib.suppress(queue.Empty):
            while True:
                held, released = self._noted.get_nowait()
                self._held_bytes += held
                self._released_bytes += released

    def _admit(self) -> None:
        """Let in those who wait, in their order, as far as there is room; forget the absent."""
        now = loop_now()
        done: list[Hashable] = []
        for name, place in self._waiting.items():
            if place.turn is None:
                if place.kept_until <= now:
                    done.append(name)
            elif name in self._arriving:
                continue
            elif self._arriving_bytes and not self.lets_in(self._arriving_bytes + place.num_bytes):
                break
            else:
                self._arriving_bytes += place.num_bytes
                self._arriving.add(name)
                place.turn.set_result(None)
                done.append(name)
        for name in done:
            del self._waiting[name]


@dataclass(slots=True)
class _Place:
    """Where a payload stands among those that wait; `turn` is None while nobody waits there."""

    num_bytes: int
    turn: asyncio.Future[None] | None = None
    kept_until: float = 0.0

    def leave(self, why: str) -> None:
        """Send away anyone who waits in it, if anybody does."""
        if self.turn is not None and not self.turn.done():
            self.turn.set_exception(NotYet(why))
        self.turn = None


def _apart(payload: Buffer) -> Buffer:
    """Copy a large payload to pages of its own, which go back to the system with it.

    What stays until the merge would else lie scattered between messages that come and go.
    """
    if len(payload) < _APART_BYTES:
        return payload
    try:
        pages = mmap.mmap(-1, len(payload), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # no more mappings: it stays where it is
        return payload
    pages[:] = payload
    return memoryview(pages)


class SpooledLane:
    """One payload in a spool; dropped once, by anyone who needs it no longer."""

    def __init__(self, spool: Spool, num_bytes: int, digest: bytes, kept: Buffer | Path) -> None:
        """Assign only; `kept` is the payload or its file."""
        self.num_bytes = num_bytes
        self.digest = digest
        self.spool = spool
        self._kept: Buffer | Path | Callable[[], Buffer] | None = kept

    def __del__(self) -> None:
        """Drop what nobody took: its call was cancelled while the worker put it."""
        self.drop()

    def read(self) -> Buffer:
        """Return the payload, from a file verified again.

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

    def parts(self) -> Callable[[slice], Buffer]:
        """Return what reads parts of the payload, from a file verified now.

        Raises:
            OSError: As `read`; what is returned raises it too.
        """
        payload, kept = self.read(), self._kept
        if not isinstance(kept, Path):
            return memoryview(payload).__getitem__

        def part(place: slice) -> Buffer:
            with kept.open("rb") as file:
                file.seek(place.start)
                data = file.read(place.stop - place.start)
            if len(data) < place.stop - place.start:
                raise OSError(f"{kept} ends before what was written into it: check that disk")
            return data

        return part

    def lend(self, read: Callable[[], Buffer]) -> None:
        """Let go of the memory: it has been written elsewhere, where `read` finds it.

        Runs in the worker.
        """
        if self._kept is not None and not isinstance(self._kept, Path) and not callable(self._kept):
            self._kept = read
            self.spool.release(self.num_bytes)
            self.spool.give_back()

    def take_back(self) -> None:
        """Have what was lent in memory again, before it goes where it was written.

        Raises:
            OSError: If it cannot be read back as it was.
        """
        if callable(self._kept):
            self._kept = self._kept()
            self.spool.hold(self.num_bytes)

    def drop(self) -> None:
        """Let go of memory or file; dropping twice is harmless."""
        kept, self._kept = self._kept, None
        if isinstance(kept, Path):
            kept.unlink(missing_ok=True)
            self.spool.passed(self.num_bytes)
        elif kept is not None and not callable(kept):
            del kept
            self.spool.release(self.num_bytes)
