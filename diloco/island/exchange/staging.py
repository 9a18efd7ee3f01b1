"""Fetches published versions and verifies them: the next one, or the newest, or what was agreed.

An island that is k versions behind takes k retained payloads where they are smaller than the whole,
and otherwise the whole; only the last digest is held against the result.

Staging changes neither anchor nor model.

Source: PROTOCOL.md, "Staging", "Digests" and "Runs on arrival".
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import blake3
from torch import Tensor
from torch.profiler import record_function

from diloco.compression.base import from_bytes
from diloco.compression.lanes import lane_codec
from diloco.compression.registry import get_codec
from diloco.errors import CodecError, CoordinatorUnavailable, DilocoError
from diloco.island.exchange.calls import FragmentCalls, LinkParts
from diloco.island.exchange.fragment_state import IslandFragment
from diloco.island.lanes.place import LanePlace
from diloco.loop_clock import loop_now
from diloco.outer.fragments import Fragment
from diloco.outer.pseudo_gradient import largest_change
from diloco.protos import fragment_pb2 as wire
from diloco.telemetry.events import CaughtUp, DigestMismatch, Event, FragmentStaged, PhaseDone
from diloco.transport.contracts import Buffer
from diloco.versions.publication import MOST_TOGETHER, apply_payload
from diloco.versions.value_digest import lane_digest, version_digest

logger = logging.getLogger(__name__)

#: Fetches of a whole lane that does not match its digest, before that is an error.
_TRIES = 3


class VersionGone(CoordinatorUnavailable):
    """The syncer has published a version, and retains it no more."""


async def stage_lanes(
    calls: FragmentCalls,
    anchor: Mapping[int, Tensor],
    *,
    fragment: Fragment,
    base: int,
    version: int,
    digests: Sequence[bytes],
    codec: str,
    place: LanePlace,
    on_event: Callable[[Event], None],
) -> tuple[dict[int, Tensor], float]:
    """Take lanes from their anchor to a later version, small ones together.

    A lane that does not come out as published (the anchor, a codec or a payload is not what the
    syncer's was) is reported and taken as a whole instead.

    Args:
        calls: Way to the fragment's syncer.
        anchor: Lane id -> the lane at `base`, float32; unchanged.
        fragment: The lanes' fragment, as planned.
        base: Version of the anchor.
        version: Version to reach, > `base`.
        digests: Of the published fragment, by lane; empty when they are not known, which takes
            every lane as a whole.
        codec: Of payloads, to foresee their sizes where there are several.
        place: Of the lanes.
        on_event: Hears of a mismatch, of versions leapt over, and what a whole fragment came to.

    Returns:
        The lanes where they are kept, and the largest change that they make to a value.

    Raises:
        CodecError: If even a whole lane does not match.
        VersionGone: If the syncer has it no more.
        DilocoError: If the syncer does not have it, or cannot be reached.
    """
    lane_ids = sorted(anchor)
    has_deltas = bool(digests) and (
        version == base + 1 or is_smaller(fragment, lane_ids, version - base, codec)
    )
    staging = (
        _stage_together(
            calls,
            anchor,
            fragment,
            base if has_deltas else None,
            version,
            some,
            digests,
            place,
            on_event,
        )
        for some in grouped(fragment, lane_ids)
    )
    lanes: dict[int, Tensor] = {}
    num_whole, change = 0, 0.0
    for values, fetched, largest in await asyncio.gather(*staging):
        lanes.update(values)
        num_whole += fetched
        change = max(change, largest)
    if version > base + 1:
        on_event(CaughtUp(fragment.fragment_id, base, version, "whole" if num_whole else "deltas"))
    if len(lanes) == len(fragment.lanes):
        # Every lane was hashed here, and is what was announced.
        own = digests or await place.run(lambda: digests_of(lanes, place))
        on_event(FragmentStaged(fragment.fragment_id, version, version_digest(own).hex()))
    return lanes, change


def digests_of(lanes: Mapping[int, Tensor], place: LanePlace) -> list[bytes]:
    """Digest lanes where they are computed with, in their order."""
    return [lane_digest(place.there(lanes[lane_id])) for lane_id in sorted(lanes)]


def largest_change_of(
    anchor: Mapping[int, Tensor], lanes: Mapping[int, Tensor], place: LanePlace
) -> float:
    """Return the largest change that lanes make to a value of their anchor."""
    changes = (
        largest_change(place.there(anchor[lane_id]), place.there(values))
        for lane_id, values in lanes.items()
    )
    return max(changes, default=0.0)


def is_smaller(fragment: Fragment, lane_ids: Iterable[int], num_deltas: int, codec: str) -> bool:
    """Whether the payloads of so many versions are smaller than the values, 4 B each."""
    numels = {lane_id: fragment.lanes[lane_id].numel for lane_id in lane_ids}
    payload_bytes = sum(
        lane_codec(codec, fragment, lane_id).wire_bytes(numel) for lane_id, numel in numels.items()
    )
    return num_deltas * payload_bytes < 4 * sum(numels.values())


def grouped(fragment: Fragment, lane_ids: Iterable[int]) -> list[list[int]]:
    """Put lanes together, in order, that have at most `MOST_TOGETHER` values; larger ones alone."""
    groups: list[list[int]] = []
    numel = MOST_TOGETHER
    for lane_id in lane_ids:
        size = fragment.lanes[lane_id].numel
        if numel + size > MOST_TOGETHER:
            groups.append([])
            numel = 0
        groups[-1].append(lane_id)
        numel += size
    return groups


async def _stage_together(
    calls: FragmentCalls,
    anchor: Mapping[int, Tensor],
    fragment: Fragment,
    base: int | None,
    version: int,
    lane_ids: Sequence[int],
    digests: Sequence[bytes],
    place: LanePlace,
    on_event: Callable[[Event], None],
) -> tuple[dict[int, Tensor], int, float]:
    """Stage lanes by their deltas from `base` on, or whole.

    Returns:
        The lanes, how many came whole, and the largest change.
    """
    staged, change = dict[int, Tensor](), 0.0
    if base is not None:
        with contextlib.suppress(VersionGone):  # then whole, or that is gone, too
            payloads = await _payloads(calls, fragment, base, version, lane_ids, on_event)
            began = loop_now()
            own = {lane_id: anchor[lane_id] for lane_id in lane_ids}
            step = functools.partial(_stepped, own, payloads, fragment, digests, place)
            staged, change = await place.run(step)
            on_event(_phase("decode", fragment, version, lane_ids, began))
            for lane_id in lane_ids:
                if lane_id not in staged:
                    on_event(DigestMismatch(fragment.fragment_id, version, lane_id))
    missing = [lane_id for lane_id in lane_ids if lane_id not in staged]
    began = loop_now()
    fetching = (
        fetch_lane(
            calls,
            fragment.fragment_id,
            version,
            lane_id,
            numel=fragment.lanes[lane_id].numel,
            digest=digests[lane_id] if digests else b"",
            place=place,
        )
        for lane_id in missing
    )
    fetched = dict(zip(missing, await asyncio.gather(*fetching), strict=True))
    if missing:
        on_event(_phase("fetch", fragment, version, missing, began))
        largest = await place.run(lambda: largest_change_of(anchor, fetched, place))
        change = max(change, largest)
    return {**staged, **fetched}, len(missing), change


async def _payloads(
    calls: FragmentCalls,
    fragment: Fragment,
    base: int,
    version: int,
    lane_ids: Sequence[int],
    on_event: Callable[[Event], None],
) -> list[tuple[str, Buffer]]:
    """Fetch the payloads of all versions after the base, each with its codec.

    Together they are smaller than the lanes (`is_smaller`), which wait for none on a device.

    Raises:
        VersionGone: If the syncer retains one of them no more.
    """
    numel = sum(fragment.lanes[lane_id].numel for lane_id in lane_ids)
    payloads = []
    for step in range(base + 1, version + 1):
        began = loop_now()
        reply, payload = await _fetch(
            calls, fragment.fragment_id, step, lane_ids, wire.FETCH_KIND_PAYLOAD, numel
        )
        on_event(_phase("fetch", fragment, step, lane_ids, began))
        payloads.append((reply.codec, payload))
    return payloads


def _stepped(
    anchor: Mapping[int, Tensor],
    payloads: Iterable[tuple[str, Buffer]],
    fragment: Fragment,
    digests: Sequence[bytes],
    place: LanePlace,
) -> tuple[dict[int, Tensor], float]:
    """Apply the payloads of one version after the other.

    Returns:
        The lanes that match their digests, kept, and the largest change.
    """
    anchor = {lane_id: place.there(lane) for lane_id, lane in anchor.items()}
    values = anchor
    for codec, payload in payloads:
        with record_function("diloco/decode"):
            here = from_bytes(payload).to(place.device)
            steps = list(_steps(codec, here, values, fragment, list(anchor)))
        values = {lane_id: stepped for lane_id, stepped in steps if stepped is not None}
    lanes, change = {}, 0.0
    for lane_id, stepped in values.items():
        if lane_digest(stepped) == digests[lane_id]:
            lanes[lane_id] = place.kept(stepped)
            change = max(change, largest_change(anchor[lane_id], stepped))
    return lanes, change


async def fetch_lane(
    calls: FragmentCalls,
    fragment_id: int,
    version: int,
    lane_id: int,
    *,
    numel: int,
    digest: bytes,
    place: LanePlace,
) -> Tensor:
    """Take one published lane as a whole: `numel` float32 values.

    Args:
        calls: Way to the fragment's syncer.
        fragment_id: The lane's fragment.
        version: Version to fetch.
        lane_id: The lane.
        numel: Its number of values.
        digest: Of the published lane; empty when it is not known: then the payload is held against
            what the syncer's reply says of it.
        place: Of the lanes.

    Raises:
        CodecError: If it does not match the digest, three times in a row.
        DilocoError: If the syncer does not have it, or cannot be reached.
    """
    for _ in range(_TRIES):  # what a link damages now and then is no reason to end an island
        reply, payload = await _fetch(
            calls, fragment_id, version, [lane_id], wire.FETCH_KIND_DENSE, numel
        )
        said = digest or reply.digest
        decode = functools.partial(_whole, payload, numel, place, by_values=bool(digest))
        values, found = await place.run(decode)
        if said == found:
            return values
    raise CodecError(
        f"lane {lane_id} of fragment {fragment_id}, version {version}, does not match the "
        f"syncer's digest even when fetched as a whole, {_TRIES} times"
    )


def _whole(
    payload: Buffer, numel: int, place: LanePlace, *, by_values: bool
) -> tuple[Tensor, bytes]:
    """Decode a lane that came as a whole; returns it, kept, and its digest."""
    values = get_codec("float32").decode(from_bytes(payload), numel).to(place.device)
    found = lane_digest(values) if by_values else blake3.blake3(payload).digest()
    return place.kept(values), found


async def _fetch(
    calls: FragmentCalls,
    fragment_id: int,
    version: int,
    lane_ids: Sequence[int],
    kind: wire.FetchKind,
    numel: int,
) -> tuple[wire.FetchReply, Buffer]:
    reply, payload = await calls.fetch(
        fragment_id, version, lane_ids, kind, max_reply_bytes=4 * numel
    )
    if reply.status == wire.FETCH_STATUS_FENCED:
        raise calls.fenced(reply.message)
    if reply.status != wire.FETCH_STATUS_OK:
        is_gone = reply.status == wire.FETCH_STATUS_GONE
        raise (VersionGone if is_gone else CoordinatorUnavailable)(
            f"version {version} of fragment {fragment_id}, lanes {list(lane_ids)}, cannot be had "
            f"from the syncer: {reply.message}"
        )
    return reply, payload


def _steps(
    codec: str,
    rest: Tensor,
    values: Mapping[int, Tensor],
    fragment: Fragment,
    lane_ids: Sequence[int],
) -> Iterator[tuple[int, Tensor | None]]:
    """Apply the lanes' payloads, which follow each other; None where one cannot be one."""
    for lane_id in lane_ids:
        try:
            its_codec = lane_codec(codec, fragment, lane_id)
            size = its_codec.wire_bytes(fragment.lanes[lane_id].numel)
            part, rest = rest[:size], rest[size:]
            yield lane_id, apply_payload(its_codec, part, values[lane_id])
        except (DilocoError, KeyError):  # no codec, no payload, or no step before this one
            yield lane_id, None


def _phase(
    phase: str, fragment: Fragment, version: int, lane_ids: Sequence[int], began: float
) -> PhaseDone:
    """Tell of a phase that began then; `version` is the one that it makes."""
    lane_id = lane_ids[0] if len(lane_ids) == 1 else -1
    return PhaseDone(phase, fragment.fragment_id, version - 1, lane_id, loop_now() - began)


class Stager:
    """Chooses the versions that one rank stages, one of a fragment at a time.

    In a scheduled run every version is merged, one after the other. On arrival versions may be left
    out: a rank begins with the newest that it knows, and turns to the one that its leader names
    (`pace`).
    """

    def __init__(self, parts: LinkParts) -> None:
        """Assign only."""
        self._parts = parts
        self._may_leap = parts.rules.on_arrival
        self._under_way: dict[int, asyncio.Task[None]] = {}

    def look(self, fragment: IslandFragment) -> None:
        """Begin with what is to be staged next, if it is published and nothing is staged."""
        anchored = fragment.anchor_version
        if anchored < 0 or fragment.staging_version > anchored:
            return
        version = self._next(fragment)
        if version <= max(anchored, fragment.gone_version) or version > fragment.state.version:
            return
        fragment.staging_version = version
        self._under_way[fragment.fragment_id] = self._parts.tasks.spawn(
            self._stage(fragment, version)
        )

    def aim(self, fragment: IslandFragment, version: int) -> None:
        """Stage this version, whatever was begun; a rank that does not know it yet waits for it."""
        fragment.aimed_version = version
        if fragment.staging_version == version:
            return
        if (other := self._under_way.pop(fragment.fragment_id, None)) is not None:
            other.cancel()
        fragment.staged, fragment.staged_version, fragment.staging_version = {}, -1, -1
        self.look(fragment)

    def _next(self, fragment: IslandFragment) -> int:
        if not self._may_leap:
            return fragment.anchor_version + 1
        is_aimed = fragment.aimed_version > fragment.anchor_version
        return fragment.aimed_version if is_aimed else fragment.state.version

    async def _stage(self, fragment: IslandFragment, version: int) -> None:
        announced = fragment.announced.get(version)
        try:
            staged, change = await stage_lanes(
                self._parts.calls,
                fragment.anchor,
                fragment=self._parts.plan.fragments[fragment.fragment_id],
                base=fragment.anchor_version,
                version=version,
                digests=() if announced is None else tuple(announced.lane_digests),
                codec="" if announced is None else announced.payload_codec,
                place=self._parts.place,
                on_event=self._parts.on_event,
            )
        except VersionGone as gone:
            if not self._may_leap:
                raise
            logger.info("a newer version is staged instead: %s", gone)
            fragment.gone_version, fragment.staging_version = version, -1
            self.look(fragment)
        else:
            fragment.stage(staged, version, change)
        self._parts.tasks.notify()
