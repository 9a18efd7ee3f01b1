"""Lanes of a published version, from a syncer whose answers are written down here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from diloco.compression.base import to_bytes
from diloco.compression.lanes import lane_codec
from diloco.island.exchange.staging import stage_lanes
from diloco.island.lanes.place import LanePlace
from diloco.outer.fragments import TensorSpec, make_plan
from diloco.protos import fragment_pb2 as wire
from diloco.telemetry.events import DigestMismatch, Event, FragmentStaged, PhaseDone
from diloco.transport.contracts import Buffer
from diloco.versions.publication import lane_blake3
from diloco.versions.value_digest import lane_digest, version_digest

FRAGMENT = make_plan([TensorSpec("a", (2048, 128))], num_fragments=1, num_lanes=16).fragments[0]
_T = TypeVar("_T")
LANES: dict[int, Tensor] = {lane.lane_id: torch.full((lane.numel,), 1.0) for lane in FRAGMENT.lanes}


class Syncer:
    """Answers a fetch of whole lanes when all of them are asked for; of payloads at once."""

    def __init__(self, codec: str = "") -> None:
        self._codec = codec
        self._all_asked = asyncio.Barrier(len(LANES))

    async def fetch(
        self,
        fragment_id: int,
        version: int,
        lane_ids: Sequence[int],
        kind: wire.FetchKind,
        *,
        max_reply_bytes: int,
    ) -> tuple[wire.FetchReply, Buffer]:
        if kind == wire.FETCH_KIND_PAYLOAD:
            return wire.FetchReply(status=wire.FETCH_STATUS_OK, codec=self._codec), b"payload"
        (lane_id,) = lane_ids
        async with asyncio.timeout(10.0):
            await self._all_asked.wait()
        digest = lane_blake3(LANES[lane_id])
        reply = wire.FetchReply(status=wire.FETCH_STATUS_OK, codec="float32", digest=digest)
        return reply, to_bytes(LANES[lane_id].view(torch.uint8))


STAGED = FragmentStaged(0, 1, version_digest([lane_digest(LANES[n]) for n in LANES]).hex())


def staged(syncer: Syncer, digests: Sequence[bytes], heard: list[Event]) -> dict[int, Tensor]:
    lanes, change = asyncio.run(
        stage_lanes(
            syncer,  # type: ignore[arg-type]
            {lane_id: torch.zeros_like(values) for lane_id, values in LANES.items()},
            fragment=FRAGMENT,
            base=0,
            version=1,
            digests=digests,
            codec="float32",
            place=LanePlace(),
            on_event=lambda e: None if isinstance(e, PhaseDone) else heard.append(e),
        )
    )
    assert change == 1.0
    return lanes


def test_whole_lanes_of_a_group_are_fetched_at_once() -> None:
    heard: list[Event] = []
    lanes = staged(Syncer(), (), heard)

    assert list(lanes) == list(LANES)
    assert all(torch.equal(lanes[n], LANES[n]) for n in LANES)
    assert heard == [STAGED], "hashed by anyone who staged it, though no digest was known"


@pytest.mark.parametrize("codec", ["", "int5"], ids=["no codec", "an unknown codec"])
def test_a_payload_of_no_known_codec_is_healed_by_whole_lanes(codec: str) -> None:
    heard: list[Event] = []
    lanes = staged(Syncer(codec), [lane_digest(LANES[n]) for n in LANES], heard)

    assert all(torch.equal(lanes[n], LANES[n]) for n in LANES)
    assert heard == [*(DigestMismatch(0, 1, n) for n in LANES), STAGED]


class Late(LanePlace):
    """Holds that nothing is computed before `syncer` has been asked for all of it."""

    def __init__(self, syncer: Stepping) -> None:
        super().__init__()
        self.syncer = syncer

    async def run(self, work: Callable[[], _T]) -> _T:
        assert self.syncer.asked == [2, 3, 4], "lanes would wait on the device for a payload"
        return await super().run(work)


class Stepping(Syncer):
    """Retains payloads in int8, the same of every version."""

    def __init__(self, delta: Tensor) -> None:
        super().__init__("int8")
        self.asked: list[int] = []
        codecs = (lane_codec("int8", FRAGMENT, n) for n in LANES)
        self._payload = torch.cat([codec.encode(delta) for codec in codecs])

    async def fetch(
        self, fragment_id: int, version: int, lane_ids: Sequence[int], *_: object, **__: object
    ) -> tuple[wire.FetchReply, Buffer]:
        assert list(lane_ids) == list(LANES)
        self.asked.append(version)
        reply = wire.FetchReply(status=wire.FETCH_STATUS_OK, codec="int8")
        return reply, to_bytes(self._payload)


def test_lanes_of_an_island_far_behind_wait_on_no_device_for_payloads() -> None:
    delta = torch.arange(-8192.0, 8192.0) / 8192
    syncer, codec = Stepping(delta), lane_codec("int8", FRAGMENT, 0)
    step = codec.decode(codec.encode(delta), delta.numel())
    expected = step + step + step
    staging = stage_lanes(
        syncer,  # type: ignore[arg-type]
        {lane_id: torch.zeros_like(values) for lane_id, values in LANES.items()},
        fragment=FRAGMENT,
        base=1,
        version=4,
        digests=[lane_digest(expected)] * len(LANES),
        codec="int8",
        place=Late(syncer),
        on_event=lambda event: None,
    )

    lanes, change = asyncio.run(staging)

    assert all(torch.equal(lane, expected) for lane in lanes.values())
    assert change == float(expected.abs().max())
