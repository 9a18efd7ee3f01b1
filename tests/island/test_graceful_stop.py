"""Where an island stops: promises that hold, whichever island is faster."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.io_thread import IoThread
from diloco.island.graceful_stop import GracefulStop
from diloco.outer.schedule import Schedule


def make(**changes: object) -> GracefulStop:
    """Due after 2, 4, 6, ..., 18; with tau = 1 and a flush nothing is sent after 19 or 20."""
    options: dict = {
        "inner_steps_per_round": 4,
        "num_fragments": 2,
        "overlap_steps": 1,
        "inner_steps": 20,
        "flush": True,
    }
    return GracefulStop(Schedule.make(**(options | changes)))


@pytest.mark.parametrize(
    ("began", "passed", "first_stop_step", "promised"),
    [
        pytest.param(0, (), 0, 2, id="the first due step"),
        pytest.param(0, (2, 4), 0, 6, id="the one after the last passed"),
        pytest.param(9, (), 0, 10, id="after a resume, not of the whole run"),
        pytest.param(0, (16, 18), 0, 20, id="the end when no send is left"),
        pytest.param(6, (), 9, 10, id="not before the first checkpoint of an island that returned"),
        pytest.param(6, (8,), 8, 10, id="which has been passed"),
        pytest.param(6, (), 8, 8, id="or is a due step"),
        pytest.param(18, (), 21, 20, id="or lies behind the end"),
    ],
)
def test_the_promise_is_the_next_due_step(
    began: int, passed: tuple[int, ...], first_stop_step: int, promised: int
) -> None:
    line = make()
    line.begin(began, first_stop_step)
    for step in passed:
        assert not line.passing(step)

    assert line.promise() == promised
    assert line.promise() == promised


def test_nothing_is_promised_before_training_begins() -> None:
    line = make()

    assert line.promise() is None
    line.begin(0)
    assert line.promise() == 2


def test_training_holds_where_it_was_promised_and_not_before() -> None:
    line = make()
    line.begin(0, 7)
    assert line.promise() == 8

    assert [line.passing(step) for step in (2, 4, 6, 8)] == [False, False, False, True]
    assert line.stop_step is None
    assert line.promise() == 8, "the promise stays"


def test_after_the_decision_nobody_holds() -> None:
    line = make()
    line.begin(0)
    line.promise()
    hear(line, 6)

    assert line.stop_step == 6
    assert [line.passing(step) for step in (2, 4, 6)] == [False] * 3


def test_who_has_its_checkpoint_waits_for_the_others_or_goes_on_to_a_later_step() -> None:
    line = make()
    line.begin(0)
    line.promise()
    said = []
    for stop_step, is_complete in [(6, False), (None, False), (8, False), (8, True)]:
        line.set_answer(stop_step, is_asked=True, is_complete=is_complete)
        said.append([line.after_checkpoint(step) for step in (6, 8)])

    assert said == [[None, None], [None, None], [8, None], [8, 8]]
    assert line.num_words == 4


def test_a_stop_that_is_taken_back_binds_nobody_and_the_next_one_begins_again() -> None:
    line = make()
    line.begin(0)
    assert line.promise() == 2
    assert line.passing(2)
    assert line.after_holding() is None
    line.set_answer(None, is_asked=False, is_complete=False)

    assert line.after_holding() == 0, "who holds goes on"
    assert not line.passing(4)
    assert line.promise() == 6
    hear(line, 8)
    assert (line.after_holding(), line.after_checkpoint(8)) == (8, None)
    line.set_answer(None, is_asked=False, is_complete=False)

    assert line.stop_step is None
    assert line.after_checkpoint(8) == 0, "who has its checkpoint goes on"


def test_who_waits_hears_a_word_from_the_io_thread() -> None:
    io, line = IoThread(), make()
    io.start()
    line.begin(0)
    assert io.run(asyncio.sleep(0, line.promise())) == 2
    assert line.passing(2)
    io.post(lambda: asyncio.get_running_loop().call_later(0.01, lambda: hear(line, 4)))

    io.run(line.wait_for_word(60.0))
    assert line.stop_step == 4
    io.stop()


def hear(line: GracefulStop, stop_step: int) -> None:
    line.set_answer(stop_step, is_asked=True, is_complete=False)


@settings(max_examples=40, deadline=None)
@given(delays=st.lists(st.integers(0, 300), min_size=1, max_size=4))
def test_no_island_passes_its_promise_who_is_faster(delays: list[int]) -> None:
    """One training thread and one IO thread an island; all stop after one and the same step."""
    lines = [make(inner_steps=1000, inner_steps_per_round=2) for _ in delays]
    stopped = [0] * len(lines)

    def train(island: int) -> None:
        line, step = lines[island], 0
        while step != line.stop_step:
            step += 1
            if step == 1000:
                break
            if line.passing(step):
                assert step == line.promise()
                while line.stop_step is None:
                    pass
        stopped[island] = step

    def ask(island: int) -> None:
        for _ in range(delays[island]):
            pass
        promises[island] = lines[island].promise() or 0
        everybody.wait()
        hear(lines[island], max(promises))

    promises = [0] * len(lines)
    everybody = threading.Barrier(len(lines))
    for line in lines:
        line.begin(0)
    threads = [
        threading.Thread(target=work, args=(island,))
        for island in range(len(lines))
        for work in (train, ask)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert stopped == [max(promises)] * len(lines)
