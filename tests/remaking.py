"""Versions made again in the plainest way, to hold the product's own against."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from diloco.outer.combination import Combination, mean_of
from diloco.outer.fragments import Fragment
from diloco.transport.contracts import Buffer
from diloco.versions.publication import (
    LanePublication,
    LaneState,
    PublicationRules,
    publish_lane_,
)
from diloco.versions.version import VersionRecord


def publish_lane(
    state: LaneState,
    payloads: Iterable[Buffer],
    combination: Combination,
    rules: PublicationRules,
    **of_round: Any,
) -> LanePublication:
    """Do as `publish_lane_` does, and leave `state` untouched."""
    return publish_lane_(state.clone(), payloads, combination, rules, **of_round)


def recompute(
    previous: VersionRecord, record: VersionRecord, rules: PublicationRules, fragment: Fragment
) -> tuple[bytes, ...]:
    """Recompute the lane digests of `record` from its predecessor and its contributions."""
    assert record.key is not None and previous.version == record.key.version
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
