"""A version that its syncer has lost, taken back from an island that holds it.

An island holds what was published, to the bit; its lanes count only if their digests are those
that the coordinator has indexed of the version. Theta, which no island ever has, begins again as
published; moments are those of the newest older version that can be read, or zero. What it was
made of is gone: its record says that it was repaired, and it cannot be made again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from diloco.compression.base import from_bytes
from diloco.outer.fragments import Fragment
from diloco.rounds.publication import LaneState
from diloco.rounds.version import VersionRecord, record_of
from transport.contracts import Buffer


@dataclass(slots=True)
class Repair:
    """What an operator asked for, and what has come of it.

    Args:
        island: That holds the version.
        header: Of the version, as it was indexed.
        lanes: Lane id -> published values, verified.
    """

    island: str
    header: Mapping[str, Any]
    lanes: dict[int, Buffer] = field(default_factory=dict)

    @property
    def version(self) -> int:
        """Version that was lost."""
        return int(self.header["version"])

    def digest_of(self, lane_id: int) -> bytes:
        """Digest of a published lane, as it was indexed."""
        return bytes.fromhex(self.header["lane_digests"][lane_id])


def is_enough(header: Mapping[str, Any], fragment: Fragment) -> bool:
    """Whether an indexed header says all that a record needs: a very large one is cut."""
    digests = header.get("lane_digests", ())
    return len(digests) == len(fragment.lanes) and {"contributors", "last_included"} <= set(header)


def restored_record(
    fragment: Fragment, repair: Repair, before: VersionRecord | None, *, has_second_moment: bool
) -> VersionRecord:
    """Make the record of a version out of an island's lanes, all of which have come.

    Args:
        fragment: Of the run's plan.
        repair: Has the lanes.
        before: Newest older version that can be read; None: none.
        has_second_moment: Whether the outer optimizer has one.
    """

    def moment(lane_id: int, name: str, like: Tensor) -> Tensor:
        kept = None if before is None else before.lanes[lane_id].vectors.get(name)
        return torch.zeros_like(like) if kept is None else kept.clone()

    lanes = []
    for lane in fragment.lanes:
        published = from_bytes(repair.lanes[lane.lane_id]).view(torch.float32)
        momentum = moment(lane.lane_id, "momentum", published)
        second = moment(lane.lane_id, "second_moment", published) if has_second_moment else None
        lanes.append(LaneState(published.clone(), published, momentum, second))
    return record_of({**repair.header, "repaired": repair.island}, {}, fragment, tuple(lanes))
