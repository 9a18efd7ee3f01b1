"""An island's outer loop: `OuterLoop.stepping` after every inner step sends and merges what is due.

Belongs to the training thread: collectives and parameters are touched here only. What needs the
network is posted to the `Exchange`; what needs all ranks goes through `Agreement`.

What takes time is written as a generator that yields whatever has to be waited for, so that one
body serves a training thread (which blocks) and a virtual clock (which awaits).

Source: protocol.md sections 3, 5, 6, 7 and 9.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from diloco.errors import IslandFailed
from diloco.outer.fragments import Plan
from diloco.outer.schedule import Schedule
from diloco.sync.agreement import Agreed, Agreement, Standing, exit_code_of, raise_failure
from diloco.sync.exchange import Exchange
from diloco.sync.held import held_digests
from diloco.sync.io_thread import Waits
from diloco.sync.ledger import FragmentLedger, Outstanding, Verdict
from diloco.sync.outer_state import LOOK_S, OuterState, Runner, StateKeeper
from diloco.sync.shards import LaneShards
from diloco.telemetry.events import Event, FragmentMerged, RoundExpiredSeen


class OuterLoop:
    """The outer loop of one rank of an island.

    Every rank of the island makes the same calls in the same order; `starting` or `resuming` is the
    first. `inner_step` counts completed inner steps; `overwritten_steps` those whose local effect a
    merge replaced, each fragment by its share of the parameters; it and `blocked_s` are sums since
    the start. No run checkpoint may be taken before `first_checkpoint_step`: an island that
    returned holds versions until then that the others merge only there.
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
    ) -> None:
        """Assign only; `start_step` is where the run began: 0, or a warm start's position."""
        self._plan = plan
        self._schedule = schedule
        self._shards = shards
        self._exchange = exchange
        self._runner = runner
        self._agreement = agreement
        self._local_mix = local_mix
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
        self._ledgers = [FragmentLedger(timeline, f.fragment_id) for f in plan.fragments]
        self._anchors: list[Mapping[int, Tensor]] = []
        numel = sum(fragment.numel for fragment in plan.fragments)
        self._shares = [fragment.numel / numel for fragment in plan.fragments]
        self.inner_step = start_step
        self.first_checkpoint_step = start_step
        self.blocked_s = 0.0
        self.overwritten_steps = 0.0
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
        to go on: at `start_step`, or, for an island that returns, as `course` finds it.

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
        self._take((yield from self._keeper.resuming(state)))

    def _take(self, state: OuterState) -> None:
        self.inner_step, self.first_checkpoint_step = state.inner_step, state.first_checkpoint_step
        self._ledgers, self._anchors = state.ledgers, state.anchors

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
        """Return the state of this rank's lanes after the last step, by the names of `captured`.

        The tensors are in use, though never written to: copy before writing into them.
        """
        state = OuterState(
            self.inner_step,
            self.first_checkpoint_step,
            self._ledgers,
            self._anchors,
        )
        return (yield from self._keeper.capturing(state))

    # -- training --------------------------------------------------------------------------------

    def stepping(self, num_tokens: int) -> Waits[None]:
        """Account for one inner step of `num_tokens` tokens of the whole island, then act.

        Order: merges of earlier sends, then sends, then, for tau = 0, their merges.
        """
        self.inner_step += 1
        for ledger in self._ledgers:
            ledger.count(num_tokens)
        agreed = self._agreement.read()
        self._raise_failure(agreed)
        for ledger in self._ledgers:
            sent = ledger.outstanding
            if sent is not None and self._merge_step(sent) <= self.inner_step:
                yield from self._settle(ledger, agreed)
        due = [
            fragment_id
            for fragment_id in self._schedule.due(self.inner_step)
            if self._ledgers[fragment_id].is_sending(self.inner_step)
        ]
        for fragment_id in due:
            self._send(self._ledgers[fragment_id], is_flush=False)
        if self._schedule.overlap_steps == 0:
            for fragment_id in due:
                yield from self._settle(self._ledgers[fragment_id], None)
        if self.num_in_flight:
            self._agreement.start(self._exit_code, self._standings())

    def finishing(self) -> Waits[None]:
        """Merge what is outstanding, then flush: nobody's last steps are lost; then look at it.

        Raises:
            IslandFailed: On all ranks, if what the parameters hold is not what was published.
        """
        self._raise_failure(self._agreement.read())
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
                self._shards.distribute(ledger.fragment_id, self._anchors[ledger.fragment_id], 0.0)
            else:
                waiting.append(ledger)
        while waiting:
            for ledger in waiting:
                self._send(ledger, is_flush=True)
            for ledger in waiting:
                yield from self._settle(ledger, None)
            # An expired attempt is tried again; three in a row end the run by the syncer's word.
            waiting = [ledger for ledger in waiting if not ledger.is_flushed]

    def _hash_published(self) -> tuple[str, ...]:
        """Hash the parameters, which must hold what this island last merged; collective.

        A version is compared with the syncer's word where that is still its newest.
        """
        held = held_digests(self._plan, self._shards, self._agreement)
        views = [self._exchange.view(fragment.fragment_id) for fragment in self._plan.fragments]
        is_wrong = [
            digest is None or (view.version == ledger.version and view.digest != digest)
            for digest, view, ledger in zip(held, views, self._ledgers, strict=True)
        ]
        # Ranks hear the syncer at different times: one that found a difference speaks for all.
        wrong = [
            p for p, word in enumerate(self._agreement.smallest([-w for w in is_wrong])) if word
        ]
        if wrong:
            p = wrong[0]
            found = f"the digest {held[p]}" if held[p] else "copies that differ between its ranks"
            raise IslandFailed(
                f"after the last merge, parameters of this island are not the published ones: "
                f"fragments {wrong}; of fragment {p}, version {self._ledgers[p].version} was "
                f"published with the digest {views[p].digest or 'unknown'}, the model holds "
                f"{found}. What is published is not touched by this. Start the island again, and "
                f"it takes that: diloco island RUN.toml --island NAME; if this comes again, look "
                f"for code that writes to parameters during outer.finish(), or for bad memory"
            )
        return tuple(digest for digest in held if digest is not None)

    @contextlib.contextmanager
    def global_parameters(self) -> Iterator[None]:
        """Put the published values that this island last merged in place; restore afterwards."""
        local = [self._shards.collect(f.fragment_id) for f in self._plan.fragments]
        for fragment, anchor in zip(self._plan.fragments, self._anchors, strict=True):
            self._shards.distribute(fragment.fragment_id, anchor, 0.0)
        try:
            yield
        finally:
            for fragment, lanes in zip(self._plan.fragments, local, strict=True):
                self._shards.distribute(fragment.fragment_id, lanes, 0.0)
                self._shards.reuse(lanes)

    def _merge_step(self, sent: Outstanding) -> int:
        return self._schedule.merge_step(sent.sent_at_inner_step)

    def _send(self, ledger: FragmentLedger, *, is_flush: bool) -> None:
        """Post a fragment's local values, or that there is nothing to tell of them."""
        p = ledger.fragment_id
        sent = ledger.send(self.inner_step, is_flush=is_flush)
        if sent.weight_tokens == 0 and not is_flush:
            declined = "no tokens were counted since the last merge"
            self._runner.post(self._exchange.decline, sent, declined)
        else:
            local = self._shards.collect(p)
            self._runner.post(self._exchange.send, sent, local)
            self._runner.post(self._shards.reuse, local)

    def _settle(self, ledger: FragmentLedger, agreed: Agreed | None) -> Waits[None]:
        """Wait until the island agrees on the outcome of what is outstanding, and apply it."""
        sent = ledger.outstanding
        assert sent is not None
        began = self._clock()
        while True:
            if agreed is not None:
                standing = agreed.standings[ledger.fragment_id]
                if standing.verdict is Verdict.EXPIRED:
                    break
                if standing.verdict is not None and standing.staged_version > sent.key.version:
                    break
            yield self._exchange.wait_for_end(ledger.fragment_id, LOOK_S)
            agreed = self._agreement.now(self._exit_code, self._standings())
            self._raise_failure(agreed)
        blocked_s = self._clock() - began
        self.blocked_s += blocked_s
        self._apply(ledger, sent, standing, blocked_s)

    def _apply(
        self, ledger: FragmentLedger, sent: Outstanding, standing: Standing, blocked_s: float
    ) -> None:
        verdict = standing.verdict
        assert verdict is not None
        p = ledger.fragment_id
        local_mix = 0.0 if sent.is_flush else self._local_mix
        overwritten = ledger.settle(verdict, attempt=standing.attempt, local_mix=local_mix)
        self.overwritten_steps += overwritten * self._shares[p]
        is_merged = verdict is not Verdict.EXPIRED
        if is_merged:
            staged = self._exchange.staged(p)
            self._shards.distribute(p, staged, local_mix)
            self._anchors[p] = staged
        self._runner.post(self._settled, p, is_merged, verdict is Verdict.INCLUDED)
        if not is_merged:
            self._on_event(
                RoundExpiredSeen(self.inner_step, p, sent.key.version, sent.key.attempt, blocked_s)
            )
            return
        view = self._exchange.view(p)
        self._on_event(
            FragmentMerged(
                self.inner_step,
                p,
                ledger.version,
                verdict.value,
                self.inner_step - sent.sent_at_inner_step,
                blocked_s,
                view.digest,
                view.contributors,
                sent.is_flush,
            )
        )

    def _settled(self, fragment_id: int, is_merged: bool, is_included: bool) -> None:
        self._exchange.settle(fragment_id, is_merged=is_merged, is_included=is_included)

    @property
    def _exit_code(self) -> int:
        return exit_code_of(self._exchange.failure)

    def _raise_failure(self, agreed: Agreed | None) -> None:
        raise_failure(self._exchange.failure, 0 if agreed is None else agreed.exit_code)

    def _standings(self) -> list[Standing]:
        standings = []
        for ledger in self._ledgers:
            view = self._exchange.view(ledger.fragment_id)
            # What was posted to the exchange may not have been carried out yet.
            is_current = ledger.outstanding is not None and view.key == ledger.outstanding.key
            verdict = view.verdict if is_current else None
            standings.append(Standing(view.staged_version, verdict, view.attempt))
        return standings
