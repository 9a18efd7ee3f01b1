"""The bench of a syncer: a real one on one CPU, its rows, and what is judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diloco.bench import syncer as bench
from diloco.bench.syncer import SETTING, Setting, run_syncer
from diloco.errors import CoordinatorUnavailable
from diloco.launch.state_dir import StateDir


@pytest.mark.timeout(300)
def test_rows_say_what_a_syncer_spends_and_holds() -> None:
    heard: list[tuple[int, int]] = []
    setting = Setting(
        numel=70_000,
        num_islands=(2,),
        small_spool_memory="1KiB",
        num_rounds=2,
        flatness=1.0,
        memory=1e9,
    )

    report = run_syncer(setting, lambda done, of: heard.append((done, of)))

    in_memory, on_disk = report.rows
    assert (in_memory["spool_memory"], on_disk["spool_memory"]) == ("1GiB", "1KiB")
    for row in report.rows:
        assert row["num_islands"] == 2
        assert row["tensors"] + row["loop"] + row["wire"] == pytest.approx(1)
        assert 0 < row["nanoseconds"] == pytest.approx(1e3 / row["millions_per_s"])
        assert row["peak_mib"] > row["baseline_mib"] > 0
    assert in_memory["held_mib"] > on_disk["held_mib"]
    assert heard == [(done, 6) for done in range(1, 7)]
    flatness, memory = report.requirements
    assert flatness.is_met
    assert flatness.figure == 1
    assert memory.figure == max(row["extra_of_state"] for row in report.rows)
    assert json.dumps(report.as_dict())


def test_a_syncer_that_does_not_start_is_quoted(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    state.create()

    with (
        pytest.raises(CoordinatorUnavailable, match=r"(?s)exit code [0-9]+.*resolved\.toml"),
        bench._serving(state),
    ):
        pass


def test_the_setting_is_what_was_asked_for() -> None:
    assert (min(SETTING.num_islands), max(SETTING.num_islands)) == (4, 64)
    assert SETTING.flatness == 1.2
