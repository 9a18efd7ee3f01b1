"""One fragment as its carrier holds it: anchor, residuals, what is outstanding, what is staged.

Belongs to the exchange and its loop; other threads see a `FragmentView` only.

Source: PROTOCOL.md, "Counters and residuals" and "Staging".
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import blake3
import torch
from torch import Tensor

from diloco.compression.base import Codec, from_bytes, to_bytes
from diloco.compression.lanes import lane_codec
from diloco.island.exchange.checkpoint_state import LaneCheckpoint
from diloco.island.lanes.place import LanePlace
from diloco.outer.fragments import Fragment
from diloco.outer.pseudo_gradient import bit_sum
from diloco.protocol.island.ledger import Outstanding, Target, Verdict
from diloco.protocol.island.votes import NOT_FOLLOWED, AnnouncedVersion, FragmentView
from diloco.protos import fragment_pb2 as wire
from diloco.telemetry.events import FragmentSent
from diloco.transport.contracts import Buffer

logger = logging.getLogger(__name__)

#: Announced versions that are remembered, so that their digests are known when they are staged.
_MOST_ANNOUNCED = 4

#: What the syncer has only in memory: it ends nothing before the round does, and a restart of the
#: syncer forgets it.
NOT_DURABLE = (Verdict.REFUSED, Verdict.DECLINED)


@dataclass(slots=True)
class SentLane:
    """Payload and residual of one outstanding lane; `received_epoch` -1: by no syncer yet.

    `residual_sum` is the `bit_sum` of the residual as it was made; `carried` is what the payload
    has of Delta, where merges need it: None after a resume.
    """

    payload: Buffer
    digest: bytes
    residual_after: Tensor | None
    residual_sum: int = 0
    received_epoch: int = -1
    carried: Tensor | None = None

    @classmethod
    def of(cls, encoded: Tensor, residual_after: Tensor | None) -> SentLane:
        """Make one of an encoded lane, uint8; what is on the CPU is not copied."""
        payload = to_bytes(encoded)
        digest = blake3.blake3(payload).digest()
        added = 0 if residual_after is None else bit_sum(residual_after)
        return cls(payload, digest, residual_after, added)


def carried(
    codec: Codec,
    payload: Tensor,
    numel: int,
    residual_after: Tensor | None,
    residual: Tensor | None,
    decay: float,
    place: LanePlace,
) -> Tensor:
    """Return what of Delta a payload carries.

    With error feedback all of it, as the residuals tell, since the next contribution brings the
    rest; without it what is decoded: what quantisation lost stays in the local values.
    """
    delta = codec.decode(payload, numel)
    if residual_after is not None:
        delta.add_(place.there(residual_after))
        if residual is not None:
            delta.sub_(place.there(residual), alpha=decay)
    return delta


def bit_sums(residual: Mapping[int, Tensor]) -> dict[int, int]:
    """Return the `bit_sum` of each lane's residual."""
    return {lane_id: bit_sum(values) for lane_id, values in residual.items()}


