"""Holds a version in memory: its state, its payload, and what it was made from.

What it is on the disk is `record` and `frames`; which versions there are, `store`.

Source: PROTOCOL.md, "Records and frames".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from diloco.compression.base import from_bytes, to_bytes
from diloco.outer.combination import Combination
from diloco.outer.fragments import Fragment
from diloco.protocol.rounds.terms import Contributor, Inclusion, RoundKey
from diloco.transport.contracts import Buffer
from diloco.versions.publication import LaneState, lane_blake3
from diloco.versions.record import GUARD, state_sections
from diloco.versions.value_digest import lane_digest, version_digest


@dataclass(frozen=True)
class VersionRecord:
    """All that a version is: who made it, its state, its payload, and what it was made from.

    Args:
        key: Round that published it; `key.version` + 1 is `version`. Version 0 has none.
        lanes: State of each lane, in lane order.
        payloads: Published payload of each lane; empty for version 0.
        lane_digests: Of the published values of each lane, `value_digest`.
        lane_blake3: Of their bytes: by these a lane is taken back from an island.
        contributions: Island -> encoded lanes, as accepted; empty for version 0.
        refused: Island -> why it left the attempt, for those that did.
        last_included: Island -> its newest contribution that this version or one before it counts.
        rejected: Island -> why what it sent was not counted, though it was complete and valid.
        combination: Coefficients of the contributions; None: their mean, weighted by tokens.
        merged_tokens: Of all contributions to all versions up to this one; 0 where no syncer
            has counted them.
        rules: What the version was made by, JSON values (`PublicationRules.to_json`, the quorum,
            and the revision of the policy); empty for version 0.
        closed_unix_s: When its round closed, by the syncer's wall clock: a restart counts the
            opening floor from there. None where rounds have no measured times.
        guard: What the merge's guard knows of the rounds up to it (`outer.guard.History`), as
            bytes; empty: nothing.
        repaired: Island that it was taken back from, after it was lost; empty: it was merged here.
            Payloads and contributions of such a version are gone.
    """

    version: int
    fragment_id: int
    timeline: int
    key: RoundKey | None
    is_flush: bool
    payload_codec: str
    lane_digests: tuple[bytes, ...]
    lane_blake3: tuple[bytes, ...]
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
    closed_unix_s: float | None = None
    guard: bytes = b""
    repaired: str = ""

    @cached_property
    def digest(self) -> bytes:
        """Digest of the published version."""
        return version_digest(self.lane_digests)

    @cached_property
    def sent_at_inner_step(self) -> int:
        """Latest inner step at which a contribution to it was sent; 0 for version 0.

        Every poll asks, of every fragment: not by all contributors each time.
        """
        return max((c.sent_at_inner_step for c in self.contributors), default=0)

    def header(self) -> dict[str, Any]:
        """What the journal and the audit log keep: plain JSON values.

        `merge` is there only where it was more than the mean of all, weighted by tokens;
        `merged_tokens` and `rules` where a syncer has merged anything; `closed_unix_s` where times
        are measured.
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
            "lane_blake3": [digest.hex() for digest in self.lane_blake3],
            "contributors": [c.to_json() for c in self.contributors],
            "refused": dict(self.refused),
            "last_included": {name: [*astuple(last)] for name, last in self.last_included.items()},
        }
        if self.rules:
            header |= {"merged_tokens": self.merged_tokens, "rules": dict(self.rules)}
        if self.closed_unix_s is not None:
            header["closed_unix_s"] = self.closed_unix_s
        if self.repaired:
            header["repaired"] = self.repaired
        if self.combination is not None:
            header["merge"] = {**self.combination.to_json(), "rejected": dict(self.rejected)}
        return header


def founding_record(
    fragment: Fragment,
    initial: Mapping[int, Buffer],
    timeline: int,
    *,
    has_second_moment: bool = False,
    closed_unix_s: float | None = None,
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
        lane_blake3=tuple(lane_blake3(lane.published) for lane in lanes),
        lanes=tuple(lanes),
        closed_unix_s=closed_unix_s,
    )


def sections_of(record: VersionRecord) -> Iterator[tuple[str, Buffer]]:
    """Give all sections of a version by name, in the order of its record."""
    for lane_id, state in enumerate(record.lanes):
        for name, vector in state.vectors.items():
            yield f"{name}/{lane_id}", to_bytes(vector)
    for lane_id, payload in enumerate(record.payloads):
        yield f"payload/{lane_id}", payload
    if record.guard:
        yield GUARD, record.guard
    for island, lanes in sorted(record.contributions.items()):
        for lane_id, contribution in enumerate(lanes):
            yield f"contribution/{island}/{lane_id}", contribution


def record_of(
    header: Mapping[str, Any],
    sections: Mapping[str, Buffer],
    fragment: Fragment,
    lanes: tuple[LaneState, ...] = (),
) -> VersionRecord:
    """Put a version together from what `VersionRecord.header` gave and its sections by name.

    Theta and moments must be in bytes that may be written to, such as a bytearray's; they are in
    the sections unless `lanes` are given.
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
        lane_blake3=tuple(bytes.fromhex(digest) for digest in header["lane_blake3"]),
        lanes=lanes
        or tuple(
            LaneState(*(vector(name, lane.lane_id) for name in state_sections(sections)))
            for lane in fragment.lanes
        ),
        payloads=tuple(bytes(sections[f"payload/{i}"]) for i in lane_ids)
        if version and "repaired" not in header
        else (),
        contributors=contributors,
        contributions={
            c.island: [sections[f"contribution/{c.island}/{i}"] for i in lane_ids]
            for c in contributors
            if f"contribution/{c.island}/0" in sections  # they may have been left unread
        },
        refused=header["refused"],
        last_included={name: Inclusion(*last) for name, last in header["last_included"].items()},
        rejected=merge["rejected"] if merge else {},
        combination=Combination.from_json(merge) if merge else None,
        merged_tokens=header.get("merged_tokens", 0),
        rules=header.get("rules", {}),
        closed_unix_s=header.get("closed_unix_s"),
        guard=bytes(sections.get(GUARD, b"")),
        repaired=header.get("repaired", ""),
    )
