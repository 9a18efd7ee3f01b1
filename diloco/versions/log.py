"""Versions as frames of a log: a record without its state, appended to the segment of a snapshot.

    fragment-0003/v000000000016.record    a snapshot: the whole record of version 16
    fragment-0003/v000000000016.log       frames of versions 17, 18, ... until the next record
    fragment-0003/v000000000023.damaged   what was the last frame of a log and is torn or damaged
    fragment-0003/kept/                   segments of versions that the store has forgotten, if all
                                          are to be kept; of a snapshot, one of its own

A frame is the record of its version less the sections of state: its header names the rules that
it takes to compute that state from the version before. One write at the end of a file and
one fsync make a version durable; its header is written last. What follows the last frame with a
sound header and all its bytes is torn, unless a valid frame comes after it: then the file was
damaged, and what it still holds is left alone. Without a header it never existed; with one, or what
is left of one, it may have been published, and is set aside. Torch is not imported, as in `record`.

Source: PROTOCOL.md, "Records and logs".
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diloco import durable
from diloco.versions.record import (
    GUARD,
    HEADER_END,
    MAGIC,
    RecordDraft,
    RecordInvalid,
    StoredRecord,
    locate,
    record_path,
    version_of,
    versions_in,
)

logger = logging.getLogger(__name__)

#: Directory of what versions were made of, once the store has forgotten them.
KEPT = "kept"


def segment_path(directory: Path, version: int) -> Path:
    """File of the frames that follow a version, in a fragment's directory."""
    return directory / f"v{version:012d}.log"


def segments_in(directory: Path) -> list[int]:
    """Versions that a segment begins after, ascending."""
    return sorted(version_of(path) for path in directory.glob("v*.log"))


def frames_of(path: Path) -> Iterator[StoredRecord]:
    """Find the frames of a segment by their headers, up to the first that is torn or damaged.

    Their versions follow one another; the sections are not read. A segment that the syncer forgets
    meanwhile ends there.
    """
    at, version = 0, version_of(path)
    while True:
        try:
            frame = locate(path, at)
            size = path.stat().st_size
        except (RecordInvalid, FileNotFoundError):
            return
        if frame.header["version"] != version + 1 or frame.end > size:
            return
        yield frame
        at, version = frame.end, version + 1


def frames_in(directory: Path) -> dict[int, StoredRecord]:
    """Find all frames of a fragment by version.

    A segment ends where a later one begins: what a damaged one holds beyond that is another past.
    Unless all of the later one is in the earlier one, too: then it is one past, kept twice.
    """
    found: dict[int, StoredRecord] = {}
    for start in segments_in(directory):
        frames = {f.header["version"]: f for f in frames_of(segment_path(directory, start))}
        is_twice = all(_is_same_version(found.get(v), frame) for v, frame in frames.items())
        if not (frames and is_twice):
            found = {version: frame for version, frame in found.items() if version <= start}
        found |= frames
    return found


def _is_same_version(one: StoredRecord | None, other: StoredRecord) -> bool:
    """Whether both are there and of one past; headers name every byte that went in."""
    return one is not None and one.header == other.header


def locate_version(directory: Path, version: int) -> StoredRecord:
    """Find what a version was made from: in its record, or in its frame.

    Raises:
        RecordInvalid: If there is neither.
    """
    path = record_path(directory, version)
    try:
        return locate(path)
    except RecordInvalid:
        if (frame := frames_in(directory).get(version)) is not None:
            return frame
        raise


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


class FrameDraft(RecordDraft):
    """A frame on its way to the end of a segment; its header is what is written last."""

    def _open(self) -> tuple[int, int]:
        return durable.open_to_append(self._path)

    def _give_name(self) -> None:
        if self._start == 0:
            durable.sync_directory(self._path.parent)

    def _remove(self) -> None:
        durable.truncate(self._file, self._start)


def segment_after(directory: Path, version: int) -> Path | None:
    """Say where the frame of the version after this one belongs.

    A segment begins after every whole record, be it one that a pin has made of a frame.

    Returns:
        The segment; None where no frame could be found again: there is no record that leads to
        this version, or the segment has more in it than that. A record is due then.
    """
    if record_path(directory, version).exists():
        path = segment_path(directory, version)
        return path if not path.exists() or path.stat().st_size == 0 else None
    segments = segments_in(directory)
    if not segments:
        return None
    path = segment_path(directory, segments[-1])
    frames = list(frames_of(path))
    end = frames[-1].end if frames else 0
    is_next = segments[-1] + len(frames) == version and path.stat().st_size == end
    return path if is_next else None


