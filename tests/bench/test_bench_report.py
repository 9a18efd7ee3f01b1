from __future__ import annotations

import json
import math

import pytest

from diloco.report.rows import Column, Report, Requirement


@pytest.mark.parametrize(
    ("figure", "limit", "is_at_least", "is_met"),
    [
        (1.0, 1.0, False, True),
        (1.01, 1.0, False, False),
        (-5.0, -4.0, False, True),
        (0.97, 0.97, True, True),
        (0.96, 0.97, True, False),
        (math.nan, 1.0, False, False),
        (math.nan, 1.0, True, False),
    ],
)
def test_requirement_holds_figure_against_bar(
    figure: float, limit: float, is_at_least: bool, is_met: bool
) -> None:
    requirement = Requirement("loss", figure, limit, "%", is_at_least)

    assert requirement.is_met == is_met
    assert requirement.as_dict()["is_met"] == is_met


def test_requirement_names_figure_bar_and_verdict_in_one_line() -> None:
    missed = Requirement("loss of a over b", 3.14159, 2.5, "%")
    met = Requirement("utilisation", 0.981, 0.97, "x", is_at_least=True)

    assert missed.as_text() == "MISSED: loss of a over b: 3.142 %, required <= 2.5 %"
    assert met.as_text() == "met: utilisation: 0.981 x, required >= 0.97 x"


def test_a_stretch_is_said_and_never_missed() -> None:
    stretch = Requirement("decode", 2.1, 2.5, "GB/s", is_at_least=True, is_stretch=True)

    report = Report("codec", {}, [], [], [stretch], 1.0)

    assert stretch.as_text() == "not met: decode: 2.1 GB/s, hoped for >= 2.5 GB/s"
    assert not stretch.is_met
    assert not report.missed


def test_column_writes_what_was_not_measured_as_a_dash() -> None:
    column = Column("loss", "nats", ".2f")

    assert column.cell({"loss": 1.239}) == "1.24"
    assert column.cell({"loss": None}) == "-"
    assert Column("name", "name").cell({"name": "x"}) == "x"


def test_report_is_json_with_machine_rows_and_bars() -> None:
    bars = [Requirement("a", 1.0, 2.0, "x"), Requirement("b", 3.0, 2.0, "x")]
    report = Report("parity", {"seeds": [1]}, [], [{"row": "r", "loss": None}], bars, 1.5)

    told = json.loads(json.dumps(report.as_dict()))

    assert told.keys() == {"bench", "setting", "machine", "rows", "required", "wall_s"}
    assert told["rows"] == [{"row": "r", "loss": None}]
    assert [bar["is_met"] for bar in told["required"]] == [True, False]
    assert told["machine"].keys() >= {"torch", "python", "usable_cpus"}
    assert report.missed == bars[1:]
