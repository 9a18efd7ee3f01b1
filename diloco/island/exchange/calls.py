"""Makes the calls of a carrier to one syncer: builds headers, reads replies.

Nothing is decided here: `exchange` knows what to say and what an answer means, `retried_calls` how
long it is said again.

Source: PROTOCOL.md, "One fragment, one round".
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import blake3

from diloco.errors import Fenced
from diloco.island.exchange.damage import LineDamage
from diloco.island.exchange.retried_calls import RetriedCalls, SyncerReach
from diloco.island.lanes.place import LanePlace
from diloco.outer.fragments import Plan
from diloco.protocol.island.ledger import Outstanding
from diloco.protocol.rounds.messages import MOST_UPLOADS, key_message
from diloco.protocol.rounds.terms import RoundKey
from diloco.protos import fragment_pb2 as wire
from diloco.protos.control_pb2 import Grant
from diloco.tasks import Tasks
from diloco.telemetry.events import Event
from diloco.transport.contracts import PROTOCOL_VERSION, Buffer, Transport
from diloco.transport.retry import RetryPolicy

_POLL_WAIT_S = 20.0
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ExchangeRules:
    """How a carrier contributes and how long it tries.

    Args:
        uplink_codec: Codec of contributions (`lane_codec`).
        error_feedback: Whether the quantisation error joins the next contribution.
        rpc_deadline_s: Bound of one call; a call may wait for a slow link.
        policy: Waits between calls without an answer; its budget is of syncers and coordinator:
            after so long without any answer the island gives up (exit 30).
        seed: Of the run; stochastic rounding draws from it.
        on_arrival: Whether rounds open and versions come at any time, and some are left out.
        error_feedback_decay: Share of the quantisation error that joins it.
        since_send: Whether merges keep what was trained since the send: then what a payload carries
            is kept, too.
    """

    uplink_codec: str
    error_feedback: bool
    rpc_deadline_s: float
    policy: RetryPolicy
    seed: int
    on_arrival: bool = False
    error_feedback_decay: float = 1.0
    since_send: bool = False


def fenced_error(by: str, grant: Grant, refusal: str) -> Fenced:
    """Return the error of an island whose calls are refused because of their grant."""
    return Fenced(
        f"{by} refuses island {grant.island!r}, incarnation {grant.incarnation}: {refusal}. See "
        f"whether diloco island runs twice for it; after a resume of the run, start it again"
    )


class SyncerCalls:
    """One rank's connection to the syncer, over a control and a data transport.

    Whole models let the payloads of rounds go first. Where the syncer has no room for all payloads
    at once (`PollReply.asks_first`), each is sent when it is its turn there. `epoch` is the newest
    one of the syncer that was seen.
    """

    def __init__(
        self,
        control: Transport,
        data: Transport,
        grant: Grant,
        *,
        rpc_deadline_s: float,
        policy: RetryPolicy,
        rng: random.Random,
        reach: SyncerReach | None = None,
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        """Assign only; the deadline, the policy and the reach are those of `RetriedCalls`.

        `on_event` is called for each message that was damaged on the way.
        """
        self._grant = grant
        self.epoch = 0
        self._uploading = asyncio.Semaphore(MOST_UPLOADS)
        self._calls = RetriedCalls(
            control,
            data,
            grant.island,
            rpc_deadline_s=rpc_deadline_s,
            policy=policy,
            rng=rng,
            reach=reach or SyncerReach(),
            damage=LineDamage(grant.island, on_event),
        )

    @property
    def peer(self) -> str:
        """Where the syncer is."""
        return self._calls.peer

    @property
    def moved(self) -> tuple[int, int]:
        """Bytes sent and received: headers and payloads, what was sent again included."""
        return self._calls.moved

    @property
    def num_failed(self) -> int:
        """Attempts of calls that broke."""
        return self._calls.num_failed

    async def close(self) -> None:
        """Close both transports."""
        await self._calls.close()

    def fenced(self, refusal: str) -> Fenced:
        """Return the error of an island whose calls the syncer refuses because of their grant."""
        return fenced_error("the syncer", self._grant, refusal)

    async def poll(
        self,
        known: Iterable[wire.FragmentState],
        outstanding: Iterable[RoundKey],
        *,
        step_s: float = 0.0,
        sent_by: int = 0,
    ) -> wire.PollReply:
        """Wait for news, at most some seconds.

        Args:
            known: What is known of the fragments.
            outstanding: Contributions whose outcome is not known.
            step_s: Duration of recent inner steps; 0: not known.
            sent_by: Incarnation that sent those of earlier timelines.
        """
        request = wire.PollRequest(
            protocol_version=PROTOCOL_VERSION,
            grant=self._grant,
            known_epoch=self.epoch,
            known=known,
            outstanding=[key_message(key) for key in outstanding],
            wait_s=_POLL_WAIT_S,
            step_s=step_s,
            sent_by=sent_by,
        )
        answer = await self._calls.control("fragment.poll", request, wait_s=_POLL_WAIT_S)
        reply = wire.PollReply.FromString(answer.header)
        self._calls.asks_first = reply.asks_first
        return reply

    async def submit(
        self, sent: Outstanding, lane_id: int, *, codec: str, digest: bytes, payload: Buffer
    ) -> wire.SubmitReply:
        """Deliver one lane of a contribution."""
        header = wire.SubmitHeader(
            protocol_version=PROTOCOL_VERSION,
            grant=self._grant,
            key=key_message(sent.key),
            lane_id=lane_id,
            sent_at_inner_step=sent.sent_at_inner_step,
            weight_tokens=sent.weight_tokens,
            weight_steps=sent.weight_steps,
            is_flush=sent.is_flush,
            codec=codec,
            digest=digest,
        )
        reply = await self._calls.data("fragment.submit", header, payload)
        return wire.SubmitReply.FromString(reply.header)

    async def decline(self, key: RoundKey, reason: str) -> None:
        """Say that there is nothing valid to contribute."""
        request = wire.DeclineRequest(
            protocol_version=PROTOCOL_VERSION,
            grant=self._grant,
            key=key_message(key),
            reason=reason,
        )
        await self._calls.control("fragment.decline", request)

    async def upload(
        self, fragment_id: int, lane_id: int, payload: Buffer, *, published: int | None = None
    ) -> wire.Ack:
        """Deliver one lane, float32, when it is its turn: of the initial parameters.

        Or of a version that was `published`, and which the syncer has lost.
        """
        header = wire.UploadHeader(
            protocol_version=PROTOCOL_VERSION,
            grant=self._grant,
            fragment_id=fragment_id,
            lane_id=lane_id,
            digest=blake3.blake3(payload).digest(),
            is_published=published is not None,
            version=published or 0,
        )
        async with self._uploading:
            reply = await self._calls.data("fragment.upload", header, payload, is_bulk=True)
        return wire.Ack.FromString(reply.header)

    async def pin(self, inner_step: int, versions: Mapping[int, int]) -> wire.Ack:
        """Have the syncer keep one version of each of its fragments for a run checkpoint."""
        request = wire.PinRequest(
            protocol_version=PROTOCOL_VERSION,
            grant=self._grant,
            checkpoint_step=inner_step,
            versions=[wire.Pinned(fragment_id=p, version=v) for p, v in versions.items()],
        )
        reply = await self._calls.control("fragment.pin", request)
        return wire.Ack.FromString(reply.header)

    async def fetch(
        self,
        fragment_id: int,
        version: int,
        lane_ids: Sequence[int],
        kind: wire.FetchKind,
        *,
        max_reply_bytes: int,
    ) -> tuple[wire.FetchReply, Buffer]:
        """Take lanes of a published version: one, or several that are small together."""
        header = wire.FetchHeader(
            protocol_version=PROTOCOL_VERSION,
            grant=self._grant,
            fragment_id=fragment_id,
            version=version,
            lane_ids=lane_ids,
            kind=kind,
        )
        reply = await self._calls.data(
            "fragment.fetch",
            header,
            max_reply_bytes=max_reply_bytes,
            is_bulk=kind == wire.FETCH_KIND_DENSE,
        )
        return wire.FetchReply.FromString(reply.header), reply.payload

    async def put(self, checkpoint: int, lane: tuple[int, int] | None, payload: Buffer) -> wire.Ack:
        """Give a lane (fragment id, lane id) of this island's inner optimizer, or the manifest.

        The syncer is asked first: nothing of what it has already travels.
        """
        header = wire.StatePutHeader(
            protocol_version=PROTOCOL_VERSION,
            grant=self._grant,
            checkpoint=checkpoint,
            is_manifest=lane is None,
            digest=blake3.blake3(payload).digest(),
        )
        if lane is not None:
            header.fragment_id, header.lane_id = lane
        async with self._uploading:
            reply = await self._calls.data(
                "heal.put", header, payload, is_bulk=True, asks_first=True
            )
        return wire.Ack.FromString(reply.header)

    async def get(
        self, source: str, checkpoint: int, lane: tuple[int, int] | None, *, max_reply_bytes: int
    ) -> tuple[wire.FetchReply, Buffer]:
        """Take what another island has given: a lane (fragment id, lane id), or the manifest."""
        header = wire.StateGetHeader(
            protocol_version=PROTOCOL_VERSION,
            grant=self._grant,
            source=source,
            checkpoint=checkpoint,
            is_manifest=lane is None,
        )
        if lane is not None:
            header.fragment_id, header.lane_id = lane
        reply = await self._calls.data(
            "heal.get", header, max_reply_bytes=max_reply_bytes, is_bulk=True
        )
        return wire.FetchReply.FromString(reply.header), reply.payload


class FragmentCalls:
    """Calls about fragments, each made to the syncer that has the fragment, if it moves again.

    While none has it (`hold`) none is made: to be repeated they would come once a second and lane
    from all islands, for as long as the move takes.
    """

    def __init__(self, grant: Grant, syncers: Mapping[int, SyncerCalls]) -> None:
        """Assign only; `syncers` has those of each fragment."""
        self._grant = grant
        self._syncers = dict(syncers)
        self._under_way: dict[int, set[asyncio.Task[Any]]] = {p: set() for p in syncers}
        self._held: dict[int, asyncio.Event] = {}
        #: Of each fragment: how often calls under way were broken off.
        self._breaks = dict.fromkeys(syncers, 0)

    def of(self, fragment_id: int) -> SyncerCalls:
        """Return those to the syncer that has a fragment now."""
        return self._syncers[fragment_id]

    def move(self, fragment_id: int, calls: SyncerCalls) -> None:
        """Make all calls about a fragment to another syncer, those under way again."""
        self._syncers[fragment_id] = calls
        self._break_off(fragment_id)
        self.go_on(fragment_id)

    def hold(self, fragment_id: int) -> None:
        """Make no call about a fragment until `go_on`, those under way neither."""
        if fragment_id not in self._held:
            self._held[fragment_id] = asyncio.Event()
            self._break_off(fragment_id)

    def go_on(self, fragment_id: int) -> None:
        """Make calls about a fragment again."""
        if (held := self._held.pop(fragment_id, None)) is not None:
            held.set()

    def _break_off(self, fragment_id: int) -> None:
        self._breaks[fragment_id] += 1
        for each in self._under_way[fragment_id]:
            each.cancel()

    def fenced(self, refusal: str) -> Fenced:
        """Return the error of an island whose calls are refused because of their grant."""
        return fenced_error("the syncer", self._grant, refusal)

    async def submit(
        self, sent: Outstanding, lane_id: int, *, codec: str, digest: bytes, payload: Buffer
    ) -> wire.SubmitReply:
        """See `SyncerCalls`."""
        return await self._made(
            sent.key.fragment_id,
            lambda to: to.submit(sent, lane_id, codec=codec, digest=digest, payload=payload),
        )

    async def decline(self, key: RoundKey, reason: str) -> None:
        """See `SyncerCalls`."""
        await self._made(key.fragment_id, lambda to: to.decline(key, reason))

    async def upload(
        self, fragment_id: int, lane_id: int, payload: Buffer, *, published: int | None = None
    ) -> wire.Ack:
        """See `SyncerCalls`."""
        return await self._made(
            fragment_id, lambda to: to.upload(fragment_id, lane_id, payload, published=published)
        )

    async def fetch(
        self,
        fragment_id: int,
        version: int,
        lane_ids: Sequence[int],
        kind: wire.FetchKind,
        *,
        max_reply_bytes: int,
    ) -> tuple[wire.FetchReply, Buffer]:
        """See `SyncerCalls`."""
        return await self._made(
            fragment_id,
            lambda to: to.fetch(
                fragment_id, version, lane_ids, kind, max_reply_bytes=max_reply_bytes
            ),
        )

    async def _made(
        self, fragment_id: int, call: Callable[[SyncerCalls], Coroutine[Any, Any, _T]]
    ) -> _T:
        under_way, task = self._under_way[fragment_id], asyncio.current_task()
        assert task is not None, "outside of any task"
        while True:
            while (held := self._held.get(fragment_id)) is not None:
                await held.wait()
            num_breaks, num_cancelled = self._breaks[fragment_id], task.cancelling()
            under_way.add(task)
            try:
                return await call(self._syncers[fragment_id])
            except asyncio.CancelledError:
                if num_breaks == self._breaks[fragment_id] or task.uncancel() > num_cancelled:
                    raise
            finally:
                under_way.discard(task)


@dataclass(frozen=True, slots=True)
class LinkParts:
    """The things that all parts of a rank's exchange share.

    Args:
        plan: Of the run.
        grant: Of this start of the island.
        rules: Of the exchange.
        calls: To the syncers of the fragments.
        tasks: Of the exchange: the first failure ends all of it.
        on_event: Called with each event.
        place: Of the lanes.
    """

    plan: Plan
    grant: Grant
    rules: ExchangeRules
    calls: FragmentCalls
    tasks: Tasks
    on_event: Callable[[Event], None]
    place: LanePlace
