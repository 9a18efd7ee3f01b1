"""An island that says whatever a test wants, and a syncer's worker that takes time and can die."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import blake3
import torch

from diloco.compression.base import to_bytes
from diloco.compression.registry import get_codec
from diloco.protocol.rounds.messages import key_message, outcome_of
from diloco.protocol.rounds.terms import OutcomeKind, RoundKey
from diloco.protos import fragment_pb2 as wire
from diloco.transport.contracts import PROTOCOL_VERSION, Buffer, Reply
from diloco.transport.errors import NotYet
from diloco.transport.transfer import Transfer
from tests.virtual_run import Setting, VirtualRun, grant

#: Parameters of a fragment of two lanes.
NUMEL = 40_000
KEY = RoundKey(0, 0, 0, 0)


class RawIsland:
    """An island that says whatever a test wants, over the wire."""

    def __init__(self, run: VirtualRun, name: str, incarnation: int = 1) -> None:
        self.transport = run.network.connect("syncer")
        self.name = name
        self.grant = grant(name, incarnation)
        self.lanes = run.setting.plan().fragments[0].lanes
        self.codec = run.setting.uplink_codec

    async def call(self, method: str, header: Any, payload: Buffer = b"") -> Reply:
        header.protocol_version = header.protocol_version or PROTOCOL_VERSION
        header.grant.CopyFrom(self.grant)
        transfer = Transfer()
        while True:
            try:
                return await self.transport.call(
                    method,
                    header.SerializeToString(),
                    payload,
                    deadline_s=100.0,
                    max_reply_bytes=1 << 22,
                    transfer=transfer,
                )
            except NotYet:
                transfer.asks_first = True
                await asyncio.sleep(0.1)

    async def poll(self, *outstanding: RoundKey, wait_s: float = 0.0, **known: Any) -> Any:
        request = wire.PollRequest(
            outstanding=[key_message(key) for key in outstanding], wait_s=wait_s, **known
        )
        reply = await self.call("fragment.poll", request)
        return wire.PollReply.FromString(reply.header)

    async def upload(self, value: float = 0.0, fragment_id: int = 0) -> list[wire.Ack]:
        lanes = range(len(self.lanes))
        return [await self.upload_lane(lane_id, value, fragment_id) for lane_id in lanes]

    async def upload_lane(self, lane_id: int, value: float = 0.0, fragment_id: int = 0) -> wire.Ack:
        vector = torch.full((self.lanes[lane_id].numel,), value)
        payload = to_bytes(vector.view(torch.uint8))
        digest = blake3.blake3(payload).digest()
        header = wire.UploadHeader(fragment_id=fragment_id, lane_id=lane_id, digest=digest)
        return wire.Ack.FromString((await self.call("fragment.upload", header, payload)).header)

    async def submit(
        self,
        key: RoundKey = KEY,
        lane_id: int = 0,
        value: float = 1.0,
        payload: Buffer | None = None,
        **changes: Any,
    ) -> wire.SubmitReply:
        if payload is None:
            vector = torch.full((self.lanes[lane_id].numel,), value)
            payload = to_bytes(get_codec(self.codec).encode(vector))
        header = wire.SubmitHeader(
            key=key_message(key),
            lane_id=lane_id,
            sent_at_inner_step=4,
            weight_tokens=4,
            weight_steps=4,
            codec=self.codec,
            digest=blake3.blake3(payload).digest(),
        )
        header.MergeFrom(wire.SubmitHeader(**changes))
        reply = await self.call("fragment.submit", header, payload)
        return wire.SubmitReply.FromString(reply.header)

    async def contribute(self, key: RoundKey = KEY, value: float = 1.0, **changes: Any) -> None:
        for lane_id in range(len(self.lanes)):
            reply = await self.submit(key, lane_id, value, **changes)
            assert reply.status == wire.SUBMIT_STATUS_RECEIVED, reply

    async def decline(self, key: RoundKey = KEY) -> wire.Ack:
        header = wire.DeclineRequest(key=key_message(key), reason="not finite")
        return wire.Ack.FromString((await self.call("fragment.decline", header)).header)

    async def end(self, key: RoundKey = KEY) -> OutcomeKind | None:
        reply = await self.poll(key)
        return outcome_of(reply.outcomes[0]).kind if reply.outcomes else None

    async def published(self, version: int) -> list[float]:
        """First value of every lane, fetched dense."""
        first = []
        for lane_id in range(len(self.lanes)):
            header = wire.FetchHeader(
                version=version, lane_ids=[lane_id], kind=wire.FETCH_KIND_DENSE
            )
            reply = await self.call("fragment.fetch", header)
            assert wire.FetchReply.FromString(reply.header).status == wire.FETCH_STATUS_OK
            first.append(torch.frombuffer(reply.payload, dtype=torch.float32)[0].item())
        return first


class Incoming:
    """Lane 0 of a contribution as its handler sees it, the payload `read_s` away."""

    method, peer, has_asked = "fragment.submit", "test", True

    def __init__(self, island: RawIsland, read_s: float = 0.0, **changes: Any) -> None:
        self._payload = bytes(4 * island.lanes[0].numel)
        self.digest = blake3.blake3(self._payload).digest()
        header = wire.SubmitHeader(
            protocol_version=PROTOCOL_VERSION,
            grant=island.grant,
            key=key_message(KEY),
            weight_tokens=4,
            codec="float32",
            digest=self.digest,
        )
        header.MergeFrom(wire.SubmitHeader(**changes))
        self.header = header.SerializeToString()
        self.payload_bytes = len(self._payload)
        self.is_read = False
        self._read_s = read_s

    async def read_payload(self) -> Buffer:
        self.is_read = True
        await asyncio.sleep(self._read_s)
        return self._payload


class Dead(Exception):
    """What a test raises where a process is to die."""


class SlowWorker:
    """One piece of work at a time, each taking virtual time; `Dead` ends it in the middle."""

    def __init__(self, before_s: float = 0.0, after_s: float = 0.0) -> None:
        self.before_s, self.after_s = before_s, after_s
        self.died = asyncio.Event()
        self._busy = asyncio.Lock()

    async def run(self, work: Callable[[], Any]) -> Any:
        async with self._busy:
            await asyncio.sleep(self.before_s)
            try:
                result = work()
            except Dead:
                self.died.set()
                await asyncio.Event().wait()
            await asyncio.sleep(self.after_s)
            return result


async def founded(setting: Setting, names: str = "ab") -> tuple[VirtualRun, list[RawIsland]]:
    """A run whose version 0 is durable and whose first round is open."""
    run = VirtualRun(setting)
    await run.start_syncer()
    islands = [RawIsland(run, name) for name in names]
    for island in islands:
        await island.poll()
    assert all(ack.is_accepted for ack in await islands[0].upload())
    return run, islands


async def restart(run: VirtualRun) -> None:
    await run.kill_syncer()
    await run.start_syncer()
