"""Files of a fragment's versions as bytes: their names, their layout, and what proves them whole.

    fragment-0003/v000000000012.record    magic | header length | header digest | header | sections
    fragment-0003/v000000000007.header    of a record that was forgotten before it was indexed

A version exists if and only if its record is valid. Tensors are bytes here and torch is not
imported, so that a coordinator can verify a checkpoint and index what a syncer could not report.

Source: protocol.md section 4 (commit point).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import blake3

from diloco.durable import read_json
from diloco.outer.fragments import Fragment
from transport.contracts import Buffer

#: Float32 vectors of every lane, each a section NAME/LANE.
STATE_SECTIONS = ("theta", "published", "momentum")

_MAGIC = b"DILOREC1"
_PREFIX = struct.Struct("<8sQ32s")
_FLOAT32_BYTES = 4


class RecordInvalid(Exception):
    """A record file is missing, torn, damaged or of another plan; the version does not exist."""


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


def pack(header: Mapping[str, Any], sections: Sequence[tuple[str, Buffer]]) -> list[Buffer]:
    """Give the pieces of a record file, for `write_durably`; `header` holds JSON values."""
    table = [
        {"name": name, "bytes": len(data), "digest": blake3.blake3(data).hexdigest()}
        for name, data in sections
    ]
    encoded = json.dumps({**header, "sections": table}, sort_keys=True).encode()
    prefix = _PREFIX.pack(_MAGIC, len(encoded), blake3.blake3(encoded).digest())
    return [prefix, encoded, *(data for _, data in sections)]


def unpack(
    path: Path, version: int, fragment: Fragment
) -> tuple[dict[str, Any], dict[str, bytearray]]:
    """Read a record file and verify every byte of it.

    Returns:
        Its header (JSON values) and its sections by name.

    Raises:
        RecordInvalid: If it is missing, torn, damaged, or of another version or plan.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise RecordInvalid(f"{path} does not exist") from error
    header, at = _header_of(path, data)
    sections: dict[str, bytearray] = {}
    for entry in header.pop("sections"):
        body = bytearray(data[at : at + entry["bytes"]])
        at += entry["bytes"]
        if blake3.blake3(body).hexdigest() != entry["digest"]:
            raise RecordInvalid(f"{path} is torn or damaged in section {entry['name']}")
        sections[entry["name"]] = body
    if at != len(data):
        raise RecordInvalid(f"{path} has {len(data) - at} bytes after its last section")
    _insist_on_plan(path, header, sections, version, fragment)
    return header, sections


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
    header, _ = _read_header(path)
    del header["sections"]
    return header


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Read, verify and parse the header; returns it and where the sections begin."""
    try:
        with path.open("rb") as file:
            prefix = file.read(_PREFIX.size)
            num_bytes = _PREFIX.unpack(prefix)[1] if len(prefix) == _PREFIX.size else 0
            data = prefix + file.read(min(num_bytes, path.stat().st_size))
    except FileNotFoundError as error:
        raise RecordInvalid(f"{path} does not exist") from error
    return _header_of(path, data)


def insist_on_whole(path: Path) -> None:
    """Insist on a sound header and the size that it announces; the sections are not read.

    Raises:
        RecordInvalid: If the file is missing, torn, or its header is damaged.
    """
    header, at = _read_header(path)
    expected = at + sum(section["bytes"] for section in header["sections"])
    if (size := path.stat().st_size) != expected:
        raise RecordInvalid(f"{path} has {size} bytes, its header announces {expected}")


def _header_of(path: Path, data: bytes) -> tuple[dict[str, Any], int]:
    """Verify and parse the header; returns it and where the sections begin."""
    if len(data) < _PREFIX.size:
        raise RecordInvalid(f"{path} is torn: {len(data)} bytes")
    magic, header_bytes, digest = _PREFIX.unpack_from(data)
    end = _PREFIX.size + header_bytes
    encoded = data[_PREFIX.size : end]
    if magic != _MAGIC or blake3.blake3(encoded).digest() != digest:
        raise RecordInvalid(f"{path} has a damaged header")
    return json.loads(encoded), end


def _insist_on_plan(
    path: Path,
    header: Mapping[str, Any],
    sections: Mapping[str, bytearray],
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
        for name in STATE_SECTIONS:
            numel = len(sections[f"{name}/{lane.lane_id}"]) // _FLOAT32_BYTES
            if numel != lane.numel:
                raise RecordInvalid(f"{path} holds {numel} values in {name}, plan has {lane.numel}")
