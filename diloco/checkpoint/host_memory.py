"""Memory of a host that outlives the ranks of an island: where copies of their states lie.

    supervisor ── one anonymous file in memory a rank (memfd), inherited at every start ──> rank

It is gone with the supervisor, however that ends, and has no name that another user could open; the
size of /dev/shm does not limit it, a cgroup's memory does. Supervisors touch none of it, and import
no torch.

    slot = header, body      2 slots for each state that the rank keeps, all of the same size
    header                   sequence, step, digest of both and of the body; zeros: nothing whole

The header is taken away before the body is written, and put back after it: a writer that is killed
on the way leaves an empty slot, never half a body that looks whole. Copies of odd and even
sequences lie in different slots, so the last whole one is never written over.

Source: GEMINI (SOSP 2023); PROTOCOL.md, "Return of an island".
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from diloco.errors import ConfigError
from diloco.system import require_linux
from diloco.transport.units import format_bytes

_PAGE_BYTES = 4096
_HEADER = struct.Struct("<8sqq32s")
_MAGIC = b"diloco-2"
NUM_SLOTS = 2
_MEMINFO = Path("/proc/meminfo")
_CGROUP, _CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


class HostMemory:
    """The memory that a supervisor keeps for its host's ranks; a context manager."""

    def __init__(self, island: str, island_ranks: Iterable[int]) -> None:
        """Assign only; no ranks: nothing is kept."""
        self._island = island
        self._island_ranks = tuple(island_ranks)
        self._descriptors: dict[int, int] = {}

    def __enter__(self) -> HostMemory:
        """Make the files, empty: the ranks give them their size.

        Raises:
            ConfigError: If this system has no such files.
        """
        if self._island_ranks:
            require_linux(f"islands.{self._island}.memory_checkpoint_steps", "set it to 0")
        for rank in self._island_ranks:
            self._descriptors[rank] = os.memfd_create(f"diloco-{self._island}-{rank}")
        return self

    def __exit__(self, *_: object) -> None:
        """Let go of everything."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def descriptor(self, island_rank: int) -> int | None:
        """Return the file of a rank, to be inherited by it; None where nothing is kept."""
        return self._descriptors.get(island_rank)


@dataclass(frozen=True, slots=True)
class Header:
    """The header before a whole body.

    Args:
        sequence: Of the copy, from 1: which of two was made later.
        step: Completed inner steps.
        digest: blake3 of both and of the body.
    """

    sequence: int
    step: int
    digest: bytes

    @classmethod
    def of(cls, sequence: int, step: int, body: memoryview) -> Header:
        """Make the header of a body; reads all of it."""
        return cls(sequence, step, blake3(struct.pack("<qq", sequence, step)).update(body).digest())

    def to_bytes(self) -> bytes:
        """Write it as it stands in a slot."""
        return _HEADER.pack(_MAGIC, self.sequence, self.step, self.digest)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Header | None:
        """Read it; None if nothing whole follows it."""
        magic, sequence, step, digest = _HEADER.unpack_from(data)
        return cls(sequence, step, digest) if magic == _MAGIC else None


class CopySlots:
    """A rank's view of its memory: two slots for each of the states that it keeps.

    Args:
        descriptor: From `HostMemory.descriptor`.
        num_states: States that the rank keeps, its own among them.
        body_bytes: Of one copy, at most; equal at every start, or what is there is not found.
    """

    def __init__(self, descriptor: int, *, num_states: int, body_bytes: int) -> None:
        """Assign only."""
        self._descriptor = descriptor
        self._num_states = num_states
        self._body_bytes = -(-body_bytes // _PAGE_BYTES) * _PAGE_BYTES
        self._memory: memoryview | None = None

    @property
    def num_bytes(self) -> int:
        """Of all slots."""
        return self._num_states * NUM_SLOTS * self._slot_bytes

    @property
    def missing_bytes(self) -> int:
        """What `open` will take from the host's memory: 0 where an earlier start has taken it."""
        return max(0, self.num_bytes - os.fstat(self._descriptor).st_size)

    def open(self) -> None:
        """Take the memory, all of it: a copy must not fail for want of it.

        Raises:
            OSError: If it is not there.
        """
        if self.missing_bytes:
            os.posix_fallocate(self._descriptor, 0, self.num_bytes)
        # Populated now: page by page it would be in the first copies' time.
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self._memory = memoryview(mmap.mmap(self._descriptor, self.num_bytes, flags))

    def of_state(self, state: int) -> memoryview:
        """Return the memory of all slots of the rank's n-th state."""
        at, num_bytes = self._at(state, 0), NUM_SLOTS * self._slot_bytes
        return self._view[at : at + num_bytes]

    def body(self, state: int, sequence: int) -> memoryview:
        """Return the body in which the copy `sequence` of the rank's n-th state lies."""
        at = self._at(state, sequence) + _PAGE_BYTES
        return self._view[at : at + self._body_bytes]

    def header(self, state: int, sequence: int) -> Header | None:
        """Return the header of the slot of copy `sequence`, of whatever copy is in it."""
        return Header.from_bytes(self._view[self._at(state, sequence) :])

    def empty(self, state: int, sequence: int) -> None:
        """Say that the slot of copy `sequence` holds nothing whole."""
        at = self._at(state, sequence)
        self._view[at : at + _HEADER.size] = bytes(_HEADER.size)

    def seal(self, state: int, header: Header) -> None:
        """Say that the slot of copy `header.sequence` holds it, whole."""
        at = self._at(state, header.sequence)
        self._view[at : at + _HEADER.size] = header.to_bytes()

    def headers(self, state: int) -> list[Header]:
        """Return the headers of the copies of a state that were completed, unverified."""
        found = [self.header(state, slot) for slot in range(NUM_SLOTS)]
        return [header for header in found if header is not None]

    def is_whole(self, state: int, header: Header) -> bool:
        """Whether the body is still the one that the header was made of; reads all of it."""
        body = self.body(state, header.sequence)
        return Header.of(header.sequence, header.step, body) == header

    @property
    def _view(self) -> memoryview:
        assert self._memory is not None, "used before open()"
        return self._memory

    @property
    def _slot_bytes(self) -> int:
        return _PAGE_BYTES + self._body_bytes

    def _at(self, state: int, sequence: int) -> int:
        return (state * NUM_SLOTS + sequence % NUM_SLOTS) * self._slot_bytes


