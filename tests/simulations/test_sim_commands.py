"""`diloco sim utilization` and `bandwidth`: flags, files, JSON, pictures and bars."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco.cli.main import app
from diloco.errors import ConfigError
from diloco.simulations.scenarios.scenario import METHODS, Scenario
from diloco.simulations.scenarios.utilization import simulate

BANDWIDTH = (
    "sim bandwidth --params 10e9 --layers 48 --step-time 0.8s --method streaming "
    "--inner-steps-per-round 100 --num-fragments 16 --overlap-steps 1 --bits 4 --islands 2 "
    "--targets 0.5,0.8,0.9,0.95,0.99 --grid --json -"
)


def invoke(line: str, *more: str) -> str:
    page = CliRunner().invoke(app, [*line.split(), *more], env={"COLUMNS": "80"})
    if page.exception is not None and not isinstance(page.exception, SystemExit):
        raise page.exception
    assert page.exit_code == 0, page.output
    return page.stdout


def test_bandwidth_of_the_papers_4_bit_column_by_flags_alone() -> None:
    """10B, 48 layers, 0.8 s: Streaming DiLoCo's Table 4 has 0.4, 0.9, 1.4, 1.4, 1.7."""
    row = json.loads(invoke(BANDWIDTH))["rows"][0]

    found = [row[f"gbps_at_{target}"] for target in ("0.5", "0.8", "0.9", "0.95", "0.99")]
    assert [round(gbps, 1) for gbps in found] == [0.4, 1.0, 1.4, 1.4, 1.7]
    assert row["scenario"]["bits_up"] == row["scenario"]["bits_down"] == 4


def test_every_method_is_a_row_that_fits_a_terminal() -> None:
    table = invoke("sim utilization --layers 6 --inner-steps-per-round 6 --num-fragments 2")

    assert [line.split()[0] for line in table.splitlines()[1:]] == list(METHODS)
    assert all(len(line) <= 80 for line in table.splitlines())


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path, out = tmp_path / "s.toml", tmp_path / "out.json"
    path.write_text('[scenario]\nmethod = "diloco"\nlayers = 6\nparams = 1e8\n', encoding="utf-8")

    invoke(f"sim utilization {path} --layers 7 --json {out}")

    (row,) = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert row["scenario"]["layers"] == 7
    assert row["scenario"]["params"] == 1e8
    assert row["utilisation"] == pytest.approx(row["formula"], rel=0.01)


def test_every_key_of_a_scenario_is_a_flag_of_both_commands() -> None:
    for command in ("utilization", "bandwidth"):
        page = invoke(f"sim {command} --help")
        for key in Scenario.model_fields:
            assert f"--{key.replace('_', '-')}" in page, key
        assert "[default: 1e9]" in page and "[default: 1Gbit/s]" in page


@pytest.mark.parametrize("layers", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_scenario_of_thousands_of_layers_is_counted_while_it_lasts(layers: int) -> None:
    done: list[tuple[int, int]] = []
    scenario = Scenario(method="streaming", layers=layers, params=1e10, inner_steps_per_round=50)

    figures = simulate(scenario, rounds=2, on_progress=lambda *of: done.append(of))

    # 10,000 are 3,333 fragments, 67 sent at once: minutes, while every step asked each of them.
    assert done == [(step, 100) for step in range(1, 101)]
    assert figures.bits_up == pytest.approx(1e10 * 16)


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "u.png"

    invoke(f"sim utilization --method diloco --layers 3 --inner-steps-per-round 4 --plot {picture}")

    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_missed_bar_is_the_last_line_and_exit_1() -> None:
    """Everything released in one piece is another model than the paper's."""
    page = CliRunner().invoke(
        app, ["sim", "utilization", "--table", "streaming-table4", "--buckets", "1", "--require"]
    )

    assert page.exit_code == 1
    assert page.stdout.strip().splitlines()[-1].startswith("MISSED: ")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        pytest.param("bandwidth --targets 0.5,1", "--targets 0.5,1", id="targets"),
        pytest.param("bandwidth --layers many", 'scenario.layers: "many": must be', id="type"),
        pytest.param("utilization --params 0", "allowed: >= 1 and <= 1e15", id="range"),
        pytest.param("bandwidth --bandwidth-down 1Mbit/s", "is what is looked for", id="sought"),
        pytest.param("bandwidth --grid-rule best", "choose below or reaching", id="rule"),
        pytest.param("utilization --table nix", "choose streaming-table4", id="table"),
        pytest.param("utilization --require", "add --table streaming-table4", id="require"),
        pytest.param("utilization --plot x.txt", "ends with .png", id="plot"),
        pytest.param("utilization no.toml", "cannot read no.toml", id="file"),
        pytest.param("utilization --plot no/u.png", "--plot no/u.png: there is no dir", id="place"),
        pytest.param("bandwidth --grid-rule reaching", "is of --grid: add it", id="no-grid"),
        pytest.param(
            "utilization --params 100 --layers 101", "scenario.layers: 101: must be in", id="layers"
        ),
        pytest.param(
            "utilization --layers 24 --num-fragments 25 --method streaming",
            "scenario.num_fragments: 25: must be in [0, 24]",
            id="fragments",
        ),
        pytest.param(
            "bandwidth --params 100 --layers 10 --num-fragments 101 --fragment-pattern balanced",
            "scenario.num_fragments: 101: must be in [0, 100]",
            id="pieces",
        ),
        pytest.param(
            "utilization --method decoupled --layers 6 --step-time 1ms --rtt 1s",
            "--rounds 3: nothing is published in 72 inner steps of 1ms",
            id="pace-of-nothing",
        ),
        pytest.param("bandwidth --tcp-window 4MiB", "scenario.tcp_window: ", id="window"),
        pytest.param("bandwidth --tcp-loss 0.01", "bounds nothing without a round", id="tcp-loss"),
        pytest.param("bandwidth --streams 4", "counts with tcp_loss or tcp_window", id="streams"),
        pytest.param("utilization --table streaming-table4 --seed 1", "--seed", id="table-seed"),
        pytest.param("utilization --table streaming-table4 --layers 3", "--layers", id="of-table"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_type(line: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        invoke(f"sim {line}")

    assert said in str(refused.value)
