"""An island that trains nothing: it sends payloads to a syncer and waits for the outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from google.protobuf.message import Message

from diloco.errors import DilocoError
from diloco.outer.fragments import Fragment
from diloco.protocol.rounds.messages import key_message
from diloco.protocol.rounds.terms import RoundKey
from diloco.protos import fragment_pb2 as wire
from diloco.protos.control_pb2 import Grant
from diloco.transport.contracts import PROTOCOL_VERSION, Buffer, Reply, Transport
from diloco.transport.errors import NotYet
from diloco.transport.transfer import Transfer
from diloco.versions.store import FragmentStore
from diloco.versions.version import founding_record

_DEADLINE_S = 300.0
_POLL_S = 20.0
_STATE_BYTES = 1 << 20


def lane_values(numel: int, seed: int) -> torch.Tensor:
    """Draw a pseudo-gradient: seeded, normal, small."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).mul_(1e-3)


def write_founding(directory: Path, fragment: Fragment) -> None:
    """Make version 0 of zeros durable: without a coordinator a syncer founds nothing."""
    zeros = {lane.lane_id: bytes(4 * lane.numel) for lane in fragment.lanes}
    store = FragmentStore(directory, fragment, 1)
    store.recover()  # makes its directory
    store.commit(founding_record(fragment, zeros, 0))


class SendingIsland:
    """One island of a run with one fragment; its rounds are all on attempt 0."""

    def __init__(self, transport: Transport, grant: Grant, fragment: Fragment, codec: str) -> None:
        """Assign only; `codec` is the run's uplink codec."""
        self._transport = transport
        self._grant = grant
        self._fragment = fragment
        self._codec = codec
        self._asks_first = False

    async def join(self) -> None:
        """Present the grant."""
        await self._poll(wire.PollRequest())

    async def submit(self, version: int, lane_id: int, payload: Buffer, digest: bytes) -> None:
        """Send one lane of the contribution on top of `version`.

        Raises:
            DilocoError: If the syncer does not take it.
        """
        header = wire.SubmitHeader(
            key=key_message(RoundKey(0, 0, version, 0)),
            lane_id=lane_id,
            sent_at_inner_step=version + 1,
            weight_tokens=1,
            weight_steps=1,
            codec=self._codec,
            digest=digest,
        )
        reply = await self._call("fragment.submit", header, payload)
        answer = wire.SubmitReply.FromString(reply.header)
        if answer.status != wire.SUBMIT_STATUS_RECEIVED:
            raise DilocoError(f"the bench's syncer did not take a lane: {answer}")

    async def contribute(
        self, version: int, payloads: Sequence[Buffer], digests: Iterable[bytes]
    ) -> None:
        """Send all lanes at once."""
        lanes = enumerate(zip(payloads, digests, strict=True))
        await asyncio.gather(*(self.submit(version, i, *lane) for i, lane in lanes))

    async def published(self, version: int) -> None:
        """Wait until `version` is published."""
        request = wire.PollRequest(wait_s=_POLL_S)
        while True:
            reply = await self._poll(request)
            if reply.fragments[0].is_founded and reply.fragments[0].version >= version:
                return
            request.ClearField("known")
            request.known.extend(reply.fragments)
            request.known_epoch = reply.syncer_epoch

    async def close(self) -> None:
        """Release the connection."""
        await self._transport.close()

    async def _poll(self, request: wire.PollRequest) -> wire.PollReply:
        reply = wire.PollReply.FromString((await self._call("fragment.poll", request)).header)
        if reply.is_fenced or reply.HasField("fatal"):
            raise DilocoError(f"the bench's syncer gave up: {reply.message or reply.fatal.reason}")
        self._asks_first = reply.asks_first
        return reply

    async def _call(self, method: str, header: Message, payload: Buffer = b"") -> Reply:
        header.protocol_version = PROTOCOL_VERSION  # type: ignore[attr-defined]  # all have both
        header.grant.CopyFrom(self._grant)  # type: ignore[attr-defined]
        size = 4 * max(lane.numel for lane in self._fragment.lanes)
        transfer = Transfer(asks_first=self._asks_first) if payload else None
        while True:
            try:
                return await self._transport.call(
                    method,
                    header.SerializeToString(),
                    payload,
                    deadline_s=_DEADLINE_S,
                    max_reply_bytes=size + _STATE_BYTES,
                    transfer=transfer,
                )
            except NotYet:
                assert transfer is not None, "only payloads wait"
                transfer.asks_first = True
