"""Keeps a fragment from being served that has lost a published version, until it is repaired.

Going on from an older version would publish the lost one a second time, as something else. An
island that merged or staged it holds what was published, to the bit. Every island says with its
polls what it holds; one that holds the lost version is asked for it, without an operator, and
another where nothing comes of that. Lanes count only if their digests are those that the
coordinator has indexed of the version, so that it does not matter who sent which. Theta, which no
island ever has, begins again as published; moments are those of the newest older version that can
be read, or zero. What it was made of is gone: its record says that it was repaired, and it cannot
be made again.

Source: PROTOCOL.md, "Damaged fragments".
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from diloco.bounded_text import MOST_NAMES
from diloco.compression.base import from_bytes
from diloco.errors import PayloadRefused
from diloco.outer.fragments import Fragment
from diloco.protos import fragment_pb2 as wire
from diloco.refusals import Cause
from diloco.telemetry.events import Event
from diloco.telemetry.round_events import FragmentDamaged, FragmentRepaired
from diloco.transport.contracts import Buffer
from diloco.versions.publication import LaneState
from diloco.versions.record import RecordInvalid
from diloco.versions.store import FragmentStore, Recovered
from diloco.versions.version import VersionRecord, record_of

logger = logging.getLogger(__name__)


_RESUME = "resume a checkpoint (diloco coordinator RUN.toml --resume)"
#: Seconds without a new lane after which one more island is asked.
NO_LANE_S = 20.0


@dataclass(frozen=True, slots=True)
class RecoveredVersion:
    """A version as islands have given it back: its indexed header, and every lane.

    `island` names who sent lanes; several with commas.
    """

    island: str
    header: Mapping[str, Any]
    lanes: Mapping[int, Buffer]

    def write(
        self, store: FragmentStore, newest: VersionRecord | None, *, has_second_moment: bool
    ) -> Recovered | None:
        """Make it durable, and read the store again; in the worker.

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
                before = store.load(version - 1, with_contributions=False)
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


@dataclass(slots=True)
class _Sources:
    """Islands that a lost version may be taken from.

    Args:
        held: Island -> newest version of which it holds lanes, as it says.
        asked: Island -> number of the request, in the order of asking.
        refused: Island -> why what it sent is not that version.
        first: Island that an operator has named; empty: none.
    """

    held: dict[str, int] = field(default_factory=dict)
    asked: dict[str, int] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    first: str = ""

    def holders(self, version: int) -> list[str]:
        """Islands that hold a version, as far as is known."""
        return sorted(i for i, v in self.held.items() if v == version and i not in self.refused)

    def forget(self, island: str) -> None:
        """Forget what an earlier start of an island said and was asked for."""
        self.held.pop(island, None)
        self.asked.pop(island, None)
        self.refused.pop(island, None)


