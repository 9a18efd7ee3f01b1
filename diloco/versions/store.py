"""Keeps the versions of one fragment on disk, durably before they are published.

Every `snapshot_rounds`-th version is a *record*: theta, published and momentum (12 bytes a
parameter), the published payload, and the accepted encoded contributions, so that each retained
version can be recomputed from the one before. Those between are *frames*, records without the
state: it is recomputed from the record before them (`rebuild`). With a record every round there
are no frames. The files are those of `record` and `frames`, and an expiry's (`expiries`).

A version exists if and only if its record, or its frame and all that leads to it, is valid. Files
are old or new after a crash (`diloco.durable`). Nothing here decides a round.

Source: PROTOCOL.md, "Durability".
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco import durable
from diloco.compression.base import to_bytes
from diloco.outer.fragments import Fragment
from diloco.protocol.rounds.terms import PastRound, RecordExpiry
from diloco.transport.contracts import Buffer
from diloco.versions.expiries import expired_attempts, write_expiry
from diloco.versions.frames import (
    frame_path,
    frames_of,
    headers_in,
    locate_version,
)
from diloco.versions.pins import pin_directory
from diloco.versions.publication import LaneState, PublicationRules
from diloco.versions.rebuild import made_again
from diloco.versions.record import (
    GUARD,
    SECOND_MOMENT,
    STATE_SECTIONS,
    RecordDraft,
    RecordInvalid,
    StoredRecord,
    check_whole,
    fragment_directory,
    record_path,
    versions_in,
)
from diloco.versions.retention import Retention
from diloco.versions.stored import StoredVersions
from diloco.versions.version import VersionRecord, sections_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a store held when it was opened: the newest valid version and the next attempt.

    `expired_in_a_row` to `expired_unix_s` are those of `expiries.ExpiredAttempts`.
    `headers` are those of all versions that may not have been reported yet, oldest first.
    """

    record: VersionRecord
    attempt: int
    expired_in_a_row: int
    broken_in_a_row: int
    rejected_in_a_row: int
    missing: tuple[str, ...]
    refused_at: Mapping[str, tuple[int, str]]
    expired_unix_s: float | None
    past: Mapping[int, PastRound]
    headers: tuple[Mapping[str, Any], ...]


