"""The close of a round: contributions out of the spool, a version into the store, lane by lane.

Every lane is merged, encoded and written to the record on its own, several at once where the
tensor library lets go of the interpreter, so that the record grows while later lanes are computed.
Only the commit waits for all of them, and nobody hears of a version before it.

Source: protocol.md section 4 (reduction, commit point).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from diloco.compression.base import to_bytes
from diloco.compression.lanes import lane_codec
from diloco.errors import AggregationError
from diloco.outer.fragments import Fragment
from diloco.rounds.publication import LanePublication, LaneState, PublicationRules, publish_lane_
from diloco.rounds.record import STATE_SECTIONS, RecordDraft
from diloco.rounds.spool import SpooledLane
from diloco.rounds.state import Close
from diloco.rounds.store import FragmentStore, VersionRecord
from diloco.telemetry.syncer_meter import SyncerMeter
from transport.contracts import Buffer

#: Island -> lane -> what it sent.
Spooled: TypeAlias = Mapping[str, Mapping[int, SpooledLane]]

_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class Merger:
    """Makes the versions of one fragment; used by the worker.

    Args:
        fragment: Of the run's plan.
        store: Where its versions become durable.
        rules: How contributions become a version.
        meter: Counts the seconds.
        num_threads: Lanes merged at once.
    """

    fragment: Fragment
    store: FragmentStore
    rules: PublicationRules
    meter: SyncerMeter
    num_threads: int

    def publish(self, base: VersionRecord, close: Close, spool: Spooled) -> VersionRecord:
        """Compute and commit the version after `base`.

        Theta and momentum are moved where they are, so that beside the state itself there are one
        more vector of published values and a few lanes in memory. Where that leads nowhere, both
        are read back from the record of `base`.

        Args:
            base: The version that the contributions are based on, as it is durable; once this
                has returned, only what it published is its own.
            close: Who is counted, in which order.
            spool: What they sent, and maybe others; all of it is dropped.

        Returns:
            The durable version, without its contributions: those are on the disk only.

        Raises:
            AggregationError: If the result cannot be used; there is no new version, and `base`
                is what it was.
            OSError: If the disk fails; `base` is worth nothing then.
            RecordInvalid: If `base` cannot be read back.
        """
        record = self._uncomputed(close)
        draft = self._draft(record, spool)
        try:
            with (
                self.meter.merging(record.fragment_id),
                ThreadPoolExecutor(self.num_threads, "lanes") as pool,
            ):
                lanes = range(len(self.fragment.lanes))
                made = list(
                    pool.map(lambda i: self._lane(i, base.lanes[i], close, spool, draft), lanes)
                )
            record = replace(
                record,
                lane_digests=tuple(lane.digest for lane in made),
                lanes=tuple(lane.state for lane in made),
                payloads=tuple(lane.payload for lane in made),
            )
            with self.meter.committing(record.fragment_id):
                self.store.commit(record, draft)
        except AggregationError:
            draft.abandon()
            self._restore(base)
            raise
        except BaseException:
            draft.abandon()  # a full disk gets its room back
            raise
        finally:
            drop(spool)
        return record

    def _restore(self, base: VersionRecord) -> None:
        for lane_id, state in enumerate(base.lanes):
            self.store.restore_lane_(state, base.version, lane_id)

    def _lane(
        self, lane_id: int, base: LaneState, close: Close, spool: Spooled, draft: RecordDraft
    ) -> LanePublication:
        """Merge one lane and write all of it; each contribution is let go once it was added."""

        def contributions() -> Iterator[Buffer]:
            for contributor in close.contributors:
                spooled = spool[contributor.island][lane_id]
                payload = spooled.read()
                draft.write(f"contribution/{contributor.island}/{lane_id}", payload, spooled.digest)
                yield payload
                del payload
                spooled.drop()

        made = publish_lane_(
            base,
            contributions(),
            [contributor.weight_tokens for contributor in close.contributors],
            self.rules,
            fragment=self.fragment,
            lane_id=lane_id,
            key=close.key,
            is_flush=close.is_flush,
        )
        for name in STATE_SECTIONS:
            values: Tensor = getattr(made.state, name)
            digest = made.digest if name == "published" else None
            draft.write(f"{name}/{lane_id}", to_bytes(values.view(torch.uint8)), digest)
        draft.write(f"payload/{lane_id}", made.payload)
        return made

    def _uncomputed(self, close: Close) -> VersionRecord:
        """Return the next version without its values; its digests have their size only."""
        return VersionRecord(
            version=close.key.version + 1,
            fragment_id=close.key.fragment_id,
            timeline=close.key.timeline,
            key=close.key,
            is_flush=close.is_flush,
            payload_codec=self.rules.payload_codec(close.is_flush),
            lane_digests=tuple(bytes(_DIGEST_BYTES) for _ in self.fragment.lanes),
            lanes=(),
            contributors=close.contributors,
            refused=close.refused,
            last_included=close.last_included,
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
    """Let go of what was spooled and is not needed; some of it may have been dropped already."""
    for lanes in spool.values():
        for spooled in lanes.values():
            spooled.drop()
