"""Durable truth of one fragment: one checksummed record a version, written before publication.

`snapshot` policy: a record holds theta, published and momentum (12 bytes a parameter), the
published payload, and the accepted encoded contributions, so that each retained version can be
recomputed from the one before. A version exists if and only if its record is valid; the files are
those of `record`, and beside them

    fragment-0003/attempt.json             next attempt, after an expiry

Files are old or new after a crash (`diloco.durable`). Nothing here decides a round.

Source: protocol.md section 4 (commit point) and 9 (pins).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import blake3
import torch
from torch import Tensor

from diloco.compression.base import from_bytes, to_bytes
from diloco.durable import make_directory_durably, sync_directory, write_durably, write_json
from diloco.outer.combination import Combination, mean_of
from diloco.outer.fragments import Fragment
from diloco.rounds.pins import pin_directory
from diloco.rounds.publication import (
    LaneState,
    PublicationRules,
    lane_digest,
    publish_lane,
    version_digest,
)
from diloco.rounds.record import (
    RecordDraft,
    RecordInvalid,
    fragment_directory,
    header_path,
    headers_in,
    insist_on_whole,
    read_header,
    read_section,
    record_path,
    state_sections,
    unpack,
    verify,
    version_of,
    versions_in,
)
from diloco.rounds.terms import Contributor, Inclusion, PastRound, RoundKey
from transport.contracts import Buffer

logger = logging.getLogger(__name__)

#: Next attempt when a damaged file does not say which were announced: a later one must be opened,
#: and numbers may be skipped, since contributors follow whatever attempt is announced.
_LATER_ATTEMPT = 1 << 16


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """All that a version is: who made it, its state, its payload, and what it was made from.

    Args:
        key: Round that published it; `key.version` + 1 is `version`. Version 0 has none.
        lanes: State of each lane, in lane order.
        payloads: Published payload of each lane; empty for version 0.
        contributions: Island -> encoded lanes, as accepted; empty for version 0.
        refused: Island -> why it left the attempt, for those that did.
        last_included: Island -> its newest contribution that this version or one before it counts.
        rejected: Island -> why what it sent was not counted, though it was complete and valid.
        combination: Coefficients of the contributions; None: their mean, weighted by tokens.
        merged_tokens: Of all contributions to all versions up to this one; 0 where no syncer
            has counted them.
        rules: What the version was made by, JSON values (`PublicationRules.to_json`, the quorum,
            and the revision of the policy); empty for version 0, and for an all-reduce.
    """

    version: int
    fragment_id: int
    timeline: int
    key: RoundKey | None
    is_flush: bool
    payload_codec: str
    lane_digests: tuple[bytes, ...]
    lanes: tuple[LaneState, ...]
    payloads: tuple[Buffer, ...] = ()
    contributors: tuple[Contributor, ...] = ()
    contributions: Mapping[str, Sequence[Buffer]] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    last_included: Mapping[str, Inclusion] = field(default_factory=dict)
    rejected: Mapping[str, str] = field(default_factory=dict)
    combination: Combination | None = None
    merged_tokens: int = 0
    rules: Mapping[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> bytes:
        """Digest of the published version."""
        return version_digest(self.lane_digests)

    @property
    def sent_at_inner_step(self) -> int:
        """Latest inner step at which a contribution to it was sent; 0 for version 0."""
        return max((c.sent_at_inner_step for c in self.contributors), default=0)

    def header(self) -> dict[str, Any]:
        """What the journal and the tape keep: plain JSON values.

        `merge` is there only where it was more than the mean of all, weighted by tokens;
        `merged_tokens` and `rules` where a syncer has merged anything.
        """
        header: dict[str, Any] = {
            "version": self.version,
            "fragment_id": self.fragment_id,
            "timeline": self.timeline,
            "attempt": self.key.attempt if self.key else 0,
            "is_flush": self.is_flush,
            "payload_codec": self.payload_codec,
            "digest": self.digest.hex(),
            "lane_digests": [digest.hex() for digest in self.lane_digests],
            "contributors": [
                {
                    "island": c.island,
                    "incarnation": c.incarnation,
                    "weight_tokens": c.weight_tokens,
                    "weight_steps": c.weight_steps,
                    "sent_at_inner_step": c.sent_at_inner_step,
                    "lane_digests": [digest.hex() for digest in c.lane_digests],
                }
                for c in self.contributors
            ],
            "refused": dict(self.refused),
            "last_included": {name: [*astuple(last)] for name, last in self.last_included.items()},
        }
        if self.rules:
            header |= {"merged_tokens": self.merged_tokens, "rules": dict(self.rules)}
        if self.combination is not None:
            header["merge"] = {**self.combination.to_json(), "rejected": dict(self.rejected)}
        return header


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a store held when it was opened: the newest valid version and the next attempt.

    `expired_in_a_row` counts the expiries recorded since that version was published,
    `broken_in_a_row` those whose results could not be used; `missing` are the islands that the last
    of them waited for in vain.
    `headers` are those of all versions that may not have been reported yet, oldest first.
    """

    record: VersionRecord
    attempt: int
    expired_in_a_row: int
    broken_in_a_row: int
    missing: tuple[str, ...]
    past: Mapping[int, PastRound]
    headers: tuple[Mapping[str, Any], ...]


