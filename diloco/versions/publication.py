"""Computes the next published version from the contributions of a closed round; pure.

The syncer calls `publish_lane_` once a lane at the close of a round; anyone who makes a version
again (`rebuild`) calls it with the retained contributions and the coefficients that the version was
made with, and must get the same bytes.

Source: PROTOCOL.md, "Theta and published", "Order and arithmetic", "Outer step" and "Flush".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

import blake3
import torch
from torch import Tensor

from diloco.compression.base import Codec, from_bytes, is_finite, to_bytes
from diloco.compression.lanes import lane_codec, lane_part, padding_of
from diloco.compression.random_bits import rounding_key
from diloco.errors import AggregationError, CodecError, ConfigError
from diloco.outer.aggregate import weighted_sum
from diloco.outer.combination import Combination, MergeRule
from diloco.outer.fragments import Fragment, buffer_runs
from diloco.outer.optimizer import OuterOptimizer, flush_step_
from diloco.protocol.rounds.terms import RoundKey
from diloco.transport.contracts import Buffer
from diloco.versions.record import SECOND_MOMENT, STATE_SECTIONS
from diloco.versions.value_digest import lane_digest

#: Reads a part of a payload, which is whole; raises what the place that it is read from does.
ReadPart: TypeAlias = Callable[[slice], Buffer]

#: Values of the lanes that one call may fetch together: a call a lane costs a small model more than
#: its codecs do. Part of the wire protocol: a syncer with less refuses what an island asks for.
MOST_TOGETHER = 1 << 20


@dataclass(frozen=True, slots=True)
class LaneState:
    """What a syncer holds of one lane: float32 vectors of shape [lane.numel].

    `second_moment` is of outer Adam, whose first moment is `momentum`; None: of no other optimizer.
    """

    theta: Tensor
    published: Tensor
    momentum: Tensor
    second_moment: Tensor | None = None

    @property
    def vectors(self) -> dict[str, Tensor]:
        """Those that there are, by name, in the order in which a record holds them."""
        vectors = {name: getattr(self, name) for name in STATE_SECTIONS}
        if self.second_moment is not None:
            vectors[SECOND_MOMENT] = self.second_moment
        return vectors

    def clone(self) -> LaneState:
        """Copy all of them."""
        return LaneState(**{name: vector.clone() for name, vector in self.vectors.items()})


@dataclass(frozen=True, slots=True)
class PublicationRules:
    """How contributions become a version: codec names, outer optimizer, the run's seed, merge."""

    uplink_codec: str
    downlink_codec: str
    optimizer: OuterOptimizer
    seed: int
    merge: MergeRule = field(default_factory=MergeRule)

    def payload_codec(self, is_flush: bool) -> str:
        """Name the codec of the published payload; a flush is published once in float32."""
        return "float32" if is_flush else self.downlink_codec

    def check_successor(self, later: PublicationRules) -> None:
        """Check that versions made by these rules can be followed by some made by `later`.

        Raises:
            ConfigError: If islands would code otherwise, or the optimizer's state is another.
        """
        theirs = later.optimizer.has_second_moment
        for what, before, after in (
            ("outer.uplink_codec", self.uplink_codec, later.uplink_codec),
            ("outer.downlink_codec", self.downlink_codec, later.downlink_codec),
            ("a second moment of the optimizer", self.optimizer.has_second_moment, theirs),
        ):
            if before != after:
                raise ConfigError(
                    f"{what}: {before!r} before, {after!r} now: it is fixed while a run is under "
                    "way; resume the run with it (diloco coordinator RUN.toml --resume)"
                )

    def to_json(self) -> dict[str, Any]:
        """Write them for a record, so that it can be recomputed without a configuration."""
        content: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> PublicationRules:
        """Read what `to_json` wrote, among other things."""
        optimizer, merge = dict(content["optimizer"]), dict(content["merge"])
        optimizer["betas"] = tuple(optimizer["betas"])
        for name in ("plain_mean", "experts"):
            merge[name] = tuple(merge[name])
        return cls(
            content["uplink_codec"],
            content["downlink_codec"],
            OuterOptimizer(**optimizer),
            content["seed"],
            MergeRule(**merge),
        )


@dataclass(frozen=True, slots=True)
class LanePublication:
    """One lane of a new version: its state, the payload that travels, and digests of `published`.

    `digest` is of its values, `blake3` of their bytes.
    """

    state: LaneState
    payload: Buffer
    digest: bytes
    blake3: bytes


def lane_blake3(published: Tensor) -> bytes:
    """Hash the bytes of a lane, little-endian float32: the digest of a payload that is whole."""
    return blake3.blake3(to_bytes(published)).digest()


def decoder_of(uplink_codec: str, fragment: Fragment, lane_id: int) -> Callable[[Buffer], Tensor]:
    """Return what decodes a lane of a contribution: finite values, float32, fresh.

    The padding is zero, whatever an island sends in it: no island keeps what is not of a tensor.
    What is returned raises CodecError if the payload is malformed or holds a value that is not
    finite.
    """
    codec, numel = lane_codec(uplink_codec, fragment, lane_id), fragment.lanes[lane_id].numel
    padding = padding_of(fragment, lane_id)

    def decode(payload: Buffer) -> Tensor:
        values = codec.decode(from_bytes(payload), numel)
        for place in padding:
            values[place] = 0.0
        return values

    return decode


