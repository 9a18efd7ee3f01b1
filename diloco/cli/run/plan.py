"""`diloco plan`: a run before it starts, what it takes of links and machines, what is better."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from diloco.cli.run import plan_options as options
from diloco.cli.terminal.options import JsonTarget, Overrides, RunFile, plot_option, write_json
from diloco.cli.terminal.progress import answering, counting, notes, output, stoppable, waiting
from diloco.cli.terminal.section_flags import is_typed
from diloco.errors import ConfigError
from diloco.extras import is_installed, missing

if TYPE_CHECKING:  # commands import what they need when they run
    from diloco.config.schema import Config
    from diloco.forecast.forecast import Forecast
    from diloco.simulations.planner.assumptions import Assumptions, PlanOptions
    from diloco.simulations.planner.capacity import Capacity
    from diloco.simulations.planner.measure import MeasuredStep
    from diloco.simulations.planner.penalties import Penalties
    from diloco.simulations.planner.planned import MeasuredPath, Planned
    from diloco.simulations.planner.setting import Grid
    from diloco.simulations.planner.suggestion import Suggestion


@dataclass(frozen=True, slots=True)
class _Measuring:
    """What is timed: inner steps, and the way to an address if one is said."""

    steps: bool
    coordinator: str
    probe: str


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a suggestion is to be: of which settings, at most so much loss, by whose results."""

    grid: Grid
    most_penalty: float
    lab: Sequence[Path]


@dataclass(frozen=True, slots=True)
class _Shown:
    """Which run is shown, and where besides the terminal."""

    run_file: Path
    json_target: str
    plot: str
    ranks_per_host: tuple[str, ...] = ()


def plan(
    context: typer.Context,
    run_file: RunFile,
    json_target: JsonTarget = "",
    overrides: Overrides = None,
    plot: Annotated[str, plot_option("the schedule")] = "",
    step_time: options.StepTimes = None,
    link: options.Links = None,
    bandwidth: options.Bandwidths = None,
    rtt: options.RoundTrips = None,
    syncer_link: options.SyncerLink = "",
    tcp_loss: options.TcpLoss = 0.0,
    tcp_window: options.TcpWindow = "",
    ranks_per_host: options.RanksPerHost = None,
    device: options.Device = "",
    mfu: options.Mfu = None,
    inside_bandwidth: options.InsideBandwidth = "",
    measure: options.Measure = False,
    coordinator: options.CoordinatorAddress = "",
    probe: options.Probe = "",
    syncer_cores: options.SyncerCores = 0,
    syncer_memory: options.SyncerMemory = "",
    syncer_disk: options.SyncerDisk = "",
    syncer_network: options.SyncerNetwork = "",
    syncer_disk_rate: options.SyncerDiskRate = "",
    suggest: options.Suggest = False,
    max_loss: options.MaxLoss = "1%",
    lab: options.LabResults = None,
    inner_steps_per_round: options.Periods = "",
    num_fragments: options.Fragments = "",
    overlap_steps: options.Overlaps = "",
    codecs: options.Codecs = "",
    num_lanes: options.Lanes = "",
) -> None:
    """Show what a run will do, take and last, and what would be better. Nothing is started.

    Fragments, lanes, schedule, traffic, memory and disk follow from the file alone. Its time does
    from inner steps and links, which are told, measured, or estimated as the plan says: the run is
    simulated, the real schedule, rounds and codecs under a virtual clock. Next to it stand
    all-reduces of gradients on the same links, as diloco baseline makes them.

    Read "utilised": share of the time in inner steps; "mean" and "peak": bandwidth of payloads over
    the run, and while something moves; "merges": share of the time for which a syncer does, with
    the cores and the disk that --syncer-cores and --syncer-disk-rate tell.

    --suggest tries other settings and prints the --set to type: the earliest end among those that
    cost at most --max-loss, by what papers and your laboratory measured, then what decides: the
    input that changes most if it is 20 % off.

    Text and warm start are opened as far as they are on this machine, and what is wrong with them
    is said below the plan.

    Example: diloco plan configs/runs/demo.toml --step-time 0.2s --link thin-5M-60ms --suggest
    """
    from diloco.config.load import load_config

    def load(more: Sequence[str]) -> Config:
        return load_config(run_file, [*(overrides or ()), *more])

    if not is_installed("simpy"):
        _show_without_simulation(context, load(()), json_target)
        return
    from diloco.simulations.planner.assumptions import PlanOptions
    from diloco.simulations.planner.capacity import Capacity
    from diloco.simulations.planner.setting import Grid

    _check_combination(context, "--measure", measure, options.OF_MEASURE)
    _check_combination(context, "--suggest", suggest, options.OF_SUGGEST)
    wanted = None
    if suggest:
        grid = Grid.read(inner_steps_per_round, num_fragments, overlap_steps, codecs, num_lanes)
        wanted = _Wanted(grid, _share("--max-loss", max_loss), lab or ())
    told = PlanOptions(
        step_times=step_time or (),
        links=link or (),
        bandwidths=bandwidth or (),
        round_trips=rtt or (),
        syncer_link=syncer_link,
        tcp_loss=tcp_loss,
        tcp_window=tcp_window,
        inside_bandwidth=inside_bandwidth,
        device=device,
        reached=mfu,
    )
    capacity = Capacity.read(
        syncer_cores, syncer_memory, syncer_disk, syncer_network, syncer_disk_rate
    )
    needing = [*_typed(context, options.OF_SYNCERS), *(["--suggest"] if suggest else [])]

    measuring = _Measuring(measure, coordinator, probe)
    _show_plan(
        load,
        told,
        measuring,
        capacity,
        wanted,
        needing,
        _Shown(run_file, json_target, plot, tuple(ranks_per_host or ())),
    )


