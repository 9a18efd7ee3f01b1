"""Predictions held against real runs: blocked time of the same run files, measured and simulated.

Real runs (`validate_run`) on links of several bandwidths and round trips; host costs are calibrated
without a link (`validate_costs`), never at a point. The error of a point is

    |predicted - measured| / measured        of the seconds a round for which training stood still

and where errors are too large, `residual` says with what the missing part goes.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from diloco.bench.network.emulating import ISLANDS, check_text, measure_inside, network_toml
from diloco.report.rows import Column, Report, Requirement, matching
from diloco.simulations.runs.costs import HostCosts
from diloco.simulations.runs.run_model import run_plan
from diloco.simulations.validation.validate_costs import Calibration, host_costs
from diloco.simulations.validation.validate_prediction import planned_s, predict
from diloco.simulations.validation.validate_run import (
    Message,
    ValidationPoint,
    ValidationSetting,
    measure_point,
    measured_path,
    read_measured,
    run_config,
)

_MEDIAN_PERCENT, _WORST_PERCENT, _LEAST_POINTS = 10.0, 25.0, 12
#: Less blocked time than this a round is nothing that an error could be a share of.
_LEAST_BLOCKED_S = 0.05

_COLUMNS = (
    Column("point", "point"),
    Column("blocked_s", "blocked", ".2f"),
    Column("predicted_blocked_s", "sim", ".2f"),
    Column("error", "error", ".1%"),
    Column("utilisation", "busy", ".3f"),
    Column("predicted_utilisation", "sim", ".3f"),
    Column("round_s", "round", ".2f"),
    Column("predicted_round_s", "sim", ".2f"),
    Column("wall_s", "run", ".1f"),
    Column("planned_s", "plan", ".1f"),
    Column("plan_error", "error", ".1%"),
)

#: Every codec, H, P and tau at several bandwidths and round trips; all block for long enough.
POINTS = (
    ValidationPoint("100Mbit/s", 0, "int4", 5, 1),
    ValidationPoint("100Mbit/s", 100, "int4", 10, 4),
    ValidationPoint("100Mbit/s", 20, "float32", 5, 1),
    ValidationPoint("100Mbit/s", 100, "float32", 10, 4),
    ValidationPoint("100Mbit/s", 60, "float32", 10, 2, 2),
    ValidationPoint("300Mbit/s", 0, "float32", 5, 1),
    ValidationPoint("300Mbit/s", 20, "int4", 5, 1),
    ValidationPoint("300Mbit/s", 60, "float32", 10, 4, 1),
    ValidationPoint("300Mbit/s", 100, "int4", 10, 2),
    ValidationPoint("300Mbit/s", 100, "float32", 5, 1),
    ValidationPoint("1Gbit/s", 0, "float32", 5, 1),
    ValidationPoint("1Gbit/s", 20, "float32", 10, 2),
    ValidationPoint("1Gbit/s", 60, "int4", 10, 4),
    ValidationPoint("1Gbit/s", 100, "float32", 10, 4),
    ValidationPoint("1Gbit/s", 100, "int4", 5, 1),
)
#: Where links take most of the time, and the time is short; one codec to calibrate.
QUICK_POINTS = (POINTS[5], POINTS[9], POINTS[11], POINTS[13])
SETTING = ValidationSetting()
QUICK = ValidationSetting(rounds=3)


@dataclass(frozen=True, slots=True)
class Sweep:
    """What is to be measured, and where it is kept.

    Attributes:
        setting: Of all runs.
        points: That predictions are judged by.
        directory: Of what was measured; absolute.
        is_judged_whole: Whether the number of points has a bar, too.
    """

    setting: ValidationSetting
    points: tuple[ValidationPoint, ...]
    directory: Path
    is_judged_whole: bool

    @property
    def calibrations(self) -> tuple[ValidationPoint, ...]:
        """Runs without a link, of every codec in two sizes of fragments."""
        return tuple(
            ValidationPoint("", 0, codec, *schedule)
            for codec in dict.fromkeys(point.codec for point in self.points)
            for schedule in ((5, 1), (8, 4))
        )

    def setting_of(self, point: ValidationPoint) -> ValidationSetting:
        """Give the setting of a run: what has no link is not emulated."""
        return self.setting if point.bandwidth else replace(self.setting, is_emulated=False)


def chosen_points(
    points: Sequence[ValidationPoint], patterns: Sequence[str]
) -> tuple[ValidationPoint, ...]:
    """Give the points whose names match any of `patterns`; without any, all.

    Raises:
        ConfigError: If a pattern matches none.
    """
    wanted = matching([point.name for point in points], patterns, what="point")
    return tuple(point for point in points if point.name in wanted)


def run_validation(
    sweep: Sweep,
    *,
    on_progress: Callable[[str, int, int], None],
    on_look: Callable[[], None] = lambda: None,
) -> Report:
    """Measure what was not measured before, simulate all, and judge.

    Args:
        sweep: What, and where it is kept.
        on_progress: Called with what begins, and the numbers of runs done and in all.
        on_look: Called often; what it raises ends every process.

    Raises:
        ConfigError: If networks cannot be emulated here.
        IslandFailed: If a run failed; what was measured before is kept.
    """
    began = time.monotonic()
    checks = _measure_missing(sweep, on_progress, on_look)
    codecs = dict.fromkeys(point.codec for point in sweep.points)
    costs = {codec: _calibrated(sweep, codec) for codec in codecs}
    rows = [_row(sweep, point, costs[point.codec], checks) for point in sweep.points]
    errors = [row["error"] for row in rows if row["error"] is not None]
    return Report(
        bench="validate",
        setting={
            **asdict(sweep.setting),
            "shaped": "emulated" if sweep.setting.is_emulated else "in the process",
            "directory": str(sweep.directory),
            "host_costs": {codec: asdict(each) for codec, each in costs.items()},
            "residual": residual(rows),
        },
        columns=_COLUMNS,
        rows=rows,
        requirements=_requirements(errors, is_judged_whole=sweep.is_judged_whole),
        wall_s=time.monotonic() - began,
    )


def _requirements(errors: Sequence[float], *, is_judged_whole: bool) -> list[Requirement]:
    percents = [100 * error for error in errors] or [float("nan")]
    what = "error of blocked time"
    requirements = [
        Requirement(f"median {what}", statistics.median(percents), _MEDIAN_PERCENT, "%"),
        Requirement(f"worst {what}", max(percents), _WORST_PERCENT, "%"),
    ]
    if is_judged_whole:
        num_judged, unit = float(len(errors)), "points"
        requirements.append(
            Requirement("judged", num_judged, _LEAST_POINTS, unit, is_at_least=True)
        )
    return requirements


# -- measuring -------------------------------------------------------------------------------------


def missing_points(sweep: Sweep) -> list[ValidationPoint]:
    """List the runs that are still to be made, those without a link first."""
    return [
        point
        for point in (*sweep.calibrations, *sweep.points)
        if read_measured(sweep.directory, sweep.setting_of(point), point) is None
    ]


def forget(sweep: Sweep) -> None:
    """Take away what was measured of this sweep."""
    for point in (*sweep.calibrations, *sweep.points):
        measured_path(sweep.directory, sweep.setting_of(point), point).unlink(missing_ok=True)


def _measure_missing(
    sweep: Sweep, on_progress: Callable[[str, int, int], None], on_look: Callable[[], None]
) -> dict[str, str]:
    """Make all runs that were not made before; returns by point what a link missed."""
    sweep.directory.mkdir(parents=True, exist_ok=True)
    total = len(sweep.calibrations) + len(sweep.points)
    missing = missing_points(sweep)
    checks: dict[str, str] = {}
    done = total - len(missing)
    for points in _networks(missing, is_emulated=sweep.setting.is_emulated):
        on_progress(points[0].name, done, total)
        if sweep.setting_of(points[0]).is_emulated:
            checks |= _measure_emulated(sweep, points, on_look)
        else:
            measure_point(sweep.directory, sweep.setting_of(points[0]), points[0], on_look)
        done += len(points)
    on_progress("simulating", done, total)
    return checks


def _networks(
    points: Sequence[ValidationPoint], *, is_emulated: bool
) -> Iterator[list[ValidationPoint]]:
    """Put the points of one emulated network together; others are by themselves."""
    grouped: dict[object, list[ValidationPoint]] = {}
    for point in points:
        is_alone = not (is_emulated and point.bandwidth)
        key = point if is_alone else (point.bandwidth, point.rtt_ms)
        grouped.setdefault(key, []).append(point)
    yield from grouped.values()


def _measure_emulated(
    sweep: Sweep, points: Sequence[ValidationPoint], on_look: Callable[[], None]
) -> dict[str, str]:
    """Make runs inside one emulated network; returns by point what its link missed."""
    orders = {
        "setting": asdict(sweep.setting),
        "directory": str(sweep.directory),
        "points": [asdict(point) for point in points],
    }
    module = "diloco.simulations.validation.validate_run"
    toml = network_toml(points[0].bandwidth, points[0].rtt_ms / 2, ISLANDS)
    with tempfile.TemporaryDirectory(prefix="diloco-validate-") as place:
        found, record = measure_inside(points[0].name, toml, module, orders, Path(place), on_look)
    return {} if found else {point.name: check_text(record["check"]) for point in points}


# -- predicting ------------------------------------------------------------------------------------


def _calibrated(sweep: Sweep, codec: str) -> HostCosts:
    calibrations = []
    for point in sweep.calibrations:
        if point.codec == codec:
            setting = sweep.setting_of(point)
            measured = read_measured(sweep.directory, setting, point)
            assert measured is not None, "all that was missing has been measured"
            plan = run_plan(run_config(setting, point, sweep.directory))
            numel = statistics.mean(fragment.padded_numel for fragment in plan.fragments)
            calibrations.append(Calibration(numel, measured["phases"]))
    return host_costs(calibrations, num_islands=len(ISLANDS))


def _row(
    sweep: Sweep, point: ValidationPoint, costs: HostCosts, checks: Mapping[str, str]
) -> dict[str, Any]:
    """Hold a point's prediction against what was measured; a link that was not as told has none."""
    setting = sweep.setting_of(point)
    row: dict[str, Any] = dict.fromkeys(column.key for column in _COLUMNS)
    row |= {"point": point.name, **asdict(point), "check": checks.get(point.name, "ok")}
    measured = read_measured(sweep.directory, setting, point)
    if measured is None:
        return row
    predicted = predict(setting, point, costs, measured["step_s"])
    planned = planned_s(setting, point, measured["step_s"])
    step_s = statistics.mean(measured["step_s"].values())
    blocked_s, wall_s = measured["blocked_s"], measured["wall_s"]
    error = abs(predicted["blocked_s"] - blocked_s) / blocked_s if blocked_s else None
    return row | {
        "blocked_s": blocked_s,
        "predicted_blocked_s": predicted["blocked_s"],
        "error": error if blocked_s >= _LEAST_BLOCKED_S else None,
        "utilisation": point.inner_steps_per_round * step_s / measured["round_s"],
        "predicted_utilisation": predicted["utilisation"],
        "round_s": measured["round_s"],
        "predicted_round_s": predicted["round_s"],
        "wall_s": wall_s,
        "planned_s": planned,
        "plan_error": abs(planned - wall_s) / wall_s,
        "step_s": step_s,
        "phases": measured["phases"],
        **{key: predicted[key] for key in _TERMS},
    }


