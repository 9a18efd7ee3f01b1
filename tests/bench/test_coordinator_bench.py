"""The bench of a coordinator of many islands, with few of them and no bars that time can miss."""

import math

import pytest

from diloco.bench.syncer.coordinator import CoordinatorSetting, run
from diloco.errors import ConfigError

ROWS = ["idle", "reports", "metrics", "cut", "plan"]
TINY = CoordinatorSetting(
    num_islands=5, seconds=0.5, report_s=0.05, step_s=0.2, num_tensors=50,
    stalls_ms=dict.fromkeys(ROWS, math.inf),
)  # fmt: skip


def test_every_row_is_measured_and_judged_by_its_longest_stall() -> None:
    report = run(lambda *done: None, setting=TINY)

    assert [row["row"] for row in report.rows] == ROWS
    assert [row["calls"] > 0 for row in report.rows] == [False, *[True] * 4]
    assert all(row["stall_ms"] >= 0 for row in report.rows)
    stalls = [required.figure for required in report.requirements]
    assert stalls == [row["stall_ms"] for row in report.rows]
    assert not report.missed


def test_rows_are_chosen_by_pattern() -> None:
    assert [row["row"] for row in run(lambda *done: None, ["re*"], setting=TINY).rows] == [
        "reports"
    ]
    with pytest.raises(ConfigError, match="none"):
        run(lambda *done: None, ["none"], setting=TINY)
