import random
from itertools import pairwise

import pytest

from diloco.errors import ConfigError
from diloco.outer.schedule import Schedule, grown_steps, num_rounds


def make(**changes: object) -> Schedule:
    options: dict = {
        "inner_steps_per_round": 24,
        "num_fragments": 4,
        "overlap_steps": 2,
        "inner_steps": 50,
        "flush": False,
    }
    return Schedule.make(**(options | changes))


def due_and_merge(schedule: Schedule) -> dict[int, list[tuple[int, int]]]:
    """Due and merge steps by fragment, over more inner steps than the run has."""
    table: dict[int, list[tuple[int, int]]] = {p: [] for p in range(schedule.num_fragments)}
    for step in range(schedule.inner_steps + 2 * schedule.inner_steps_per_round):
        for fragment_id in schedule.due(step):
            table[fragment_id].append((step, schedule.merge_step(step)))
    return table


# H = 24, tau = 2, 50 inner steps, no flush. A send at 49 or 50 would merge at 51 or 52: not made.
GOLDEN = {
    1: {0: [(24, 26), (48, 50)]},
    3: {
        0: [(8, 10), (32, 34)],
        1: [(16, 18), (40, 42)],
        2: [(24, 26), (48, 50)],
    },
    4: {
        0: [(6, 8), (30, 32)],
        1: [(12, 14), (36, 38)],
        2: [(18, 20), (42, 44)],
        3: [(24, 26), (48, 50)],
    },
    24: {
        0: [(1, 3), (25, 27)],
        1: [(2, 4), (26, 28)],
        2: [(3, 5), (27, 29)],
        3: [(4, 6), (28, 30)],
        4: [(5, 7), (29, 31)],
        5: [(6, 8), (30, 32)],
        6: [(7, 9), (31, 33)],
        7: [(8, 10), (32, 34)],
        8: [(9, 11), (33, 35)],
        9: [(10, 12), (34, 36)],
        10: [(11, 13), (35, 37)],
        11: [(12, 14), (36, 38)],
        12: [(13, 15), (37, 39)],
        13: [(14, 16), (38, 40)],
        14: [(15, 17), (39, 41)],
        15: [(16, 18), (40, 42)],
        16: [(17, 19), (41, 43)],
        17: [(18, 20), (42, 44)],
        18: [(19, 21), (43, 45)],
        19: [(20, 22), (44, 46)],
        20: [(21, 23), (45, 47)],
        21: [(22, 24), (46, 48)],
        22: [(23, 25), (47, 49)],
        23: [(24, 26), (48, 50)],
    },
}


@pytest.mark.parametrize("num_fragments", GOLDEN)
def test_due_and_merge_steps_are_the_golden_ones(num_fragments: int) -> None:
    assert due_and_merge(make(num_fragments=num_fragments)) == GOLDEN[num_fragments]


@pytest.mark.parametrize("num_fragments", GOLDEN)
def test_the_flush_carries_what_would_merge_at_the_last_inner_step(num_fragments: int) -> None:
    golden = {
        fragment_id: [(due, merge) for due, merge in rows if merge != 50]
        for fragment_id, rows in GOLDEN[num_fragments].items()
    }

    assert due_and_merge(make(num_fragments=num_fragments, flush=True)) == golden


def test_phases_are_rounded_down() -> None:
    schedule = make(inner_steps_per_round=12, num_fragments=5)

    assert schedule.phases == (2, 4, 7, 9, 12)


def test_explicit_phases_may_come_in_any_order_and_coincide() -> None:
    schedule = make(
        inner_steps_per_round=4, num_fragments=3, overlap_steps=1, inner_steps=8, phases=[3, 1, 3]
    )

    assert [schedule.due(step) for step in range(9)] == [
        (),
        (1,),
        (),
        (0, 2),
        (),
        (1,),
        (),
        (0, 2),
        (),
    ]


def test_more_fragments_than_inner_steps_share_due_steps() -> None:
    # Phases 0, 1, 1, 2: the first is due at multiples of H, not at inner step 0.
    schedule = make(inner_steps_per_round=2, num_fragments=4, overlap_steps=0, inner_steps=4)

    assert schedule.phases == (0, 1, 1, 2)
    assert [schedule.due(step) for step in range(5)] == [(), (1, 2), (0, 3), (1, 2), (0, 3)]


