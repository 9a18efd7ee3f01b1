"""Where an island goes on when it returns, from what is published alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from diloco.errors import IslandFailed
from diloco.outer.schedule import Schedule
from diloco.protocol.island.resume_point import (
    Entered,
    ResumePoint,
    entered_of,
    entry_words,
    resume_point_of,
)
from diloco.protocol.island.votes import NOT_FOLLOWED, FragmentView


def schedule(**changes: Any) -> Schedule:
    options = {
        "inner_steps_per_round": 4,
        "num_fragments": 2,
        "overlap_steps": 1,
        "inner_steps": 13,
        "flush": True,
    }
    return Schedule.make(**(options | changes))


FLUSH = Entered(4, sent_at_inner_step=13, is_flush=True)

# The first fragment is due after 2, 6, 10, the second after 4, 8 (12 + tau is the end: a flush).
# schedule, fragments as found -> goes on at, does not send again up to, first checkpoint
TABLE: dict[str, tuple[Schedule, list[Entered], tuple[int, tuple[int, ...], int]]] = {
    "a new run": (schedule(), [Entered(0), Entered(0)], (0, (0, 0), 0)),
    "between two sends": (schedule(), [Entered(2, 0, 6), Entered(1, 0, 4)], (6, (6, 4), 7)),
    "one version only": (schedule(), [Entered(1, 0, 2), Entered(0)], (2, (2, 0), 3)),
    "a later send was published, the earlier one was not": (
        schedule(), [Entered(1, 0, 2), Entered(2, 0, 8)], (5, (2, 8), 9),
    ),
    "no send is left": (schedule(), [Entered(3, 0, 10), Entered(2, 0, 8)], (10, (10, 8), 11)),
    "one is flushed": (schedule(), [FLUSH, Entered(2, 0, 8)], (8, (13, 8), 14)),
    "all is flushed": (schedule(), [FLUSH, FLUSH], (13, (13, 13), 14)),
    "tau = 0": (
        schedule(num_fragments=1, overlap_steps=0), [Entered(1, 0, 4)], (4, (4,), 4),
    ),
    "three in flight": (
        schedule(num_fragments=4, overlap_steps=3),
        [Entered(1, 0, 1), Entered(1, 0, 2), Entered(1, 0, 3), Entered(0)],
        (3, (1, 2, 3, 0), 6),
    ),
    "due together": (schedule(phases=(3, 3)), [Entered(1, 0, 3), Entered(0)], (2, (3, 0), 4)),
    "phase 0": (schedule(phases=(0, 2)), [Entered(1, 0, 4), Entered(0)], (1, (4, 0), 5)),
    "expired once": (schedule(), [Entered(1, 1, 2), Entered(1, 1, 4)], (8, (6, 8), 9)),
    "expired before the first version": (schedule(), [Entered(0, 1), Entered(0)], (2, (2, 0), 3)),
    "expired as a flush": (schedule(), [Entered(3, 1, 10), Entered(2, 2, 8)], (10, (10, 8), 11)),
    "attempts skipped": (schedule(), [Entered(1, 65536, 2), Entered(0)], (2, (2, 0), 3)),
}  # fmt: skip


@pytest.mark.parametrize("case", TABLE)
def test_resume_point(case: str) -> None:
    made, entered, (inner_step, sent_until, first_checkpoint_step) = TABLE[case]

    assert resume_point_of(entered, made, 0) == ResumePoint(
        inner_step, sent_until, first_checkpoint_step
    )


def test_a_run_that_started_warm_is_not_rewound_before_its_start() -> None:
    warm = schedule(inner_steps=30)

    assert resume_point_of([Entered(0), Entered(0)], warm, 9) == ResumePoint(9, (9, 9), 9)
    assert resume_point_of([Entered(1, 0, 10), Entered(0)], warm, 9) == ResumePoint(10, (10, 9), 11)


def view(version: int, **changes: Any) -> FragmentView:
    return FragmentView(anchor_version=version, version=version, **changes)


def smallest(*ranks: list[FragmentView]) -> list[int]:
    return [min(words) for words in zip(*map(entry_words, ranks), strict=True)]


def test_ranks_agree_on_what_they_entered() -> None:
    first = [view(3, attempt=1, sent_at_inner_step=8), view(0)]
    second = [view(3, attempt=0, sent_at_inner_step=8, is_overwritten=True), view(0)]
    second[1] = replace(second[1], asks_trial=True)

    assert entered_of(smallest(first, second)) == [
        Entered(3, 1, 8, is_overwritten=True),
        Entered(0, asks_trial=True),
    ]
    flushed = [view(4, sent_at_inner_step=13, is_flush=True)]
    assert entered_of(smallest(flushed, flushed)) == [FLUSH]


def test_a_rank_that_does_not_follow_a_fragment_leaves_it_to_the_others() -> None:
    known = [view(3, attempt=1, sent_at_inner_step=8), view(0, merged_tokens=7)]

    assert smallest(known, [NOT_FOLLOWED, known[1]]) == entry_words(known)
    assert entered_of(smallest(known, [view(-1), NOT_FOLLOWED])) is None


def test_nobody_has_entered_while_one_rank_has_not() -> None:
    assert entered_of(smallest([view(3), view(1)], [view(3), view(-1)])) is None


def test_ranks_with_different_versions_are_refused() -> None:
    words = smallest([view(3), view(1)], [view(3), view(2)])

    with pytest.raises(IslandFailed, match="hold versions 1 to 2 of fragment 1"):
        entered_of(words)