class FragmentStore(StoredVersions):
    """Versions of one fragment in one directory; the caller holds the store's lock.

    `written_bytes` counts what was made durable since the store was made, headers included.
    `lost` is the newest version that `recover` found something of, and could not read, later than
    what it returned; -1: there is none such.

    One thread at a time writes versions; another may pin some meanwhile. What removes files waits
    for a pin under way, and a pin for that.
    """

    def __init__(
        self,
        directory: Path,
        fragment: Fragment,
        retained_versions: int,
        *,
        is_indexed: Callable[[int], bool] = lambda version: True,
        snapshot_rounds: int = 1,
        keeps_all: bool = False,
        num_threads: int = 1,
    ) -> None:
        """Assign only.

        Args:
            directory: The store, or a pin of it; the fragment has a directory in it.
            fragment: Of the run's plan.
            retained_versions: Predecessors of the newest version that are kept.
            is_indexed: Whether the coordinator has the header of a version; the header of one
                that is forgotten earlier is kept in a file of its own until it has.
            snapshot_rounds: Versions from one record to the next; 1: every version is one. Says
                what is written; whatever is there is read.
            keeps_all: Whether what versions were made of is moved to `frames.KEPT` instead of
                forgotten; version 0 then stays, for anyone who recomputes them all, as do those
                that were repaired.
            num_threads: Lanes recomputed at once.
        """
        super().__init__(directory, fragment, num_threads=num_threads)
        self.retained_versions = retained_versions
        self._snapshot_rounds = snapshot_rounds
        self._retention = Retention(self._directory, is_indexed=is_indexed, keeps_all=keeps_all)
        self.written_bytes = 0
        self.lost = -1
        self._told: set[str] = set()
        self._removing = threading.RLock()  # `recover` commits

    # -- opening ---------------------------------------------------------------------------------

    def recover(self) -> Recovered | None:
        """Find the newest valid version; None when there is none.

        A damaged one is made again where its contributions are whole. Read and verified is what is
        served: state and payloads of the newest version, and for a frame what leads to it from the
        record before. What is not read then (older versions, contributions of records) is verified
        by anyone who needs it, and once by `RoundRunner.verify_store` while the syncer serves.

        Raises:
            DiskFull: If there is no room for that.
        """
        with self._removing:
            return self._recovered()

    def _recovered(self) -> Recovered | None:
        durable.make_directory_durably(self._directory)
        for leftover in self._directory.glob("*.tmp"):
            durable.unlink(leftover)
        # A writer killed between rename and fsync leaves names that a power loss would take back.
        durable.sync_directory(self._directory)
        newest = self._newest_restored()
        reached = -1 if newest is None else newest.version
        # No killed writer and no power loss leaves that: a file has its name when all of it is
        # durable.
        last = max(self.versions(), default=-1)
        self.lost = last if last > reached else -1
        if newest is None:
            return None
        expired = expired_attempts(self._directory, reached)
        # Also of what was lost: by its header it can be taken back from an island.
        known = max(reached, self.lost)
        headers = [h for h in headers_in(self._directory) if h["version"] <= known]
        return Recovered(newest, *expired, self._past(newest), tuple(headers))

    def _newest_restored(self) -> VersionRecord | None:
        """Read the newest version that can be, or be made again; None: there is none.

        One that was made again may lead to newer ones, so that these are looked at once more.
        """
        made: set[int] = set()
        while True:
            for version in self.versions(newest_first=True):
                try:
                    return self.load(version, with_contributions=False)
                except RecordInvalid as damage:
                    if version not in made and self._is_made_again(version, damage):
                        made.add(version)
                        break
            else:
                return None

    def _is_made_again(self, version: int, damage: RecordInvalid) -> bool:
        try:
            self.make_again(version)
        except RecordInvalid:
            self._log_skipped(version, damage)
            return False
        logger.error("version %d made again from the one before it: %s", version, damage)
        return True

    def _log_skipped(self, version: int, problem: RecordInvalid) -> None:
        """Say it once, however often a full disk has the same be read again."""
        if str(problem) not in self._told:
            self._told.add(str(problem))
            logger.warning("version %d skipped, %s", version, problem)

    def _past(self, newest: VersionRecord) -> dict[int, PastRound]:
        """Give the outcomes of the rounds of retained versions, by base version.

        Their headers say them, each under a digest of its own: no section is read.
        """
        past: dict[int, PastRound] = {}
        oldest = max(1, newest.version - self.retained_versions)
        for version in (v for v in self.versions() if oldest <= v <= newest.version):
            header: Mapping[str, Any] = newest.header()
            if version < newest.version:
                try:
                    stored = locate_version(self._directory, version)
                    stored.check(version, self.fragment)
                except RecordInvalid as error:
                    self._log_skipped(version, error)
                    continue
                header = stored.header
            past[version - 1] = PastRound(
                header["attempt"],
                frozenset((c["island"], c["incarnation"]) for c in header["contributors"]),
                header["refused"],
                header.get("merge", {}).get("rejected", {}),
            )
        return past

    def make_again(self, version: int) -> None:
        """Write a version again, out of the one before it and its own contributions.

        A lane and a contribution to it are in memory at a time.

        Raises:
            DiskFull: If there is no room for it; what was there is.
            RecordInvalid: If one of these is damaged too, or they do not come to its digests.
        """
        stored = locate_version(self._directory, version)

        def before(lane_id: int) -> LaneState:
            return self.rebuilt(version - 1, [lane_id])[0]

        made = made_again(stored, version, before, self.fragment)
        damaged = set()
        try:
            stored.read(GUARD)
        except RecordInvalid:  # without it the guard learns what is usual again
            damaged.add(GUARD)
        self._write_snapshot(stored, ((lane.state, lane.payload) for lane in made), damaged)

    # -- writing ---------------------------------------------------------------------------------

    def draft(
        self,
        record: VersionRecord,
        payload_bytes: Sequence[int],
        contribution_bytes: Mapping[str, Sequence[int]],
    ) -> RecordDraft:
        """Begin to write a version whose lanes are still to be computed.

        Args:
            record: The version; payloads and contributions do not count, of lanes only which
                vectors they have, of the guard only how many bytes it has, and digests may be
                others than those that it will have. Without
                rules it cannot be computed from the version before, and is written whole.
            payload_bytes: Of each lane's published payload; empty for version 0.
            contribution_bytes: Island -> bytes of each lane, as accepted.

        Raises:
            DiskFull: If there is no room for it; nothing was written.
        """
        if not record.rules or not self._is_frame_enough(record.version):
            return self._whole_draft(record, payload_bytes, contribution_bytes)
        path = frame_path(self._directory, record.version)
        sections = _made_of(payload_bytes, contribution_bytes, len(record.guard))
        return RecordDraft(path, record.header(), sections)

    def _whole_draft(
        self,
        record: VersionRecord,
        payload_bytes: Sequence[int],
        contribution_bytes: Mapping[str, Sequence[int]],
    ) -> RecordDraft:
        state = [
            (f"{name}/{lane.lane_id}", 4 * lane.numel)
            for name in record.lanes[0].vectors
            for lane in self.fragment.lanes
        ]
        path = record_path(self._directory, record.version)
        sections = state + _made_of(payload_bytes, contribution_bytes, len(record.guard))
        return RecordDraft(path, record.header(), sections)

    def _is_frame_enough(self, version: int) -> bool:
        """Whether a version's state can be computed again: a record and frames lead to it."""
        records = [v for v in versions_in(self._directory) if v < version]
        # Fragments in turn: together their snapshots would fill the disk's line in one round.
        if (version + self.fragment.fragment_id) % self._snapshot_rounds == 0 or not records:
            return False
        try:
            frames_of(self._directory, range(records[-1] + 1, version))
        except RecordInvalid:
            return False
        return True

    def commit(self, record: VersionRecord, draft: RecordDraft | None = None) -> None:
        """Write a version durably, then forget what is no longer retained.

        Args:
            record: The version.
            draft: Holds some of its sections already, and is the caller's to abandon if this
                fails; None: nothing was written yet.

        Raises:
            DiskFull: If there is no room; there is no such version, and it may be tried again.
            OSError: If the disk fails.
        """
        if draft is None:
            self._write_whole(record)
        else:
            self._fill(draft, record)
        self._forget_before(record.version - self.retained_versions)

    def _forget_before(self, oldest: int) -> None:
        with self._removing:
            self._retention.forget_before(oldest)

    def _write_whole(self, record: VersionRecord) -> None:
        sizes = {i: [len(lane) for lane in c] for i, c in record.contributions.items()}
        payload_bytes = [len(payload) for payload in record.payloads]
        draft = self._whole_draft(record, payload_bytes, sizes)
        try:
            self._fill(draft, record)
        except OSError:
            draft.abandon()
            raise

    def _write_snapshot(
        self,
        stored: StoredRecord,
        lanes: Iterable[tuple[LaneState, Buffer | None]],
        left_out: Container[str] = (),
    ) -> None:
        """Make a record of a version, a lane or a section in memory at a time.

        Args:
            stored: What is kept of it; all but its state is copied.
            lanes: State of each lane, and its payload, if it is not to be copied.
            left_out: Sections that are not copied.
        """
        optimizer = PublicationRules.from_json(stored.header["rules"]).optimizer
        names = (*STATE_SECTIONS, *([SECOND_MOMENT] if optimizer.has_second_moment else []))
        sizes = {
            f"{n}/{lane.lane_id}": 4 * lane.numel for n in names for lane in self.fragment.lanes
        }
        for name, section in stored.sections.items():
            if name not in left_out:
                sizes.setdefault(name, section.num_bytes)
        path = record_path(self._directory, stored.header["version"])
        draft = RecordDraft(path, stored.header, sizes.items())
        try:
            for lane_id, (state, payload) in enumerate(lanes):
                for name, vector in state.vectors.items():
                    draft.write(f"{name}/{lane_id}", to_bytes(vector))
                if payload is not None:
                    draft.write(f"payload/{lane_id}", payload)
            missing = draft.missing
            for name in sizes:
                if name in missing:
                    draft.write(name, stored.read(name))
            draft.commit(stored.header)
        except (OSError, RecordInvalid):
            draft.abandon()
            raise
        self.written_bytes += draft.num_bytes

    def _fill(self, draft: RecordDraft, record: VersionRecord) -> None:
        """Write what a draft lacks, and make it durable."""
        missing = draft.missing
        for name, data in sections_of(record):
            if name in missing:
                draft.write(name, data)
        draft.commit(record.header())
        self.written_bytes += draft.num_bytes

    def take_back(self, version: int) -> None:
        """Remove the newest version, which was not announced yet."""
        durable.unlink(record_path(self._directory, version))
        durable.unlink(frame_path(self._directory, version))
        durable.sync_directory(self._directory)

    def record_expiry(self, expiry: RecordExpiry, expired_unix_s: float | None = None) -> None:
        """Write durably that an attempt expired, so that a restart opens the one after it.

        `expired_unix_s` is when it did, by the wall clock.
        """
        write_expiry(self._directory, expiry, expired_unix_s)

    # -- pins ------------------------------------------------------------------------------------

    def pin(self, step: int, version: int) -> None:
        """Keep a version for the run checkpoint of an inner step; durable when this returns.

        A record is linked, not copied, and not read: it was whole when it was written or
        recovered, and anyone who resumes verifies it. Of a frame a record is made. Repeating it
        changes nothing.

        Raises:
            DiskFull: If there is no room for it.
            PinRefused: If another version is pinned for this step, or there is no such version.
        """
        with self._removing:
            self._pin(step, version)

    def _pin(self, step: int, version: int) -> None:
        directory = fragment_directory(
            pin_directory(self.store_dir, step), self.fragment.fragment_id
        )
        if other := [pinned for pinned in versions_in(directory) if pinned != version]:
            raise PinRefused(
                f"fragment {self.fragment.fragment_id}: the checkpoint of inner step {step} holds "
                f"version {other[0]}, not {version}: another island had merged that one there"
            )
        own, pinned = record_path(self._directory, version), record_path(directory, version)
        if not pinned.exists():
            try:
                frame = frame_path(self._directory, version)
                if not own.exists() and frame.exists():
                    lanes = range(len(self.fragment.lanes))
                    states = ((self.rebuilt(version, [i])[0], None) for i in lanes)
                    self._write_snapshot(check_whole(frame), states)
                check_whole(own)
            except RecordInvalid as error:
                raise PinRefused(f"version {version} is not here to be kept: {error}") from error
            durable.make_directory(directory)
            durable.link(own, pinned)
        for made in (directory, *directory.parents[:3]):  # up to the store, however it was left
            durable.sync_directory(made)


class PinRefused(Exception):
    """A version cannot be kept for a run checkpoint; says why."""


def _made_of(
    payload_bytes: Sequence[int],
    contribution_bytes: Mapping[str, Sequence[int]],
    guard_bytes: int,
) -> list[tuple[str, int]]:
    """Name the sections of a version besides its state, with their bytes."""
    payloads = [(f"payload/{i}", size) for i, size in enumerate(payload_bytes)]
    contributions = [
        (f"contribution/{island}/{i}", size)
        for island, sizes in sorted(contribution_bytes.items())
        for i, size in enumerate(sizes)
    ]
    guard = [(GUARD, guard_bytes)] if guard_bytes else []
    return payloads + guard + contributions
