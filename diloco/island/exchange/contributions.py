"""A carrier's contributions: subtract, encode, submit or decline, until their outcome is known.

Belongs to the exchange and its loop.

Source: PROTOCOL.md, "Contributions".
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from diloco.compression.base import from_bytes
from diloco.compression.error_feedback import encode_with_feedback
from diloco.compression.lanes import lane_codec
from diloco.compression.random_bits import rounding_key
from diloco.errors import AggregationError, CodecError
from diloco.island.exchange.calls import LinkParts
from diloco.island.exchange.checkpoint_state import LaneCheckpoint
from diloco.island.exchange.fragment_state import (
    NOT_DURABLE,
    IslandFragment,
    SentLane,
    carried,
)
from diloco.loop_clock import loop_now
from diloco.outer.pseudo_gradient import bit_sum, farthest, l2_norm, pseudo_gradient_
from diloco.protocol.island.ledger import Outstanding, Verdict
from diloco.protocol.rounds.messages import outcome_of
from diloco.protocol.rounds.terms import Outcome, RoundKey
from diloco.protocol.run.alarms import AlarmKind
from diloco.protos import fragment_pb2 as wire
from diloco.tasks import wait_for
from diloco.telemetry.events import AlarmRaised, FragmentSent, OutcomeHeard, PhaseDone

logger = logging.getLogger(__name__)

_DECLINED = "declined:"
_MAX_BROKEN_IN_A_ROW = 3
NOT_OPEN_WAIT_S = 0.25
_DECLINE_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Send:
    """Lanes of a fragment to be contributed.

    Args:
        sent: What is sent.
        local: Lane id -> local values at the send; overwritten.
        limits: How far from their anchor values may lie (`farthest`); anywhere, where nothing is
            known of the steps that made them.
        is_tried: Whether it is held back until `release`.
        free: Called when `local` is not read any more.
    """

    sent: Outstanding
    local: Mapping[int, Tensor]
    limits: tuple[float, float] = (math.inf, 0.0)
    is_tried: bool = False
    free: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class _MadeLane:
    """What a lane came to; `lane` is None where it is not finite, or where it lies `beyond`."""

    norm: float
    beyond: str
    lane: SentLane | None = None
    has_flipped: bool = False


class Contributions:
    """Makes and submits the contributions of one rank's lanes.

    Attributes:
        unsound_at: Inner step of the last send whose values cannot be right; -1: there was none.
        unsound: Why not.
    """

    def __init__(self, parts: LinkParts) -> None:
        """Assign only."""
        self._plan = parts.plan
        self._rules = parts.rules
        self._island = parts.grant.island
        self._calls = parts.calls
        self._tasks = parts.tasks
        self._on_event = parts.on_event
        self._place = parts.place
        self._making = set[asyncio.Task[None]]()
        self._submits: dict[int, list[asyncio.Task[None]]] = {}
        self.unsound_at, self.unsound = -1, ""

    def send(self, fragment: IslandFragment, send: Send) -> None:
        """Submit the pseudo-gradient of lanes; decline what is not finite, or cannot be right."""
        self._begin(fragment, send.sent)
        self._start_making(self._make(fragment, send))

    def _start_making(self, work: Coroutine[Any, Any, None]) -> None:
        making = self._tasks.spawn(work)
        self._making.add(making)
        making.add_done_callback(self._making.discard)

    async def _make(self, fragment: IslandFragment, send: Send) -> None:
        """Have the contribution made, off this loop, and submit it if it is still wanted then."""
        sent, anchor = send.sent, dict(fragment.anchor)
        p, sending = sent.key.fragment_id, dict[int, SentLane]()
        norms, beyond = [], ""
        brought = (self._brought(fragment, anchor[lane_id], lane_id) for lane_id in fragment.lanes)
        values = next(brought, None)
        for lane_id in fragment.lanes:  # all of one lane while it is in the CPU's caches
            began = loop_now()
            assert values is not None
            making = self._place.run(functools.partial(self._lane, send, lane_id, *values))
            values = next(brought, None)  # for the next lane, while this one is made
            made = await making
            norms.append(made.norm)
            if made.has_flipped:
                self.forget(fragment, lane_id)
            if made.beyond:
                beyond = f"fragment {p}, lane {lane_id}: {made.beyond}"
            if made.lane is None:
                break
            sending[lane_id] = made.lane
            self._emit_phase("encode", sent.key, lane_id, began)
        send.free()
        norm = math.hypot(*norms)
        if beyond:
            self._decline_unsound(fragment, sent, norm, beyond)
            return
        if not math.isfinite(norm):
            self._decline_broken(fragment, sent, norm)
            return
        fragment.broken_in_a_row = 0
        told = _sent_event(sent, norm)
        if fragment.outstanding is not sent:  # its round has expired meanwhile
            self._on_event(told)
            return
        fragment.sending, fragment.held_back = sending, told
        if not send.is_tried:
            self.release(fragment, "")

    def _brought(
        self, fragment: IslandFragment, anchor: Tensor, lane_id: int
    ) -> tuple[Tensor, Tensor | None, int]:
        """Launch the copies, on the stream of this loop, of what a lane is made with."""
        residual, there = fragment.residual.get(lane_id), self._place.there
        left_over = None if residual is None else there(residual)
        return there(anchor), left_over, fragment.residual_sums.get(lane_id, 0)

    def _lane(
        self,
        send: Send,
        lane_id: int,
        anchor: Tensor,
        residual: Tensor | None,
        residual_sum: int,
    ) -> _MadeLane:
        """Subtract and encode a lane, where lanes are computed."""
        key, rules, place = send.sent.key, self._rules, self._place
        anchor = place.there(anchor)
        delta = pseudo_gradient_(send.local[lane_id], anchor)
        norm = l2_norm(delta)
        beyond = farthest(delta, anchor, send.limits) if math.isfinite(norm) else ""
        if beyond or not math.isfinite(norm):
            return _MadeLane(norm, beyond)
        before = None if residual is None else place.there(residual)
        has_flipped = before is not None and bit_sum(before) != residual_sum
        if has_flipped:
            before = None
        added = before
        if rules.error_feedback and before is None:
            added = torch.zeros_like(delta)
        codec = lane_codec(rules.uplink_codec, self._plan.fragments[key.fragment_id], lane_id)
        drawn_by = rounding_key(
            rules.seed, key.fragment_id, lane_id, key.version, key.attempt, self._island
        )
        decay = rules.error_feedback_decay
        with record_function("diloco/encode"):
            payload, after = encode_with_feedback(codec, delta, added, drawn_by, decay)
            lane = SentLane.of(payload, after)
        if rules.since_send:
            delta = carried(codec, payload, len(delta), after, before, decay, place)
            lane.carried = place.kept(delta)
        if after is not None:
            lane.residual_after = place.kept(after)
        return _MadeLane(norm, "", lane, has_flipped)

    async def made(self) -> None:
        """Wait until everything that is being made is made, also for rounds that are over."""
        if self._making:
            await asyncio.wait(self._making)

    async def tried(self, fragment: IslandFragment) -> dict[int, Tensor]:
        """Give the lanes that hold something back, with half of it taken off their anchor.

        Of what was decoded: what the syncer would merge with another contribution.
        """
        await self.made()
        return await self._place.run(functools.partial(self._halved, fragment))

    def _halved(self, fragment: IslandFragment) -> dict[int, Tensor]:
        planned, moved = self._plan.fragments[fragment.fragment_id], dict[int, Tensor]()
        for lane_id, lane in fragment.sending.items() if fragment.held_back else ():
            codec = lane_codec(self._rules.uplink_codec, planned, lane_id)
            payload = from_bytes(lane.payload).to(self._place.device)
            delta = codec.decode(payload, planned.lanes[lane_id].numel)
            moved[lane_id] = self._place.there(fragment.anchor[lane_id]) - delta.mul_(0.5)
        return moved

    def release(self, fragment: IslandFragment, reason: str) -> None:
        """Submit what `send` has held back; where there is a reason not to, decline it."""
        (told, fragment.held_back), sent = (fragment.held_back, None), fragment.outstanding
        if told is None or sent is None:
            return  # declined by the send itself
        if reason:
            fragment.sending = {}
            self._start_decline(fragment, sent, reason)
        else:
            self._submit_all(fragment, sent)
        self._on_event(replace(told, declined=reason))

    def decline(self, fragment: IslandFragment, sent: Outstanding, reason: str) -> None:
        """Tell the syncer that there is nothing valid to contribute to this attempt."""
        self._begin(fragment, sent)
        self._start_decline(fragment, sent, reason)
        self._on_event(_sent_event(sent, 0.0, reason))

    def resume(
        self, fragment: IslandFragment, sent: Outstanding, lanes: LaneCheckpoint, *, is_asking: bool
    ) -> None:
        """Submit again what was outstanding when a checkpoint was taken, once it is hashed.

        It is not shown before that: its outcome needs what was sent.

        Args:
            fragment: The fragment.
            sent: What was sent.
            lanes: As captured.
            is_asking: Whether its round is over, and only its outcome is asked for.
        """
        if not lanes.is_declined:
            self._start_making(self._make_again(fragment, sent, lanes, is_asking=is_asking))
            return
        self._begin(fragment, sent)
        if is_asking:
            fragment.outcome = Verdict.DECLINED
        else:
            reason = "declined before the checkpoint that is resumed"
            self._start_decline(fragment, sent, reason)

    async def _make_again(
        self, fragment: IslandFragment, sent: Outstanding, lanes: LaneCheckpoint, *, is_asking: bool
    ) -> None:
        def hashed() -> dict[int, SentLane]:
            after = lanes.residual_after
            return {i: SentLane.of(lane, after.get(i)) for i, lane in lanes.payload.items()}

        fragment.sending = await self._place.run(hashed)
        self._begin(fragment, sent)
        if not is_asking:
            self._submit_all(fragment, sent)

    def settle(self, fragment_id: int) -> None:
        """Submit nothing more of what was outstanding."""
        for stalled in self._submits.pop(fragment_id, []):
            stalled.cancel()  # a lane on its way would come late, and in the way of newer ones

    def take(self, fragment: IslandFragment, outcome: Outcome) -> None:
        """Take the syncer's word on what is outstanding; its word on something else is old."""
        sent = fragment.outstanding
        if sent is None or outcome.key != sent.key or fragment.outcome is not None:
            return
        is_declined = outcome.reason.startswith(_DECLINED)
        verdict = fragment.outcome = (
            Verdict.DECLINED if is_declined else Verdict(outcome.kind.value)
        )
        if verdict in (*NOT_DURABLE, Verdict.NOT_INCLUDED):
            key, word = sent.key, verdict.replace("_", " ")
            logger.warning("contribution %s, key=%s: %s", word, key, outcome.reason)
            self._on_event(
                OutcomeHeard(
                    key.fragment_id, key.version, key.attempt, verdict.value, outcome.reason
                )
            )

    def _begin(self, fragment: IslandFragment, sent: Outstanding) -> None:
        assert fragment.outstanding is None, f"{sent.key} while {fragment.outstanding} is out"
        fragment.outstanding, fragment.outcome = sent, None
        self._tasks.notify()

    def forget(self, fragment: IslandFragment, lane_id: int) -> None:
        """Forget what a lane has left over, as a bit of it has flipped, and raise an alarm."""
        fragment.residual.pop(lane_id, None)
        p = fragment.fragment_id
        text = (
            f"a bit has flipped in memory, in what lane {lane_id} of fragment {p} had "
            f"left over from its last contribution: it is forgotten, and not sent. See whether "
            f"this machine's memory is sound (edac-util, dmesg)"
        )
        logger.error("%s", text)
        self._on_event(AlarmRaised(AlarmKind.BIT_FLIPPED, text, self._island, p))

    def _emit_phase(self, phase: str, key: RoundKey, lane_id: int, began: float) -> None:
        self._on_event(PhaseDone(phase, key.fragment_id, key.version, lane_id, loop_now() - began))

    def _decline_broken(self, fragment: IslandFragment, sent: Outstanding, norm: float) -> None:
        """Decline; end the island when its own numbers are broken three times in a row.

        Counted where it is seen, on the ranks whose lanes are broken, and whatever became of the
        rounds: when all islands diverge, each attempt expires and would hide the reason.
        """
        p = fragment.fragment_id
        reason = f"the pseudo-gradient of fragment {p} is not finite"
        self._decline_unsound(fragment, sent, norm, reason)
        fragment.broken_in_a_row += 1
        if fragment.broken_in_a_row >= _MAX_BROKEN_IN_A_ROW:
            self._tasks.fail(
                AggregationError(
                    f"fragment {p}: {fragment.broken_in_a_row} pseudo-gradients in a row were not "
                    f"finite, the last after inner step {sent.sent_at_inner_step}. The training "
                    f"diverged: lower inner.optimizer.lr, or start again from an earlier state"
                )
            )

    def _decline_unsound(
        self, fragment: IslandFragment, sent: Outstanding, norm: float, reason: str
    ) -> None:
        """Decline, and let the training thread know that what it trained is not sound."""
        if fragment.outstanding is sent:  # else its round has expired meanwhile
            fragment.sending = {}
            self._start_decline(fragment, sent, reason)
        self._on_event(_sent_event(sent, norm, reason))
        self.unsound_at, self.unsound = sent.sent_at_inner_step, reason

    def _start_decline(self, fragment: IslandFragment, sent: Outstanding, reason: str) -> None:
        logger.warning("declining, key=%s: %s", sent.key, reason)
        fragment.decline_reason = reason
        if fragment.is_followed:  # else the leader declines for the same reason
            self._tasks.spawn(self._decline(fragment, sent))

    def _submit_all(self, fragment: IslandFragment, sent: Outstanding) -> None:
        self._submits[fragment.fragment_id] = [
            self._tasks.spawn(self._submit(fragment, sent, lane_id, lane))
            for lane_id, lane in fragment.sending.items()
        ]

    async def _submit(
        self, fragment: IslandFragment, sent: Outstanding, lane_id: int, lane: SentLane
    ) -> None:
        """Have the lane received by whichever syncer runs, until the contribution is settled."""
        while fragment.outstanding is sent and self._tasks.failure is None:
            news = self._tasks.news
            calls = self._calls.of(sent.key.fragment_id)
            if fragment.outcome is not None or lane.received_epoch >= calls.epoch:
                await news.wait()
                continue
            began = loop_now()
            reply = await self._calls.submit(
                sent,
                lane_id,
                codec=self._rules.uplink_codec,
                digest=lane.digest,
                payload=lane.payload,
            )
            self._emit_phase("send", sent.key, lane_id, began)
            if self._calls.of(sent.key.fragment_id) is not calls:
                continue  # it has moved meanwhile
            if fragment.outstanding is not sent or reply.syncer_epoch < calls.epoch:
                continue  # settled, or from a syncer that is gone
            self._take_submit_reply(fragment, sent, lane_id, lane, reply)
            if reply.status == wire.SUBMIT_STATUS_NOT_OPEN:
                await wait_for(news, NOT_OPEN_WAIT_S)

    def _take_submit_reply(
        self,
        fragment: IslandFragment,
        sent: Outstanding,
        lane_id: int,
        lane: SentLane,
        reply: wire.SubmitReply,
    ) -> None:
        match reply.status:
            case wire.SUBMIT_STATUS_NOT_OPEN:
                pass
            case wire.SUBMIT_STATUS_FENCED:
                self._tasks.fail(self._calls.fenced(reply.message))
            case wire.SUBMIT_STATUS_INVALID:
                self._tasks.fail(
                    CodecError(
                        f"the syncer cannot accept lane {lane_id} of {sent.key}: {reply.message}"
                    )
                )
            case _:  # received, now or before, or over
                lane.received_epoch = reply.syncer_epoch
                if reply.HasField("outcome"):
                    self.take(fragment, outcome_of(reply.outcome))
                self._tasks.notify()

    async def _decline(self, fragment: IslandFragment, sent: Outstanding) -> None:
        """Repeat it until the contribution is settled: a restarted syncer has forgotten it."""
        while fragment.outstanding is sent and self._tasks.failure is None:
            news = self._tasks.news
            if fragment.outcome is None:
                await self._calls.decline(sent.key, fragment.decline_reason)
            await wait_for(news, _DECLINE_AGAIN_S)


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
