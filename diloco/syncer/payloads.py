"""Gives the payloads of published lanes, and checks the codec of those that arrive.

Decides nothing about rounds.

Source: PROTOCOL.md, "Staging".
"""

from __future__ import annotations

import functools

import blake3

from diloco.bounded_text import bounded_text
from diloco.compression.base import Codec, from_bytes, to_bytes
from diloco.errors import CodecError, PayloadRefused
from diloco.protos import fragment_pb2 as wire
from diloco.refusals import Cause
from diloco.syncer.worker import Worker
from diloco.transport.contracts import Buffer
from diloco.versions.publication import MOST_TOGETHER
from diloco.versions.record import RecordInvalid
from diloco.versions.store import FragmentStore
from diloco.versions.version import VersionRecord

#: Takes well below a millisecond.
_HASHED_AT_ONCE_BYTES = 1 << 20


async def fetch_lanes(
    header: wire.FetchHeader, record: VersionRecord | None, store: FragmentStore, worker: Worker
) -> tuple[wire.FetchReply, Buffer]:
    """Return lanes of a published version, and the reply that goes before them.

    Args:
        header: Says which.
        record: The newest version; None: there is none.
        store: Has those before it.
        worker: Reads them.
    """
    lane_ids = tuple(header.lane_ids)
    if record is None or header.version > record.version or not lane_ids:
        return _no_lane(wire.FETCH_STATUS_UNKNOWN, "not published here"), b""
    if list(lane_ids) != sorted(set(lane_ids)) or lane_ids[-1] >= len(record.lanes):
        return _no_lane(wire.FETCH_STATUS_UNKNOWN, f"there are no such lanes: {lane_ids[:8]}"), b""
    numel = sum(record.lanes[lane_id].published.numel() for lane_id in lane_ids)
    if len(lane_ids) > 1 and numel > MOST_TOGETHER:
        message = f"{numel} values are too many for one call of several lanes: {MOST_TOGETHER}"
        return _no_lane(wire.FETCH_STATUS_UNKNOWN, message), b""
    is_dense = header.kind == wire.FETCH_KIND_DENSE
    codec, payloads = record.payload_codec, []  # type: tuple[str, list[Buffer]]
    if header.version != record.version:
        section = "published" if is_dense else "payload"
        try:
            for lane_id in lane_ids:
                codec, payload = await worker.run(
                    functools.partial(store.load_lane, header.version, lane_id, section)
                )
                payloads.append(payload)
        except RecordInvalid as error:
            return _no_lane(wire.FETCH_STATUS_GONE, str(error)), b""
    elif is_dense:
        payloads = [to_bytes(record.lanes[n].published) for n in lane_ids]
    elif record.payloads:
        payloads = [record.payloads[lane_id] for lane_id in lane_ids]
    else:
        return _no_lane(wire.FETCH_STATUS_GONE, "this version has no payload"), b""
    together = payloads[0] if len(payloads) == 1 else b"".join(payloads)
    codec = "float32" if is_dense else codec
    digest = await _digest_of(together, worker)
    return wire.FetchReply(status=wire.FETCH_STATUS_OK, codec=codec, digest=digest), together


async def _digest_of(payload: Buffer, worker: Worker) -> bytes:
    """Hash a payload, on the event loop only where that is quicker than to hand it on."""
    if len(payload) <= _HASHED_AT_ONCE_BYTES:
        return blake3.blake3(payload).digest()
    return await worker.run(lambda: blake3.blake3(payload).digest())


def check_codec(codec_name: str, expected: str) -> None:
    """Check that a lane is encoded as the run's are.

    Raises:
        PayloadRefused: If it is not.
    """
    if codec_name != expected:
        shown = bounded_text(codec_name, 40)
        raise PayloadRefused(
            Cause.CODEC, f"codec {shown!r}, the run's uplink codec is {expected!r}"
        )


def check_size(num_bytes: int, expected: int) -> None:
    """Insist on the size that the plan asks, before anything of a payload is read.

    Raises:
        PayloadRefused: If it is another.
    """
    if num_bytes != expected:
        raise PayloadRefused(Cause.SIZE, f"{num_bytes} bytes, the plan asks {expected}")


def verify_payload(payload: Buffer, digest: bytes, codec: Codec, numel: int) -> None:
    """Check that a payload is what its header says and would decode to finite values.

    Raises:
        PayloadRefused: If it is not.
    """
    if blake3.blake3(payload).digest() != digest:
        raise PayloadRefused(Cause.DIGEST, "the payload does not match the digest in its header")
    try:
        codec.check(from_bytes(payload), numel)
    except CodecError as error:
        raise PayloadRefused(Cause.CONTENT, str(error)) from error


def _no_lane(status: wire.FetchStatus, message: str) -> wire.FetchReply:
    return wire.FetchReply(status=status, message=message)
