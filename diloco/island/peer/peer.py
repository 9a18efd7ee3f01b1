"""The peer of an island under the all-reduce exchange: to its own ranks it is their syncer.

It lives in the IO thread of the island's leader. The carriers of the island submit, poll and fetch
here by the same calls that a syncer answers, so they know of one exchange only; behind it the
peers of all islands reduce and gather, and the coordinator's journal decides. Every peer holds
theta, published and momentum of all fragments durably.

    fragment.*                       served to the ranks of this island alone
    allreduce.contribution, result   served to the peers of a round
    allreduce.state                  served to a peer that joins, returns or heals

Source: PROTOCOL.md, "All-reduce".
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import blake3

from diloco.bounded_text import bounded_text
from diloco.errors import CodecError, error_of_exit_code
from diloco.island.exchange.calls import fenced_error
from diloco.island.peer.calls import PeerCalls
from diloco.island.peer.fragment import FragmentPeer, Own
from diloco.island.peer.replica import SECTIONS, Replica
from diloco.outer.fragments import Plan
from diloco.protocol.rounds.messages import (
    key_message,
    key_of,
    keys_of,
    outcome_message,
    outcome_of,
)
from diloco.protocol.rounds.terms import RoundKey
from diloco.protos import allreduce_pb2
from diloco.protos import fragment_pb2 as wire
from diloco.protos.control_pb2 import Grant
from diloco.syncer.payloads import (
    check_codec,
    check_size,
    fetch_lanes,
    verify_payload,
)
from diloco.syncer.polls import fragments_of, is_news
from diloco.syncer.worker import Worker
from diloco.tasks import Tasks
from diloco.transport.contracts import Buffer, Handlers, IncomingCall, Reply
from diloco.versions.pins import forget_pins
from diloco.versions.publication import PublicationRules
from diloco.versions.record import RecordInvalid
from diloco.versions.store import PinRefused

logger = logging.getLogger(__name__)

_MAX_POLL_S = 60.0
_NOT_OWN = "this peer serves the ranks of its own island's newest start"
_NO_FRAGMENT = "the run has no such fragment"


@dataclass(frozen=True, slots=True)
class PeerRules:
    """The rules of a peer.

    Args:
        publication: Codecs, outer optimizer, seed.
        retained_versions: Predecessors of the newest record that are kept.
        num_unsure_pins: Newest pins that are kept though their checkpoints are not complete.
        unreachable_s: Seconds without anybody to heal from after which the island gives up.
    """

    publication: PublicationRules
    retained_versions: int
    num_unsure_pins: int
    unreachable_s: float


class Peer:
    """All fragments of one start of an island; `handlers` go to a server of the island's."""

    def __init__(
        self,
        plan: Plan,
        directory: Path,
        rules: PeerRules,
        *,
        calls: PeerCalls,
        grant: Grant,
        worker: Worker,
        verifier: Worker,
        complete_checkpoints: Callable[[], Sequence[int] | None] = lambda: None,
    ) -> None:
        """Assign only; `start` reads the stores, `serve` begins.

        Args:
            plan: The run's.
            directory: Of this island's records; the caller holds its lock.
            rules: Of the exchange.
            calls: The ways out; closed by `stop`.
            grant: Of this start.
            worker: Does the work on tensors and files.
            verifier: Verifies what arrives, and reads what is fetched, while versions are written.
            complete_checkpoints: Inner steps of the run checkpoints that every island has.
        """
        self._directory = directory
        self._rules = rules
        self._calls = calls
        self._grant = grant
        self._worker, self._verifier = worker, verifier
        self._complete_checkpoints = complete_checkpoints
        self._tasks = Tasks(lambda: None)
        self._address = ""
        self._fragments = {
            fragment.fragment_id: FragmentPeer(
                Replica(directory, fragment, rules.publication, retained=rules.retained_versions),
                calls,
                grant,
                worker,
                self._tasks,
                unreachable_s=rules.unreachable_s,
            )
            for fragment in plan.fragments
        }

    @property
    def handlers(self) -> Handlers:
        """Method name -> handler."""
        return {
            "fragment.submit": self._submit,
            "fragment.decline": self._decline,
            "fragment.upload": self._upload,
            "fragment.poll": self._poll,
            "fragment.fetch": self._fetch,
            "fragment.pin": self._pin,
            "allreduce.contribution": self._contribution,
            "allreduce.result": self._result,
            "allreduce.state": self._state,
        }

    @property
    def bytes_up(self) -> int:
        """Bytes that went to other peers."""
        return self._calls.bytes_up

    @property
    def bytes_down(self) -> int:
        """Bytes that came from other peers."""
        return self._calls.bytes_down

    async def start(self) -> None:
        """Read the durable state; after this the handlers may be served."""
        for fragment in self._fragments.values():
            await fragment.replica.start(self._worker, self._grant.timeline)

    def serve(self, address: str) -> None:
        """Begin to take part; others reach the handlers at `address`."""
        self._address = address
        self._tasks.spawn(self._poll_forever())
        for fragment in self._fragments.values():
            self._tasks.spawn(fragment.tend())

    async def stop(self) -> None:
        """Cancel what is under way, close the ways out; what is durable stays."""
        await self._tasks.stop()
        await self._calls.close()

    # -- the decider -----------------------------------------------------------------------------

    async def _poll_forever(self) -> None:
        decider_id, sequence = "", 0
        while True:
            outstanding = [
                key_message(f.own.key)
                for f in self._fragments.values()
                if f.own is not None and f.own.outcome is None
            ]
            reply = await self._calls.poll(self._address, decider_id, sequence, outstanding)
            if reply.is_fenced:
                raise fenced_error("the coordinator", self._grant, reply.message)
            if reply.HasField("fatal"):
                raise error_of_exit_code(reply.fatal.exit_code)(
                    reply.fatal.reason, island_id=self._grant.island
                )
            decider_id, sequence = reply.decider_id, reply.sequence
            await self._calls.name_peers(reply.peers)
            self._calls.peer_grant = reply.peer_grant
            for announcement in reply.fragments:
                self._fragments[announcement.fragment_id].on_announcement(decider_id, announcement)
            for outcome in reply.outcomes:
                self._fragments[outcome.key.fragment_id].take_outcome(outcome_of(outcome))
            self._tasks.notify()

    # -- the island's own ranks ------------------------------------------------------------------

    def _is_own(self, grant: Grant) -> bool:
        return grant == self._grant

    async def _submit(self, call: IncomingCall) -> Reply:
        header = wire.SubmitHeader.FromString(call.header)
        reply = wire.SubmitReply(syncer_epoch=self._grant.incarnation)
        fragment = self._fragments.get(header.key.fragment_id)
        if not self._is_own(header.grant) or header.key.timeline != self._grant.timeline:
            reply.status, reply.message = wire.SUBMIT_STATUS_FENCED, _NOT_OWN
        elif fragment is None or header.lane_id >= len(fragment.fragment.lanes):
            reply.status, reply.message = wire.SUBMIT_STATUS_INVALID, _NO_FRAGMENT
        else:
            await self._receive(fragment, header, call, reply)
        return Reply.of(reply)

    async def _receive(
        self,
        fragment: FragmentPeer,
        header: wire.SubmitHeader,
        call: IncomingCall,
        reply: wire.SubmitReply,
    ) -> None:
        """Verify a lane of the island's contribution and keep it; it is told once it is whole."""
        if self._is_answered(fragment, header, reply):
            return
        try:
            payload = await self._verified(fragment, header, call)
        except CodecError as error:
            reply.status, reply.message = wire.SUBMIT_STATUS_INVALID, str(error)
            return
        if self._is_answered(fragment, header, reply):
            return  # the island has gone on meanwhile
        key = key_of(header.key)
        if fragment.own is None or fragment.own.key < key:
            fragment.begin(Own(key, header))
        assert fragment.own is not None
        fragment.own.lanes[header.lane_id] = payload, header.digest
        self._tasks.notify()
        reply.status = wire.SUBMIT_STATUS_RECEIVED

    def _is_answered(
        self, fragment: FragmentPeer, header: wire.SubmitHeader, reply: wire.SubmitReply
    ) -> bool:
        """Answer a lane that is not to be received: its round is over, or not open, or it is here.

        A lane of an earlier round may come late, when the island has a newer contribution.
        """
        own, key, lane_id = fragment.own, key_of(header.key), header.lane_id
        if own is not None and key <= own.key and (outcome := own.end_of(key)) is not None:
            reply.status = wire.SUBMIT_STATUS_OUTCOME
            reply.outcome.CopyFrom(outcome_message(outcome))
        elif key.version > fragment.replica.version:
            reply.status = wire.SUBMIT_STATUS_NOT_OPEN
        elif own is not None and own.key == key and lane_id in own.lanes:
            is_same = own.lanes[lane_id][1] == header.digest
            reply.status = wire.SUBMIT_STATUS_REPEAT if is_same else wire.SUBMIT_STATUS_INVALID
            reply.message = "" if is_same else f"lane {lane_id} came twice, with two digests"
        else:
            return False
        return True

    async def _verified(
        self, fragment: FragmentPeer, header: wire.SubmitHeader, call: IncomingCall
    ) -> Buffer:
        lane_id = header.lane_id
        numel = fragment.fragment.lanes[lane_id].numel
        codec = fragment.replica.codec(lane_id)
        check_codec(header.codec, self._rules.publication.uplink_codec)
        check_size(call.payload_bytes, codec.wire_bytes(numel))
        payload = await call.read_payload()
        await self._verifier.run(lambda: verify_payload(payload, header.digest, codec, numel))
        return payload

    async def _decline(self, call: IncomingCall) -> Reply:
        request = wire.DeclineRequest.FromString(call.header)
        fragment = self._fragments.get(request.key.fragment_id)
        if not self._is_own(request.grant):
            return self._ack(_NOT_OWN, is_fenced=True)
        if fragment is None:
            return self._ack(_NO_FRAGMENT)
        own, key, reason = fragment.own, key_of(request.key), bounded_text(request.reason)
        if own is None or own.key < key:
            fragment.begin(Own(key, decline_reason=reason))
        elif own.key == key and len(own.lanes) < len(fragment.fragment.lanes):
            own.decline_reason = reason  # a rank whose lanes are valid was quicker
            self._tasks.notify()
        return self._ack("")

    async def _upload(self, call: IncomingCall) -> Reply:
        header = wire.UploadHeader.FromString(call.header)
        fragment = self._fragments.get(header.fragment_id)
        if not self._is_own(header.grant):
            return self._ack(_NOT_OWN, is_fenced=True)
        if fragment is None or header.lane_id >= len(fragment.fragment.lanes):
            return self._ack(_NO_FRAGMENT)
        num_bytes = 4 * fragment.fragment.lanes[header.lane_id].numel
        if call.payload_bytes != num_bytes:
            return self._ack(f"{call.payload_bytes} bytes, the plan asks {num_bytes}")
        payload = await call.read_payload()
        if blake3.blake3(payload).digest() != header.digest:
            return self._ack("the payload does not match the digest in its header")
        fragment.initial[header.lane_id] = payload
        self._tasks.notify()
        return self._ack("")

    async def _poll(self, call: IncomingCall) -> Reply:
        request = wire.PollRequest.FromString(call.header)
        if not self._is_own(request.grant):
            return Reply.of(
                wire.PollReply(
                    syncer_epoch=self._grant.incarnation, is_fenced=True, message=_NOT_OWN
                )
            )
        keys = keys_of(request.outstanding, len(self._fragments))
        about = fragments_of(request, self._fragments)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, min(request.wait_s, _MAX_POLL_S))):
                while not is_news(request, self._poll_reply(keys, about)):
                    await self._tasks.news.wait()
        return Reply.of(self._poll_reply(keys, about))

    def _poll_reply(self, keys: Sequence[RoundKey], about: Collection[int]) -> wire.PollReply:
        reply = wire.PollReply(
            syncer_epoch=self._grant.incarnation,
            fragments=[self._fragments[p].state() for p in about],
        )
        if (failure := self._tasks.failure) is not None:
            reply.fatal.exit_code, reply.fatal.reason = failure.exit_code, str(failure)
        for key in keys:
            fragment = self._fragments.get(key.fragment_id)
            own = None if fragment is None else fragment.own
            if own is not None and own.outcome is not None and own.key == key:
                reply.outcomes.append(outcome_message(own.outcome))
        return reply

    async def _fetch(self, call: IncomingCall) -> Reply:
        header = wire.FetchHeader.FromString(call.header)
        fragment = self._fragments.get(header.fragment_id)
        payload: Buffer = b""
        if not self._is_own(header.grant):
            reply = wire.FetchReply(status=wire.FETCH_STATUS_FENCED, message=_NOT_OWN)
        elif fragment is None:
            reply = wire.FetchReply(status=wire.FETCH_STATUS_UNKNOWN, message=_NO_FRAGMENT)
        else:
            replica = fragment.replica
            reply, payload = await fetch_lanes(
                header, replica.record, replica.store, self._verifier
            )
        reply.syncer_epoch = self._grant.incarnation
        return Reply(reply.SerializeToString(), payload, digest=reply.digest)

    async def _pin(self, call: IncomingCall) -> Reply:
        request = wire.PinRequest.FromString(call.header)
        if not self._is_own(request.grant):
            return self._ack(_NOT_OWN, is_fenced=True)
        versions = {pinned.fragment_id: pinned.version for pinned in request.versions}
        if versions.keys() != self._fragments.keys():
            return self._ack(
                f"a checkpoint holds a version of each of the {len(self._fragments)} fragments, "
                f"{len(versions)} were named: {sorted(versions)[:8]}"
            )
        complete = self._complete_checkpoints()

        def pin() -> None:
            for fragment_id, fragment in self._fragments.items():
                fragment.replica.store.pin(request.checkpoint_step, versions[fragment_id])
            if complete is not None:
                unsure = self._rules.num_unsure_pins
                forget_pins(self._directory, complete=complete, num_unsure=unsure)

        try:
            await self._worker.run(pin)
        except PinRefused as error:
            logger.warning("pin refused: %s", error)
            return self._ack(str(error))
        return self._ack("")

    # -- the peers of other islands --------------------------------------------------------------

    def _knows(self, grant: Grant) -> bool:
        """Whether the decider has named this start of an island, by the mac that it shows."""
        peer = self._calls.peers.get(grant.island)
        return (
            peer is not None
            and peer.incarnation == grant.incarnation
            and hmac.compare_digest(blake3.blake3(grant.mac).digest(), peer.mac_digest)
        )

    async def _contribution(self, call: IncomingCall) -> Reply:
        header = allreduce_pb2.ContributionHeader.FromString(call.header)
        fragment = self._fragments.get(header.key.fragment_id)
        own = None if fragment is None else fragment.own
        if not self._knows(header.grant):
            return self._no_lane("the decider has not named the caller here")
        if own is None or own.key != key_of(header.key) or header.lane_id not in own.lanes:
            return self._no_lane("no such contribution is held here")
        return self._lane(own.lanes[header.lane_id][0])

    async def _result(self, call: IncomingCall) -> Reply:
        header = allreduce_pb2.ResultHeader.FromString(call.header)
        fragment = self._fragments.get(header.fragment_id)
        if not self._knows(header.grant) or fragment is None:
            return self._no_lane("the decider has not named the caller here")
        payload = await fragment.result(header)
        if payload is None:
            return self._no_lane("not reduced yet", status=allreduce_pb2.LANE_STATUS_NOT_YET)
        return self._lane(payload)

    async def _state(self, call: IncomingCall) -> Reply:
        header = allreduce_pb2.StateHeader.FromString(call.header)
        fragment = self._fragments.get(header.fragment_id)
        if not self._knows(header.grant) or fragment is None:
            return self._no_lane("the decider has not named the caller here")
        replica = fragment.replica
        is_held = replica.record is not None and replica.state_digest == header.state_digest
        is_lane = header.lane_id < len(fragment.fragment.lanes)
        if not is_held or not is_lane or header.section not in SECTIONS:
            return self._no_lane("another version is held here")
        try:
            section = await replica.section(header.lane_id, header.section, self._worker)
        except RecordInvalid as error:
            return self._no_lane(str(error))
        return self._lane(section)

    def _lane(self, payload: Buffer) -> Reply:
        self._calls.bytes_up += len(payload)
        digest = blake3.blake3(payload).digest()
        reply = allreduce_pb2.LaneReply(status=allreduce_pb2.LANE_STATUS_OK, digest=digest)
        return Reply(reply.SerializeToString(), payload, digest=digest)

    def _no_lane(
        self,
        message: str,
        *,
        status: allreduce_pb2.LaneStatus = allreduce_pb2.LANE_STATUS_UNKNOWN,
    ) -> Reply:
        return Reply.of(allreduce_pb2.LaneReply(status=status, message=message))

    def _ack(self, problem: str, *, is_fenced: bool = False) -> Reply:
        return Reply.of(
            wire.Ack(
                syncer_epoch=self._grant.incarnation,
                is_accepted=not problem,
                message=problem,
                is_fenced=is_fenced,
            )
        )
