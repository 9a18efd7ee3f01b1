"""A carrier's side of the rounds: encode, submit, resubmit, poll, fetch, verify, stage.

Runs in one event loop (the IO thread of a rank, or a virtual clock); never issues a collective,
never touches a parameter or an anchor. The training thread posts `send`, `decline` and `settle`
and reads `view`, which is replaced as a whole; nothing else crosses between the two.

Source: protocol.md sections 1, 4, 5 and 6.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import blake3
import torch
from torch import Tensor

from diloco.compression.base import to_bytes
from diloco.compression.error_feedback import encode_with_feedback
from diloco.compression.registry import get_codec
from diloco.errors import (
    CodecError,
    DilocoError,
    FingerprintMismatch,
    IslandFailed,
    error_of_exit_code,
)
from diloco.outer.fragments import Plan
from diloco.rounds.messages import outcome_of
from diloco.rounds.publication import lane_digest
from diloco.rounds.state import Outcome
from diloco.sync.calls import SyncerCalls
from diloco.sync.carried import NOT_DURABLE, CarriedFragment, FragmentView, SentLane
from diloco.sync.ledger import Outstanding, Verdict
from diloco.sync.staging import stage_lane
from diloco.telemetry.events import Event, SyncerRestarted
from protos import fragment_pb2 as wire
from protos.control_pb2 import Grant
from transport.contracts import Transport
from transport.retry import RetryPolicy

logger = logging.getLogger(__name__)

_DECLINED = "declined:"
_NOT_OPEN_WAIT_S = 0.25
_DECLINE_AGAIN_S = 1.0
_TELL_WAITING_S = 30.0


@dataclass(frozen=True, slots=True)
class ExchangeRules:
    """What a carrier obeys.

    Args:
        uplink_codec: Codec of contributions.
        error_feedback: Whether the quantisation error joins the next contribution.
        rpc_deadline_s: Bound of one call; a call may wait for a slow link.
        unreachable_s: Seconds without any answer after which the island gives up (exit 30).
        first_wait_s: Wait after the first call without an answer, at most.
        max_wait_s: Longest wait between two calls.
    """

    uplink_codec: str
    error_feedback: bool
    rpc_deadline_s: float
    unreachable_s: float
    first_wait_s: float = 0.1
    max_wait_s: float = 1.0


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
        self._error_feedback = rules.error_feedback
        self._on_event = on_event
        self._carried = {p: CarriedFragment(p, tuple(lanes[p])) for p in sorted(lanes)}
        self._views = {p: FragmentView() for p in self._carried}
        self._codec = get_codec(rules.uplink_codec)
        self._epoch = 0
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.failure: DilocoError | None = None

    # -- read by the training thread -----------------------------------------------------------

    def view(self, fragment_id: int) -> FragmentView:
        """Return what this rank knows of a fragment now."""
        return self._views[fragment_id]

    def staged(self, fragment_id: int) -> Mapping[int, Tensor]:
        """Return the verified lanes of `view().staged_version`."""
        return self._carried[fragment_id].staged

    @property
    def bytes_up(self) -> int:
        """Bytes sent so far."""
        return self._calls.bytes_up

    @property
    def bytes_down(self) -> int:
        """Bytes received so far."""
        return self._calls.bytes_down

    # -- called in the loop ----------------------------------------------------------------------

    def start(self) -> None:
        """Begin to poll."""
        self._spawn(self._poll_forever())

    async def stop(self) -> None:
        """Cancel all tasks and close both transports."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._calls.close()

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
            await _wait(changed, _TELL_WAITING_S)
            if not changed.is_set():
                logger.info("waiting until every island has joined and version 0 is durable")
        for p, carried in self._carried.items():
            self._check_founded(carried, initial[p])
            carried.anchor, carried.anchor_version = dict(initial[p]), 0

    def send(self, sent: Outstanding, deltas: Mapping[int, Tensor]) -> None:
        """Encode and submit this rank's lanes of a contribution, until its outcome is known."""
        carried = self._begin(sent)
        try:
            for lane_id in carried.lanes:
                carried.sending[lane_id] = self._encode(carried, lane_id, deltas[lane_id])
        except CodecError as error:
            self.fail(error)
            return
        for lane_id, lane in carried.sending.items():
            self._spawn(self._submit(carried, sent, lane_id, lane))

    def decline(self, sent: Outstanding, reason: str) -> None:
        """Tell the syncer that the island has nothing valid to contribute to this attempt."""
        self._spawn(self._decline(self._begin(sent), sent, reason))

    def settle(self, fragment_id: int, *, is_merged: bool, is_included: bool) -> None:
        """Forget what was outstanding, after the island agreed on its end."""
        carried = self._carried[fragment_id]
        carried.settle(is_merged=is_merged, is_included=is_included)
        self._stage_if_published(carried)
        self._notify()

    async def wait_for_end(self, fragment_id: int, at_most_s: float) -> None:
        """Wait until what is outstanding has ended for this rank (staged, expired, failed)."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(at_most_s):
                while self.failure is None and not self.view(fragment_id).has_ended:
                    await self._changed.wait()

    def fail(self, error: DilocoError) -> None:
        """Stop being able to go on; the first error stays."""
        if self.failure is None:
            logger.error("exchange failed: %s", error)
            self.failure = error
        self._notify()

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
            self.fail(
                IslandFailed(
                    f"the syncer refuses island {self._grant.island!r}, incarnation "
                    f"{self._grant.incarnation}: {reply.message}"
                )
            )
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
        self._notify()

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

    # -- contributions ---------------------------------------------------------------------------

    def _begin(self, sent: Outstanding) -> CarriedFragment:
        carried = self._carried[sent.key.fragment_id]
        assert carried.outstanding is None, f"{sent.key} while {carried.outstanding} is out"
        carried.outstanding, carried.outcome = sent, None
        self._notify()
        return carried

    def _encode(self, carried: CarriedFragment, lane_id: int, delta: Tensor) -> SentLane:
        residual = None
        if self._error_feedback:
            residual = carried.residual.setdefault(lane_id, torch.zeros_like(delta))
        encoded, residual_after = encode_with_feedback(self._codec, delta, residual)
        payload = to_bytes(encoded)
        return SentLane(payload, blake3.blake3(payload).digest(), residual_after)

    async def _submit(
        self, carried: CarriedFragment, sent: Outstanding, lane_id: int, lane: SentLane
    ) -> None:
        """Have the lane received by whichever syncer runs, until the contribution is settled."""
        while carried.outstanding is sent and self.failure is None:
            changed = self._changed
            if carried.outcome is not None or lane.received_epoch >= self._epoch:
                await changed.wait()
                continue
            reply = await self._calls.submit(
                sent, lane_id, codec=self._codec.name, digest=lane.digest, payload=lane.payload
            )
            if carried.outstanding is not sent or reply.syncer_epoch < self._epoch:
                continue  # settled, or the word of a syncer that is gone
            self._take_submit_reply(carried, sent, lane_id, lane, reply)
            if reply.status == wire.SUBMIT_STATUS_NOT_OPEN:
                await _wait(changed, _NOT_OPEN_WAIT_S)

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
                self.fail(IslandFailed(f"contribution {sent.key} refused: {reply.message}"))
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
                self._notify()

    async def _decline(self, carried: CarriedFragment, sent: Outstanding, reason: str) -> None:
        """Repeat it until the contribution is settled: a restarted syncer has forgotten it."""
        while carried.outstanding is sent and self.failure is None:
            changed = self._changed
            if carried.outcome is None:
                await self._calls.decline(sent.key, reason)
            await _wait(changed, _DECLINE_AGAIN_S)

    # -- version 0 -------------------------------------------------------------------------------

    async def _upload(self, fragment_id: int, lane_id: int, values: Tensor) -> None:
        payload = to_bytes(values.view(torch.uint8))
        ack = await self._calls.upload(fragment_id, lane_id, payload)
        if not ack.is_accepted:
            self.fail(CodecError(f"initial parameters of fragment {fragment_id}: {ack.message}"))

    def _check_founded(self, carried: CarriedFragment, initial: Mapping[int, Tensor]) -> None:
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

    def _stage_if_published(self, carried: CarriedFragment) -> None:
        """Fetch the version after the anchor as soon as it is published."""
        version = carried.anchor_version + 1
        if version < 1 or carried.state.version < version or carried.staging_version >= version:
            return
        carried.staging_version = version
        is_newest = carried.state.version == version
        digests = tuple(carried.state.lane_digests) if is_newest else ()
        self._spawn(self._stage(carried, version, digests))

    async def _stage(
        self, carried: CarriedFragment, version: int, digests: tuple[bytes, ...]
    ) -> None:
        lanes = await asyncio.gather(
            *(
                stage_lane(
                    self._calls,
                    carried.anchor[lane_id],
                    fragment_id=carried.fragment_id,
                    version=version,
                    lane_id=lane_id,
                    digest=digests[lane_id] if digests else b"",
                    on_event=self._on_event,
                )
                for lane_id in carried.lanes
            )
        )
        carried.staged = dict(zip(carried.lanes, lanes, strict=True))
        carried.staged_version = version
        self._notify()

    # -- plumbing --------------------------------------------------------------------------------

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
        """Show the training thread how things stand, and wake whoever waits for a change."""
        for p, carried in self._carried.items():
            self._views[p] = carried.view()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


async def _wait(event: asyncio.Event, at_most_s: float) -> None:
    """Wait for an event or for time to pass, whichever is first."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(at_most_s):
            await event.wait()
