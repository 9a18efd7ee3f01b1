"""A fragment whose syncer has lost a published version: why it is not served, and what mends it.

Going on from an older version would publish the lost one a second time, as something else. An
island that merged it holds what was published, to the bit; its lanes count only if their digests
are those that the coordinator has indexed of the version. Theta, which no island ever has, begins
again as published; moments are those of the newest older version that can be read, or zero. What
it was made of is gone: its record says that it was repaired, and it cannot be made again.

Source: protocol.md section 9 (an island ahead of its syncer).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diloco.compression.base import from_bytes
from diloco.errors import PayloadRefused
from diloco.outer.fragments import Fragment
from diloco.refusals import Cause
from diloco.rounds.publication import LaneState
from diloco.rounds.record import RecordInvalid
from diloco.rounds.store import FragmentStore, Recovered
from diloco.rounds.version import VersionRecord, record_of
from diloco.telemetry.events import Event
from diloco.telemetry.round_events import FragmentDamaged, FragmentRepaired
from protos import fragment_pb2 as wire
from transport.contracts import Buffer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Gift:
    """A version as an island has given it back: its indexed header, and every lane."""

    island: str
    header: Mapping[str, Any]
    lanes: Mapping[int, Buffer]

    def write(
        self, store: FragmentStore, newest: VersionRecord | None, *, has_second_moment: bool
    ) -> Recovered | None:
        """Make it durable, and read the store anew; in the worker.

        Args:
            store: Of the fragment.
            newest: What is served of it, or was; None: nothing.
            has_second_moment: Whether the outer optimizer has one.

        Raises:
            DiskFull: If there is no room for it.
        """
        before, version = newest, self.header["version"]
        if before is not None and before.version >= version:  # one of its own number is another's
            try:
                before = store.load(version - 1)
            except RecordInvalid:
                before = None
        store.commit(self.record(store.fragment, before, has_second_moment=has_second_moment))
        return store.recover()

    def record(
        self, fragment: Fragment, before: VersionRecord | None, *, has_second_moment: bool
    ) -> VersionRecord:
        """Make its record; `before` is the newest older version that can be read."""

        def moment(lane_id: int, name: str, like: Tensor) -> Tensor:
            kept = None if before is None else before.lanes[lane_id].vectors.get(name)
            return torch.zeros_like(like) if kept is None else kept.clone()

        lanes = []
        for lane_id in range(len(fragment.lanes)):
            published = from_bytes(self.lanes[lane_id]).view(torch.float32)
            momentum = moment(lane_id, "momentum", published)
            second = moment(lane_id, "second_moment", published) if has_second_moment else None
            lanes.append(LaneState(published.clone(), published, momentum, second))
        header = {**self.header, "repaired": self.island}
        return record_of(header, {}, fragment, tuple(lanes))


class Damage:
    """What is wrong with one fragment.

    `lost` is the newest version that was published and cannot be read; -1: there is none. `said_by`
    is the island on whose word alone it is; empty: the store has something of it, or it is indexed.
    `num_asked` counts how often an island was asked for one, so that each time is another.
    """

    def __init__(self, fragment: Fragment, on_event: Callable[[Event], None]) -> None:
        """Begin without any."""
        self._fragment = fragment
        self._on_event = on_event
        self.num_asked = 0
        self._begin()

    def _begin(self) -> None:
        self.lost, self.said_by = -1, ""
        self._problem = self._answer = ""
        self._asked = "", ""  # island and header, as they were named last
        self._island = ""
        self._header: Mapping[str, Any] = {}
        self._lanes: dict[int, Buffer] = {}

    @property
    def text(self) -> str:
        """What is wrong, and what to type; empty: nothing is."""
        if self.lost < 0:
            return ""
        p, who = self._fragment.fragment_id, self.said_by
        remedy = (
            f"The coordinator does not say so, and has no digests to repair it by: resume a "
            f"checkpoint (diloco coordinator RUN.toml --resume), or, if {who} is wrong, take it "
            f"out (diloco kick HOST:PORT {who}) and start this syncer again"
            if who
            else f"Take it from an island that holds it (diloco repair HOST:PORT --fragment {p} "
            f"--from-island NAME), or resume a checkpoint (diloco coordinator RUN.toml --resume)"
        )
        return (
            f"fragment {p} is damaged and not served: its version {self.lost} was published"
            f"{f', as island {who} alone says,' if who else ''} and {self._problem}. The other "
            f"fragments go on. {remedy}{self._answer}"
        )

    def found(self, version: int, newest: VersionRecord | None, said_by: str = "") -> None:
        """Take note that a version was lost; `newest` is what can be read.

        Only an island says so where it is named: else the store, or the coordinator.
        """
        self._begin()
        self.lost, self.said_by = version, said_by
        if newest is not None and newest.version == version:
            self._problem = "what is here under its number is not that"
        else:
            left = "none" if newest is None else f"version {newest.version}"
            self._problem = f"cannot be read, the newest that can is {left}"
        logger.error("%s", self.text)
        self._on_event(FragmentDamaged(self._fragment.fragment_id, version, self.text))

    def confirmed(self) -> None:
        """Take note that the coordinator says of the lost version what an island has said."""
        if self.said_by:
            self.said_by = ""
            logger.error("%s", self.text)

    def ask(self, island: str, record_json: str) -> bool:
        """Take the lost version from an island, as its header is indexed.

        Returns:
            Whether this is anything new: what is asked for is named with every report.
        """
        if self.lost < 0 or (island, record_json) == self._asked:
            return False
        self._asked = island, record_json
        self._island, self._header, self._lanes = "", {}, {}
        header, p = json.loads(record_json or "{}"), self._fragment.fragment_id
        is_whole = len(header.get("lane_digests", ())) == len(self._fragment.lanes)
        if (indexed := header.get("version", -1)) < self.lost:
            # What an older version is made of is whole, and nothing would be repaired by it.
            problem = f"the newest version that the coordinator has indexed is {indexed}"
        elif not (is_whole and {"contributors", "last_included"} <= set(header)):
            problem = "its header is not indexed whole, so that its digests are not known"
        else:
            self._island, self._header = island, header
            self.num_asked += 1
            self._answer = f". Version {indexed} is asked of {island}"
            logger.info("fragment %d: version %d is asked of %s", p, indexed, island)
            return True
        self._answer = f". It cannot be taken from {island}: {problem}"
        logger.error("fragment %d cannot be repaired from %s: %s", p, island, problem)
        return True

    def wanted_of(self, island: str) -> int | None:
        """Version that an island is asked for; None: nothing is."""
        return self._header["version"] if self._header and island == self._island else None

    def insist_on(self, header: wire.UploadHeader) -> None:
        """Insist that a lane is asked for, and is what was published.

        Raises:
            PayloadRefused: If it is not.
        """
        island, version, lane_id = header.grant.island, header.version, header.lane_id
        if self.wanted_of(island) != version:
            words = f"version {version} is not asked of island {island!r}"
            raise PayloadRefused(Cause.KEY, words)
        if lane_id >= (num_lanes := len(self._fragment.lanes)):
            words = f"there is no lane {lane_id}, the fragment has {num_lanes}"
            raise PayloadRefused(Cause.LANE, words)
        # Of a whole lane in float32, the digest of the payload is the digest of the lane.
        if header.digest.hex() != (expected := self._header["lane_digests"][lane_id]):
            raise PayloadRefused(
                Cause.DIGEST,
                f"lane {lane_id} of version {version} was published with digest {expected}, island "
                f"{island!r} holds {header.digest.hex()[:64]}",
            )

    def take(self, header: wire.UploadHeader, payload: Buffer) -> None:
        """Take a lane that is what its header says.

        Raises:
            PayloadRefused: If it is asked for no more.
        """
        self.insist_on(header)
        self._lanes[header.lane_id] = payload

    @property
    def gift(self) -> Gift | None:
        """The lost version, once every lane is here; None: not yet."""
        if len(self._lanes) < len(self._fragment.lanes):
            return None
        return Gift(self._island, self._header, dict(self._lanes))

    def mended(self, gift: Gift) -> None:
        """Take note that the version is durable again."""
        p, version = self._fragment.fragment_id, gift.header["version"]
        logger.warning("fragment %d repaired: version %d from %s", p, version, gift.island)
        self._on_event(FragmentRepaired(p, version, gift.island))
        self._begin()
