"""The bench of layouts: which rows it takes, what it calls a difference, and two rows for real."""

import json
import math

import pytest
from typer.testing import CliRunner

from diloco.bench.training.layouts import CASES, case_of
from diloco.bench.training.parity_inner import (
    LARGEST_DIFFERENCES,
    chosen_cases,
    largest_difference,
    run_parity_inner,
)
from diloco.cli.main import app
from diloco.errors import ConfigError
from diloco.report.rows import Requirement


def test_rows_are_chosen_by_number_of_ranks_and_name():
    assert {case.num_ranks for case in chosen_cases([4, 2], [])} == {2, 4}
    assert [case.name for case in chosen_cases([2, 4], ["tp-l*", "fsdp-tp"])] == [
        "tp-loss-parallel",
        "fsdp-tp",
    ]


def test_names_are_unique_and_a_run_file_may_say_every_row():
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        island = case.config().island
        assert (island.mesh, island.compute) == (case.mesh, case.compute)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks", "3"], "--ranks 3: no layout has so many ranks; choose of 2,4,8"),
        (["--ranks", "2;4"], "--ranks 2;4: write numbers with commas between: 2,4"),
        (["--ranks", "8", "--rows", "tp"], "--rows tp matches no layout of --ranks 8; these are"),
    ],
)
def test_what_there_is_not_is_refused(arguments, words):
    result = CliRunner().invoke(app, ["bench", "parity-inner", *arguments])

    assert isinstance(result.exception, ConfigError)
    assert words in str(result.exception)


def test_the_difference_is_the_largest_of_any_rank_and_nan_is_not_lost():
    alone = {"losses": [3.0, 2.0], "evaluations": [2.5]}
    same, off = dict(alone), {"losses": [3.0, 2.0], "evaluations": [2.25]}
    broken = {"losses": [math.nan, 2.0], "evaluations": [2.5]}

    assert largest_difference(alone, [same, off]) == 0.25
    assert math.isnan(largest_difference(alone, [same, broken, off]))
    assert not Requirement("", math.nan, LARGEST_DIFFERENCES["float32"], "nats").is_met


@pytest.mark.timeout(300)  # three processes that import torch
def test_two_layouts_are_trained_for_real():
    seen = []

    report = run_parity_inner(
        [case_of("fsdp"), case_of("bfloat16-replicated")],
        on_progress=lambda what, done, total: seen.append((what, done, total)),
    )

    rows = json.loads(json.dumps(report.as_dict()))["rows"]
    assert [row["row"] for row in rows] == ["fsdp", "bfloat16-replicated"]
    assert 0 < rows[0]["difference"] <= LARGEST_DIFFERENCES["float32"]
    assert 1e-4 < rows[1]["difference"] <= LARGEST_DIFFERENCES["bfloat16"]
    assert rows[0]["collectives"] == case_of("fsdp").collectives
    assert not report.missed and len(report.requirements) == 3
    assert seen[0] == ("one process", 0, 3) and seen[-1] == ("2 ranks", 1, 3)
