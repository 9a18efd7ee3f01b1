"""One fragment at a peer: holds its island's contribution, and does what `duty` says.

Runs in the loop of the peer; tensors and files are the worker's. What the decider announces is
heard between any two steps, so a reduction that is no longer wanted is cancelled.

Source: PROTOCOL.md, "Peers in doubt".
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco.bounded_text import bounded_text
from diloco.compression.lanes import lane_codec
from diloco.errors import AggregationError, CodecError, CoordinatorUnavailable, QuorumLost
from diloco.island.peer.calls import PeerCalls
from diloco.island.peer.reduction import Reduction
from diloco.island.peer.replica import SECTIONS, ContributionMalformed, Replica, state_digest
from diloco.outer.fragments import Fragment
from diloco.protocol.rounds.allreduce import Announced, Assignment, Duty, duty
from diloco.protocol.rounds.allreduce_messages import announced_of
from diloco.protocol.rounds.messages import key_message, outcome_of
from diloco.protocol.rounds.terms import Outcome, OutcomeKind, RoundKey
from diloco.protos import allreduce_pb2 as wire
from diloco.protos import fragment_pb2
from diloco.protos.control_pb2 import Grant
from diloco.syncer.worker import Worker
from diloco.tasks import Tasks, wait_for
from diloco.transport.contracts import Buffer
from diloco.versions.record import STATE_SECTIONS

logger = logging.getLogger(__name__)

#: What was not to be had is asked for again after this.
ASK_AGAIN_S = 0.25
#: An owner that is asked for a result which is not there yet waits for it so long.
RESULT_WAIT_S = 20 * ASK_AGAIN_S


@dataclass(slots=True)
class Own:
    """The contribution of this island that has no end yet, or its decline.

    `header` says what it is, the lanes are (payload, digest); `told` is the start of the decider
    that knows of it.
    """

    key: RoundKey
    header: fragment_pb2.SubmitHeader = field(default_factory=fragment_pb2.SubmitHeader)
    lanes: dict[int, tuple[Buffer, bytes]] = field(default_factory=dict)
    decline_reason: str = ""
    told: str = ""
    outcome: Outcome | None = None

    def end_of(self, key: RoundKey) -> Outcome | None:
        """Say how a contribution ended, this one or an earlier one; None while it has not."""
        if key == self.key:
            return self.outcome
        is_same_version = key.version == self.key.version
        kind = OutcomeKind.EXPIRED if is_same_version else OutcomeKind.NOT_INCLUDED
        return Outcome(key, kind, f"the island has gone on to {self.key}")


class FragmentPeer:
    """One fragment at the peer of an island."""

    def __init__(
        self,
        replica: Replica,
        calls: PeerCalls,
        grant: Grant,
        worker: Worker,
        tasks: Tasks,
        *,
        unreachable_s: float,
    ) -> None:
        """Assign only; after `unreachable_s` without a member to heal from it gives up."""
        self.replica = replica
        self.announcement = wire.Announcement()
        self.announced = Announced()
        self.own: Own | None = None
        self.initial: dict[int, Buffer] = {}
        self._calls = calls
        self._grant = grant
        self._worker = worker
        self._tasks = tasks
        self._unreachable_s = unreachable_s
        self._decider_id = ""
        self._reported: tuple[str, bytes] = "", b""
        self._empty_handed = ""
        self._reduction = Reduction(
            replica,
            calls,
            grant.island,
            worker,
            tasks,
            held=lambda: {} if self.own is None else self.own.lanes,
        )

    @property
    def fragment(self) -> Fragment:
        """Of the run's plan."""
        return self.replica.fragment

    def on_announcement(self, decider_id: str, announcement: wire.Announcement) -> None:
        """Take in what the decider says of this fragment."""
        self._decider_id = decider_id
        self.announcement, self.announced = announcement, announced_of(announcement)

    # -- what the island's ranks see -------------------------------------------------------------

    @property
    def is_current(self) -> bool:
        """Whether the newest version here is the one that the decider has committed."""
        held = self.replica
        return (held.version, held.state_digest) == (
            self.announced.version,
            self.announced.state_digest,
        )

    def state(self) -> fragment_pb2.FragmentState:
        """Return what a carrier may know: versions that are durable here, and committed."""
        record = self.replica.record
        state = fragment_pb2.FragmentState(
            fragment_id=self.fragment.fragment_id,
            attempt=self.announced.attempt if self.is_current else 0,
            is_open=self.announcement.is_open and self.is_current,
            wants_initial=self._wants_initial,
        )
        if record is not None and self.announced.version >= record.version:
            state.is_founded = True
            state.version = record.version
            state.digest = record.digest
            state.lane_digests.extend(record.lane_digests)
            state.contributors.extend(c.island for c in record.contributors)
            state.payload_codec = record.payload_codec
            state.sent_at_inner_step = record.sent_at_inner_step
            state.is_flush = record.is_flush
        return state

    @property
    def _wants_initial(self) -> bool:
        # A resumed run goes on from records: no island has initial parameters to give.
        is_first = self._grant.timeline == 0 and self.announced.version == 0
        is_wanted = self.announcement.wants_initial or is_first
        return is_wanted and self.replica.record is None and not self._has_initial

    @property
    def _has_initial(self) -> bool:
        return len(self.initial) == len(self.fragment.lanes)

    # -- the island's contribution ---------------------------------------------------------------

    def begin(self, own: Own) -> None:
        """Make `own` what the island contributes, or declines; it is told once it is whole."""
        self.own = own
        self._tasks.spawn(self._declare(own))

    async def _declare(self, own: Own) -> None:
        """Have the decider know of it, whichever runs, until it has its end."""
        while self.own is own and not self._is_over(own):
            news = self._tasks.news
            is_whole = bool(own.decline_reason) or len(own.lanes) == len(self.fragment.lanes)
            if not is_whole or not self._decider_id or own.told == self._decider_id:
                await news.wait()
                continue
            decider_id = self._decider_id
            if own.decline_reason:
                await self._calls.send(
                    "allreduce.decline",
                    fragment_pb2.DeclineRequest(
                        key=key_message(own.key), reason=own.decline_reason
                    ),
                )
                # Before its round is open a decline does nothing: it is said until it has its end.
                if own.outcome is not None:
                    own.told = decider_id
                await wait_for(news, ASK_AGAIN_S)
            elif await self._is_declared(own):
                own.told = decider_id
            else:
                await wait_for(news, ASK_AGAIN_S)

    def _is_over(self, own: Own) -> bool:
        if own.outcome is not None and own.outcome.kind is not OutcomeKind.REFUSED:
            return True
        return own.key.version < self.announced.version

    async def _is_declared(self, own: Own) -> bool:
        header = own.header
        reply = await self._calls.declare(
            wire.DeclareRequest(
                key=header.key,
                sent_at_inner_step=header.sent_at_inner_step,
                weight_tokens=header.weight_tokens,
                weight_steps=header.weight_steps,
                is_flush=header.is_flush,
                lane_digests=[own.lanes[lane.lane_id][1] for lane in self.fragment.lanes],
            )
        )
        if reply.HasField("outcome"):
            self.take_outcome(outcome_of(reply.outcome))
        if reply.status == fragment_pb2.SUBMIT_STATUS_INVALID:
            raise CodecError(f"the decider cannot accept {own.key}: {reply.message}")
        # A fence is news of the poll.
        return reply.status not in (
            fragment_pb2.SUBMIT_STATUS_NOT_OPEN,
            fragment_pb2.SUBMIT_STATUS_FENCED,
        )

    def take_outcome(self, outcome: Outcome) -> None:
        """Record how the island's contribution ended."""
        if self.own is not None and self.own.key == outcome.key:
            self.own.outcome = outcome
            self._tasks.notify()

    # -- what the peer does ----------------------------------------------------------------------

    async def tend(self) -> None:
        """Do what has to be done, as it is announced; never ends.

        Raises:
            DilocoError: If the island cannot go on.
        """
        while True:
            news = self._tasks.news
            if await self._act():
                self._tasks.notify()
            else:
                await news.wait()

    async def _act(self) -> bool:
        """Do one thing; false when there is nothing to do before the next news."""
        replica, announced = self.replica, self.announced
        if replica.record is None and self._has_initial and announced.version <= 0:
            return await self._found()
        match duty(replica.version, replica.state_digest, replica.staged, announced):
            case Duty.FOUND:
                return await self._send_founded()
            case Duty.PROMOTE:
                await replica.promote(self._worker)
                return True
            case Duty.HEAL:
                if self._wants_initial:  # the island's own may be the same, and need no link
                    return False
                return await self._heal()
            case Duty.REDUCE:
                assert announced.assignment is not None
                return await self._reduce_while_wanted(announced.assignment)
            case Duty.REPORT:
                return await self._report()
            case Duty.STOP:
                raise self._forgotten(f"the coordinator's journal ends at {announced.version}")
            case _:
                return False

    async def _found(self) -> bool:
        """Make version 0 of the island's initial parameters, if they are the run's."""
        record = self.replica.founding(self.initial, self._grant.timeline)
        digest = await self._worker.run(lambda: state_digest(record))
        if self.announced.version < 0 and not self.announcement.wants_initial:
            return False
        if self.announced.version == 0 and digest != self.announced.state_digest:
            del record
            is_healed = await self._heal()
            if self.replica.record is not None:
                self.initial = {}
            return is_healed
        await self.replica.take(record, self._worker)
        self.initial = {}
        return True

    async def _send_founded(self) -> bool:
        """Tell what the run goes on from: as its founder, or after a resume like everybody."""
        if not self._decider_id:
            return False
        record, is_resumed = self.replica.record, self._grant.timeline > 0
        if record is None:
            return await self._send_empty_handed() if is_resumed else False
        if record.version > 0 and not is_resumed:
            raise self._forgotten("the coordinator's journal has none")
        if not (self.announcement.wants_initial or is_resumed):
            return False
        ack = await self._calls.send(
            "allreduce.found",
            wire.FoundRequest(
                fragment_id=self.fragment.fragment_id,
                record_json=json.dumps(record.header()),
                state_digest=self.replica.state_digest,
            ),
        )
        if not ack.is_accepted:
            logger.info("the run is not founded yet: %s", ack.message)
            await asyncio.sleep(ASK_AGAIN_S)
        return not ack.is_accepted

    async def _send_empty_handed(self) -> bool:
        """Say once to each start of the decider that nothing is held: another island founds."""
        if self._empty_handed != self._decider_id:
            self._empty_handed = self._decider_id
            await self._calls.send(
                "allreduce.found", wire.FoundRequest(fragment_id=self.fragment.fragment_id)
            )
        return False

    async def _report(self) -> bool:
        """Say PREPARED, once to each start of the decider."""
        staged = self.replica.staged
        assert staged is not None
        if self._reported == (self._decider_id, staged.assignment_id):
            return False
        await self._send_prepared(
            wire.PreparedRequest(
                assignment_id=staged.assignment_id,
                lane_digests=self.replica.staged_lane_digests,
                state_digest=staged.state_digest,
            )
        )
        return True

    async def _send_prepared(self, request: wire.PreparedRequest) -> None:
        """Say what came of an assignment; a start of the decider that comes meanwhile is told."""
        request.fragment_id = self.fragment.fragment_id
        reporting = self._decider_id, request.assignment_id
        await self._calls.send("allreduce.prepared", request)
        self._reported = reporting

    def _forgotten(self, journal: str) -> QuorumLost:
        """Return the error of an island that is ahead of the journal."""
        directory = self.replica.store.store_dir
        return QuorumLost(
            f"fragment {self.fragment.fragment_id}: this island holds version "
            f"{self.replica.version}, {journal}: it is a copy from another day, or the run was "
            f"begun again. Bring the newest journal back, or resume a checkpoint: diloco "
            f"coordinator RUN.toml --resume; if it was begun again, remove {directory} and start "
            f"this island again: diloco island RUN.toml --island {self._grant.island}"
        )

    # -- reducing --------------------------------------------------------------------------------

    async def _reduce_while_wanted(self, assignment: Assignment) -> bool:
        """Come to the result and stage it, unless the decider announces something else first."""
        if self._reported == (self._decider_id, assignment.id):
            return False  # as one that cannot be used
        work = asyncio.create_task(self._reduction.stage(assignment))
        news = asyncio.create_task(self._tasks.news.wait())
        try:
            while not work.done() and self._is_wanted(assignment):
                await asyncio.wait({work, news}, return_when=asyncio.FIRST_COMPLETED)
                if news.done():
                    news = asyncio.create_task(self._tasks.news.wait())
            if work.done():
                await work
        except (AggregationError, CodecError) as error:
            logger.error("result not usable, key=%s: %s", assignment.key, error)
            contributor = error.contributor if isinstance(error, ContributionMalformed) else ""
            await self._send_prepared(
                wire.PreparedRequest(
                    assignment_id=assignment.id,
                    broken=bounded_text(str(error)),
                    malformed=contributor,
                )
            )
        finally:
            work.cancel()
            news.cancel()
            await asyncio.gather(work, news, return_exceptions=True)
        return True

    def _is_wanted(self, assignment: Assignment) -> bool:
        wanted = self.announced.assignment
        return wanted is not None and wanted.id == assignment.id

    async def result(self, header: wire.ResultHeader) -> Buffer | None:
        """Return the result of a lane that is owned here; waits for it, None if it takes long."""
        replica, wanted = self.replica, header.assignment_id
        try:
            async with asyncio.timeout(RESULT_WAIT_S):
                while replica.reduced_id != wanted or header.lane_id not in replica.reduced:
                    await self._tasks.news.wait()
        except TimeoutError:
            return None
        assignment = self.announced.assignment
        if assignment is None or assignment.id != wanted:
            return None
        return replica.result_for(assignment, header.lane_id, header.grant.island)

    # -- healing ---------------------------------------------------------------------------------

    async def _heal(self) -> bool:
        """Take the committed version from any member that has it.

        Raises:
            CoordinatorUnavailable: If none could be had for `unreachable_s` seconds.
        """
        loop, p = asyncio.get_running_loop(), self.fragment.fragment_id
        began, wanted = loop.time(), self.announced
        logger.info("healing, fragment=%d version=%d", p, wanted.version)
        while loop.time() - began < self._unreachable_s:
            reply = await self._calls.record(p)
            for island in sorted(self._calls.peers):
                if island != self._grant.island and await self._is_taken_from(island, reply):
                    return True
            await wait_for(self._tasks.news, ASK_AGAIN_S)
            if self.announced != wanted:
                return True
        raise CoordinatorUnavailable(
            f"version {wanted.version} of fragment {p} cannot be had: no peer of another island "
            f"gave it for {self._unreachable_s:g} s. Start those islands that have it: diloco "
            f"island RUN.toml --island NAME"
        )

    async def _is_taken_from(self, island: str, committed: wire.RecordReply) -> bool:
        """Try to take the committed version from the peer of an island; durable when it is."""
        header = json.loads(committed.record_json or "{}")
        if not header:
            return False
        sections: dict[str, Buffer] = {}
        for name, lane_id, num_bytes in self._wanted(header):
            payload, refusal = await self._calls.pull_once(
                island,
                "allreduce.state",
                wire.StateHeader(
                    fragment_id=self.replica.fragment.fragment_id,
                    lane_id=lane_id,
                    state_digest=committed.state_digest,
                    section=name,
                ),
                num_bytes=num_bytes,
            )
            if refusal:
                logger.debug("not healed, island=%s: %s", island, refusal)
                return False
            sections[f"{name}/{lane_id}"] = payload
        record = self.replica.healed(header, sections)
        if await self._worker.run(lambda: state_digest(record)) != committed.state_digest:
            logger.warning("state of another digest than was committed, island=%s", island)
            return False
        await self.replica.take(record, self._worker)
        p = self.replica.fragment.fragment_id
        logger.info("healed, fragment=%d from=%s", p, island)
        return True

    def _wanted(self, header: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
        """Name what a version is made of: section, lane id, bytes."""
        fragment = self.replica.fragment
        for lane in fragment.lanes:
            codec = lane_codec(header["payload_codec"], fragment, lane.lane_id)
            for name in SECTIONS if header["version"] else STATE_SECTIONS:
                is_payload = name == "payload"
                num_bytes = codec.wire_bytes(lane.numel) if is_payload else 4 * lane.numel
                yield name, lane.lane_id, num_bytes