def test_rounds_grow_by_one_inner_step_each_up_to_h() -> None:
    schedule = make(
        inner_steps_per_round=4, num_fragments=1, overlap_steps=1, inner_steps=20, first_round=2
    )

    assert [step for step in range(30) if schedule.due(step)] == [2, 5, 9, 13, 17]
    assert [num_rounds(steps, 4, 2) for steps in (1, 2, 3, 5, 6, 17, 18)] == [1, 1, 2, 2, 3, 5, 6]
    assert (grown_steps(4, 2), grown_steps(4, 0), grown_steps(30, 2)) == (5, 0, 434)


@pytest.mark.parametrize("number", range(200))
def test_due_steps_are_those_of_the_formula_whatever_the_schedule(number: int) -> None:
    rng = random.Random(number)
    full, num_fragments, num_steps = rng.randint(1, 40), rng.randint(1, 8), rng.randint(1, 300)
    first, flush = rng.randint(1, full), rng.random() < 0.5
    schedule = make(
        inner_steps_per_round=full,
        num_fragments=num_fragments,
        inner_steps=num_steps,
        overlap_steps=(tau := rng.randint(0, first - 1)),
        flush=flush,
        phases=[rng.randint(0, full) for _ in range(num_fragments)] if number % 3 == 0 else (),
        first_round=first,
    )
    begin, expected = 0, [list[int]() for _ in range(num_fragments)]
    for length in [*range(first, full), *[full] * (num_steps // full + 2)]:
        for fragment_id, phase in enumerate(schedule.phases):
            step = begin + length * phase // full
            if 1 <= step <= num_steps - flush - tau:
                expected[fragment_id].append(step)
        begin += length

    for fragment_id, steps in enumerate(expected):
        due = [s for s in range(num_steps + 2 * full) if fragment_id in schedule.due(s)]
        assert due == steps and len(set(steps)) == len(steps)
        assert schedule.last_due(fragment_id) == (steps[-1] if steps else None)
        assert all(after - before > tau for before, after in pairwise(steps))
        for after in range(0, num_steps, 7):
            later = [step for step in steps if step > after]
            assert schedule.next_due(fragment_id, after) == (later[0] if later else None)
            assert schedule.num_sends(fragment_id, after) == len(later)


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("phases", [(), (0, 24, 1, 7)])
def test_the_next_due_step_is_the_first_that_is_due(phases: tuple[int, ...], flush: bool) -> None:
    schedule = make(phases=phases, flush=flush)

    for fragment_id in range(schedule.num_fragments):
        steps = [step for step in range(60) if fragment_id in schedule.due(step)]
        for after in range(55):
            later = [step for step in steps if step > after]
            assert schedule.next_due(fragment_id, after) == next(iter(later), None)
            assert schedule.num_sends(fragment_id, after) == len(later)


@pytest.mark.parametrize(
    ("flush", "overlap_steps", "last"),
    [
        pytest.param(False, 0, 8, id="textbook: the last step is sent and merged"),
        pytest.param(True, 0, 4, id="flush instead of the last step"),
        pytest.param(False, 1, 4, id="no merge beyond the end"),
    ],
)
def test_the_last_send(flush: bool, overlap_steps: int, last: int) -> None:
    schedule = make(
        inner_steps_per_round=4,
        num_fragments=1,
        overlap_steps=overlap_steps,
        inner_steps=8,
        flush=flush,
    )

    assert max(step for step in range(20) if schedule.due(step)) == last


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"inner_steps_per_round": 0}, r"outer\.inner_steps_per_round = 0", id="H"),
        pytest.param({"num_fragments": 0}, r"outer\.num_fragments = 0", id="P"),
        pytest.param({"inner_steps": 0}, r"run\.inner_steps = 0", id="inner_steps"),
        pytest.param({"overlap_steps": 24}, r"outer\.overlap_steps = 24 .*\[0, 24\)", id="tau"),
        pytest.param({"overlap_steps": -1}, r"outer\.overlap_steps = -1", id="tau below"),
        pytest.param({"first_round": 25}, r"first_.* = 25 is outside \[1, 24\]", id="F"),
        pytest.param(
            {"first_round": 2}, r"overlap_steps = 2 is outside \[0, 2\)", id="tau beyond F"
        ),
        pytest.param({"phases": [1, 2]}, "2 values for 4 fragments", id="too few phases"),
        pytest.param({"phases": [1, 2, 3, 25]}, r"\[25\], outside \[0, 24\]", id="late phase"),
        pytest.param({"phases": [-1, 2, 3, 4]}, r"\[-1\], outside", id="negative phase"),
    ],
)
def test_impossible_schedules_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**changes)
