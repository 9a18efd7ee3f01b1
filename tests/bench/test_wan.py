"""The bench of the WAN: its links, its ends, what it judges, and one small link for real."""

from __future__ import annotations

import contextlib
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from diloco.bench.network import wan as bench
from diloco.bench.network import wan_link
from diloco.bench.network.heartbeat import HeartbeatSetting
from diloco.bench.network.wan import SETTING, LinkSpec, WanRow, WanSetting, row_names
from diloco.bench.network.wan_link import IPERF3, PLAIN, measure_link, receiving, sent
from diloco.errors import ConfigError
from diloco.launch.process.emulated import Emulated
from diloco.simulations.emulate.config import load_wan
from tests.simulations.emulated_site import needs_namespaces

SMALL = LinkSpec("50Mbit/s", 4, loss=0.0, congestion_control="reno", islands=2)


def run(setting: WanSetting, *patterns: str) -> Any:
    return bench.run(lambda *_: None, patterns, setting=setting)


def test_the_rows_are_those_of_the_table() -> None:
    bars = {row.name: row.at_least for row in SETTING.rows if row.at_least}

    assert bars == {
        "100M-60ms": 0.93,
        "1G-100ms-warm": 0.90,
        "1G-100ms-bursts": 0.85,
        "100M-100ms-0.1%-bbr": 0.90,
        "100M-100ms-0.1%-cubic": 0.60,
        "100M-100ms-1%-bbr": 0.80,
        "star-4x100M-60ms": 0.90,
    }
    assert (SETTING.shaper_off, SETTING.tls_cost) == (0.01, 1.7)
    assert {row.kind for row in SETTING.rows if not row.at_least} == {"hivemind"}


@pytest.mark.parametrize("row", SETTING.rows, ids=lambda row: row.name)
def test_every_link_is_a_network_that_can_be_emulated(row: WanRow, tmp_path: Path) -> None:
    path = tmp_path / "link.toml"
    path.write_text(row.spec.toml)

    wan = load_wan(path)

    link = wan.profiles["measured"]
    assert len(wan.config.islands) == row.spec.islands
    assert link.up == link.down
    assert link.up.delay_s == pytest.approx(row.spec.rtt_ms / 2e3)
    assert link.up.loss == row.spec.loss
    assert wan.config.tcp.congestion_control == row.spec.congestion_control
    assert not wan.config.tcp.slow_start_after_idle


def test_a_pattern_without_a_row_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--rows 2G-\* matches no row; rows are 100M-60ms"):
        run(SETTING, "2G-*")
    assert row_names(SETTING)[-2:] == ["shaper", "mtls-cpu"]


CHECK = [{"link": "site-0", "way": "up", "figure": "rate", "is_met": True}]


def test_each_island_is_held_against_its_own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "limit_bps": {"site-0": [100e6, 80e6], "site-1": [40e6, 40e6]},
        "own_bps": {"site-0": [45e6, 45e6], "site-1": [38e6, 38e6]},
    }
    row = WanRow("pair", SMALL, at_least=0.9)
    monkeypatch.setattr(bench, "_emulate", lambda *_: ({"pair": found}, {"check": CHECK}))

    report = run(WanSetting((row,)), "pair")

    (shown,), (bar,) = report.rows, report.requirements
    assert (shown["own_mbps"], shown["limit_mbps"], shown["figure"]) == (45, 90, 0.5)
    assert shown["check"] == "1 ok" and shown["emulation"]["check"] == CHECK
    assert not bar.is_met and bar.what == f"pair: payload over {IPERF3}"


def test_a_link_that_is_not_as_told_judges_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    record = {"check": [{**CHECK[0], "is_met": False}]}
    monkeypatch.setattr(bench, "_emulate", lambda *_: ({}, record))

    report = run(WanSetting((WanRow("one", SMALL, at_least=0.9),)), "one")

    assert report.rows[0]["check"] == "MISSED: site-0 up rate"
    assert report.rows[0]["figure"] is None
    (bar,) = report.missed
    assert math.isnan(bar.figure)
    assert bar.what == f"one: payload over {IPERF3} (the link is not as specified)"


def test_without_iperf3_nothing_stands_in_for_the_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(wan_link, "receiving", lambda *_, **__: contextlib.nullcontext(""))
    monkeypatch.setattr(wan_link, "_bursts_bps", lambda *_: 45e6)
    emulated = Emulated({"coordinator": "127.0.0.1", "islands": {"site-0": {}}})
    row, bursts = (
        WanRow("one", SMALL, at_least=0.9),
        WanRow("two", SMALL, at_least=0.9, every_s=4.0),
    )
    common = {"islands": 1, "kind": "tcp", "repetitions": 1, "limit_s": 1.0}

    found = {
        each.name: measure_link({**each.order, **common}, emulated, tmp_path)
        for each in (row, bursts)
    }
    monkeypatch.setattr(bench, "_emulate", lambda *_: (found, {"check": CHECK}))
    report = run(WanSetting((row, bursts)), "one", "two")

    shown, timed = report.rows[:2]
    assert (shown["by"], shown["limit_mbps"], shown["figure"]) == (None, None, None)
    assert shown["own_mbps"] == 45 and "not installed" in shown["note"]
    assert (timed["by"], timed["figure"]) == (PLAIN, 1)
    (bar,) = report.missed
    assert bar.what == f"one: payload over {IPERF3} ({shown['note']})"
    assert "apt install iperf3" in bar.as_text()


