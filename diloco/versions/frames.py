"""Frames: versions without their state, which is computed from the record before them.

    fragment-0003/v000000000016.record    the whole record of version 16
    fragment-0003/v000000000017.frame     what version 17 was made from, and what was published
    fragment-0003/kept/                   frames of versions that the store has forgotten, if all
                                          are to be kept

A frame is the record of its version less the sections of state: its header names the rules that
it takes to compute that state from the version before. It is written as it is: zstandard leaves
0.90 of a frame of int4 (level 3: 0.89, at 0.8 GB/s). Torch is not imported, as in `record`.

Source: PROTOCOL.md, "Records and frames".
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from diloco import durable
from diloco.versions.record import (
    RecordInvalid,
    StoredRecord,
    check_whole,
    header_path,
    locate,
    record_path,
    version_of,
    versions_in,
)

logger = logging.getLogger(__name__)

#: Directory of what versions were made of, once the store has forgotten them.
KEPT = "kept"


def frame_path(directory: Path, version: int) -> Path:
    """File of a version's frame, in a fragment's directory."""
    return directory / f"v{version:012d}.frame"


def frame_versions_in(directory: Path) -> list[int]:
    """Versions that have a frame file, valid or not, ascending."""
    return sorted(version_of(path) for path in directory.glob("v*.frame"))


def each_frame_in(directory: Path) -> Iterator[tuple[int, StoredRecord]]:
    """Find the frames with a sound header and all their bytes, by version; sections are not read.

    Ascending. A frame that the syncer forgets meanwhile is not there.
    """
    for version in frame_versions_in(directory):
        with contextlib.suppress(RecordInvalid):
            yield version, check_whole(frame_path(directory, version))


def frames_in(directory: Path) -> dict[int, StoredRecord]:
    """Find the same, all at once."""
    return dict(each_frame_in(directory))


def frames_of(directory: Path, versions: Iterable[int]) -> list[StoredRecord]:
    """Find the frames of these versions, as `frames_in`; no others are looked at.

    Raises:
        RecordInvalid: If one of them is not there, or is damaged.
    """
    return [check_whole(frame_path(directory, version)) for version in versions]


def locate_version(directory: Path, version: int) -> StoredRecord:
    """Find what a version was made from: in its record, or in its frame.

    Raises:
        RecordInvalid: If there is neither.
    """
    frame = frame_path(directory, version)
    try:
        return locate(record_path(directory, version))
    except RecordInvalid:
        if not frame.exists():
            raise
    return locate(frame)


def headers_in(directory: Path) -> Iterator[Mapping[str, Any]]:
    """Read the headers of all versions whose record, frame or header is kept, ascending.

    What is damaged is passed over; sections of records and frames are not looked at. One header is
    in memory at a time: of a thousand islands it has megabytes.
    """
    found = {version_of(path) for path in directory.glob("v*.header")}
    for version in sorted(found.union(versions_in(directory), frame_versions_in(directory))):
        if (header := _header_of(directory, version)) is not None:
            yield header


def _header_of(directory: Path, version: int) -> Mapping[str, Any] | None:
    """Read the header of a version where it is sound: of its record, its frame, or kept alone."""
    with contextlib.suppress(RecordInvalid):
        return locate(record_path(directory, version)).header
    with contextlib.suppress(RecordInvalid):
        return check_whole(frame_path(directory, version)).header
    path = header_path(directory, version)
    try:
        header: dict[str, Any] | None = durable.read_checked_json(path) if path.exists() else None
    except FileNotFoundError:  # a syncer forgot it meanwhile
        return None
    except ValueError as error:
        logger.error("a version that was forgotten will not be in the audit log: %s", error)
        return None
    return header
