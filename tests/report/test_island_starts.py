"""Lives of an island with several starts, from hand-made events: what stands, and its sums."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from diloco.config.island import IslandConfig
from diloco.errors import ConfigError
from diloco.report.island_starts import effective, island_summary, resumed_after
from diloco.report.summary_text import IslandSummary
from diloco.telemetry.events import (
    BytesMoved,
    Evaluated,
    Event,
    FragmentMerged,
    InnerStepDone,
    IslandEnded,
    IslandRejoined,
    IslandResumed,
)

STEP_S = 0.5


def steps(*numbers: int) -> list[Event]:
    return [InnerStepDone(n, 2.0, 0.5, 1e-3, 100, STEP_S) for n in numbers]


def merged(inner_step: int, blocked_s: float) -> Event:
    return FragmentMerged(inner_step, 0, 1, "INCLUDED", 2, blocked_s, "00", ("east",), False)


def ended(inner_step: int, **changes: Any) -> Event:
    sums = {"tokens": 1, "wall_s": 8.0, "inner_s": 2.0, "blocked_s": 1.0, "bytes_up": 70}
    sums |= {"bytes_down": 700, "undisturbed_step_s": 0.4, "overwritten_steps": 1.5}
    sums |= {"utilisation": 0.1, "goodput": 0.1, "digests": ("ab",), **changes}
    return IslandEnded(inner_step=inner_step, **sums)


def start(
    incarnation: int, events: Iterable[Event], *, rank: int = 0, at_s: float = 0.0
) -> list[dict[str, Any]]:
    """Give the events of one rank of one start, a second apart from `at_s` on."""
    context = {"island": "east", "island_rank": rank, "incarnation": incarnation}
    return [{"unix_s": at_s + n, **context, **e.as_dict()} for n, e in enumerate(events)]


def made(events: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Say which start made each inner step that stands."""
    return [
        (event["incarnation"], event["inner_step"])
        for event in effective(events)
        if event["kind"] == "inner_step"
    ]


def summed(events: list[dict[str, Any]], ranks: int = 1) -> IslandSummary:
    config = IslandConfig(ranks=ranks, tokens_per_inner_step=1)
    return island_summary("east", config, effective(events))


RETURNED = [
    *start(1, [*steps(1, 2, 3, 4, 5), BytesMoved(5, 9, 90)]),
    *start(2, [IslandRejoined(3, 2), *steps(4, 5, 6), ended(6)]),
]
RESUMED = [
    *start(1, [*steps(1, 2, 3, 4), BytesMoved(4, 9, 90), *steps(5, 6)]),
    *start(2, [IslandResumed(4, 1), *steps(5, 6), ended(6)]),
]


@pytest.mark.parametrize(
    ("events", "standing"),
    [
        (start(1, steps(1, 2)), [(1, 1), (1, 2)]),
        (RETURNED, [(1, 1), (1, 2), (1, 3), (2, 4), (2, 5), (2, 6)]),
        (RESUMED, [(1, 1), (1, 2), (1, 3), (1, 4), (2, 5), (2, 6)]),
        # Resumed from an older checkpoint than the one that it had returned after.
        (
            [*RETURNED, *start(3, [IslandResumed(2, 1), *steps(3, 4)])],
            [(1, 1), (1, 2), (3, 3), (3, 4)],
        ),
        # Lost before anything was published: the next start founds again.
        ([*start(1, steps(1, 2)), *start(2, steps(1, 2, 3))], [(2, 1), (2, 2), (2, 3)]),
        # A start that never got to work gives up nothing.
        ([*start(1, steps(1, 2)), *start(2, [BytesMoved(0, 0, 0)])], [(1, 1), (1, 2)]),
    ],
    ids=[
        "one_start",
        "returned",
        "resumed",
        "resumed_before_the_return",
        "founded_again",
        "stillborn",
    ],
)
def test_what_later_starts_made_again_is_left_out(
    events: list[dict[str, Any]], standing: list[tuple[int, int]]
) -> None:
    assert made(events) == standing


def test_every_kind_of_event_beyond_a_later_beginning_is_left_out() -> None:
    vain = [merged(5, 1.0), Evaluated(5, "published", 2.0), ended(5)]
    events = [*start(1, [*steps(1), merged(2, 1.0), *vain]), *RESUMED[-4:]]

    kinds = [(event["kind"], event.get("inner_step")) for event in effective(events)]

    assert kinds == [
        ("inner_step", 1),
        ("fragment_merged", 2),
        ("island_resumed", 4),
        ("inner_step", 5),
        ("inner_step", 6),
        ("island_ended", 6),
    ]


def test_sums_of_a_start_that_was_killed_are_those_of_its_events() -> None:
    first = [*steps(1, 2), merged(2, 0.25), *steps(3), BytesMoved(3, 9, 90), *steps(4, 5)]
    events = [
        *start(1, first, at_s=100.0),
        *start(1, [merged(2, 5.0)], rank=1, at_s=100.0),
        *start(
            2, [IslandRejoined(3, 2), *steps(4, 5, 6), Evaluated(6, "published", 1.5), ended(6)]
        ),
        *start(2, [ended(6, bytes_up=30, bytes_down=300)], rank=1),
    ]

    life = summed(events, 2)

    assert (life.inner_steps, life.num_steps, life.tokens) == (6, 6, 600)
    # Its steps 1 to 3 were written 3 seconds apart; the step before the first line counts too.
    assert life.wall_s == 8.0 + 3.0 + STEP_S
    assert life.goodput * life.wall_s == 2.0 + 3 * STEP_S
    assert life.blocked_s == 1.0 + 0.25, "the leader's waits, none of rank 1"
    assert (life.bytes_up, life.bytes_down) == (100 + 9, 1000 + 90)
    assert (life.num_starts, life.num_returns, life.lost_steps) == (2, 1, 2)
    assert (resumed_after(events), life.digests) == (set(), ("ab",))
    assert (life.local_nats_per_byte, life.published_nats_per_byte) == (None, 1.5)


def test_a_resumed_run_says_after_which_inner_step() -> None:
    life = summed(RESUMED)

    assert resumed_after(effective(RESUMED)) == {4}
    assert (life.inner_steps, life.tokens, life.num_returns) == (6, 600, 0)


def test_a_start_with_nothing_left_to_train_counts() -> None:
    events = [*start(1, steps(1, 2)), *start(2, [IslandRejoined(2, 0), ended(2)])]

    life = summed(events)

    assert (life.num_starts, life.num_steps, life.inner_steps) == (2, 2, 2)


def test_two_runs_in_one_directory_are_refused() -> None:
    other = [*start(1, steps(1, 2)), *start(1, [*steps(1, 2), ended(2)])]

    with pytest.raises(ConfigError, match=r"events of island east .* 4 times of which 2 differ"):
        summed(other)


def test_a_start_after_the_end_made_no_step_and_has_no_step_time_of_its_own() -> None:
    events = [
        *start(1, steps(1, 2, 3)),
        *start(2, [IslandRejoined(3, 0), ended(3, undisturbed_step_s=0.0)]),
    ]

    life = summed(events)

    assert (life.num_starts, life.num_steps, life.inner_steps) == (2, 3, 3)
    assert life.undisturbed_step_s == STEP_S
