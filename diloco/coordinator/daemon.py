"""The coordinator's service: thin handlers over `Membership` and `Journal`.

Carries no tensor and imports no torch, so that a restart is quick. It never decides a round: what
it knows of rounds is an index of what the syncers reported.

Source: protocol.md sections 4, 7 and 8.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from google.protobuf.message import Message

from diloco.config.fields import MOST_CHECKPOINTS
from diloco.config.schema import Config
from diloco.coordinator.admission import Entries, JoinVerdict
from diloco.coordinator.board import Board
from diloco.coordinator.cut_patience import CutPatience
from diloco.coordinator.cuts import Part
from diloco.coordinator.grants import is_valid, sign
from diloco.coordinator.heals import Heals
from diloco.coordinator.journal import Journal, RoundRow
from diloco.coordinator.leases import COUNTED_SHARE, Lease, Leases
from diloco.coordinator.membership import Membership
from diloco.coordinator.operations import decide
from diloco.coordinator.syncer_desk import SyncerDesk
from diloco.coordinator.tape import told_of
from diloco.coordinator.terms import Terms, terms_of
from diloco.durable import DiskFull
from diloco.errors import ConfigError, CoordinatorUnavailable, Fenced, QuorumLost
from diloco.peer_texts import bounded_text
from diloco.refusals import Cause
from protos.control_pb2 import (
    JOIN_STATUS_ACCEPTED,
    JOIN_STATUS_FINGERPRINT_MISMATCH,
    JOIN_STATUS_KICKED,
    JOIN_STATUS_PLAN_MISMATCH,
    JOIN_STATUS_RUN_FULL,
    JOIN_STATUS_RUN_STOPPED,
    JOIN_STATUS_UNKNOWN_ISLAND,
    JOIN_STATUS_VERSION_MISMATCH,
    JOIN_STATUS_WRONG_RUN,
    ROLE_ISLAND,
    ROLE_SYNCER,
    ClockReply,
    FragmentStatus,
    Grant,
    JoinReply,
    JoinRequest,
    LeaveReply,
    LeaveRequest,
    OperateReply,
    OperateRequest,
    ReportReply,
    ReportRequest,
    StandingRequest,
    StatusReply,
    StatusRequest,
)
from transport.contracts import PROTOCOL_VERSION, Handlers, IncomingCall, Reply
from transport.errors import FrameError

logger = logging.getLogger(__name__)

_WATCH_S = 1.0
#: Seconds since its last word for which an island that is away at the end of a run is waited for.
RETURN_S = 30.0
_MAX_START_ID = 64
#: Characters of an operator's command with its arguments.
_MOST_COMMAND = 4096
#: Differences that one refusal names.
_MOST_LINES = 16
#: What an island may say that it is doing: operators read it, and metrics are named by it.
ISLAND_STATES = frozenset({"", "waiting", "training", "flushing", "finished", "stopped", "failed"})

_HALTING = (
    "the operator has stopped the run. Nothing published is lost: start the coordinator again, "
    "then this island"
)

_STATUS = {
    JoinVerdict.ACCEPTED: JOIN_STATUS_ACCEPTED,
    JoinVerdict.FINGERPRINT_MISMATCH: JOIN_STATUS_FINGERPRINT_MISMATCH,
    JoinVerdict.KICKED: JOIN_STATUS_KICKED,
    JoinVerdict.PLAN_MISMATCH: JOIN_STATUS_PLAN_MISMATCH,
    JoinVerdict.RUN_FULL: JOIN_STATUS_RUN_FULL,
    JoinVerdict.RUN_STOPPED: JOIN_STATUS_RUN_STOPPED,
    JoinVerdict.UNKNOWN_ISLAND: JOIN_STATUS_UNKNOWN_ISLAND,
    JoinVerdict.WRONG_RUN: JOIN_STATUS_WRONG_RUN,
}


@dataclass(slots=True)
class Operations:
    """What an operator's commands need of the process around the coordinator.

    Args:
        config: In force.
        on_config: Hears, after it became durable, what is in force from now on.
        backup: Copies the run's state, as the arguments say; returns what it did, in words.
    """

    config: Config
    on_config: Callable[[Config], None]
    backup: Callable[[Mapping[str, str]], Awaitable[str]]


class Coordinator:
    """One run's control plane. `handlers` go to a server; `ended` is set when the run is over.

    `board` shows how the run stands; `is_halting` says that everybody is to end, with nothing lost.
    """

    def __init__(
        self,
        *,
        membership: Membership,
        journal: Journal,
        secret: bytes,
        terms: Terms,
        unix_clock: Callable[[], float],
        operations: Operations | None = None,
    ) -> None:
        """Assign only; the journal must be open and its entries applied to `membership`.

        Without `operations` no command of an operator is taken.
        """
        self._membership = membership
        self._journal = journal
        self._secret = secret
        self._terms = terms
        self._unix_clock = unix_clock
        self._operations = operations
        self._leases = Leases(terms.lease_s)
        # Island -> its newest start and how far that came, as was reported, durable or not.
        self._reached: dict[str, tuple[int, int]] = {}
        self.board = Board(membership, journal, self._leases, terms)
        self._syncer_desk = SyncerDesk(
            membership,
            self.board,
            insist=self._insist_on_syncer,
            index=self._index,
            tell=lambda told: self._journal.write((), told=[told]),
            keep=self._keep,
            on_lost=self.lose,
        )
        self._heals = Heals(membership, keep=self._keep)
        self._cut_patience = CutPatience(membership, keep=self._keep)
        membership.rules = terms.rules
        membership.merged_tokens = lambda: self.board.merged_tokens
        self.ended = asyncio.Event()

    @property
    def handlers(self) -> Handlers:
        """Method name -> handler."""
        return {
            "control.join": self._join,
            "control.report": self._report,
            "control.leave": self._leave,
            "control.status": self._status,
            "control.standing": self._standing,
            "control.clock": self._clock,
            "control.operate": self._operate,
            **self._syncer_desk.handlers,
        }

    def fail(self, reason: str, exit_code: int) -> None:
        """End the run for now: every island is told at its next report, a restart tries anew."""
        remedy = (
            "nothing published is lost, the run goes on where it was: diloco coordinator RUN.toml; "
            "then every island that has ended"
        )
        self._membership.apply(self._failed(f"{reason}; {remedy}", exit_code))
        self.ended.set()

    def lose(self, reason: str, exit_code: int) -> None:
        """End the run for good: rounds cannot go on."""
        self._keep(self._failed(reason, exit_code))
        self.ended.set()

    def halt(self) -> None:
        """End everything, with nothing lost: every island is told at its next report."""
        logger.info("halting")
        self.board.is_halting = True
        self.ended.set()

    @property
    def is_halting(self) -> bool:
        """Whether everybody is to end, with nothing lost."""
        return self.board.is_halting

    def refused(self, island: str, cause: Cause) -> None:
        """Count a refusal; `island` is empty where nobody has proved whose call it was."""
        self.board.refused(island, cause)

    def fragment_stands(self, status: FragmentStatus) -> None:
        """Take note of how a fragment stands, for people."""
        self.board.fragment_stands(status)

    def status(self) -> StatusReply:
        """Everything an operator sees."""
        return self.board.status()

    def is_island(self, grant: Grant) -> bool:
        """Whether a grant is valid, and of the newest start of its island in this timeline."""
        is_current = self._membership.is_current(grant.island, grant.incarnation, grant.timeline)
        return is_current and self._is_granted(grant, ROLE_ISLAND)

    def request_stop(self) -> bool:
        """Ask all islands to stop with a checkpoint; false if none of them could be complete."""
        if entries := self._membership.request_stop():
            self._keep(entries)
            logger.info("stop requested")
        return self._membership.is_stopping

    # -- time --------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """End leases, and a stop that an island has stayed away from; watches for ever.

        What cannot be written for want of room is looked at again, once there is some.
        """
        self._leases.restarted(self._membership.members, _now())
        while True:
            self._leases.looked(_now())
            await asyncio.sleep(min(_WATCH_S, COUNTED_SHARE * self._terms.lease_s))
            self._leases.looked(_now())
            with contextlib.suppress(DiskFull):  # the journal has said so
                self._look()

    def _look(self) -> None:
        """Act on what time has brought.

        Raises:
            DiskFull: If there is no room to write it down: nothing of it has happened.
        """
        self._end_leases()
        self._keep(self._membership.follow_ups())
        self._cut_when_due()
        self._cut_patience.look(_now(), self._terms.unreachable_s)
        self._end_if_over()
        too_long = self._terms.unreachable_s
        silent = [
            i for i in self._membership.members if self._leases.silent_s(i, _now()) > too_long
        ]
        self._stop_without(silent)

    def _cut_when_due(self) -> None:
        """Ask for a run checkpoint, one in so many tokens that all fragments have merged."""
        membership = self._membership
        if not membership.live or membership.merged_tokens() >= self._terms.total_tokens:
            return
        if membership.is_cut_due(self._terms.cut_tokens):
            self._keep(membership.cut())

    def _end_leases(self) -> None:
        """Act on the islands that were silent for a term."""
        membership = self._membership
        silent = self._leases.expired(membership.holders, _now())
        if not silent or membership.promises is not None:  # a stop has its own patience
            return
        away = f"not heard of for {self._terms.lease_s:g} s (coordinator.lease)"
        policy = "wait" if membership.rules.is_elastic else membership.rules.on_member_lost
        if policy != "wait" and silent == membership.holders:
            return  # nobody waits for anybody
        logger.warning("%s, islands=%s", away, ", ".join(silent))
        match policy:
            case "wait":
                self._keep(membership.lapsed(silent))
            case "shrink":
                self._keep(membership.kicked(silent, f"{away}, and on_member_lost = shrink"))
            case "stop":
                lost = ", ".join(silent)
                self.fail(
                    f"{lost} {'was' if len(silent) == 1 else 'were'} {away}, and "
                    f"outer.on_member_lost = stop (wait and shrink go on)",
                    QuorumLost.exit_code,
                )
        self._end_if_over()

    def _stop_without(self, silent: list[str]) -> None:
        membership = self._membership
        if not (lacks := membership.stop_lacks(silent)):
            return
        is_complete = membership.is_stop_complete
        self._keep(membership.stop_without(lacks))
        if is_complete:
            logger.warning("stopped without a last word of %s", ", ".join(lacks))
            self._end_if_over()
            return
        awaited = "; ".join(f"island {island!r} owes {what}" for island, what in lacks.items())
        self.fail(
            f"the graceful stop cannot end: {awaited}, and has not reported for "
            f"{self._terms.unreachable_s:g} s (transport.unreachable). The stop is taken back",
            QuorumLost.exit_code,
        )

    async def _join(self, call: IncomingCall) -> Reply:
        request = JoinRequest.FromString(call.header)
        if request.protocol_version != PROTOCOL_VERSION:
            message = (
                f"you speak protocol version {request.protocol_version}, this coordinator "
                f"{PROTOCOL_VERSION}: install the same version of diloco everywhere"
            )
            self.refused("", Cause.PROTOCOL_VERSION)
            return _reply(JoinReply(status=JOIN_STATUS_VERSION_MISMATCH, message=message))
        if len(request.start_id) > _MAX_START_ID:
            self.refused("", Cause.FRAME)
            raise FrameError(
                f"a start id of {len(request.start_id)} characters; {_MAX_START_ID} are allowed"
            )
        joined = self._membership.join(
            run=request.run,
            island=request.island,
            identity_json=request.identity_json,
            plan_json=request.plan_json,
            corpus_sha256=request.corpus_sha256,
            tokenizer_digest=request.tokenizer_digest,
            start_step=request.start_step,
            start_id=request.start_id,
        )
        self._keep(joined.entries)
        if joined.verdict is not JoinVerdict.ACCEPTED:
            logger.warning("join refused, island=%.100r verdict=%s", request.island, joined.verdict)
            assert joined.cause is not None
            # Without certificates and tokens anybody could fill another's count.
            is_known = call.caller is not None and request.island in self._membership.members
            self.refused(request.island if is_known else "", joined.cause)
            self._end_if_over()
            return _reply(JoinReply(status=_STATUS[joined.verdict], message=_lines(joined.message)))
        self._leases.renewed(request.island, _now())
        if joined.entries:
            logger.info("joined, island=%s incarnation=%d", request.island, joined.incarnation)
        is_resumed = self._is_resumed(request.island, joined.incarnation)
        grant = Grant(
            run=self._membership.run,
            timeline=self._membership.timeline,
            island=request.island,
            incarnation=joined.incarnation,
            roles=[ROLE_ISLAND],
        )
        reply = JoinReply(
            status=JOIN_STATUS_ACCEPTED,
            grant=sign(grant, self._secret),
            island_slot=self._membership.members[request.island].slot,
            policy_json=self._terms.policy_json,
            is_resumed=is_resumed,
            resume_step=self._membership.resume_step if is_resumed else 0,
            last_inner_step=self._last_inner_step(request.island),
            total_tokens=self._terms.total_tokens,
            lease_s=self._terms.lease_s,
        )
        if self._membership.claims is not None:
            reply.claims_json = self._membership.claims.of(request.island)
        reply.syncers.extend(self.board.assignments())
        return _reply(reply)

    async def _report(self, call: IncomingCall) -> Reply:
        request = ReportRequest.FromString(call.header)
        if not self._is_granted(request.grant, ROLE_ISLAND):
            self.refused("", Cause.GRANT)
            return _reply(ReportReply(stop=True, reason="the grant is not valid", exit_code=30))
        grant, membership = request.grant, self._membership
        if request.state not in ISLAND_STATES:
            self.refused(grant.island, Cause.FRAME)
            raise FrameError(f"a report's state is {request.state[:40]!r}")
        if (count := len(request.checkpoint_steps)) > MOST_CHECKPOINTS:
            self.refused(grant.island, Cause.FRAME)
            raise FrameError(f"a report of {count} checkpoints; {MOST_CHECKPOINTS} are allowed")
        request.message = bounded_text(request.message)
        if not membership.is_current(grant.island, grant.incarnation, grant.timeline):
            cause = membership.cause_against(grant.island, grant.incarnation, grant.timeline)
            self.refused(grant.island, cause)
            return _reply(
                ReportReply(stop=True, reason=self._fenced(grant), exit_code=Fenced.exit_code)
            )
        self._leases.renewed(grant.island, _now())
        self.board.island_says(grant.island, request)
        if request.inner_step:  # an older report may be handled later
            reached = grant.incarnation, request.inner_step
            self._reached[grant.island] = max(self._reached.get(grant.island, reached), reached)
        self._keep(membership.reported(grant.island))
        steps, inner_step = request.checkpoint_steps, request.inner_step
        self._keep(membership.keeps(grant.island, steps, inner_step=inner_step))
        if request.has_hold:
            self._keep(membership.promise(grant.island, request.hold_step))
        claims_json = self._take_positions(grant.island, request.position_json)
        self._take_part(grant.island, request)
        cut, is_last_cut = membership.cuts.asked_of(membership.timeline, grant.island)
        reply = ReportReply(
            claims_json=claims_json,
            stop=bool(membership.fatal_reason),
            reason=membership.fatal_reason,
            exit_code=membership.fatal_exit_code,
            hold=membership.promises is not None,
            has_stop_step=membership.stop_step is not None,
            stop_step=membership.stop_step or 0,
            cut=cut,
            is_last_cut=is_last_cut,
            checkpoint_steps=membership.checkpoints,
            policy_revision=membership.policy_revision,
            drain=membership.standing(grant.island) in (Lease.DRAINING, Lease.LEFT),
        )
        self._heals.heard(grant.island, request.heal, reply)
        if membership.settings:
            reply.policy_json = json.dumps(membership.policy)
        if self.is_halting and not reply.stop:
            # Not 0: that is the end of the run, and ranks do not agree on an error of 0.
            reply.stop, reply.exit_code = True, CoordinatorUnavailable.exit_code
            reply.reason = _HALTING
        return _reply(reply)

    def _take_positions(self, island: str, position_json: str) -> str:
        """Take note of how far an island's text is drawn; returns its slots where they are news.

        Raises:
            FrameError: If it says what no island says.
        """
        claims = self._membership.claims
        if claims is None or not position_json:
            return ""
        try:
            revision, said = claims.read_word(position_json)
        except ValueError as error:
            self.refused(island, Cause.FRAME)
            raise FrameError(f"a report's positions: {bounded_text(str(error))}") from error
        self._keep(claims.told(island, said))
        return claims.of(island) if claims.revision > revision else ""

    def _take_part(self, island: str, request: ReportRequest) -> None:
        """Take note of an island's part of a cut.

        Raises:
            FrameError: If it says what no island says.
        """
        membership, told = self._membership, request.cut
        self._cut_patience.heard(island, told)
        if not told.number or told.is_being_written or membership.claims is None:
            return
        try:
            text = membership.claims.read_positions(told.text_json)
            count = len(membership.assignment.of_all(membership.plan_json))
            if len(told.versions) not in (0, count):
                raise ValueError(f"{len(told.versions)} versions; the plan has {count} fragments")
        except ValueError as error:
            self.refused(island, Cause.FRAME)
            raise FrameError(f"a part of a cut: {bounded_text(str(error))}") from error
        part = Part(told.inner_step, tuple(told.versions), text) if told.versions else None
        if entries := membership.cuts.taken(membership.timeline, island, told.number, part):
            has = "no part" if part is None else "its part"
            logger.info("island %s has %s of cut %d", island, has, told.number)
            self._keep(entries)

    def _last_inner_step(self, island: str) -> int:
        """Where the start of an island before this one was; what is durable may be a round older.

        It becomes durable with every record of a round, and when an island leaves.
        """
        inner_steps = self._inner_steps
        return inner_steps.get(island, self._membership.last_inner_step(island))

    @property
    def _inner_steps(self) -> dict[str, int]:
        return {island: inner_step for island, (_, inner_step) in self._reached.items()}

    def _index(self, row: RoundRow) -> None:
        """Index a durable record, and with it how far the islands have come."""
        entries = self._membership.positions(self._inner_steps)
        for _ in range(self._journal.write(entries, [row])):
            self.refused("", Cause.CONFLICT)
        self._membership.apply(entries)

    def _fenced(self, grant: Grant) -> str:
        if self._membership.standing(grant.island) is Lease.KICKED:
            return self._membership.kicked_text(grant.island)
        if grant.timeline != self._membership.timeline:
            return (
                f"the run was resumed from inner step {self._membership.resume_step} (timeline "
                f"{self._membership.timeline}), this start belongs to timeline {grant.timeline}: "
                f"start island {grant.island!r} again"
            )
        return (
            f"a newer start of island {grant.island!r} has joined, and has taken the place of this "
            f"one: one `diloco island --island {grant.island}` a run; see whether two were started "
            f"(diloco status shows the start at work, incarnation "
            f"{self._membership.members[grant.island].incarnation}; this one is "
            f"{grant.incarnation}), and end the one that is not wanted"
        )

    async def _leave(self, call: IncomingCall) -> Reply:
        request = LeaveRequest.FromString(call.header)
        grant, membership = request.grant, self._membership
        if self._is_granted(grant, ROLE_ISLAND) and membership.is_current(
            grant.island, grant.incarnation, grant.timeline
        ):
            logger.info(
                "left, island=%s exit_code=%d: %s",
                grant.island, request.exit_code, bounded_text(request.reason),
            )  # fmt: skip
            self._keep(
                membership.left(grant.island, request.exit_code, is_stopped=request.is_stopped)
                + membership.positions(self._inner_steps)
            )
            self._end_if_over()
        else:
            self.refused(
                "", membership.cause_against(grant.island, grant.incarnation, grant.timeline)
            )
        return _reply(LeaveReply())

    async def _clock(self, call: IncomingCall) -> Reply:
        return _reply(ClockReply(unix_s=self._unix_clock()))

    async def _status(self, call: IncomingCall) -> Reply:
        StatusRequest.FromString(call.header)
        return _reply(self.status())

    async def _standing(self, call: IncomingCall) -> Reply:
        island = StandingRequest.FromString(call.header).island
        reply = self.board.standing()
        # A stranger on a trusted network could name any island: that is `control.status`.
        is_proved = call.caller is not None or call.is_local
        if is_proved and island in self._membership.members:
            reply.island.CopyFrom(self.board.island_status(island))
        return _reply(reply)

    async def _operate(self, call: IncomingCall) -> Reply:
        request = OperateRequest.FromString(call.header)
        operations, arguments = self._operations, dict(request.arguments)
        size = len(request.command) + sum(len(k) + len(v) for k, v in arguments.items())
        if size > _MOST_COMMAND:
            raise FrameError(f"a command of {size} characters; {_MOST_COMMAND} are allowed")
        if operations is None:
            return _reply(OperateReply(message="this coordinator takes no commands"))
        if request.command == "backup":
            return _reply(await self._back_up(operations, call, arguments))
        decision = decide(request.command, arguments, self._membership, operations.config)
        if decision.entries or decision.is_halting:
            operated = self._operated(call, request.command, arguments, decision.message)
            try:
                self._keep(decision.entries + operated)
            except DiskFull:  # the journal has said so, and that is no reason to go on
                if not decision.is_halting:
                    raise
        if decision.config is not None:
            self._take(decision.config)
        if decision.is_halting:
            self.halt()
        self._end_if_over()
        return _reply(OperateReply(is_done=decision.is_done, message=decision.message))

    async def _back_up(
        self, operations: Operations, call: IncomingCall, arguments: dict[str, str]
    ) -> OperateReply:
        """Copy the state; that somebody takes it away is durable before anything is copied."""
        with_secret = "with" if arguments.get("with_secret") else "without"
        begun = f"copying to {arguments.get('directory', '')!r}, {with_secret} the run secret"
        self._keep(self._operated(call, "backup", arguments, begun))
        try:
            message, is_done = await operations.backup(arguments), True
        except ConfigError as error:
            message, is_done = str(error), False
        self._keep(self._operated(call, "backup", arguments, message))
        return OperateReply(is_done=is_done, message=message)

    def _operated(
        self, call: IncomingCall, command: str, arguments: Mapping[str, str], message: str
    ) -> Entries:
        """Note what an operator does, and who it is: by certificate or token, else from where."""
        by = call.peer if call.caller is None else call.caller.short
        logger.info("operator %s: %s %s", by, command, arguments)
        what = {"by": by, "command": command, "arguments": dict(arguments), "message": message}
        return self._membership.operated({**what, "unix_s": self._unix_clock()})

    def _take(self, config: Config) -> None:
        """Obey another configuration from now on."""
        assert self._operations is not None
        self._operations.config = config
        self._terms = self.board.terms = terms_of(config)
        self._membership.rules = self._terms.rules
        self._leases.term_s = self._terms.lease_s
        self._operations.on_config(config)

    def _keep(self, entries: Entries) -> None:
        """Make what membership decided durable, then true, and what follows from it."""
        while entries:
            self._journal.write(entries, told=told_of(entries))
            self._membership.apply(entries)
            entries = self._membership.follow_ups()

    def _end_if_over(self) -> None:
        """End with the run; an island that may be starting again is to hear of its end, too."""
        membership, now = self._membership, _now()
        is_awaited = any(self._leases.silent_s(i, now) < RETURN_S for i in membership.away)
        if membership.is_stopped or (membership.is_finished and not is_awaited):
            self.ended.set()
        elif self._membership.is_stopped_in_vain and not self.ended.is_set():
            self._keep(self._membership.cuts.taken_back(self._membership.timeline))
            self.fail(
                "the graceful stop came to nothing: no island could write its part of a last cut, "
                "or a syncer has lost what the parts hold (the coordinator's log says which)"
                + (f": {damage}" if (damage := self.board.damage) else ""),
                QuorumLost.exit_code,
            )

    def _failed(self, reason: str, exit_code: int) -> Entries:
        entries = self._membership.failed(reason, exit_code)
        if entries:
            logger.error("run failed, exit_code=%d: %s", exit_code, reason)
        return entries

    def _is_resumed(self, island: str, incarnation: int) -> bool:
        """Whether this start restores the checkpoint: this timeline has published nothing yet.

        Where nobody waits for anybody others may have: there it is the island's first start.
        """
        if self._membership.rules.is_elastic:
            return self._membership.is_restoring(island, incarnation)
        timeline = self._membership.timeline
        return timeline > 0 and not self._journal.has_rounds(timeline)

    def _is_granted(self, grant: Grant, role: int) -> bool:
        return is_valid(
            grant,
            self._secret,
            run=self._membership.run,
            role=role,
            now_unix_s=self._unix_clock(),
        )

    def _insist_on_syncer(self, grant: Grant) -> None:
        is_current = grant.timeline == self._membership.timeline
        if not (is_current and self._is_granted(grant, ROLE_SYNCER)):
            self.refused("", Cause.GRANT if is_current else Cause.TIMELINE)
            raise PermissionError("the syncer's grant is not valid for this run and its timeline")


def _reply(message: Message) -> Reply:
    return Reply(message.SerializeToString())


def _now() -> float:
    return asyncio.get_running_loop().time()


def _lines(message: str) -> str:
    """Cut a refusal, line by line: it repeats what the caller has said."""
    lines = message.split("\n")
    shown = [bounded_text(line) for line in lines[:_MOST_LINES]]
    if len(lines) > _MOST_LINES:
        shown.append(f"and {len(lines) - _MOST_LINES} lines more")
    return "\n".join(shown)
