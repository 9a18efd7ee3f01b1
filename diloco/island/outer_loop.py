"""An island's outer loop: `OuterLoop.stepping` after every inner step sends and merges what is due.

When that is due, a `Pace` says: at inner steps known beforehand, or as rounds open and versions
come; what it does to the parameters, `Merging`. Belongs to the training thread, as they do. What
needs the network is posted to the `Exchange`; what needs all ranks goes through `Agreement`.

What takes time is written as a generator that yields whatever has to be waited for, so that one
body serves a training thread (which blocks) and a virtual clock (which awaits).

Source: PROTOCOL.md, "When islands send and merge" and "Contributions".
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from torch import Tensor
from torch.profiler import record_function

from diloco.io_thread import Waits
from diloco.island.agreement import (
    NO_CUT,
    Agreed,
    AgreedCut,
    Agreement,
    FragmentVote,
    exit_code_of,
    raise_failure,
)
from diloco.island.exchange.exchange import Exchange
from diloco.island.lanes.shards import LaneShards
from diloco.island.merging import Merging
from diloco.island.outer_state import LOOK_S, OuterState, Runner, StateKeeper
from diloco.island.pace import ArrivalPace, Pace, ScheduledPace, aim, arrival_standing
from diloco.island.published_digests import published_digests
from diloco.island.self_check import SelfCheck
from diloco.outer.fragments import Plan
from diloco.outer.schedule import Schedule
from diloco.protocol.island.ledger import FragmentLedger, Outstanding, Verdict
from diloco.protocol.island.soundness import Mend, StepBound
from diloco.protocol.rounds.terms import Weights
from diloco.telemetry.events import Event, PhaseDone

#: Inner steps whose median is told as the recent one.
_RECENT_STEPS = 5
_UNBOUNDED = StepBound()


class OuterLoop:
    """The outer loop of one rank of an island.

    Every rank of the island makes the same calls in the same order; `starting` or `resuming` is the
    first. `inner_step` counts completed inner steps, `blocked_s` seconds that outcomes were waited
    for since the start. On arrival, the leader asks `must_leave`, and `is_leaving` is the answer on
    all ranks: to finish what is outstanding, and contribute no more. It asks `asked_cut`, too:
    `cut` is the one to take now, on all ranks, until `cut_over` says that it was. No run checkpoint
    may be taken before `first_checkpoint_step`: an island that returned holds versions until then
    that the others merge only there. `loss_of` is the held-out loss of the parameters as they are,
    collective; None: it is not known.
    """

    def __init__(
        self,
        plan: Plan,
        schedule: Schedule,
        shards: LaneShards,
        exchange: Exchange,
        runner: Runner,
        agreement: Agreement,
        *,
        timeline: int,
        local_mix: float,
        clock: Callable[[], float],
        on_event: Callable[[Event], None],
        start_step: int = 0,
        total_tokens: int | None = None,
    ) -> None:
        """Assign only.

        `start_step` is where the run began: 0, or a warm start's position. `total_tokens`, where
        islands merge on arrival, are those of all islands together, which end the run; without
        them everything happens at the steps of the schedule.
        """
        self._plan = plan
        self._schedule = schedule
        self._shards = shards
        self._exchange = exchange
        self._runner = runner
        self._agreement = agreement
        agreement.num_heard = lambda: exchange.num_heard
        agreement.on_heard = lambda: runner.post(exchange.coordinator_answered)
        self._clock = clock
        self._on_event = on_event
        self._keeper = StateKeeper(
            plan,
            schedule,
            shards,
            exchange,
            runner,
            agreement,
            timeline=timeline,
            start_step=start_step,
            on_event=on_event,
        )
        self._merging = Merging(
            plan,
            shards,
            exchange,
            runner,
            local_mix=local_mix,
            most_steps=Weights(schedule.inner_steps_per_round).most_steps,
            clock=clock,
            on_event=on_event,
        )
        self._check = SelfCheck(
            exchange,
            self._merging,
            agreement,
            inner_steps_per_round=schedule.inner_steps_per_round,
            num_fragments=len(plan.fragments),
            on_event=on_event,
        )
        self._ledgers = [FragmentLedger(timeline, f.fragment_id) for f in plan.fragments]
        self._total_tokens = total_tokens
        self._pace: Pace = ScheduledPace(schedule) if total_tokens is None else ArrivalPace()
        self._agrees_at_once = total_tokens is not None and agreement.is_alone  # nobody to wait for
        self._is_over = False
        self._steps_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._stepped_at: float | None = None
        self._start_step = start_step
        self.inner_step = start_step
        self.first_checkpoint_step = start_step
        self.blocked_s = 0.0
        self.is_leaving = False
        self.must_leave: Callable[[], bool] = lambda: False
        self.loss_of: Callable[[], float | None] = lambda: None
        self.asked_cut: Callable[[], AgreedCut] = lambda: NO_CUT
        self.cut = NO_CUT
        self._past_cut = 0
        self.digests: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Say where the island stands: inner step, versions, what is in flight."""
        versions = ", ".join(str(ledger.version) for ledger in self._ledgers)
        return (
            f"OuterLoop(inner_step={self.inner_step}, versions=[{versions}], "
            f"in_flight={self.num_in_flight})"
        )

    @property
    def num_in_flight(self) -> int:
        """Number of fragments whose contribution has no outcome yet."""
        return sum(ledger.outstanding is not None for ledger in self._ledgers)

    @property
    def versions(self) -> tuple[int, ...]:
        """Version of each fragment that this island last merged."""
        return tuple(ledger.version for ledger in self._ledgers)

    @property
    def is_over(self) -> bool:
        """Whether training ends here: by the run's inner steps, its tokens, or an early leave."""
        if self._total_tokens is None:
            return self.inner_step >= self._schedule.inner_steps
        return self._is_over or self.is_leaving

    @property
    def schedule_step(self) -> float:
        """Where the run stands, in inner steps of all islands: what a learning rate follows.

        Completed inner steps; on arrival, where islands make different numbers, the share of the
        run's tokens that this island has merged, of the fragment that has merged fewest, and its
        own inner steps since. Equal on all ranks.
        """
        if self._total_tokens is None:
            return self.inner_step
        inner_steps, total_tokens = self._schedule.inner_steps, self._total_tokens
        since = min(
            inner_steps * ledger.merged_tokens / total_tokens + ledger.steps
            for ledger in self._ledgers
        )
        return min(float(inner_steps), self._start_step + since)

    @property
    def left_tokens(self) -> float:
        """Tokens of this start that no version has yet, each fragment by its share."""
        shares = self._merging.shares
        return sum(x.tokens * share for x, share in zip(self._ledgers, shares, strict=True))

    @property
    def mend(self) -> Mend:
        """What the last step asks of the inner optimizer."""
        return self._check.mend

    @property
    def is_in_doubt(self) -> bool:
        """Whether the island has taken the published values lately, or declines for its loss."""
        return self._check.is_in_doubt(self.inner_step)

    @property
    def overwritten_steps(self) -> float:
        """Inner steps whose local effect a merge replaced, each fragment by its share."""
        return self._merging.overwritten_steps

    @property
    def dropped_tokens(self) -> float:
        """Tokens that no contribution will count, each fragment by its share."""
        return self._merging.dropped_tokens

    @property
    def bytes_up(self) -> int:
        """Bytes that this rank has sent."""
        return self._exchange.bytes_up

    @property
    def bytes_down(self) -> int:
        """Bytes that this rank has received."""
        return self._exchange.bytes_down

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
                yield from self._keeper.starting(
                    overwrite_initial=overwrite_initial, last_inner_step=last_inner_step
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
        resumed = yield from self._keeper.resuming(state)
        self._take(resumed)
        if self._total_tokens is not None:
            yield from self._catching_up(resumed.newest)

    def _catching_up(self, versions: Sequence[int]) -> Waits[None]:
        """Merge what was published beyond this island's part of the cut, before the first step."""
        while any(x.version < v for x, v in zip(self._ledgers, versions, strict=True)):
            news = self._exchange.news
            agreed = self._agree()
            self._raise_failure(agreed)
            self._take_in(agreed)
            yield self._exchange.wait_for_news(news, LOOK_S)

    def _take(self, state: OuterState) -> None:
        self._merging.reaches = state.reaches
        self.inner_step, self.first_checkpoint_step = state.inner_step, state.first_checkpoint_step
        self._ledgers, self._merging.anchors = state.ledgers, state.anchors
        # Anyone who starts after the end of the run makes no step: nobody would ever count it.
        self._is_over = all(ledger.is_flushed for ledger in self._ledgers)

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
        yield from self._keeper.pinning(self.inner_step, self.versions)

    def capturing(self) -> Waits[dict[str, Tensor]]:
        """Return the checkpoint state of this rank's lanes after the last step (`StateLayout`).

        The tensors are in use, though never written to: copy before writing into them.
        """
        state = OuterState(
            self.inner_step,
            self.first_checkpoint_step,
            self._ledgers,
            self._merging.anchors,
            self._merging.reaches,
        )
        return (yield from self._keeper.capturing(state, self.cut.number))

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
        self.inner_step += 1
        for ledger in self._ledgers:
            ledger.count(num_tokens)
        self._merging.moved(bound)
        self._check.begin_step(loss)
        agreed = self._read()
        yield from self._check.returning(agreed, self._ledgers, self.inner_step)
        for ledger in self._ledgers:
            if self._pace.is_merge_due(ledger, self.inner_step):
                yield from self._settle(ledger, agreed)
        self._prefetch(agreed)
        due = yield from self._acting(agreed)
        if agreed is not None and agreed.cut.number > self._past_cut and not self.is_over:
            self.cut = agreed.cut
        if self._pace.waits_at_send:
            for fragment_id in due:
                yield from self._settle(self._ledgers[fragment_id], None)
        if self._pace.is_agreeing(self.num_in_flight) and not self._agrees_at_once:
            self._agreement.start(
                self._exit_code,
                self._standings(),
                is_leaving=self.must_leave(),
                cut=self.asked_cut(),
                is_unsound=bool(self._check.unsound),
            )
        self._stepped_at = self._clock()

    def _measure_step(self) -> None:
        """Tell the syncer how long this island's inner steps take."""
        if self._total_tokens is None:
            return
        if self._stepped_at is not None:
            self._steps_s.append(self._clock() - self._stepped_at)
            self._exchange.step_s = statistics.median(self._steps_s)

    def _read(self) -> Agreed | None:
        """Take the ranks' common word, and what it says of the run."""
        agreed = self._agree() if self._agrees_at_once else self._agreement.read()
        self._raise_failure(agreed)
        return agreed

    def _agree(self) -> Agreed:
        return self._agreement.now(
            self._exit_code,
            self._standings(),
            is_leaving=self.must_leave(),
            cut=self.asked_cut(),
            is_unsound=bool(self._check.unsound),
        )

    def _acting(self, agreed: Agreed | None) -> Waits[list[int]]:
        """Merge what has arrived and send what is due; returns the fragments that were sent."""
        if self._total_tokens is not None and agreed is not None:
            self.is_leaving = self.is_leaving or agreed.is_leaving
            self._is_over = self._is_over or all(each.is_ending for each in agreed.standings)
            self._take_in(agreed)
        if self.is_leaving:
            return []
        due = self._pace.due(self._ledgers, self.inner_step, agreed, is_over=self._is_over)
        for fragment_id in due:
            is_flush = False
            if self._total_tokens is not None and agreed is not None:
                standing = agreed.standings[fragment_id]
                self._ledgers[fragment_id].attempt = standing.attempt
                is_flush = standing.is_ending
            yield from self._sending(self._ledgers[fragment_id], is_flush=is_flush)
        return due

    def _sending(self, ledger: FragmentLedger, *, is_flush: bool) -> Waits[None]:
        p, is_tried = ledger.fragment_id, ledger.asks_trial
        reason = self._check.before_send(p, self.inner_step)
        self._merging.send(
            ledger, self.inner_step, is_flush=is_flush, reason=reason, is_tried=is_tried
        )
        if is_tried:
            yield from self._check.trying(p, self.inner_step, self.loss_of)

    def _apply(
        self, ledger: FragmentLedger, standing: FragmentVote, verdict: Verdict, blocked_s: float
    ) -> None:
        self._merging.apply(ledger, self.inner_step, standing, verdict, blocked_s)
        self._check.take_end(ledger.fragment_id, verdict, self.inner_step)

    def _take_in(self, agreed: Agreed) -> None:
        """Merge what all ranks have staged."""
        for ledger, standing in zip(self._ledgers, agreed.standings, strict=True):
            self._arrive(ledger, standing)

    def _arrive(self, ledger: FragmentLedger, standing: FragmentVote) -> None:
        """Take the target that the leader names, and settle what needs no more waiting."""
        if aim(ledger, standing):
            assert ledger.target is not None
            self._runner.post(self._exchange.aim, ledger.fragment_id, ledger.target.version)
        if (verdict := self._pace.arrived(ledger, standing)) is not None:
            self._apply(ledger, standing, verdict, 0.0)

    def finishing(self) -> Waits[None]:
        """Merge what is outstanding, then flush: nobody's last steps are lost; then look at it.

        An island that leaves early only learns what became of its contributions.

        Raises:
            IslandFailed: On all ranks, if what the parameters hold is not what was published.
        """
        self._raise_failure(self._agreement.read())
        if self._total_tokens is not None:
            yield from self._ending()
            if not self.is_leaving:
                for ledger in self._ledgers:
                    if ledger.local_steps:  # it was flushed before others took one
                        self._merging.restore(ledger.fragment_id)
                self.digests = self._hash_published()
            return
        for ledger in self._ledgers:
            if ledger.outstanding is not None:
                yield from self._settle(ledger, None)
        if self._schedule.flush:
            yield from self._flushing()
            self.digests = self._hash_published()
        else:
            with self.global_parameters():
                self.digests = self._hash_published()

    def _flushing(self) -> Waits[None]:
        waiting = []
        for ledger in self._ledgers:
            if ledger.is_flushed:  # before this island returned
                self._merging.restore(ledger.fragment_id)
            else:
                waiting.append(ledger)
        while waiting:
            yield from self._check.returning(self._agree(), self._ledgers, self.inner_step)
            for ledger in waiting:
                yield from self._sending(ledger, is_flush=True)
            for ledger in waiting:
                yield from self._settle(ledger, None)
            # An expired attempt is tried again; three in a row end the run by the syncer's word.
            waiting = [ledger for ledger in waiting if not ledger.is_flushed]

    def _ending(self) -> Waits[None]:
        """Send flushes as they open, and merge them; or, told to leave, wait for outcomes."""
        while True:
            news = self._exchange.news
            agreed = self._agree()
            self._raise_failure(agreed)
            yield from self._check.returning(agreed, self._ledgers, self.inner_step)
            yield from self._acting(agreed)
            if self.is_leaving and not self.num_in_flight:
                return
            if all(ledger.is_flushed for ledger in self._ledgers):
                return
            yield self._exchange.wait_for_news(news, LOOK_S)

    def _hash_published(self) -> tuple[str, ...]:
        views = [self._exchange.view(fragment.fragment_id) for fragment in self._plan.fragments]
        return published_digests(self._plan, self._shards, self._agreement, views, self.versions)

    def global_parameters(self) -> AbstractContextManager[None]:
        """Put the published values that this island last merged in place; restore afterwards."""
        return self._merging.global_parameters()

    def _prefetch(self, agreed: Agreed | None) -> None:
        """Have what is merged next on its way to the parameters' device, once all ranks have it.

        Nothing on arrival: it is merged as soon as they have it.
        """
        in_flight = [(x.outstanding, x.fragment_id) for x in self._ledgers if x.outstanding]
        if agreed is None or self._total_tokens is not None or not in_flight:
            return
        sent, p = min(in_flight, key=lambda each: each[0].sent_at_inner_step)
        if _is_staged(agreed.standings[p], sent):
            self._shards.prefetch(p, self._exchange.staged(p))

    def _settle(self, ledger: FragmentLedger, agreed: Agreed | None) -> Waits[None]:
        """Wait until the island agrees on the outcome of what is outstanding, and apply it."""
        sent = ledger.outstanding
        assert sent is not None
        began = self._clock()
        with record_function("diloco/wait"):
            while True:
                if agreed is not None:
                    standing = agreed.standings[ledger.fragment_id]
                    has_expired = standing.verdict is not None and standing.verdict.has_expired
                    if has_expired or _is_staged(standing, sent):
                        break
                yield self._exchange.wait_for_end(ledger.fragment_id, LOOK_S)
                agreed = self._agreement.now(
                    self._exit_code, self._standings(), is_unsound=bool(self._check.unsound)
                )
                self._raise_failure(agreed)
                self._check.hear(agreed)
        blocked_s = self._clock() - began
        self.blocked_s += blocked_s
        self._on_event(PhaseDone("wait", ledger.fragment_id, sent.key.version, -1, blocked_s))
        assert standing.verdict is not None
        self._apply(ledger, standing, standing.verdict, blocked_s)

    @property
    def _exit_code(self) -> int:
        return exit_code_of(self._exchange.failure)

    def _raise_failure(self, agreed: Agreed | None) -> None:
        raise_failure(self._exchange.failure, 0 if agreed is None else agreed.exit_code)

    def _standings(self) -> list[FragmentVote]:
        standings = []
        for ledger in self._ledgers:
            view = self._exchange.view(ledger.fragment_id)
            if self._total_tokens is not None:
                standings.append(arrival_standing(ledger, view))
                continue
            # What was posted to the exchange may not have been carried out yet.
            is_current = ledger.outstanding is not None and view.key == ledger.outstanding.key
            verdict = view.verdict if is_current else None
            target = view.staging.target if view.staging else None
            standings.append(FragmentVote(view.staged_version, verdict, view.attempt, target))
        return standings


def _is_staged(standing: FragmentVote, sent: Outstanding) -> bool:
    """Whether all ranks have staged the version that what was sent has led to."""
    return standing.verdict is not None and standing.staged_version > sent.key.version
