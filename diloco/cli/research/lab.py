"""`diloco lab`: islands in one process, real gradients over a virtual network."""

from __future__ import annotations

import json
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from diloco.cli.terminal.fitted_table import FittedTable, print_rows
from diloco.cli.terminal.options import JsonTarget, flag, option, plot_option, writable, write_json
from diloco.cli.terminal.progress import counting, notes, output
from diloco.errors import ConfigError
from diloco.extras import require as require_package

if TYPE_CHECKING:  # commands import what they need when they run
    from diloco.simulations.lab.config import Flags
    from diloco.simulations.lab.results import Found
    from diloco.simulations.lab.run import Result

_RUN = "run"


class _FileOrCommand(typer.core.TyperGroup):
    """A group whose command may be left out: `diloco lab LAB.toml` is `diloco lab run LAB.toml`."""

    # `Any`: typer has a click of its own, whose types are private.
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Take whatever is no command of the group for what `run` is given."""
        if args and args[0] not in self.commands:
            args = [_RUN, *args]
        return super().resolve_command(ctx, args)


lab = typer.Typer(
    cls=_FileOrCommand,
    help="Train islands in one process: loss against tokens, virtual time and bytes. "
    "diloco lab LAB.toml is diloco lab run LAB.toml.",
    no_args_is_help=True,
)

CacheDir = Annotated[Path, option("Where finished points are kept and found.", "DIR", "--cache")]
Processes = Annotated[
    int,
    typer.Option(
        "--processes", min=0, help="Points trained at once; 0: CPUs divided by lab's threads."
    ),
]
_CACHE = Path("runs") / "lab"


@lab.command(_RUN)
def run_lab(
    lab_file: Annotated[
        Path | None, typer.Argument(metavar="LAB.toml", help="The laboratory.")
    ] = None,
    run_file: Annotated[str, option("The run, instead of the file's.", "RUN.toml", "--run")] = "",
    settings: Annotated[
        list[str] | None,
        option(
            "Override a value of the run, or of LAB.toml by lab.KEY=VALUE; repeatable.",
            "KEY=VALUE",
            "--set",
        ),
    ] = None,
    sweep: Annotated[
        list[str] | None, option("Try each value, of run or lab.; repeatable.", "KEY=[A,B]")
    ] = None,
    seeds: Annotated[str, option("Seeds of every point.", "N,N")] = "",
    islands: Annotated[int | None, option("Equal islands instead of the file's.", "N")] = None,
    plot: Annotated[str, plot_option("the losses")] = "",
    trace: Annotated[
        str, option("Write the one run's timeline, Chrome's JSON.", "PATH", callback=writable)
    ] = "",
    timeline: Annotated[str, plot_option("it", "--timeline")] = "",
    cache: CacheDir = _CACHE,
    processes: Processes = 0,
    json_target: JsonTarget = "",
) -> None:
    """Train a run's islands here, in virtual time, and show what it learns at which cost.

    Model, text, gradients, codecs, outer steps and rounds are the real ones; an inner step takes
    the virtual time that LAB.toml says, bytes take that of its links. Islands may differ in speed,
    text, tokens and failures; the table sweep tries values, each with each, for every seed. Every
    key is a flag, too: --set lab.step.skew=0.5.

    Read "held out": loss of the published parameters; "MB moved": sent and received by all
    islands; "busy": of the island that waited most. Finished points are kept: the same command
    goes on where it was killed. diloco lab suite runs the experiments of configs/simulations.

    --trace and --timeline write who computed, sent, fetched and waited when, as diloco sim trace
    does of real and simulated runs; for that a point is trained again. What takes no virtual time,
    such as encoding, is not in it.

    Example: diloco lab run configs/simulations/lab.toml --seeds 1,2,3 --plot lab.png
    """
    from diloco.cli.terminal.timelines import write_timelines
    from diloco.simulations.lab.cache import Cache
    from diloco.simulations.lab.plot import lab_figure
    from diloco.simulations.lab.point import points_of
    from diloco.simulations.lab.report import as_json
    from diloco.simulations.lab.sweep import run_points
    from diloco.simulations.lab.timeline import LabTimeline
    from diloco.system import usable_cpus

    if lab_file is None and not run_file:
        raise ConfigError(
            "nothing to train: diloco lab LAB.toml, or diloco lab run --run RUN.toml --islands 4"
        )
    began = time.monotonic()
    points = points_of(lab_file, _flags(run_file, settings or [], sweep or [], seeds, islands))
    watched = LabTimeline() if trace or timeline else None
    if watched is not None and len(points) > 1:
        raise ConfigError(
            f"--trace and --timeline are of one run, and this is {len(points)}: choose a point, by "
            f"--set and --seeds {points[0].seed}, without [sweep]"
        )
    threads = max(point.lab.threads for point in points)
    num_processes = processes or max(1, usable_cpus() // threads)
    console = notes(json_target)
    with counting(console) as show:
        finished = run_points(
            points, Cache(cache), num_processes=num_processes, show=show, timeline=watched
        )
    results, wall_s = finished.results, time.monotonic() - began
    if plot:
        lab_figure(results).savefig(plot)
    if watched is not None:
        what = f"{lab_file or run_file}, laboratory"
        written = write_timelines(watched.spans, what, trace=trace, picture=timeline)
        console.print(f"written: {written}")
    if json_target != "-":
        _show(results, finished.num_cached, plot, cache)
    write_json(
        as_json(points[0].lab.model_dump(mode="json"), results, finished.num_cached, wall_s),
        json_target,
    )


def _flags(
    run_file: str, settings: list[str], sweep: list[str], seeds: str, islands: int | None
) -> Flags:
    """Read what the flags say.

    Raises:
        ConfigError: If a sweep is not KEY=[A,B].
    """
    from diloco.simulations.lab.config import LAB, Flags

    overrides = [text.removeprefix(LAB) for text in settings if text.startswith(LAB)]
    if run_file:
        overrides.append(f"run={json.dumps(run_file)}")
    if islands is not None:
        overrides.append(f"num_islands={islands}")
    if seeds:
        overrides.append(f"seeds=[{seeds}]")
    swept = {}
    for text in sweep:
        key, _, value = text.partition("=")
        try:
            values = tomllib.loads(f"values = {value}")["values"]
        except (tomllib.TOMLDecodeError, KeyError):
            values = None
        if not key or not isinstance(values, list):
            raise ConfigError(
                f"--sweep {text}: write KEY=[A,B], such as outer.inner_steps_per_round=[10,30]"
            )
        swept[key.strip()] = tuple(values)
    of_run = tuple(text for text in settings if not text.startswith(LAB))
    return Flags(tuple(overrides), of_run, swept)


def _show(results: list[Result], num_cached: int, plot: str, cache: Path) -> None:
    """Print the readings of one point, or the points of a sweep."""
    from diloco.simulations.lab.report import (
        READING_COLUMNS,
        point_columns,
        point_rows,
        reading_rows,
    )

    console = output()
    if len(results) == 1:
        print_rows(console, READING_COLUMNS, reading_rows(results[0]))
        console.print(_summary(results[0]))
    else:
        columns, rows = point_columns(results), point_rows(results)
        shown = [c for c in columns if any(row[c.key] not in (None, "", 0.0) for row in rows)]
        print_rows(console, shown, rows)
    if num_cached:
        console.print(f"{num_cached} of the points were found in {cache}")
    if plot:
        console.print(f"picture: {plot}")


def _summary(result: Result) -> str:
    """Say in two lines what a run was."""
    if result["ended"]:
        return f"the run ended early: {result['ended']}"
    steps = ", ".join(f"{name} {count}" for name, count in result["steps"].items())
    busy = ", ".join(f"{share:.1%}" for share in result["busy"].values())
    rate = result["inner_steps"] / result["wall_s"]
    return (
        f"{result['parameters']:,} parameters; inner steps: {steps}; busy: {busy}\n"
        f"{result['rounds']} rounds, {result['failures']} failures; "
        f"{result['wall_s']:.1f} s here, {rate:.1f} inner steps a second"
    )


@lab.command()
def suite(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Only these experiments; none: all but from-scratch."),
    ] = None,
    quick: Annotated[
        bool, flag("Two seeds, short runs, fewer rows: under six minutes.", "--quick")
    ] = False,
    out: Annotated[Path, option("Where RESULTS.md, plots/ and NAME.points.json go.", "DIR")] = Path(
        "runs/lab-suite"
    ),
    judge: Annotated[
        Path | None, option("Train nothing: judge NAME.points.json there.", "DIR", "--judge")
    ] = None,
    cache: CacheDir = _CACHE,
    processes: Processes = 0,
    json_target: JsonTarget = "",
    require: Annotated[
        bool, flag("Exit with 1 if a claim did not reproduce.", "--require")
    ] = False,
) -> None:
    """Run the experiments of configs/simulations/suite and write what reproduced.

    Each is a claim of a paper: loss by H, by islands, by codec, by pruning, by tau and alpha, by
    outer learning rate, by quorum and grace, by failures. Rows train a byte model of 0.13M
    parameters with three seeds, over an hour on two CPUs without other work; those of parity, which
    is about data parallel, one of 0.87M, half an hour of CPU time a seed. Finished points are
    kept: a suite that was killed goes on, and one that was changed trains what has changed.

    Learning from scratch against data parallel takes hours, and runs only where it is named; what
    it came to is kept: diloco lab suite from-scratch --judge simulations/from-scratch

    Read "found": excess of the held-out loss, paired by seed; the verdict is computed from it, and
    RESULTS.md says why we think that a claim did not reproduce.

    Example: diloco lab suite overlap quorum
    """
    from diloco.simulations.lab.cache import Cache
    from diloco.simulations.lab.cost import cost_of
    from diloco.simulations.lab.experiment import FULL, QUICK, load_experiments
    from diloco.simulations.lab.kept import keep_found, read_found
    from diloco.simulations.lab.results import run_suite, write_results
    from diloco.system import usable_cpus

    require_package("diloco lab suite, which draws its results,", "matplotlib")
    began, size = time.monotonic(), QUICK if quick else FULL
    experiments = load_experiments(names or [], size, is_quick=quick)
    console = notes(json_target)
    if judge is not None:
        found, told = read_found(experiments, judge), f"as kept in {judge}"
    else:
        num_processes = processes or usable_cpus()
        console.print(f"{cost_of(experiments, Cache(cache))}, {num_processes} points at a time")
        with counting(console) as show:
            found, num_cached = run_suite(
                experiments, Cache(cache), num_processes=num_processes, show=show
            )
        for each in found:
            keep_found(each, out)
        told = f"{num_cached} points were found in {cache}"
    words = ["diloco lab suite", *(["--quick"] if quick else []), *(names or [])]
    path = write_results(found, size, out, " ".join(words))
    if json_target != "-":
        _show_verdicts(found)
        console.print(f"{path}; {told}; {time.monotonic() - began:.0f} s")
    write_json({**_figures(found), "wall_s": time.monotonic() - began}, json_target)
    if require and any(verdict.has_held is False for each in found for verdict in each.verdicts):
        raise typer.Exit(1)


def _figures(found: Sequence[Found]) -> dict[str, Any]:
    """Give tables and verdicts as JSON values, hence `Any`."""
    from diloco.simulations.lab.results import table_of

    return {
        "experiments": {each.experiment.name: table_of(each) for each in found},
        "verdicts": [
            {
                "experiment": each.experiment.name,
                "targets": list(each.experiment.config.targets),
                "claim": verdict.check.says,
                "found": verdict.found,
                "verdict": verdict.word,
            }
            for each in found
            for verdict in each.verdicts
        ],
    }


def _show_verdicts(found: Sequence[Found]) -> None:
    """Print a line a claim."""
    styles = {"reproduced": "green", "not reproduced": "red", "not run": "dim"}
    rows = []
    for each in found:
        claims = [(verdict.check.says, verdict.found, verdict.word) for verdict in each.verdicts]
        claims += [(part.what, "", "not run") for part in each.experiment.config.not_run]
        targets = ", ".join(each.experiment.config.targets)
        rows += [(targets, *claim, Text(word, styles[word])) for *claim, word in claims]
    output().print(FittedTable.with_rows(["target", "claim", "found", "verdict"], rows))
