"""The syncer: the only authority over the rounds of its fragments.

The event loop moves bytes and runs the pure machines (`state`); one worker owns tensors and files
(`publication`, `store`). Every version is durable before anybody hears of it, every expiry before
the next attempt opens, every incarnation before its first contribution is accepted.

Source: protocol.md sections 1, 4, 5 and 8.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import blake3
import torch
from google.protobuf.message import Message

from diloco.compression.base import from_bytes, to_bytes
from diloco.compression.registry import get_codec
from diloco.errors import AggregationError, CodecError
from diloco.outer.fragments import Fragment, Plan
from diloco.rounds.publication import (
    LaneState,
    PublicationRules,
    decode_contribution,
    lane_digest,
    publish_lane,
)
from diloco.rounds.state import (
    Admission,
    Close,
    DropLanes,
    FragmentRounds,
    Instruction,
    LaneArrival,
    Lost,
    Opened,
    OutcomeKind,
    Published,
    RecordExpiry,
    RoundKey,
    RoundRules,
)
from diloco.rounds.store import FragmentStore, RecordInvalid, VersionRecord
from protos import fragment_pb2 as wire
from protos.control_pb2 import Grant
from transport.contracts import PROTOCOL_VERSION, Buffer, Handlers, IncomingCall, Reply

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_OUTCOME_KIND = {
    OutcomeKind.INCLUDED: wire.OUTCOME_KIND_INCLUDED,
    OutcomeKind.NOT_INCLUDED: wire.OUTCOME_KIND_NOT_INCLUDED,
    OutcomeKind.EXPIRED: wire.OUTCOME_KIND_EXPIRED,
    OutcomeKind.REFUSED: wire.OUTCOME_KIND_REFUSED,
}
_SUBMIT_STATUS = {
    Admission.ACCEPTED: wire.SUBMIT_STATUS_RECEIVED,
    Admission.REPEAT: wire.SUBMIT_STATUS_REPEAT,
    Admission.OVER: wire.SUBMIT_STATUS_OUTCOME,
    Admission.CONFLICT: wire.SUBMIT_STATUS_CONFLICT,
    Admission.FENCED: wire.SUBMIT_STATUS_FENCED,
    Admission.NOT_OPEN: wire.SUBMIT_STATUS_NOT_OPEN,
    Admission.INVALID: wire.SUBMIT_STATUS_INVALID,
}


class Worker(Protocol):
    """Runs tensor and file work off the event loop, one piece at a time."""

    async def run(self, work: Callable[[], _T]) -> _T:
        """Return what `work()` returns, or raise what it raises."""


class IncarnationStore(Protocol):
    """Durable highest incarnation of each island."""

    def load(self) -> dict[str, int]:
        """Return what was stored."""

    def store(self, incarnations: dict[str, int]) -> None:
        """Write durably."""


@dataclass(frozen=True, slots=True)
class SyncerRules:
    """What a syncer obeys for all its fragments."""

    timeline: int
    islands: tuple[str, ...]
    publication: PublicationRules
    round_deadline_s: float


@dataclass(slots=True)
class _FragmentService:
    """One fragment: its machine, its store, its newest version, and the spool of its attempt."""

    fragment: Fragment
    rounds: FragmentRounds
    store: FragmentStore
    record: VersionRecord | None
    spool: dict[str, dict[int, Buffer]]
    initial: dict[int, Buffer]
    timer: asyncio.TimerHandle | None = None


class Syncer:
    """Serves the rounds of all fragments of `plan`.

    `on_record` hears of every durable record (also those found at start), `on_change` of every
    change of state; neither may block. `ended` is set when the run cannot go on; `fatal` says why.
    """

    def __init__(
        self,
        plan: Plan,
        rules: SyncerRules,
        stores: Sequence[FragmentStore],
        *,
        syncer_epoch: int,
        incarnations: IncarnationStore,
        is_granted: Callable[[Grant], bool],
        worker: Worker,
        on_record: Callable[[VersionRecord], None],
        on_change: Callable[[], None],
    ) -> None:
        """Assign only; `start` reads the stores."""
        self._plan = plan
        self._rules = rules
        self._epoch = syncer_epoch
        self._incarnation_store = incarnations
        self._is_granted = is_granted
        self._worker = worker
        self._on_record = on_record
        self._on_change = on_change
        self._known_incarnations: dict[str, int] = {}
        self._granting = asyncio.Lock()
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._service = {
            fragment.fragment_id: _FragmentService(
                fragment,
                FragmentRounds(
                    fragment.fragment_id,
                    rules.timeline,
                    RoundRules(
                        members=rules.islands,
                        num_lanes=len(fragment.lanes),
                        deadline_s=rules.round_deadline_s,
                    ),
                ),
                store,
                None,
                {},
                {},
            )
            for fragment, store in zip(plan.fragments, stores, strict=True)
        }
        self.fatal: wire.Fatal | None = None
        self.failure: BaseException | None = None
        self.ended = asyncio.Event()

    @property
    def handlers(self) -> Handlers:
        """Method name -> handler."""
        return {
            "fragment.submit": self._submit,
            "fragment.decline": self._decline,
            "fragment.upload": self._upload,
            "fragment.poll": self._poll,
            "fragment.fetch": self._fetch,
        }

    @property
    def states(self) -> list[wire.FragmentState]:
        """Public state of every fragment."""
        return [self._state(service, "") for service in self._service.values()]

    def phase(self, fragment_id: int) -> str:
        """Phase of a fragment's current round, in words."""
        return str(self._service[fragment_id].rounds.phase)

    async def start(self) -> None:
        """Read the durable state; after this the handlers may be served."""
        self._known_incarnations = await self._worker.run(self._incarnation_store.load)
        for service in self._service.values():
            recovered = await self._worker.run(service.store.recover)
            if recovered is None:
                continue
            service.record = recovered.record
            self._on_record(recovered.record)
            self._perform(
                service,
                service.rounds.founded(
                    recovered.record.version, recovered.attempt, recovered.past, _now()
                ),
            )

    async def stop(self) -> None:
        """Cancel what is under way; what is not durable is as if it had never happened."""
        for service in self._service.values():
            if service.timer is not None:
                service.timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _submit(self, call: IncomingCall) -> Reply:
        header = wire.SubmitHeader.FromString(call.header)
        service = self._service.get(header.key.fragment_id)
        if not await self._accept_grant(header.grant, header.protocol_version):
            return self._submit_reply(Admission.FENCED, "the grant is not valid or not current")
        if service is None:
            return self._submit_reply(Admission.INVALID, "this syncer has no such fragment")
        lane = LaneArrival(
            key=_key(header.key),
            island=header.grant.island,
            incarnation=header.grant.incarnation,
            lane_id=header.lane_id,
            digest=header.digest,
            weight_tokens=header.weight_tokens,
            weight_steps=header.weight_steps,
            sent_at_inner_step=header.sent_at_inner_step,
            is_flush=header.is_flush,
        )
        admission = service.rounds.admit(lane)
        if admission is Admission.ACCEPTED:
            admission = await self._receive_lane(service, lane, header, call)
        elif admission is Admission.CONFLICT:
            _, instructions = service.rounds.lane_received(lane, _now())
            self._perform(service, instructions)
        outcome = service.rounds.outcome(lane.key, lane.island, lane.incarnation)
        reply = self._submit_reply(admission, f"{lane.key} is {service.rounds.phase}")
        if outcome is not None:
            reply = Reply(
                wire.SubmitReply(
                    syncer_epoch=self._epoch,
                    status=_SUBMIT_STATUS[admission],
                    outcome=_outcome_message(outcome.key, outcome.kind, outcome.reason),
                ).SerializeToString()
            )
        return reply

    async def _receive_lane(
        self,
        service: _FragmentService,
        lane: LaneArrival,
        header: wire.SubmitHeader,
        call: IncomingCall,
    ) -> Admission:
        """Read and verify a lane, then count it; a malformed one leaves the attempt refused."""
        codec_name = self._rules.publication.uplink_codec
        codec = get_codec(codec_name)
        numel = service.fragment.lanes[lane.lane_id].numel
        problem = ""
        payload: Buffer = b""
        if header.codec != codec_name:
            problem = f"codec {header.codec!r}, the run's uplink codec is {codec_name!r}"
        elif call.payload_bytes != codec.wire_bytes(numel):
            problem = f"{call.payload_bytes} bytes, the plan asks {codec.wire_bytes(numel)}"
        else:
            payload = await call.read_payload()
            try:
                await self._worker.run(lambda: _verify(payload, lane.digest, codec_name, numel))
            except CodecError as error:
                problem = str(error)
        if problem:
            logger.warning("lane refused, key=%s island=%s: %s", lane.key, lane.island, problem)
            self._perform(
                service,
                service.rounds.refused(lane.key, lane.island, lane.incarnation, problem, _now()),
            )
            return Admission.OVER
        admission, instructions = service.rounds.lane_received(lane, _now())
        if admission is Admission.ACCEPTED:
            service.spool.setdefault(lane.island, {})[lane.lane_id] = payload
        self._perform(service, instructions)
        return admission

    async def _decline(self, call: IncomingCall) -> Reply:
        request = wire.DeclineRequest.FromString(call.header)
        service = self._service.get(request.key.fragment_id)
        if service is None or not await self._accept_grant(request.grant, request.protocol_version):
            return self._ack(False, "the grant is not current, or there is no such fragment")
        grant = request.grant
        key = _key(request.key)
        if key == service.rounds.key and not service.rounds.is_open:
            return self._ack(False, f"{key} is {service.rounds.phase}: try again")
        reason = f"declined: {request.reason}"
        self._perform(
            service, service.rounds.refused(key, grant.island, grant.incarnation, reason, _now())
        )
        return self._ack(True, "")

    async def _upload(self, call: IncomingCall) -> Reply:
        header = wire.UploadHeader.FromString(call.header)
        service = self._service.get(header.fragment_id)
        if service is None or not await self._accept_grant(header.grant, header.protocol_version):
            return self._ack(False, "the grant is not current, or there is no such fragment")
        if service.record is not None:
            return self._ack(True, "version 0 is durable already")
        if not self._wants_initial(service, header.grant.island):
            return self._ack(False, f"version 0 is founded by {self._rules.islands[0]!r}")
        if header.lane_id >= len(service.fragment.lanes):
            return self._ack(False, f"there is no lane {header.lane_id}")
        numel = service.fragment.lanes[header.lane_id].numel
        if call.payload_bytes != 4 * numel:
            return self._ack(False, f"{call.payload_bytes} bytes, the plan asks {4 * numel}")
        payload = await call.read_payload()
        try:
            await self._worker.run(lambda: _verify(payload, header.digest, "float32", numel))
        except CodecError as error:
            return self._ack(False, f"initial parameters refused: {error}")
        service.initial[header.lane_id] = payload
        if len(service.initial) == len(service.fragment.lanes) and service.record is None:
            await self._found(service)
        return self._ack(True, "")

    async def _found(self, service: _FragmentService) -> None:
        """Commit version 0: theta = published = the uploaded parameters, momentum = 0."""
        lanes = []
        for lane in service.fragment.lanes:
            values = from_bytes(service.initial[lane.lane_id]).view(torch.float32)
            lanes.append(LaneState(values, values, torch.zeros_like(values)))
        record = VersionRecord(
            version=0,
            fragment_id=service.fragment.fragment_id,
            timeline=self._rules.timeline,
            key=None,
            is_flush=False,
            payload_codec="float32",
            lane_digests=tuple(lane_digest(lane.published) for lane in lanes),
            lanes=tuple(lanes),
        )
        await self._worker.run(lambda: service.store.commit(record))
        if service.record is None:
            service.record, service.initial = record, {}
            self._on_record(record)
            self._perform(service, service.rounds.founded(0, 0, {}, _now()))

    async def _poll(self, call: IncomingCall) -> Reply:
        request = wire.PollRequest.FromString(call.header)
        if not await self._accept_grant(request.grant, request.protocol_version):
            return _reply(
                wire.PollReply(
                    syncer_epoch=self._epoch,
                    is_fenced=True,
                    message="the grant is not valid for this run, or a newer start has joined",
                )
            )
        until = _now() + max(0.0, min(request.wait_s, 60.0))
        while True:
            changed = self._changed
            reply = self._poll_reply(request)
            if _is_news(request, reply) or _now() >= until:
                return _reply(reply)
            try:
                await asyncio.wait_for(changed.wait(), until - _now())
            except TimeoutError:
                continue

    def _poll_reply(self, request: wire.PollRequest) -> wire.PollReply:
        grant = request.grant
        if self._known_incarnations.get(grant.island, 0) > grant.incarnation:
            return wire.PollReply(
                syncer_epoch=self._epoch,
                is_fenced=True,
                message=f"a newer start of island {grant.island!r} has joined",
            )
        reply = wire.PollReply(
            syncer_epoch=self._epoch,
            fragments=[self._state(service, grant.island) for service in self._service.values()],
            fatal=self.fatal,
        )
        for key_message in request.outstanding:
            service = self._service.get(key_message.fragment_id)
            outcome = service and service.rounds.outcome(
                _key(key_message), grant.island, grant.incarnation
            )
            if outcome:
                reply.outcomes.append(_outcome_message(outcome.key, outcome.kind, outcome.reason))
        for known in request.known:
            service = self._service.get(known.fragment_id)
            if service is not None and known.version > service.rounds.version:
                reply.fatal.exit_code = 30
                reply.fatal.reason = (
                    f"fragment {known.fragment_id}: this island holds version {known.version}, the "
                    f"syncer's newest valid record is version {service.rounds.version}: its state "
                    f"directory has lost a published version and must be restored"
                )
        return reply

    async def _fetch(self, call: IncomingCall) -> Reply:
        header = wire.FetchHeader.FromString(call.header)
        service = self._service.get(header.fragment_id)
        if not await self._accept_grant(header.grant, header.protocol_version):
            return self._fetch_reply(wire.FETCH_STATUS_FENCED, "the grant is not current")
        if (
            service is None
            or service.record is None
            or header.version > service.record.version
            or header.lane_id >= len(service.fragment.lanes)
        ):
            return self._fetch_reply(wire.FETCH_STATUS_UNKNOWN, "not published here")
        record = service.record
        if header.version != record.version:
            try:
                record = await self._worker.run(lambda: service.store.load(header.version))
            except RecordInvalid as error:
                return self._fetch_reply(wire.FETCH_STATUS_GONE, str(error))
        is_dense = header.kind == wire.FETCH_KIND_DENSE
        payload: Buffer
        if is_dense:
            payload = to_bytes(record.lanes[header.lane_id].published.view(torch.uint8))
        elif record.payloads:
            payload = record.payloads[header.lane_id]
        else:
            return self._fetch_reply(wire.FETCH_STATUS_GONE, "version 0 has no payload")
        reply = wire.FetchReply(
            syncer_epoch=self._epoch,
            status=wire.FETCH_STATUS_OK,
            codec="float32" if is_dense else record.payload_codec,
            digest=blake3.blake3(payload).digest(),
        )
        return Reply(reply.SerializeToString(), payload)

    async def _accept_grant(self, grant: Grant, protocol_version: int) -> bool:
        """Check a grant; make its incarnation durable before anything of it is accepted."""
        if protocol_version != PROTOCOL_VERSION or not self._is_granted(grant):
            return False
        if grant.timeline != self._rules.timeline or grant.island not in self._rules.islands:
            return False
        async with self._granting:
            known = self._known_incarnations.get(grant.island, 0)
            if grant.incarnation > known:
                updated = {**self._known_incarnations, grant.island: grant.incarnation}
                await self._worker.run(lambda: self._incarnation_store.store(updated))
                self._known_incarnations = updated
        if grant.incarnation < self._known_incarnations[grant.island]:
            return False
        for service in self._service.values():
            self._perform(service, service.rounds.granted(grant.island, grant.incarnation, _now()))
        return True

    def _perform(self, service: _FragmentService, instructions: Iterable[Instruction]) -> None:
        """Carry out what a machine decided, in order, then arm its timer."""
        for instruction in instructions:
            match instruction:
                case Opened() | Published():
                    logger.debug("%s", instruction)
                case Close():
                    self._spawn(self._publish(service, instruction))
                case RecordExpiry(key, reason):
                    logger.warning("round expired, key=%s: %s", key, reason)
                    service.spool = {}
                    self._spawn(self._expire(service, key))
                case DropLanes(_, island, _):
                    service.spool.pop(island, None)
                case Lost():
                    self._lose(instruction)
            self._notify()
        self._arm(service)

    async def _publish(self, service: _FragmentService, close: Close) -> None:
        """Merge, commit, then announce; a result that is not finite expires the attempt."""
        spool, service.spool = service.spool, {}
        before = service.record
        assert before is not None
        try:
            record = await self._worker.run(
                lambda: _merge(service, before, close, spool, self._rules)
            )
        except AggregationError as error:
            logger.error("result refused, key=%s: %s", close.key, error)
            instructions = service.rounds.result_broken(close.key, str(error), _now())
        else:
            service.record = record
            self._on_record(record)
            instructions = service.rounds.committed(close.key, _now())
        self._perform(service, instructions)

    async def _expire(self, service: _FragmentService, key: RoundKey) -> None:
        await self._worker.run(lambda: service.store.record_expiry(key))
        self._perform(service, service.rounds.expiry_recorded(key, _now()))

    def _lose(self, lost: Lost) -> None:
        reason = f"fragment {lost.key.fragment_id}: {lost.reason}"
        if not lost.is_numeric:
            commands = "; ".join(f"diloco island RUN.toml --island {m}" for m in lost.missing)
            reason += (
                f"; missing: {', '.join(lost.missing) or 'nobody'}. The run stops "
                f"(on_member_lost = stop). Start it again with every island, among them: {commands}"
            )
        logger.error("run lost, %s", reason)
        self.fatal = wire.Fatal(exit_code=20 if lost.is_numeric else 50, reason=reason)
        self.ended.set()

    def _arm(self, service: _FragmentService) -> None:
        """Call the machine's `tick` when its next deadline comes."""
        if service.timer is not None:
            service.timer.cancel()
            service.timer = None
        wake = service.rounds.next_wake
        if wake < float("inf"):
            service.timer = asyncio.get_running_loop().call_at(wake, self._tick, service)

    def _tick(self, service: _FragmentService) -> None:
        self._perform(service, service.rounds.tick(_now()))

    def _notify(self) -> None:
        """Wake all polls; whoever waits holds the event that is set here."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        self._on_change()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        """End the process when a piece of work failed: a restart recovers the durable truth."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("syncer work failed", exc_info=error)
            self.failure = error
            self.ended.set()

    def _wants_initial(self, service: _FragmentService, island: str) -> bool:
        everybody = all(name in self._known_incarnations for name in self._rules.islands)
        return (
            service.record is None
            and self._rules.timeline == 0
            and everybody
            and island == self._rules.islands[0]
        )

    def _state(self, service: _FragmentService, island: str) -> wire.FragmentState:
        state = wire.FragmentState(
            fragment_id=service.fragment.fragment_id,
            version=service.rounds.version,
            attempt=service.rounds.attempt,
            is_open=service.rounds.is_open,
            wants_initial=self._wants_initial(service, island),
        )
        if service.record is not None:
            state.is_founded = True
            state.digest = service.record.digest
            state.lane_digests.extend(service.record.lane_digests)
            state.contributors.extend(c.island for c in service.record.contributors)
            state.payload_codec = service.record.payload_codec
        return state

    def _submit_reply(self, admission: Admission, message: str) -> Reply:
        return _reply(
            wire.SubmitReply(
                syncer_epoch=self._epoch, status=_SUBMIT_STATUS[admission], message=message
            )
        )

    def _fetch_reply(self, status: wire.FetchStatus, message: str) -> Reply:
        return _reply(wire.FetchReply(syncer_epoch=self._epoch, status=status, message=message))

    def _ack(self, is_accepted: bool, message: str) -> Reply:
        return _reply(wire.Ack(syncer_epoch=self._epoch, is_accepted=is_accepted, message=message))


