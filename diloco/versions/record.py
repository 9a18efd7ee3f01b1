"""Reads and writes the files of versions as bytes: names, layout, and checks.

    fragment-0003/v000000000012.record    magic | header length | header digest | header | sections
    fragment-0003/v000000000013.frame     the same of version 13 without state (`frames`)
    fragment-0003/v000000000007.header    of a version that was forgotten before it was indexed:
                                          blake3 of the next line | header

A version exists if and only if its record is valid. Tensors are bytes here and torch is not
imported, so that a coordinator can verify a checkpoint and index what a syncer could not report.

Source: PROTOCOL.md, "Commit point" and "Records and frames".
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import stat
import struct
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import blake3

from diloco import durable
from diloco.outer.fragments import Fragment
from diloco.transport.contracts import Buffer

#: Float32 vectors of every lane, each a section NAME/LANE.
STATE_SECTIONS = ("theta", "published", "momentum")
#: Before the island and the lane of what a version was made of.
CONTRIBUTION = "contribution/"
#: One more, after these, where the outer optimizer is Adam.
SECOND_MOMENT = "second_moment"
#: Section of what the merge's guard knows, where it knows anything.
GUARD = "guard"

MAGIC = b"DILOREC3"
#: Key of `RecordDraft._starts` that no section has.
_END = ""
_PREFIX = struct.Struct("<8sQ32s")
_FLOAT32_BYTES = 4
#: Errors of a disk; others, such as a lack of descriptors, say nothing of what it holds.
_UNREADABLE = (errno.EIO, errno.EISDIR, errno.ELOOP, errno.EUCLEAN)
_DIGEST_BYTES = 32


class RecordInvalid(Exception):
    """A record file is missing, torn, damaged or of another plan; the version does not exist."""


def state_sections(names: Container[str]) -> tuple[str, ...]:
    """Vectors of a lane in a record that has sections of these names."""
    return (*STATE_SECTIONS, *([SECOND_MOMENT] if f"{SECOND_MOMENT}/0" in names else []))


def fragment_directory(directory: Path, fragment_id: int) -> Path:
    """Where the records of one fragment are, in a store or in a pin."""
    return directory / f"fragment-{fragment_id:04d}"


def record_path(directory: Path, version: int) -> Path:
    """File of one version in a fragment's directory."""
    return directory / f"v{version:012d}.record"


def header_path(directory: Path, version: int) -> Path:
    """File that outlives the record of one version until its header is indexed."""
    return directory / f"v{version:012d}.header"


def version_of(path: Path) -> int:
    """Version that a file of `record_path` or `header_path` is about."""
    return int(path.stem[1:])


def versions_in(directory: Path) -> list[int]:
    """Versions that have a record file, valid or not, ascending."""
    return sorted(version_of(path) for path in directory.glob("v*.record"))


