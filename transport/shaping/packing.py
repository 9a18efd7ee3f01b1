"""Packs chunks of payloads with zstandard where the line takes longer for what that saves.

    2 s <= b t        s: seconds of packing; as many are counted for the receiver's unpacking
                      b: bytes saved      t: seconds in which the line takes a byte

`s` and `b` are those of the last chunks tried, of one method's payloads one way over one line. `t`
is measured on what that line has taken, packed or not: the time in which it kept anyone waiting, by
its bytes; a configured rate is its least. A line whose buffers take all at once counts as fast. A
chunk is also packed while little is known of its method or line, and one now and then later. Level
1: higher ones find next to nothing more. 1 MiB takes 0.7 to 1 ms: it is packed where it is framed.

`LineTime` and `Packing` are pure; `Packer` runs them on a clock.
"""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import zstandard

from diloco.transport.contracts import Buffer
from diloco.transport.framing import frame_chunk, frame_chunks
from diloco.transport.shaping.pacing import Pacer

#: Share of a chunk that must be left, at most, for it to travel packed.
MOST_LEFT = 0.95
#: A line is not known before it has taken so many bytes.
UNKNOWN_BYTES = 4 << 20
#: Bytes after which half of what a line has shown is forgotten.
_REMEMBERED_BYTES = 32 << 20
#: Chunks that travel as they are before one is tried again.
TRIED_AGAIN = 256
_LEVEL = 1
#: Lines that a server remembers.
_MOST_LINES = 1024


@dataclass(slots=True)
class Work:
    """Seconds for which a process has packed chunks, for any line."""

    seconds: float = 0.0


class LineTime:
    """Measures how long a line takes for a byte, by how long it keeps senders waiting.

    While the process is at `work` nobody waits for a line.
    """

    def __init__(self, work: Work) -> None:
        """Begin with nothing measured."""
        self.work = work
        self._num_waiting = 0
        self._since = self._packed_since = 0.0
        self._waited_s = 0.0
        self._bytes = 0

    def waits(self, now: float) -> None:
        """Note that a message waits for the line; `moved` or `gave_up` must follow."""
        self._count(now)
        self._num_waiting += 1

    def moved(self, now: float, num_bytes: int) -> None:
        """Note that the line has taken a message."""
        self._count(now)
        self._num_waiting -= 1
        self._bytes += num_bytes
        if self._bytes > _REMEMBERED_BYTES:
            self._bytes //= 2
            self._waited_s /= 2

    def gave_up(self, now: float) -> None:
        """Note that a message is waited for no more: a silence is not the line's rate."""
        self._since, self._packed_since = now, self.work.seconds
        self._num_waiting -= 1

    @property
    def s_per_byte(self) -> float | None:
        """Seconds a byte; None: not known."""
        return self._waited_s / self._bytes if self._bytes >= UNKNOWN_BYTES else None

    def _count(self, now: float) -> None:
        if self._num_waiting:
            packed_s = self.work.seconds - self._packed_since
            self._waited_s += max(now - self._since - packed_s, 0.0)
        self._since, self._packed_since = now, self.work.seconds


class Packing:
    """Decides which chunks of one method's payloads travel packed over a line."""

    def __init__(self) -> None:
        """Begin with nothing tried."""
        self._bytes = self._saved_bytes = self._seconds = 0.0
        self._num_plain = 0

    def wants(self, s_per_byte: float | None) -> bool:
        """Whether the next chunk is to be packed, on a line of so many seconds a byte."""
        if not self._bytes or self._pays(s_per_byte) or self._num_plain >= TRIED_AGAIN:
            self._num_plain = 0
            return True
        self._num_plain += 1
        return False

    def tried(
        self, num_bytes: int, packed_bytes: int, seconds: float, s_per_byte: float | None
    ) -> bool:
        """Note what packing a chunk took and left; whether it travels so."""
        saved = num_bytes - packed_bytes
        self._bytes = self._bytes / 2 + num_bytes
        self._saved_bytes = self._saved_bytes / 2 + saved
        self._seconds = self._seconds / 2 + seconds
        return packed_bytes <= MOST_LEFT * num_bytes and self._pays(s_per_byte)

    def _pays(self, s_per_byte: float | None) -> bool:
        if self._saved_bytes < (1 - MOST_LEFT) * self._bytes:
            return False
        return s_per_byte is None or 2 * self._seconds <= self._saved_bytes * s_per_byte


class Packer:
    """Frames the chunks of one method's payloads for a line."""

    def __init__(self, line: LineTime, pacer: Pacer) -> None:
        """Assign only; other methods have the same `line`."""
        self.pacer = pacer
        self._line = line
        self._packing = Packing()

    def chunks(
        self, payload: Buffer, chunk_bytes: int, offset: int, *, is_bulk: bool
    ) -> Iterator[bytes]:
        """Return the chunks of a payload from a byte on, packed or not, each when asked for."""
        least = self.pacer.s_per_byte(is_bulk=is_bulk)
        return frame_chunks(payload, chunk_bytes, offset, lambda data: self._frame(data, least))

    def _frame(self, data: memoryview, least_s_per_byte: float) -> bytes:
        s_per_byte = self._line.s_per_byte
        if s_per_byte is not None:
            s_per_byte = max(s_per_byte, least_s_per_byte)
        if not self._packing.wants(s_per_byte):
            return frame_chunk(data)
        began = time.monotonic()
        packed = zstandard.ZstdCompressor(level=_LEVEL).compress(data)
        seconds = time.monotonic() - began
        self._line.work.seconds += seconds
        is_worth = self._packing.tried(len(data), len(packed), seconds, s_per_byte)
        return frame_chunk(data, packed if is_worth else b"")

    @contextlib.contextmanager
    def waiting(self, message: bytes) -> Iterator[None]:
        """Measure how long the line keeps a message waiting."""
        self._line.waits(time.monotonic())
        try:
            yield
        except BaseException:
            self._line.gave_up(time.monotonic())
            raise
        self._line.moved(time.monotonic(), len(message))


#: Of this process, which packs in its event loop.
_WORK = Work()


class Packers:
    """The packers of one transport, or of a server: of each peer and method."""

    def __init__(self, pacer: Pacer) -> None:
        """Assign only."""
        self.pacer = pacer
        self._lines: OrderedDict[str, tuple[LineTime, dict[str, Packer]]] = OrderedDict()

    def of(self, peer: str, method: str) -> Packer:
        """Return the one for replies to a peer, or requests; what is known of it is kept a while.

        `method` is one of a few.
        """
        line, packers = self._lines.setdefault(peer, (LineTime(_WORK), {}))
        self._lines.move_to_end(peer)
        if len(self._lines) > _MOST_LINES:
            self._lines.popitem(last=False)
        return packers.setdefault(method, Packer(line, self.pacer))
