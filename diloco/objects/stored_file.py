"""What a file of a run's state holds, as an entry of a chain says it."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import blake3

from diloco.versions.record import RecordSection

#: Bytes of a file that is in its entry, not an object of its own.
_SMALL_BYTES = 16 << 10
#: A larger file that is here is taken by its size and its first bytes: a record begins with a
#: digest of its header, which has those of its sections, and each is verified when it is read.
_VERIFIED_BYTES = 16 << 20
_HEAD_BYTES = 64
_READ_BYTES = 1 << 20
#: Of a file that has not got its name yet.
UNFINISHED = ".tmp"


@dataclass(frozen=True, slots=True)
class Part:
    """So many bytes of an object, from `start` on."""

    object_name: str
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StoredFile:
    """What a file holds: `content` of a small one, else what the parts do, one after the other."""

    digest: str
    num_bytes: int
    mode: int
    head: str  # hex
    content: bytes | None
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, path: Path, opening: int = 0) -> StoredFile:
        """Read a file once; `opening` is that of the writer of its object."""
        digest, head, size, content = blake3.blake3(), b"", 0, b""
        with path.open("rb") as file:
            while piece := file.read(_READ_BYTES):
                digest.update(piece)
                head = head or piece[:_HEAD_BYTES]
                content = piece if not size else b""
                size += len(piece)
        small = content if size <= _SMALL_BYTES else None
        mode = path.stat().st_mode & 0o777
        whole = Part(f"{opening:016d}-{digest.hexdigest()}", 0, size)
        parts = () if small is not None else (whole,)
        return cls(digest.hexdigest(), size, mode, head.hex(), small, parts)

    @property
    def objects(self) -> set[str]:
        """Names of the objects that it is in."""
        return {part.object_name for part in self.parts}

    def places_of(self, object_name: str) -> list[tuple[int, Part]]:
        """Give where in the file an object's bytes are, of which part, in the object's order."""
        at, found = 0, {}
        for part in self.parts:
            if part.object_name == object_name:
                found[part.start] = at, part
            at += part.num_bytes
        return [found[start] for start in sorted(found)]

    def unfinished_at(self, path: Path) -> Path:
        """Where a fetch keeps what has come of it, until that is whole and gets the name `path`."""
        return path.with_name(f"{path.name}.{self.digest[:16]}{UNFINISHED}")

    def parts_from(self, start: int) -> Iterator[Part]:
        """Give what holds the file from a byte on."""
        for part in self.parts:
            if start < part.num_bytes:
                yield Part(part.object_name, part.start + start, part.num_bytes - start)
            start = max(0, start - part.num_bytes)

    def to_json(self) -> list[Any]:
        """Write it for an entry."""
        content = None if self.content is None else base64.b64encode(self.content).decode()
        return [self.digest, self.num_bytes, self.mode, self.head, content, _series(self.parts)]

    @classmethod
    def from_json(cls, content: list[Any]) -> StoredFile:
        """Read what `to_json` wrote."""
        digest, num_bytes, mode, head, body, parts = content
        small = None if body is None else base64.b64decode(body)
        return cls(digest, num_bytes, mode, head, small, tuple(_parts(parts)))

    def is_at(self, path: Path) -> bool:
        """Whether a file here holds that: read, or by size and first bytes if it is large."""
        try:
            if not path.is_file() or path.stat().st_size != self.num_bytes:
                return False
            if self.num_bytes <= _VERIFIED_BYTES:
                return self.of(path).digest == self.digest
            with path.open("rb") as file:
                return file.read(_HEAD_BYTES).hex() == self.head
        except OSError:
            return False


def _series(parts: Sequence[Part]) -> list[list[Any]]:
    """Write parts for an entry: name, start and bytes of each.

    Or of whole objects NAME-0, NAME-1, ... together: NAME, bytes of each but the last, of all, and
    how many there are. A contribution is in several, and a version is made of thousands.
    """
    found: list[list[Any]] = []
    for part in parts:
        name, _, number = part.object_name.rpartition("-")
        if part.start == 0 and name and number == "0":
            found.append([name, part.num_bytes, part.num_bytes, 1])
            continue
        last: list[Any] = found[-1] if found and len(found[-1]) == 4 else ["", 0, 0, 0]
        goes_on = part.start == 0 and [name, number] == [last[0], str(last[3])]
        if goes_on and last[2] == last[1] * last[3] and part.num_bytes <= last[1]:
            last[2] += part.num_bytes
            last[3] += 1
        else:
            found.append([part.object_name, part.start, part.num_bytes])
    return found


def _parts(series: Iterable[list[Any]]) -> Iterator[Part]:
    """Read what `_series` wrote."""
    for each in series:
        if len(each) == 4:
            name, piece_bytes, num_bytes, number = each
            for n in range(number):
                yield Part(f"{name}-{n}", 0, min(piece_bytes, num_bytes - n * piece_bytes))
        else:
            yield Part(*each)


def composed(
    file: StoredFile, there: Mapping[int, RecordSection], copied: Mapping[int, Sequence[Part]]
) -> tuple[StoredFile, list[tuple[int, Part]]]:
    """Make a file out of what is in the store, and of an object of all else.

    Args:
        file: In one object.
        there: Sections that are in the store, by where they begin.
        copied: The objects of each.

    Returns:
        The file, and where in it lies what is still to be written, of which part.
    """
    own: list[tuple[int, Part]] = []
    parts: list[Part] = []
    at = written = 0
    layout = [(start, each.num_bytes) for start, each in sorted(there.items())]
    suffix = f"-{blake3.blake3(str(layout).encode()).hexdigest()[:16]}" if layout else ""
    for start in [*sorted(there), file.num_bytes]:
        if (gap := start - at) and file.parts:
            own.append((at, Part(file.parts[0].object_name + suffix, written, gap)))
            parts.append(own[-1][1])
            written += gap
        parts += copied.get(start, ())
        at = start + (there[start].num_bytes if start in there else 0)
    return replace(file, parts=tuple(parts)), own


def gaps(path: Path, own: Iterable[tuple[int, Part]]) -> Iterator[bytes]:
    """Read what is to be written of a file."""
    with path.open("rb") as file:
        for start, part in own:
            file.seek(start)
            left = part.num_bytes
            while left and (piece := file.read(min(left, _READ_BYTES))):
                left -= len(piece)
                yield piece