class RecordDraft:
    """A record on its way: sections in any order and from any thread, then its name.

    Where each section lies is known from the start, so that the first lanes of a version are
    written while later ones are computed. Until `commit` has returned there is no such version.
    """

    def __init__(
        self, path: Path, header: Mapping[str, Any], sections: Iterable[tuple[str, int]]
    ) -> None:
        """Begin the temporary file, and take the room that it needs.

        Args:
            path: Of the record.
            header: JSON values as long as those that `commit` will get: digests may still be
                others.
            sections: Name and bytes of each, in the order in which they lie in the file.

        Raises:
            DiskFull: If there is no room; nothing was written.
        """
        self._path = path
        self._table: dict[str, dict[str, Any]] = {
            name: {"name": name, "bytes": size, "digest": bytes(_DIGEST_BYTES).hex()}
            for name, size in sections
        }
        self._header_bytes = len(self._encode(header))
        sizes = (entry["bytes"] for entry in self._table.values())
        starts = itertools.accumulate(sizes, initial=_PREFIX.size + self._header_bytes)
        self._starts: dict[str, int] = dict(zip([*self._table, _END], starts, strict=True))
        self._missing = set(self._table)
        self._file = durable.create(self._temporary)
        self._is_open = True
        try:
            durable.reserve(self._file, self.num_bytes)
        except OSError:
            self.abandon()
            raise

    @property
    def num_bytes(self) -> int:
        """Bytes that it has on the disk."""
        return self._starts[_END]

    @property
    def missing(self) -> frozenset[str]:
        """Names of the sections that were not written yet."""
        return frozenset(self._missing)

    @property
    def has_state(self) -> bool:
        """Whether it holds the state of its version, or only what that was made from."""
        return f"{STATE_SECTIONS[0]}/0" in self._table

    def write(self, name: str, data: Buffer, digest: bytes | None = None) -> None:
        """Write one section; `digest` is its blake3 where that is known.

        Raises:
            OSError: If the disk does not take it.
        """
        entry, view = self._table[name], memoryview(data).cast("B")
        assert len(view) == entry["bytes"], f"{name} has {len(view)} bytes, not {entry['bytes']}"
        entry["digest"] = (digest or blake3.blake3(data).digest()).hex()
        self._write_at(self._starts[name], view)
        self._missing.discard(name)

    def read(self, name: str) -> bytearray:
        """Read back a section that was written, durable or not.

        Raises:
            OSError: If the disk does not give it back as it was.
        """
        entry = self._table[name]
        body = durable.read_at(self._file, self._starts[name], entry["bytes"])
        if blake3.blake3(body).hexdigest() != entry["digest"]:
            raise OSError(f"{self._path} is not what was written into it: check that disk")
        return body

    def commit(self, header: Mapping[str, Any]) -> None:
        """Make the record durable; every section was written."""
        assert self._is_open, "a draft is committed twice"
        assert not self._missing, f"{self._path} without {sorted(self._missing)}"
        encoded = self._encode(header)
        assert len(encoded) == self._header_bytes, f"{self._path}: the header changed its size"
        prefix = _PREFIX.pack(MAGIC, len(encoded), blake3.blake3(encoded).digest())
        self._write_at(0, memoryview(prefix + encoded))
        durable.name_durably(self._file, self._temporary, self._path)
        self._close()

    def abandon(self) -> None:
        """Remove what was written, unless it was committed: there is no such version."""
        if self._is_open:
            durable.unlink(self._temporary)
            self._close()

    @property
    def _temporary(self) -> Path:
        return self._path.with_name(self._path.name + ".tmp")

    def _close(self) -> None:
        self._is_open = False
        durable.close(self._file)

    def _encode(self, header: Mapping[str, Any]) -> bytes:
        table = list(self._table.values())
        return json.dumps({**header, "sections": table}, sort_keys=True).encode()

    def _write_at(self, start: int, view: memoryview) -> None:
        assert self._is_open, "a draft is written to after its end"
        durable.write_at(self._file, start, view)


