"""Runs the outer loop of an island: sends and merges fragments between inner steps.

`OuterLoop.stepping` is called after every inner step. It consists of parts:

    Pace         decides what is due: by the schedule, or as rounds open and versions arrive
    Merging      reads and writes the parameters
    SelfCheck    keeps a contribution that cannot be right from the others
    Exchange     talks to the syncers, in another thread
    Agreement    makes all ranks of the island do the same

Everything here but the exchange belongs to the training thread. A method that takes time is a
generator that yields what it waits for. So one body serves a training thread, which blocks, and a
virtual clock, which awaits.

Source: PROTOCOL.md, "When islands send and merge" and "Contributions".
"""

from __future__ import annotations

import asyncio
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from torch import Tensor
from torch.profiler import record_function

from diloco.io_thread import Waits
from diloco.island.merging import Merging
from diloco.island.outer_state import (
    LOOK_S,
    LoopParts,
    OuterState,
    capturing_state,
    entering_run,
    pinning_versions,
    resuming_run,
)
from diloco.island.published_digests import published_digests
from diloco.island.self_check import SelfCheck
from diloco.protocol.island.ledger import FragmentLedger, Outstanding, Verdict
from diloco.protocol.island.pace import ArrivalPace, Pace, ScheduledPace, aim, arrival_vote
from diloco.protocol.island.soundness import Reach, StepBound
from diloco.protocol.island.votes import NO_CUT, AgreedCut, FragmentVote, IslandVote
from diloco.telemetry.events import PhaseDone

#: Inner steps whose median is reported as the recent one.
_RECENT_STEPS = 5
_UNBOUNDED = StepBound()


