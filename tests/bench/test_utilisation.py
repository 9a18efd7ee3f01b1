"""The utilisation bench end to end on a tiny model, and the arithmetic of its figures."""

from __future__ import annotations

import json
from typing import Any

import pytest

from diloco.bench.outer_loop import utilisation
from diloco.bench.outer_loop.utilisation import (
    SETTING,
    Timed,
    UtilisationRow,
    UtilisationSetting,
    row_figures,
    run,
)
from diloco.errors import DilocoError

TINY = {"preset": "tiny"}


def row(name: str, num_fragments: int = 2, *, at_least: float | None = None) -> UtilisationRow:
    outer: dict[str, Any] = {
        "preset": "streaming",
        "num_fragments": num_fragments,
        "fragment_pattern": "sequential",
        "overlap_steps": 1,
        "uplink_codec": "int4",
        "downlink_codec": "int4",
    }
    return UtilisationRow(name, TINY, outer, 0.02, at_least)


def setting(*rows: UtilisationRow) -> UtilisationSetting:
    return UtilisationSetting(
        rows, inner_steps_per_round=4, num_rounds=3, sequence_length=32, link="metro-1G-5ms"
    )


def test_figures_are_those_of_the_island_that_waited_most() -> None:
    busy = Timed(90, 20.0, 1.0, 0.2, 1_000_000)
    idle = Timed(90, 36.0, 18.0, 0.2, 1_000_000)

    figures = row_figures(SETTING, SETTING.rows[0], [busy, idle])

    assert figures["utilisation"] == pytest.approx(0.5)
    assert figures["not_blocked"] == pytest.approx(0.5)
    assert figures["blocked_s_per_round"] == pytest.approx(6.0)
    # float32 up and down, 32 Mbit each, at 100 Mbit/s
    assert figures["floor_s_per_round"] == pytest.approx(0.64)
    assert figures["utilisation_of_islands"] == [pytest.approx(0.9), pytest.approx(0.5)]


def test_both_sizes_are_judged_with_int4() -> None:
    judged = {row.name: row.at_least for row in SETTING.rows if row.at_least is not None}

    assert judged == {"10M-int4-P10-tau5": 0.97, "50M-int4-P10-tau5": 0.97}


@pytest.mark.parametrize(("at_least", "is_met"), [(0.4, True), (0.6, False)])
def test_rows_whose_names_match_are_judged_by_their_bars(
    monkeypatch: pytest.MonkeyPatch, at_least: float, is_met: bool
) -> None:
    islands = [Timed(8, 0.2, 0.01, 0.02, 1_000_000), Timed(8, 0.32, 0.1, 0.02, 1_000_000)]
    monkeypatch.setattr(utilisation, "_train", lambda *_: islands)
    rows = setting(row("low-bar", at_least=at_least), row("low-none"), row("high"))

    told = run(lambda *_: None, ["low-*"], setting=rows).as_dict()

    assert [figures["row"] for figures in told["rows"]] == ["low-bar", "low-none"]
    assert [figures["utilisation"] for figures in told["rows"]] == [pytest.approx(0.5)] * 2
    assert [(bar["figure"], bar["is_met"]) for bar in told["required"]] == [
        (pytest.approx(0.5), is_met)
    ]


@pytest.mark.timeout(180)
@pytest.mark.slow
def test_the_bench_runs_islands_as_processes_and_judges_them() -> None:
    begun: set[tuple[str, int, int]] = set()

    report = run(
        lambda *told: begun.add(told), ["low-*"], setting=setting(row("low-bar", at_least=1e-6))
    )

    told = json.loads(json.dumps(report.as_dict()))
    assert begun == {("low-bar", 0, 1)}
    assert [bar["is_met"] for bar in told["required"]] == [True]
    (figures,) = told["rows"]
    assert figures["inner_steps"] == 8
    assert figures["step_s"] == 0.02
    assert 0 < figures["utilisation"] <= 1
    assert figures["wall_s"] >= 8 * 0.02
    assert figures["blocked_s_per_round"] <= figures["wall_s"]


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_an_island_that_fails_ends_the_bench_with_its_reason() -> None:
    with pytest.raises(DilocoError, match="num_fragments"):
        run(lambda *_: None, setting=setting(row("too-many", num_fragments=500)))