def _show_plan(
    load: Callable[[Sequence[str]], Config],
    told: PlanOptions,
    measuring: _Measuring,
    capacity: Capacity,
    wanted: _Wanted | None,
    needing: Sequence[str],
    shown: _Shown,
) -> None:
    """Print what follows from the file, predict, and suggest; refuse what can be before all that.

    Args:
        load: The run with some values of --set.
        told: Of machines and links.
        measuring: What is timed.
        capacity: Of the syncers' machine.
        wanted: What is suggested; None: nothing.
        needing: Options that have no effect where no time is predicted.
        shown: Where it goes.
    """
    from diloco.cli.run.plan_predicted import show_losses, show_planned, show_suggestion
    from diloco.simulations.planner.capacity import check_capacity
    from diloco.simulations.planner.penalties import load_penalties
    from diloco.simulations.planner.planned import assume, plan_run
    from diloco.simulations.planner.suggestion import check_waiting
    from diloco.simulations.planner.unused import check_use

    config = load(())
    check_use(
        config,
        told,
        is_measured=measuring.steps,
        coordinator=measuring.coordinator,
        probe=measuring.probe,
        needing=needing,
    )
    if wanted is not None:
        check_waiting(config)
        penalties = load_penalties(wanted.lab)
    aside, console = notes(shown.json_target), output(shown.json_target)
    foreseen = _show_forecast(config, console, shown.ranks_per_host)
    steps = _measured_steps(config, foreseen, told, aside) if measuring.steps else {}
    path = _measured_path(measuring, aside)
    assumed = assume(config, foreseen, told, steps=steps, path=path)
    assumed = capacity.known_to(assumed, config)
    with waiting(aside, "simulating the run"):
        planned = plan_run(config, foreseen, assumed)
    show_planned(console, planned, foreseen)
    if config.run.state:
        show_losses(console, config, planned, capacity.network_bps)
    if planned.prediction is None and needing:
        raise ConfigError(f"{needing[0]}: no time is predicted: {planned.why_not}")
    if wanted is not None:
        suggestion = _suggested(load, assumed, wanted, penalties, aside)
        planned = replace(planned, suggestion=suggestion)
        show_suggestion(console, suggestion, str(shown.run_file))
    if shown.plot:
        _draw(config, planned, shown.plot, console)
    write_json({**foreseen.as_dict(), **planned.as_dict()}, shown.json_target)
    if planned.prediction is not None:
        check_capacity(config, planned.prediction.syncers, capacity)
    _open_inputs(config, is_aside=shown.json_target == "-")


