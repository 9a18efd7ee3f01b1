"""Serves the peers of an all-reduce: their polls, declarations, votes and records.

Thin handlers over `DecidedRounds`. Carries no tensor: of a contribution it knows the digests, of a
result the digest that all members report.

Source: PROTOCOL.md, "Decider".
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import blake3

from diloco.bounded_text import MOST_ENDING, MOST_TEXT, bounded_text
from diloco.coordinator.decided_rounds import DecidedFragment, DecidedRounds, DeciderRules
from diloco.coordinator.grants import sign
from diloco.coordinator.journal import Journal
from diloco.coordinator.round_journal import JournalUnwritable, check_initial, read_record
from diloco.errors import AggregationError, QuorumLost
from diloco.loop_clock import loop_now
from diloco.protocol.rounds.allreduce import Prepared
from diloco.protocol.rounds.allreduce_messages import arrivals_of, assignment_message
from diloco.protocol.rounds.messages import (
    SUBMIT_STATUS,
    digest_problem,
    key_of,
    keys_of,
    outcome_message,
)
from diloco.protocol.rounds.terms import Admission, Lost, RoundKey
from diloco.protocol.run.membership import Membership
from diloco.protos import allreduce_pb2 as wire
from diloco.protos import fragment_pb2
from diloco.protos.control_pb2 import ROLE_ISLAND, FragmentStatus, Grant
from diloco.refusals import Cause
from diloco.transport.contracts import Handler, Handlers, IncomingCall, Reply
from diloco.transport.errors import FrameError

logger = logging.getLogger(__name__)

_MAX_POLL_S = 60.0
_NOT_CURRENT = "the grant is not valid for this run, or a newer start has joined"
_NO_FRAGMENT = "the run has no such fragment"


class Decider:
    """Decides the rounds of all fragments of one timeline; begins once the plan is known."""

    def __init__(
        self,
        *,
        membership: Membership,
        journal: Journal,
        secret: bytes,
        rules: DeciderRules,
        decider_id: str,
        is_granted: Callable[[Grant], bool],
        on_status: Callable[[FragmentStatus], None],
        on_lost: Callable[[str, int], None],
        on_refused: Callable[[str, Cause], None],
    ) -> None:
        """Assign only; the journal must be open and its entries applied to `membership`.

        Args:
            membership: Of the run.
            journal: Its durable memory.
            secret: The run's.
            rules: Of the rounds.
            decider_id: Random, one a start: peers tell everything again to a new one.
            is_granted: Whether a grant is an island's, valid and of its newest start.
            on_status: Hears how a fragment stands after every change.
            on_lost: Hears, once, why the run cannot go on, and the exit code.
            on_refused: Hears of every refusal: the island, and why.
        """
        self._membership = membership
        self._secret = hmac.new(secret, b"peers", hashlib.sha256).digest()
        self._id = decider_id
        self._is_granted = is_granted
        self._on_lost = on_lost
        self._on_refused = on_refused
        self._peers: dict[str, wire.Peer] = {}
        self._unreached: dict[str, list[str]] = {}
        self._sequence = 0
        self._changed = asyncio.Event()
        self._fatal: fragment_pb2.Fatal | None = None
        self._rounds = DecidedRounds(
            membership,
            journal,
            rules,
            on_status=on_status,
            on_lost=self._lose,
            on_change=self._notify,
        )

    @property
    def handlers(self) -> Handlers:
        """Method name -> handler."""
        handlers = {
            "allreduce.poll": self._poll,
            "allreduce.declare": self._declare,
            "allreduce.decline": self._decline,
            "allreduce.prepared": self._prepared,
            "allreduce.found": self._found,
            "allreduce.record": self._record,
        }
        return {method: self._unless_failed(handler) for method, handler in handlers.items()}

    async def watch(self) -> None:
        """Never return.

        Raises:
            JournalUnwritable: Once the journal could not be written.
        """
        await self._rounds.watch()

    def name_again(self) -> None:
        """Tell all islands which starts of others are to be answered: one may have been fenced."""
        membership = self._membership
        counted = {
            island: peer
            for island, peer in self._peers.items()
            if membership.is_current(island, peer.incarnation, membership.timeline)
        }
        if counted != self._peers:
            self._peers = counted
            self._notify()

    def stop(self) -> None:
        """Let no more time pass."""
        self._rounds.stop()

    def _unless_failed(self, handler: Handler) -> Handler:
        async def handle(call: IncomingCall) -> Reply:
            with contextlib.suppress(JournalUnwritable):
                if self._rounds.failure is None:
                    return await handler(call)
            # The caller is answered by the next start: an error would end its island.
            await asyncio.Event().wait()
            raise AssertionError

        return handle

    # -- handlers --------------------------------------------------------------------------------

    async def _poll(self, call: IncomingCall) -> Reply:
        request = wire.PollRequest.FromString(call.header)
        if not self._accepts(request.grant):
            return Reply.of(wire.PollReply(is_fenced=True, message=_NOT_CURRENT))
        if request.address != bounded_text(request.address):
            raise FrameError(
                f"an address of {len(request.address)} characters; {MOST_TEXT} are allowed, "
                f"printable ones"
            )
        keys = keys_of(request.outstanding, len(self._rounds.fragments))
        island = request.grant.island
        self._unreached[island] = sorted(
            set(request.unreached).intersection(self._membership.members.configured)
        )
        peer = wire.Peer(
            island=island,
            incarnation=request.grant.incarnation,
            address=request.address,
            mac_digest=blake3.blake3(self._peer_grant(request.grant).mac).digest(),
        )
        if self._peers.get(island) != peer:
            self._peers[island] = peer
            self._notify()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, min(request.wait_s, _MAX_POLL_S))):
                while not self._is_news(request, keys):
                    await self._changed.wait()
        return Reply.of(self._poll_reply(request, keys))

    def _is_news(self, request: wire.PollRequest, keys: Iterable[RoundKey]) -> bool:
        if (request.decider_id, request.sequence) != (self._id, self._sequence):
            return True
        return bool(self._outcomes(request.grant, keys)) or not self._is_granted(request.grant)

    def _poll_reply(self, request: wire.PollRequest, keys: Iterable[RoundKey]) -> wire.PollReply:
        if not self._is_granted(request.grant):
            message = f"a newer start of island {request.grant.island!r} has joined"
            return wire.PollReply(is_fenced=True, message=message)
        return wire.PollReply(
            decider_id=self._id,
            sequence=self._sequence,
            fragments=[
                self._announcement(fragment, request.grant.island)
                for fragment in self._rounds.fragments.values()
            ],
            outcomes=self._outcomes(request.grant, keys),
            peers=self._peers.values(),
            peer_grant=self._peer_grant(request.grant),
            fatal=self._fatal,
        )

    def _outcomes(self, grant: Grant, keys: Iterable[RoundKey]) -> list[fragment_pb2.Outcome]:
        found = []
        for key in keys:
            fragment = self._rounds.fragments.get(key.fragment_id)
            outcome = fragment and fragment.rounds.rounds.outcome(
                key, grant.island, grant.incarnation
            )
            if outcome:
                found.append(outcome_message(outcome))
        return found

    def _announcement(self, fragment: DecidedFragment, island: str) -> wire.Announcement:
        rounds = fragment.rounds.rounds
        assignment = fragment.rounds.assignment
        return wire.Announcement(
            fragment_id=rounds.fragment_id,
            is_founded=fragment.saved is not None,
            version=rounds.version,
            attempt=rounds.attempt,
            is_open=rounds.is_open,
            wants_initial=fragment.saved is None and self._is_founder(island),
            state_digest=fragment.saved.state_digest if fragment.saved else b"",
            assignment=None if assignment is None else assignment_message(assignment),
        )

    async def _declare(self, call: IncomingCall) -> Reply:
        request = wire.DeclareRequest.FromString(call.header)
        reply = fragment_pb2.SubmitReply()
        if not self._accepts(request.grant):
            reply.status, reply.message = SUBMIT_STATUS[Admission.FENCED], _NOT_CURRENT
            return Reply.of(reply)
        fragment = self._rounds.fragments.get(request.key.fragment_id)
        if fragment is None:
            reply.status = SUBMIT_STATUS[Admission.INVALID]
            reply.message = self._refuse(request.grant, Cause.KEY, _NO_FRAGMENT)
            return Reply.of(reply)
        if problem := self._digests_problem(fragment, request.lane_digests):
            reply.status, reply.message = SUBMIT_STATUS[Admission.INVALID], problem
            self._refuse(request.grant, Cause.DIGEST, problem)
            return Reply.of(reply)
        rounds, grant, lanes = fragment.rounds.rounds, request.grant, arrivals_of(request)
        if rounds.admit(lanes[0]) is Admission.ACCEPTED and (
            problem := rounds.weight_problem(lanes[0])
        ):
            self._refuse(grant, Cause.WEIGHT, problem)
            start = grant.island, grant.incarnation
            refused = fragment.rounds.refused(lanes[0].key, *start, problem, loop_now())
            self._rounds.perform(fragment, refused)
        admission, instructions = fragment.rounds.declared(lanes, loop_now())
        if (objection := rounds.objection(lanes[0])) is not None:
            self._refuse(grant, objection.cause, objection.words)
        elif admission is Admission.CONFLICT:
            self._refuse(grant, Cause.CONFLICT, f"a second contribution to {lanes[0].key}")
        self._rounds.perform(fragment, instructions)
        outcome = rounds.outcome(lanes[0].key, grant.island, grant.incarnation)
        if outcome is not None:
            reply.outcome.CopyFrom(outcome_message(outcome))
        reply.status, reply.message = SUBMIT_STATUS[admission], rounds.history_of(lanes[0])
        return Reply.of(reply)

    def _digests_problem(self, fragment: DecidedFragment, digests: Sequence[bytes]) -> str:
        """Say why these cannot be the digests of a fragment's lanes; empty if they can."""
        num_lanes = fragment.rounds.rounds.rules.num_lanes
        if len(digests) != num_lanes:
            return f"{len(digests)} digests of lanes, the fragment has {num_lanes} lanes"
        return digest_problem(digests)

    def _refuse(self, grant: Grant, cause: Cause, words: str) -> str:
        """Count a refusal of what an island says with a good grant; returns the words."""
        logger.debug("refused, island=%s cause=%s: %s", grant.island, cause, words)
        self._on_refused(grant.island, cause)
        return words

    async def _decline(self, call: IncomingCall) -> Reply:
        request = fragment_pb2.DeclineRequest.FromString(call.header)
        fragment = self._rounds.fragments.get(request.key.fragment_id)
        if not self._accepts(request.grant):
            return _ack(_NOT_CURRENT, is_fenced=True)
        if fragment is not None:
            key, grant = key_of(request.key), request.grant
            reason = f"declined: {request.reason}"
            self._rounds.perform(
                fragment,
                fragment.rounds.refused(key, grant.island, grant.incarnation, reason, loop_now()),
            )
        return _ack("")

    async def _prepared(self, call: IncomingCall) -> Reply:
        request = wire.PreparedRequest.FromString(call.header)
        if not self._accepts(request.grant):
            return _ack(_NOT_CURRENT, is_fenced=True)
        fragment = self._rounds.fragments.get(request.fragment_id)
        if fragment is not None:
            voter = request.grant.island, request.grant.incarnation, request.assignment_id
            if request.broken:
                broken = bounded_text(request.broken)
                logger.error("result refused, island=%s: %s", voter[0], broken)
                instructions = fragment.rounds.broken(
                    *voter, broken, loop_now(), malformed=request.malformed
                )
            elif problem := self._digests_problem(fragment, request.lane_digests) or digest_problem(
                [request.state_digest]
            ):
                return _ack(self._refuse(request.grant, Cause.DIGEST, problem))
            else:
                prepared = Prepared(tuple(request.lane_digests), request.state_digest)
                instructions = fragment.rounds.prepared(*voter, prepared, loop_now())
            self._rounds.perform(fragment, instructions)
        return _ack("")

    async def _found(self, call: IncomingCall) -> Reply:
        request = wire.FoundRequest.FromString(call.header)
        if not self._accepts(request.grant):
            return _ack(_NOT_CURRENT, is_fenced=True)
        fragment = self._rounds.fragments.get(request.fragment_id)
        if fragment is None:
            return _ack(self._refuse(request.grant, Cause.KEY, _NO_FRAGMENT))
        if not request.record_json:
            self._found_nothing(fragment, request.grant)
            return _ack("")
        if fragment.saved is None:
            record = read_record(request.record_json, request.fragment_id)
            if refusal := self._found_refusal(fragment, record, request.grant.island):
                return _ack(refusal)
            if problem := digest_problem([request.state_digest]):
                return _ack(self._refuse(request.grant, Cause.DIGEST, problem))
            self._rounds.found(fragment, record, request.state_digest)
        return _ack("")

    def _found_refusal(
        self, fragment: DecidedFragment, record: Mapping[str, Any], island: str
    ) -> str:
        """Say why an island cannot found a fragment with its record; empty if it can.

        Raises:
            FrameError: If the record is of no version that there can be.
        """
        if self._membership.timeline > 0:
            if not self._rounds.has_committed(record):
                return f"version {record['version']} is not as this run has committed it"
        elif not self._is_founder(island):
            return "not everybody has joined, or another island founds the run"
        elif record["version"] > 0:
            return f"the journal knows nothing of version {record['version']}"
        else:
            check_initial(record, fragment.rounds.rounds.rules.num_lanes)
        return ""

    def _found_nothing(self, fragment: DecidedFragment, grant: Grant) -> None:
        """Note that an island has nothing to go on from; when none has, the run is lost."""
        fragment.empty_handed[grant.island] = grant.incarnation
        starts = fragment.rounds.rounds.participants.incarnations
        have_all_come = len(starts) == len(self._membership.members.configured)
        if fragment.saved is None and have_all_come and fragment.empty_handed == starts:
            p, step = fragment.rounds.rounds.fragment_id, self._membership.resume_step
            reason = (
                f"fragment {p}: no island holds its version of the checkpoint of inner step "
                f"{step}. Bring the directory of an island's peer back (peers/ISLAND in its "
                f"coordinator.state_dir) and resume again, or resume another checkpoint: diloco "
                f"coordinator RUN.toml --resume --at STEP"
            )
            self._end(reason, QuorumLost.exit_code)
            self._notify()

    async def _record(self, call: IncomingCall) -> Reply:
        request = wire.RecordRequest.FromString(call.header)
        fragment = self._rounds.fragments.get(request.fragment_id)
        if not self._accepts(request.grant):
            return Reply.of(wire.RecordReply(message=_NOT_CURRENT))
        if fragment is None or fragment.saved is None:
            return Reply.of(wire.RecordReply(message="no version is committed"))
        return Reply.of(
            wire.RecordReply(
                record_json=json.dumps(fragment.saved.record),
                state_digest=fragment.saved.state_digest,
            )
        )

    # -- what the machines decide ----------------------------------------------------------------

    def _lose(self, lost: Lost) -> None:
        reason = f"fragment {lost.key.fragment_id}: {lost.reason}"
        if lost.missing:
            directories = "coordinator.state_dir, peers/ISLAND of every island's removed too"
            reason += f". {lost.advice(directories)}"
        for island, others in sorted(self._unreached.items()):
            for other in [self._peers[other] for other in others if other in self._peers]:
                reason += (
                    f". Island {island!r} has no answer from the peer of island {other.island!r} "
                    f"at {other.address}: see islands.{other.island}.peer_address"
                )
        code = AggregationError.exit_code if lost.is_numeric else QuorumLost.exit_code
        self._end(reason, code)

    def _end(self, reason: str, code: int) -> None:
        if self._fatal is None:  # the first reason stays, so that all islands hear the same
            reason = bounded_text(reason, MOST_ENDING)
            self._fatal = fragment_pb2.Fatal(exit_code=code, reason=reason)
            self._on_lost(reason, code)

    # -- grants ----------------------------------------------------------------------------------

    def _accepts(self, grant: Grant) -> bool:
        """Check a grant; a new start of an island fences its earlier ones in every round."""
        if not self._is_granted(grant):
            cause = self._membership.cause_against(grant.island, grant.incarnation, grant.timeline)
            self._on_refused("", cause)
            return False
        self._rounds.granted(grant.island, grant.incarnation)
        return True

    def _is_founder(self, island: str) -> bool:
        """Whether an island's initial parameters are what the run begins from."""
        membership = self._membership
        is_first = membership.members.timeline == 0 and island == membership.members.configured[0]
        return is_first and membership.have_all_joined

    def _peer_grant(self, grant: Grant) -> Grant:
        """Sign what an island shows to other peers: they could not use it here."""
        peer_grant = Grant(
            run=grant.run,
            timeline=grant.timeline,
            island=grant.island,
            incarnation=grant.incarnation,
            roles=[ROLE_ISLAND],
        )
        return sign(peer_grant, self._secret)

    def _notify(self) -> None:
        """Wake all polls; anyone who waits holds the event that is set here."""
        self._sequence += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _ack(problem: str, *, is_fenced: bool = False) -> Reply:
    return Reply.of(fragment_pb2.Ack(is_accepted=not problem, message=problem, is_fenced=is_fenced))