def remove_torn_tail(path: Path) -> None:
    """Cut off what is torn at the end of a segment; damage before a whole frame is left alone.

    What begins with a header, or what is left of one, is set aside: it may have been published.

    Raises:
        DiskFull: If there is no room for that.
    """
    frames = list(frames_of(path))
    end = frames[-1].end if frames else 0
    size = path.stat().st_size
    if size == end:
        return
    if _has_frame_beyond(path, end):
        logger.error("log damaged, what follows is not reached: path=%s offset=%d", path, end)
        return
    if _has_header(path, end):
        version = version_of(path) + len(frames) + 1
        _set_aside(path, end, version, f"{size - end} bytes of {path} from {end} on are torn")
        return
    logger.warning("log torn, its last %d bytes never existed: path=%s", size - end, path)
    _cut_off(path, end)


def set_damaged_aside(directory: Path, version: int) -> None:
    """Move the frame of a version out of its segment, if it is the last one there and is damaged.

    Raises:
        DiskFull: If there is no room for that.
    """
    frame = frames_in(directory).get(version)
    if frame is None or frame.path.stat().st_size != frame.end:
        return
    try:
        frame.verify()
    except RecordInvalid as error:
        _set_aside(frame.path, frame.start, version, str(error))


def cut_last_frame(directory: Path, version: int) -> None:
    """Cut the frame of a version off, if it is the last one of a segment."""
    frame = frames_in(directory).get(version)
    if frame is not None and frame.path.stat().st_size == frame.end:
        _cut_off(frame.path, frame.start)


def damaged_path(directory: Path, version: int) -> Path:
    """File of a frame that was set aside, in a fragment's directory.

    It is a version that was published, or one that a power loss has torn out of order; only the
    coordinator's index and the islands know which. The newest of a fragment stays.
    """
    return directory / f"v{version:012d}.damaged"


def _set_aside(path: Path, start: int, version: int, problem: str) -> None:
    with path.open("rb") as file:
        file.seek(start)
        durable.write_durably(damaged_path(path.parent, version), [file.read()])
    for older in path.parent.glob("v*.damaged"):
        if version_of(older) < version:
            durable.unlink(older)
    _cut_off(path, start)
    logger.error("version %d is damaged and set aside: %s", version, problem)


def _cut_off(path: Path, end: int) -> None:
    descriptor, _ = durable.open_to_append(path)
    try:
        durable.truncate(descriptor, end)
        durable.sync(descriptor)
    finally:
        durable.close(descriptor)


def _has_header(path: Path, start: int) -> bool:
    """Whether what begins here has a header, or what is left of one that has lost its beginning.

    A disk that loses a sector gives zeros, as what was reserved does; then the header's end tells.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return any(content[start : start + len(MAGIC)]) or content.find(HEADER_END, start) >= 0


def _has_frame_beyond(path: Path, end: int) -> bool:
    """Whether a whole frame begins somewhere after `end`."""
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        at = end
        while (at := content.find(MAGIC, at + 1)) >= 0:
            try:
                if locate(path, at).end <= size:
                    return True
            except RecordInvalid:
                continue
    return False


def keep_segment(directory: Path, path: Path) -> None:
    """Move a segment that the store needs no more to what is kept."""
    _make_kept(directory)
    durable.rename(path, directory / KEPT / path.name)
    durable.sync_directory(directory / KEPT)


def keep_without_state(directory: Path, record: StoredRecord) -> None:
    """Keep what a version was made of, durably, when its record is about to be forgotten.

    Of a record that was made of a frame, for a pin, the frame is kept, with those after it.

    Raises:
        DiskFull: If there is no room.
        RecordInvalid: If the record is damaged.
    """
    version = record.header["version"]
    if version == 0 or any(_has_frame(at, record) for at in (directory, directory / KEPT)):
        return
    sections = [
        (name, section.num_bytes)
        for name, section in record.sections.items()
        if name == GUARD or name.startswith(("payload/", "contribution/"))
    ]
    _make_kept(directory)
    path = segment_path(directory / KEPT, version - 1)
    durable.unlink(path)  # of a store that was killed here
    draft = FrameDraft(path, record.header, sections)
    try:
        for name, _ in sections:
            draft.write(name, record.read(name))
        draft.commit(record.header)
    except (OSError, RecordInvalid):
        draft.abandon()
        raise


def _has_frame(directory: Path, record: StoredRecord) -> bool:
    """Whether a segment has a whole frame of a record's version."""
    version = record.header["version"]
    starts = [start for start in segments_in(directory) if start < version]
    for frame in frames_of(segment_path(directory, starts[-1])) if starts else ():
        if _is_same_version(frame, record):
            try:
                frame.verify()
            except RecordInvalid:
                return False
            return True
    return False


def _make_kept(directory: Path) -> None:
    if not (directory / KEPT).is_dir():
        durable.make_directory_durably(directory / KEPT)