@dataclass(frozen=True, slots=True)
class RecordSection:
    """Where the bytes of one section lie in their file, and their blake3."""

    start: int
    num_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A record whose header was read and is sound: what it says, and where its sections lie.

    `sections` may be torn or damaged: anyone who reads one finds out.
    """

    path: Path
    end: int
    header: Mapping[str, Any]
    sections: Mapping[str, RecordSection]

    def read(self, name: str) -> bytearray:
        """Read and verify one section.

        Raises:
            RecordInvalid: If it is torn, damaged, or not there.
        """
        if (section := self.sections.get(name)) is None:
            raise RecordInvalid(f"{self.path} has no section {name}")
        body = self._read_at(section.start, section.num_bytes)
        if len(body) < section.num_bytes or blake3.blake3(body).hexdigest() != section.digest:
            raise RecordInvalid(f"{self.path} is torn or damaged in section {name}")
        return body

    def parts(self, name: str) -> Callable[[slice], bytearray]:
        """Verify one section, and return what reads parts of it.

        Raises:
            RecordInvalid: As `read`; what is returned raises it too.
        """
        self.read(name)
        start = self.sections[name].start

        def part(place: slice) -> bytearray:
            body = self._read_at(start + place.start, place.stop - place.start)
            if len(body) < place.stop - place.start:
                raise RecordInvalid(f"{self.path} is torn in section {name}")
            return body

        return part

    def _read_at(self, start: int, num_bytes: int) -> bytearray:
        """Read what there is of so many bytes."""
        with _opened(self.path) as file:
            left = os.fstat(file.fileno()).st_size - start
            body = bytearray(max(0, min(num_bytes, left)))
            file.seek(start)
            file.readinto(body)  # type: ignore[attr-defined]  # of every buffered reader
        return body

    def verify(self) -> None:
        """Read and verify every section, one in memory at a time.

        Raises:
            RecordInvalid: If one is torn or damaged.
        """
        for name in self.sections:
            self.read(name)

    def check(self, version: int, fragment: Fragment) -> None:
        """Check that it is that version of that fragment, as planned.

        Raises:
            RecordInvalid: If it is not.
        """
        found = self.header["version"], self.header["fragment_id"]
        if found != (version, fragment.fragment_id):
            raise RecordInvalid(f"{self.path} is version {found[0]} of fragment {found[1]}")
        digests = self.header["lane_digests"], self.header["lane_blake3"]
        if any(len(each) != len(fragment.lanes) for each in digests):
            raise RecordInvalid(f"{self.path} holds another number of lanes than the plan")
        for name in state_sections(self.sections):
            for lane in fragment.lanes:
                section = self.sections.get(f"{name}/{lane.lane_id}")
                if section is not None and section.num_bytes != _FLOAT32_BYTES * lane.numel:
                    raise RecordInvalid(
                        f"{self.path} holds {section.num_bytes // _FLOAT32_BYTES} values in "
                        f"{name}, plan has {lane.numel}"
                    )


def locate(path: Path) -> StoredRecord:
    """Read the header of a record.

    Raises:
        RecordInvalid: If the file is missing or the header is torn or damaged.
    """
    with _opened(path) as file:
        prefix = file.read(_PREFIX.size)
        if len(prefix) < _PREFIX.size:
            raise RecordInvalid(f"{path} is torn: {len(prefix)} bytes")
        magic, header_bytes, digest = _PREFIX.unpack(prefix)
        if magic != MAGIC:
            raise RecordInvalid(
                f"{path} is no record of this version: it begins with {magic!r}, not {MAGIC!r}"
            )
        encoded = file.read(min(header_bytes, os.fstat(file.fileno()).st_size))
    if blake3.blake3(encoded).digest() != digest:
        raise RecordInvalid(f"{path} has a damaged header")
    header = json.loads(encoded)
    sections, at = {}, _PREFIX.size + header_bytes
    for entry in header.pop("sections"):
        sections[entry["name"]] = RecordSection(at, entry["bytes"], entry["digest"])
        at += entry["bytes"]
    return StoredRecord(path, at, header, sections)


def contributions_in(path: Path) -> list[RecordSection]:
    """Find where in a file the contributions of a version lie; none in one that is no record."""
    try:
        sections = locate(path).sections
    except RecordInvalid:
        return []
    return [found for name, found in sections.items() if name.startswith(CONTRIBUTION)]


def unpack(
    path: Path, version: int, fragment: Fragment, *, with_contributions: bool = True
) -> tuple[Mapping[str, Any], dict[str, bytearray]]:
    """Read a record file and verify every byte that is read; its size is that which it announces.

    Without contributions memory and time do not grow with the number of islands.

    Returns:
        Its header (JSON values) and its sections by name.

    Raises:
        RecordInvalid: If it is missing, torn, damaged, or of another version or plan.
    """
    stored = check_whole(path)
    stored.check(version, fragment)
    names = (n for n in stored.sections if with_contributions or not n.startswith(CONTRIBUTION))
    return stored.header, {name: stored.read(name) for name in names}


def verify(path: Path, version: int, fragment: Fragment) -> Mapping[str, Any]:
    """Verify every byte of a record file, a section in memory at a time; returns its header.

    Raises:
        RecordInvalid: As `unpack`.
    """
    stored = check_whole(path)
    stored.verify()
    stored.check(version, fragment)
    return stored.header


def check_whole(path: Path) -> StoredRecord:
    """Require a sound header and the size that it announces; the sections are not read.

    Raises:
        RecordInvalid: If the file is missing, torn, or its header is damaged.
    """
    stored = locate(path)
    try:
        size = path.stat().st_size
    except FileNotFoundError as error:  # a syncer forgot it meanwhile
        raise RecordInvalid(f"{path} does not exist") from error
    if size != stored.end:
        raise RecordInvalid(f"{path} has {size} bytes, its header announces {stored.end}")
    return stored


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file to be read; what the disk does not give back is damaged, not this process."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise RecordInvalid(f"{path} is no file")
        with path.open("rb") as file:
            yield file
    except FileNotFoundError as error:
        raise RecordInvalid(f"{path} does not exist") from error
    except OSError as error:
        if error.errno not in _UNREADABLE:
            raise
        raise RecordInvalid(f"{path} cannot be read: {error.strerror}") from error
