"""Merges a closed round, lane by lane: contributions from the spool, a version into the store.

Every lane is merged, encoded and written to the record on its own, several at once where the
tensor library lets go of the interpreter, so that the record grows while later lanes are computed.
Only the commit waits for all of them, and no version is announced before it.

The plain mean takes one pass. Where norms or angles decide (`MergeRule.needs_norms`), a pass over
all lanes before it decodes what came and multiplies it with itself; the coefficients that follow
are part of the record, so that nobody who recomputes the version depends on their last bits.

The guard (`outer.guard`) looks at each contribution while it is merged. Whom it refuses is left
out: what was merged is thrown away, and all is done again, once, without all of those.

Source: PROTOCOL.md, "The merge" and "Commit point".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

from diloco.compression.base import to_bytes
from diloco.compression.lanes import lane_codec
from diloco.durable import DiskFull
from diloco.errors import AggregationError, CodecError
from diloco.outer.combination import Combination, combine, mean_of
from diloco.outer.fragments import Fragment
from diloco.outer.units import Unit
from diloco.protocol.rounds.terms import MOST_NUMBER, Close, Contributor, Inclusion
from diloco.syncer.spool import SpooledLane
from diloco.syncer.watch import MergeWatch
from diloco.syncer.worker import side_by_side
from diloco.telemetry.syncer_meter import SyncerMeter
from diloco.transport.contracts import Buffer
from diloco.versions.gram_matrices import gram_matrices
from diloco.versions.publication import (
    LanePublication,
    LaneState,
    PublicationRules,
    decoder_of,
    publish_lane_,
)
from diloco.versions.record import RecordDraft
from diloco.versions.store import FragmentStore
from diloco.versions.value_digest import LANE_DIGEST_BYTES
from diloco.versions.version import VersionRecord

#: Island -> lane -> what it sent.
Spooled: TypeAlias = Mapping[str, Mapping[int, SpooledLane]]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_BLAKE3_BYTES = 32


class NothingToMerge(AggregationError):
    """The guard refuses every contribution to a round; `rejected` says why, by island."""

    def __init__(self, rejected: Mapping[str, str]) -> None:
        """Carry who was rejected and why."""
        super().__init__("; ".join(f"{island}: {why}" for island, why in rejected.items()))
        self.rejected = dict(rejected)


@dataclass(frozen=True, slots=True)
class _Merge:
    """What a round merges, and how; `is_recorded`: not by tokens alone, so the record says how."""

    contributors: tuple[Contributor, ...]
    combination: Combination
    is_recorded: bool
    rejected: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Merger:
    """Makes the versions of one fragment; used by the worker.

    Args:
        fragment: Of the run's plan.
        units: Of the fragment: what a rule by tensor treats each on its own.
        store: Where its versions become durable.
        rules: How contributions become a version.
        meter: Counts the seconds.
        lanes: Merges lanes side by side; of other fragments, too.
        told: What besides `rules` made a version, for its record (JSON values).
        closed_unix_s: When its round closed, for its record.
        insist: Called when a merge begins, and before it is durable: raises what is to end it.
    """

    fragment: Fragment
    units: tuple[Unit, ...]
    store: FragmentStore
    rules: PublicationRules
    meter: SyncerMeter
    lanes: Executor
    told: Mapping[str, Any] = field(default_factory=dict)
    closed_unix_s: float | None = None
    insist: Callable[[], None] = lambda: None

    def publish(self, base: VersionRecord, close: Close, spool: Spooled) -> VersionRecord:
        """Compute and commit the version after `base`.

        Theta and moments are moved where they are, so that besides the state itself there are one
        more vector of published values and a few lanes in memory, however many contribute. Where
        that leads nowhere, they are read back from the record of `base`.

        Args:
            base: The version that the contributions are based on, as it is durable; once this
                has returned, only what it published is its own.
            close: Who is counted, in which order.
            spool: What they sent, and maybe others; all of it is dropped at the end, unless the
                disk is full. The plain mean, which reads it once, lets go of the memory of each
                lane as soon as it was added and written.

        Returns:
            The durable version, without its contributions: those are on the disk only. Who of
            `close` was rejected is not among its contributors.

        Raises:
            DiskFull: If there is no room for the version: `base` and `spool` are what they were,
                and the same may be tried again.
            NothingToMerge: If the guard refuses all of them; `base` is what it was.
            AggregationError: If the result cannot be used; there is no new version, and `base`
                is what it was.
            OSError: If the disk fails; `base` is worth nothing then.
            RecordInvalid: If `base` cannot be read back.
        """
        try:
            record = self._published(base, close, spool)
        except DiskFull:
            raise
        except BaseException:
            drop(spool)
            raise
        drop(spool)
        return record

    def _published(self, base: VersionRecord, close: Close, spool: Spooled) -> VersionRecord:
        """Merge everything, and once again without those that the guard refuses; commit."""
        record, rejected = self._attempted(base, close, {}, spool)
        for island, why in rejected.items():
            logger.warning("contribution rejected, key=%s island=%s: %s", close.key, island, why)
        if len(rejected) == len(close.contributors):
            raise NothingToMerge(rejected)
        if rejected:
            record, _ = self._attempted(base, close, rejected, spool)
        return record

    def _attempted(
        self, base: VersionRecord, close: Close, rejected: Mapping[str, str], spool: Spooled
    ) -> tuple[VersionRecord, Mapping[str, str]]:
        """Merge without `rejected`, and commit; or undo it where there are outliers.

        Those that are left when some are rejected were judged with them, and are not again.

        Returns:
            The version, and who is refused and why; it exists only where nobody is.
        """
        fragment_id, draft = close.key.fragment_id, None
        self.insist()
        try:
            with self.meter.merging(fragment_id):
                merge = self._decided(close, rejected, spool)
                watch = self._watch(base, close, merge)
                record = self._uncomputed(base, close, merge, watch)
                draft = begun = self._draft(record, spool)  # has room for all of it
                try:
                    made = self._of_lanes(
                        lambda i: self._lane(i, base.lanes[i], close, merge, spool, begun, watch),
                        range(len(self.fragment.lanes)),
                    )
                    outliers = {} if rejected else watch.outliers()
                except AggregationError:
                    # What is too large for the sum, or for the downlink codec, names its island.
                    if rejected or not (outliers := self._outliers_of(base, close, merge, spool)):
                        raise
            if outliers:
                self._undo(base, spool, draft)
                return record, outliers
            record = replace(
                record,
                lane_digests=tuple(lane.digest for lane in made),
                lane_blake3=tuple(lane.blake3 for lane in made),
                lanes=tuple(lane.state for lane in made),
                payloads=tuple(lane.payload for lane in made),
                guard=watch.guard(),
            )
            self.insist()
            with self.meter.committing(fragment_id):
                self.store.commit(record, draft)
        except (DiskFull, AggregationError, CodecError) as error:
            if draft is not None:
                self._undo(base, spool if isinstance(error, DiskFull) else {}, draft)
            if isinstance(error, CodecError):  # though each payload was found sound as it came
                raise AggregationError(str(error)) from error
            raise
        except BaseException:
            if draft is not None:
                draft.abandon()
            raise
        return record, {}

    def _undo(self, base: VersionRecord, spool: Spooled, draft: RecordDraft) -> None:
        """Have `base` and what is in the spool as they were before the merge."""
        for spooled in _lanes_of(spool):
            spooled.take_back()
        draft.abandon()
        self.restore(base)

    def _watch(self, base: VersionRecord, close: Close, merge: _Merge) -> MergeWatch:
        return MergeWatch(
            self.fragment,
            self.units,
            self.rules,
            merge.contributors,
            base,
            is_flush=close.is_flush,
            rejected_in_a_row=close.rejected_in_a_row,
        )

    def _outliers_of(
        self, base: VersionRecord, close: Close, merge: _Merge, spool: Spooled
    ) -> dict[str, str]:
        """Measure what was not merged to its end; says whom the guard refuses."""
        watch = self._watch(base, close, merge)
        for lane in self.fragment.lanes:
            look = watch.lane(lane.lane_id)
            decode = decoder_of(self.rules.uplink_codec, self.fragment, lane.lane_id)
            for contributor in merge.contributors:
                look(decode(spool[contributor.island][lane.lane_id].read()))
        return watch.outliers()

    def _decided(self, close: Close, rejected: Mapping[str, str], spool: Spooled) -> _Merge:
        """Decide with which coefficients those of a close that were not rejected are merged."""
        rule, is_flush = self.rules.merge, close.is_flush
        contributors = tuple(c for c in close.contributors if c.island not in rejected)
        weights = [
            rule.weight(c.weight_tokens, c.weight_steps, is_flush=is_flush) for c in contributors
        ]
        if not rule.needs_norms(is_flush=is_flush):
            is_plain = weights == [c.weight_tokens for c in contributors] and not rejected
            combination = mean_of(weights, self.fragment.padded_numel)
            return _Merge(contributors, combination, not is_plain, rejected)
        grams = gram_matrices(
            lambda lane_id: (spool[c.island][lane_id].parts() for c in contributors),
            len(contributors),
            self.fragment,
            self.units,
            self.rules.uplink_codec,
            has_products=rule.is_by_unit(is_flush=is_flush),
            across=self._of_lanes,
        )
        combination = combine(grams, self.units, weights, rule, is_flush=is_flush)
        return _Merge(contributors, combination, True, rejected)

    def _of_lanes(self, work: Callable[[int], _T], lane_ids: Iterable[int]) -> list[_T]:
        return side_by_side(self.lanes, work, lane_ids)

    def restore(self, base: VersionRecord) -> None:
        """Make theta and moments of a version again what they durably are.

        Raises:
            RecordInvalid: If they cannot be read back.
        """
        for lane_id, state in enumerate(base.lanes):
            self.store.restore_lane_(state, base.version, lane_id)

    def _lane(
        self,
        lane_id: int,
        base: LaneState,
        close: Close,
        merge: _Merge,
        spool: Spooled,
        draft: RecordDraft,
        watch: MergeWatch,
    ) -> LanePublication:
        """Merge one lane and write all of it."""
        is_last_use = not self.rules.merge.needs_norms(is_flush=close.is_flush)

        def contributions() -> Iterator[Buffer]:
            for contributor in merge.contributors:
                spooled = spool[contributor.island][lane_id]
                payload = spooled.read()
                draft.write(f"contribution/{contributor.island}/{lane_id}", payload, spooled.digest)
                yield payload
                del payload
                if is_last_use:
                    spooled.lend(
                        partial(draft.read, f"contribution/{contributor.island}/{lane_id}")
                    )

        made = publish_lane_(
            base,
            contributions(),
            merge.combination,
            self.rules,
            fragment=self.fragment,
            lane_id=lane_id,
            key=close.key,
            is_flush=close.is_flush,
            on_delta=watch.lane(lane_id),
        )
        for name, values in made.state.vectors.items() if draft.has_state else ():
            digest = made.blake3 if name == "published" else None
            draft.write(f"{name}/{lane_id}", to_bytes(values), digest)
        draft.write(f"payload/{lane_id}", made.payload)
        return made

    def _uncomputed(
        self, base: VersionRecord, close: Close, merge: _Merge, watch: MergeWatch
    ) -> VersionRecord:
        """Return the next version without its values; digests and guard have their size only."""
        return VersionRecord(
            version=close.key.version + 1,
            fragment_id=close.key.fragment_id,
            timeline=close.key.timeline,
            key=close.key,
            is_flush=close.is_flush,
            payload_codec=self.rules.payload_codec(close.is_flush),
            lane_digests=(bytes(LANE_DIGEST_BYTES),) * len(self.fragment.lanes),
            lane_blake3=(bytes(_BLAKE3_BYTES),) * len(self.fragment.lanes),
            lanes=base.lanes,
            contributors=merge.contributors,
            refused=close.refused,
            last_included={
                **base.last_included,
                **{
                    c.island: Inclusion(c.incarnation, close.key.version, close.key.attempt)
                    for c in merge.contributors
                },
            },
            rejected=merge.rejected,
            combination=merge.combination if merge.is_recorded else None,
            merged_tokens=min(
                base.merged_tokens + sum(c.weight_tokens for c in merge.contributors), MOST_NUMBER
            ),
            rules={**self.rules.to_json(), **self.told},
            closed_unix_s=self.closed_unix_s,
            guard=watch.guard(),
        )

    def _draft(self, record: VersionRecord, spool: Spooled) -> RecordDraft:
        lanes = self.fragment.lanes
        codecs = [lane_codec(record.payload_codec, self.fragment, lane.lane_id) for lane in lanes]
        return self.store.draft(
            record,
            [codec.wire_bytes(lane.numel) for codec, lane in zip(codecs, lanes, strict=True)],
            {
                c.island: [spool[c.island][lane.lane_id].num_bytes for lane in lanes]
                for c in record.contributors
            },
        )


def drop(spool: Spooled) -> None:
    """Let go of what was spooled and is not needed; some of it may have been dropped already.

    Runs in the worker: giving back memory takes a while.
    """
    lanes = list(_lanes_of(spool))
    for spooled in lanes:
        spooled.drop()
    for of_lanes in {spooled.spool for spooled in lanes}:
        of_lanes.give_back()


def _lanes_of(spool: Spooled) -> Iterator[SpooledLane]:
    for lanes in spool.values():
        yield from lanes.values()
