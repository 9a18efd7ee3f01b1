"""`diloco bench` as a user types it: table, JSON, verdict and exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from diloco.bench.network import allreduce, wan
from diloco.bench.outer_loop import codec, guard, memory, overhead, utilisation
from diloco.bench.syncer import coordinator, syncer
from diloco.bench.training import device, gpu, plain, race, scaling
from diloco.cli.main import app
from diloco.report.rows import Column, Report, Requirement

COMMANDS = {
    "plain": plain,
    "overhead": overhead,
    "utilisation": utilisation,
    "codec": codec,
    "memory": memory,
    "syncer": syncer,
    "coordinator": coordinator,
    "wan": wan,
    "allreduce": allreduce,
    "guard": guard,
    "race": race,
    "scaling": scaling,
    "device": device,
    "gpu": gpu,
}


def report(*requirements: Requirement) -> Report:
    return Report(
        "some",
        {},
        [Column("name", "name"), Column("figure", "figure", ".2f")],
        [{"name": "a-row", "figure": 1.234}],
        requirements,
        1.0,
    )


MET = Requirement("a figure", 1.0, 2.0, "x")
MISSED = Requirement("another figure", 3.0, 2.0, "x")


@pytest.fixture
def hand_back(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Report], None]:
    def replace(command: str, answer: Report) -> None:
        monkeypatch.setattr(COMMANDS[command], "run", lambda *args, **kwargs: answer)

    return replace


def bench(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", *arguments])


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("bars", "arguments", "code"),
    [
        pytest.param([MET], [], 0, id="met"),
        pytest.param([MET, MISSED], [], 0, id="missed-and-not-required"),
        pytest.param([MET], ["--require"], 0, id="required-and-met"),
        pytest.param([MET, MISSED], ["--require"], 1, id="required-and-missed"),
        pytest.param([], ["--require"], 1, id="nothing-to-judge"),
    ],
)
def test_require_decides_the_exit_code(
    hand_back: Callable[[str, Report], None],
    command: str,
    bars: list[Requirement],
    arguments: list[str],
    code: int,
) -> None:
    hand_back(command, report(*bars))

    result = bench(command, *arguments)

    assert result.exit_code == code, result.output
    assert "a-row" in result.stdout
    assert "1.23" in result.stdout
    for bar in bars:
        assert bar.as_text() in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_the_last_line_names_the_missed_figure(
    hand_back: Callable[[str, Report], None], command: str
) -> None:
    hand_back(command, report(MISSED, MET))

    result = bench(command, "--require")

    assert result.stdout.splitlines()[-1] == MISSED.as_text()


@pytest.mark.parametrize("command", COMMANDS)
def test_json_goes_to_a_file_or_alone_to_standard_output(
    hand_back: Callable[[str, Report], None], command: str, tmp_path: Path
) -> None:
    answer = report(MET, MISSED)
    hand_back(command, answer)
    path = tmp_path / "report.json"

    filed = bench(command, "--json", str(path))
    alone = bench(command, "--json", "-", "--require")

    assert filed.exit_code == 0
    assert "a-row" in filed.stdout
    told = [json.loads(text) for text in (path.read_text(), alone.stdout)]
    assert all(each.pop("wall_s") > 0 for each in told)
    assert told[0] == told[1]
    assert json.loads(alone.stdout)["required"][1]["is_met"] is False
    assert alone.exit_code == 1
    assert alone.stderr.splitlines()[-1] == MISSED.as_text()


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_how_to_read_the_figures(command: str) -> None:
    result = bench(command, "--help")

    assert result.exit_code == 0
    assert "Read" in result.stdout
    assert "--require" in result.stdout
