"""Judges run checkpoints by the held-out losses that islands report: a pure machine.

Every run checkpoint is a candidate: one version of each fragment. Islands take the held-out loss of
the published values that they hold at it, and report it. It is good, or bad, once most of those
that have a part of it say so, and at least two where there are two: no island condemns, or blesses,
alone. What is not judged, for want of reports or of a majority, is neither.

Only a good checkpoint lets older ones go, however many others follow. When candidates are bad
several times in a row, or not finite, the run returns to the last good one by itself: `Return` says
where to and why, and without whom: from the second return in a row on without the islands that
something speaks against, where these are few. After returns that did not help the run is lost,
with the command to type.

    candidates    all of it, but for votes on what is not judged yet: islands repeat these

What a loss is compared with, `diloco.protocol.run.loss_history` says.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum

from pydantic import ConfigDict, TypeAdapter

from diloco.bounded_text import MOST_NAMES
from diloco.protocol.run.admission import Entries
from diloco.protocol.run.loss_history import LossHistory

_KEY = "candidates"
#: Bad candidates in a row after which the run returns; one suffices that is not finite.
BAD_IN_A_ROW = 2
#: Good candidates in a row after which returns made before count no more.
_CALM = 5
#: Verdicts that are remembered, the newest, besides those of checkpoints that are kept.
_REMEMBERED = 32
#: Candidates of which an island's votes are kept, its newest: none takes the room of another's.
_MOST_OPEN = 8


class CheckpointVerdict(StrEnum):
    """What islands have found of a candidate."""

    GOOD = "good"
    BAD = "bad"
    DISPUTED = "disputed"  # all have reported, and no majority is


@dataclass(frozen=True, slots=True)
class JudgeRules:
    """How candidates are judged.

    Args:
        most_rise: Of a held-out loss above that of earlier good ones, as a share of it.
        most_returns: Returns of the run by itself in a row; 0: none, alarms alone.
        every_inner_steps: Inner steps from one candidate to the next, where all islands make the
            same; 0: there are none.
    """

    most_rise: float = 0.1
    most_returns: int = 2
    every_inner_steps: int = 1


@dataclass(frozen=True, slots=True)
class Return:
    """The run goes back to checkpoint `to`; `why` in words."""

    to: int
    why: str


@dataclass(frozen=True, slots=True)
class _State:
    """What is durable.

    Args:
        lowest: Lowest losses of good candidates.
        verdicts: Candidate -> verdict and loss.
        said: Losses that islands reported of the newest one that is not good.
        num_bad: Bad candidates in a row, up to now.
        num_returns: Returns by itself since the run was calm.
        num_good: Good candidates since the last return.
        returned_to: Checkpoint that the run returned to last; -1: it did not.
        pending: A return that is decided and not made.
        last: The last return that was made, in words; empty: none, or good candidates followed.
        since: Timeline that an operator began; later ones were begun by returns.
        accused: Islands that something spoke against at the returns in a row.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")  # of a newer program: refused

    lowest: tuple[float, ...] = ()
    verdicts: dict[int, tuple[str, float]] = field(default_factory=dict)
    said: str = ""
    num_bad: int = 0
    num_returns: int = 0
    num_good: int = 0
    returned_to: int = -1
    pending: Return | None = None
    last: str = ""
    since: int = 0
    accused: tuple[str, ...] = ()


_STATES = TypeAdapter(_State)


