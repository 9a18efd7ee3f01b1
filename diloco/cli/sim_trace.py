"""`diloco sim trace`: timelines of simulated and of real runs, and how they are written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli.options import JsonTarget, Overrides, existing_place, write_json

if TYPE_CHECKING:  # commands import what they need when they run
    from rich.console import Console

    from simulations.timeline import Span

_PICTURES = (".png", ".svg", ".pdf")


def register(sim: typer.Typer) -> None:
    """Add the command of this module to `diloco sim`."""
    sim.command()(trace)


def trace(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN.toml|DIR",
            help="A run file, to simulate; or the coordinator.state_dir of a run that was made.",
        ),
    ],
    out: Annotated[
        str,
        typer.Option(
            "--out",
            metavar="PATH",
            callback=existing_place,
            help="Write the trace, Chrome's JSON.",
        ),
    ] = "",
    plot: Annotated[
        str, typer.Option("--plot", metavar="PATH", help="Draw it, as .png, .svg or .pdf.")
    ] = "",
    step_time: Annotated[
        str,
        typer.Option("--step-time", metavar="TIME", help='Of an inner step, such as "200ms".'),
    ] = "",
    link: Annotated[
        str, typer.Option("--link", metavar="NAME", help="Of configs/links, not the file's own.")
    ] = "",
    rounds: Annotated[
        int, typer.Option("--rounds", min=0, help="Simulate H inner steps so often; 0: all.")
    ] = 0,
    seed: Annotated[int, typer.Option("--seed", help="Of jitter and loss.")] = 0,
    begin: Annotated[
        str, typer.Option("--from", metavar="TIME", help="Leave out what ended before.")
    ] = "0s",
    end: Annotated[
        str, typer.Option("--to", metavar="TIME", help="Leave out what began later.")
    ] = "",
    overrides: Overrides = None,
    json_target: JsonTarget = "",
) -> None:
    """Trace a run, simulated or real: who did what when, by island, fragment and lane.

    Of a run file the simulator makes the timeline, with inner steps of --step-time; of a directory
    it is read from the events that the run has kept there. Both give the same trace, which
    ui.perfetto.dev and chrome://tracing open, and the same picture, so that they can be laid side
    by side.

    compute, gather, wait and merge are the training thread's; encode, send, fetch and decode are
    a fragment's, behind training; merge of a syncer is from the close of a round until the
    version is durable. Times of a real run are of its machines' wall clocks.
    """
    from rich.console import Console

    from diloco.cli.progress import waiting
    from diloco.errors import ConfigError
    from simulations.trace import shown

    if not (out or plot or json_target):
        raise ConfigError("nothing would be written: add --out trace.json, or --plot timeline.png")
    check_picture("--plot", plot)
    if run.is_dir() and (step_time or link or rounds or overrides):
        raise ConfigError(
            f"{run} is a run that was made: --step-time, --link, --rounds and --set are of runs to "
            f"simulate; give the run file in its place"
        )
    console = Console(stderr=True, quiet=json_target == "-")
    with waiting(console, f"{'reading' if run.is_dir() else 'simulating'} {run}"):
        spans = (
            _real_spans(run)
            if run.is_dir()
            else _simulated_spans(run, overrides or (), step_time, link, rounds, seed)
        )
        spans = shown(spans, seconds("--from", begin), seconds("--to", end) if end else None)
    kind = "real" if run.is_dir() else "simulated"
    written = write_spans(spans, f"{run}, {kind}", trace=out, picture=plot)
    _show_sums(spans, json_target, written, kind)


def check_picture(option: str, path: str) -> None:
    """Refuse a picture in a format that there is not; empty: none.

    Raises:
        ConfigError: Naming the option.
    """
    from diloco.errors import ConfigError

    if path and Path(path).suffix not in _PICTURES:
        raise ConfigError(f"{option} {path}: give a path that ends with .png, .svg or .pdf")


def write_spans(spans: Sequence[Span], what: str, *, trace: str, picture: str) -> str:
    """Write the timeline of a run, named `what`, where there is a path; returns the paths."""
    from simulations.plots import write_timeline
    from simulations.trace import chrome_trace

    if trace:
        text = json.dumps(chrome_trace(spans, run=what))
        Path(trace).write_text(text + "\n", encoding="utf-8")
    if picture:
        write_timeline(spans, what, Path(picture))
    return ", ".join(path for path in (trace, picture) if path)


def seconds(option: str, text: str) -> float:
    """Read a duration such as "200ms".

    Raises:
        ConfigError: Naming the option.
    """
    from diloco.errors import ConfigError
    from transport.units import parse_duration

    try:
        return parse_duration(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text}: {error}") from error


def _real_spans(directory: Path) -> list[Span]:
    from diloco.config.load import load_config
    from diloco.errors import ConfigError
    from diloco.launch.state_dir import StateDir
    from simulations.trace import run_spans

    resolved = StateDir(directory).resolved
    if not resolved.exists():
        raise ConfigError(
            f"{directory} is no run: it has no {resolved.name}. Give the coordinator.state_dir of "
            f"a run, or a run file to simulate"
        )
    return run_spans(load_config(resolved).telemetry_dir)


def _simulated_spans(
    run_file: Path, overrides: Sequence[str], step_time: str, link: str, rounds: int, seed: int
) -> Sequence[Span]:
    from diloco.config.load import load_config
    from diloco.errors import ConfigError
    from simulations.lanes import simulated_spans

    if not step_time:
        raise ConfigError(
            f"--step-time is missing: how long an inner step of {run_file} takes, such as "
            f"--step-time 200ms; a run that was made says it (undisturbed step)"
        )
    overrides = [*overrides, *([f"transport.link={link}"] if link else [])]
    config = load_config(run_file, overrides)
    step_s = dict.fromkeys(config.islands, seconds("--step-time", step_time))
    return simulated_spans(config, step_s, rounds=rounds, seed=seed)


def _show_sums(spans: Sequence[Span], json_target: str, written: str, kind: str) -> None:
    """Say how much of the time each island spent on what."""
    from rich.console import Console
    from rich.table import Table

    from simulations.trace import sums_of

    sums = sums_of(spans)
    console: Console = Console(quiet=json_target == "-", highlight=False)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("who", "what"):
        table.add_column(heading)
    for heading in ("times", "seconds", "share"):
        table.add_column(heading, justify="right")
    for row in sums:
        cells = (f"{row['times']:,d}", f"{row['seconds']:.3f}", f"{row['share']:.1%}")
        table.add_row(str(row["island"]), str(row["kind"]), *cells)
    console.print(table)
    if written:
        console.print(f"written: {written}", soft_wrap=True)
    write_json({"kind": kind, "sums": sums}, json_target)
