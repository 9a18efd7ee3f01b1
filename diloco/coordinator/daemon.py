"""The coordinator's service: thin handlers over `Membership` and `Journal`.

Carries no tensor and imports no torch, so that a restart is quick. It never decides a round: what
it knows of rounds is an index of what the syncers reported.

Source: PROTOCOL.md, "Authority", "Membership" and "Lost runs".
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence

from diloco.bounded_text import MOST_ENDING, bounded_text
from diloco.config.schema import Config
from diloco.coordinator.changes import Changes
from diloco.coordinator.fragment_moves import FragmentMoves, SyncerStores
from diloco.coordinator.grants import is_valid
from diloco.coordinator.island_service import IslandService
from diloco.coordinator.journal import AuditEntry, Journal
from diloco.coordinator.operator_service import Operations, OperatorService
from diloco.coordinator.reported_alarms import ReportedAlarms
from diloco.coordinator.run_status import RunStatus
from diloco.coordinator.syncer_service import SyncerService
from diloco.durable import DiskFull
from diloco.errors import QuorumLost
from diloco.loop_clock import loop_now
from diloco.protocol.run.absences import news_of_away
from diloco.protocol.run.alarms import Alarm, AlarmKind
from diloco.protocol.run.candidates import BAD_IN_A_ROW
from diloco.protocol.run.cut_patience import CutPatience
from diloco.protocol.run.leases import COUNTED_SHARE, Leases
from diloco.protocol.run.membership import Membership
from diloco.protocol.run.terms import Terms, terms_of
from diloco.protos.control_pb2 import (
    ROLE_ISLAND,
    ROLE_SYNCER,
    ClockReply,
    FragmentStatus,
    Grant,
    RunStateRequest,
    StatusReply,
    StatusRequest,
)
from diloco.refusals import Cause
from diloco.transport.contracts import Handlers, IncomingCall, Reply
from diloco.transport.errors import Unauthorised

logger = logging.getLogger(__name__)

_WATCH_S = 1.0
#: Seconds since its last word for which an island that is away at the end of a run is waited for.
RETURN_S = 30.0


class Coordinator:
    """One run's control plane. `handlers` go to a server; `ended` is set when the run is over.

    `run_status` shows how the run stands; `is_halting` says that everybody is to end, with nothing
    lost.
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
        problems: Callable[[], Mapping[AlarmKind, str]] = dict,
        lease: int = 0,
        policy_digest: str = "",
    ) -> None:
        """Assign only; the journal must be open and its entries applied to `membership`.

        Without `operations` no command of an operator is taken. `problems` says what the process
        around this has found out: certificates that end soon, an object store that is away.
        `lease` is that of the run's state in an object store, 0: it is in none, and `policy_digest`
        of the policy that the file has.
        """
        self._membership = membership
        self._changes = Changes(membership, journal, on_made=self._made)
        self._change = self._changes.make
        self._secret = secret
        self._unix_clock = unix_clock
        self._problems = problems
        self._leases = Leases(terms.lease_s)
        #: Checkpoint -> loop time from which on it was complete.
        self._complete_since = dict.fromkeys(membership.checkpoints, -math.inf)
        self.alarms = ReportedAlarms(record=self._record, unix_clock=unix_clock)
        self.run_status = RunStatus(membership, journal, self._leases, terms, self.alarms)
        self._cut_patience = CutPatience(membership, change=self._change)
        self._island_service = IslandService(
            membership,
            self.run_status,
            self._leases,
            self._cut_patience,
            secret=secret,
            is_granted=lambda grant: self._is_granted(grant, ROLE_ISLAND),
            change=self._change,
            end_if_over=self._end_if_over,
        )
        self._syncer_service = SyncerService(
            membership,
            self.run_status,
            check_grant=self._check_syncer,
            is_behind=lambda grant: (
                grant.timeline < membership.timeline and self._is_granted(grant, ROLE_SYNCER)
            ),
            lease=lease,
            policy_digest=policy_digest,
            changes=self._changes,
            inner_steps=lambda: self._island_service.inner_steps,
            named_transfers=lambda: self._island_service.named_transfers,
            on_lost=self.lose,
        )
        self._operator_service = OperatorService(
            membership,
            operations,
            unix_clock=unix_clock,
            change=self._change,
            apply_config=self._apply_config,
            halt=self.halt,
            end_if_over=self._end_if_over,
        )
        self._away: list[str] = []
        membership.members.rules = terms.rules
        membership.merged_tokens = lambda: self.run_status.merged_tokens
        self.ended = asyncio.Event()

    @property
    def handlers(self) -> Handlers:
        """Method name -> handler."""
        return {
            "control.status": self._status,
            "control.standing": self._run_state,
            "control.clock": self._clock,
            **self._island_service.handlers,
            **self._syncer_service.handlers,
            **self._operator_service.handlers,
        }

    def fail(self, reason: str, exit_code: int) -> None:
        """End the run for now: every island is told at its next report, a restart tries again."""
        remedy = (
            "nothing published is lost, the run goes on where it was: diloco coordinator RUN.toml; "
            "then every island that has ended"
        )
        reason = self._ending(f"{reason}; {remedy}", exit_code)
        self._membership.apply(self._membership.failed(reason, exit_code))
        self.ended.set()

    async def lose(self, reason: str, exit_code: int) -> None:
        """End the run for good: rounds cannot go on."""
        reason = self._ending(reason, exit_code)
        await self._change(lambda m: m.failed(reason, exit_code))
        self.ended.set()

    def halt(self) -> None:
        """End everything, with nothing lost: every island is told at its next report."""
        logger.info("halting")
        self.run_status.is_halting = True
        self.ended.set()

    @property
    def is_halting(self) -> bool:
        """Whether everybody is to end, with nothing lost."""
        return self.run_status.is_halting

    def refused(self, island: str, cause: Cause) -> None:
        """Count a refusal; `island` is empty where nobody has proved whose call it was."""
        self.run_status.refused(island, cause)

    def fragment_stands(self, status: FragmentStatus) -> None:
        """Record how a fragment stands, for people."""
        self.run_status.fragment_stands(status)

    def status(self) -> StatusReply:
        """Everything an operator sees."""
        return self.run_status.status()

    async def request_stop(self) -> bool:
        """Ask all islands to stop with a checkpoint; false if none of them could be complete."""
        was_stopping = self._membership.is_stopping
        await self._change(lambda m: m.request_stop())
        if self._membership.is_stopping and not was_stopping:
            logger.info("stop requested")
        return self._membership.is_stopping

    async def settled(self) -> None:
        """Return once all that was decided is durable, or cannot be; the server has stopped."""
        self.alarms.write()  # of last reports
        await self._changes.settled()

    # -- time --------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """End leases, and a stop that an island has stayed away from; watches for ever.

        What cannot be written for want of room is looked at again, once there is some.
        """
        self._leases.restarted(self._membership.members, loop_now())
        while True:
            self._leases.looked(loop_now())
            await asyncio.sleep(min(_WATCH_S, COUNTED_SHARE * self.run_status.terms.lease_s))
            self._leases.looked(loop_now())
            with contextlib.suppress(DiskFull):  # the journal has said so
                await self._look()
            self._tell_away()

    async def move_fragments(self, stores: SyncerStores) -> None:
        """See moves of fragments between syncers through; watches for ever."""
        await FragmentMoves(self._membership, self.run_status, self._change, stores).watch()

    def _tell_away(self) -> None:
        """Say in a line who is away, and what comes of it, once it is so."""
        before, self._away = self._away, self.run_status.away
        for text in news_of_away(before, self._away):
            logger.warning("%s", text)

    async def _look(self) -> None:
        """Act on what time has brought.

        Raises:
            DiskFull: If there is no room to write it down: nothing of it has happened.
        """
        await self._end_leases()
        await self._change(lambda m: m.follow_ups())
        await self._cut_when_due()
        await self._cut_patience.look(loop_now(), self.run_status.terms.unreachable_s)
        await self._return_if_decided()
        self._raise_alarms()
        self.alarms.write()
        await self._end_if_over()
        too_long = self.run_status.terms.unreachable_s
        silent = [
            i for i in self._membership.members if self._leases.silent_s(i, loop_now()) > too_long
        ]
        await self._stop_without(silent)

    async def _return_if_decided(self) -> None:
        """End the service for a return of the run by itself, or for good where that may not be."""
        membership = self._membership
        if not membership.is_returning:
            return
        pending = membership.candidates.pending
        assert pending is not None
        judging = self.run_status.terms.judging
        if membership.lost_by_returns(judging):
            await self._change(lambda m: m.lost_by_returns(judging))
        else:
            accused = self._accused(pending.to)
            await self._change(lambda m: m.candidates.accuse(accused) if m.is_returning else ())
            logger.error("the run returns by itself: %s", pending.why)
        self.ended.set()

    def _accused(self, to: int) -> set[str]:
        """Name the islands that something speaks against since checkpoint `to`, or last return.

        Where they are fewer than the others; none where the islands are fixed. What speaks against
        most says nothing: on ruined parameters every island finds its own loss far off.
        """
        membership = self._membership
        live, accused = set(membership.members.live), set[str]()
        since = self._complete_since.get(to, -math.inf)
        now_accused = self.alarms.accused(loop_now(), since)
        for each in (*now_accused, set(membership.candidates.accused)):
            if 2 * len(each & live) < len(live):
                accused |= each & live
        num_left = len(live) - len(accused)
        is_enough = num_left >= membership.rules.min_islands or not membership.rules.is_elastic
        return accused if len(accused) < num_left and is_enough else set()

    def _raise_alarms(self) -> None:
        """Raise what the judged checkpoints say, as long as it holds."""
        membership, candidates, now = self._membership, self._membership.candidates, loop_now()
        holding = dict[AlarmKind, tuple[str, int]]()
        if text := candidates.alarm:
            holding[AlarmKind.CANDIDATE_BAD] = text, max(1, candidates.num_bad)
        if candidates.num_bad >= BAD_IN_A_ROW:
            holding[AlarmKind.LOSS_RISES] = text, candidates.num_bad
        if candidates.pending is not None:
            to = membership.checkpoint_name(candidates.pending.to)
            text = f"the run is to return to {to}{candidates.without_text}: "
            text += candidates.pending.why
            holding[AlarmKind.RETURN] = text, 1
        elif candidates.last_return:
            holding[AlarmKind.RETURN] = candidates.last_return, candidates.num_returns
        holding |= {kind: (text, 1) for kind, text in self._problems().items()}
        for kind, (text, count) in holding.items():
            self.alarms.raise_(Alarm(kind, text), now, count=count)
        if len(membership.members.live) == 2:  # of more, the loss that rises may be of a third
            self.alarms.suspect(now)

    async def _cut_when_due(self) -> None:
        """Ask for a run checkpoint, one in so many tokens that all fragments have merged."""
        membership = self._membership
        if (
            not membership.members.live
            or membership.merged_tokens() >= self.run_status.terms.total_tokens
        ):
            return
        every = self.run_status.terms.cut_tokens
        await self._change(lambda m: m.cut() if m.members.live and m.is_cut_due(every) else ())

    async def _end_leases(self) -> None:
        """Act on the islands that were silent for a term."""
        membership = self._membership
        silent = self._silent(membership)
        if not silent or membership.promises is not None:  # a stop has its own patience
            return
        away = f"not heard of for {self.run_status.terms.lease_s:g} s (coordinator.lease)"
        policy = "wait" if membership.rules.is_elastic else membership.rules.on_member_lost
        if policy != "wait" and silent == membership.members.holders:
            return  # nobody waits for anybody
        logger.warning("%s, islands=%s", away, ", ".join(silent))
        match policy:
            case "wait":
                await self._change(lambda m: m.members.lapsed(self._silent(m)))
            case "shrink":
                reason = f"{away}, and on_member_lost = shrink"
                await self._change(lambda m: m.members.kicked(self._silent(m), reason))
            case "stop":
                lost = ", ".join(silent)
                self.fail(
                    f"{lost} {'was' if len(silent) == 1 else 'were'} {away}, and "
                    f"outer.on_member_lost = stop (wait and shrink go on)",
                    QuorumLost.exit_code,
                )
        await self._end_if_over()

    def _silent(self, membership: Membership) -> tuple[str, ...]:
        """Islands that were not heard of for a term."""
        return self._leases.expired(membership.members.holders, loop_now())

    async def _stop_without(self, silent: list[str]) -> None:
        membership = self._membership
        if not (lacks := membership.stop_lacks(silent)):
            return
        is_complete = membership.is_stop_complete
        await self._change(lambda m: m.stop_without(lacks))
        if is_complete:
            logger.warning("stopped without a last word of %s", ", ".join(lacks))
            await self._end_if_over()
            return
        awaited = "; ".join(f"island {island!r} owes {what}" for island, what in lacks.items())
        self.fail(
            f"the graceful stop cannot end: {awaited}, and has not reported for "
            f"{self.run_status.terms.unreachable_s:g} s (transport.unreachable). "
            f"The stop is taken back",
            QuorumLost.exit_code,
        )

    async def _clock(self, call: IncomingCall) -> Reply:
        return Reply.of(ClockReply(unix_s=self._unix_clock()))

    async def _status(self, call: IncomingCall) -> Reply:
        if StatusRequest.FromString(call.header).watches:
            self.run_status.watched_at = loop_now()
        return Reply.of(self.status())

    async def _run_state(self, call: IncomingCall) -> Reply:
        island = RunStateRequest.FromString(call.header).island
        reply = self.run_status.for_islands()
        # A stranger on a trusted network could name any island: that is `control.status`.
        is_proved = call.caller is not None or call.is_local
        if is_proved and island in self._membership.members:
            reply.island.CopyFrom(self.run_status.island_status(island))
        return Reply.of(reply)

    def _record(self, told: Sequence[AuditEntry]) -> None:
        """Write into the audit log, where there is room; nothing depends on it."""
        self._changes.begin(told=told)

    def _apply_config(self, config: Config) -> None:
        """Go by another configuration from now on."""
        self.run_status.terms = terms = terms_of(config)
        self._membership.members.rules = terms.rules
        self._leases.term_s = terms.lease_s

    def _made(self, num_conflicts: int) -> None:
        """Note what has changed, and count versions that were published as two things."""
        self._complete_since = {
            number: self._complete_since.get(number, loop_now())
            for number in self._membership.checkpoints
        }
        for _ in range(num_conflicts):
            self.refused("", Cause.CONFLICT)

    async def _end_if_over(self) -> None:
        """End with the run; an island that may be starting again is to hear of its end, too."""
        membership, now = self._membership, loop_now()
        await self._change(lambda m: m.all_merged())
        is_awaited = any(self._leases.silent_s(i, now) < RETURN_S for i in membership.members.away)
        if (
            membership.fatal_reason
            or membership.is_stopped
            or (membership.is_finished and not is_awaited)
        ):
            self.ended.set()
        elif self._membership.is_stopped_in_vain and not self.ended.is_set():
            await self._change(lambda m: m.cuts.taken_back(m.timeline))
            self.fail(
                "the graceful stop was aborted: no island could write its part of a last cut, "
                "or a syncer has lost what the parts hold (the coordinator's log says which)"
                + (f": {damage}" if (damage := self.run_status.damage) else ""),
                QuorumLost.exit_code,
            )

    def _ending(self, reason: str, exit_code: int) -> str:
        """Say in full why the run ends, unless it does so already."""
        reason = bounded_text(reason + self.run_status.failures_beyond(reason), MOST_ENDING)
        if not self._membership.fatal_reason:
            logger.error("run failed, exit_code=%d: %s", exit_code, reason)
        return reason

    def _is_granted(self, grant: Grant, role: int) -> bool:
        return is_valid(
            grant,
            self._secret,
            run=self._membership.run,
            role=role,
            now_unix_s=self._unix_clock(),
        )

    def _check_syncer(self, grant: Grant) -> None:
        is_current = grant.timeline == self._membership.timeline
        if not (is_current and self._is_granted(grant, ROLE_SYNCER)):
            self.refused("", Cause.GRANT if is_current else Cause.TIMELINE)
            raise Unauthorised("the syncer's grant is not valid for this run and its timeline")