class OuterLoop:
    """The outer loop of one rank of an island.

    Every rank of the island makes the same calls in the same order; `starting` or `resuming` is the
    first.

    Attributes:
        state: Of this rank: steps, ledgers, anchors.
        exchange: With the syncers.
        merging: Of published values; counts what merges have overwritten and dropped.
        check: Of this island's own soundness.
        must_leave: Asked on the leader, on arrival: whether an operator has this island end.
        is_leaving: The answer, on all ranks, or that it leaves by itself: what is outstanding is
            finished, and no more is sent.
        asked_cut: Asked on the leader, on arrival: the cut that the coordinator asks for.
        cut: The cut to take now, on all ranks, until `cut_over`.
        loss_of: Held-out loss of the parameters as they are, collective; None: it is not known.
        digests: Of the published values that the parameters hold, as `finishing` found them.
    """

    def __init__(self, parts: LoopParts, *, total_tokens: int | None = None) -> None:
        """Assign only.

        `total_tokens`, where islands merge on arrival, are those of all islands together, which
        end the run; without them everything happens at the steps of the schedule.
        """
        exchange, agreement = parts.exchange, parts.agreement
        agreement.num_heard = lambda: exchange.num_heard
        agreement.on_heard = lambda: parts.runner.post(exchange.coordinator_answered)
        self._parts = parts
        self.exchange = exchange
        self._agreement = agreement
        self.merging = Merging(parts)
        self.check = SelfCheck(parts, self.merging)
        self._total_tokens = total_tokens
        self._pace: Pace = ScheduledPace(parts.schedule) if total_tokens is None else ArrivalPace()
        self._agrees_at_once = total_tokens is not None and agreement.is_alone  # nobody to wait for
        self._is_over = False
        self._steps_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._stepped_at: float | None = None
        self._take(
            OuterState(
                parts.start_step,
                parts.start_step,
                [FragmentLedger(parts.timeline, f.fragment_id) for f in parts.plan.fragments],
                anchors=[],
                reaches=[Reach() for _ in parts.plan.fragments],
            )
        )
        self._waited: tuple[float, float | None] = 0.0, None  # s so far, and since when
        self.is_leaving = False
        self.must_leave: Callable[[], bool] = lambda: False
        self.loss_of: Callable[[], float | None] = lambda: None
        self.asked_cut: Callable[[], AgreedCut] = lambda: NO_CUT
        self.cut = NO_CUT
        self._past_cut = 0
        self.digests: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Say where the island stands: inner step, versions, what is in flight."""
        versions = ", ".join(str(ledger.version) for ledger in self.state.ledgers)
        return (
            f"OuterLoop(inner_step={self.inner_step}, versions=[{versions}], "
            f"in_flight={self.num_in_flight})"
        )

    @property
    def inner_step(self) -> int:
        """Completed inner steps."""
        return self.state.inner_step

    @property
    def first_checkpoint_step(self) -> int:
        """Inner step before which no run checkpoint may be taken."""
        return self.state.first_checkpoint_step

    @property
    def blocked_s(self) -> float:
        """Seconds for which outcomes were waited for since the start, the wait of now included."""
        before_s, since = self._waited  # at once: another thread reads it
        return before_s + (0.0 if since is None else self._parts.clock() - since)

    @property
    def num_in_flight(self) -> int:
        """Number of fragments whose contribution has no outcome yet."""
        return sum(ledger.outstanding is not None for ledger in self.state.ledgers)

    @property
    def versions(self) -> tuple[int, ...]:
        """Version of each fragment that this island last merged."""
        return tuple(ledger.version for ledger in self.state.ledgers)

    @property
    def is_over(self) -> bool:
        """Whether training ends here: the run's steps or tokens are done, or the island leaves."""
        if self._total_tokens is None:
            return self.inner_step >= self._parts.schedule.inner_steps
        return self._is_over or self.is_leaving

    @property
    def schedule_step(self) -> float:
        """Progress of the run in inner steps, which a learning rate follows.

        Completed inner steps; on arrival, where islands make different numbers, the share of the
        run's tokens that this island has merged, of the fragment that has merged fewest, and its
        own inner steps since. Equal on all ranks.
        """
        if self._total_tokens is None:
            return self.inner_step
        inner_steps, total_tokens = self._parts.schedule.inner_steps, self._total_tokens
        since = min(
            inner_steps * ledger.merged_tokens / total_tokens + ledger.steps
            for ledger in self.state.ledgers
        )
        return min(float(inner_steps), self._parts.start_step + since)

    @property
    def left_tokens(self) -> float:
        """Tokens of this start that no version has yet, each fragment by its share."""
        shares = self.merging.shares
        return sum(x.tokens * share for x, share in zip(self.state.ledgers, shares, strict=True))

    # -- the start -------------------------------------------------------------------------------

    def starting(self, *, overwrite_initial: bool, last_inner_step: int) -> Waits[None]:
        """Enter the run: found version 0 with the others, or return to what is published.

        Afterwards parameters and anchors are the published versions, and `inner_step` says where
        to go on: at `start_step`, or, for an island that returns, as `resume_point` finds it.

        Args:
            overwrite_initial: Whether initial parameters that differ from the run's are replaced,
                with an event, or refused.
            last_inner_step: That the island's start before this one reported; 0 if there was none.

        Raises:
            FingerprintMismatch: If the initial parameters differ and must not be replaced.
            IslandFailed: If another rank failed, or the ranks hold different versions.
            DilocoError: If the run cannot be entered.
        """
        self._take(
            (
                yield from entering_run(
                    self._parts,
                    overwrite_initial=overwrite_initial,
                    last_inner_step=last_inner_step,
                )
            )
        )

    def resuming(self, state: Mapping[str, Tensor]) -> Waits[None]:
        """Enter the run where `capturing` left it, in a later timeline; instead of `starting`.

        What was in flight is submitted again: the same bytes, weights and steps, as the first
        attempt of this timeline. Parameters are not touched: they are the caller's to restore.

        Args:
            state: At least what `capturing` returned for the lanes of this rank; copied.

        Raises:
            ConfigError: Naming what is missing from the state, or of another plan.
            FingerprintMismatch: If the syncer restored another checkpoint.
            DilocoError: If another rank failed, or the run cannot be entered.
        """
        resumed = yield from resuming_run(self._parts, state)
        self._take(resumed)
        if self._total_tokens is not None:
            yield from self._catching_up(resumed.newest)

    def _catching_up(self, versions: Sequence[int]) -> Waits[None]:
        """Merge what was published beyond this island's part of the cut, before the first step."""
        while any(x.version < v for x, v in zip(self.state.ledgers, versions, strict=True)):
            news = self.exchange.news
            agreed = self._agree()
            self._raise_failure(agreed)
            self._take_in(agreed)
            yield from self._looking(news)

    def _take(self, state: OuterState) -> None:
        self.state = self.merging.state = state
        self._parts.shards.place.release()  # of own values that are not the published ones
        # An island that starts after the end of the run makes no step: it would never be counted.
        self._is_over = all(ledger.is_flushed for ledger in self.state.ledgers)

    # -- run checkpoints -------------------------------------------------------------------------

    def pinning(self) -> Waits[None]:
        """Have the syncer keep the present versions for a run checkpoint of this inner step.

        They are durable when it ends, on every rank.

        Raises:
            ValueError: Before `first_checkpoint_step`.
            IslandFailed: If the syncer keeps other versions for this step.
        """
        if self.inner_step < self.first_checkpoint_step:
            raise ValueError(
                f"no run checkpoint can be taken after inner step {self.inner_step}: this island "
                f"returned, and stands where the others stood only from inner step "
                f"{self.first_checkpoint_step} on"
            )
        yield from pinning_versions(self._parts, self.inner_step, self.versions)

    def capturing(self) -> Waits[dict[str, Tensor]]:
        """Return the checkpoint state of this rank's lanes after the last step (`StateLayout`).

        The tensors are in use, though never written to: copy before writing into them.
        """
        return (yield from capturing_state(self._parts, self.state, self.cut.number))

    @property
    def is_cut_due(self) -> bool:
        """Whether a cut is to be taken after the last step."""
        return self.cut.number > self._past_cut

    def cut_over(self) -> None:
        """Record that the cut was taken, or cannot be: it is not asked for again."""
        self._past_cut = self.cut.number
        if not self.cut.is_last:
            self.cut = NO_CUT

    # -- training --------------------------------------------------------------------------------

    def stepping(
        self, num_tokens: int, *, loss: float | None = None, bound: StepBound = _UNBOUNDED
    ) -> Waits[None]:
        """Account for one inner step of `num_tokens` tokens of the whole island, then act.

        Order: the return to published values, where what was trained is not sound, merges of
        earlier sends, then sends, then, for tau = 0, their merges. On arrival nothing is waited
        for.

        Args:
            num_tokens: Of the whole island.
            loss: Of the whole island, before the update; None: it is not watched.
            bound: How far the step can have moved a value.
        """
        self._measure_step()
        self.state.inner_step += 1
        for ledger in self.state.ledgers:
            ledger.count(num_tokens)
        self.merging.moved(bound)
        self.check.begin_step(loss, self.state.ledgers)
        agreed = self._read()
        yield from self.check.returning(agreed, self.state.ledgers, self.inner_step)
        for ledger in self.state.ledgers:
            if self._pace.is_merge_due(ledger, self.inner_step):
                yield from self._settle(ledger, agreed)
        self._prefetch(agreed)
        due = yield from self._acting(agreed)
        if agreed is not None and agreed.cut.number > self._past_cut and not self.is_over:
            self.cut = agreed.cut
        if self._pace.waits_at_send:
            for fragment_id in due:
                yield from self._settle(self.state.ledgers[fragment_id], None)
        if self._pace.is_agreeing(self.num_in_flight) and not self._agrees_at_once:
            self._agreement.start(self._vote())
        self._stepped_at = self._parts.clock()

    def _measure_step(self) -> None:
        """Measure how long inner steps take, for the syncer."""
        if self._total_tokens is None:
            return
        if self._stepped_at is not None:
            self._steps_s.append(self._parts.clock() - self._stepped_at)
            self.exchange.step_s = statistics.median(self._steps_s)

    def _read(self) -> IslandVote | None:
        """Take the ranks' common word, and what it says of the run."""
        agreed = self._agree() if self._agrees_at_once else self._agreement.read()
        self._raise_failure(agreed)
        return agreed

    def _agree(self) -> IslandVote:
        return self._agreement.now(self._vote())

    def _vote(self) -> IslandVote:
        """Give this rank's vote: what it knows of its fragments, and of the run."""
        failure = self.exchange.failure
        return IslandVote(
            0 if failure is None else failure.exit_code,
            tuple(map(self._fragment_vote, self.state.ledgers)),
            is_leaving=self.must_leave(),
            cut=self.asked_cut(),
            is_unsound=bool(self.check.unsound),
        )

    def _fragment_vote(self, ledger: FragmentLedger) -> FragmentVote:
        view = self.exchange.view(ledger.fragment_id)
        if self._total_tokens is not None:
            return arrival_vote(ledger, view)
        # What was posted to the exchange may not have been carried out yet.
        is_current = ledger.outstanding is not None and view.key == ledger.outstanding.key
        verdict = view.verdict if is_current else None
        target = view.staging.target if view.staging else None
        return FragmentVote(view.staged_version, verdict, view.attempt, target)

    def _acting(self, agreed: IslandVote | None) -> Waits[list[int]]:
        """Merge what has arrived and send what is due; returns the fragments that were sent."""
        if self._total_tokens is not None and agreed is not None:
            self.is_leaving = self.is_leaving or agreed.is_leaving
            self._is_over = self._is_over or all(each.is_ending for each in agreed.votes)
            self._take_in(agreed)
        if self.is_leaving:
            return []
        due = self._pace.due(self.state.ledgers, self.inner_step, agreed, is_over=self._is_over)
        for fragment_id in due:
            is_flush = False
            if self._total_tokens is not None and agreed is not None:
                vote = agreed.votes[fragment_id]
                self.state.ledgers[fragment_id].attempt = vote.attempt
                is_flush = vote.is_ending
            yield from self._sending(self.state.ledgers[fragment_id], is_flush=is_flush)
        return due

    def _sending(self, ledger: FragmentLedger, *, is_flush: bool) -> Waits[None]:
        reason = self.check.before_send(ledger, self.inner_step, is_flush=is_flush)
        is_tried = self.check.is_tried(ledger, reason)
        if self._parts.shards.place.is_apart:  # there is room for one at a time
            yield self.exchange.wait_until_made()
        self.merging.send(
            ledger, self.inner_step, is_flush=is_flush, reason=reason, is_tried=is_tried
        )
        if is_tried:
            yield from self.check.trying(ledger, self.inner_step, self.loss_of)

    def _apply(
        self, ledger: FragmentLedger, vote: FragmentVote, verdict: Verdict, blocked_s: float
    ) -> None:
        self.merging.apply(ledger, self.inner_step, vote, verdict, blocked_s)
        self.check.take_end(ledger, verdict, self.inner_step)

    def _take_in(self, agreed: IslandVote) -> None:
        """Merge what all ranks have staged."""
        for ledger, vote in zip(self.state.ledgers, agreed.votes, strict=True):
            self._arrive(ledger, vote)

    def _arrive(self, ledger: FragmentLedger, vote: FragmentVote) -> None:
        """Take the target that the leader names, and settle what needs no more waiting."""
        if aim(ledger, vote):
            assert ledger.target is not None
            self._parts.runner.post(self.exchange.aim, ledger.fragment_id, ledger.target.version)
        if (verdict := self._pace.arrived(ledger, vote)) is not None:
            self._apply(ledger, vote, verdict, 0.0)

    def finishing(self, *, is_early: bool = False) -> Waits[None]:
        """Merge what is outstanding, flush the last steps, then check what the parameters hold.

        An island that leaves early only waits for the outcomes of its contributions.

        Args:
            is_early: Whether it leaves by itself before the end of the run.

        Raises:
            IslandFailed: On all ranks, if what the parameters hold is not what was published.
        """
        self._raise_failure(self._agreement.read())
        self.is_leaving = self.is_leaving or is_early
        if self._total_tokens is not None:
            yield from self._ending()
            if not self.is_leaving:
                for ledger in self.state.ledgers:
                    if ledger.local_steps:  # it was flushed before others took one
                        self.merging.restore(ledger.fragment_id)
                self.digests = self._hash_published()
            return
        for ledger in self.state.ledgers:
            if ledger.outstanding is not None:
                yield from self._settle(ledger, None)
        if self.is_leaving:
            return
        if self._parts.schedule.flush:
            yield from self._flushing()
            self.digests = self._hash_published()
        else:
            with self.global_parameters():
                self.digests = self._hash_published()

    def _flushing(self) -> Waits[None]:
        waiting = []
        for ledger in self.state.ledgers:
            if ledger.is_flushed:  # before this island returned
                self.merging.restore(ledger.fragment_id)
            else:
                waiting.append(ledger)
        while waiting:
            yield from self.check.returning(self._agree(), self.state.ledgers, self.inner_step)
            for ledger in waiting:
                yield from self._sending(ledger, is_flush=True)
            for ledger in waiting:
                yield from self._settle(ledger, None)
            # An expired attempt is tried again; three in a row end the run by the syncer's word.
            waiting = [ledger for ledger in waiting if not ledger.is_flushed]

    def _ending(self) -> Waits[None]:
        """Send flushes as they open, and merge them; or, told to leave, wait for outcomes."""
        while True:
            news = self.exchange.news
            agreed = self._agree()
            self._raise_failure(agreed)
            yield from self.check.returning(agreed, self.state.ledgers, self.inner_step)
            yield from self._acting(agreed)
            if self.is_leaving and not self.num_in_flight:
                return
            if all(ledger.is_flushed for ledger in self.state.ledgers):
                return
            yield from self._looking(news)

    def _looking(self, news: asyncio.Event) -> Waits[None]:
        """Wait for news, as the leader, who has that of all fragments; others wait for its vote."""
        if self._agreement.is_leader:
            yield self.exchange.wait_for_news(news, LOOK_S)

    def _hash_published(self) -> tuple[str, ...]:
        parts = self._parts
        return published_digests(
            parts.plan, parts.shards, self._agreement, parts.views(), self.versions
        )

    def global_parameters(self) -> AbstractContextManager[None]:
        """Put the published values that this island last merged in place; restore afterwards."""
        return self.merging.global_parameters()

    def _prefetch(self, agreed: IslandVote | None) -> None:
        """Start to copy what is merged next to the parameters' device, once all ranks have it.

        On arrival there is no need: versions are merged as soon as all ranks have them.
        """
        if self._parts.local_mix == "since_send":
            return  # what is staged is not what is added
        in_flight = [(x.outstanding, x.fragment_id) for x in self.state.ledgers if x.outstanding]
        if agreed is None or self._total_tokens is not None or not in_flight:
            return
        sent, p = min(in_flight, key=lambda each: each[0].sent_at_inner_step)
        if _is_staged(agreed.votes[p], sent):
            self._parts.shards.prefetch(p, self.exchange.staged(p))

    def _settle(self, ledger: FragmentLedger, agreed: IslandVote | None) -> Waits[None]:
        """Wait until the island agrees on the outcome of what is outstanding, and apply it."""
        sent = ledger.outstanding
        assert sent is not None
        before_s, began = self._waited[0], self._parts.clock()
        self._waited = before_s, began
        try:
            with record_function("diloco/wait"):
                while True:
                    if agreed is not None:
                        vote = agreed.votes[ledger.fragment_id]
                        has_expired = vote.verdict is not None and vote.verdict.has_expired
                        if has_expired or _is_staged(vote, sent):
                            break
                    yield self.exchange.wait_for_end(ledger.fragment_id, LOOK_S)
                    agreed = self._agree()
                    self._raise_failure(agreed)
                    self.check.take_vote(agreed)
        finally:
            blocked_s = self._parts.clock() - began
            self._waited = before_s + blocked_s, None
        self._parts.on_event(PhaseDone("wait", ledger.fragment_id, sent.key.version, -1, blocked_s))
        assert vote.verdict is not None
        self._apply(ledger, vote, vote.verdict, blocked_s)

    def _raise_failure(self, agreed: IslandVote | None) -> None:
        if agreed is not None:
            self._agreement.raise_failure(self.exchange.failure, agreed.exit_code)


def _is_staged(vote: FragmentVote, sent: Outstanding) -> bool:
    """Whether all ranks have staged the version that what was sent has led to."""
    return vote.verdict is not None and vote.staged_version > sent.key.version
