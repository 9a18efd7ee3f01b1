"""The bench of the page, with few islands and no bars that time can miss."""

import math

import pytest

from diloco.bench.syncer.coordinator import CoordinatorSetting
from diloco.bench.syncer.page import PageSetting, run

TINY = PageSetting(
    coordinator=CoordinatorSetting(num_islands=5, seconds=1.5, report_s=0.05, step_s=0.2),
    num_times=1, num_viewers=7, stall_ms=math.inf, share=math.inf,
)  # fmt: skip


@pytest.mark.slow
def test_viewers_of_a_real_page_are_served_while_islands_report() -> None:
    report = run(lambda *done: None, setting=TINY)

    without, page = report.rows
    assert (without["events"], without["sent"]) == (0, 0)
    assert page["events"] >= TINY.num_viewers, "each has had a further event"
    assert page["calls"] > 0 and page["page_cpu"] > without["page_cpu"]
    share, stall = (required.figure for required in report.requirements)
    assert share == page["cpu"] - without["cpu"] and stall == page["stall_ms"]
    assert not report.missed
