"""Frames: versions without their state, which is computed from the record before them.

    fragment-0003/v000000000016.record    the whole record of version 16
    fragment-0003/v000000000017.frame     what version 17 was made from, and what was published
    fragment-0003/kept/                   frames of versions that the store has forgotten, if all
                                          are to be kept

A frame is the record of its version less the sections of state: its header names the rules that
it takes to compute that state from the version before. Torch is not imported, as in `record`.

Source: PROTOCOL.md, "Records and frames".
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from diloco import durable
from diloco.versions.record import (
    RecordInvalid,
    StoredRecord,
    check_whole,
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


def frames_in(directory: Path) -> dict[int, StoredRecord]:
    """Find the frames with a sound header and all their bytes, by version; sections are not read.

    A frame that the syncer forgets meanwhile is not there.
    """
    found = {}
    for version in frame_versions_in(directory):
        try:
            found[version] = check_whole(frame_path(directory, version))
        except RecordInvalid:
            continue
    return found


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


def headers_in(directory: Path) -> list[dict[str, Any]]:
    """Read the headers of all versions whose record, frame or header is kept, ascending.

    What is damaged is passed over; sections of records and frames are not looked at.
    """
    headers: dict[int, dict[str, Any]] = {}
    for path in directory.glob("v*.header"):
        try:
            headers[version_of(path)] = durable.read_checked_json(path)
        except FileNotFoundError:  # a syncer forgot it meanwhile
            continue
        except ValueError as error:
            logger.error("a version that was forgotten will not be in the audit log: %s", error)
    for version, frame in frames_in(directory).items():
        headers[version] = dict(frame.header)
    for version in versions_in(directory):
        try:
            headers[version] = dict(locate(record_path(directory, version)).header)
        except RecordInvalid:
            continue
    return [headers[version] for version in sorted(headers)]