def part_decoder_of(
    uplink_codec: str, fragment: Fragment, lane_id: int, place: slice
) -> Callable[[ReadPart], Tensor]:
    """Return what decodes a part of a lane as `decoder_of` does all of it: values of `place`.

    Only the bytes of these values are read, and memory is theirs, but for a codec of another
    package, which decodes the lane each time.
    """
    part = lane_part(uplink_codec, fragment, lane_id, place)
    first, last = part.values.start, part.values.stop
    padding = [
        slice(max(gap.start, first) - first, min(gap.stop, last) - first)
        for gap in padding_of(fragment, lane_id)
        if gap.start < last and gap.stop > first
    ]

    def decode(read: ReadPart) -> Tensor:
        payload = b"".join(map(read, part.payload))
        values = part.codec.decode(from_bytes(payload), last - first)
        for gap in padding:
            values[gap] = 0.0
        asked = values[place.start - first : place.stop - first]
        return values if len(asked) == len(values) else asked.clone()

    return decode


def publish_lane_(
    state: LaneState,
    payloads: Iterable[Buffer],
    combination: Combination,
    rules: PublicationRules,
    *,
    fragment: Fragment,
    lane_id: int,
    key: RoundKey,
    is_flush: bool,
    on_delta: Callable[[Tensor], None] = lambda delta: None,
) -> LanePublication:
    """Merge the contributions to one lane and take the outer step, in place.

    Delta = sum_m c_m decode(payload_m) in the order given (sorted island ids); theta <- outer
    step, or theta - Delta for a flush; the payload is encode(theta - published), or theta itself
    where the codec publishes values; published <- published + decode(payload).

    Args:
        state: The lane at `key.version`; all but published becomes that of the next version, so
            that nothing is in memory twice; published stays, since it is being served.
        payloads: Encoded contributions, sorted by island id; at least one, asked for one by one.
        combination: The coefficients c_m, by range of the fragment's vector.
        rules: Codecs, outer optimizer, seed.
        fragment: The lane's fragment, as planned.
        lane_id: The lane.
        key: Of the round; its base version, counted from 0, sets the momentum ramp.
        is_flush: Plain step, moments neither read nor changed.
        on_delta: Is given each contribution as it was decoded, before any is merged with the next.

    Raises:
        AggregationError: If the result is not finite, or beyond what the downlink codec can send;
            theta and moments are worth nothing then.
    """
    lane = fragment.lanes[lane_id]
    decode = decoder_of(rules.uplink_codec, fragment, lane_id)

    def decoded(payload: Buffer) -> Tensor:
        delta = decode(payload)
        on_delta(delta)
        return delta

    delta = weighted_sum(map(decoded, payloads), combination.within(lane.start, lane.end))
    _outer_step_(state, delta, rules, fragment, lane_id, key, is_flush=is_flush)
    theta = state.theta
    codec = lane_codec(rules.payload_codec(is_flush), fragment, lane_id)
    change = theta if codec.publishes_values else theta - state.published
    moments = {n: v for n, v in state.vectors.items() if n not in ("theta", "published")}
    _check_finite(key.version, **moments)
    drawn_by = rounding_key(rules.seed, key.fragment_id, lane_id, key.version, key.attempt)
    try:
        encoded = codec.encode(change, drawn_by)
    except CodecError as error:
        # No codec encodes what is not finite; which it was is looked for only now.
        _check_finite(key.version, theta=theta, change=change)
        raise AggregationError(f"outer step from version {key.version}: {error}") from error
    published = apply_payload(codec, encoded, state.published)
    _check_finite(key.version, published=published)
    return LanePublication(
        replace(state, published=published),
        to_bytes(encoded),
        lane_digest(published),
        lane_blake3(published),
    )


def _outer_step_(
    state: LaneState,
    delta: Tensor,
    rules: PublicationRules,
    fragment: Fragment,
    lane_id: int,
    key: RoundKey,
    *,
    is_flush: bool,
) -> None:
    """Step parameters by the outer optimizer; buffers, and all in a flush, to the plain mean."""
    for place, is_buffer in buffer_runs(fragment, lane_id):
        theta, momentum = state.theta[place], state.momentum[place]
        second = None if state.second_moment is None else state.second_moment[place]
        if is_flush or is_buffer:
            flush_step_(theta, delta[place])
        else:
            rules.optimizer.step_(theta, momentum, delta[place], second, version=key.version)


def _check_finite(version: int, **vectors: Tensor) -> None:
    for name, values in vectors.items():
        if not is_finite(values):
            raise AggregationError(f"outer step from version {version}: {name} is not finite")


def apply_payload(codec: Codec, payload: Tensor, published: Tensor) -> Tensor:
    """Take the step from one published version to the next, as every island does.

    Returns:
        decode(payload) for a codec that publishes values, else published + decode(payload);
        fresh float32 of the shape of `published`.
    """
    values = codec.decode(payload, published.numel())
    return values if codec.publishes_values else torch.add(published, values, out=values)