def _merge(
    service: _FragmentService,
    before: VersionRecord,
    close: Close,
    spool: dict[str, dict[int, Buffer]],
    rules: SyncerRules,
) -> VersionRecord:
    """Compute and commit the next version; runs in the worker."""
    weights = [c.weight_tokens for c in close.contributors]
    publications = [
        publish_lane(
            state,
            [spool[c.island][lane_id] for c in close.contributors],
            weights,
            rules.publication,
            version=close.key.version,
            is_flush=close.is_flush,
        )
        for lane_id, state in enumerate(before.lanes)
    ]
    record = VersionRecord(
        version=close.key.version + 1,
        fragment_id=close.key.fragment_id,
        timeline=close.key.timeline,
        key=close.key,
        is_flush=close.is_flush,
        payload_codec=rules.publication.payload_codec(close.is_flush).name,
        lane_digests=tuple(publication.digest for publication in publications),
        lanes=tuple(publication.state for publication in publications),
        payloads=tuple(publication.payload for publication in publications),
        contributors=close.contributors,
        contributions={
            c.island: [spool[c.island][lane.lane_id] for lane in service.fragment.lanes]
            for c in close.contributors
        },
    )
    service.store.commit(record)
    return record


def _verify(payload: Buffer, digest: bytes, codec_name: str, numel: int) -> None:
    """Insist that a payload is what its header says and decodes to finite values."""
    if blake3.blake3(payload).digest() != digest:
        raise CodecError("the payload does not match the digest in its header")
    decode_contribution(get_codec(codec_name), payload, numel)


def _is_news(request: wire.PollRequest, reply: wire.PollReply) -> bool:
    if request.known_epoch != reply.syncer_epoch or reply.is_fenced or reply.outcomes:
        return True
    if reply.HasField("fatal"):
        return True
    known = {state.fragment_id: _what_changes(state) for state in request.known}
    return any(_what_changes(state) != known.get(state.fragment_id) for state in reply.fragments)


def _what_changes(state: wire.FragmentState) -> tuple[bool, int, int, bool, bool]:
    return state.is_founded, state.version, state.attempt, state.is_open, state.wants_initial


def _key(message: wire.RoundKey) -> RoundKey:
    return RoundKey(message.timeline, message.fragment_id, message.version, message.attempt)


def _outcome_message(key: RoundKey, kind: OutcomeKind, reason: str) -> wire.Outcome:
    return wire.Outcome(
        key=wire.RoundKey(
            timeline=key.timeline,
            fragment_id=key.fragment_id,
            version=key.version,
            attempt=key.attempt,
        ),
        kind=_OUTCOME_KIND[kind],
        reason=reason,
    )


def _reply(message: Message) -> Reply:
    return Reply(message.SerializeToString())


def _now() -> float:
    return asyncio.get_running_loop().time()
