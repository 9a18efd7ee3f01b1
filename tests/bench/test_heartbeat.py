"""`diloco bench heartbeat` at a small size, on a real emulated link."""

from __future__ import annotations

import pytest

from diloco.bench.network.heartbeat import Row, Setting, run_heartbeat
from tests.simulations.emulated_site import needs_namespaces


@needs_namespaces
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_heartbeats_are_timed_on_a_full_link() -> None:
    setting = Setting(
        seconds=8.0, settle_s=3.0, idle_s=2.0, rows=(Row("cubic", 0.0), Row("bbr", 9.5e6))
    )
    seen: list[tuple[str, int, int]] = []

    report = run_heartbeat(setting, lambda *progress: seen.append(progress))

    assert seen == [("cubic unpaced", 0, 2), ("bbr paced", 1, 2)]
    for row in report.rows:
        assert row["idle_ms"] >= 60 and row["p50_ms"] <= row["p99_ms"] <= row["longest_ms"]
        # Most of the link, both ways, however busy the machine is.
        assert row["up_mbps"] > 4 and row["down_mbps"] > 4
        assert row["silence_s"] < 5
    assert [r.what for r in report.requirements] == [
        "bbr paced: heartbeat p99",
        "bbr paced: longest silence",
    ]
    # The paced row meets its bar, unless the machine is late on the idle link already.
    idle_rtts = report.rows[1]["idle_p99_ms"] / 1e3 / setting.rtt_s
    assert not report.missed or idle_rtts > 2, [r.as_text() for r in report.requirements]
