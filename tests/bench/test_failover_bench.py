"""`diloco bench failover`, with one machine lost, and `diloco bench state`."""

from __future__ import annotations

import pytest

from diloco.bench.network.failover import FailoverSetting, run
from diloco.bench.syncer.state import StateSetting
from diloco.bench.syncer.state import run as measure_state


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_lost_machine_costs_no_version() -> None:
    report = run(lambda what, done, total: None, setting=FailoverSetting(num_takeovers=1))

    lost, differing, *_ = report.requirements
    assert lost.figure == differing.figure == 0
    lost_machine, median = report.rows
    assert lost_machine["versions"] >= 4 and lost_machine["published_s"] > 0
    assert median["pause_s"] > 0


def test_a_version_in_the_store_takes_its_bytes_and_two_round_trips() -> None:
    setting = StateSetting(sizes=(8 << 10, 256 << 10), num_versions=5)

    report = measure_state(lambda what, done, total: None, setting=setting)

    assert [row["row"] for row in report.rows] == ["8 KiB", "256 KiB"]
    assert all(row["p50_ms"] >= 2 * setting.delay_ms for row in report.rows)
