"""Decides which versions of a fragment stay in its store, and keeps what is needed of others.

Source: PROTOCOL.md, "Records and frames".
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from diloco import durable
from diloco.versions.frames import KEPT, frame_path, frame_versions_in, locate_version
from diloco.versions.record import (
    CONTRIBUTION,
    GUARD,
    RecordDraft,
    RecordInvalid,
    StoredRecord,
    header_path,
    locate,
    record_path,
    version_of,
    versions_in,
)

logger = logging.getLogger(__name__)


class Retention:
    """Forgets versions of one fragment; the caller holds the store's lock."""

    def __init__(
        self,
        directory: Path,
        *,
        is_indexed: Callable[[int], bool],
        keeps_all: bool,
    ) -> None:
        """Assign only; `directory` is the fragment's, the others are `FragmentStore`'s."""
        self._directory = directory
        self._is_indexed = is_indexed
        self._keeps_all = keeps_all

    def forget_before(self, oldest: int) -> None:
        """Forget versions before this one, but for the record that it is recomputed from.

        Called when a newer one is durable, which no failure undoes: what finds no room is done
        later.
        """
        try:
            self._forget_before(oldest)
        except durable.DiskFull as error:
            logger.warning("versions are forgotten later, there is no room for headers: %s", error)

    def _forget_before(self, oldest: int) -> None:
        records, frames = versions_in(self._directory), frame_versions_in(self._directory)
        first = max((v for v in records if v <= oldest), default=oldest)
        if first + 1 not in frames:
            first = oldest
        full: durable.DiskFull | None = None
        # A frame needs the record before it: killed at any moment, this leaves none without.
        for version in sorted({*records, *frames}, reverse=True):
            if version < first and not (self._keeps_all and self._is_beginning(version)):
                try:
                    self.forget(version)
                except durable.DiskFull as error:
                    full = error  # others may be indexed, and make room
        if full is not None:
            raise full
        for kept in self._directory.glob("v*.header"):
            if self._is_indexed(version_of(kept)):
                durable.unlink(kept)

    def _is_beginning(self, version: int) -> bool:
        """Whether a version is made of none before it: the first, and one that was repaired."""
        if version == 0:
            return True
        try:
            return "repaired" in locate(record_path(self._directory, version)).header
        except RecordInvalid:
            return False

    def forget(self, version: int) -> None:
        """Forget one version."""
        try:
            stored = locate_version(self._directory, version)
            self._keep_header(stored)
            if self._keeps_all and version > 0:
                self._keep_frame(stored)
        except RecordInvalid as error:
            logger.warning(
                "version %d is forgotten, what it was made of is lost: %s", version, error
            )
        for path in (record_path, frame_path):
            durable.unlink(path(self._directory, version))

    def _keep_frame(self, stored: StoredRecord) -> None:
        """Keep what a version was made of, durably: its frame, or its record without the state.

        Raises:
            DiskFull: If there is no room.
            RecordInvalid: If the record is damaged.
        """
        version, kept = stored.header["version"], self._directory / KEPT
        if not kept.is_dir():
            durable.make_directory_durably(kept)
        frame = frame_path(self._directory, version)
        if stored.path == frame or _is_sound(frame):
            durable.rename(frame, kept / frame.name)
            durable.sync_directory(kept)
            return
        sections = [
            (name, section.num_bytes)
            for name, section in stored.sections.items()
            if name == GUARD or name.startswith(("payload/", CONTRIBUTION))
        ]
        draft = RecordDraft(kept / frame.name, stored.header, sections)
        try:
            for name, _ in sections:
                draft.write(name, stored.read(name))
            draft.commit(stored.header)
        except (OSError, RecordInvalid):
            draft.abandon()
            raise

    def _keep_header(self, stored: StoredRecord) -> None:
        """Keep the header of what is forgotten until it is indexed."""
        version = stored.header["version"]
        if not self._is_indexed(version):
            durable.write_checked_json(header_path(self._directory, version), stored.header)


def _is_sound(frame: Path) -> bool:
    """Whether every byte of a frame can be read."""
    try:
        locate(frame).verify()
    except RecordInvalid:
        return False
    return True