def _show_without_simulation(context: typer.Context, config: Config, json_target: str) -> None:
    """Print what follows from the file; refuse options that a prediction needs."""
    of_the_file = ("run_file", "json_target", "overrides")
    wanted = _typed(context, [name for name in context.params if name not in of_the_file])
    if wanted:
        raise missing(wanted[0], "simpy", "leave it out: all that follows from the file is shown")
    console = output(json_target)
    foreseen = _show_forecast(config, console)
    console.print(f"\n{missing('A prediction of its time', 'simpy')}")
    write_json(foreseen.as_dict(), json_target)
    _open_inputs(config, is_aside=json_target == "-")


def _show_forecast(
    config: Config, console: Console, ranks_per_host: Sequence[str] = ()
) -> Forecast:
    """Print what follows from the file alone."""
    from diloco.cli.run.plan_tables import show_forecast
    from diloco.config.island import read_ranks_per_host
    from diloco.forecast.disk import check_directories
    from diloco.forecast.forecast import forecast

    check_directories(config)
    foreseen = forecast(config, read_ranks_per_host(ranks_per_host, config.islands))
    show_forecast(console, foreseen)
    if problem := config.outer.sparse_problem:
        console.print(f"\nWarning: {problem}")
    return foreseen


def _draw(config: Config, planned: Planned, plot: str, console: Console) -> None:
    from diloco.island.layout import build_schedule
    from diloco.simulations.planner.plot import plan_figure

    schedule = build_schedule(config.outer, config.run.inner_steps)
    plan_figure(config.run.name, schedule, planned.prediction).savefig(plot)
    console.print(f"\npicture: {plot}")


def _open_inputs(config: Config, *, is_aside: bool) -> None:
    """Say what text and warm start are, as far as they are here."""
    from diloco.launch.rank.inputs import open_inputs

    with waiting(notes(), "opening text and warm start"):
        lines = answering(lambda: open_inputs(config, may_download=False))
    for line in lines:
        typer.echo(line, err=is_aside)


def _typed(context: typer.Context, names: Sequence[str]) -> list[str]:
    """Give those options that were typed, as they are."""
    return [f"--{name.replace('_', '-')}" for name in names if is_typed(context, name)]


def _check_combination(
    context: typer.Context, option: str, is_given: bool, names: Sequence[str]
) -> None:
    """Refuse options that mean something with another one only."""
    if not is_given and (alone := _typed(context, names)):
        raise ConfigError(f"{', '.join(alone)}: of {option}, without which nothing changes: add it")


def _measured_steps(
    config: Config, foreseen: Forecast, told: PlanOptions, aside: Console
) -> dict[str, MeasuredStep]:
    """Time inner steps of the islands of which nothing was told, one after the other."""
    from diloco.simulations.planner.assumptions import told_steps
    from diloco.simulations.planner.measure import measure_step

    steps = {}
    with stoppable() as request:
        for island in sorted(config.islands.keys() - told_steps(config, told)):
            with waiting(aside, f"timing inner steps of island {island}"):
                planned = foreseen.ranks[island]
                steps[island] = measure_step(config, island, planned, request.check)
    return steps


def _measured_path(measuring: _Measuring, aside: Console) -> MeasuredPath | None:
    """Time the way to the receiver at the coordinator's site, or to the coordinator."""
    from diloco.simulations.planner.measure import measure_rate_bps, measure_rtt_s
    from diloco.simulations.planner.planned import MeasuredPath

    address, probe = measuring.coordinator or measuring.probe, measuring.probe
    if not address:
        return None
    with waiting(aside, f"timing the way to {address}"):
        rtt_s = measure_rtt_s(address)
        return MeasuredPath(rtt_s, measure_rate_bps(probe) if probe else 0.0)


def _suggested(
    load: Callable[[Sequence[str]], Config],
    assumed: Assumptions,
    wanted: _Wanted,
    penalties: Penalties,
    aside: Console,
) -> Suggestion:
    from diloco.simulations.planner.suggestion import Search

    with counting(aside) as show:
        return Search(load, assumed, wanted.grid).suggest(
            penalties, wanted.most_penalty, lambda done, total: show("settings", done, total)
        )


def _share(option: str, text: str) -> float:
    """Read a percentage, over 0."""
    try:
        value = float(text.removesuffix("%")) / 100 if text.endswith("%") else -1.0
    except ValueError:
        value = -1.0
    if not 0 < value < 1:
        raise ConfigError(f"{option} {text}: give a percentage over 0, such as 0.5%")
    return value
