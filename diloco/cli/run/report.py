"""`diloco report`: summary and plots of a run that has ended, also of loops of your own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from diloco.cli.terminal.options import AsJson, Overrides, RunFile
from diloco.cli.terminal.progress import notes, output, waiting
from diloco.errors import ConfigError
from diloco.extras import is_installed
from diloco.state_dir import StateDir, holder

if TYPE_CHECKING:  # commands import what they need when they run
    from diloco.config.schema import Config
    from diloco.report.summary import Summary


def report(run_file: RunFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Sum up a run that has ended, and draw its plots, as `diloco local` does at its end.

    On the coordinator's machine: it reads coordinator.state_dir, and the events of all islands in
    telemetry.dir, those of other machines copied there. Writes summary.json and plots to
    coordinator.state_dir; the exit code is 1 if something is wrong with the run.

    Example: diloco report RUN.toml
    """
    from diloco.config.load import load_config

    config = load_config(run_file, overrides or ())
    _check_ended(config, str(run_file))
    show_report(config, output("-" if as_json else ""), {}, as_json=as_json)


def _check_ended(config: Config, run_file: str) -> None:
    """Refuse a run that is under way, or whose events are not here.

    Raises:
        ConfigError: Saying what to do.
    """
    state = StateDir(Path(config.coordinator.state_dir))
    if not state.journal.exists():
        raise ConfigError(
            f"there is no run in {state.root}: type it on the coordinator's machine, with its "
            f"--set coordinator.state_dir"
        )
    if (pid := holder(state.coordinator_lock)) is not None:
        raise ConfigError(
            f"the run in {state.root} is under way (coordinator: process {pid}): watch it with "
            f"diloco status, and type this once it has ended"
        )
    directory = config.telemetry_dir
    away = [i for i in sorted(config.islands) if not (directory / f"events-{i}-0.jsonl").exists()]
    if away and not config.outer.is_on_arrival:
        files = " ".join(f"events-{island}-*.jsonl" for island in away)
        raise ConfigError(
            f"{directory} has no events of {', '.join(away)}: copy {files} there, from telemetry."
            f"dir of those sites, then type diloco report {run_file}"
        )


def show_report(
    config: Config, console: Console, extra: Mapping[str, Any], *, as_json: bool
) -> None:
    """Check and say what a run was; `extra` goes to summary.json, too.

    Raises:
        Exit: If something is wrong with the run.
    """
    from diloco.durable import write_durably
    from diloco.report.summary import read_events
    from diloco.telemetry.plots import write_plots

    state_dir = Path(config.coordinator.state_dir)
    events = read_events(config.telemetry_dir, config.islands)
    with waiting(console, "recomputing the last versions from their contributions"):
        summary = _summary(config, events)
    path = state_dir / "summary.json"
    text = json.dumps({**summary.as_dict(), **extra}, indent=2)
    write_durably(path, [text.encode(), b"\n"])
    if as_json:
        typer.echo(text)
    plots: list[Path] = []
    without = "; pip install 'diloco[plots]' has plots drawn, too"
    if is_installed("matplotlib"):
        without = ""
        with waiting(console, "drawing plots"):
            plots = write_plots(events, state_dir / "plots")
    console.print(summary.as_text(), highlight=False, soft_wrap=False)
    shown, what = ", ".join(map(str, [path, *plots])), "summary and plots" if plots else "summary"
    console.print(f"{what}: {shown}{without}", highlight=False, markup=False, soft_wrap=True)
    if summary.problems:
        notes().print(f"The run has ended, but: {'; '.join(summary.problems)}", style="red")
        raise typer.Exit(1)


def _summary(config: Config, events: Mapping[str, Sequence[Mapping[str, Any]]]) -> Summary:
    from diloco.checkpoint.run_checkpoints import open_journal
    from diloco.checkpoint.stores import state_by_fragment
    from diloco.forecast.build import link_profile
    from diloco.island.layout import build_schedule
    from diloco.outer.fragments import Plan
    from diloco.report.summary import summarise
    from diloco.versions.store import FragmentStore

    state = StateDir(Path(config.coordinator.state_dir))
    with open_journal(state.journal) as journal:
        alarms = [entry.content for entry in journal.audit_rows() if entry.kind == "alarm"]
    plan = Plan.from_json(state.syncers[0].plan.read_text())
    stored = state_by_fragment(state, plan)
    retained = config.outer.retained_versions
    return summarise(
        config,
        plan,
        build_schedule(config.outer, config.run.inner_steps),
        stores=[
            FragmentStore(stored[fragment.fragment_id].store, fragment, retained)
            for fragment in plan.fragments
        ],
        events=events,
        link=link_profile(config),
        alarms=alarms,
    )
