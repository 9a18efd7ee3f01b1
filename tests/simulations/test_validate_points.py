"""`diloco sim validate`: what is measured, what is calibrated, and what a miss is put down to."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from diloco.cli.main import app
from diloco.config.load import resolved_toml
from diloco.durable import write_json
from diloco.errors import ConfigError
from diloco.simulations.validation.validate import (
    POINTS,
    QUICK_POINTS,
    Sweep,
    chosen_points,
    missing_points,
    residual,
    residual_text,
)
from diloco.simulations.validation.validate_costs import Calibration, host_costs
from diloco.simulations.validation.validate_prediction import planned_s, predict
from diloco.simulations.validation.validate_run import (
    FIGURES,
    ValidationPoint,
    ValidationSetting,
    figures,
    measure_point,
    measured_path,
    run_config,
)

SETTING = ValidationSetting(step_s=0.05, rounds=2)
STEPS = {"east": 0.05, "west": 0.05}


def test_the_grid_covers_what_is_required() -> None:
    assert len(POINTS) >= 12
    assert len({point.name for point in POINTS}) == len(POINTS)
    assert {point.bandwidth for point in POINTS} == {"100Mbit/s", "300Mbit/s", "1Gbit/s"}
    assert min(p.rtt_ms for p in POINTS) == 0
    assert max(p.rtt_ms for p in POINTS) == 100
    assert set(QUICK_POINTS) <= set(POINTS)


def test_rounds_are_measured_without_the_first_and_between_their_ends(tmp_path: Path) -> None:
    point, lines = ValidationPoint("100Mbit/s", 0, "int4", 2, 1), list[dict[str, Any]]()
    # Rounds of 2 steps of 0.1 s end at 10, 20, 30 s, blocked for 5, 1 and 2 s.
    for number, blocked_s in ((1, 5.0), (2, 1.0), (3, 2.0)):
        end = 10.0 * number
        for inner_step in (2 * number - 1, 2 * number):
            stepped = {"kind": "inner_step", "inner_step": inner_step, "duration_s": 0.5}
            lines.append({**stepped, "unix_s": end - 1})
        phase = {"kind": "phase", "phase": "send", "fragment_id": 0, "version": number - 1}
        lines.append({**phase, "lane_id": 0, "unix_s": end - 2, "duration_s": 1.0})
        lines.append({**phase, "lane_id": 1, "unix_s": end - 1.5, "duration_s": number / 2})
        merged = {"kind": "fragment_merged", "inner_step": 2 * number, "blocked_s": blocked_s}
        merged["fragment_id"] = 0
        lines.append({**merged, "unix_s": end})
    lines.append({"kind": "island_ended", "inner_step": 6, "undisturbed_step_s": 0.1, "unix_s": 31})
    for island in ("east", "west"):
        path = tmp_path / f"events-{island}-0.jsonl"
        path.write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "events-syncer.jsonl").write_text("")

    found = figures(tmp_path, point)

    assert found["rounds"] == {name: [(1.0, 10.0), (2.0, 10.0)] for name in ("east", "west")}
    assert (found["blocked_s"], found["round_s"]) == (1.5, 10.0)
    assert found["wall_s"] == 30 - 8.5, "from the first begin of all to the last merge"
    assert found["step_s"] == {"east": 0.1, "west": 0.1}
    assert found["phases"] == {"send": 1.5, "up": 1.5}, (
        "from the first lane's begin to the last one's end"
    )


@pytest.mark.parametrize("codec", ["float32", "int4"])
def test_calibrated_costs_give_back_what_they_were_calibrated_by(codec: str) -> None:
    # Constants of 10 ms and rates of 20 ns a value and phase, in fragments of two sizes.
    measured = {}
    for num_fragments, numel in ((1, 9_933_696), (4, 9_933_696 / 4)):
        phase_s = 0.01 + 20e-9 * numel
        phases = {"encode": phase_s, "up": 2 * phase_s, "commit": phase_s, "down": 2 * phase_s}
        measured[num_fragments] = {**phases, "wait": 6 * phase_s, "gather": 0.0, "merge": 0.0}
    calibrations = [Calibration(9_933_696 / p, phases) for p, phases in measured.items()]

    costs = host_costs(calibrations, num_islands=2)

    for num_fragments, phases in measured.items():
        predicted = predict(SETTING, ValidationPoint("", 0, codec, 8, num_fragments), costs, STEPS)
        assert predicted["blocked_s"] == pytest.approx(num_fragments * phases["wait"], rel=0.02)


def test_the_plan_besides_a_real_run_is_what_the_command_says_of_its_file(tmp_path: Path) -> None:
    point = ValidationPoint("100Mbit/s", 20, "int4", 10, 2)
    run_file = tmp_path / "run.toml"
    on_its_own_link = replace(SETTING, is_emulated=True)
    run_file.write_text(resolved_toml(run_config(on_its_own_link, point, tmp_path)))
    words = ["plan", str(run_file), "--step-time", "200ms", "--bandwidth", "100Mbit/s"]

    told = CliRunner().invoke(app, [*words, "--rtt", "20ms", "--json", "-"])

    assert told.exit_code == 0, told.output
    predicted = json.loads(told.stdout)["prediction"]
    steps = dict.fromkeys(STEPS, 0.2)
    assert planned_s(SETTING, point, steps) == pytest.approx(predicted["wall_s"])


def judged(point: ValidationPoint, missing_s: float) -> dict[str, Any]:
    return {
        "error": 0.1,
        "blocked_s": 1.0 + missing_s,
        "predicted_blocked_s": 1.0,
        "transfer_s": 8e6 / {"100Mbit/s": 1e8, "300Mbit/s": 3e8, "1Gbit/s": 1e9}[point.bandwidth],
        "round_trips_s": point.num_fragments * point.rtt_ms / 1000,
        "megabytes": 1.0,
        "host_s": 0.2,
        "fragments": float(point.num_fragments),
    }


def test_a_missing_round_trip_is_named() -> None:
    rows = [judged(p, 0.5 * p.num_fragments * p.rtt_ms / 1000) for p in POINTS]

    found = residual(rows)

    assert next(iter(found["terms"])) == "round_trips_s"
    assert residual_text(found) == (
        "what is missing goes best with round trips: +0.50 of them a fragment (100% of it)"
    )


def test_of_two_rows_nothing_is_said() -> None:
    assert residual_text(residual([judged(p, 0.1) for p in POINTS[:2]])) == ""


def test_a_sweep_goes_on_behind_what_was_measured_in_the_same_setting(tmp_path: Path) -> None:
    sweep = Sweep(SETTING, QUICK_POINTS, tmp_path, is_judged_whole=False)
    everything = [*sweep.calibrations, *QUICK_POINTS]
    assert missing_points(sweep) == everything

    for point, setting in zip(everything, (SETTING, replace(SETTING, rounds=9)), strict=False):
        path = measured_path(tmp_path, setting, point)
        write_json(path, {**dict.fromkeys(FIGURES), "setting": asdict(setting)})

    assert missing_points(sweep) == everything[1:]

    write_json(measured_path(tmp_path, SETTING, everything[0]), {"setting": asdict(SETTING)})
    assert missing_points(sweep) == everything, "a figure that was not taken then is missing"


def test_a_pattern_that_matches_no_point_is_refused_with_those_there_are() -> None:
    assert chosen_points(POINTS, ["1G-*", "100M-0ms-*"]) == tuple(
        p for p in POINTS if p.bandwidth == "1Gbit/s" or p == POINTS[0]
    )
    with pytest.raises(ConfigError, match="matches no point; points are 100M-0ms-int4-H5P1"):
        chosen_points(POINTS, ["10G-*"])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_real_run_is_measured_and_kept(tmp_path: Path) -> None:
    setting, point = (
        ValidationSetting(step_s=0.02, rounds=1),
        ValidationPoint("300Mbit/s", 20, "int4", 2, 1),
    )
    sweep = Sweep(setting, (point,), tmp_path, is_judged_whole=False)

    measured = measure_point(tmp_path, setting, point, lambda: None)

    assert measured["blocked_s"] > 2 * 8 * 9_933_696 / 2 / 300e6, "both ways, half a byte a value"
    assert point not in missing_points(sweep)
    assert not (tmp_path / point.name / "run" / "syncer").exists(), "what is heavy is not kept"