def next_sequence(last: int, whole: int | None) -> int:
    """Give the number of the next copy: new, and of the slot that the whole one is not in.

    Args:
        last: The largest number of a copy that any rank has begun; 0: none.
        whole: Number of the newest copy that is whole for all ranks; None: none is.
    """
    following = last + 1
    return following + (whole is not None and (following - whole) % NUM_SLOTS == 0)


def kept_bytes(num_parameters: int) -> int:
    """Bytes that the ranks of an island take of host memory for each host that keeps their states.

    16 a parameter: two moments of 4, in two slots; without headers and cursors.
    """
    return 2 * 4 * NUM_SLOTS * num_parameters


def _room_in_cgroup() -> int:
    """Bytes that this process's cgroup and those above it still let it take; cgroup version 2."""
    room = sys.maxsize
    for line in _CGROUP.read_text().splitlines() if _CGROUP.exists() else ():
        place = _CGROUPS / line.removeprefix("0::").lstrip("/") if line.startswith("0::") else None
        while place is not None:
            with contextlib.suppress(OSError, ValueError):  # no limit: "max", or the root's
                limit = int((place / "memory.max").read_text())
                stat = dict(row.split() for row in (place / "memory.stat").read_text().splitlines())
                used = int((place / "memory.current").read_text()) - int(stat["inactive_file"])
                room = min(room, max(limit - used, 0))
            place = place.parent if place != _CGROUPS else None
    return room


def available_bytes() -> int | None:
    """Bytes of memory that this process may still take; None where the system does not say."""
    lines = _MEMINFO.read_text().splitlines() if _MEMINFO.exists() else []
    free = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    return min(*free, _room_in_cgroup()) if free else None


def check_memory(key: str, what: str, num_bytes: int, remedy: str) -> None:
    """Refuse to take more of the host's memory than is there.

    Args:
        key: Dotted path of the setting that asks for it, and its value.
        what: Takes it: "copies of ..."; a plural.
        num_bytes: Of all ranks of this host; 0: nothing is asked for.
        remedy: What to change.

    Raises:
        ConfigError: Naming what is needed, what is there and what to change.
    """
    available = available_bytes()
    if available is not None and num_bytes > available:
        raise ConfigError(
            f"{key}: {what} take {format_bytes(num_bytes)} of this host's memory, and "
            f"{format_bytes(available)} are available; {remedy}"
        )