class FragmentStore:
    """Records of one fragment in one directory; the caller holds the store's lock."""

    def __init__(
        self,
        directory: Path,
        fragment: Fragment,
        retained_versions: int,
        *,
        is_indexed: Callable[[int], bool] = lambda version: True,
    ) -> None:
        """Assign only.

        Args:
            directory: The store, or a pin of it; the fragment has a directory in it.
            fragment: Of the run's plan.
            retained_versions: Predecessors of the newest record that are kept.
            is_indexed: Whether the coordinator has the header of a version; the header of one
                that is forgotten earlier is kept in a file of its own until it has.
        """
        self.store_dir = directory
        self._directory = fragment_directory(directory, fragment.fragment_id)
        self.fragment = fragment
        self._is_indexed = is_indexed
        self.retained_versions = retained_versions

    def recover(self) -> Recovered | None:
        """Find the newest valid record; None when there is none."""
        make_directory_durably(self._directory)
        for leftover in self._directory.glob("*.tmp"):
            leftover.unlink()
        # A writer killed between rename and fsync leaves names that a power loss would take back.
        sync_directory(self._directory)
        past: dict[int, PastRound] = {}
        newest: VersionRecord | None = None
        for version in reversed(versions_in(self._directory)):
            try:
                if newest is None:
                    newest = self.load(version)
                    header = newest.header()
                else:
                    header = verify(record_path(self._directory, version), version, self.fragment)
            except RecordInvalid as error:
                logger.warning("record skipped, %s", error)
                continue
            if version > 0:
                past[version - 1] = PastRound(
                    header["attempt"],
                    frozenset((c["island"], c["incarnation"]) for c in header["contributors"]),
                    header["refused"],
                    header.get("merge", {}).get("rejected", {}),
                )
        if newest is None:
            return None
        standing = self._attempt_after(newest.version)
        headers = [h for h in headers_in(self._directory) if h["version"] <= newest.version]
        return Recovered(newest, *standing, past, tuple(headers))

    def draft(
        self,
        record: VersionRecord,
        payload_bytes: Sequence[int],
        contribution_bytes: Mapping[str, Sequence[int]],
    ) -> RecordDraft:
        """Begin to write a version whose lanes are still to be computed.

        Args:
            record: The version; payloads and contributions do not count, of lanes only which
                vectors they have, and digests may be others than those that it will have.
            payload_bytes: Of each lane's published payload; empty for version 0.
            contribution_bytes: Island -> bytes of each lane, as accepted.
        """
        sections = [
            (f"{name}/{lane.lane_id}", 4 * lane.numel)
            for name in record.lanes[0].vectors
            for lane in self.fragment.lanes
        ]
        sections += [(f"payload/{i}", size) for i, size in enumerate(payload_bytes)]
        sections += [
            (f"contribution/{island}/{i}", size)
            for island, sizes in sorted(contribution_bytes.items())
            for i, size in enumerate(sizes)
        ]
        return RecordDraft(record_path(self._directory, record.version), record.header(), sections)

    def commit(self, record: VersionRecord, draft: RecordDraft | None = None) -> None:
        """Write a version durably, then forget what is no longer retained.

        Args:
            record: The version.
            draft: Holds some of its sections already; None: nothing was written yet.
        """
        if draft is None:
            sizes = {i: [len(lane) for lane in c] for i, c in record.contributions.items()}
            draft = self.draft(record, [len(payload) for payload in record.payloads], sizes)
        try:
            missing = draft.missing
            for name, data in _sections(record):
                if name in missing:
                    draft.write(name, data)
            draft.commit(record.header())
        except OSError:
            draft.abandon()
            raise
        self._retain(record.version)

    def adopt(self, staged: FragmentStore, version: int) -> None:
        """Take a version over that another store, on the same disk, has written durably."""
        own = record_path(self._directory, version)
        os.replace(record_path(staged._directory, version), own)
        sync_directory(self._directory)
        sync_directory(staged._directory)
        self._retain(version)

    def forget_all_but(self, version: int) -> None:
        """Forget every version but this one."""
        for other in versions_in(self._directory):
            if other != version:
                self._forget(other)

    def _retain(self, newest: int) -> None:
        for version in versions_in(self._directory):
            if version < newest - self.retained_versions:
                self._forget(version)
        for kept in self._directory.glob("v*.header"):
            if self._is_indexed(version_of(kept)):
                kept.unlink()

    def record_expiry(
        self, key: RoundKey, missing: Sequence[str] = (), broken_in_a_row: int = 0
    ) -> None:
        """Write durably that `key` expired, so that a restart opens the attempt after it.

        Args:
            key: Of the attempt.
            missing: Islands that it waited for in vain.
            broken_in_a_row: Attempts at this version, it included, with results of no use.
        """
        noted = {
            "version": key.version,
            "attempt": key.attempt + 1,
            "broken_in_a_row": broken_in_a_row,
            "missing": list(missing),
        }
        body = json.dumps(noted).encode()
        write_durably(
            self._directory / "attempt.json",
            [blake3.blake3(body).hexdigest().encode(), b"\n", body],
        )

    def load(self, version: int) -> VersionRecord:
        """Read and verify one record.

        Raises:
            RecordInvalid: If it is missing, torn, damaged, or of another plan.
        """
        path = record_path(self._directory, version)
        return record_of(*unpack(path, version, self.fragment), self.fragment)

    def load_lane(self, version: int, lane_id: int, section: str) -> tuple[str, Buffer]:
        """Read and verify one lane of a version: one of `state_sections`, or "payload".

        Returns:
            Name of the codec that the version was published in, and the lane's bytes.

        Raises:
            RecordInvalid: If the record is missing or damaged, or has no such section.
        """
        path = record_path(self._directory, version)
        header, body = read_section(path, f"{section}/{lane_id}")
        return header["payload_codec"], body

    def restore_lane_(self, state: LaneState, version: int, lane_id: int) -> None:
        """Make theta and moments what they durably are at a version, after a step in place.

        Raises:
            RecordInvalid: If they cannot be read back.
        """
        for name, vector in state.vectors.items():
            if name == "published":
                continue
            _, body = self.load_lane(version, lane_id, name)
            vector.copy_(from_bytes(body).view(torch.float32))

    def pin(self, step: int, version: int) -> None:
        """Keep a version for the run checkpoint of an inner step; durable when this returns.

        The record is linked, not copied, and not read: it was whole when it was written or
        recovered, and whoever resumes verifies it. Repeating it changes nothing.

        Raises:
            PinRefused: If another version is pinned for this step, or there is no such record.
        """
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
                insist_on_whole(own)
            except RecordInvalid as error:
                raise PinRefused(f"version {version} is not here to be kept: {error}") from error
            directory.mkdir(parents=True, exist_ok=True)
            os.link(own, pinned)
        for made in (directory, *directory.parents[:3]):  # up to the store, however it was left
            sync_directory(made)

    def newest(self) -> VersionRecord | None:
        """Read the newest valid record and change nothing: safe while a syncer serves the store.

        Returns:
            None if there is no record at all.

        Raises:
            RecordInvalid: If there are records, and none is valid.
        """
        invalid: dict[int, RecordInvalid] = {}
        # Listed anew each time: a syncer may have forgotten the version in the meantime.
        while versions := set(versions_in(self._directory)) - invalid.keys():
            try:
                return self.load(max(versions))
            except RecordInvalid as error:
                logger.warning("record skipped, %s", error)
                invalid[max(versions)] = error
        if invalid:
            raise RecordInvalid("; ".join(str(error) for error in invalid.values()))
        return None

    def _attempt_after(self, version: int) -> tuple[int, int, int, tuple[str, ...]]:
        """Return the next attempt at the version after this one, and how those before it ended.

        That is how many expired, how many of them with results of no use, and who was missing.
        """
        path = self._directory / "attempt.json"
        if not path.exists():
            return 0, 0, 0, ()
        checksum, _, body = path.read_bytes().partition(b"\n")
        if blake3.blake3(body).hexdigest().encode() != checksum:
            logger.warning("expiry record damaged, path=%s", path)
            return _LATER_ATTEMPT, 0, 0, ()
        noted = json.loads(body)
        if noted["version"] != version:
            return 0, 0, 0, ()
        attempt, broken = int(noted["attempt"]), int(noted["broken_in_a_row"])
        return attempt, attempt % _LATER_ATTEMPT, broken, tuple(noted["missing"])

    def _forget(self, version: int) -> None:
        """Remove a record; its header stays until it is indexed."""
        path = record_path(self._directory, version)
        if not self._is_indexed(version):
            try:
                write_json(header_path(self._directory, version), read_header(path))
            except RecordInvalid as error:
                logger.warning("record forgotten without a word, %s", error)
        path.unlink()


