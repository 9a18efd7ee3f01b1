"""Decides whether what an island trained can be right, from losses and from bounds of its steps.

A flipped bit, a broken optimizer state or damaged text must not reach the other islands. An island
checks four things by itself; the first three cost neither a collective nor a wait:

    loss     it is far beyond the median of the island's last losses, three steps in a row, or it is
             not finite
    reach    a value of a fragment lies further from its anchor than the inner steps since the last
             merge can have moved it (`Reach`)
    outcome  the syncer refused the island's last contributions
    trial    the loss of unseen text rises as what the island is about to send is merged (`Trials`);
             asked only where another island goes against it, or its last losses are high, though
             not far beyond the median, because it costs two evaluations

If one of them fails, the island sends nothing, takes the published values of all fragments
(`Returns`), and has the state of its inner optimizer repaired or made new.

The first loss after that is one of the published values, because no step was made from them yet. If
it is far off, too, the parameters and the optimizer of this island are not to blame, but its text
or the published version. Then the island goes on declining until one of its rounds expires: this
means that no other island contributes either, and all have the same published values. It accepts
the new loss and raises an alarm; an island cannot decide to go back to an earlier version.

Pure: floats and integers, no tensors, no clock.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from enum import Enum

#: Losses that make a median, and fewest that make one.
_WINDOW, _FEWEST = 64, 16
#: Losses in a row that are far off before they count: one batch may be odd.
_IN_A_ROW = 3
#: The median of as many losses is high beyond the median of all by this share of it.
_HIGH_SHARE = 0.2
#: Losses are known as long as no fragment was left without a merge for so many of the last rounds'
#: median: what an island trains alone while a syncer is away, a late merge overwrites.
_ROUNDS_ALONE, _ROUNDS = 2, 5
#: A loss is far off beyond the median by this share of it, so many nats, and so many deviations.
_SHARE, _NATS, _DEVIATIONS = 0.5, 0.5, 6.0
#: Of a normal distribution: standard deviation over median absolute deviation.
_DEVIATION_OF_MEDIAN = 1.4826
#: Contributions in a row that the syncer refuses before the optimizer state is not trusted; to one
#: fragment where no other is merged: a lawful jump is refused once less there (`outer.guard`).
MOST_REFUSED = 3
#: What a bound is multiplied with: roundings, and moments of other ages.
_SLACK = 2.0
#: Returns in a row: the first mends the optimizer's state, the second makes it new.
_MOST_IN_A_ROW = 2
#: Of so many last trials as many may not raise the loss, and none by this share. Besides noise
#: sound contributions lowered it by 0.04 % at least, and noise moved it by 0.05 either way (seed 1
#: of `diloco bench guard`); without an end to it (seed 0), shuffled labels raised it in 20 of 21
#: trials, by up to 2.7 %, flipped signs in all, by 0.5 to 13.
_TRIALS, _MOST_RISES, _MOST_RISE = 4, 2, 0.001
#: Inner steps without a return after which the next one is the first again, at least.
_FORGET_STEPS = 64


class Mend(Enum):
    """The repair of its inner optimizer that the training loop makes after a step."""

    NOTHING = 0
    #: Zero what the optimizer cannot have made.
    MOMENTS = 1
    #: Begin with a new state, or another island's.
    ALL = 2


@dataclass(frozen=True, slots=True)
class StepBound:
    """One inner step moves a value x by at most `update` + `decay` |x|."""

    update: float = math.inf
    decay: float = 0.0


@dataclass(frozen=True, slots=True)
class Reach:
    """The values of a fragment lie within `update` + `decay` |anchor| of their anchor."""

    update: float = 0.0
    decay: float = 0.0

    def after(self, step: StepBound) -> Reach:
        """Return the reach after one more inner step."""
        return Reach(self.update + step.update, self.decay + step.decay)

    def mixed(self, local_mix: float, moved: float) -> Reach:
        """Return the reach after a merge that keeps a share of the local values.

        Args:
            local_mix: alpha; 0: the local values are the anchor.
            moved: Largest change of a value of the anchor.
        """
        if not local_mix:
            return Reach()
        return Reach(local_mix * (self.update + moved), local_mix * self.decay)

    @property
    def limits(self) -> tuple[float, float]:
        """Bounds beyond which a value cannot be right: without, and per |anchor|."""
        return _SLACK * self.update, _SLACK * self.decay


class OwnLosses:
    """The losses of one island, step by step.

    Those of values that an island trained alone for long, because nothing was published, are held
    against the known ones and are not known themselves: the next merge takes the island back to
    where it was, and a loss of then is no sign of a fault.

    Attributes:
        reason: Why nothing may be sent now; empty: it may.
        wants_return: Whether the published values are to be taken.
        is_astray: Whether even they have a loss that is far off.
        high: Why what is sent is to be tried before (`Trials`); empty: the last losses are usual.
        last: The last loss; NaN: none yet.
    """

    def __init__(self, inner_steps_per_round: int) -> None:
        """Know nothing yet; a round is taken to have so many steps until one is over."""
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._newest: deque[float] = deque(maxlen=_IN_A_ROW)
        self._inner_steps_per_round = inner_steps_per_round
        self._rounds: deque[int] = deque(maxlen=_ROUNDS)
        self._local_steps = 0
        self._num_far = self._num_near = 0
        self._is_of_published = False
        self.reason = ""
        self.wants_return = False
        self.is_astray = False
        self.high = ""
        self.last = math.nan

    @property
    def limit(self) -> float:
        """Loss beyond which one is far off; infinite as long as too few are known."""
        if len(self._losses) < _FEWEST:
            return math.inf
        median = statistics.median(self._losses)
        deviation = statistics.median(abs(loss - median) for loss in self._losses)
        return median + max(
            _SHARE * abs(median), _NATS, _DEVIATIONS * _DEVIATION_OF_MEDIAN * deviation
        )

    def note(self, loss: float, local_steps: int) -> None:
        """Take the loss of an inner step, computed before its update.

        Args:
            loss: Of the whole island.
            local_steps: Inner steps since the last merge of a fragment, the largest of all; this
                one included.
        """
        limit, self.last = self.limit, loss
        self.high = self._as_high(loss)
        if local_steps <= self._local_steps:
            self._rounds.append(self._local_steps)
        self._local_steps = local_steps
        usual = statistics.median(self._rounds) if self._rounds else 0
        is_alone = local_steps > _ROUNDS_ALONE * max(usual, self._inner_steps_per_round)
        is_far = not loss <= limit or math.isinf(loss)
        self._num_far = self._num_far + 1 if is_far else 0
        self._num_near = 0 if is_far else self._num_near + 1
        if self._is_of_published:
            self._is_of_published, self.is_astray = False, is_far
        elif self.is_astray:
            self.wants_return = self._num_near >= _IN_A_ROW  # without the work done meanwhile
        else:
            self.wants_return = self._num_far >= _IN_A_ROW or not math.isfinite(loss)
        if not (is_far or is_alone or self.is_astray):
            self._losses.append(loss)
        if self.is_astray and not is_far:
            self.reason = f"the loss of this island was far off, and is {loss:.4g} again"
        elif self.is_astray or self.wants_return:
            known = f"{limit:.4g} is far off" if math.isfinite(limit) else "it is not finite"
            self.reason = f"the loss of this island is {loss:.4g}, beyond {known}"
        else:
            self.reason = ""

    def _as_high(self, loss: float) -> str:
        self._newest.append(loss)
        if len(self._losses) < _FEWEST:
            return ""
        newest, usual = statistics.median(self._newest), statistics.median(self._losses)
        if not newest > usual + _HIGH_SHARE * abs(usual):
            return ""
        return f"its own loss is {newest:.4g}, where {usual:.4g} is usual"

    def returned(self) -> None:
        """Record that the published values were taken: the next loss is theirs."""
        self._is_of_published, self._num_far, self._num_near = True, 0, 0
        self.reason, self.wants_return, self.is_astray = "", False, False

    def accept(self) -> None:
        """Take the present losses for granted: no island has better ones."""
        self.__init__(self._inner_steps_per_round)  # type: ignore[misc]


class Trials:
    """Whether what an island is about to send makes the published values better, by their loss.

    Asked where two islands go against each other (`outer.guard`), and where an island's own losses
    are high. What is sound lowers the loss of unseen text each time; flipped signs and shuffled
    labels raise it, noise does now and then.
    """

    def __init__(self) -> None:
        """Know of no trial yet."""
        self._rises: deque[bool] = deque(maxlen=_TRIALS)

    def is_worse(self, before: float, after: float) -> bool:
        """Count a trial, and say whether nothing is to be sent.

        Args:
            before: Loss of the published values; where it is not finite, nothing can be told.
            after: With a share of the contribution; the same: the contribution is nothing.
        """
        if after == before or not math.isfinite(before):
            return False
        has_risen = not after < before
        self._rises.append(has_risen)
        beyond = not after <= before + _MOST_RISE * abs(before)
        return beyond or (has_risen and self.num_rises >= _MOST_RISES)

    def forget(self) -> None:
        """Know of no trial any more: the losses are other ones from here on."""
        self._rises.clear()

    @property
    def num_rises(self) -> int:
        """How many of the last trials raised the loss."""
        return sum(self._rises)


class Returns:
    """How often an island returned to what is published, and what that says of its optimizer."""

    def __init__(self, inner_steps_per_round: int, num_fragments: int) -> None:
        """Assign only."""
        self._num_fragments = num_fragments
        self._included: set[int] = set()
        self._forget_steps = max(_FORGET_STEPS, (MOST_REFUSED + 1) * inner_steps_per_round)
        self._last: int | None = None
        self._in_a_row = 0

    def is_recent(self, inner_step: int) -> bool:
        """Whether the island has returned lately."""
        return self._last is not None and inner_step - self._last <= self._forget_steps

    def included(self, fragment_id: int) -> None:
        """Record that a contribution counts; one of each fragment, and all is well again."""
        self._included.add(fragment_id)
        if len(self._included) == self._num_fragments:
            self._in_a_row = 0

    def was_vain(self) -> None:
        """Record that the published values are no better: the optimizer is not to blame."""
        self._in_a_row = 0

    def note(self, inner_step: int) -> None:
        """Record a return that counts towards nothing."""
        self._last = inner_step

    def mend(self, inner_step: int, *, is_new: bool) -> Mend | None:
        """Count a return after so many inner steps, and say what to do; None: it is no use.

        Args:
            inner_step: Completed inner steps.
            is_new: Whether the optimizer's state is not to be trusted whatever came before.
        """
        self._in_a_row = self._in_a_row + 1 if self.is_recent(inner_step) else 1
        self._last = inner_step
        self._included.clear()
        if self._in_a_row > _MOST_IN_A_ROW:
            return None
        return Mend.ALL if is_new or self._in_a_row == _MOST_IN_A_ROW else Mend.MOMENTS