class Candidates:
    """Candidates of one run, in the present timeline."""

    def __init__(self) -> None:
        """Begin with none."""
        self._state = _State()
        # Island -> candidate -> loss, and how many were to judge it then.
        self._votes: dict[str, dict[int, tuple[float, int]]] = {}

    def apply(self, entries: Iterable[tuple[str, str]]) -> None:
        """Take over what is durable; entries of others are passed over."""
        for key, value in entries:
            if key != _KEY:
                continue
            self._state = _STATES.validate_python(json.loads(value))
            # What is judged, or was abandoned, needs no votes.
            judged = self._state.verdicts
            self._votes = {
                island: {n: each for n, each in said.items() if n not in judged}
                for island, said in self._votes.items()
            }

    # -- what is known -----------------------------------------------------------------------------

    @property
    def pending(self) -> Return | None:
        """The return that is decided and not made."""
        return self._state.pending

    @property
    def num_returns(self) -> int:
        """Returns of the run by itself since it was calm."""
        return self._state.num_returns

    @property
    def last_return(self) -> str:
        """The last return, in words; empty: none was made, or good candidates followed."""
        return self._state.last

    @property
    def accused(self) -> tuple[str, ...]:
        """Islands that something spoke against at this return, or at those in a row before it."""
        return self._state.accused

    @property
    def without(self) -> tuple[str, ...]:
        """Islands without which the next return is made: none of the first one."""
        return self.accused if self.num_returns else ()

    @property
    def without_text(self) -> str:
        """Say so, behind where a return leads to; empty: with everybody."""
        return f" without {', '.join(self.without)}" if self.without else ""

    def verdict(self, number: int) -> CheckpointVerdict | None:
        """Return what was found of a candidate; None: it is not judged."""
        found = self._state.verdicts.get(number)
        return None if found is None else CheckpointVerdict(found[0])

    def good(self, complete: Collection[int]) -> list[int]:
        """Return which of the complete checkpoints are good, the newest first."""
        return [
            n for n in sorted(complete, reverse=True) if self.verdict(n) is CheckpointVerdict.GOOD
        ]

    def kept(self, complete: Collection[int], most: int) -> tuple[int, ...]:
        """Return which checkpoints to keep, ascending; at most `most` + 1.

        The newest good ones: only a good one lets an older one go. Of later ones that are not good,
        or not judged yet, the newest. Where none was found good the newest of all.
        """
        if not (good := self.good(complete)[:most]):
            return tuple(sorted(complete)[-most:])
        return tuple(sorted({*good, max(complete)}))

    def problem(self, number: int) -> str:
        """Say of a bad or disputed candidate what is wrong; empty of others."""
        verdict, loss = self._state.verdicts.get(number, (CheckpointVerdict.GOOD, 0.0))
        if verdict == CheckpointVerdict.GOOD:
            return ""
        reference = LossHistory(self._state.lowest).reference
        return f"held-out loss {loss:.4f} nats a byte, of good ones {reference:.4f}: {verdict}"

    @property
    def alarm(self) -> str:
        """Say what is wrong with the newest candidates; empty: nothing."""
        judged = sorted(self._state.verdicts)
        bad = [n for n in judged if self.verdict(n) is not CheckpointVerdict.GOOD]
        if not bad or bad[-1] != judged[-1]:
            return ""
        return f"checkpoint {bad[-1]}: {self.problem(bad[-1])} ({self._state.said})"

    @property
    def num_bad(self) -> int:
        """Bad candidates in a row, up to now."""
        return self._state.num_bad

    # -- what is reported --------------------------------------------------------------------------

    def voted(
        self,
        island: str,
        number: int,
        loss: float,
        *,
        voters: Callable[[int], Collection[str]],
        complete: Collection[int],
        rules: JudgeRules,
    ) -> Entries:
        """Take an island's held-out loss of a candidate; entries when that judges one.

        Args:
            island: Whose word it is.
            number: Of the candidate, one that there can be.
            loss: In nats a byte.
            voters: Gives the islands that have, or are to have, a part of a candidate; none: that
                is not known yet.
            complete: Checkpoints that the run can return to.
            rules: By which it is judged.
        """
        if number in self._state.verdicts:
            return ()
        said, who = self._votes.setdefault(island, {}), voters(number)
        if said.get(number) == (loss, len(who)):
            return ()  # islands repeat it with every report
        said[number] = loss, len(who)
        for old in sorted(said)[:-_MOST_OPEN]:
            del said[old]
        votes = {i: self._votes[i][number][0] for i in who if number in self._votes.get(i, {})}
        judged = self._judge(votes, len(who), rules)
        if judged is None:
            return ()
        del said[number]  # it is said again, should this not be written
        return self._judged(number, *judged, votes, complete, rules)

    def _judge(
        self, votes: dict[str, float], num_voters: int, rules: JudgeRules
    ) -> tuple[CheckpointVerdict, float] | None:
        """Return what a majority says, and the loss in the middle of it; None: none does yet.

        For a good one its losses have to agree, within `most_rise`.
        """
        least = max(min(2, num_voters), num_voters // 2 + 1)
        history = LossHistory(self._state.lowest)
        high = sorted(
            x if math.isfinite(x) else math.inf
            for x in votes.values()
            if history.is_high(x, rules.most_rise)
        )
        low = sorted(x for x in votes.values() if not history.is_high(x, rules.most_rise))
        if not votes or not num_voters:
            return None
        for first in low[: len(low) - least + 1]:
            # All take the loss of one text: a word far from that of the others is not one of them.
            agreed = [x for x in low if first <= x <= first * (1 + rules.most_rise)]
            if len(agreed) >= least:
                return CheckpointVerdict.GOOD, statistics.median_low(agreed)
        if len(high) >= least:
            return CheckpointVerdict.BAD, statistics.median_low(high)
        if len(votes) == num_voters:
            return CheckpointVerdict.DISPUTED, max(votes.values(), key=lambda x: (math.isnan(x), x))
        return None

    def _judged(
        self,
        number: int,
        verdict: CheckpointVerdict,
        loss: float,
        votes: dict[str, float],
        complete: Collection[int],
        rules: JudgeRules,
    ) -> Entries:
        state, history = self._state, LossHistory(self._state.lowest)
        verdicts = {**state.verdicts, number: (str(verdict), loss)}
        needless = [n for n in sorted(verdicts)[:-_REMEMBERED] if n not in complete]
        said = ", ".join(f"{island} {x:.4f}" for island, x in sorted(votes.items())[:MOST_NAMES])
        state = replace(
            state,
            verdicts={n: v for n, v in verdicts.items() if n not in needless},
            said="" if verdict is CheckpointVerdict.GOOD else said,
        )
        match verdict:
            case CheckpointVerdict.GOOD:
                history.add(loss)
                num_good = state.num_good + 1
                state = replace(
                    state,
                    lowest=tuple(history.lowest),
                    num_bad=0,
                    num_good=num_good,
                    num_returns=0 if num_good >= _CALM else state.num_returns,
                    last="" if num_good >= BAD_IN_A_ROW else state.last,
                    accused=() if num_good >= _CALM else state.accused,
                )
            case CheckpointVerdict.BAD:
                num_bad = state.num_bad + (1 if math.isfinite(loss) else BAD_IN_A_ROW)
                state = replace(state, num_bad=num_bad)
                state = replace(state, pending=self._due(state, number, loss, complete))
        if not rules.most_returns:
            state = replace(state, pending=None)
        return _entry(state)

    def _due(
        self,
        state: _State,
        number: int,
        loss: float,
        complete: Collection[int],
    ) -> Return | None:
        """Decide whether, and to which checkpoint, the run returns."""
        good = [n for n in self.good(complete) if n < number]
        if state.num_bad < BAD_IN_A_ROW or not good or state.pending is not None:
            return state.pending
        older = [n for n in good if n < state.returned_to]
        if state.num_good == 0 and older:  # the one that it returned to last did not help
            good = older
        reference = LossHistory(state.lowest).reference
        why = (
            f"held-out loss of checkpoint {number} is {loss:.4f} nats a byte ({state.said}), of "
            f"good ones {reference:.4f}; {state.num_bad} bad in a row"
        )
        return Return(good[0], why)

    # -- returns -----------------------------------------------------------------------------------

    def is_lost(self, rules: JudgeRules) -> bool:
        """Whether a return is due that may not be made: so many did not help."""
        return self.pending is not None and self.num_returns >= rules.most_returns

    def is_followed(self, timeline: int) -> bool:
        """Whether returns alone have led from a timeline to the present one."""
        return timeline >= self._state.since

    def resumed(self, step: int, timeline: int, *, is_return: bool) -> Entries:
        """Forget what came after the checkpoint that a new timeline begins from.

        Args:
            step: Of the checkpoint.
            timeline: The new one.
            is_return: Whether the run does so by itself; what an operator resumes counts as calm.
        """
        state, pending = self._state, self._state.pending
        state = replace(
            state,
            verdicts={n: v for n, v in state.verdicts.items() if n <= step},
            num_bad=0,
            num_good=0,
            pending=None,
        )
        if not is_return:
            state = replace(
                state, num_returns=0, returned_to=-1, last="", since=timeline, accused=()
            )
            return _entry(state)
        return _entry(
            replace(
                state,
                num_returns=state.num_returns + 1,
                returned_to=step,
                last=f"the run returned to checkpoint {step} by itself"
                + (f"{self.without_text}: {pending.why}" if pending is not None else ""),
            )
        )

    def accuse(self, islands: Iterable[str]) -> Entries:
        """Note whom something speaks against as a return is made."""
        return _entry(replace(self._state, accused=tuple(sorted(islands))))

    def given_up(self) -> Entries:
        """Decide that a return is not made."""
        return _entry(replace(self._state, pending=None))


def newest_first(complete: Sequence[int], candidates: Candidates) -> list[int]:
    """Order checkpoints for a resume: the newest that is not bad, and bad ones last."""
    bad = [n for n in sorted(complete) if candidates.verdict(n) is CheckpointVerdict.BAD]
    return [*sorted(set(complete) - {*bad}, reverse=True), *reversed(bad)]


def _entry(state: _State) -> Entries:
    return ((_KEY, json.dumps(asdict(state))),)
