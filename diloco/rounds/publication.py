"""From the contributions of a closed round to the next published version: pure arithmetic.

The syncer calls `publish_lane` once a lane at the close of a round; whoever wants to check a
version calls it again with the retained contributions and must get the same bytes.

Source: protocol.md sections 1, 3 (flush), 4 (reduction) and 12.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import blake3
import torch
from torch import Tensor

from diloco.compression.base import Codec, from_bytes, to_bytes
from diloco.compression.registry import get_codec
from diloco.errors import AggregationError, CodecError
from diloco.outer.aggregate import weighted_mean
from diloco.outer.optimizer import OuterOptimizer, flush_step_
from transport.contracts import Buffer


@dataclass(frozen=True, slots=True)
class LaneState:
    """What a syncer holds of one lane: three float32 vectors of shape [lane.numel]."""

    theta: Tensor
    published: Tensor
    momentum: Tensor


@dataclass(frozen=True, slots=True)
class PublicationRules:
    """How contributions become a version: codec names and the outer optimizer."""

    uplink_codec: str
    downlink_codec: str
    optimizer: OuterOptimizer

    def payload_codec(self, is_flush: bool) -> Codec:
        """Codec of the published payload; a flush is published once in float32."""
        return get_codec("float32" if is_flush else self.downlink_codec)


@dataclass(frozen=True, slots=True)
class LanePublication:
    """One lane of a new version: its state, the payload that travels, and its digest."""

    state: LaneState
    payload: bytes
    digest: bytes


def lane_digest(published: Tensor) -> bytes:
    """Digest one lane: blake3 of its little-endian float32 values (32 bytes)."""
    return blake3.blake3(to_bytes(published.view(torch.uint8))).digest()


def version_digest(lane_digests: Sequence[bytes]) -> bytes:
    """Digest a version: blake3 over its lane digests in lane order (32 bytes)."""
    return blake3.blake3(b"".join(lane_digests)).digest()


def decode_contribution(codec: Codec, payload: Buffer, numel: int) -> Tensor:
    """Decode one lane of a contribution and insist on finite values.

    Raises:
        CodecError: If the payload is malformed or holds a value that is not finite.
    """
    values = codec.decode(from_bytes(payload), numel)
    if not bool(torch.isfinite(values).all()):
        raise CodecError(f"a payload of codec {codec.name!r} decodes to values that are not finite")
    return values


def publish_lane(
    state: LaneState,
    payloads: Sequence[Buffer],
    weights_tokens: Sequence[int],
    rules: PublicationRules,
    *,
    version: int,
    is_flush: bool,
) -> LanePublication:
    """Merge the contributions to one lane and take the outer step.

    Delta = sum_m w_m decode(payload_m) / sum_m w_m in the order given (sorted island ids);
    theta <- outer step, or theta - Delta for a flush; the payload is encode(theta - published),
    or theta itself where the codec publishes values; published <- published + decode(payload).

    Args:
        state: The lane at `version`; left untouched.
        payloads: Encoded contributions, sorted by island id; at least one.
        weights_tokens: Weight of each, >= 0; all zero gives a zero Delta.
        rules: Codecs and outer optimizer.
        version: Base version, counted from 0; sets the momentum ramp.
        is_flush: Plain average, momentum neither read nor changed.

    Raises:
        AggregationError: If the result is not finite; nothing was changed.
    """
    uplink = get_codec(rules.uplink_codec)
    numel = state.theta.numel()
    delta = weighted_mean(
        (decode_contribution(uplink, payload, numel) for payload in payloads), weights_tokens
    )
    theta, momentum = state.theta.clone(), state.momentum
    if is_flush:
        flush_step_(theta, delta)
    else:
        momentum = momentum.clone()
        rules.optimizer.step_(theta, momentum, delta, version=version)
    codec = rules.payload_codec(is_flush)
    change = theta if codec.publishes_values else theta - state.published
    _insist_on_finite(version, theta=theta, momentum=momentum, change=change)
    encoded = codec.encode(change)
    published = apply_payload(codec, encoded, state.published)
    _insist_on_finite(version, published=published)
    return LanePublication(
        LaneState(theta, published, momentum), bytes(to_bytes(encoded)), lane_digest(published)
    )


def _insist_on_finite(version: int, **vectors: Tensor) -> None:
    for name, values in vectors.items():
        if not bool(torch.isfinite(values).all()):
            raise AggregationError(f"outer step from version {version}: {name} is not finite")


def apply_payload(codec: Codec, payload: Tensor, published: Tensor) -> Tensor:
    """Take the step from one published version to the next, as every island does.

    Returns:
        decode(payload) for a codec that publishes values, else published + decode(payload);
        fresh float32 of the shape of `published`.
    """
    values = codec.decode(payload, published.numel())
    return values if codec.publishes_values else published + values
