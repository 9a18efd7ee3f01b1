"""Which versions of a fragment stay in its store, and what is kept of those that go.

Source: PROTOCOL.md, "Records and logs".
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from diloco import durable
from diloco.versions.log import (
    frames_in,
    frames_of,
    keep_segment,
    keep_without_state,
    segment_path,
    segments_in,
)
from diloco.versions.record import (
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
        snapshots = versions_in(self._directory)
        first = max((v for v in snapshots if v <= oldest), default=oldest)
        if first + 1 not in frames_in(self._directory):
            first = oldest
        for version in snapshots:
            if version < first and not (self._keeps_all and self._is_beginning(version)):
                self.forget(version)
        for start in segments_in(self._directory):
            if start < first:
                self._forget_segment(segment_path(self._directory, start), first)
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
        """Forget one record."""
        path = record_path(self._directory, version)
        try:
            stored = locate(path)
            self._keep_header(stored)
            if self._keeps_all:
                keep_without_state(self._directory, stored)
        except RecordInvalid as error:
            logger.warning("record forgotten without a word, %s", error)
        durable.unlink(path)

    def _forget_segment(self, path: Path, first: int) -> None:
        frames = list(frames_of(path))
        if not frames or frames[-1].header["version"] <= first:
            for frame in frames:
                self._keep_header(frame)
            if self._keeps_all:
                keep_segment(self._directory, path)
            else:
                durable.unlink(path)

    def _keep_header(self, stored: StoredRecord) -> None:
        """Keep the header of what is forgotten until it is indexed."""
        version = stored.header["version"]
        if not self._is_indexed(version):
            durable.write_checked_json(header_path(self._directory, version), stored.header)
