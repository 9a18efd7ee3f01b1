"""Islands that fail, join and leave in a simulated run: what is told of it, and what it cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console

from diloco.cli.terminal.fitted_table import FittedTable
from diloco.cli.terminal.options import option
from diloco.errors import ConfigError
from diloco.transport.units import format_duration, parse_duration

if TYPE_CHECKING:  # commands import what they need when they run
    from diloco.simulations.engine.lives import Absence, Failures
    from diloco.simulations.runs.run_model import SimulatedRun

_PANEL = "Islands that fail, join and leave, of a run to simulate"

MeanTimeBetween = Annotated[
    str,
    option(
        "Of an island: mean life between two failures, drawn by --seed.",
        "TIME",
        rich_help_panel=_PANEL,
    ),
]
MeanRepair = Annotated[
    str,
    option(
        "Mean time until it is started again, exponential; 30s.", "TIME", rich_help_panel=_PANEL
    ),
]
Shape = Annotated[
    float,
    option(
        "Weibull shape of lives; 1: exponential, above: they wear out.", "X", rich_help_panel=_PANEL
    ),
]
Away = Annotated[
    list[str] | None,
    option(
        "Away then, and not drawn for; no FROM: it joins late, no TO: it leaves. Repeatable.",
        "ISLAND=FROM..TO",
        rich_help_panel=_PANEL,
    ),
]


def read_failures(mean_time_between: str, mean_repair: str, shape: float) -> Failures | None:
    """Read how islands fail; None: they do not.

    Raises:
        ConfigError: If it cannot be, as in the laboratory's [failures].
    """
    from diloco.config.load import section_with
    from diloco.simulations.engine.lives import Failures, Weibull
    from diloco.simulations.lab.config import FailuresConfig

    told = {"mean_time_between": mean_time_between, "shape": shape}
    told |= {"mean_repair": mean_repair} if mean_repair else {}
    read = section_with(told, FailuresConfig, "failures of islands")
    if not read.mean_time_between:
        return None
    lives = Weibull(read.mean_time_between.seconds, read.shape)
    return Failures(lives, Weibull(read.mean_repair.seconds))


def read_absences(texts: Sequence[str]) -> dict[str, list[Absence]]:
    """Read when islands are away, in the order of time.

    Raises:
        ConfigError: If a text is none.
    """
    from diloco.simulations.engine.lives import Absence

    found: dict[str, list[Absence]] = {}
    for text in texts:
        island, sign, times = text.partition("=")
        begin, dots, end = times.partition("..")
        if not (island and sign and dots and (begin or end)):
            raise ConfigError(f"--away {text}: give ISLAND=FROM..TO, such as east=20s..50s")
        try:
            begin_s = parse_duration(begin) if begin else 0.0
            absence = Absence(begin_s, parse_duration(end)) if end else Absence(begin_s)
        except ValueError as error:
            raise ConfigError(f"--away {text}: {error}") from error
        found.setdefault(island, []).append(absence)
    return {name: sorted(its, key=lambda each: each.begin_s) for name, its in found.items()}


def lost_of(run: SimulatedRun) -> dict[str, Any]:
    """Say what absences cost.

    Returns:
        JSON values: `wall_s`; `stalled_s`, in which no island was in an inner step; `lost`, why
        the run ended early; `islands`, by name `absences`, `away_s`, `lost_steps`, `blocked_s`,
        `rounds`, closed in all, and `rounds_without` it.
    """
    num_rounds = sum(not each.is_flush for each in run.publications)
    islands = {
        name: {
            "absences": len(its),
            "away_s": sum(min(each.end_s, run.wall_s) - each.begin_s for each in its),
            "lost_steps": run.whole[name].lost_steps,
            "blocked_s": run.whole[name].blocked_s,
            "rounds": num_rounds,
            "rounds_without": run.num_without(name),
        }
        for name, its in run.absences.items()
    }
    return {"wall_s": run.wall_s, "stalled_s": run.stalled_s, "lost": run.lost, "islands": islands}


def show_lost(console: Console, lost: Mapping[str, Any]) -> None:
    """Print what absences cost, an island a row."""
    columns: dict[str, Callable[[tuple[str, Mapping[str, Any]]], object]] = {
        "island": lambda of: of[0],
        "times away": lambda of: of[1]["absences"],
        "in all": lambda of: format_duration(of[1]["away_s"]),
        "rounds without": lambda of: f"{of[1]['rounds_without']} of {of[1]['rounds']}",
        "steps lost": lambda of: of[1]["lost_steps"],
        "blocked": lambda of: format_duration(of[1]["blocked_s"]),
    }
    console.print()
    console.print(FittedTable.of(lost["islands"].items(), columns))
    wall_s, stalled_s = lost["wall_s"], lost["stalled_s"]
    console.print(
        f"\nOf {format_duration(wall_s)} no island trained for {format_duration(stalled_s)} "
        f"({stalled_s / wall_s:.1%})."
    )
    if lost["lost"]:
        console.print(f"The run did not come to its end: {lost['lost']}.")
