"""The bench of a syncer: a real one on one CPU, its rows, and what is judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diloco.bench.syncer.syncer import SETTING, Setting, run_syncer
from diloco.bench.syncer.syncer_process import serving
from diloco.errors import CoordinatorUnavailable
from diloco.state_dir import StateDir


@pytest.mark.timeout(300)
def test_rows_say_what_a_syncer_spends_and_holds() -> None:
    heard: list[tuple[int, int]] = []
    setting = Setting(
        numel=70_000,
        num_islands=(2,),
        small_spool_memory="1KiB",
        num_sending=1,
        num_rounds=2,
        flatness=1.0,
        memory=1e9,
    )

    report = run_syncer(setting, lambda done, of: heard.append((done, of)))

    in_memory, encrypted, on_disk = report.rows
    assert (in_memory["spool_memory"], on_disk["spool_memory"]) == ("1GiB", "1KiB")
    assert [row["security"] for row in report.rows] == ["plain", "mTLS", "plain"]
    # Of the small spool's row nobody but the syncer bounds what is on its way.
    assert [row["at_once"] for row in report.rows] == [1, 1, 2]
    for row in report.rows:
        assert row["num_islands"] == 2
        assert row["tensors"] + row["loop"] + row["wire"] + row["tls"] == pytest.approx(1)
        assert (row["tls"] > 0) <= (row is encrypted)
        assert 0 < row["nanoseconds"] == pytest.approx(1e3 / row["millions_per_s"])
        assert row["others_ms"] > 0
        assert row["peak_mib"] > row["baseline_mib"] > 0
        state_mib = 12 * setting.numel / 2**20
        parts = ("baseline", "held", "in_flight", "extra")
        accounted = sum(row[f"{part}_mib"] for part in parts)
        assert accounted + state_mib == pytest.approx(row["peak_mib"])
    assert in_memory["held_mib"] == 2 * in_memory["in_flight_mib"]
    assert on_disk["held_mib"] == 1 / 1024
    assert on_disk["in_flight_mib"] == in_memory["held_mib"], "of both at once"
    assert heard == [(done, 9) for done in range(1, 10)]
    flatness, memory, over_tls = report.requirements
    assert flatness.is_met
    assert flatness.figure == 1
    assert memory.figure == max(row["extra_of_state"] for row in (in_memory, on_disk))
    assert over_tls.figure == encrypted["extra_of_state"]
    assert not any(requirement.is_stretch for requirement in report.requirements)
    assert json.dumps(report.as_dict())


def test_a_syncer_that_does_not_start_is_quoted(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    state.create()

    with (
        pytest.raises(CoordinatorUnavailable, match=r"(?s)exit code [0-9]+.*resolved\.toml"),
        serving(state),
    ):
        pass


def test_the_setting_is_what_was_asked_for() -> None:
    assert (min(SETTING.num_islands), max(SETTING.num_islands)) == (4, 64)
    assert (SETTING.flatness, SETTING.memory) == (1.2, 1.25)
    assert [row.num_islands for row in SETTING.rows] == [4, 8, 16, 32, 64, 64, 64]
    assert [row.has_tls for row in SETTING.rows] == [False] * 5 + [True, False]
    assert SETTING.rows[-1].num_sending == 0