@dataclass(slots=True)
class IslandFragment:
    """A fragment's lanes on one rank; `lanes` may be empty.

    `is_followed`: this rank asks the syncer about it; nothing else is known of it otherwise.
    `outcome` is what the syncer said of `outstanding`, which is a decline where `decline_reason`
    says why; it waits for a trial as long as `held_back` is set, the event that will tell of it.
    `broken_in_a_row` counts the last pseudo-gradients that were not finite; `state` is what the
    syncer last announced, and `announced` what it announced of versions after the anchor.
    `staging_version` is the version whose fetch was begun, `aimed_version` the one that the ranks
    agreed on; `staged_change` is the largest change that it makes to a value of the anchor;
    `anchor_digests` are those of all lanes of the anchor's version, empty where none are
    known.
    """

    fragment_id: int
    lanes: tuple[int, ...]
    is_followed: bool = True
    anchor: dict[int, Tensor] = field(default_factory=dict)
    anchor_version: int = -1
    anchor_tokens: int = 0
    is_overwritten: bool = False
    residual: dict[int, Tensor] = field(default_factory=dict)
    residual_sums: dict[int, int] = field(default_factory=dict)
    outstanding: Outstanding | None = None
    sending: dict[int, SentLane] = field(default_factory=dict)
    decline_reason: str = ""
    held_back: FragmentSent | None = None
    broken_in_a_row: int = 0
    outcome: Verdict | None = None
    state: wire.FragmentState = field(default_factory=wire.FragmentState)
    staged: dict[int, Tensor] = field(default_factory=dict)
    staging_version: int = -1
    staged_version: int = -1
    staged_change: float = 0.0
    aimed_version: int = -1
    gone_version: int = -1
    announced: dict[int, wire.FragmentState] = field(default_factory=dict)
    anchor_digests: tuple[bytes, ...] = ()

    def on_announcement(self, state: wire.FragmentState) -> None:
        """Take what the syncer announces; of a damaged fragment nothing but that it is so.

        Unless this rank has not entered yet: then also which older version there is of it.
        What is known of a version the syncer does not repeat.
        """
        before = self.state
        is_known = state.digest and (state.version, state.digest) == (before.version, before.digest)
        if is_known and not state.lane_digests:
            state.lane_digests.extend(before.lane_digests)
            state.contributors.extend(before.contributors)
        if state.is_damaged:
            if not self.state.is_damaged:
                logger.error(
                    "fragment %d is damaged at its syncer: what was published last is kept, and "
                    "nothing of it sent until it is repaired (diloco status HOST:PORT)",
                    self.fragment_id,
                )
            self.state = wire.FragmentState()
            self.state.CopyFrom(before if self.anchor_version >= 0 else state)
            self.state.is_open, self.state.is_damaged = False, True
            self.state.asked = state.asked
            self.state.wanted_version = state.wanted_version
            return
        self.state = state
        self.announced[state.version] = state
        for version in sorted(self.announced)[:-_MOST_ANNOUNCED]:
            del self.announced[version]

    def has_moved(self) -> None:
        """Forget what the syncer had only in memory, from which the fragment has moved."""
        for lane in self.sending.values():
            lane.received_epoch = -1
        if self.outcome in NOT_DURABLE:
            self.outcome = None

    @property
    def is_steady(self) -> bool:
        """Whether this version stays the newest until this island contributes, or for good.

        A round that is closing is not: it counts the contribution of this island's earlier start.
        """
        state = self.state
        return state.is_founded and not state.is_damaged and (state.is_open or state.is_flush)

    def lanes_of(self, version: int) -> dict[int, Tensor]:
        """Return all lanes of a version, if this rank holds them, merged or staged; else none."""
        if version == self.anchor_version:
            return self.anchor
        return self.staged if version == self.staged_version else {}

    def stage(self, lanes: dict[int, Tensor], version: int, change: float) -> None:
        """Take a version's lanes, which are there, and the largest change that they make."""
        self.staged, self.staged_change, self.staged_version = lanes, change, version

    def settle(self, *, is_merged: bool, is_included: bool) -> None:
        """Forget what was outstanding.

        INCLUDED keeps the residual after the send, everything else keeps it as before; a merge
        makes the staged version the anchor.
        """
        if is_included:
            for lane_id, lane in self.sending.items():
                if lane.residual_after is not None:
                    self.residual[lane_id] = lane.residual_after
                    self.residual_sums[lane_id] = lane.residual_sum
        if is_merged:
            self.anchor, self.anchor_version = self.staged, self.staged_version
            announced = self.announced.get(self.anchor_version)
            self.anchor_digests = () if announced is None else tuple(announced.lane_digests)
            self.staged, self.staged_version = {}, -1
        self.outstanding, self.outcome = None, None
        self.sending, self.decline_reason = {}, ""

    def flipped(self) -> list[int]:
        """Find lanes whose residual is not what it was when it was made: a bit has flipped."""
        sums = bit_sums(self.residual)
        return [lane_id for lane_id in sums if sums[lane_id] != self.residual_sums[lane_id]]

    def verdict(self) -> Verdict | None:
        """Say how what is outstanding ended; a refused one waits for the round's end."""
        sent, state = self.outstanding, self.state
        if sent is None or self.outcome not in NOT_DURABLE:
            return self.outcome
        if state.version > sent.key.version:
            return self.outcome
        if state.attempt <= sent.key.attempt:
            return None
        is_refused = self.outcome is Verdict.REFUSED
        return Verdict.REFUSED_EXPIRED if is_refused else Verdict.EXPIRED

    def view(self) -> FragmentView:
        """Return how things stand now for this island."""
        if not self.is_followed:
            return NOT_FOLLOWED
        sent, state = self.outstanding, self.state
        return FragmentView(
            key=None if sent is None else sent.key,
            anchor_version=self.anchor_version,
            is_overwritten=self.is_overwritten,
            version=state.version if state.is_founded else -1,
            attempt=state.attempt,
            staged_version=self.staged_version,
            verdict=self.verdict(),
            digest=state.digest.hex(),
            contributors=tuple(state.contributors),
            sent_at_inner_step=state.sent_at_inner_step,
            is_flush=state.is_flush,
            merged_tokens=state.merged_tokens,
            anchor_tokens=self.anchor_tokens,
            staging=self._staging(),
            gone_version=self.gone_version,
            is_open=state.is_open and state.is_member,
            is_ending=state.takes_flush or state.is_flush,
            counted=(state.counted_version, state.counted_attempt),
            is_damaged=state.is_damaged,
            asks_trial=state.asks_trial,
        )

    def _staging(self) -> AnnouncedVersion | None:
        version = self.staging_version
        if version <= self.anchor_version:
            return None
        state = self.announced.get(version)
        if state is None:
            return AnnouncedVersion(Target(version))
        target = Target(version, state.merged_tokens, state.is_flush, state.asks_trial)
        return AnnouncedVersion(target, state.digest.hex(), tuple(state.contributors))

    def captured(self, fragment: Fragment, codec: str, *, error_feedback: bool) -> LaneCheckpoint:
        """Return the state of the lanes as it lies where they do, zeros where there is none.

        Nothing is copied.
        """
        payload: dict[int, Tensor] = {}
        residual: dict[int, Tensor] = {}
        residual_after: dict[int, Tensor] = {}
        for lane_id in self.lanes:
            numel, sent = fragment.lanes[lane_id].numel, self.sending.get(lane_id)
            payload[lane_id] = (
                torch.zeros(
                    lane_codec(codec, fragment, lane_id).wire_bytes(numel), dtype=torch.uint8
                )
                if sent is None
                else from_bytes(sent.payload)
            )
            if error_feedback:
                after = None if sent is None else sent.residual_after
                if sent is not None and after is not None and bit_sum(after) != sent.residual_sum:
                    after = None
                residual[lane_id] = self.residual.get(lane_id, torch.zeros(numel))
                residual_after[lane_id] = torch.zeros(numel) if after is None else after
        return LaneCheckpoint(
            dict(self.anchor),
            payload,
            residual,
            residual_after,
            is_declined=bool(self.decline_reason),
            broken_in_a_row=self.broken_in_a_row,
        )

    def change_of_sent(
        self, fragment: Fragment, codec: str, decay: float, place: LanePlace
    ) -> dict[int, Tensor]:
        """Return staged - (anchor - Delta) by lane, Delta being what of it the payload carries.

        Only what a resume has sent again is decoded here, which waits for the device.
        """
        changes: dict[int, Tensor] = {}
        for lane_id, lane in self.sending.items():
            if lane.carried is None:
                its_codec = lane_codec(codec, fragment, lane_id)
                payload = from_bytes(lane.payload).to(place.device)
                after, before = lane.residual_after, self.residual.get(lane_id)
                numel = fragment.lanes[lane_id].numel
                lane.carried = carried(its_codec, payload, numel, after, before, decay, place)
            change = place.there(lane.carried) + place.there(self.staged[lane_id])
            changes[lane_id] = change.sub_(place.there(self.anchor[lane_id]))
        return changes

    def restore(
        self, version: int, lanes: LaneCheckpoint, residual_sums: Mapping[int, int]
    ) -> None:
        """Take over what was captured, but for what was outstanding; the sums are `bit_sum`s."""
        self.anchor, self.anchor_version = dict(lanes.anchor), version
        is_newest = self.state.version == version
        self.anchor_digests = tuple(self.state.lane_digests) if is_newest else ()
        self.residual, self.residual_sums = dict(lanes.residual), dict(residual_sums)
        self.broken_in_a_row = lanes.broken_in_a_row

    def begin_again(self) -> None:
        """Forget work that was captured, and counts already."""
        self.residual = {}

    def known(self) -> wire.FragmentState:
        """Return what a poll compares with the syncer's state.

        With the digest, by which a syncer finds out that its version of that number is another one.
        """
        state = self.state
        return wire.FragmentState(
            fragment_id=self.fragment_id,
            is_founded=state.is_founded,
            version=state.version,
            digest=state.digest,
            attempt=state.attempt,
            is_open=state.is_open,
            wants_initial=state.wants_initial,
            is_damaged=state.is_damaged,
            asked=state.asked,
            num_held=1 + max(self.anchor_version, self.staged_version),
        )