def test_without_hivemind_its_rows_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_has_hivemind", lambda: False)

    report = run(WanSetting((WanRow("p2p", SMALL, kind="hivemind"),)), "p2p")

    assert "hivemind is not installed" in report.rows[0]["note"]
    assert report.requirements == []


def test_hivemind_has_a_table_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"limit_bps": {"site-0": [90e6]}, "own_bps": {"site-0": [45e6]}}
    rows = (WanRow("ours", SMALL), WanRow("p2p", SMALL, kind="hivemind", note="capped"))
    monkeypatch.setattr(
        bench, "_emulate", lambda *_: ({"ours": found, "p2p": found}, {"check": CHECK})
    )
    monkeypatch.setattr(bench, "_has_hivemind", lambda: True)
    setting = WanSetting(rows, shaper_bps=(1e9,), shaper_bytes=(64 << 10,), shaper_s=0.001)

    report = run(setting, "ours", "p2p", "shaper")

    assert {name: [row["row"] for row in rows] for name, rows in report.tables.items()} == {
        "links": ["ours"], "hivemind, for comparison": ["p2p"], "besides the links": ["shaper"],
    }  # fmt: skip
    assert report.rows[1]["note"] == "capped"


def test_the_fat_row_of_hivemind_names_its_cap() -> None:
    (row,) = (row for row in SETTING.rows if row.name == "hivemind-1G-100ms")

    assert "4 MB in flight" in row.note


@pytest.mark.parametrize("kind", ["grpc", "tcp"])
def test_ends_send_bursts_and_time_each(kind: str, tmp_path: Path) -> None:
    with receiving(kind, "127.0.0.1", tmp_path) as address:
        order = {"kind": kind, "address": address, "parts": 4, "part_bytes": 300_000}
        found = sent((), {**order, "bursts": 3, "every_s": 0.05})

    assert len(found["seconds"]) == 3
    assert all(seconds > 0 for seconds in found["seconds"])
    assert found["cpu_s"] > 0
    assert (found["receiver_cpu_s"] > 0) == (kind == "grpc")


def test_the_shaper_is_timed_at_every_rate_and_chunk() -> None:
    setting = WanSetting(
        (), shaper_bps=(1e9, 100e6), shaper_bytes=(64 << 10, 1 << 20), shaper_s=0.02
    )

    (row,) = run(setting, "shaper").rows

    assert sorted(row["measured"]) == [
        "1,024 KiB at 1,000 Mbit/s", "1,024 KiB at 100 Mbit/s",
        "64 KiB at 1,000 Mbit/s", "64 KiB at 100 Mbit/s",
    ]  # fmt: skip
    assert row["figure"] == max(row["measured"].values())
    assert "worst: " in row["note"]


@pytest.mark.slow
def test_mtls_and_plaintext_are_compared_by_cpu() -> None:
    (row,) = run(WanSetting((), repetitions=0, tls_bytes=32 << 20), "mtls-cpu").rows

    assert row["figure"] > 0
    assert {len(values) for values in row["measured"].values()} == {1}


@needs_namespaces
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_small_link_is_made_checked_and_filled() -> None:
    common = {"burst_bytes": 2 << 20, "bursts": 1, "at_least": 0.01}
    rows = (WanRow("warm", SMALL, **common), WanRow("bursts", SMALL, every_s=1.0, **common))  # type: ignore[arg-type]

    report = run(WanSetting(rows, repetitions=1, limit_s=1.0), "warm", "bursts")

    shown = {row["row"]: row for row in report.rows}
    for name in ("warm", "bursts"):
        row = shown[name]
        # A busy machine may make the check miss: then nothing is claimed.
        assert len(row["emulation"]["check"]) == 2 * 5
        if row["figure"] is not None:
            assert 0 < row["own_mbps"] < 50 and 0 < row["limit_mbps"] < 50
            assert set(row["measured"]["own_bps"]) == {"site-0", "site-1"}
    assert shown["bursts"]["by"] in (PLAIN, None)


@needs_namespaces
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_heartbeats_are_timed_on_a_full_link() -> None:
    beats = HeartbeatSetting(
        seconds=8.0, settle_s=3.0, idle_s=2.0,
        rows={"heartbeat-unpaced": ("cubic", 0.0), "heartbeat-paced": ("bbr", 9.5e6)},
    )  # fmt: skip

    report = run(WanSetting((), heartbeats=beats), "heartbeat*")

    assert [row["row"] for row in report.rows] == list(beats.rows)
    for row in report.rows:
        assert row["idle_ms"] >= 60 and row["p50_ms"] <= row["p99_ms"] <= row["longest_ms"]
        # Most of the link, both ways, however busy the machine is.
        assert row["up_mbps"] > 4 and row["down_mbps"] > 4
        assert row["silence_s"] < 5
    assert [r.what for r in report.requirements] == [
        "heartbeat-paced: heartbeat p99",
        "heartbeat-paced: longest silence",
    ]
    # The paced row meets its bar, unless the machine is late on the idle link already.
    idle_rtts = report.rows[1]["idle_p99_ms"] / 1e3 / (beats.rtt_ms / 1e3)
    assert not report.missed or idle_rtts > 2, [r.as_text() for r in report.requirements]
