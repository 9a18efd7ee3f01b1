"""Durable truth of one fragment: one checksummed record a version, written before publication.

`snapshot` policy: a record holds theta, published and momentum (12 bytes a parameter), the
published payload, and the accepted encoded contributions, so that each retained version can be
recomputed from the one before. A version exists if and only if its record is valid.

    fragment-0003/v000000000012.record     magic | header length | header | sections
    fragment-0003/attempt.json             next attempt, after an expiry

Files are old or new after a crash (`diloco.durable`). Nothing here decides a round.

Source: protocol.md section 4 (commit point).
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import blake3
import torch
from torch import Tensor

from diloco.compression.base import from_bytes, to_bytes
from diloco.durable import sync_directory, write_durably
from diloco.outer.fragments import Fragment
from diloco.rounds.publication import LaneState, PublicationRules, publish_lane, version_digest
from diloco.rounds.state import Contributor, PastRound, RoundKey
from transport.contracts import Buffer

logger = logging.getLogger(__name__)

_MAGIC = b"DILOREC1"
_PREFIX = struct.Struct("<8sQ32s")
_STATE_SECTIONS = ("theta", "published", "momentum")
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
    """

    version: int
    fragment_id: int
    timeline: int
    key: RoundKey | None
    is_flush: bool
    payload_codec: str
    lane_digests: tuple[bytes, ...]
    lanes: tuple[LaneState, ...]
    payloads: tuple[bytes, ...] = ()
    contributors: tuple[Contributor, ...] = ()
    contributions: Mapping[str, Sequence[Buffer]] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> bytes:
        """Digest of the published version."""
        return version_digest(self.lane_digests)

    def header(self) -> dict[str, Any]:
        """What the journal and the tape keep: plain JSON values."""
        return {
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
        }


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a store held when it was opened: the newest valid version and the next attempt.

    `expired_in_a_row` counts the expiries recorded since that version was published.
    `headers` are those of all valid records, oldest first: some may not have been reported yet.
    """

    record: VersionRecord
    attempt: int
    expired_in_a_row: int
    past: Mapping[int, PastRound]
    headers: tuple[Mapping[str, Any], ...]


class FragmentStore:
    """Records of one fragment in one directory; the caller holds the store's lock."""

    def __init__(self, directory: Path, fragment: Fragment, retained_versions: int) -> None:
        """Assign only; `retained_versions` predecessors of the newest record are kept."""
        self._directory = directory / f"fragment-{fragment.fragment_id:04d}"
        self._fragment = fragment
        self.retained_versions = retained_versions

    def recover(self) -> Recovered | None:
        """Find the newest valid record; None when there is none."""
        _make_durably(self._directory)
        for leftover in self._directory.glob("*.tmp"):
            leftover.unlink()
        # A writer killed between rename and fsync leaves names that a power loss would take back.
        sync_directory(self._directory)
        past: dict[int, PastRound] = {}
        headers: list[Mapping[str, Any]] = []
        newest: VersionRecord | None = None
        for version in sorted(self._versions(), reverse=True):
            try:
                record = self.load(version)
            except RecordInvalid as error:
                logger.warning("record skipped, %s", error)
                continue
            newest = newest or record
            headers.insert(0, record.header())
            if record.key is not None:
                past[record.key.version] = PastRound(
                    record.key.attempt,
                    frozenset((c.island, c.incarnation) for c in record.contributors),
                    record.refused,
                )
        if newest is None:
            return None
        attempt, expired_in_a_row = self._attempt_after(newest.version)
        return Recovered(newest, attempt, expired_in_a_row, past, tuple(headers))

    def commit(self, record: VersionRecord) -> None:
        """Write a version durably, then forget what is no longer retained."""
        write_durably(self._path(record.version), _encode(record))
        for version in self._versions():
            if version < record.version - self.retained_versions:
                self._path(version).unlink()

    def record_expiry(self, key: RoundKey) -> None:
        """Write durably that `key` expired, so that a restart opens the attempt after it."""
        body = json.dumps({"version": key.version, "attempt": key.attempt + 1}).encode()
        write_durably(
            self._directory / "attempt.json",
            [blake3.blake3(body).hexdigest().encode(), b"\n", body],
        )

    def load(self, version: int) -> VersionRecord:
        """Read and verify one record.

        Raises:
            RecordInvalid: If it is missing, torn, damaged, or of another plan.
        """
        path = self._path(version)
        try:
            data = path.read_bytes()
        except FileNotFoundError as error:
            raise RecordInvalid(f"{path} does not exist") from error
        return _decode(path, data, version, self._fragment)

    def _attempt_after(self, version: int) -> tuple[int, int]:
        """Return the next attempt at the version after this one, and how many have expired."""
        path = self._directory / "attempt.json"
        if not path.exists():
            return 0, 0
        checksum, _, body = path.read_bytes().partition(b"\n")
        if blake3.blake3(body).hexdigest().encode() != checksum:
            logger.warning("expiry record damaged, path=%s", path)
            return _LATER_ATTEMPT, 0
        noted = json.loads(body)
        attempt = int(noted["attempt"]) if noted["version"] == version else 0
        return attempt, attempt

    def _versions(self) -> list[int]:
        return [int(path.stem[1:]) for path in self._directory.glob("v*.record")]

    def _path(self, version: int) -> Path:
        return self._directory / f"v{version:012d}.record"


