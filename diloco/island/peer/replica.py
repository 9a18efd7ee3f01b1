"""One fragment at the peer of an island: theta, published and momentum, durable; bytes and tensors.

A version is staged in a store next to the one it will be promoted to: staging, like a syncer's
commit, is a whole record, fsynced, and promotion is a rename. Theta and momentum are moved where
they are, as a syncer's are; a lane whose step was aborted is read back from the committed
record before the next one. Nothing here decides a round and nothing calls anybody.

    peers of one island, below its directory:
    fragment-0003/v000000000012.record          committed
    staged/fragment-0003/v000000000013.record   durable, in doubt: of the present timeline

Source: PROTOCOL.md, "Peers in doubt".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import blake3
import torch
from torch import Tensor

from diloco.compression.base import Codec, from_bytes, to_bytes
from diloco.compression.lanes import lane_codec
from diloco.errors import AggregationError, CodecError
from diloco.outer.fragments import Fragment
from diloco.protocol.rounds.allreduce import Assignment, Prepared, Staged, gathers_mean
from diloco.syncer.worker import Worker
from diloco.transport.contracts import Buffer
from diloco.versions.publication import (
    LanePublication,
    LaneState,
    PublicationRules,
    decoder_of,
    follow_mean_,
    mean_contribution,
    publish_mean_,
)
from diloco.versions.record import STATE_SECTIONS
from diloco.versions.store import FragmentStore
from diloco.versions.version import VersionRecord, founding_record, record_of

#: What a healing peer asks for of a lane, in this order; version 0 has no payload.
SECTIONS = (*STATE_SECTIONS, "payload")
#: Below a peer's directory: what is in doubt.
STAGED = "staged"


@dataclass(frozen=True, slots=True)
class Reduced:
    """One lane of an assignment's result, and the contributions to it where they are here."""

    publication: LanePublication
    mean: Tensor | None = None
    contributions: Mapping[str, Buffer] = field(default_factory=dict)


