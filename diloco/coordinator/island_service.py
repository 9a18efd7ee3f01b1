"""Serves the islands of a run: joins, reports and leaves.

Nothing here decides: `membership` does, and what belongs to it.

Source: PROTOCOL.md, "Join", "Leases and clocks", "Graceful stop" and "Cuts".
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import Awaitable, Callable, Iterator

import blake3

from diloco.bounded_text import bounded_text
from diloco.config.fields import MOST_CHECKPOINTS
from diloco.coordinator.grants import sign
from diloco.coordinator.run_status import RunStatus
from diloco.errors import CoordinatorUnavailable, Fenced, RunHalted, RunReturned
from diloco.loop_clock import loop_now
from diloco.protocol.run.admission import Entries, Joined, JoinVerdict
from diloco.protocol.run.cut_patience import CutPatience
from diloco.protocol.run.cuts import Part
from diloco.protocol.run.leases import Lease, Leases
from diloco.protocol.run.membership import Change, Decide, Membership
from diloco.protocol.run.plan_bytes import packed, unpacked
from diloco.protocol.run.state_transfers import StateTransfers
from diloco.protos.control_pb2 import (
    JOIN_STATUS_ACCEPTED,
    JOIN_STATUS_BATCH_TOO_LARGE,
    JOIN_STATUS_FINGERPRINT_MISMATCH,
    JOIN_STATUS_KICKED,
    JOIN_STATUS_PLAN_MISMATCH,
    JOIN_STATUS_RUN_FULL,
    JOIN_STATUS_RUN_STOPPED,
    JOIN_STATUS_UNKNOWN_ISLAND,
    JOIN_STATUS_VERSION_MISMATCH,
    JOIN_STATUS_WRONG_RUN,
    ROLE_ISLAND,
    CutPart,
    Grant,
    JoinReply,
    JoinRequest,
    LeaveReply,
    LeaveRequest,
    ReportReply,
    ReportRequest,
    StateTransfer,
)
from diloco.refusals import Cause
from diloco.transport.contracts import PROTOCOL_VERSION, Handlers, IncomingCall, Reply
from diloco.transport.errors import FrameError, Overloaded

logger = logging.getLogger(__name__)

_MAX_START_ID = 64
#: Seconds from a plan of an island that is refused until its next one is read.
_REFUSED_PLAN_S = 1.0
#: Ways of packing the run's plan that are known again, as of other versions of zstandard.
_MOST_KNOWN = 16
#: Differences that one refusal names.
_MOST_LINES = 16
#: Held-out losses in one report.
_MOST_HELD_OUT = 8
#: What an island may say that it is doing: operators read it, and metrics are named by it.
ISLAND_STATES = frozenset({"", "waiting", "training", "flushing", "finished", "stopped", "failed"})

_HALTING = (
    "the operator has stopped the run. Nothing published is lost: start the coordinator again, "
    "then this island"
)

_RETURNING = (
    "the run returns to its last good checkpoint by itself; every island starts again there"
)

_STATUS = {
    JoinVerdict.ACCEPTED: JOIN_STATUS_ACCEPTED,
    JoinVerdict.BATCH_TOO_LARGE: JOIN_STATUS_BATCH_TOO_LARGE,
    JoinVerdict.FINGERPRINT_MISMATCH: JOIN_STATUS_FINGERPRINT_MISMATCH,
    JoinVerdict.KICKED: JOIN_STATUS_KICKED,
    JoinVerdict.PLAN_MISMATCH: JOIN_STATUS_PLAN_MISMATCH,
    JoinVerdict.RUN_FULL: JOIN_STATUS_RUN_FULL,
    JoinVerdict.RUN_STOPPED: JOIN_STATUS_RUN_STOPPED,
    JoinVerdict.UNKNOWN_ISLAND: JOIN_STATUS_UNKNOWN_ISLAND,
    JoinVerdict.WRONG_RUN: JOIN_STATUS_WRONG_RUN,
}


class IslandService:
    """Answers the islands of one run."""

    def __init__(
        self,
        membership: Membership,
        run_status: RunStatus,
        leases: Leases,
        cut_patience: CutPatience,
        *,
        secret: bytes,
        is_granted: Callable[[Grant], bool],
        change: Change,
        end_if_over: Callable[[], Awaitable[None]],
    ) -> None:
        """Assign only.

        Args:
            membership: Of the run.
            run_status: Shows reports, and has the terms of the run.
            leases: That are renewed by every word.
            cut_patience: Hears what is told of cuts.
            secret: That grants are signed with.
            is_granted: Whether a grant is an island's, of this run, and has not expired.
            change: Makes what is decided durable, then true.
            end_if_over: Ends the run where what was told has ended it.
        """
        self._membership = membership
        self._run_status = run_status
        self._leases = leases
        self._cut_patience = cut_patience
        self._secret = secret
        self._is_granted = is_granted
        self._change = change
        self._end_if_over = end_if_over
        self._reading = asyncio.Lock()
        #: Island -> loop time before which no plan of it is read; infinite while one is.
        self._unread_until: dict[str, float] = {}
        #: Digests of what unpacks to the run's plan.
        self._known: set[bytes] = set()
        self._state_transfers = StateTransfers(membership, change=change)
        # Island -> its newest start and how far that came, as was reported, durable or not.
        self._reached: dict[str, tuple[int, int]] = {}

    @property
    def handlers(self) -> Handlers:
        """Method name -> handler."""
        return {
            "control.join": self._join,
            "control.report": self._report,
            "control.leave": self._leave,
        }

    @property
    def inner_steps(self) -> dict[str, int]:
        """How far the newest start of each island has come that has reported a step."""
        return {island: inner_step for island, (_, inner_step) in self._reached.items()}

    @property
    def named_transfers(self) -> list[StateTransfer]:
        """The state transfers that are under way."""
        return self._state_transfers.named

    # -- joins -------------------------------------------------------------------------------------

    async def _join(self, call: IncomingCall) -> Reply:
        request = JoinRequest.FromString(call.header)
        if request.protocol_version != PROTOCOL_VERSION:
            message = (
                f"you speak protocol version {request.protocol_version}, this coordinator "
                f"{PROTOCOL_VERSION}: install the same version of diloco everywhere"
            )
            self._run_status.refused("", Cause.PROTOCOL_VERSION)
            return Reply.of(JoinReply(status=JOIN_STATUS_VERSION_MISMATCH, message=message))
        if len(request.start_id) > _MAX_START_ID:
            self._run_status.refused("", Cause.FRAME)
            raise FrameError(
                f"a start id of {len(request.start_id)} characters; {_MAX_START_ID} are allowed"
            )
        try:
            plan_json = await self._read_plan(request.island, request.plan)
        except ValueError as error:
            message = f"island {request.island!r} sent no usable plan: {error}"
            refused = Joined(JoinVerdict.PLAN_MISMATCH, message, cause=Cause.PLAN)
            return Reply.of(await self._join_refused(call, request.island, refused))
        joined = await self._joined(request, plan_json)
        if joined.verdict is not JoinVerdict.ACCEPTED:
            return Reply.of(await self._join_refused(call, request.island, joined))
        if joined.entries:
            logger.info("joined, island=%s incarnation=%d", request.island, joined.incarnation)
        return Reply.of(self._join_accepted(request, joined.incarnation))

    async def _joined(self, request: JoinRequest, plan_json: str) -> Joined:
        """Take a join, and have it durable."""
        decided: Joined

        def decide(membership: Membership) -> Entries:
            nonlocal decided
            decided = membership.join(
                run=request.run,
                island=request.island,
                identity_json=request.identity_json,
                plan_json=plan_json,
                corpus_sha256=request.corpus_sha256,
                tokenizer_digest=request.tokenizer_digest,
                start_step=request.start_step,
                start_id=request.start_id,
                tokens_per_inner_step=request.tokens_per_inner_step,
            )
            if decided.verdict is JoinVerdict.ACCEPTED:
                self._leases.renewed(request.island, loop_now())
            return decided.entries

        await self._change(decide)
        return decided

    async def _read_plan(self, island: str, content: bytes) -> str:
        """Read a joining island's plan: in a thread, one at a time, unless it is known.

        A thread that reads takes its time from the loop's: of one island no more than one is read
        at a time, and after one that is refused none for a while, whether the caller waits or not.

        Raises:
            ValueError: If it is none, or too large.
            Overloaded: If it is too soon for another of this island.
        """
        if self._is_plan(content):
            return self._membership.plan_json
        now = loop_now()
        self._unread_until = {name: at for name, at in self._unread_until.items() if at > now}
        if island in self._unread_until:
            raise Overloaded(f"a plan of island {island[:64]!r} was read just now: try later")
        self._unread_until[island] = math.inf
        reading = asyncio.create_task(self._in_thread(island, content))
        found = await asyncio.shield(reading)
        if isinstance(found, ValueError):
            raise found
        return found

    async def _in_thread(self, island: str, content: bytes) -> str | ValueError:
        """Read a plan; says what is wrong with what is none."""
        membership, quiet_s = self._membership, _REFUSED_PLAN_S
        try:
            async with self._reading:
                if self._is_plan(content):  # which the join before has fixed
                    quiet_s = 0.0
                    return membership.plan_json
                plan_json = await asyncio.to_thread(unpacked, content)
                if not await asyncio.to_thread(membership.plan_refusal, plan_json):
                    quiet_s = 0.0
                if plan_json == membership.plan_json and len(self._known) < _MOST_KNOWN:
                    self._known.add(blake3.blake3(content).digest())
                return plan_json
        except ValueError as error:
            return error
        finally:
            self._unread_until[island] = loop_now() + quiet_s

    def _is_plan(self, content: bytes) -> bool:
        plan_json = self._membership.plan_json
        if not plan_json:
            return False
        return content == packed(plan_json) or blake3.blake3(content).digest() in self._known

    async def _join_refused(self, call: IncomingCall, island: str, joined: Joined) -> JoinReply:
        logger.warning("join refused, island=%.100r verdict=%s", island, joined.verdict)
        assert joined.cause is not None
        # Without certificates and tokens anybody could fill another's count.
        is_known = call.caller is not None and island in self._membership.members
        self._run_status.refused(island if is_known else "", joined.cause)
        await self._end_if_over()
        return JoinReply(status=_STATUS[joined.verdict], message=_lines(joined.message))

    def _join_accepted(self, request: JoinRequest, incarnation: int) -> JoinReply:
        membership, terms, island = self._membership, self._run_status.terms, request.island
        is_resumed = self._is_resumed(island, incarnation)
        grant = Grant(
            run=membership.run,
            timeline=membership.timeline,
            island=island,
            incarnation=incarnation,
            roles=[ROLE_ISLAND],
            tokens_per_inner_step=request.tokens_per_inner_step,
        )
        reply = JoinReply(
            status=JOIN_STATUS_ACCEPTED,
            grant=sign(grant, self._secret),
            island_slot=membership.members[island].slot,
            policy_json=terms.policy_json,
            is_resumed=is_resumed,
            resume_step=membership.resume_step if is_resumed else 0,
            last_inner_step=self._last_inner_step(island),
            total_tokens=terms.total_tokens,
            lease_s=terms.lease_s,
            has_bucket=terms.has_bucket,
        )
        if membership.claims is not None:
            reply.claims_json = membership.claims.of(island)
        reply.syncers.extend(self._run_status.assignments())
        return reply

    def _is_resumed(self, island: str, incarnation: int) -> bool:
        """Whether this start restores the checkpoint: this timeline has published nothing yet.

        Where nobody waits for anybody others may have: there it is the island's first start.
        """
        if self._membership.rules.is_elastic:
            return self._membership.is_restoring(island, incarnation)
        return self._membership.timeline > 0 and not self._run_status.has_published

    def _last_inner_step(self, island: str) -> int:
        """Where the start of an island before this one was; what is durable may be a round older.

        It becomes durable with every record of a round, and when an island leaves.
        """
        if island in self._reached:
            return self._reached[island][1]
        return self._membership.last_inner_step(island)

    # -- reports -----------------------------------------------------------------------------------

    async def _report(self, call: IncomingCall) -> Reply:
        request = ReportRequest.FromString(call.header)
        if not self._is_granted(request.grant):
            self._run_status.refused("", Cause.GRANT)
            code = CoordinatorUnavailable.exit_code
            return Reply.of(ReportReply(stop=True, reason="the grant is not valid", exit_code=code))
        grant = request.grant
        self._check_bounds(request)
        if not self._membership.is_current(grant.island, grant.incarnation, grant.timeline):
            return Reply.of(self._fenced(grant))
        self._leases.renewed(grant.island, loop_now())
        revision, positions = self._positions_in(grant.island, request.position_json)
        told = [*self._word_of(request), *positions, *self._part_in(grant.island, request.cut)]
        await self._change(*(_of_current(grant, decide) for decide in told))
        if not self._membership.is_current(grant.island, grant.incarnation, grant.timeline):
            return Reply.of(self._fenced(grant))
        reply = self._answer(grant.island, revision)
        await self._state_transfers.reported(grant.island, request.transfer, reply)
        return Reply.of(reply)

    def _fenced(self, grant: Grant) -> ReportReply:
        """Tell a start that it does not count any more, and why."""
        membership = self._membership
        cause = membership.cause_against(grant.island, grant.incarnation, grant.timeline)
        self._run_status.refused(grant.island, cause)
        reason, exit_code = self._fenced_text(grant), Fenced.exit_code
        if membership.has_returned_from(grant.island, grant.timeline):
            exit_code = RunReturned.exit_code
        return ReportReply(stop=True, reason=reason, exit_code=exit_code)

    def _check_bounds(self, request: ReportRequest) -> None:
        """Refuse what no island says; a message of any length is cut.

        Raises:
            FrameError: If it does.
        """
        island = request.grant.island
        if request.state not in ISLAND_STATES:
            self._run_status.refused(island, Cause.FRAME)
            raise FrameError(f"a report's state is {request.state[:40]!r}")
        if (count := len(request.checkpoint_steps)) > MOST_CHECKPOINTS:
            self._run_status.refused(island, Cause.FRAME)
            raise FrameError(f"a report of {count} checkpoints; {MOST_CHECKPOINTS} are allowed")
        if (count := len(request.held_out)) > _MOST_HELD_OUT:
            self._run_status.refused(island, Cause.FRAME)
            raise FrameError(
                f"held-out losses of {count} checkpoints; {_MOST_HELD_OUT} are allowed"
            )
        request.message = bounded_text(request.message)

    def _word_of(self, request: ReportRequest) -> Iterator[Decide]:
        """Record where an island stands, what it keeps, and what it promises."""
        island, inner_step = request.grant.island, request.inner_step
        self._run_status.island_says(island, request)
        if inner_step:  # an older report may be handled later
            reached = request.grant.incarnation, inner_step
            self._reached[island] = max(self._reached.get(island, reached), reached)
        yield lambda m: m.reported(island)
        yield lambda m: m.keeps(island, request.checkpoint_steps, inner_step=inner_step)
        for each in request.held_out:
            yield functools.partial(self._voted, island, each.checkpoint, each.nats_per_byte)
        if request.has_hold:
            yield from self._promise(island, request.hold_step)

    def _voted(self, island: str, number: int, loss: float, membership: Membership) -> Entries:
        return membership.voted(island, number, loss, self._run_status.terms.judging)

    def _promise(self, island: str, hold_step: int) -> Iterator[Decide]:
        """Record the inner step that an island will not pass unasked, once that can be true.

        All stop after the largest: one that lies would keep a stop from its end. It is said again
        with each report, and those of the others may be older.
        """
        membership = self._membership
        if membership.promises is None or island in membership.promises:
            return  # nothing is asked, or it has promised
        lead = membership.members.rules.most_lead_steps
        others = [
            self._last_inner_step(other)
            for other in membership.members.counted
            if other != island and membership.members.lease_of(other) is Lease.ACTIVE
        ]
        if lead and others and hold_step > max(others) + lead:
            logger.warning(
                "island %s says that it can stop after inner step %d, which is not taken: it waits "
                "for the others at every merge, and they have come to %d; should it go on to say "
                "so, the stop goes on without it after diloco kick HOST:PORT %s",
                island, hold_step, max(others), island,
            )  # fmt: skip
            self._run_status.refused(island, Cause.BOUNDS)
            return
        yield lambda m: m.promise(island, hold_step)

    def _positions_in(self, island: str, position_json: str) -> tuple[float, tuple[Decide, ...]]:
        """Record how far an island's text is drawn; gives the newest revision it knows, too.

        Raises:
            FrameError: If it says what no island says.
        """
        claims = self._membership.claims
        if claims is None or not position_json:
            return math.inf, ()
        try:
            revision, said = claims.read_word(position_json)
        except ValueError as error:
            self._run_status.refused(island, Cause.FRAME)
            raise FrameError(f"a report's positions: {bounded_text(str(error))}") from error
        return revision, (lambda m: m.claims.told(island, said) if m.claims else (),)

    def _part_in(self, island: str, told: CutPart) -> Iterator[Decide]:
        """Record an island's part of a cut.

        Raises:
            FrameError: If it says what no island says.
        """
        membership = self._membership
        self._cut_patience.reported(island, told)
        if not told.number or told.is_being_written or membership.claims is None:
            return
        try:
            text = membership.claims.read_positions(told.text_json)
            count = len(membership.assignment.of_all(membership.plan_json))
            if len(told.versions) not in (0, count):
                raise ValueError(f"{len(told.versions)} versions; the plan has {count} fragments")
        except ValueError as error:
            self._run_status.refused(island, Cause.FRAME)
            raise FrameError(f"a part of a cut: {bounded_text(str(error))}") from error
        part = Part(told.inner_step, tuple(told.versions), text) if told.versions else None
        if membership.cuts.taken(membership.timeline, island, told.number, part):
            has = "no part" if part is None else "its part"
            logger.info("island %s has %s of cut %d", island, has, told.number)
            yield lambda m: m.cuts.taken(m.timeline, island, told.number, part)

    def _answer(self, island: str, revision: float) -> ReportReply:
        """Say what an island is to know and to do; of its slots what is newer than a revision."""
        membership, claims = self._membership, self._membership.claims
        cut, is_last_cut = membership.cuts.asked_of(membership.timeline, island)
        reply = ReportReply(
            claims_json=claims.of(island) if claims and claims.revision > revision else "",
            stop=bool(membership.fatal_reason),
            reason=membership.fatal_reason,
            exit_code=membership.fatal_exit_code,
            hold=membership.promises is not None,
            has_stop_step=membership.stop_step is not None,
            stop_step=membership.stop_step or 0,
            cut=cut,
            is_last_cut=is_last_cut,
            checkpoint_steps=membership.checkpoints,
            policy_revision=membership.settings.revision,
            policy_json=membership.settings.policy_json,
            drain=membership.members.lease_of(island) in (Lease.DRAINING, Lease.LEFT),
            away=self._run_status.away,
        )
        if self._run_status.is_halting and not reply.stop:
            # Not 0: that is the end of the run, and ranks do not agree on an error of 0.
            reply.stop, reply.exit_code = True, RunHalted.exit_code
            reply.reason = _HALTING
        elif membership.is_returning and not reply.stop:
            reply.stop, reply.exit_code = True, RunReturned.exit_code
            assert membership.candidates.pending is not None
            reply.reason = f"{_RETURNING}: {membership.candidates.pending.why}"
        return reply

    def _fenced_text(self, grant: Grant) -> str:
        """Say why a start counts no more, and what to do."""
        membership, island = self._membership, grant.island
        if membership.members.lease_of(island) is Lease.KICKED:
            return membership.members.kicked_text(island)
        if grant.timeline != membership.timeline:
            return (
                f"the run was resumed from {membership.checkpoint_name(membership.resume_step)} "
                f"(timeline {membership.timeline}), this start belongs to timeline "
                f"{grant.timeline}: start island {island!r} again"
            )
        if grant.incarnation == membership.members[island].incarnation:
            return (
                f"island {island!r} was taken out of the run while it was at work, and may join "
                f"again: start it again"
            )
        return (
            f"a newer start of island {island!r} has joined, and has taken the place of this "
            f"one: one `diloco island --island {island}` a run; see whether two were started "
            f"(diloco status shows the start at work, incarnation "
            f"{membership.members[island].incarnation}; this one is "
            f"{grant.incarnation}), and end the one that is not wanted"
        )

    # -- the end -----------------------------------------------------------------------------------

    async def _leave(self, call: IncomingCall) -> Reply:
        request = LeaveRequest.FromString(call.header)
        grant, membership = request.grant, self._membership
        start = grant.island, grant.incarnation, grant.timeline

        def left(membership: Membership) -> Entries:
            island, code = grant.island, request.exit_code
            if request.is_early and not code:
                gone = membership.left_early(island, self._last_inner_step(island))
            else:
                gone = membership.left(island, code, is_stopped=request.is_stopped)
            return gone + membership.positions({island: self._last_inner_step(island)})

        if self._is_granted(grant) and membership.is_current(*start):
            logger.info(
                "left, island=%s exit_code=%d: %s",
                grant.island, request.exit_code, bounded_text(request.reason),
            )  # fmt: skip
            self._run_status.last_words[grant.island] = bounded_text(request.reason)
            await self._change(_of_current(grant, left))
            await self._end_if_over()
        else:
            self._run_status.refused("", membership.cause_against(*start))
        return Reply.of(LeaveReply())


def _of_current(grant: Grant, decide: Decide) -> Decide:
    """Have nothing follow from what a start says that does not count any more."""
    start = grant.island, grant.incarnation, grant.timeline
    return lambda m: decide(m) if m.is_current(*start) else ()


def _lines(message: str) -> str:
    """Cut a refusal, line by line: it repeats what the caller has said."""
    lines = message.split("\n")
    shown = [bounded_text(line) for line in lines[:_MOST_LINES]]
    if len(lines) > _MOST_LINES:
        shown.append(f"and {len(lines) - _MOST_LINES} lines more")
    return "\n".join(shown)
