"""Reads and verifies the stored versions of one fragment.

Source: PROTOCOL.md, "Records and frames".
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from diloco.compression.base import to_bytes
from diloco.outer.fragments import Fragment
from diloco.transport.contracts import Buffer
from diloco.versions.frames import frame_path, frame_versions_in, locate_version
from diloco.versions.publication import LaneState
from diloco.versions.rebuild import rebuild
from diloco.versions.record import (
    SECOND_MOMENT,
    STATE_SECTIONS,
    RecordInvalid,
    StoredRecord,
    fragment_directory,
    record_path,
    unpack,
    verify,
    versions_in,
)
from diloco.versions.version import VersionRecord, record_of

logger = logging.getLogger(__name__)


class StoredVersions:
    """Versions of one fragment in one directory.

    Nothing here changes anything, so it is safe while a syncer serves the store.
    """

    def __init__(self, directory: Path, fragment: Fragment, *, num_threads: int = 1) -> None:
        """Assign only.

        Args:
            directory: The store, or a pin of it; the fragment has a directory in it.
            fragment: Of the run's plan.
            num_threads: Lanes recomputed at once.
        """
        self.store_dir = directory
        self.fragment = fragment
        self._directory = fragment_directory(directory, fragment.fragment_id)
        self._num_threads = num_threads

    def newest(self) -> VersionRecord | None:
        """Read the newest valid version and change nothing: safe while a syncer serves the store.

        Contributions are neither read nor verified.

        Returns:
            None if there is no version at all.

        Raises:
            RecordInvalid: If there are versions, and none is valid.
        """
        invalid: dict[int, RecordInvalid] = {}
        # Listed again each time: a syncer may have forgotten the version in the meantime.
        while versions := set(self.versions()) - invalid.keys():
            try:
                return self.load(max(versions), with_contributions=False)
            except RecordInvalid as error:
                logger.warning("version %d skipped, %s", max(versions), error)
                invalid[max(versions)] = error
        if invalid:
            raise RecordInvalid("; ".join(str(error) for error in invalid.values()))
        return None

    def versions(self, *, newest_first: bool = False) -> list[int]:
        """Versions that have a record or a frame, valid or not."""
        found = {*versions_in(self._directory), *frame_versions_in(self._directory)}
        return sorted(found, reverse=newest_first)

    def load(self, version: int, *, with_contributions: bool = True) -> VersionRecord:
        """Read and verify one version; a frame's state is recomputed.

        Without contributions those of a record are not read; its size is verified.

        Raises:
            RecordInvalid: If it is missing, torn, damaged, or of another plan.
        """
        record, frame = (path(self._directory, version) for path in (record_path, frame_path))
        read = partial(unpack, fragment=self.fragment, with_contributions=with_contributions)
        try:
            return record_of(*read(record, version), self.fragment)
        except RecordInvalid:
            if not frame.exists():
                raise
        header, sections = read(frame, version)
        lanes = self.rebuilt(version, range(len(self.fragment.lanes)))
        return record_of(header, sections, self.fragment, lanes)

    def verify(self, version: int) -> None:
        """Read and verify every byte of a version, a section at a time; of a frame its state, too.

        Raises:
            RecordInvalid: As `load`.
        """
        record, frame = (path(self._directory, version) for path in (record_path, frame_path))
        try:
            verify(record, version, self.fragment)
        except RecordInvalid:
            if not frame.exists():
                raise
            verify(frame, version, self.fragment)
            self.rebuilt(version, range(len(self.fragment.lanes)))

    def unverified(self) -> list[StoredRecord]:
        """Find all versions that are here, newest first; of a record and a frame, the record.

        Headers only: what the sections hold is verified by anyone who reads them.
        """
        found = []
        for version in self.versions(newest_first=True):
            try:
                found.append(locate_version(self._directory, version))
            except RecordInvalid:
                pass
            except OSError as error:
                logger.error("version %d in %s cannot be read: %s", version, self._directory, error)
        return found

    def load_lane(self, version: int, lane_id: int, section: str) -> tuple[str, Buffer]:
        """Read and verify one lane of a version: one of `state_sections`, or "payload".

        Returns:
            Name of the codec that the version was published in, and the lane's bytes.

        Raises:
            RecordInvalid: If the version is missing or damaged, or has no such section.
        """
        stored = locate_version(self._directory, version)
        codec, name = stored.header["payload_codec"], f"{section}/{lane_id}"
        if name in stored.sections or section not in (*STATE_SECTIONS, SECOND_MOMENT):
            return codec, stored.read(name)
        (state,) = self.rebuilt(version, [lane_id])
        return codec, to_bytes(state.vectors[section])

    def restore_lane_(self, state: LaneState, version: int, lane_id: int) -> None:
        """Make theta and moments what they durably are at a version, after a step in place.

        Raises:
            RecordInvalid: If they cannot be read back.
        """
        (kept,) = self.rebuilt(version, [lane_id])
        for name, vector in state.vectors.items():
            if name != "published":
                vector.copy_(kept.vectors[name])

    def rebuilt(self, version: int, lane_ids: Sequence[int]) -> tuple[LaneState, ...]:
        """Compute lanes of a version from the record before it: see `rebuild`."""
        return rebuild(self._directory, version, self.fragment, lane_ids, self._num_threads)
