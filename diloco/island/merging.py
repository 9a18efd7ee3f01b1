"""Reads and writes the parameters of one rank: sends local values, merges published ones.

Belongs to the training thread, like the outer loop, which says when. What needs the network is
posted to the `Exchange`.

Source: PROTOCOL.md, "Order at a step".
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator

from torch import Tensor
from torch.profiler import record_function

from diloco.device_thread import launched
from diloco.io_thread import Waits
from diloco.island.exchange.contributions import Send
from diloco.island.outer_state import LoopParts, OuterState
from diloco.protocol.island.ledger import (
    FragmentLedger,
    LocalMix,
    Outstanding,
    Settled,
    Target,
    Verdict,
)
from diloco.protocol.island.soundness import Reach, StepBound
from diloco.protocol.island.votes import AnnouncedVersion, FragmentView, FragmentVote
from diloco.protocol.rounds.terms import Weights
from diloco.telemetry.events import (
    FragmentMerged,
    PhaseDone,
    PrefetchWithoutRoom,
    RoundExpiredSeen,
)

logger = logging.getLogger(__name__)


class Merging:
    """One rank's fragments against what is published of them.

    Attributes:
        state: What it reads and changes; set by `OuterLoop` when the run is entered.
        shares: Parts of the parameters that the fragments are.
        overwritten_steps: Inner steps whose local effect a merge replaced, each fragment by its
            share; a sum since the start.
        dropped_tokens: Tokens that no contribution will count, likewise.
    """

    state: OuterState

    def __init__(self, parts: LoopParts) -> None:
        """Assign only."""
        self._plan = parts.plan
        self._shards = parts.shards
        self._exchange = parts.exchange
        self._runner = parts.runner
        self._local_mix = parts.local_mix
        #: Reach of the inner steps since the send of what is outstanding; unknown after a resume.
        self._since_send: dict[int, Reach] = {}
        self._weights = Weights(parts.schedule.inner_steps_per_round)
        self._clock = parts.clock
        self._on_event = parts.on_event
        numel = sum(fragment.numel for fragment in parts.plan.fragments)
        self.shares = [fragment.numel / numel for fragment in parts.plan.fragments]
        self.overwritten_steps = 0.0
        self.dropped_tokens = 0.0

    def moved(self, step: StepBound) -> None:
        """Record one more inner step."""
        self.state.reaches = [reach.after(step) for reach in self.state.reaches]
        self._since_send = {p: reach.after(step) for p, reach in self._since_send.items()}

    def take_published(self, ledger: FragmentLedger) -> int:
        """Write the anchor over the local values, and forget their work; returns its tokens.

        What is on its way keeps its weight. After `Exchange.verify_anchors`.
        """
        p = ledger.fragment_id
        self.state.anchors[p] = self._exchange.anchor(p)
        self.restore(p)
        self.state.reaches[p] = Reach()
        dropped = ledger.drop_work()
        self.overwritten_steps += dropped.overwritten_steps * self.shares[p]
        self.dropped_tokens += dropped.dropped_tokens * self.shares[p]
        return dropped.dropped_tokens

    def restore(self, fragment_id: int) -> None:
        """Write the published values of a fragment that were last merged over the local ones."""
        self._shards.distribute(fragment_id, self.state.anchors[fragment_id], 0.0)

    @contextlib.contextmanager
    def global_parameters(self) -> Iterator[None]:
        """Put the published values that this island last merged in place; restore afterwards."""
        local = []  # in host memory: a device may have no room for all of them
        for fragment in self._plan.fragments:
            lanes = self._shards.collect(fragment.fragment_id)
            local.append({lane_id: lane.to("cpu", copy=True) for lane_id, lane in lanes.items()})
            self._shards.reuse(lanes)
            self.restore(fragment.fragment_id)
        try:
            yield
        finally:
            for fragment, lanes in zip(self._plan.fragments, local, strict=True):
                self._shards.distribute(fragment.fragment_id, lanes, 0.0)

    def send(
        self,
        ledger: FragmentLedger,
        inner_step: int,
        *,
        is_flush: bool,
        reason: str = "",
        is_tried: bool = False,
    ) -> None:
        """Post a fragment's local values, or decline.

        Args:
            ledger: Of the fragment.
            inner_step: Completed inner steps.
            is_flush: Whether it goes into the flush.
            reason: Why they are not sent, on this rank; the others collect all the same.
            is_tried: Whether they are held back for `trying`.
        """
        p = ledger.fragment_id
        sent = ledger.send(inner_step, is_flush=is_flush, most_steps=self._weights.most_steps)
        if sent.weight_tokens == 0 and not is_flush:
            declined = reason or "no tokens were counted since the last merge"
            self._runner.post(self._exchange.decline, sent, declined)
        else:
            began = self._clock()
            local = self._shards.collect(p)
            gathered_s = self._clock() - began
            self._on_event(PhaseDone("gather", p, sent.key.version, -1, gathered_s))
            self._since_send[p] = Reach()
            self._runner.post(launched(self._shards.device))
            if reason:
                self._runner.post(self._exchange.decline, sent, reason)
                self._runner.post(self._shards.reuse, local)
            else:
                limits = self.state.reaches[p].limits
                free = functools.partial(self._shards.reuse, local)
                self._runner.post(self._exchange.send, Send(sent, local, limits, is_tried, free))

    def trying(
        self, fragment_id: int, loss_of: Callable[[], float | None]
    ) -> Waits[tuple[float, float] | None]:
        """Take the loss of the published values, and with half of what is held back in them.

        Returns:
            Both; None where no loss is known.
        """
        tried: dict[int, Tensor] = {}
        yield self._exchange.tried(fragment_id, tried)
        with self.global_parameters():
            if (before := loss_of()) is None:
                return None
            lanes = {**self.state.anchors[fragment_id], **tried}
            self._shards.distribute(fragment_id, lanes, 0.0)
            after = loss_of()
            assert after is not None, "a loss is known always, or never"
        return before, after

    def release(self, fragment_id: int, reason: str) -> None:
        """Have what is held back submitted, or declined for a reason."""
        self._runner.post(self._exchange.release, fragment_id, reason)

    def apply(
        self,
        ledger: FragmentLedger,
        inner_step: int,
        vote: FragmentVote,
        verdict: Verdict,
        blocked_s: float,
    ) -> None:
        """Do what the ranks agree on: merge the staged version, or record an expiry.

        Args:
            ledger: Of the fragment.
            inner_step: Completed inner steps.
            vote: What the ranks have agreed on.
            verdict: Of what is outstanding; ABSENT: nothing is.
            blocked_s: Seconds that training waited for it.
        """
        p, sent = ledger.fragment_id, ledger.outstanding
        target = ledger.target or Target(
            ledger.version + 1,
            is_flush=bool(sent and sent.is_flush),
            asks_trial=bool(vote.target and vote.target.asks_trial),
        )
        local_mix = ledger.mix_of(verdict, self._local_mix, is_flush=target.is_flush)
        if verdict.has_expired:
            assert sent is not None
            void = ledger.settle(verdict, attempt=vote.attempt, local_mix=local_mix)
            self.dropped_tokens += void.dropped_tokens * self.shares[p]
            self._runner.post(self._settled, p, False, False)
            key = sent.key
            event = RoundExpiredSeen(inner_step, p, key.version, key.attempt, blocked_s)
            self._on_event(event)
            return
        view = self._exchange.view(p)
        settled = ledger.settle(
            verdict,
            attempt=vote.attempt,
            local_mix=local_mix,
            merged=target,
            most_kept=self._weights.round_steps,
        )
        self.overwritten_steps += settled.overwritten_steps * self.shares[p]
        self.dropped_tokens += settled.dropped_tokens * self.shares[p]
        staged = self._exchange.staged(p)
        began = self._clock()
        with record_function("diloco/merge"):
            if local_mix == "since_send":
                self._shards.add(p, self._exchange.change_of_sent(p))
            else:
                self._shards.distribute(p, staged, local_mix)
        merged_s = self._clock() - began
        if num_parts := self._shards.prefetches_without_room():
            logger.warning("no room to prefetch %d parts of fragment %d", num_parts, p)
            self._on_event(PrefetchWithoutRoom(inner_step, p, num_parts))
        self.state.anchors[p] = staged
        self.state.reaches[p] = self._reach_after(p, local_mix)
        self._runner.post(self._settled, p, True, verdict is Verdict.INCLUDED)
        self._on_event(PhaseDone("merge", p, ledger.version - 1, -1, merged_s))
        self._on_event(_merged_event(inner_step, ledger, verdict, sent, blocked_s, settled, view))

    def _reach_after(self, fragment_id: int, local_mix: LocalMix) -> Reach:
        """Return how far from the new anchor local values may lie."""
        reach = self.state.reaches[fragment_id]
        since_send = self._since_send.pop(fragment_id, reach)
        if local_mix == "since_send":
            return since_send
        moved = 0.0
        if local_mix and math.isfinite(reach.update):
            moved = self._exchange.staged_change(fragment_id)
        return reach.mixed(local_mix, moved)

    def _settled(self, fragment_id: int, is_merged: bool, is_included: bool) -> None:
        self._exchange.settle(fragment_id, is_merged=is_merged, is_included=is_included)


def _merged_event(
    inner_step: int,
    ledger: FragmentLedger,
    verdict: Verdict,
    sent: Outstanding | None,
    blocked_s: float,
    settled: Settled,
    view: FragmentView,
) -> FragmentMerged:
    """Tell of a merge; `view` is from before it."""
    merged = view.staging or AnnouncedVersion(Target(ledger.version))
    return FragmentMerged(
        inner_step,
        ledger.fragment_id,
        ledger.version,
        verdict.value,
        0 if sent is None else inner_step - sent.sent_at_inner_step,
        blocked_s,
        merged.digest,
        merged.contributors,
        ledger.is_flushed,
        settled.dropped_tokens,
        settled.overwritten_steps,
    )
