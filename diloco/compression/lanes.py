"""Which codec a lane has: the run's, or for tensors whose names match a pattern another one.

A codec of a run is named by "int4", or "int4 *norm.weight=float32 *.bias=bfloat16": the codec of
all tensors, then patterns (with * and ?) of names and their codecs, of which the first that matches
counts. So configurations, headers and records say with one word how a lane is to be read.

Buffers that islands average are sent in float32 whatever the codec.

Tensors start at block borders, so that a lane is a row of runs of one codec each. What fills up a
tensor's last block stays zero, also where a codec has no zero (int2).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from diloco.compression.base import Codec, Layout, check_flat, check_payload
from diloco.compression.random_bits import rounding_key
from diloco.compression.registry import get_codec
from diloco.errors import ConfigError
from diloco.outer.fragments import Entry, Fragment
from diloco.outer.patterns import check_match, matches


def lane_codec(name: str, fragment: Fragment, lane_id: int) -> Codec:
    """Return the codec of one lane.

    Raises:
        ConfigError: If `name` names a codec that there is not.
    """
    runs = lane_runs(name, fragment, lane_id)
    padding = () if all(codec.has_zero for codec, _ in runs) else padding_of(fragment, lane_id)
    return runs[0][0] if len(runs) == 1 and not padding else MixedCodec(name, runs, padding)


def lane_runs(name: str, fragment: Fragment, lane_id: int) -> tuple[tuple[Codec, int], ...]:
    """Return the codecs of one lane and how many values each has, in order.

    Raises:
        ConfigError: If `name` names a codec that there is not.
    """
    if not name.split():
        raise ConfigError(f"codec {name!r} of fragment {fragment.fragment_id} names no codec")
    main, *by_name = name.split()
    lane = fragment.lanes[lane_id]
    if not by_name and not any(entry.is_buffer for entry in fragment.entries):
        return ((get_codec(main), lane.numel),)
    parts = [
        (_codec_of(entry, main, by_name), min(end, lane.end) - max(entry.offset, lane.start))
        for entry, end in zip(fragment.entries, fragment.ends, strict=True)
    ]
    return tuple(
        (get_codec(codec), sum(numel for _, numel in run))
        for codec, run in groupby((p for p in parts if p[1] > 0), key=lambda part: part[0])
    )


def check_patterns(name: str, tensors: Iterable[str]) -> None:
    """Check that every pattern of a codec's name matches a tensor.

    Raises:
        ConfigError: Naming the pattern and some tensors.
    """
    known = sorted(tensors)
    for rule in name.split()[1:]:
        check_match("outer.codec_by_name", rule, rule.rpartition("=")[0], known)


def _codec_of(entry: Entry, main: str, by_name: Sequence[str]) -> str:
    if entry.is_buffer:
        return "float32"
    for rule in by_name:
        pattern, _, codec = rule.rpartition("=")
        if matches(entry.name, pattern):
            return codec
    return main


def padding_of(fragment: Fragment, lane_id: int) -> tuple[slice, ...]:
    """Return the places in a lane that belong to no tensor."""
    lane = fragment.lanes[lane_id]
    gaps = (
        (entry.offset + entry.end - entry.start, end)
        for entry, end in zip(fragment.entries, fragment.ends, strict=True)
    )
    clipped = ((max(start, lane.start), min(end, lane.end)) for start, end in gaps)
    return tuple(slice(a - lane.start, b - lane.start) for a, b in clipped if a < b)


@dataclass(frozen=True, slots=True)
class LanePart:
    """A part of a lane that is decoded on its own.

    Attributes:
        values: Of the lane; those that were asked for are among them.
        payload: Parts of the lane's payload that, joined, are the payload of these values.
        codec: Decodes it.
    """

    values: slice
    payload: tuple[slice, ...]
    codec: Codec


def lane_part(name: str, fragment: Fragment, lane_id: int, place: slice) -> LanePart:
    """Return the smallest part of a lane that holds the values of `place`, start < end.

    What its codec makes of padding is not zeroed.

    Raises:
        ConfigError: If `name` names a codec that there is not.
    """
    runs, payload, start = [], [], None
    at = at_byte = 0
    for codec, numel in lane_runs(name, fragment, lane_id):
        within = slice(max(0, place.start - at), min(numel, place.stop - at))
        if within.start < within.stop:
            layout = codec.layout or Layout(numel, (codec.wire_bytes(numel),))
            values, parts = layout.part(numel, within)
            start = at + values.start if start is None else start
            runs.append((codec, values.stop - values.start))
            payload += [slice(at_byte + p.start, at_byte + p.stop) for p in parts]
        at, at_byte = at + numel, at_byte + codec.wire_bytes(numel)
    assert start is not None, f"{place} is not in lane {lane_id}"
    values = slice(start, start + sum(numel for _, numel in runs))
    return LanePart(
        values, tuple(payload), runs[0][0] if len(runs) == 1 else MixedCodec(name, runs)
    )


class MixedCodec:
    """Runs of values of one lane, each in its codec, one after the other; publishes differences."""

    publishes_values = False

    has_zero = True
    layout = None  # `lane_part` knows its runs

    def __init__(
        self, name: str, runs: Sequence[tuple[Codec, int]], padding: Sequence[slice] = ()
    ) -> None:
        """Assign only.

        Args:
            name: Of all.
            runs: Codecs and numbers of values, whole blocks but for the last.
            padding: Places whose values are zero, whatever their codec makes of that.
        """
        self.name = name
        self._runs = runs
        self._padding = padding

    def wire_bytes(self, numel: int) -> int:
        """Return the sum over the runs, which must have `numel` values together."""
        assert numel == sum(self._numels), f"{numel} values in a lane of {self._numels}"
        return sum(codec.wire_bytes(run) for codec, run in self._runs)

    def encode(self, values: Tensor, key: int = 0) -> Tensor:
        """Encode each run under a key of its own; see `Codec.encode`."""
        check_flat(self.name, values)
        payloads = [
            codec.encode(run, rounding_key(key, i))
            for i, ((codec, _), run) in enumerate(
                zip(self._runs, torch.split(values, self._numels), strict=True)
            )
        ]
        return torch.cat(payloads)

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        """Decode each run; see `Codec.decode`."""
        check_payload(self.name, payload, self.wire_bytes(numel), numel)
        sizes = [codec.wire_bytes(run) for codec, run in self._runs]
        values = payload.new_empty(numel, dtype=torch.float32)
        for (codec, run), part, into in zip(
            self._runs, torch.split(payload, sizes), torch.split(values, self._numels), strict=True
        ):
            into.copy_(codec.decode(part, run))
        for place in self._padding:
            values[place] = 0.0
        return values

    def check(self, payload: Tensor, numel: int) -> None:
        """Check each run; see `Codec.check`."""
        check_payload(self.name, payload, self.wire_bytes(numel), numel)
        sizes = [codec.wire_bytes(run) for codec, run in self._runs]
        for (codec, run), part in zip(self._runs, torch.split(payload, sizes), strict=True):
            codec.check(part, run)

    @property
    def _numels(self) -> list[int]:
        return [numel for _, numel in self._runs]
