"""Verified lanes of published versions: fetch, hold against the digest, heal what differs.

Staging changes neither anchor nor model.

Source: protocol.md sections 1 and 6.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from diloco.compression.base import from_bytes
from diloco.compression.lanes import lane_codec
from diloco.compression.registry import get_codec
from diloco.errors import CodecError, CoordinatorUnavailable, DilocoError
from diloco.outer.fragments import Fragment
from diloco.rounds.publication import apply_payload, lane_digest
from diloco.sync.calls import SyncerCalls
from diloco.telemetry.events import DigestMismatch, Event
from protos import fragment_pb2 as wire
from transport.contracts import Buffer


async def stage_lane(
    calls: SyncerCalls,
    anchor: Tensor,
    *,
    fragment: Fragment,
    version: int,
    lane_id: int,
    digest: bytes,
    on_event: Callable[[Event], None],
) -> Tensor:
    """Take one lane's step from its anchor to the next version.

    A lane that does not come out as published (the anchor, a codec or the payload is not what the
    syncer's was) is reported and taken as a whole instead.

    Args:
        calls: Way to the syncer.
        anchor: The lane at `version` - 1, float32; unchanged.
        fragment: The lane's fragment, as planned.
        version: Version to reach.
        lane_id: The lane.
        digest: Of the published lane; empty when it is not known, which takes the lane as a whole.
        on_event: Hears of a mismatch.

    Raises:
        CodecError: If even the whole lane does not match.
        DilocoError: If the syncer does not have it, or cannot be reached.
    """
    fragment_id = fragment.fragment_id
    if digest:
        reply, payload = await _fetch(
            calls, fragment_id, version, lane_id, wire.FETCH_KIND_PAYLOAD, anchor.numel()
        )
        values = _step(reply.codec, payload, anchor, fragment, lane_id)
        if values is not None and lane_digest(values) == digest:
            return values
        on_event(DigestMismatch(fragment_id, version, lane_id))
    return await fetch_lane(
        calls, fragment_id, version, lane_id, numel=anchor.numel(), digest=digest
    )


async def fetch_lane(
    calls: SyncerCalls,
    fragment_id: int,
    version: int,
    lane_id: int,
    *,
    numel: int,
    digest: bytes,
) -> Tensor:
    """Take one published lane as a whole: `numel` float32 values.

    Args:
        calls: Way to the syncer.
        fragment_id: The lane's fragment.
        version: Version to fetch.
        lane_id: The lane.
        numel: Its number of values.
        digest: Of the published lane; empty when it is not known, which trusts the syncer's reply.

    Raises:
        CodecError: If it does not match the digest.
        DilocoError: If the syncer does not have it, or cannot be reached.
    """
    reply, payload = await _fetch(
        calls, fragment_id, version, lane_id, wire.FETCH_KIND_DENSE, numel
    )
    values = get_codec("float32").decode(from_bytes(payload), numel)
    # Of a whole lane, the digest of the payload is the digest of the lane.
    if lane_digest(values) != (digest or reply.digest):
        raise CodecError(
            f"lane {lane_id} of fragment {fragment_id}, version {version}, does not match the "
            f"syncer's digest even when fetched as a whole"
        )
    return values


async def _fetch(
    calls: SyncerCalls,
    fragment_id: int,
    version: int,
    lane_id: int,
    kind: wire.FetchKind,
    numel: int,
) -> tuple[wire.FetchReply, Buffer]:
    reply, payload = await calls.fetch(
        fragment_id, version, lane_id, kind, max_reply_bytes=4 * numel
    )
    if reply.status == wire.FETCH_STATUS_FENCED:
        raise calls.fenced(reply.message)
    if reply.status != wire.FETCH_STATUS_OK:
        raise CoordinatorUnavailable(
            f"version {version} of fragment {fragment_id}, lane {lane_id}, cannot be had from "
            f"the syncer: {reply.message}"
        )
    return reply, payload


def _step(
    codec: str, payload: Buffer, anchor: Tensor, fragment: Fragment, lane_id: int
) -> Tensor | None:
    """Apply a payload; None if it cannot be one."""
    try:
        return apply_payload(lane_codec(codec, fragment, lane_id), from_bytes(payload), anchor)
    except DilocoError:
        return None
