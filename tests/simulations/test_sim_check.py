"""`diloco sim check` and `goodput`: published figures hold, bad scenarios are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from diloco.cli.main import app
from diloco.errors import ConfigError
from diloco.simulations.goodput.config import load_goodput
from diloco.simulations.goodput.scenario import simulate_goodput
from diloco.simulations.published import check
from diloco.simulations.published.check_row import CheckRow

KNOWN_MISSES = {
    "A6": ["nobody trains, in 30 days: M=8, 2,400,000 chips"],
    "A10": ["decoupled, 2 islands, 16 bits"],
}
SCENARIOS = Path(__file__).resolve().parents[2] / "configs" / "simulations"
QUICK = ["--chips", "2000", "--mtbi", "1000h", "--duration", "24h", "--simulated-steps", "30"]


def sim(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["sim", *arguments], env={"COLUMNS": "80"})


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ("A1", "A10") else ())
        for name in check.CHECKS
    ],
)
def test_what_was_published_comes_out_or_is_known_not_to(target: str) -> None:
    rows = check.check([target])

    assert rows
    assert [row for row in rows if row.verdict == "FAIL" or row.target != target] == []
    assert [row.what for row in rows if row.missed] == KNOWN_MISSES.get(target, [])


def test_a_row_that_fails_ends_the_check_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong() -> Any:
        yield CheckRow("A0", "one and one", "2", "3", "none", False, "ours")
        yield CheckRow("A0", "two and two", "4", "5", "none", False, "ours", "it is never 4")

    monkeypatch.setitem(check.CHECKS, "A0", wrong)

    failing = sim("check", "--target", "A0", "--target", "A15")
    passing = sim("check", "--target", "A15", "--json", "-")
    unknown = sim("check", "--target", "A3")

    assert failing.exit_code == 1
    assert "FAIL" in failing.stdout and "it is never 4" in failing.stdout
    assert "2 of 4 rows pass, 1 known not to" in failing.stdout
    assert passing.exit_code == 0
    assert {row["target"] for row in json.loads(passing.stdout)["rows"]} == {"A15"}
    assert "targets are A1" in str(unknown.exception)


def test_every_key_is_a_flag_that_says_its_default() -> None:
    page = " ".join(sim("goodput", "--help").stdout.split())

    tables = {"failures_shape": "1", "returns_exponent": "3", "no_elastic": "elastic"}
    keys = {
        "chips": "1200000",
        "mtbi": "8760h",
        "merge": "on_arrival",
        "grace_cap": "10s",
        **tables,
    }
    for key, default in keys.items():
        assert f"--{key.replace('_', '-')} " in page, key
        assert f"[default: {default}]" in page, key
    assert "failures: How chips fail" in page


@pytest.mark.parametrize(
    ("flags", "problems"),
    [
        ({"rounds.quorum": 9}, ["rounds.quorum: 9: is more than learners = 8"]),
        ({"learners": 8, "chips": 7}, ["learners: 8: is more than chips = 7"]),
        ({"failures.mtbi": "0s"}, ["failures.mtbi", "1min to 10000000h"]),
        ({"failures.mtbi": "-1h"}, ["failures.mtbi", "write a number over 0"]),
        ({"rounds.noise": -0.1}, ["rounds.noise: -0.1: is out of range; allowed: >= 0 and < 1"]),
        ({"returns.shape": 0.0}, ["returns.shape", "> 0.05"]),
        ({"rounds.merge": "scheduled", "rounds.quorum": 3}, ["rounds.quorum: 3", "waits for all"]),
        ({"rounds.overlap_steps": 24}, ["overlap_steps: 24", "less than inner_steps_per_round"]),
        ({"rounds.slow_learners": 9}, ["rounds.slow_learners: 9"]),
        ({"rounds.slow_by": 0.1}, ["rounds.slow_by: 0.1", "give slow_learners"]),
        ({"rounds.grace": "1s", "rounds.grace_share": 0.1}, ["rounds.grace_share", "nothing"]),
        ({"failures.chips_lost": 200_000}, ["failures.chips_lost", "150000 chips of a learner"]),
        ({"failures.mtbi": "1h"}, ["duration", "too many to simulate: at most 1.67h"]),
        ({"seed": 1, "rounds.fragments": 3}, ["rounds.fragments", "unknown key"]),
        ({"failures.restart": "1s"}, ["failures.restart: 1s", "of failures.elastic = false"]),
        (
            {"failures.elastic": False, "failures.chips_lost": 2},
            ["failures.chips_lost: 2", "of failures.elastic = true"],
        ),
        ({"rounds.simulated_steps": 26}, ["rounds.simulated_steps: 26", "over 26, H + tau"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_impossible_scenarios_are_refused_by_path(
    flags: dict[str, Any], problems: list[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_goodput(None, flags)

    assert all(problem in str(refused.value) for problem in problems), str(refused.value)


def test_a_table_of_both_kinds_of_learners_takes_the_times_of_both() -> None:
    flags = {"failures.shrink": "10s", "failures.restart": "60s"}

    failures = load_goodput(None, flags, has_both=True).failures

    assert (failures.shrink, failures.restart) == ("10s", "60s")


def test_a_scenario_in_which_no_round_is_closed_is_refused() -> None:
    flags = {"chips": 2000, "duration": "24h", "rounds.up_time": "1h", "rounds.simulated_steps": 30}

    with pytest.raises(ConfigError, match=r"rounds.simulated_steps: 30: no round is closed"):
        simulate_goodput(load_goodput(None, flags))


def test_a_runs_file_is_sent_to_diloco_plan() -> None:
    run_file = SCENARIOS / "run.toml"

    for command in ("goodput", "utilization"):
        said = str(sim(command, str(run_file)).exception)
        assert said.endswith(f"to predict the run: diloco plan {run_file}"), said
    assert "run: " in (said := str(sim("goodput", str(SCENARIOS / "lab.toml")).exception))
    assert "unknown key" in said


def test_flags_win_over_the_file_and_figures_come_as_json(tmp_path: Path) -> None:
    file = tmp_path / "scenario.toml"
    file.write_text("learners = 4\nchips = 1\n[rounds]\nquorum = 2\nmerge = 'on_arrival'\n")
    picture = tmp_path / "goodput.png"

    result = sim("goodput", str(file), *QUICK, "--plot", str(picture), "--json", "-")

    assert result.exit_code == 0, result.exception
    figures = json.loads(result.stdout)
    scenario = figures["scenario"]
    assert (scenario["chips"], scenario["learners"], scenario["rounds"]["quorum"]) == (2000, 4, 2)
    assert figures["goodput"] == figures["chips"]["goodput"] * figures["learners"]["goodput"]
    assert figures["wall_s"] > 0 and figures["peak_memory_bytes"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_scheduled_scenario_counts_all_and_fits_a_narrow_terminal() -> None:
    result = sim("goodput", *QUICK, "--merge", "scheduled")

    assert result.exit_code == 0, result.exception
    assert "8.00 of 8" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--table", "table2"], "choose decoupled-table1"),
        (["--table", "decoupled-table1", "--chips", "5"], "chips would change nothing"),
        (["--plot", "goodput.gif"], "ends with .png"),
        (["--failures-shape", "0.06"], "failures.shape = 0.06"),
    ],
    ids=["table", "table-flag", "plot", "failures"],
)
def test_what_cannot_be_shown_or_held_is_refused(arguments: list[str], said: str) -> None:
    result = sim("goodput", *arguments)

    assert isinstance(result.exception, ConfigError)
    assert said in str(result.exception)


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("goodput/*.toml")), ids=lambda p: p.stem)
def test_scenarios_of_the_repository_can_be_read(path: Path) -> None:
    assert load_goodput(path, {}).chips > 0
