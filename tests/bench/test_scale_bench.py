"""The bench of the largest runs, with few islands and no bar that time can miss."""

import math

import pytest

from diloco.bench.scale.scale import ScaleRow, ScaleSetting, run
from diloco.report.rows import Report

TINY = ScaleSetting(
    runs={
        "scheduled": ScaleRow(3, 4, 2, 2, 2),
        "on-arrival": ScaleRow(4, 1, 2, 2, 2, step_s=0.02),
        "grpc": ScaleRow(2, 1, 1, 1, 1, is_real=True),
    },
    handler_ms=math.inf,
    num_processes=1,
)


def measured(name: str) -> Report:
    return run(lambda *done: None, [name], setting=TINY)


def test_every_contribution_of_a_scheduled_run_counts_once_and_no_call_is_refused() -> None:
    report = measured("scheduled")

    coordinator, syncer = report.rows
    assert (coordinator["party"], syncer["party"]) == ("coordinator", "syncer")
    assert (coordinator["refused"], syncer["refused"]) == (0, 0)
    assert syncer["rounds"] == 4
    assert syncer["counted"] == 1.0
    assert syncer["waiting"] >= 3 * 4
    assert syncer["calls"] > 3 * 2 * 2 * 2
    assert not report.missed


def test_on_arrival_rounds_are_published_by_measured_times() -> None:
    report = measured("on-arrival")

    assert [row["rounds"] for row in report.rows] == [4, 4]
    assert not report.missed


@pytest.mark.slow
def test_the_products_own_processes_serve_islands_over_grpc() -> None:
    report = measured("grpc")

    assert [row["party"] for row in report.rows] == ["coordinator, gRPC", "syncer, gRPC"]
    assert not report.missed
