"""A carrier's side of the rounds: encode, submit, resubmit, poll, fetch, verify, stage.

Runs in one event loop (the IO thread of a rank, or a virtual clock); never issues a collective,
never touches a parameter or an anchor. The training thread posts `send`, `decline` and `settle`
and reads `view`; nothing else crosses between the two.

This is the one boundary where errors of the transport become errors of the product.

Source: protocol.md sections 1, 4, 5 and 6.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import blake3
import torch
from torch import Tensor

from diloco.compression.base import from_bytes, to_bytes
from diloco.compression.error_feedback import encode_with_feedback
from diloco.compression.registry import get_codec
from diloco.errors import (
    CodecError,
    CoordinatorUnavailable,
    DilocoError,
    FingerprintMismatch,
    IslandFailed,
    QuorumLost,
)
from diloco.outer.fragments import Plan
from diloco.rounds.publication import apply_payload, lane_digest
from diloco.rounds.state import RoundKey
from diloco.sync.ledger import Outstanding, Verdict
from diloco.telemetry.events import DigestMismatch, Event, SyncerRestarted
from protos import fragment_pb2 as wire
from protos.control_pb2 import Grant
from transport.contracts import PROTOCOL_VERSION, Buffer, Reply, Transport
from transport.errors import TransportError
from transport.retry import RetryPolicy, retry

logger = logging.getLogger(__name__)

_VERDICT = {
    wire.OUTCOME_KIND_INCLUDED: Verdict.INCLUDED,
    wire.OUTCOME_KIND_NOT_INCLUDED: Verdict.NOT_INCLUDED,
    wire.OUTCOME_KIND_EXPIRED: Verdict.EXPIRED,
    wire.OUTCOME_KIND_REFUSED: Verdict.REFUSED,
}
_ERROR_OF_EXIT_CODE: dict[int, type[DilocoError]] = {
    20: CodecError,
    30: CoordinatorUnavailable,
    40: IslandFailed,
    50: QuorumLost,
}
_DECLINED = "declined:"
_POLL_WAIT_S = 20.0
_RETRY_WAIT_S = 0.25


@dataclass(frozen=True, slots=True)
class ExchangeRules:
    """What a carrier obeys.

    Args:
        uplink_codec: Codec of contributions.
        error_feedback: Whether the quantisation error joins the next contribution.
        rpc_deadline_s: Bound of one call; a call may wait for a slow link.
        unreachable_s: Seconds without any answer after which the island gives up (exit 30).
    """

    uplink_codec: str
    error_feedback: bool
    rpc_deadline_s: float
    unreachable_s: float


@dataclass(frozen=True, slots=True)
class FragmentView:
    """What this rank knows of a fragment, for the training thread.

    `staged_version` is the newest version of which all of this rank's lanes are verified (-1:
    none); `key` is what is outstanding and `verdict` its end, None while it is undecided. Commands
    that were posted and not yet carried out are not in it: hold `key` against what was sent.
    """

    key: RoundKey | None = None
    version: int = -1
    attempt: int = 0
    staged_version: int = -1
    verdict: Verdict | None = None
    digest: str = ""
    contributors: tuple[str, ...] = ()


@dataclass(slots=True)
class _Lane:
    """Payload and residuals of one outstanding lane."""

    payload: Buffer
    digest: bytes
    residual_after: Tensor | None
    received_epoch: int = -1


@dataclass(slots=True)
class _Carried:
    """One fragment as its carrier holds it."""

    fragment_id: int
    lanes: tuple[int, ...]
    anchor: dict[int, Tensor] = field(default_factory=dict)
    anchor_version: int = -1
    residual: dict[int, Tensor] = field(default_factory=dict)
    outstanding: Outstanding | None = None
    sending: dict[int, _Lane] = field(default_factory=dict)
    outcome: Verdict | None = None
    state: wire.FragmentState = field(default_factory=wire.FragmentState)
    staged: dict[int, Tensor] = field(default_factory=dict)
    staging_version: int = -1
    staged_version: int = -1


class Exchange:
    """One rank's exchange with the syncer; `start` polls until `stop`.

    `failure` is set once, when the rank cannot go on; everything after it is void.
    """

    def __init__(
        self,
        plan: Plan,
        lanes: Mapping[int, tuple[int, ...]],
        *,
        control: Transport,
        data: Transport,
        grant: Grant,
        rules: ExchangeRules,
        rng: random.Random,
        on_event: Callable[[Event], None],
    ) -> None:
        """Assign only. `lanes` maps every fragment to the lanes that this rank carries."""
        self._plan = plan
        self._control = control
        self._data = data
        self._grant = grant
        self._rules = rules
        self._rng = rng
        self._on_event = on_event
        self._carried = {p: _Carried(p, tuple(lanes[p])) for p in sorted(lanes)}
        self._codec = get_codec(rules.uplink_codec)
        self._epoch = 0
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.failure: DilocoError | None = None
        self.bytes_up = 0
        self.bytes_down = 0

    # -- read by the training thread -----------------------------------------------------------

    def view(self, fragment_id: int) -> FragmentView:
        """Return what this rank knows of a fragment now."""
        carried = self._carried[fragment_id]
        state = carried.state
        return FragmentView(
            key=carried.outstanding.key if carried.outstanding is not None else None,
            version=state.version if state.is_founded else -1,
            attempt=state.attempt,
            staged_version=carried.staged_version if carried.lanes else state.version,
            verdict=self._verdict(carried),
            digest=state.digest.hex(),
            contributors=tuple(state.contributors),
        )

    def staged(self, fragment_id: int) -> Mapping[int, Tensor]:
        """Return the verified lanes of `view().staged_version`."""
        return self._carried[fragment_id].staged

    # -- called in the loop ----------------------------------------------------------------------

    def start(self) -> None:
        """Begin to poll."""
        self._spawn(self._poll_forever())

    async def stop(self) -> None:
        """Cancel all tasks and close both transports."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._control.close()
        await self._data.close()

    async def found(self, initial: Mapping[int, Mapping[int, Tensor]]) -> None:
        """Agree on version 0: upload it if asked to, then hold this rank's lanes against it.

        Raises:
            FingerprintMismatch: If the initial parameters differ from the run's.
            DilocoError: If the run is past version 0, or the syncer cannot be reached.
        """
        uploads: dict[tuple[int, int], int] = {}
        while not all(carried.state.is_founded for carried in self._carried.values()):
            self._raise_failure()
            changed = self._changed
            for p, carried in self._carried.items():
                for lane_id in carried.lanes:
                    wanted = carried.state.wants_initial and not carried.state.is_founded
                    if wanted and uploads.get((p, lane_id)) != self._epoch:
                        uploads[p, lane_id] = self._epoch
                        self._spawn(self._upload(p, lane_id, initial[p][lane_id]))
            await changed.wait()
        for p, carried in self._carried.items():
            self._check_founded(carried, initial[p])
            carried.anchor, carried.anchor_version = dict(initial[p]), 0

    def send(self, sent: Outstanding, deltas: Mapping[int, Tensor]) -> None:
        """Encode and submit this rank's lanes of a contribution, until its outcome is known."""
        carried = self._begin(sent)
        for lane_id in carried.lanes:
            residual = self._residual(carried, lane_id, deltas[lane_id])
            encoded, after = encode_with_feedback(self._codec, deltas[lane_id], residual)
            payload = to_bytes(encoded)
            carried.sending[lane_id] = _Lane(payload, blake3.blake3(payload).digest(), after)
            self._spawn(self._submit(carried, sent, lane_id))

    def decline(self, sent: Outstanding, reason: str) -> None:
        """Tell the syncer that the island has nothing valid to contribute to this attempt."""
        self._begin(sent)
        self._spawn(self._decline(sent, reason))

    def settle(self, fragment_id: int, *, is_merged: bool, is_included: bool) -> None:
        """Forget what was outstanding, after the island agreed on its end.

        INCLUDED keeps the residual after the send, everything else the one before; a merge makes
        the staged version the anchor.
        """
        carried = self._carried[fragment_id]
        if is_included:
            for lane_id, lane in carried.sending.items():
                if lane.residual_after is not None:
                    carried.residual[lane_id] = lane.residual_after
        if is_merged:
            carried.anchor, carried.anchor_version = carried.staged, carried.anchor_version + 1
            carried.staged, carried.staged_version = {}, -1
        carried.outstanding, carried.sending, carried.outcome = None, {}, None
        self._stage_if_published(carried)

    async def wait_for_end(self, fragment_id: int, at_most_s: float) -> None:
        """Wait until what is outstanding has ended for this rank (staged, expired, failed)."""
        loop = asyncio.get_running_loop()
        until = loop.time() + at_most_s
        while self.failure is None and loop.time() < until:
            changed = self._changed
            view = self.view(fragment_id)
            outstanding = self._carried[fragment_id].outstanding
            if outstanding is None or view.verdict is Verdict.EXPIRED:
                return
            if view.verdict is not None and view.staged_version > outstanding.key.version:
                return
            await _wait(changed, until - loop.time())

    def fail(self, error: DilocoError) -> None:
        """Stop being able to go on; the first error stays."""
        if self.failure is None:
            logger.error("exchange failed: %s", error)
            self.failure = error
        self._notify()

    # -- polling ---------------------------------------------------------------------------------

    async def _poll_forever(self) -> None:
        while self.failure is None:
            outstanding = [
                carried.outstanding.key
                for carried in self._carried.values()
                if carried.outstanding is not None and carried.outcome is None
            ]
            request = wire.PollRequest(
                protocol_version=PROTOCOL_VERSION,
                grant=self._grant,
                known_epoch=self._epoch,
                known=[_known(carried) for carried in self._carried.values()],
                outstanding=[_key_message(key) for key in outstanding],
                wait_s=_POLL_WAIT_S,
            )
            reply = await self._call(
                self._control, "fragment.poll", request.SerializeToString(), wait_s=_POLL_WAIT_S
            )
            self._take(wire.PollReply.FromString(reply.header))

    def _take(self, reply: wire.PollReply) -> None:
        if reply.is_fenced:
            self.fail(
                IslandFailed(
                    f"the syncer refuses island {self._grant.island!r}, incarnation "
                    f"{self._grant.incarnation}: {reply.message}"
                )
            )
            return
        if reply.HasField("fatal"):
            error = _ERROR_OF_EXIT_CODE.get(reply.fatal.exit_code, DilocoError)
            self.fail(error(reply.fatal.reason, island_id=self._grant.island))
            return
        for state in reply.fragments:
            self._carried[state.fragment_id].state = state
        for outcome in reply.outcomes:
            self._take_outcome(outcome)
        if reply.syncer_epoch != self._epoch:
            self._resubmit(reply.syncer_epoch)
        for carried in self._carried.values():
            self._stage_if_published(carried)
        self._notify()

    def _take_outcome(self, outcome: wire.Outcome) -> None:
        carried = self._carried[outcome.key.fragment_id]
        sent = carried.outstanding
        if sent is None or _key(outcome.key) != sent.key:
            return
        is_declined = outcome.reason.startswith(_DECLINED)
        carried.outcome = Verdict.DECLINED if is_declined else _VERDICT[outcome.kind]
        if carried.outcome in (Verdict.REFUSED, Verdict.DECLINED):
            logger.warning("contribution refused, key=%s: %s", sent.key, outcome.reason)

    def _resubmit(self, epoch: int) -> None:
        """A new syncer epoch has forgotten what it had only received: send it again."""
        previous, self._epoch = self._epoch, epoch
        num_resent = 0
        for carried in self._carried.values():
            for lane_id, lane in carried.sending.items():
                if carried.outstanding is not None and 0 <= lane.received_epoch != epoch:
                    lane.received_epoch = -1
                    num_resent += 1
                    self._spawn(self._submit(carried, carried.outstanding, lane_id))
        if previous:
            self._on_event(SyncerRestarted(epoch, num_resent))

    # -- contributions ---------------------------------------------------------------------------

    def _begin(self, sent: Outstanding) -> _Carried:
        carried = self._carried[sent.key.fragment_id]
        assert carried.outstanding is None, f"{sent.key} while {carried.outstanding} is out"
        carried.outstanding, carried.outcome = sent, None
        self._notify()
        return carried

    def _residual(self, carried: _Carried, lane_id: int, delta: Tensor) -> Tensor | None:
        if not self._rules.error_feedback:
            return None
        return carried.residual.setdefault(lane_id, torch.zeros_like(delta))

    async def _submit(self, carried: _Carried, sent: Outstanding, lane_id: int) -> None:
        lane = carried.sending[lane_id]
        header = wire.SubmitHeader(
            protocol_version=PROTOCOL_VERSION,
            grant=self._grant,
            key=_key_message(sent.key),
            lane_id=lane_id,
            sent_at_inner_step=sent.sent_at_inner_step,
            weight_tokens=sent.weight_tokens,
            weight_steps=sent.weight_steps,
            is_flush=sent.is_flush,
            codec=self._codec.name,
            digest=lane.digest,
        ).SerializeToString()
        while carried.outstanding is sent and carried.outcome is None:
            raw = await self._call(self._data, "fragment.submit", header, lane.payload)
            reply = wire.SubmitReply.FromString(raw.header)
            if carried.outstanding is not sent:
                return
            match reply.status:
                case wire.SUBMIT_STATUS_RECEIVED | wire.SUBMIT_STATUS_REPEAT:
                    lane.received_epoch = reply.syncer_epoch
                    # A restart between this answer and the next poll is noticed by the poll.
                    if self._epoch in (0, reply.syncer_epoch):
                        return
                    await _wait(self._changed, _RETRY_WAIT_S)
                    if lane.received_epoch >= self._epoch:
                        return
                case wire.SUBMIT_STATUS_OUTCOME | wire.SUBMIT_STATUS_CONFLICT:
                    if reply.HasField("outcome"):
                        self._take_outcome(reply.outcome)
                        self._stage_if_published(carried)
                        self._notify()
                    return
                case wire.SUBMIT_STATUS_NOT_OPEN:
                    await _wait(self._changed, _RETRY_WAIT_S)
                case wire.SUBMIT_STATUS_FENCED:
                    self.fail(IslandFailed(f"contribution {sent.key} refused: {reply.message}"))
                case _:
                    self.fail(
                        CodecError(
                            f"the syncer cannot accept lane {lane_id} of {sent.key}: "
                            f"{reply.message}"
                        )
                    )

    async def _decline(self, sent: Outstanding, reason: str) -> None:
        carried = self._carried[sent.key.fragment_id]
        request = wire.DeclineRequest(
            protocol_version=PROTOCOL_VERSION,
            grant=self._grant,
            key=_key_message(sent.key),
            reason=reason,
        ).SerializeToString()
        while carried.outstanding is sent and carried.outcome is None:
            await self._call(self._control, "fragment.decline", request)
            # Repeated until the poll brings the outcome: a restarted syncer forgets a decline.
            await _wait(self._changed, 1.0)

    # -- version 0 -------------------------------------------------------------------------------

    async def _upload(self, fragment_id: int, lane_id: int, values: Tensor) -> None:
        payload = to_bytes(values.view(torch.uint8))
        header = wire.UploadHeader(
            protocol_version=PROTOCOL_VERSION,
            grant=self._grant,
            fragment_id=fragment_id,
            lane_id=lane_id,
            digest=blake3.blake3(payload).digest(),
        )
        raw = await self._call(self._data, "fragment.upload", header.SerializeToString(), payload)
        ack = wire.Ack.FromString(raw.header)
        if not ack.is_accepted:
            self.fail(CodecError(f"initial parameters of fragment {fragment_id}: {ack.message}"))

    def _check_founded(self, carried: _Carried, initial: Mapping[int, Tensor]) -> None:
        state, p = carried.state, carried.fragment_id
        if state.version != 0:
            raise IslandFailed(
                f"island {self._grant.island!r} starts at inner step 0, but fragment {p} of run "
                f"{self._grant.run!r} is at version {state.version}: an island that returns to a "
                f"run under way is not supported yet; start the run again in an empty state_dir"
            )
        for lane_id in carried.lanes:
            if lane_digest(initial[lane_id]) != state.lane_digests[lane_id]:
                names = ", ".join(e.name for e in self._plan.fragments[p].entries[:3])
                raise FingerprintMismatch(
                    f"the initial parameters of island {self._grant.island!r} differ from the "
                    f"run's in fragment {p}, lane {lane_id} ({names}, ...): the same seed, model "
                    f"and version of torch must be used everywhere"
                )

    # -- staging ---------------------------------------------------------------------------------

    def _stage_if_published(self, carried: _Carried) -> None:
        """Fetch the version after the anchor as soon as it is published."""
        version = carried.anchor_version + 1
        if version < 1 or carried.state.version < version or carried.staging_version >= version:
            return
        carried.staging_version = version
        digests = tuple(carried.state.lane_digests) if carried.state.version == version else ()
        self._spawn(self._stage(carried, version, digests))

    async def _stage(self, carried: _Carried, version: int, digests: tuple[bytes, ...]) -> None:
        lanes = await asyncio.gather(
            *(self._stage_lane(carried, version, lane_id, digests) for lane_id in carried.lanes)
        )
        carried.staged = dict(zip(carried.lanes, lanes, strict=True))
        carried.staged_version = version
        self._notify()

    async def _stage_lane(
        self, carried: _Carried, version: int, lane_id: int, digests: tuple[bytes, ...]
    ) -> Tensor:
        anchor = carried.anchor[lane_id]
        codec, payload = await self._fetch(carried, version, lane_id, wire.FETCH_KIND_PAYLOAD)
        values = apply_payload(get_codec(codec), from_bytes(payload), anchor)
        if not digests or lane_digest(values) == digests[lane_id]:
            return values
        # The anchor or a codec is not what the syncer's was: heal from the published values.
        self._on_event(DigestMismatch(carried.fragment_id, version, lane_id))
        _, payload = await self._fetch(carried, version, lane_id, wire.FETCH_KIND_DENSE)
        values = from_bytes(payload).view(torch.float32).clone()
        if lane_digest(values) != digests[lane_id]:
            raise CodecError(
                f"lane {lane_id} of fragment {carried.fragment_id}, version {version}, does not "
                f"match the syncer's digest even when fetched dense"
            )
        return values

    async def _fetch(
        self, carried: _Carried, version: int, lane_id: int, kind: wire.FetchKind
    ) -> tuple[str, Buffer]:
        numel = self._plan.fragments[carried.fragment_id].lanes[lane_id].numel
        header = wire.FetchHeader(
            protocol_version=PROTOCOL_VERSION,
            grant=self._grant,
            fragment_id=carried.fragment_id,
            version=version,
            lane_id=lane_id,
            kind=kind,
        ).SerializeToString()
        raw = await self._call(self._data, "fragment.fetch", header, max_reply_bytes=4 * numel)
        reply = wire.FetchReply.FromString(raw.header)
        if reply.status != wire.FETCH_STATUS_OK:
            raise CoordinatorUnavailable(
                f"version {version} of fragment {carried.fragment_id}, lane {lane_id}, cannot be "
                f"had from the syncer: {reply.message}"
            )
        return reply.codec, raw.payload

    # -- plumbing --------------------------------------------------------------------------------

    async def _call(
        self,
        transport: Transport,
        method: str,
        header: bytes,
        payload: Buffer = b"",
        *,
        wait_s: float = 0.0,
        max_reply_bytes: int = 0,
    ) -> Reply:
        """Call until it is answered; give up when the syncer was unreachable for too long."""

        async def attempt() -> Reply:
            self.bytes_up += len(header) + len(payload)
            reply = await transport.call(
                method,
                header,
                payload,
                deadline_s=self._rules.rpc_deadline_s + wait_s,
                max_reply_bytes=max_reply_bytes,
            )
            self.bytes_down += len(reply.header) + len(reply.payload)
            return reply

        try:
            policy = RetryPolicy(max_wait_s=1.0, budget_s=self._rules.unreachable_s)
            return await retry(attempt, policy, self._rng)
        except TransportError as error:
            raise CoordinatorUnavailable(
                f"the syncer at {transport.peer} gave no answer to {method} "
                f"for {self._rules.unreachable_s:g} s: {error}"
            ) from error

    def _verdict(self, carried: _Carried) -> Verdict | None:
        sent, state = carried.outstanding, carried.state
        if sent is None or carried.outcome is None:
            return None
        if carried.outcome is Verdict.EXPIRED:
            return Verdict.EXPIRED
        if carried.outcome in (Verdict.REFUSED, Verdict.DECLINED):
            # It waits for the round's end like the others, and merges if one is published.
            if state.version == sent.key.version and state.attempt > sent.key.attempt:
                return Verdict.EXPIRED
            return carried.outcome if state.version > sent.key.version else None
        return carried.outcome

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not isinstance(error, DilocoError):
            logger.error("exchange task failed", exc_info=error)
            error = DilocoError(f"the exchange with the syncer failed: {error!r}")
        self.fail(error)

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


async def _wait(event: asyncio.Event, at_most_s: float) -> None:
    """Wait for an event or for time to pass, whichever is first."""
    try:
        await asyncio.wait_for(event.wait(), max(0.0, at_most_s))
    except TimeoutError:
        return


def _known(carried: _Carried) -> wire.FragmentState:
    state = carried.state
    return wire.FragmentState(
        fragment_id=carried.fragment_id,
        is_founded=state.is_founded,
        version=state.version,
        attempt=state.attempt,
        is_open=state.is_open,
        wants_initial=state.wants_initial,
    )


def _key(message: wire.RoundKey) -> RoundKey:
    return RoundKey(message.timeline, message.fragment_id, message.version, message.attempt)


def _key_message(key: RoundKey) -> wire.RoundKey:
    return wire.RoundKey(
        timeline=key.timeline,
        fragment_id=key.fragment_id,
        version=key.version,
        attempt=key.attempt,
    )
