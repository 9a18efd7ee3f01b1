"""A carrier's side of the rounds: subtract, encode, submit, poll, fetch, verify, stage.

Runs in one event loop (the IO thread of a rank, or a virtual clock); never issues a collective,
never touches a parameter or an anchor. The training thread posts `send`, `decline` and `settle`
and reads `view`, which is replaced as a whole; nothing else crosses between the two.

Source: protocol.md sections 1, 4, 5 and 6.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from diloco.compression.error_feedback import encode_with_feedback
from diloco.compression.lanes import lane_codec
from diloco.compression.random_bits import rounding_key
from diloco.errors import (
    AggregationError,
    CodecError,
    DilocoError,
    IslandFailed,
    error_of_exit_code,
)
from diloco.outer.fragments import Plan
from diloco.outer.pseudo_gradient import l2_norm, pseudo_gradient_
from diloco.rounds.messages import outcome_of
from diloco.rounds.terms import Outcome, RoundKey
from diloco.sync.calls import SyncerCalls
from diloco.sync.captured import CapturedFragment, CapturedLanes
from diloco.sync.carried import NOT_DURABLE, CarriedFragment, FragmentView, SentLane
from diloco.sync.entry import Entry, check_restored
from diloco.sync.ledger import Outstanding, Verdict
from diloco.sync.staging import stage_lanes
from diloco.sync.tasks import Tasks, wait_for
from diloco.telemetry.events import Event, FragmentSent, SyncerRestarted
from protos import fragment_pb2 as wire
from protos.control_pb2 import Grant
from transport.contracts import Transport
from transport.retry import RetryPolicy

logger = logging.getLogger(__name__)

_DECLINED = "declined:"
_MAX_BROKEN_IN_A_ROW = 3
_NOT_OPEN_WAIT_S = 0.25
_DECLINE_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class ExchangeRules:
    """What a carrier obeys.

    Args:
        uplink_codec: Codec of contributions (`lane_codec`).
        error_feedback: Whether the quantisation error joins the next contribution.
        rpc_deadline_s: Bound of one call; a call may wait for a slow link.
        unreachable_s: Seconds without any answer after which the island gives up (exit 30).
        seed: Of the run; stochastic rounding draws from it.
        first_wait_s: Wait after the first call without an answer, at most.
        max_wait_s: Longest wait between two calls.
    """

    uplink_codec: str
    error_feedback: bool
    rpc_deadline_s: float
    unreachable_s: float
    seed: int
    first_wait_s: float = 0.1
    max_wait_s: float = 1.0


class Moved(Protocol):
    """Bytes that were moved."""

    @property
    def bytes_up(self) -> int:
        """Bytes sent."""

    @property
    def bytes_down(self) -> int:
        """Bytes received."""


class Exchange:
    """One rank's exchange with the syncer; it polls from `enter` or `restore` until `stop`.

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
        moved: Moved | None = None,
    ) -> None:
        """Assign only. `lanes` maps every fragment to the lanes that this rank carries.

        `moved` counts what crosses to other sites, where that is not what the calls here move.
        """
        self.rules = rules
        self._plan = plan
        self._grant = grant
        self._calls = SyncerCalls(
            control,
            data,
            grant,
            rpc_deadline_s=rules.rpc_deadline_s,
            policy=RetryPolicy(
                first_wait_s=rules.first_wait_s,
                max_wait_s=rules.max_wait_s,
                budget_s=rules.unreachable_s,
            ),
            rng=rng,
        )
        self._moved: Moved = self._calls if moved is None else moved
        self._on_event = on_event
        self._carried = {p: CarriedFragment(p, tuple(lanes[p])) for p in sorted(lanes)}
        self._views = {p: FragmentView() for p in self._carried}
        self._epoch = 0
        self._pinned_step = -1
        self._tasks = Tasks(self._show)
        self._submits: dict[int, list[asyncio.Task[None]]] = {}
        self._entry = Entry(
            plan, grant, self._calls, self._carried, self._tasks, lambda: self._epoch
        )

    # -- read by the training thread -----------------------------------------------------------

    @property
    def failure(self) -> DilocoError | None:
        """Why this rank cannot go on, once it cannot."""
        return self._tasks.failure

    def view(self, fragment_id: int) -> FragmentView:
        """Return what this rank knows of a fragment now."""
        return self._views[fragment_id]

    def anchor(self, fragment_id: int) -> Mapping[int, Tensor]:
        """Return the lanes of `view().anchor_version`."""
        return dict(self._carried[fragment_id].anchor)

    def staged(self, fragment_id: int) -> Mapping[int, Tensor]:
        """Return the verified lanes of `view().staged_version`."""
        return self._carried[fragment_id].staged

    @property
    def pinned_step(self) -> int:
        """Inner step of the last `pin`, once the syncer has done it; -1 before."""
        return self._pinned_step

    @property
    def bytes_up(self) -> int:
        """Bytes sent so far."""
        return self._moved.bytes_up

    @property
    def bytes_down(self) -> int:
        """Bytes received so far."""
        return self._moved.bytes_down

    # -- called in the loop ----------------------------------------------------------------------

    def enter(self, own: Mapping[int, Mapping[int, Tensor]], overwrite_initial: bool) -> None:
        """Begin to poll and enter the run: found version 0 of it, or return to what is published.

        Done when every view has an anchor version. A failure, such as initial parameters that
        differ from the run's and must not be overwritten, becomes `failure`.
        """
        self._tasks.spawn(self._poll_forever())
        self._tasks.spawn(self._enter(own, overwrite_initial))

    def restore(self, fragments: Sequence[CapturedFragment]) -> None:
        """Begin to poll and enter the run with the state of its checkpoint.

        Done when every view has an anchor version; what was in flight is submitted again.
        """
        self._tasks.spawn(self._poll_forever())
        self._tasks.spawn(self._restore(fragments))

    async def stop(self) -> None:
        """Cancel all tasks and close both transports."""
        await self._tasks.stop()
        await self._calls.close()

    async def wait_until_entered(self, at_most_s: float) -> None:
        """Wait until `enter` or `restore` is done (or failed)."""
        await self._tasks.wait_until(
            lambda: all(view.anchor_version >= 0 for view in self._views.values()), at_most_s
        )

    def send(self, sent: Outstanding, local: Mapping[int, Tensor]) -> None:
        """Submit the pseudo-gradient of this rank's lanes until its outcome is known.

        Here and not in the training thread, which goes on with the next inner step meanwhile. One
        that is not finite is declined; three in a row are a failure.

        Args:
            sent: What is sent.
            local: Lane id -> local values at the send; overwritten, and free when this returns.
        """
        carried = self._begin(sent)
        norms = []
        try:
            for lane_id in carried.lanes:  # all of one lane while it is in the CPU's caches
                delta = pseudo_gradient_(local[lane_id], carried.anchor[lane_id])
                norms.append(l2_norm(delta))
                if not math.isfinite(norms[-1]):
                    break
                carried.sending[lane_id] = self._encode(carried, sent.key, lane_id, delta)
        except CodecError as error:
            self.fail(error)
            return
        norm = math.hypot(*norms)
        if math.isfinite(norm):
            carried.broken_in_a_row = 0
            self._submit_all(carried, sent)
            self._on_event(_sent_event(sent, norm))
        else:
            self._decline_broken(carried, sent, norm)

    def decline(self, sent: Outstanding, reason: str) -> None:
        """Tell the syncer that the island has nothing valid to contribute to this attempt."""
        self._start_decline(self._begin(sent), sent, reason)
        self._on_event(_sent_event(sent, 0.0, reason))

    def settle(self, fragment_id: int, *, is_merged: bool, is_included: bool) -> None:
        """Forget what was outstanding, after the island agreed on its end."""
        for stalled in self._submits.pop(fragment_id, []):
            stalled.cancel()  # a lane on its way would come late, and in the way of newer ones
        carried = self._carried[fragment_id]
        carried.settle(is_merged=is_merged, is_included=is_included)
        self._stage_if_published(carried)
        self._tasks.notify()

    async def wait_for_end(self, fragment_id: int, at_most_s: float) -> None:
        """Wait until what is outstanding has ended for this rank (staged, expired, failed)."""
        await self._tasks.wait_until(lambda: self.view(fragment_id).has_ended, at_most_s)

    async def capture(self, into: dict[int, CapturedLanes]) -> None:
        """Put the state of every fragment's lanes into `into`, after what was posted before."""
        for p, carried in self._carried.items():
            into[p] = carried.captured(
                self._plan.fragments[p],
                self.rules.uplink_codec,
                error_feedback=self.rules.error_feedback,
            )

    def pin(self, inner_step: int, versions: Sequence[int]) -> None:
        """Have the syncer keep these versions, durably, for the run checkpoint of a step.

        Done when `pinned_step` is that step.
        """
        self._pinned_step = -1
        self._tasks.spawn(self._pin(inner_step, versions))

    async def wait_until_pinned(self, inner_step: int, at_most_s: float) -> None:
        """Wait until `pin` is done (or failed)."""
        await self._tasks.wait_until(lambda: self._pinned_step == inner_step, at_most_s)

    def fail(self, error: DilocoError) -> None:
        """Stop being able to go on; the first error stays."""
        self._tasks.fail(error)

    # -- polling ---------------------------------------------------------------------------------

    async def _poll_forever(self) -> None:
        while self.failure is None:
            undecided = [
                carried.outstanding.key
                for carried in self._carried.values()
                if carried.outstanding is not None and carried.outcome is None
            ]
            known = [carried.known() for carried in self._carried.values()]
            self._take(await self._calls.poll(self._epoch, known, undecided))

    def _take(self, reply: wire.PollReply) -> None:
        if reply.is_fenced:
            self.fail(self._calls.fenced(reply.message))
            return
        if reply.HasField("fatal"):
            error = error_of_exit_code(reply.fatal.exit_code)
            self.fail(error(reply.fatal.reason, island_id=self._grant.island))
            return
        if reply.syncer_epoch > self._epoch:
            self._take_epoch(reply.syncer_epoch)
        for state in reply.fragments:
            self._carried[state.fragment_id].state = state
        for outcome in reply.outcomes:
            self._take_outcome(outcome_of(outcome))
        for carried in self._carried.values():
            self._stage_if_published(carried)
        self._tasks.notify()

    def _take_epoch(self, epoch: int) -> None:
        """Forget what the syncer before had only in memory: lanes received, refusals."""
        previous, self._epoch = self._epoch, epoch
        num_resent = 0
        for carried in self._carried.values():
            if carried.outcome in NOT_DURABLE:
                carried.outcome = None
            if carried.outcome is None:
                received = [lane.received_epoch for lane in carried.sending.values()]
                num_resent += sum(0 <= by < epoch for by in received)
        if previous:
            self._on_event(SyncerRestarted(epoch, num_resent))

    def _take_outcome(self, outcome: Outcome) -> None:
        carried = self._carried[outcome.key.fragment_id]
        sent = carried.outstanding
        if sent is None or outcome.key != sent.key:
            return
        is_declined = outcome.reason.startswith(_DECLINED)
        carried.outcome = Verdict.DECLINED if is_declined else Verdict(outcome.kind.value)
        if carried.outcome in NOT_DURABLE:
            logger.warning("contribution refused, key=%s: %s", sent.key, outcome.reason)
        elif carried.outcome is Verdict.NOT_INCLUDED:
            logger.warning("contribution not included, key=%s: %s", sent.key, outcome.reason)

    # -- contributions ---------------------------------------------------------------------------

    def _begin(self, sent: Outstanding) -> CarriedFragment:
        carried = self._carried[sent.key.fragment_id]
        assert carried.outstanding is None, f"{sent.key} while {carried.outstanding} is out"
        carried.outstanding, carried.outcome = sent, None
        self._tasks.notify()
        return carried

    def _encode(
        self, carried: CarriedFragment, key: RoundKey, lane_id: int, delta: Tensor
    ) -> SentLane:
        residual = None
        if self.rules.error_feedback:
            residual = carried.residual.setdefault(lane_id, torch.zeros_like(delta))
        codec = lane_codec(self.rules.uplink_codec, self._plan.fragments[key.fragment_id], lane_id)
        drawn_by = rounding_key(
            self.rules.seed,
            key.fragment_id,
            lane_id,
            key.version,
            key.attempt,
            self._grant.island,
        )
        return SentLane.of(*encode_with_feedback(codec, delta, residual, drawn_by))

    def _decline_broken(self, carried: CarriedFragment, sent: Outstanding, norm: float) -> None:
        """Decline; end the island when its own numbers are broken three times in a row.

        Counted where it is seen, on the ranks whose lanes are broken, and whatever became of the
        rounds: when all islands diverge, each attempt expires and would hide the reason.
        """
        p = carried.fragment_id
        reason = f"the pseudo-gradient of fragment {p} is not finite"
        carried.sending = {}
        self._start_decline(carried, sent, reason)
        self._on_event(_sent_event(sent, norm, reason))
        carried.broken_in_a_row += 1
        if carried.broken_in_a_row >= _MAX_BROKEN_IN_A_ROW:
            self.fail(
                AggregationError(
                    f"fragment {p}: {carried.broken_in_a_row} pseudo-gradients in a row were not "
                    f"finite, the last after inner step {sent.sent_at_inner_step}. The training "
                    f"diverged: lower inner.optimizer.lr, or start again from an earlier state"
                )
            )

    def _start_decline(self, carried: CarriedFragment, sent: Outstanding, reason: str) -> None:
        logger.warning("declining, key=%s: %s", sent.key, reason)
        carried.decline_reason = reason
        self._tasks.spawn(self._decline(carried, sent))

    def _submit_all(self, carried: CarriedFragment, sent: Outstanding) -> None:
        self._submits[carried.fragment_id] = [
            self._tasks.spawn(self._submit(carried, sent, lane_id, lane))
            for lane_id, lane in carried.sending.items()
        ]

    async def _submit(
        self, carried: CarriedFragment, sent: Outstanding, lane_id: int, lane: SentLane
    ) -> None:
        """Have the lane received by whichever syncer runs, until the contribution is settled."""
        while carried.outstanding is sent and self.failure is None:
            news = self._tasks.news
            if carried.outcome is not None or lane.received_epoch >= self._epoch:
                await news.wait()
                continue
            reply = await self._calls.submit(
                sent,
                lane_id,
                codec=self.rules.uplink_codec,
                digest=lane.digest,
                payload=lane.payload,
            )
            if carried.outstanding is not sent or reply.syncer_epoch < self._epoch:
                continue  # settled, or the word of a syncer that is gone
            self._take_submit_reply(carried, sent, lane_id, lane, reply)
            if reply.status == wire.SUBMIT_STATUS_NOT_OPEN:
                await wait_for(news, _NOT_OPEN_WAIT_S)

    def _take_submit_reply(
        self,
        carried: CarriedFragment,
        sent: Outstanding,
        lane_id: int,
        lane: SentLane,
        reply: wire.SubmitReply,
    ) -> None:
        match reply.status:
            case wire.SUBMIT_STATUS_NOT_OPEN:
                pass
            case wire.SUBMIT_STATUS_FENCED:
                self.fail(self._calls.fenced(reply.message))
            case wire.SUBMIT_STATUS_INVALID:
                self.fail(
                    CodecError(
                        f"the syncer cannot accept lane {lane_id} of {sent.key}: {reply.message}"
                    )
                )
            case _:  # received, now or before, or over
                lane.received_epoch = reply.syncer_epoch
                if reply.HasField("outcome"):
                    self._take_outcome(outcome_of(reply.outcome))
                self._tasks.notify()

    async def _decline(self, carried: CarriedFragment, sent: Outstanding) -> None:
        """Repeat it until the contribution is settled: a restarted syncer has forgotten it."""
        while carried.outstanding is sent and self.failure is None:
            news = self._tasks.news
            if carried.outcome is None:
                await self._calls.decline(sent.key, carried.decline_reason)
            await wait_for(news, _DECLINE_AGAIN_S)

    async def _pin(self, inner_step: int, versions: Sequence[int]) -> None:
        ack = await self._calls.pin(inner_step, versions)
        if ack.is_fenced:
            raise self._calls.fenced(ack.message)
        if not ack.is_accepted:
            raise IslandFailed(
                f"versions {list(versions)} cannot be kept for the checkpoint of inner step "
                f"{inner_step}: {ack.message}. This island took another way than the others: start "
                f"it again, so that it returns to what is published: diloco island RUN.toml "
                f"--island {self._grant.island}. If that does not help, stop the coordinator and "
                f"resume the newest checkpoint: diloco coordinator RUN.toml --resume"
            )
        self._pinned_step = inner_step
        self._tasks.notify()

    # -- entering the run ------------------------------------------------------------------------

    async def _enter(
        self, own: Mapping[int, Mapping[int, Tensor]], overwrite_initial: bool
    ) -> None:
        await self._entry.enter(own, overwrite=overwrite_initial)
        self._entered()

    async def _restore(self, fragments: Sequence[CapturedFragment]) -> None:
        await self._entry.until_steady({})
        for carried, restored in zip(self._carried.values(), fragments, strict=True):
            check_restored(carried, restored)
            carried.anchor = dict(restored.lanes.anchor)
            carried.anchor_version = restored.ledger.version
            carried.residual = dict(restored.lanes.residual)
            carried.broken_in_a_row = restored.lanes.broken_in_a_row
            if (sent := restored.ledger.outstanding) is None:
                continue
            self._begin(sent)
            if restored.lanes.is_declined:
                reason = "declined before the checkpoint that is resumed"
                self._start_decline(carried, sent, reason)
                continue
            carried.sending = {
                lane_id: SentLane.of(payload, restored.lanes.residual_after.get(lane_id))
                for lane_id, payload in restored.lanes.payload.items()
            }
            self._submit_all(carried, sent)
        self._entered()

    def _entered(self) -> None:
        for carried in self._carried.values():
            self._stage_if_published(carried)
        self._tasks.notify()

    # -- staging ---------------------------------------------------------------------------------

    def _stage_if_published(self, carried: CarriedFragment) -> None:
        """Fetch the version after the anchor as soon as it is published."""
        version = carried.anchor_version + 1
        if version < 1 or carried.state.version < version or carried.staging_version >= version:
            return
        carried.staging_version = version
        is_newest = carried.state.version == version
        digests = tuple(carried.state.lane_digests) if is_newest else ()
        self._tasks.spawn(self._stage(carried, version, digests))

    async def _stage(
        self, carried: CarriedFragment, version: int, digests: tuple[bytes, ...]
    ) -> None:
        carried.staged = await stage_lanes(
            self._calls,
            carried.anchor,
            fragment=self._plan.fragments[carried.fragment_id],
            version=version,
            digests=digests,
            on_event=self._on_event,
        )
        carried.staged_version = version
        self._tasks.notify()

    # -- plumbing --------------------------------------------------------------------------------

    def _show(self) -> None:
        """Show the training thread how things stand."""
        for p, carried in self._carried.items():
            self._views[p] = carried.view()


def _sent_event(sent: Outstanding, lanes_norm: float, declined: str = "") -> FragmentSent:
    return FragmentSent(
        sent.sent_at_inner_step,
        sent.key.fragment_id,
        sent.key.version,
        sent.key.attempt,
        sent.weight_tokens,
        sent.weight_steps,
        sent.is_flush,
        lanes_norm,
        declined,
    )