class RecordInvalid(Exception):
    """A record file is missing, torn, damaged or of another plan; the version does not exist."""


def recompute(
    previous: VersionRecord, record: VersionRecord, rules: PublicationRules
) -> tuple[bytes, ...]:
    """Recompute the lane digests of `record` from its predecessor and its contributions.

    Returns:
        The digests of the recomputed published lanes; equal to `record.lane_digests` if and
        only if every step from the contributions on is reproduced to the bit.
    """
    if record.key is None or previous.version != record.key.version:
        raise ValueError(
            f"version {record.version} cannot be recomputed from version {previous.version}"
        )
    weights = [c.weight_tokens for c in record.contributors]
    return tuple(
        publish_lane(
            state,
            [record.contributions[c.island][lane_id] for c in record.contributors],
            weights,
            rules,
            version=record.key.version,
            is_flush=record.is_flush,
        ).digest
        for lane_id, state in enumerate(previous.lanes)
    )


def _sections(record: VersionRecord) -> Iterator[tuple[str, Buffer]]:
    for name in _STATE_SECTIONS:
        for lane_id, state in enumerate(record.lanes):
            yield f"{name}/{lane_id}", to_bytes(getattr(state, name).view(torch.uint8))
    for lane_id, payload in enumerate(record.payloads):
        yield f"payload/{lane_id}", payload
    for island, lanes in sorted(record.contributions.items()):
        for lane_id, contribution in enumerate(lanes):
            yield f"contribution/{island}/{lane_id}", contribution


def _encode(record: VersionRecord) -> list[Buffer]:
    sections = list(_sections(record))
    table = [
        {"name": name, "bytes": len(data), "digest": blake3.blake3(data).hexdigest()}
        for name, data in sections
    ]
    header = json.dumps({**record.header(), "sections": table}, sort_keys=True).encode()
    prefix = _PREFIX.pack(_MAGIC, len(header), blake3.blake3(header).digest())
    return [prefix, header, *(data for _, data in sections)]


def _decode(path: Path, data: bytes, version: int, fragment: Fragment) -> VersionRecord:
    if len(data) < _PREFIX.size:
        raise RecordInvalid(f"{path} is torn: {len(data)} bytes")
    magic, header_bytes, digest = _PREFIX.unpack_from(data)
    header_data = data[_PREFIX.size : _PREFIX.size + header_bytes]
    if magic != _MAGIC or blake3.blake3(header_data).digest() != digest:
        raise RecordInvalid(f"{path} has a damaged header")
    header = json.loads(header_data)
    sections: dict[str, bytearray] = {}
    at = _PREFIX.size + header_bytes
    for entry in header["sections"]:
        body = bytearray(data[at : at + entry["bytes"]])
        at += entry["bytes"]
        if blake3.blake3(body).hexdigest() != entry["digest"]:
            raise RecordInvalid(f"{path} is torn or damaged in section {entry['name']}")
        sections[entry["name"]] = body
    if at != len(data):
        raise RecordInvalid(f"{path} has {len(data) - at} bytes after its last section")
    if (header["version"], header["fragment_id"]) != (version, fragment.fragment_id):
        raise RecordInvalid(
            f"{path} is version {header['version']} of fragment {header['fragment_id']}"
        )
    return _from_header(path, header, sections, fragment)


def _from_header(
    path: Path, header: Mapping[str, Any], sections: Mapping[str, bytearray], fragment: Fragment
) -> VersionRecord:
    def vector(name: str, lane_id: int, numel: int) -> Tensor:
        values = from_bytes(sections[f"{name}/{lane_id}"]).view(torch.float32)
        if values.numel() != numel:
            raise RecordInvalid(f"{path} holds {values.numel()} values in {name}, plan has {numel}")
        return values

    if len(header["lane_digests"]) != len(fragment.lanes):
        raise RecordInvalid(f"{path} holds another number of lanes than the plan")
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
            LaneState(*(vector(n, lane.lane_id, lane.numel) for n in _STATE_SECTIONS))
            for lane in fragment.lanes
        ),
        payloads=tuple(bytes(sections[f"payload/{i}"]) for i in lane_ids) if version else (),
        contributors=contributors,
        contributions={
            c.island: [sections[f"contribution/{c.island}/{i}"] for i in lane_ids]
            for c in contributors
        },
        refused=header["refused"],
    )


def _make_durably(directory: Path) -> None:
    """Make a directory and its parents so that a power loss does not take it, records and all."""
    if not directory.parent.is_dir():
        _make_durably(directory.parent)
    directory.mkdir(exist_ok=True)
    sync_directory(directory.parent)