# -- what is missing -------------------------------------------------------------------------------

#: What the missing part of a prediction may go with, and how its coefficient is to be read.
_TERMS = {
    "transfer_s": "bandwidth: {:+.1%} of bytes over bandwidth",
    "round_trips_s": "round trips: {:+.2f} of them a fragment",
    "megabytes": "bytes through the hosts: {:+.2g} s a megabyte",
    "host_s": "CPU and disk: {:+.1%} of what hosts alone take",
    "fragments": "a constant: {:+.3f} s a fragment",
}


def residual(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Say with what the part goes that predictions lack: measured - predicted = c * term.

    For each term c is fitted by least squares over the rows; `explained` is the share of the sum of
    squared residuals that goes with it.

    Returns:
        JSON values: `terms`, by name `text`, `coefficient` and `explained`, the best first; empty
        where fewer than three rows were judged.
    """
    judged = [row for row in rows if row["error"] is not None]
    if len(judged) < 3:
        return {"terms": {}}
    left = [row["blocked_s"] - row["predicted_blocked_s"] for row in judged]
    total = sum(each**2 for each in left)
    terms: dict[str, Message] = {}
    for key, text in _TERMS.items():
        values = [row[key] for row in judged]
        squares = sum(value**2 for value in values)
        products = sum(value * each for value, each in zip(values, left, strict=True))
        coefficient = products / squares if squares else 0.0
        explained = coefficient * products / total if total else 0.0
        terms[key] = {
            "text": text.format(coefficient),
            "coefficient": coefficient,
            "explained": explained,
        }
    ranked = sorted(terms.items(), key=lambda item: item[1]["explained"], reverse=True)
    return {"terms": dict(ranked)}


def residual_text(found: Mapping[str, Any]) -> str:
    """Say in a line what predictions lack; empty where that is not known."""
    best = next(iter(found["terms"].values()), None)
    if best is None:
        return ""
    return f"what is missing goes best with {best['text']} ({best['explained']:.0%} of it)"
