"""An island's word with the coordinator: join, a report a second or sooner, leave.

Only the island leader has one; it lives in its IO thread. A coordinator that is away for a while
(a restart) disturbs nothing: reports are lost and training goes on, join and leave are repeated.

Source: PROTOCOL.md, "Join", "Leases and clocks" and "Classes of configuration".
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from diloco.errors import (
    ConfigError,
    CoordinatorUnavailable,
    DilocoError,
    Fenced,
    FingerprintMismatch,
    PlanMismatch,
    RunStopped,
    error_of_exit_code,
)
from diloco.island.exchange.retried_calls import program_error
from diloco.island.exchange.state_transfer import TransferReports
from diloco.island.graceful_stop import GracefulStop
from diloco.loop_clock import loop_now
from diloco.protocol.island.votes import AgreedCut
from diloco.protocol.run.absences import news_of_away
from diloco.protocol.run.alarms import Alarms, alarm_message
from diloco.protos.control_pb2 import (
    JOIN_STATUS_ACCEPTED,
    JOIN_STATUS_FINGERPRINT_MISMATCH,
    JOIN_STATUS_KICKED,
    JOIN_STATUS_PLAN_MISMATCH,
    JOIN_STATUS_RUN_STOPPED,
    CutPart,
    Grant,
    HeldOut,
    JoinReply,
    JoinRequest,
    LeaveRequest,
    ReportReply,
    ReportRequest,
)
from diloco.telemetry.events import Event
from diloco.transport.contracts import PROTOCOL_VERSION, Transport
from diloco.transport.errors import HandlerFailed, OutOfRange, TransportError
from diloco.transport.retry import RetryPolicy, retry

logger = logging.getLogger(__name__)

_REFUSALS: dict[int, type[DilocoError]] = {
    JOIN_STATUS_FINGERPRINT_MISMATCH: FingerprintMismatch,
    JOIN_STATUS_KICKED: Fenced,
    JOIN_STATUS_PLAN_MISMATCH: PlanMismatch,
    JOIN_STATUS_RUN_STOPPED: RunStopped,
}
_REPORT_S = 1.0
#: Seconds between two reports, though there is something to say.
_LEAST_REPORT_S = 0.05
_ASK_AGAIN_S = 0.2


class IslandState(StrEnum):
    """The state of an island, as `diloco status` shows it."""

    WAITING = "waiting"
    TRAINING = "training"
    FLUSHING = "flushing"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


class TextWord(Protocol):
    """An island's part in dividing the text again, where islands come and go."""

    def say(self) -> str:
        """Give ReportRequest.position_json."""

    def hear(self, claims_json: str) -> None:
        """Take ReportReply.claims_json, the answer to what was said last."""


@dataclass(slots=True)
class Reports:
    """What an island's reports say besides its progress, and what their answers bring.

    Any thread may set a field; its value is replaced, never changed.

    Attributes:
        checkpoint_steps: Complete checkpoints that the island keeps, ascending.
        cut: What became of the last cut.
        text: The island's part of the text, where that is shared out.
        transfer: Inner optimizers that are asked for and given.
        held_out: Losses of the newest checkpoints.
        complete_checkpoints: Those of the run that every island has, as the coordinator last said;
            None before it has.
    """

    checkpoint_steps: tuple[int, ...] = ()
    cut: CutPart = field(default_factory=CutPart)
    text: TextWord | None = None
    transfer: TransferReports | None = None
    held_out: tuple[HeldOut, ...] = ()
    complete_checkpoints: tuple[int, ...] | None = None