class PinRefused(Exception):
    """A version cannot be kept for a run checkpoint; says why."""


def founding_record(
    fragment: Fragment,
    initial: Mapping[int, Buffer],
    timeline: int,
    *,
    has_second_moment: bool = False,
) -> VersionRecord:
    """Make version 0 of initial parameters, float32 by lane: published = theta, moments = 0."""
    lanes = []
    for lane in fragment.lanes:
        values = from_bytes(initial[lane.lane_id]).view(torch.float32)
        second = torch.zeros_like(values) if has_second_moment else None
        lanes.append(LaneState(values.clone(), values, torch.zeros_like(values), second))
    return VersionRecord(
        version=0,
        fragment_id=fragment.fragment_id,
        timeline=timeline,
        key=None,
        is_flush=False,
        payload_codec="float32",
        lane_digests=tuple(lane_digest(lane.published) for lane in lanes),
        lanes=tuple(lanes),
    )


def recompute(
    previous: VersionRecord, record: VersionRecord, rules: PublicationRules, fragment: Fragment
) -> tuple[bytes, ...]:
    """Recompute the lane digests of `record` from its predecessor and its contributions.

    They are merged with the coefficients that the record names, whatever made these.

    Returns:
        The digests of the recomputed published lanes; equal to `record.lane_digests` if and
        only if every step from the contributions on is reproduced to the bit.
    """
    if record.key is None or previous.version != record.key.version:
        raise ValueError(
            f"version {record.version} cannot be recomputed from version {previous.version}"
        )
    combination = record.combination or mean_of(
        [c.weight_tokens for c in record.contributors], fragment.padded_numel
    )
    return tuple(
        publish_lane(
            state,
            [record.contributions[c.island][lane_id] for c in record.contributors],
            combination,
            rules,
            fragment=fragment,
            lane_id=lane_id,
            key=record.key,
            is_flush=record.is_flush,
        ).digest
        for lane_id, state in enumerate(previous.lanes)
    )


