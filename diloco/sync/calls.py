"""A carrier's calls to the syncer: headers, retries, deadlines, bytes counted.

This is the one boundary where errors of the transport become errors of the product. Nothing is
decided here: `exchange` knows what to say and what an answer means.

Source: protocol.md sections 5 and 8 (`unreachable_s`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import blake3
from google.protobuf.message import Message

from diloco.errors import CoordinatorUnavailable, DilocoError, Fenced
from diloco.rounds.messages import MOST_UPLOADS, key_message
from diloco.rounds.terms import RoundKey
from diloco.sync.ledger import Outstanding
from protos import fragment_pb2 as wire
from protos.control_pb2 import Grant
from transport.contracts import PROTOCOL_VERSION, Buffer, Reply, Transport
from transport.errors import HandlerFailed, NotYet, TransportError
from transport.retry import RetryPolicy, retry
from transport.transfer import Transfer

logger = logging.getLogger(__name__)

#: A payload that moves more slowly has its call broken off, and made again.
SLOWEST_BPS = 1e6
_POLL_WAIT_S = 20.0


class _Progress:
    """How far all calls over one transport have come together; never falls.

    A lane may wait for its turn longer than the budget: the syncer is reached as long as others
    move. Control and data are counted apart, for either connection may be broken alone.
    """

    def __init__(self) -> None:
        self._count = 0
        #: By name, with the most that each had moved when it was looked at.
        self._under_way: dict[bytes, tuple[Transfer, int]] = {}

    @contextlib.contextmanager
    def of(self, transfer: Transfer) -> Iterator[None]:
        """Count what this call moves."""
        self._under_way[transfer.name] = transfer, 0
        try:
            yield
        finally:
            self.count()
            del self._under_way[transfer.name]

    def answered(self) -> None:
        """Count a reply."""
        self._count += 1

    def count(self) -> int:
        """Return the replies, and the bytes that need not move again."""
        for name, (transfer, most) in self._under_way.items():
            if transfer.moved_bytes > most:
                self._count += transfer.moved_bytes - most
                self._under_way[name] = transfer, transfer.moved_bytes
        return self._count


class Reach:
    """When each of those that a rank calls has answered last: syncers, and the coordinator."""

    def __init__(self) -> None:
        """Assign only."""
        self._at: dict[Hashable, float] = {}

    def answered(self, who: Hashable) -> None:
        """Take note of an answer; in the loop, by whose clock it counts."""
        self._at[who] = asyncio.get_running_loop().time()

    def has_answered(self, who: Hashable) -> bool:
        """Whether there was an answer of one."""
        return who in self._at

    def since_another_s(self, who: Hashable) -> float:
        """Seconds since the last answer of anybody but one; infinite: there was none."""
        last = max((at for each, at in self._at.items() if each != who), default=float("-inf"))
        return asyncio.get_running_loop().time() - last


class SyncerCalls:
    """One rank's way to the syncer, over a control and a data transport.

    `bytes_up` and `bytes_down` count headers and payloads, what was sent again included. A call
    that breaks is made again, and goes on where it was unless its payload is one that travels in
    one message (`framing.WHOLE_BYTES`); whole models let the payloads of rounds go first. Where
    the syncer has no room for all payloads at once (`PollReply.asks_first`, or it says `NotYet`),
    each is sent when it is its turn there, however long that takes.
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
        reach: Reach | None = None,
    ) -> None:
        """Assign only.

        One call may take `rpc_deadline_s`, besides its payload's time at `SLOWEST_BPS`; all its
        repetitions the budget, from the last progress of any call over the same transport on. A
        syncer that has answered, and is not there at all any more, is called on as long as others
        of the `reach` answer: its fragments alone wait.
        """
        self._control = control
        self._data = data
        self._grant = grant
        self._rpc_deadline_s = rpc_deadline_s
        self._policy = policy
        self._rng = rng
        self._reach = reach or Reach()
        self._is_away = False  # nothing answers, not even on the way for control
        self._progress = {transport: _Progress() for transport in (control, data)}
        self._uploading = asyncio.Semaphore(MOST_UPLOADS)
        self._asks_first = False  # the newest word of the syncer
        self.bytes_up = 0
        self.bytes_down = 0

    async def close(self) -> None:
        """Close both transports."""
        await self._control.close()
        await self._data.close()

    def fenced(self, refusal: str) -> Fenced:
        """Return the error of an island whose calls the syncer refuses because of their grant."""
        return Fenced(
            f"the syncer refuses island {self._grant.island!r}, incarnation "
            f"{self._grant.incarnation}: {refusal}. See whether diloco island runs twice for it; "
            f"after a resume of the run, start it again"
        )

    async def poll(
        self,
        known_epoch: int,
        known: Iterable[wire.FragmentState],
        outstanding: Iterable[RoundKey],
        *,
        step_s: float = 0.0,
        sent_by: int = 0,
    ) -> wire.PollReply:
        """Wait for news, at most some seconds.

        Args:
            known_epoch: Of the syncer.
            known: What is known of the fragments.
            outstanding: Contributions whose outcome is not known.
            step_s: Duration of recent inner steps; 0: not known.
            sent_by: Incarnation that sent those of earlier timelines.
        """
        request = wire.PollRequest(
            protocol_version=PROTOCOL_VERSION,
            grant=self._grant,
            known_epoch=known_epoch,
            known=known,
            outstanding=[key_message(key) for key in outstanding],
            wait_s=_POLL_WAIT_S,
            step_s=step_s,
            sent_by=sent_by,
        )
        answer = await self._call(self._control, "fragment.poll", request, wait_s=_POLL_WAIT_S)
        reply = wire.PollReply.FromString(answer.header)
        self._asks_first = reply.asks_first
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
        reply = await self._call(self._data, "fragment.submit", header, payload)
        return wire.SubmitReply.FromString(reply.header)

    async def decline(self, key: RoundKey, reason: str) -> None:
        """Say that there is nothing valid to contribute."""
        request = wire.DeclineRequest(
            protocol_version=PROTOCOL_VERSION,
            grant=self._grant,
            key=key_message(key),
            reason=reason,
        )
        await self._call(self._control, "fragment.decline", request)

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
            reply = await self._call(self._data, "fragment.upload", header, payload, is_bulk=True)
        return wire.Ack.FromString(reply.header)

    async def pin(self, inner_step: int, versions: Mapping[int, int]) -> wire.Ack:
        """Have the syncer keep one version of each of its fragments for a run checkpoint."""
        request = wire.PinRequest(
            protocol_version=PROTOCOL_VERSION,
            grant=self._grant,
            checkpoint_step=inner_step,
            versions=[wire.Pinned(fragment_id=p, version=v) for p, v in versions.items()],
        )
        reply = await self._call(self._control, "fragment.pin", request)
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
        reply = await self._call(
            self._data,
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
        header = wire.HealPutHeader(
            protocol_version=PROTOCOL_VERSION,
            grant=self._grant,
            checkpoint=checkpoint,
            is_manifest=lane is None,
            digest=blake3.blake3(payload).digest(),
        )
        if lane is not None:
            header.fragment_id, header.lane_id = lane
        async with self._uploading:
            reply = await self._call(
                self._data, "heal.put", header, payload, is_bulk=True, asks_first=True
            )
        return wire.Ack.FromString(reply.header)

    async def get(
        self, donor: str, checkpoint: int, lane: tuple[int, int] | None, *, max_reply_bytes: int
    ) -> tuple[wire.FetchReply, Buffer]:
        """Take what another island has given: a lane (fragment id, lane id), or the manifest."""
        header = wire.HealGetHeader(
            protocol_version=PROTOCOL_VERSION,
            grant=self._grant,
            donor=donor,
            checkpoint=checkpoint,
            is_manifest=lane is None,
        )
        if lane is not None:
            header.fragment_id, header.lane_id = lane
        reply = await self._call(
            self._data, "heal.get", header, max_reply_bytes=max_reply_bytes, is_bulk=True
        )
        return wire.FetchReply.FromString(reply.header), reply.payload

    async def _call(
        self,
        transport: Transport,
        method: str,
        message: Message,
        payload: Buffer = b"",
        *,
        wait_s: float = 0.0,
        max_reply_bytes: int = 0,
        is_bulk: bool = False,
        asks_first: bool = False,
    ) -> Reply:
        """Call until it is answered.

        Raises:
            CoordinatorUnavailable: If no answer came within the policy's budget, nor from anybody
                else where the syncer is not there at all; or one that no repetition can mend.
            DilocoError: If the syncer's program failed at the call: it is reached, and has a
                defect.
        """
        header = message.SerializeToString()
        transfer = Transfer(is_bulk=is_bulk, asks_first=asks_first or self._asks_first)
        payload_bytes = memoryview(payload).nbytes + max_reply_bytes
        progress = self._progress[transport]
        #: What had moved at attempts that broke after sending more: how much of that arrived, only
        #: the next attempt is told, so each is worth one.
        untold: set[int] = set()

        async def attempt() -> Reply:
            sent, received = transfer.sent_bytes, transfer.received_bytes
            self.bytes_up += len(header)
            try:
                reply = await transport.call(
                    method,
                    header,
                    payload,
                    deadline_s=self._rpc_deadline_s + wait_s + 8 * payload_bytes / SLOWEST_BPS,
                    max_reply_bytes=max_reply_bytes,
                    transfer=transfer if payload_bytes else None,
                )
            except NotYet:
                answered()  # however long the queue is there
                transfer.asks_first = True
                raise
            except TransportError:
                self._is_away = self._is_away or transport is self._control
                raise
            finally:
                self.bytes_up += transfer.sent_bytes - sent
                self.bytes_down += transfer.received_bytes - received
                if transfer.sent_bytes > sent:
                    untold.add(transfer.moved_bytes)
            answered()
            self.bytes_down += len(reply.header)
            return reply

        def answered() -> None:
            progress.answered()
            self._reach.answered(self)
            self._is_away = False

        async def until_nobody_answers() -> Reply:
            left_s = self._policy.budget_s
            while True:
                policy = replace(self._policy, budget_s=left_s)
                try:
                    return await retry(
                        attempt, policy, self._rng, lambda: progress.count() + len(untold)
                    )
                except TransportError as error:
                    left_s = self._policy.budget_s - self._reach.since_another_s(self)
                    # Less than one wait would be no time at all, again and again.
                    is_worth_it = left_s > self._policy.max_wait_s
                    # One that this start has never reached may be no syncer of the run's at all.
                    is_away = self._is_away and self._reach.has_answered(self)
                    if not (error.is_retryable and is_away and is_worth_it):
                        raise
                    logger.warning(
                        "others answer, the syncer at %s does not: its fragments wait: %s",
                        transport.peer, error,
                    )  # fmt: skip

        try:
            with progress.of(transfer):
                return await until_nobody_answers()
        except HandlerFailed as error:
            raise DilocoError(
                f"the syncer at {transport.peer} was reached, and its program failed at {method}: "
                f"{error}. This is a defect, which another start may meet again: report it with "
                f"syncer*.log of coordinator.state_dir; if the versions of diloco differ between "
                f"the sites, install the same everywhere",
                island_id=self._grant.island,
            ) from error
        except TransportError as error:
            what = (
                f"gave no answer to {method} for {self._policy.budget_s:g} s"
                if error.is_retryable
                else f"failed at {method}"
            )
            raise CoordinatorUnavailable(
                f"the syncer at {transport.peer} {what}: {error}. If the coordinator is down, "
                f"start it again, its syncer comes with it: diloco coordinator RUN.toml; then this "
                f"island: diloco island RUN.toml --island {self._grant.island}"
            ) from error