class Damage:
    """What is wrong with one fragment, and from whom it is repaired.

    `lost` is the newest version that was published and cannot be read; -1: there is none. `said_by`
    are the islands on whose word alone it is; empty: the store has something of it, or it is
    indexed.
    """

    def __init__(self, fragment: Fragment, on_event: Callable[[Event], None]) -> None:
        """Begin without any."""
        self._fragment = fragment
        self._on_event = on_event
        self._num_asked = 0  # so that each request is another
        self._begin()

    def _begin(self) -> None:
        self.lost, self.said_by = -1, ""
        self._readable = -1
        self._problem = self._no_header = ""
        self._header: Mapping[str, Any] = {}
        self._sources = _Sources()
        self._lanes: dict[int, Buffer] = {}
        self._givers: set[str] = set()
        self._moved_at = 0.0

    @property
    def readable(self) -> int:
        """Newest older version, which those who enter take meanwhile; -1: there is none."""
        return self._readable if self.lost >= 0 else -1

    @property
    def wants_header(self) -> bool:
        """Whether the indexed header of what was lost is still to come."""
        return self.lost >= 0 and not self._header

    @property
    def holders(self) -> list[str]:
        """Islands that hold the lost version, as they say."""
        return self._sources.holders(self._header.get("version", self.lost))[:MOST_NAMES]

    @property
    def text(self) -> str:
        """What is wrong, and what becomes of it; empty: nothing is."""
        if self.lost < 0:
            return ""
        p, who = self._fragment.fragment_id, self.said_by
        remedy = (
            f"The coordinator does not say so, and has no digests to repair it by: resume a "
            f"checkpoint (diloco coordinator RUN.toml --resume), or, if {who} "
            f"{'are' if ',' in who else 'is'} wrong, take each out (diloco kick HOST:PORT "
            f"{who.split(',')[0]}) and start this syncer again"
            if who
            else self._repair_text
        )
        return (
            f"fragment {p} is damaged and not served: its version {self.lost} was published"
            f"{f', as {who} alone say,' if who else ''} and {self._problem}. The other "
            f"fragments go on. {remedy}"
        )

    @property
    def _repair_text(self) -> str:
        """Say how far the repair is, or what it waits for."""
        p, sources = self._fragment.fragment_id, self._sources
        if self._no_header:
            return f"It cannot be taken from an island: {self._no_header}. To go back, {_RESUME}"
        if not self._header:
            return "It is taken from an island that holds it once the coordinator says its digests"
        version = self._header["version"]
        if sources.asked:
            lanes = f"{len(self._lanes)} of {len(self._fragment.lanes)} lanes have come"
            return (
                f"Version {version} is asked of {', '.join(sources.asked)}, {lanes} (of another: "
                f"diloco repair HOST:PORT --fragment {p} --from-island NAME)"
            )
        others = "; ".join(f"{i}: {why}" for i, why in sorted(sources.refused.items()))
        called = ", ".join(sorted(sources.held.keys() - sources.refused.keys()))
        return (
            f"No island that has called holds version {version}"
            + (f" (called: {called})" if called else "")
            + (f" ({others})" if others else "")
            + f"; the first that does is asked for it. If none will, {_RESUME}"
        )

    def found(self, version: int, newest: VersionRecord | None, said_by: str = "") -> None:
        """Record that a version was lost; `newest` is what can be read.

        Only an island says so where it is named: else the store, or the coordinator.
        """
        held = self._sources.held
        self._begin()
        self._sources.held = held
        self.lost, self.said_by = version, said_by
        if newest is not None and newest.version == version:
            self._problem = "what is here under its number is not that"
        else:
            self._readable = -1 if newest is None else newest.version
            left = "none" if newest is None else f"version {newest.version}"
            self._problem = f"cannot be read, the newest that can is {left}"
        logger.error("%s", self.text)
        self._on_event(FragmentDamaged(self._fragment.fragment_id, version, self.text))

    def confirmed(self) -> None:
        """Record that the coordinator says of the lost version what an island has said."""
        if self.said_by:
            self.said_by = ""
            logger.error("%s", self.text)

    # -- from whom -------------------------------------------------------------------------------

    def ask(self, island: str, record_json: str, now: float) -> bool:
        """Take the lost version from islands, by its header as it is indexed.

        Args:
            island: To be asked first, as an operator says; empty: anyone who holds it.
            record_json: The newest header that is indexed; empty: none.
            now: In seconds of the loop.

        Returns:
            Whether this is anything new: it is repeated with every report.
        """
        if self.lost < 0:
            return False
        is_new = self._take_header(record_json)
        if island and self._header and island != self._sources.first:
            self._sources.first = island
            self._sources.refused.pop(island, None)
            self._request(island, now)
            is_new = True
        return is_new

    def _take_header(self, record_json: str) -> bool:
        header = json.loads(record_json or "{}")
        if header == self._header or not header:
            return False
        problem = ""
        is_whole = len(header.get("lane_blake3", ())) == len(self._fragment.lanes)
        if (indexed := header.get("version", -1)) < self.lost:
            # What an older version is made of is whole, and nothing would be repaired by it.
            problem = f"the newest version that the coordinator has indexed is {indexed}"
        elif not (is_whole and {"contributors", "last_included"} <= set(header)):
            problem = "its header is not indexed whole, so that its digests are not known"
        if problem:
            is_new, self._no_header = problem != self._no_header, problem
            if is_new:
                p = self._fragment.fragment_id
                logger.error("fragment %d cannot be taken from an island: %s", p, problem)
            return is_new
        sources = self._sources
        self._header, self._no_header = header, ""
        self._lanes, self._givers = {}, set()
        sources.asked, sources.refused, sources.first = {}, {}, ""
        return True

    def holds(self, island: str, version: int) -> None:
        """Record the newest version of which an island, or a rank of it, holds lanes."""
        if self.lost >= 0:
            held = self._sources.held
            held[island] = max(version, held.get(island, -1))

    def forget(self, island: str) -> None:
        """Record that an island has started again: what it held is gone."""
        self._sources.forget(island)

    def keep(self, live: Collection[str]) -> None:
        """Ask nothing of islands that are not at work."""
        for island in (self._sources.held.keys() | self._sources.asked.keys()) - set(live):
            self._sources.forget(island)

    def wanted_of(self, island: str, now: float) -> tuple[int, int]:
        """Give the number of the request to an island, and the version; 0, 0: there is none.

        Who holds the version is asked, one island at a time while lanes come.
        """
        if not self._header:
            return 0, 0
        sources, version = self._sources, self._header["version"]
        is_next = not sources.asked or now - self._moved_at >= NO_LANE_S
        if island not in sources.asked and is_next and island in sources.holders(version):
            self._request(island, now)
        return (asked, version) if (asked := sources.asked.get(island, 0)) else (0, 0)

    def _request(self, island: str, now: float) -> None:
        self._num_asked += 1
        self._sources.asked[island] = self._num_asked
        self._moved_at = now
        p, version = self._fragment.fragment_id, self._header["version"]
        logger.warning("fragment %d: version %d is asked of %s", p, version, island)

    # -- what comes ------------------------------------------------------------------------------

    def check(self, header: wire.UploadHeader) -> None:
        """Check that a lane is asked for, and is what was published.

        Raises:
            PayloadRefused: If it is not.
        """
        island, version, lane_id = header.grant.island, header.version, header.lane_id
        if island not in self._sources.asked or version != self._header.get("version"):
            words = f"version {version} is not asked of island {island!r}"
            raise PayloadRefused(Cause.KEY, words)
        if lane_id >= (num_lanes := len(self._fragment.lanes)):
            words = f"there is no lane {lane_id}, the fragment has {num_lanes}"
            raise PayloadRefused(Cause.LANE, words)
        if header.digest.hex() != (expected := self._header["lane_blake3"][lane_id]):
            words = (
                f"lane {lane_id} of version {version} was published with blake3 {expected}, island "
                f"{island!r} holds {header.digest.hex()[:64]}"
            )
            self._sources.refused[island] = f"its lane {lane_id} is not what was published"
            if island != self._sources.first:  # an operator's word stays
                del self._sources.asked[island]
            raise PayloadRefused(Cause.DIGEST, words)

    def take(self, header: wire.UploadHeader, payload: Buffer, now: float) -> None:
        """Take a lane that is what its header says.

        Raises:
            PayloadRefused: If it is asked for no more.
        """
        self.check(header)
        if header.lane_id not in self._lanes:
            self._lanes[header.lane_id] = payload
            self._givers.add(header.grant.island)
            self._moved_at = now

    @property
    def recovered(self) -> RecoveredVersion | None:
        """The lost version, once every lane is here; None: not yet."""
        if len(self._lanes) < len(self._fragment.lanes):
            return None
        return RecoveredVersion(", ".join(sorted(self._givers)), self._header, dict(self._lanes))

    def repaired(self, recovered: RecoveredVersion) -> None:
        """Record that the version is durable again."""
        p, version = self._fragment.fragment_id, recovered.header["version"]
        logger.warning("fragment %d repaired: version %d from %s", p, version, recovered.island)
        self._on_event(FragmentRepaired(p, version, recovered.island))
        self._begin()