def _sections(record: VersionRecord) -> Iterator[tuple[str, Buffer]]:
    for lane_id, state in enumerate(record.lanes):
        for name, vector in state.vectors.items():
            yield f"{name}/{lane_id}", to_bytes(vector.view(torch.uint8))
    for lane_id, payload in enumerate(record.payloads):
        yield f"payload/{lane_id}", payload
    for island, lanes in sorted(record.contributions.items()):
        for lane_id, contribution in enumerate(lanes):
            yield f"contribution/{island}/{lane_id}", contribution


def record_of(
    header: Mapping[str, Any], sections: Mapping[str, Buffer], fragment: Fragment
) -> VersionRecord:
    """Put a version together from what `VersionRecord.header` gave and its sections by name.

    Theta and moments must be in bytes that may be written to, such as a bytearray's.
    """

    def vector(name: str, lane_id: int) -> Tensor:
        return from_bytes(sections[f"{name}/{lane_id}"]).view(torch.float32)

    contributors = tuple(
        Contributor(
            c["island"],
            c["incarnation"],
            c["weight_tokens"],
            c["weight_steps"],
            c["sent_at_inner_step"],
            tuple(bytes.fromhex(digest) for digest in c["lane_digests"]),
        )
        for c in header["contributors"]
    )
    lane_ids = range(len(fragment.lanes))
    version = header["version"]
    merge = header.get("merge")
    key = RoundKey(header["timeline"], header["fragment_id"], version - 1, header["attempt"])
    return VersionRecord(
        version=version,
        fragment_id=header["fragment_id"],
        timeline=header["timeline"],
        key=key if version > 0 else None,
        is_flush=header["is_flush"],
        payload_codec=header["payload_codec"],
        lane_digests=tuple(bytes.fromhex(digest) for digest in header["lane_digests"]),
        lanes=tuple(
            LaneState(*(vector(name, lane.lane_id) for name in state_sections(sections)))
            for lane in fragment.lanes
        ),
        payloads=tuple(bytes(sections[f"payload/{i}"]) for i in lane_ids) if version else (),
        contributors=contributors,
        contributions={
            c.island: [sections[f"contribution/{c.island}/{i}"] for i in lane_ids]
            for c in contributors
            if f"contribution/{c.island}/0" in sections  # a peer of an all-reduce has its own
        },
        refused=header["refused"],
        last_included={name: Inclusion(*last) for name, last in header["last_included"].items()},
        rejected=merge["rejected"] if merge else {},
        combination=Combination.from_json(merge) if merge else None,
        merged_tokens=header.get("merged_tokens", 0),
        rules=header.get("rules", {}),
    )
