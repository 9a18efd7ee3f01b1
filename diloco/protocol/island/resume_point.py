"""Where an island goes on when it starts, and the common word of its ranks on what they entered.

An island that returns follows from what is published alone. d_p, the inner step at which fragment
p's published version was sent, lies behind everybody; each attempt that expired after it took one
more due step of everybody. So the island goes on at

    min(max_p d_p, min_p(next due step of p after d_p) - 1)     over fragments that are not flushed

and sends fragment p again from the first due step after d_p. Integers only.

On arrival the steps of islands are independent: the island goes on where its last report stood.

Source: PROTOCOL.md, "Return of an island".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from diloco.errors import IslandFailed
from diloco.outer.schedule import Schedule
from diloco.protocol.island.ledger import MAX_EXPIRED
from diloco.protocol.island.votes import NOT_FOLLOWED, NOT_MINE, FragmentView

_WORDS = 8


@dataclass(frozen=True, slots=True)
class Entered:
    """A fragment as the island entered it; equal on all its ranks.

    `is_overwritten` says that own values differed from what is published on some rank.
    """

    version: int
    attempt: int = 0
    sent_at_inner_step: int = 0
    is_flush: bool = False
    is_overwritten: bool = False
    merged_tokens: int = 0
    asks_trial: bool = False


class RanksApart(IslandFailed):
    """The ranks of an island entered with different versions of a fragment.

    Attributes:
        fragment_id: The first of them.
        newest: Of the versions.
    """

    def __init__(self, fragment_id: int, least: int, newest: int) -> None:
        """Say what to do where that must not be."""
        super().__init__(
            f"the ranks of this island hold versions {least} to {newest} of fragment "
            f"{fragment_id} after they entered the run: start the island again"
        )
        self.fragment_id = fragment_id
        self.newest = newest


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where an island goes on, and the last due step of each fragment that lies behind it.

    Before `first_checkpoint_step` it holds versions that the others merge only later: a checkpoint
    at such an inner step would not be one of the run.
    """

    inner_step: int
    sent_until: tuple[int, ...]
    first_checkpoint_step: int


def resume_point_of(entered: Sequence[Entered], schedule: Schedule, start_step: int) -> ResumePoint:
    """Find where to go on in a run that began at `start_step`; there if nothing happened since."""
    sent_until = tuple(_sent_until(p, e, schedule, start_step) for p, e in enumerate(entered))
    pending = [p for p, e in enumerate(entered) if not e.is_flush]
    due_steps = [schedule.next_due(p, sent_until[p]) for p in pending]
    inner_step = min(
        max((sent_until[p] for p in pending), default=schedule.inner_steps),
        *(step - 1 for step in due_steps if step is not None),
        schedule.inner_steps,
    )
    merged = [
        schedule.merge_step(sent_until[p]) for p, e in enumerate(entered) if e.version or e.attempt
    ]
    if len(pending) < len(entered):  # the others have made their last step, and its checkpoint
        merged.append(schedule.inner_steps + 1)
    return ResumePoint(inner_step, sent_until, max([inner_step, *merged]))


def resume_point_after(inner_step: int, num_fragments: int) -> ResumePoint:
    """Go on after so many inner steps, in a run where the steps of islands are independent."""
    return ResumePoint(inner_step, (0,) * num_fragments, inner_step)


def _sent_until(fragment_id: int, entered: Entered, schedule: Schedule, start_step: int) -> int:
    step = max(start_step, entered.sent_at_inner_step)
    for _ in range(entered.attempt if entered.attempt <= MAX_EXPIRED else 0):
        # Where no send is left, flush attempts expired: they took no due step.
        step = schedule.next_due(fragment_id, step) or step
    return step


def entry_words(views: Iterable[FragmentView]) -> list[int]:
    """Return one rank's word on what it entered; of all ranks' words the smallest is taken."""
    words: list[int] = []
    for view in views:
        if view is NOT_FOLLOWED:
            words += [NOT_MINE] * _WORDS
            continue
        version = view.anchor_version
        is_newest = view.version == version  # else what is known of the newest is not of it
        attempt, is_flush = (view.attempt, view.is_flush) if is_newest else (0, False)
        words += [version, -version, -attempt, view.sent_at_inner_step]
        words += [int(is_flush), -int(view.is_overwritten), view.anchor_tokens]
        words.append(-int(view.asks_trial))
    return words


def entered_of(words: Sequence[int]) -> list[Entered] | None:
    """Read the smallest words of all ranks; None while some rank has not entered.

    Raises:
        RanksApart: On all ranks, if they hold different versions.
    """
    entered = []
    for p in range(len(words) // _WORDS):
        own = words[p * _WORDS : (p + 1) * _WORDS]
        least, minus_most, minus_attempt, sent_at, is_flush, minus_overwritten, tokens, trial = own
        if least < 0:
            return None
        if least != -minus_most:
            raise RanksApart(p, least, -minus_most)
        entered.append(
            Entered(
                least,
                -minus_attempt,
                sent_at,
                bool(is_flush),
                bool(minus_overwritten),
                merged_tokens=tokens,
                asks_trial=bool(trial),
            )
        )
    return entered
