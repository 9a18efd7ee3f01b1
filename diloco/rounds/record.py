"""Files of a fragment's versions as bytes: their names, their layout, and what proves them whole.

    fragment-0003/v000000000012.record    magic | header length | header digest | header | sections
    fragment-0003/v000000000007.header    of a record that was forgotten before it was indexed

A version exists if and only if its record is valid. Tensors are bytes here and torch is not
imported, so that a coordinator can verify a checkpoint and index what a syncer could not report.

Source: protocol.md section 4 (commit point).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import struct
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import blake3

from diloco.durable import read_json, sync_directory
from diloco.outer.fragments import Fragment
from transport.contracts import Buffer

#: Float32 vectors of every lane, each a section NAME/LANE.
STATE_SECTIONS = ("theta", "published", "momentum")
#: One more, after these, where the outer optimizer is Adam.
SECOND_MOMENT = "second_moment"

_MAGIC = b"DILOREC2"
_PREFIX = struct.Struct("<8sQ32s")
_FLOAT32_BYTES = 4
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
    """A record file on its way: sections in any order and from any thread, then its name.

    Where each section lies is known from the start, so that the first lanes of a version are
    written while later ones are computed. Until `commit` has returned there is no such version.
    """

    def __init__(
        self, path: Path, header: Mapping[str, Any], sections: Iterable[tuple[str, int]]
    ) -> None:
        """Begin the temporary file.

        Args:
            path: Of the record.
            header: JSON values as long as those that `commit` will get: digests may still be
                others.
            sections: Name and bytes of each, in the order in which they lie in the file.
        """
        self._path = path
        self._temporary = path.with_name(path.name + ".tmp")
        self._table: dict[str, dict[str, Any]] = {
            name: {"name": name, "bytes": size, "digest": bytes(_DIGEST_BYTES).hex()}
            for name, size in sections
        }
        self._header_bytes = len(self._encode(header))
        sizes = (entry["bytes"] for entry in self._table.values())
        starts = itertools.accumulate(sizes, initial=_PREFIX.size + self._header_bytes)
        self._starts = dict(zip(self._table, starts, strict=False))  # and the end of the file
        self._missing = set(self._table)
        self._temporary.unlink(missing_ok=True)  # of a writer that was killed
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        self._file: int | None = os.open(self._temporary, flags, 0o644)

    @property
    def missing(self) -> frozenset[str]:
        """Names of the sections that were not written yet."""
        return frozenset(self._missing)

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

    def commit(self, header: Mapping[str, Any]) -> None:
        """Make the record durable under its name; every section was written."""
        assert self._file is not None, "a draft is committed twice"
        assert not self._missing, f"{self._path} without {sorted(self._missing)}"
        encoded = self._encode(header)
        assert len(encoded) == self._header_bytes, f"{self._path}: the header changed its size"
        prefix = _PREFIX.pack(_MAGIC, len(encoded), blake3.blake3(encoded).digest())
        self._write_at(0, memoryview(prefix + encoded))
        os.fsync(self._file)
        self._close()
        os.replace(self._temporary, self._path)
        sync_directory(self._path.parent)

    def abandon(self) -> None:
        """Remove what was written, unless it was committed: there is no such version."""
        if self._file is not None:
            self._close()
            self._temporary.unlink()

    def _close(self) -> None:
        assert self._file is not None
        descriptor, self._file = self._file, None
        os.close(descriptor)

    def _encode(self, header: Mapping[str, Any]) -> bytes:
        table = list(self._table.values())
        return json.dumps({**header, "sections": table}, sort_keys=True).encode()

    def _write_at(self, start: int, view: memoryview) -> None:
        assert self._file is not None, "a draft is written to after its end"
        while view:
            written = os.pwrite(self._file, view, start)
            start, view = start + written, view[written:]


def unpack(
    path: Path, version: int, fragment: Fragment
) -> tuple[dict[str, Any], dict[str, bytearray]]:
    """Read a record file and verify every byte of it.

    Returns:
        Its header (JSON values) and its sections by name.

    Raises:
        RecordInvalid: If it is missing, torn, damaged, or of another version or plan.
    """
    sections: dict[str, bytearray] = {}
    header = _read(path, version, fragment, sections.__setitem__)
    return header, sections


def verify(path: Path, version: int, fragment: Fragment) -> dict[str, Any]:
    """Verify every byte of a record file, a section in memory at a time; returns its header.

    Raises:
        RecordInvalid: As `unpack`.
    """
    return _read(path, version, fragment, lambda name, body: None)


def read_section(path: Path, name: str) -> tuple[dict[str, Any], bytearray]:
    """Read the header and verify and return one section of a record file.

    Raises:
        RecordInvalid: If the file is missing, or damaged there, or has no such section.
    """
    with _opened(path) as file:
        header, start = _read_header(path, file)
        for entry in header.pop("sections"):
            if entry["name"] == name:
                file.seek(start)
                return header, _read_body(path, file, entry)
            start += entry["bytes"]
    raise RecordInvalid(f"{path} has no section {name}")


def _read(
    path: Path, version: int, fragment: Fragment, keep: Callable[[str, bytearray], object]
) -> dict[str, Any]:
    """Read and verify a record file section by section; `keep` hears of each."""
    with _opened(path) as file:
        header, _ = _read_header(path, file)
        table = header.pop("sections")
        for entry in table:
            keep(entry["name"], _read_body(path, file, entry))
        if rest := os.fstat(file.fileno()).st_size - file.tell():
            raise RecordInvalid(f"{path} has {rest} bytes after its last section")
    sizes = {entry["name"]: entry["bytes"] for entry in table}
    _insist_on_plan(path, header, sizes, version, fragment)
    return header


def _read_body(path: Path, file: BinaryIO, entry: Mapping[str, Any]) -> bytearray:
    """Read the section where the file stands."""
    left = os.fstat(file.fileno()).st_size - file.tell()
    body = bytearray(min(entry["bytes"], left))
    file.readinto(body)  # type: ignore[attr-defined]  # of every buffered reader
    if len(body) < entry["bytes"] or blake3.blake3(body).hexdigest() != entry["digest"]:
        raise RecordInvalid(f"{path} is torn or damaged in section {entry['name']}")
    return body


def headers_in(directory: Path) -> list[dict[str, Any]]:
    """Read the headers of all versions whose record or header is kept, ascending by version.

    A record whose header is damaged is passed over; its sections are not looked at.
    """
    headers: dict[int, dict[str, Any]] = {
        version_of(path): dict(read_json(path) or {}) for path in directory.glob("v*.header")
    }
    for version in versions_in(directory):
        path = record_path(directory, version)
        try:
            headers[version] = read_header(path)
        except RecordInvalid:
            continue
    return [headers[version] for version in sorted(headers)]


def read_header(path: Path) -> dict[str, Any]:
    """Read the header of a record file, without its sections.

    Raises:
        RecordInvalid: If the file is missing or its header is damaged.
    """
    with _opened(path) as file:
        header, _ = _read_header(path, file)
    del header["sections"]
    return header


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        file = path.open("rb")
    except FileNotFoundError as error:
        raise RecordInvalid(f"{path} does not exist") from error
    with file:
        yield file


def _read_header(path: Path, file: BinaryIO) -> tuple[dict[str, Any], int]:
    """Read, verify and parse the header; returns it and where the sections begin."""
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size:
        raise RecordInvalid(f"{path} is torn: {len(prefix)} bytes")
    magic, header_bytes, digest = _PREFIX.unpack(prefix)
    if magic != _MAGIC:
        raise RecordInvalid(
            f"{path} is no record of this version: it begins with {magic!r}, not {_MAGIC!r}"
        )
    encoded = file.read(min(header_bytes, os.fstat(file.fileno()).st_size))
    if blake3.blake3(encoded).digest() != digest:
        raise RecordInvalid(f"{path} has a damaged header")
    return json.loads(encoded), _PREFIX.size + header_bytes


def insist_on_whole(path: Path) -> None:
    """Insist on a sound header and the size that it announces; the sections are not read.

    Raises:
        RecordInvalid: If the file is missing, torn, or its header is damaged.
    """
    with _opened(path) as file:
        header, start = _read_header(path, file)
    expected = start + sum(section["bytes"] for section in header["sections"])
    if (size := path.stat().st_size) != expected:
        raise RecordInvalid(f"{path} has {size} bytes, its header announces {expected}")


def _insist_on_plan(
    path: Path,
    header: Mapping[str, Any],
    sizes: Mapping[str, int],
    version: int,
    fragment: Fragment,
) -> None:
    if (header["version"], header["fragment_id"]) != (version, fragment.fragment_id):
        raise RecordInvalid(
            f"{path} is version {header['version']} of fragment {header['fragment_id']}"
        )
    if len(header["lane_digests"]) != len(fragment.lanes):
        raise RecordInvalid(f"{path} holds another number of lanes than the plan")
    for lane in fragment.lanes:
        for name in state_sections(sizes):
            numel = sizes[f"{name}/{lane.lane_id}"] // _FLOAT32_BYTES
            if numel != lane.numel:
                raise RecordInvalid(f"{path} holds {numel} values in {name}, plan has {lane.numel}")