class Replica:
    """State of one fragment; `record` is what is committed, `staged` what is in doubt."""

    def __init__(
        self, directory: Path, fragment: Fragment, rules: PublicationRules, *, retained: int
    ) -> None:
        """Assign only; `start` reads the stores.

        Args:
            directory: The peer's.
            fragment: Of the run's plan.
            rules: Codecs, outer optimizer, seed.
            retained: Predecessors of the newest record that are kept.
        """
        self.fragment = fragment
        self.store = FragmentStore(directory, fragment, retained)
        self.record: VersionRecord | None = None
        self.state_digest = b""
        self.staged: Staged | None = None
        self.reduced: dict[int, Reduced] = {}
        self.reduced_id = b""
        self._rules = rules
        self._staging = FragmentStore(directory / STAGED, fragment, 0)
        self._staged_record: VersionRecord | None = None
        self._stepped: set[int] = set()  # lanes whose theta and momentum have left `record`
        self._is_staged_whole = True

    @property
    def version(self) -> int:
        """Newest committed version here, -1 before there is one."""
        return -1 if self.record is None else self.record.version

    @property
    def staged_lane_digests(self) -> tuple[bytes, ...]:
        """Digests of the published lanes of the staged version."""
        return () if self._staged_record is None else self._staged_record.lane_digests

    async def start(self, worker: Worker, timeline: int) -> None:
        """Take up what is durable, on the timeline of the run."""
        recovered = await worker.run(self.store.recover)
        if recovered is not None:
            await self._hold(recovered.record, worker)
        record = await worker.run(lambda: self._recover_staged(timeline))
        if record is not None:
            self._staged_record = record
            digest = await worker.run(lambda: state_digest(record))
            self.staged = Staged(record.version, digest, b"")

    def _recover_staged(self, timeline: int) -> VersionRecord | None:
        """Find what is in doubt: the version after the newest, of this timeline; forget others.

        One that a heal has passed, or a resume has abandoned, would hide it if its number is
        higher.
        """
        self._staging.forget_all_but(self.version + 1)
        recovered = self._staging.recover()
        if recovered is None or recovered.record.timeline == timeline:
            return None if recovered is None else recovered.record
        self._staging.forget_all_but(-1)
        return None

    # -- version 0, and states from elsewhere ----------------------------------------------------

    def founding(self, lanes: Mapping[int, Buffer], timeline: int) -> VersionRecord:
        """Make version 0 of initial parameters."""
        return founding_record(self.fragment, lanes, timeline)

    def healed(self, header: Mapping[str, Any], sections: Mapping[str, Buffer]) -> VersionRecord:
        """Put a version together from its commit record and the lanes that another peer sent.

        Args:
            header: As the decider has committed it.
            sections: By SECTION/LANE.

        Raises:
            CodecError: If a lane has another size than the plan says.
        """
        for lane in self.fragment.lanes:
            for name in STATE_SECTIONS:
                num_bytes = len(sections[f"{name}/{lane.lane_id}"])
                if num_bytes != 4 * lane.numel:
                    raise CodecError(
                        f"{name} of lane {lane.lane_id} has {num_bytes} bytes, the plan asks "
                        f"{4 * lane.numel}"
                    )
        # Steps are taken in place: bytes of a reply may be immutable.
        record = record_of(header, sections, self.fragment)
        return replace(record, lanes=tuple(state.clone() for state in record.lanes))

    async def take(self, record: VersionRecord, worker: Worker) -> None:
        """Make a version that is known to be committed, or founds the run, the newest here."""
        await worker.run(lambda: self.store.commit(record))
        await self._hold(record, worker)

    async def section(self, lane_id: int, name: str, worker: Worker) -> Buffer:
        """Return a part of one lane of the newest version, for a peer that heals.

        From the disk: in memory theta and momentum may be on their way to the next version.

        Raises:
            RecordInvalid: If it is not there any more.
        """
        version = self.version
        _, section = await worker.run(lambda: self.store.load_lane(version, lane_id, name))
        return section

    # -- reducing --------------------------------------------------------------------------------

    def codec(self, lane_id: int) -> Codec:
        """Return the codec of contributions to a lane."""
        return lane_codec(self._rules.uplink_codec, self.fragment, lane_id)

    def contribution_bytes(self, lane_id: int) -> int:
        """Encoded size of one contribution to a lane."""
        return self.codec(lane_id).wire_bytes(self.fragment.lanes[lane_id].numel)

    def begin(self, assignment: Assignment) -> None:
        """Forget results of an earlier assignment."""
        if self.reduced_id != assignment.id:
            self.reduced, self.reduced_id = {}, assignment.id

    def reduce(
        self, assignment: Assignment, lane_id: int, contributions: Mapping[str, Buffer]
    ) -> Reduced:
        """Sum the contributions to a lane in sorted island order, take the outer step, encode.

        Raises:
            AggregationError: If the result is not finite.
            ContributionMalformed: If a contribution is.
        """
        mean = self._mean(assignment, lane_id, contributions)
        publication = self._publish(assignment, lane_id, mean)
        return Reduced(publication, mean, contributions)

    def result_for(self, assignment: Assignment, lane_id: int, island: str) -> bytes:
        """Return what another member needs to come to the same state as the owner of a lane.

        The payload, unless theta itself is what is published; then the mean in float32, or the
        contributions that the member lacks, whichever `gathers_mean` says.
        """
        reduced = self.reduced[lane_id]
        parts: list[Buffer] = []
        if not self._published_by(assignment, lane_id).publishes_values:
            parts.append(reduced.publication.payload)
        if self._gathers_mean(assignment, lane_id):
            assert reduced.mean is not None
            parts.append(to_bytes(reduced.mean.view(torch.uint8)))
        else:
            others = [c.island for c in assignment.contributors if c.island != island]
            parts += [reduced.contributions[other] for other in others]
        return b"".join(parts)

    def result_bytes(self, assignment: Assignment, lane_id: int, island: str) -> int:
        """Size of `result_for`."""
        numel = self.fragment.lanes[lane_id].numel
        codec = self._published_by(assignment, lane_id)
        num_bytes = 0 if codec.publishes_values else codec.wire_bytes(numel)
        if self._gathers_mean(assignment, lane_id):
            return num_bytes + 4 * numel
        num_lacking = sum(c.island != island for c in assignment.contributors)
        return num_bytes + num_lacking * self.contribution_bytes(lane_id)

    def follow(
        self, assignment: Assignment, lane_id: int, island: str, result: Buffer, own: Buffer
    ) -> Reduced:
        """Come to the owner's result from what `result_for` gave.

        Args:
            assignment: The round.
            lane_id: The lane.
            island: This one.
            result: Of `result_bytes`.
            own: This island's contribution to the lane; empty where it is not counted.

        Raises:
            CodecError: If it is malformed.
            AggregationError: If the mean is not finite.
        """
        numel, view = self.fragment.lanes[lane_id].numel, memoryview(result)
        codec = self._published_by(assignment, lane_id)
        at = 0 if codec.publishes_values else codec.wire_bytes(numel)
        # Copies: a view of floats must begin at an aligned byte.
        payload, rest = bytes(view[:at]), bytes(view[at:])
        contributions: dict[str, Buffer] = {}
        if self._gathers_mean(assignment, lane_id):
            mean = from_bytes(rest).view(torch.float32)
        else:
            each, at = self.contribution_bytes(lane_id), 0
            for c in assignment.contributors:
                if c.island == island:
                    contributions[island] = own
                    continue
                contributions[c.island], at = rest[at : at + each], at + each
            mean = self._mean(assignment, lane_id, contributions)
        if codec.publishes_values:  # theta is what is published: it follows from the mean
            publication = self._publish(assignment, lane_id, mean)
        else:
            publication = follow_mean_(
                self._state(lane_id),
                mean,
                payload,
                self._rules,
                fragment=self.fragment,
                lane_id=lane_id,
                key=assignment.key,
                is_flush=assignment.is_flush,
            )
        return Reduced(publication, None, contributions)

    def stage(self, assignment: Assignment, lanes: Sequence[Reduced]) -> Prepared:
        """Write the next version durably, next to the committed ones; runs in the worker."""
        islands = [c.island for c in assignment.contributors]
        is_whole = all(len(lane.contributions) == len(islands) for lane in lanes)
        record = VersionRecord(
            version=assignment.key.version + 1,
            fragment_id=assignment.key.fragment_id,
            timeline=assignment.key.timeline,
            key=assignment.key,
            is_flush=assignment.is_flush,
            payload_codec=self._rules.payload_codec(assignment.is_flush),
            lane_digests=tuple(lane.publication.digest for lane in lanes),
            lanes=tuple(lane.publication.state for lane in lanes),
            payloads=tuple(lane.publication.payload for lane in lanes),
            contributors=assignment.contributors,
            contributions={
                island: [lane.contributions[island] for lane in lanes]
                for island in islands
                if is_whole
            },
            refused=assignment.refused,
        )
        self._staging.commit(record)
        prepared = Prepared(record.lane_digests, state_digest(record))
        self._staged_record = replace(record, contributions={})
        self._is_staged_whole = True
        self.staged = Staged(record.version, prepared.state_digest, assignment.id)
        return prepared

    async def promote(self, worker: Worker) -> None:
        """Make the staged version, which is committed, the newest."""
        record, staged = self._staged_record, self.staged
        assert record is not None and staged is not None
        await worker.run(lambda: self.store.adopt(self._staging, staged.version))
        if not self._is_staged_whole:
            record = await worker.run(
                lambda: self.store.load(staged.version, with_contributions=False)
            )
        self.record, self.state_digest = record, staged.state_digest
        self._stepped = set()
        self._staged_record, self.staged = None, None
        self.reduced, self.reduced_id = {}, b""

    async def _hold(self, record: VersionRecord, worker: Worker) -> None:
        """Serve a durable version from memory; contributions are left to the disk."""
        digest = await worker.run(lambda: state_digest(record))
        self.record, self.state_digest = replace(record, contributions={}), digest
        self._stepped = set()

    def _state(self, lane_id: int) -> LaneState:
        """Return a lane of the newest version, to be moved in place; runs in the worker."""
        assert self.record is not None
        state = self.record.lanes[lane_id]
        if lane_id in self._stepped:
            # An attempt was abandoned, and what it staged has the same vectors.
            self._is_staged_whole = False
            self.store.restore_lane_(state, self.record.version, lane_id)
        self._stepped.add(lane_id)
        return state

    def _publish(self, assignment: Assignment, lane_id: int, mean: Tensor) -> LanePublication:
        return publish_mean_(
            self._state(lane_id),
            mean,
            self._rules,
            fragment=self.fragment,
            lane_id=lane_id,
            key=assignment.key,
            is_flush=assignment.is_flush,
        )

    def _published_by(self, assignment: Assignment, lane_id: int) -> Codec:
        name = self._rules.payload_codec(assignment.is_flush)
        return lane_codec(name, self.fragment, lane_id)

    def _gathers_mean(self, assignment: Assignment, lane_id: int) -> bool:
        numel = self.fragment.lanes[lane_id].numel
        num_contributors = len(assignment.contributors)
        return gathers_mean(numel, self.contribution_bytes(lane_id), num_contributors)

    def _mean(
        self, assignment: Assignment, lane_id: int, contributions: Mapping[str, Buffer]
    ) -> Tensor:
        try:
            return mean_contribution(
                decoder_of(self._rules.uplink_codec, self.fragment, lane_id),
                [contributions[c.island] for c in assignment.contributors],
                [c.weight_tokens for c in assignment.contributors],
            )
        except (AggregationError, CodecError):
            # Whose it is matters now alone: reading all twice would cost every round.
            codec, numel = self.codec(lane_id), self.fragment.lanes[lane_id].numel
            for c in assignment.contributors:
                payload = contributions[c.island]
                if blake3.blake3(payload).digest() == c.lane_digests[lane_id]:
                    _check_decodable(c.island, payload, codec, numel)
            raise


class ContributionMalformed(CodecError):
    """A contribution that is what its island declared, and of no use; names the island."""

    def __init__(self, message: str, island: str) -> None:
        """Keep the island whose contribution it is."""
        super().__init__(message)
        self.contributor = island


def _check_decodable(island: str, payload: Buffer, codec: Codec, numel: int) -> None:
    try:
        codec.check(from_bytes(payload), numel)
    except CodecError as error:
        message = f"the contribution of island {island!r} is malformed: {error}"
        raise ContributionMalformed(message, island) from error


def state_digest(record: VersionRecord) -> bytes:
    """Digest theta, published and momentum of a version, lane by lane, then payloads (32 bytes).

    The payloads are in it because a peer that heals passes them on to its island's ranks.
    """
    hasher = blake3.blake3()
    for lane in record.lanes:
        for vector in (lane.theta, lane.published, lane.momentum):
            hasher.update(to_bytes(vector.view(torch.uint8)))
    for payload in record.payloads:
        hasher.update(payload)
    return hasher.digest()
