"""A restart budget: what is left, and how long each restart waits."""

import pytest

from diloco.launch.process.restarts import MAX_OUTAGE_S, OutageBudget, RestartBudget


@pytest.mark.parametrize(
    ("first_wait_s", "waits"),
    [
        (1.0, [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, None]),
        (25.0, [25.0, 50.0, 60.0, 60.0, 60.0, 60.0, 60.0, 60.0, None]),
        (90.0, [60.0] * 8 + [None]),
    ],
)
def test_waits_double_up_to_a_minute_until_nothing_is_left(
    first_wait_s: float, waits: list[float | None]
) -> None:
    budget = RestartBudget(8, first_wait_s, reset_s=600.0)

    assert [budget.failed(1.0) for _ in waits] == waits
    assert budget.left == 0


def test_a_long_life_gives_every_restart_back() -> None:
    budget = RestartBudget(2, 1.0, reset_s=600.0)

    assert [budget.failed(s) for s in (1.0, 599.9, 600.0, 1.0, 1.0)] == [1.0, 2.0, 1.0, 2.0, None]


def test_who_reaches_nobody_is_started_again_for_hours_not_so_many_times() -> None:
    outage, waits = OutageBudget(1.0, reset_s=600.0), list[float]()
    while (wait_s := outage.failed(0.0, 10.0)) is not None:
        waits.append(wait_s)

    assert waits[:8] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert sum(waits) + 10.0 * (len(waits) + 1) == pytest.approx(MAX_OUTAGE_S, abs=70.0)
    assert len(waits) > 3600, "no wait is too large to be counted"
    assert outage.failed(600.0, 10.0) == 1.0, "a start that lived begins again"


def test_no_restart_at_all() -> None:
    assert RestartBudget(0, 1.0, reset_s=1.0).failed(1000.0) is None
