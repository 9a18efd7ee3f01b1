"""Keeps what an island trained wrongly from the other islands: declines, returns, raises alarms.

Belongs to the training thread, as the outer loop does, and decides by `soundness`. Every rank of
the island makes the same calls; that one of them found something travels with the agreement that
there is anyway, so a return happens on all of them at the same step boundary.

Source: PROTOCOL.md, "Unsound islands".
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence

from diloco.errors import AggregationError
from diloco.io_thread import Waits
from diloco.island.merging import Merging
from diloco.island.outer_state import LoopParts
from diloco.protocol.island.ledger import FragmentLedger, Verdict
from diloco.protocol.island.soundness import MOST_REFUSED, Mend, OwnLosses, Returns, Trials
from diloco.protocol.island.votes import NOT_FOLLOWED, IslandVote
from diloco.protocol.run.alarms import AlarmKind
from diloco.telemetry.events import AlarmRaised, LossAccepted, PublishedTaken

logger = logging.getLogger(__name__)

#: Contributors to the last version up to which a high loss asks for trials. Of more, sound ones may
#: make the published values worse by themselves, and only their mean does not: from scratch 4 of
#: 2,400 of eight islands were declined, and 14 of 480 of sixteen.
_MOST_TRIED = 4
#: In place of a fragment.
_AMONG_OTHERS = -1


class SelfCheck:
    """Checks on one rank whether its island trains soundly.

    Attributes:
        mend: What the last return asks of the inner optimizer; the outer loop's owner looks at it
            after each step.
        late_loss: Asked for the loss of the last step where `begin_step` was not given it; None:
            there is none that is not known yet.
    """

    def __init__(
        self,
        parts: LoopParts,
        merging: Merging,
    ) -> None:
        """Assign only."""
        self._exchange = parts.exchange
        self._merging = merging
        self._agreement = parts.agreement
        self._on_event = parts.on_event
        self._watch = OwnLosses(parts.schedule.inner_steps_per_round)
        self._returns = Returns(parts.schedule.inner_steps_per_round, len(parts.plan.fragments))
        self._returned_at = -1
        #: In a row: by fragment, and `_AMONG_OTHERS` of all where another's was merged.
        self._refused = Counter[int]()
        self._doubted: set[int] = set()  # fragments of which the last was refused, another's merged
        self._is_agreed = False
        self._for_loss: set[int] = set()  # fragments of which the loss forbade the last send
        self._for_trial: dict[int, str] = {}  # and of which, and why, a trial did for a high loss
        self._trials = Trials()
        self._tried_at, self._tried = -1, ""  # the last trial that failed
        self._is_for_high = False  # it was for a loss that is high, as it may lawfully be
        self._local_steps = 0
        self.mend = Mend.NOTHING
        self.late_loss: Callable[[], float | None] = lambda: None

    @property
    def unsound(self) -> str:
        """Why what this rank trained is not to be trusted; empty: it is."""
        sent_at, reason = self._exchange.unsound
        if sent_at > self._returned_at:
            return reason
        if self._tried_at > self._returned_at:
            return self._tried
        if self._is_refused:
            return f"the syncer refused {MOST_REFUSED} contributions in a row"
        return self._watch.reason if self._watch.wants_return else ""

    @property
    def _is_refused(self) -> bool:
        return max(self._refused.values(), default=0) >= MOST_REFUSED

    def is_in_doubt(self, inner_step: int) -> bool:
        """Whether the island has taken the published values lately, or declines for its loss."""
        return self._watch.is_astray or self._returns.is_recent(inner_step)

    def begin_step(self, loss: float | None, ledgers: Sequence[FragmentLedger]) -> None:
        """Take the loss of the inner step that was just made; None: it is not known (yet)."""
        self.mend = Mend.NOTHING
        self._local_steps = max(ledger.local_steps for ledger in ledgers)
        if loss is not None:
            self._note(loss)

    def settle(self) -> None:
        """Take the loss of the last step, if it was not known when that was begun.

        Before the next one, a send, a return, and whatever waits for the device anyway.
        """
        if (loss := self.late_loss()) is not None:
            self._note(loss)

    def _note(self, loss: float) -> None:
        was_astray = self._watch.is_astray
        self._watch.note(loss, self._local_steps)
        if self._watch.is_astray and not was_astray:
            self._returns.was_vain()
            text = "with the published values, too: nothing is sent until it comes back"
            logger.error("%s %s", self._watch.reason, text)

    def take_vote(self, agreed: IslandVote) -> None:
        """Take the ranks' common word while a step waits: a return is made before the next."""
        self._is_agreed = self._is_agreed or agreed.is_unsound

    def before_send(self, ledger: FragmentLedger, inner_step: int, *, is_flush: bool) -> str:
        """Say why nothing of a fragment may be sent now; empty: it may.

        While the last contribution to a fragment was refused, only such fragments are sent, to see
        whether the next one counts; a flush, whose direction nobody judges, is not, as long as
        there are others who send theirs.
        """
        self.settle()
        fragment_id = ledger.fragment_id
        if reason := self._watch.reason:
            self._for_loss.add(fragment_id)
            self._alarm(AlarmKind.ISLAND_DECLINES, inner_step, f"{reason}; it sends nothing")
            return reason
        is_probe = not is_flush and fragment_id in self._doubted
        is_needed = is_flush and ledger.attempt > 0  # without it an attempt has expired
        if self._doubted and not (is_probe or is_needed):
            reason = (
                f"the last contribution to fragment {min(self._doubted)} was refused: nothing else "
                f"is sent until one of it counts"
            )
            self._alarm(AlarmKind.ISLAND_DECLINES, inner_step, reason)
        return reason

    def is_tried(self, ledger: FragmentLedger, reason: str) -> bool:
        """Whether what is about to be sent of a fragment is tried before; collective.

        Args:
            ledger: Of the fragment.
            reason: Why this rank does not send it.
        """
        view = self._exchange.view(ledger.fragment_id)
        is_few = view is not NOT_FOLLOWED and len(view.contributors) <= _MOST_TRIED
        is_wanted = not reason and (ledger.asks_trial or (is_few and bool(self._watch.high)))
        (minus_wanted,) = self._agreement.smallest([-is_wanted])
        return minus_wanted < 0

    def trying(
        self, ledger: FragmentLedger, inner_step: int, loss_of: Callable[[], float | None]
    ) -> Waits[None]:
        """Submit what is held back of a fragment, unless it makes the published values worse.

        Collective; all ranks decide alike, at the step of the send.
        """
        fragment_id = ledger.fragment_id
        losses = yield from self._merging.trying(fragment_id, loss_of)
        reason = ""
        if losses is not None:
            before, after = losses
            minus_worse, minus_high = self._agreement.smallest(
                [-self._trials.is_worse(before, after), -bool(self._watch.high)]
            )
            if minus_worse:
                self._is_for_high = minus_high < 0 and not ledger.asks_trial
                against = "another island's goes against it"
                if minus_high:
                    against = self._watch.high or "another rank's loss is high"
                reason = (
                    f"half of its contribution to fragment {fragment_id} takes the held-out loss "
                    f"of what is published from {before:.5g} to {after:.5g}, "
                    f"{self._trials.num_rises} of its last trials raised it, and {against}"
                )
                if minus_high:
                    self._for_trial[fragment_id] = reason
                self._tried_at, self._tried = inner_step, reason
        self._merging.release(fragment_id, reason)

    def take_end(self, ledger: FragmentLedger, verdict: Verdict, inner_step: int) -> None:
        """Take what the end of a contribution says of what this island trains."""
        fragment_id = ledger.fragment_id
        if verdict in (Verdict.REFUSED, Verdict.REFUSED_EXPIRED):
            self._refused[fragment_id] += 1
            if verdict is Verdict.REFUSED:
                self._refused[_AMONG_OTHERS] += 1
                self._doubted.add(fragment_id)
        elif verdict is Verdict.INCLUDED:
            self._doubted.discard(fragment_id)
            del self._refused[_AMONG_OTHERS], self._refused[fragment_id]
            self._returns.included(fragment_id)
        if verdict is Verdict.EXPIRED:
            if fragment_id in self._for_loss and self._watch.is_astray:
                self._accept(f"{self._watch.reason}, with the published values, too", inner_step)
            elif fragment_id in self._for_trial:
                self._accept(self._for_trial[fragment_id], inner_step)
                ledger.asks_trial = False  # it would fail again
        if verdict is not Verdict.ABSENT:
            self._for_loss.discard(fragment_id)
            self._for_trial.pop(fragment_id, None)

    def _accept(self, reason: str, inner_step: int) -> None:
        """Go on from this loss: no island has a better one; declining would only end the run."""
        loss = self._watch.last
        self._watch.accept()
        self._trials.forget()
        logger.error("%s, and no island contributes: it is taken for granted from here on", reason)
        self._on_event(LossAccepted(inner_step, loss, reason))
        self._alarm(
            AlarmKind.LOSS_ACCEPTED,
            inner_step,
            f"{reason}, and no island contributes: see whether what is published is still good "
            f"(diloco status HOST:PORT), or go back: diloco coordinator RUN.toml --resume",
        )

    def returning(
        self, agreed: IslandVote | None, ledgers: Sequence[FragmentLedger], inner_step: int
    ) -> Waits[None]:
        """Take the published values of all fragments, if a rank says that its own are not sound.

        Raises:
            AggregationError: On all ranks, if that was done again and again, and was no use.
        """
        is_agreed = self._is_agreed or (agreed is not None and agreed.is_unsound)
        if not (is_agreed or (self._agreement.is_alone and self.unsound)):
            return
        reason = self.unsound  # before the last loss, which may be a good one
        self.settle()  # the next loss will be one of the published values
        reason = reason or self.unsound or "another rank of the island says so: see its log"
        yield self._exchange.verify_anchors()
        self._agreement.smallest([], self._exchange.failure)
        dropped = tuple(map(self._merging.take_published, ledgers))
        mend = self._take_return(inner_step)
        if mend is None:
            raise AggregationError(
                f"after inner step {inner_step} {reason}, and neither the published values nor a "
                f"new inner optimizer have helped. The training diverges, or this machine computes "
                f"wrongly: lower inner.optimizer.lr, or look at its memory and devices"
            )
        self.mend = mend
        logger.error("the published values are taken after step %d: %s", inner_step, reason)
        self._on_event(PublishedTaken(inner_step, reason, mend.name.lower(), dropped))
        text = f"{reason}; it took the published values"
        self._alarm(AlarmKind.ISLAND_DECLINES, inner_step, text)

    def _take_return(self, inner_step: int) -> Mend | None:
        mend: Mend | None = Mend.MOMENTS
        is_for_high = self._tried_at > self._returned_at and self._is_for_high  # on all ranks alike
        if is_for_high and not self._is_refused:
            self._returns.note(inner_step)  # the text may be to blame, as long as it is new
        elif not self._watch.is_astray:  # else the text was to blame, and has come back
            mend = self._returns.mend(inner_step, is_new=self._is_refused)
        self._watch.returned()
        self._returned_at, self._is_agreed = inner_step, False
        self._refused.clear()
        return mend

    def _alarm(self, kind: AlarmKind, inner_step: int, text: str) -> None:
        island = self._exchange.island
        self._on_event(AlarmRaised(kind, f"after inner step {inner_step} {text}", island))