class Registration:
    """The leader's channel to the coordinator; everything but the constructor runs in one loop.

    `on_answer` is called when a report is answered; `alarms` hold at this island.
    """

    def __init__(
        self,
        transport: Transport,
        request: JoinRequest,
        *,
        rpc_deadline_s: float,
        policy: RetryPolicy,
        rng: random.Random,
        reports: Reports | None = None,
    ) -> None:
        """Assign only; `policy.budget_s` is how long the coordinator may stay away at a join.

        The `start_id` of the request is random, one a start: a repeated join of one start gets one
        incarnation.
        """
        self._transport = transport
        self._request = request
        self._rpc_deadline_s = rpc_deadline_s
        self._policy = policy
        self._rng = rng
        self.reports = reports or Reports()
        self._told_cut = 0
        self._away: tuple[str, ...] = ()
        self.alarms = Alarms()
        self.on_answer: Callable[[], None] = lambda: None
        self._grant = Grant()
        self._graceful_stop: GracefulStop | None = None
        self._is_held = False
        self._is_due = asyncio.Event()
        self._reporting: asyncio.Task[None] | None = None

    async def join(self) -> JoinReply:
        """Join, and ask again until all syncers have registered.

        Raises:
            FingerprintMismatch: If the identity configuration is not the run's.
            PlanMismatch: If the plan is not the run's.
            RunStopped: If the run has stopped, and the island has its checkpoint.
            ConfigError: If the coordinator does not know this run or this island, or speaks
                another version.
            CoordinatorUnavailable: If it gave no answer, or no syncer appeared, in time.
        """
        island, request = self._request.island, self._request.SerializeToString()
        waited_s = 0.0
        while True:
            reply = JoinReply.FromString(await self._call("control.join", request, self._policy))
            if reply.status != JOIN_STATUS_ACCEPTED:
                refusal = _REFUSALS.get(reply.status, ConfigError)
                raise refusal(
                    f"the coordinator at {self._transport.peer} refuses island {island!r}: "
                    f"{reply.message}",
                    island_id=island,
                )
            self._grant.CopyFrom(reply.grant)
            if reply.syncers:
                return reply
            if waited_s > self._policy.budget_s:
                raise CoordinatorUnavailable(
                    f"the coordinator at {self._transport.peer} accepted island "
                    f"{island!r}, but its syncers did not all register within "
                    f"{self._policy.budget_s:g} s: see the coordinator's log"
                )
            await asyncio.sleep(_ASK_AGAIN_S)
            waited_s += _ASK_AGAIN_S

    def start_reporting(
        self,
        progress: Callable[[], ReportRequest],
        on_stop: Callable[[DilocoError], None],
        graceful_stop: GracefulStop,
    ) -> None:
        """Report once a second, and when `report_soon` asks for it, until `leave`.

        Args:
            progress: Gives the present state; called in this loop.
            on_stop: Called once, with the reason, when the coordinator says that the run is over.
            graceful_stop: Gives the island's promise, and takes the inner step to stop after.
        """
        self._graceful_stop = graceful_stop
        self._reporting = asyncio.get_running_loop().create_task(
            self._report_forever(progress, on_stop, graceful_stop)
        )

    def on_event(self, event: Event) -> None:
        """Report an alarm that an event raises; others are passed over."""
        if self.alarms.on_event(event, loop_now()):
            self.report_soon()

    def report_soon(self) -> None:
        """Let the next report leave at once."""
        self._is_due.set()

    async def leave(
        self,
        exit_code: int,
        reason: str,
        *,
        last: ReportRequest,
        at_most_s: float,
        is_stopped: bool = False,
        is_early: bool = False,
    ) -> DilocoError | None:
        """Report for the last time, say that this start has ended, and close the channel.

        A coordinator that does not answer for `at_most_s` seconds is left without a word.

        Args:
            exit_code: That of the island; 0 for a good end.
            reason: In words.
            last: What the last report says.
            at_most_s: Seconds for all of it.
            is_stopped: Whether it stopped gracefully, after a checkpoint: the run is not over.
            is_early: Whether it leaves before the end of the run, which goes on without it.

        Returns:
            Why the coordinator says that this start has to end; None: it does not.
        """
        reply: ReportReply | None = None
        if self._reporting is not None:
            self._reporting.cancel()
            await asyncio.gather(self._reporting, return_exceptions=True)
        request = LeaveRequest(
            protocol_version=PROTOCOL_VERSION,
            grant=self._grant,
            exit_code=exit_code,
            reason=reason,
            is_stopped=is_stopped,
            is_early=is_early,
        ).SerializeToString()
        policy = RetryPolicy(max_wait_s=1.0, budget_s=at_most_s)
        if self._grant.incarnation:
            try:
                async with asyncio.timeout(at_most_s):
                    reply = await self._last_report(last, policy)
                    await self._call("control.leave", request, policy)
            except (DilocoError, TimeoutError) as error:
                logger.warning("left without a word, exit_code=%d: %s", exit_code, error)
        await self._transport.close()
        if reply is None or not reply.stop:
            return None
        return _stop_error(reply, self._request.island)

    async def _last_report(self, last: ReportRequest, policy: RetryPolicy) -> ReportReply | None:
        """Report; again and again, as long as the coordinator has not heard of a cut."""
        with contextlib.suppress(TransportError):
            if self.reports.cut.number == self._told_cut:
                return await self.report(last)
            return await retry(lambda: self.report(last), policy, self._rng)
        return None

    async def report(self, progress: ReportRequest) -> ReportReply:
        """Report once.

        Raises:
            TransportError: If the coordinator gave no answer.
        """
        request = ReportRequest(
            protocol_version=PROTOCOL_VERSION,
            grant=self._grant,
            checkpoint_steps=self.reports.checkpoint_steps,
            alarms=map(alarm_message, self.alarms.holding(loop_now())),
            held_out=self.reports.held_out,
        )
        request.MergeFrom(progress)
        promise = self._graceful_stop.promise() if self._is_held and self._graceful_stop else None
        if promise is not None:
            request.has_hold, request.hold_step = True, promise
        cut = self.reports.cut
        if cut.number != self._told_cut:
            request.cut.CopyFrom(cut)
        text = self.reports.text
        if text is not None:
            request.position_json = text.say()
        transfer = self.reports.transfer
        if transfer is not None:
            request.transfer.CopyFrom(transfer.report())
        answer = await self._transport.call(
            "control.report", request.SerializeToString(), deadline_s=self._rpc_deadline_s
        )
        reply = ReportReply.FromString(answer.header)
        self.on_answer()
        if not cut.is_being_written:
            self._told_cut = cut.number
        if text is not None and not reply.stop:
            text.hear(reply.claims_json)
        if transfer is not None and not reply.stop:
            transfer.set_answer(reply)
        return reply

    async def _report_forever(
        self,
        progress: Callable[[], ReportRequest],
        on_stop: Callable[[DilocoError], None],
        graceful_stop: GracefulStop,
    ) -> None:
        is_reached = True
        while True:
            self._is_due.clear()
            try:
                reply = await self.report(progress())
            except TransportError as error:
                if is_reached:
                    logger.warning("reports do not reach the coordinator: %s", error)
                is_reached = False
            else:
                is_reached = True
                if reply.stop:  # first: who holds must not take it for a stop that is taken back
                    on_stop(_stop_error(reply, self._request.island))
                    return
                for text in news_of_away(self._away, reply.away):
                    logger.warning("%s", text)
                self._away = tuple(reply.away)
                self._is_held = reply.hold
                self.reports.complete_checkpoints = tuple(reply.checkpoint_steps)
                stop_step = reply.stop_step if reply.has_stop_step else None
                graceful_stop.set_answer(
                    stop_step,
                    is_asked=reply.hold,
                    is_complete=stop_step in reply.checkpoint_steps,
                    is_drained=reply.drain,
                    cut=AgreedCut(reply.cut, reply.is_last_cut),
                )
            await asyncio.sleep(_LEAST_REPORT_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_REPORT_S - _LEAST_REPORT_S):
                    await self._is_due.wait()

    async def _call(self, method: str, request: bytes, policy: RetryPolicy) -> bytes:
        """Call until it is answered, within the policy's budget.

        Raises:
            CoordinatorUnavailable: If no answer came.
            DilocoError: If the coordinator's program failed at the call.
        """

        async def attempt() -> bytes:
            reply = await self._transport.call(method, request, deadline_s=self._rpc_deadline_s)
            return reply.header

        try:
            return await retry(attempt, policy, self._rng, attempt_s=self._rpc_deadline_s)
        except (HandlerFailed, OutOfRange) as error:
            peer, log = f"the coordinator at {self._transport.peer}", "the coordinator's log"
            raise program_error(error, peer, method, log, self._request.island) from error
        except TransportError as error:
            raise CoordinatorUnavailable(
                f"the coordinator at {self._transport.peer} gave no answer to {method} of island "
                f"{self._request.island!r}: {error}. Check --coordinator and that "
                f"`diloco coordinator` runs; of a run that has ended nobody answers, and nothing "
                f"is left to do"
            ) from error


def _stop_error(reply: ReportReply, island_id: str) -> DilocoError:
    error = error_of_exit_code(reply.exit_code)(reply.reason, island_id=island_id)
    error.exit_code = reply.exit_code
    return error
