"""`diloco sim trace` and `diloco sim validate`: timelines, and predictions against real runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from diloco.cli.research.bench import show_report
from diloco.cli.research.sim_failures import Away, MeanRepair, MeanTimeBetween, Shape
from diloco.cli.terminal.fitted_table import print_rows
from diloco.cli.terminal.options import (
    Emulate,
    JsonTarget,
    Overrides,
    Require,
    Rows,
    flag,
    option,
    plot_option,
    writable,
    write_json,
)
from diloco.cli.terminal.progress import counting, notes, output, stoppable, waiting
from diloco.errors import ConfigError
from diloco.report.rows import Column, Report
from diloco.state_dir import StateDir
from diloco.transport.units import parse_duration

if TYPE_CHECKING:  # commands import what they need when they run
    from diloco.config.schema import Config
    from diloco.simulations.engine.timeline import Span
    from diloco.simulations.runs.run_model import SimulatedRun
    from diloco.simulations.validation.validate import Sweep


def trace(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN.toml|DIR",
            help="A run file, to simulate; or the coordinator.state_dir of a run that was made.",
        ),
    ],
    out: Annotated[str, option("Write the trace, Chrome's JSON.", "PATH", callback=writable)] = "",
    plot: Annotated[str, plot_option("a timeline")] = "",
    step_time: Annotated[str, option('Of an inner step, such as "200ms".', "TIME")] = "",
    link: Annotated[str, option("Of configs/links, not the file's own.", "NAME")] = "",
    rounds: Annotated[
        int, typer.Option("--rounds", min=0, help="Simulate H inner steps so often; 0: all.")
    ] = 0,
    seed: Annotated[int, typer.Option("--seed", help="Of jitter, loss and failures.")] = 0,
    mean_time_between: MeanTimeBetween = "",
    mean_repair: MeanRepair = "",
    shape: Shape = 1.0,
    away: Away = None,
    begin: Annotated[str, option("Leave out what ended before.", "TIME", "--from")] = "0s",
    end: Annotated[str, option("Leave out what began later.", "TIME", "--to")] = "",
    overrides: Overrides = None,
    json_target: JsonTarget = "",
) -> None:
    """Trace a run, simulated or real: who did what when, by island, fragment and lane.

    Of a run file the simulator makes the timeline, with inner steps of --step-time; of a directory
    it is read from the events that the run has kept there. Both give the same trace, which
    ui.perfetto.dev and chrome://tracing open, and the same picture, so that they can be laid side
    by side. Lanes that cross together count each, so that shares may exceed 100 %.

    compute, gather, wait and merge are the training thread's; encode (and decode), send and fetch
    are a fragment's, behind training; merge of a syncer is from the close of a round until the
    version is durable. Times of a real run are of its machines' wall clocks.

    Islands may fail and come back (--mean-time-between), join late and leave (--away): then a
    second table says what it cost. "rounds without": closed without the island's work; "blocked":
    its training stood still for others. Where nobody waits (outer.merge = "on_arrival") there is
    hardly a moment in which no island trains.

    Example: diloco sim trace configs/runs/demo.toml --step-time 200ms --plot timeline.png
    """
    from diloco.cli.research.sim_failures import read_absences, read_failures
    from diloco.cli.terminal.timelines import write_timelines
    from diloco.simulations.engine.trace import shown
    from diloco.simulations.runs.lanes import spans_by_lane
    from diloco.simulations.runs.run_model import simulate_run

    if not (out or plot or json_target):
        raise ConfigError("nothing would be written: add --out trace.json, or --plot timeline.png")
    fails = bool(mean_time_between or mean_repair or shape != 1.0 or away)
    if run.is_dir() and (step_time or link or rounds or overrides or fails):
        raise ConfigError(
            f"{run} is a run that was made: --step-time, --link, --rounds, --set, failures and "
            f"--away are of runs to simulate; give the run file in its place"
        )
    with waiting(notes(json_target), f"{'reading' if run.is_dir() else 'simulating'} {run}"):
        simulated = None
        if not run.is_dir():
            failures = read_failures(mean_time_between, mean_repair, shape)
            absences = read_absences(away or ())
            config = _config_of(run, overrides or (), step_time, link)
            simulated = simulate_run(
                config,
                step_s=dict.fromkeys(config.islands, _seconds("--step-time", step_time)),
                rounds=rounds,
                seed=seed,
                failures=failures,
                absences=absences,
            )
        spans = _real_spans(run) if simulated is None else spans_by_lane(simulated, config)
        spans = shown(spans, _seconds("--from", begin), _seconds("--to", end) if end else None)
    kind = "real" if run.is_dir() else "simulated"
    written = write_timelines(spans, f"{run}, {kind}", trace=out, picture=plot)
    _show_sums(spans, json_target, written, kind, simulated if fails else None)


def validate(
    rows: Rows = None,
    quick: Annotated[bool, flag("Four points, few rounds: three minutes.", "--quick")] = False,
    emulate: Emulate = False,
    directory: Annotated[
        Path, typer.Option("--dir", help="Where measured points and their events are kept.")
    ] = Path("runs/validate"),
    fresh: Annotated[bool, flag("Measure again what was measured before.", "--fresh")] = False,
    step_time: Annotated[str, option("Of an inner step.", "TIME")] = "100ms",
    rounds: Annotated[
        int, typer.Option("--rounds", min=0, help="Measured rounds a point; 0: 5, quick 3.")
    ] = 0,
    json_target: JsonTarget = "",
    require: Require = False,
) -> None:
    """Run the real system on links, simulate the same run files, and compare blocked time.

    Two islands of a model of 10M parameters, `diloco local` with everything that belongs to it, on
    links of 100 Mbit/s to 1 Gbit/s and 0 to 100 ms round trip, by codec, H, P and tau. An inner
    step trains on 16 bytes and sleeps until it has taken --step-time, so that two cores measure
    links, not each other. What hosts take is calibrated from runs without a link, two a codec,
    never from a point. About a quarter of an hour on two cores without other work, which it needs:
    commits of rounds are CPU and disk (a --dir in /dev/shm leaves the disk out). What was measured
    stays in --dir, so a sweep that died goes on where it was, and the timeline of a point can be
    drawn: diloco sim trace DIR/POINT/run --plot timeline.png.

    Read "blocked": seconds a round (H inner steps) for which training stood still, medians over
    rounds and islands, the first round left out; "busy": utilisation; "round": its seconds; "sim":
    the simulator's word on the figure before; "run": seconds of the whole run; "plan": what diloco
    plan says of these, told the link and the inner step, and nothing that was calibrated. The bars:
    errors of blocked time of 10 % in the median and 25 % at worst, over at least 12 points. The
    last line says with what the difference goes: bandwidth, round trips, bytes, CPU and disk, or a
    constant.

    Example: diloco sim validate --quick
    """
    from dataclasses import replace

    from diloco.simulations.validation.validate import (
        POINTS,
        QUICK,
        QUICK_POINTS,
        SETTING,
        Sweep,
        chosen_points,
        forget,
    )

    setting = QUICK if quick else SETTING
    setting = replace(
        setting,
        step_s=_seconds("--step-time", step_time, is_positive=True),
        rounds=rounds or setting.rounds,
        is_emulated=emulate,
    )
    points = chosen_points(QUICK_POINTS if quick else POINTS, rows or [])
    sweep = Sweep(setting, points, directory.resolve(), not (quick or rows))
    if fresh:
        forget(sweep)
    console = notes(json_target)
    report = _validated(sweep, console)
    _explain(report, console)
    show_report(report, json_target, require=require)


def _validated(sweep: Sweep, console: Console) -> Report:
    """Make the runs that are missing, showing progress, and judge all."""
    from diloco.simulations.validation.validate import missing_points, run_validation

    known = len(sweep.calibrations) + len(sweep.points) - len(missing_points(sweep))
    if known:
        where = f"in {sweep.directory}; --fresh measures them again"
        console.print(f"{known} runs were measured before, {where}")
    with stoppable() as request, counting(console) as show:
        return run_validation(sweep, on_progress=show, on_look=request.check)


_SUMS = [
    Column("island", "who"),
    Column("kind", "what"),
    Column("times", "times", ",d"),
    Column("seconds", "seconds", ".3f"),
    Column("share", "share", ".1%"),
]


def _explain(report: Report, console: Console) -> None:
    """Say which links were not as told, and what the predictions lack."""
    from diloco.simulations.validation.validate import residual_text

    for row in report.rows:
        if row["check"] != "ok":
            said = f"{row['point']}: the emulated link is not as told, no figure: {row['check']}"
            console.print(said)
    if text := residual_text(report.setting["residual"]):
        console.print(text)


def _seconds(option: str, text: str, *, is_positive: bool = False) -> float:
    try:
        return parse_duration(text, is_positive=is_positive)
    except ValueError as error:
        raise ConfigError(f"{option} {text}: {error}") from error


def _real_spans(directory: Path) -> list[Span]:
    from diloco.config.load import load_config
    from diloco.simulations.engine.trace import run_spans

    resolved = StateDir(directory).resolved
    if not resolved.exists():
        raise ConfigError(
            f"{directory} is no run: it has no {resolved.name}. Give the coordinator.state_dir of "
            f"a run, or a run file to simulate"
        )
    return run_spans(load_config(resolved).telemetry_dir)


def _config_of(run_file: Path, overrides: Sequence[str], step_time: str, link: str) -> Config:
    from diloco.config.load import load_config

    if not step_time:
        raise ConfigError(
            f"--step-time is missing: how long an inner step of {run_file} takes, such as "
            f"--step-time 200ms; a run that was made says it (undisturbed step)"
        )
    overrides = [*overrides, *([f"transport.link={link}"] if link else [])]
    return load_config(run_file, overrides)


def _show_sums(
    spans: Sequence[Span], json_target: str, written: str, kind: str, failing: SimulatedRun | None
) -> None:
    """Say how much of the time each island spent on what, and what absences cost, if any."""
    from diloco.cli.research.sim_failures import lost_of, show_lost
    from diloco.simulations.engine.trace import sums_of

    sums = sums_of(spans)
    console = output(json_target)
    print_rows(console, _SUMS, sums)
    message: dict[str, Any] = {"kind": kind, "sums": sums}
    if failing is not None:
        message["failures"] = lost_of(failing)
        show_lost(console, message["failures"])
    if written:
        console.print(f"written: {written}")
    write_json(message, json_target)
