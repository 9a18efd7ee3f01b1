"""`diloco plan`: a run before it starts, what it takes of links and machines, what is better."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli.bench import bench_console
from diloco.cli.options import JsonTarget, Overrides, RunFile, write_json

if TYPE_CHECKING:  # commands import what they need when they run
    from rich.console import Console

    from diloco.config.schema import Config
    from diloco.launch.forecast import Forecast
    from simulations.planner.assumptions import Assumptions, Told
    from simulations.planner.measure import MeasuredStep
    from simulations.planner.planned import MeasuredPath
    from simulations.planner.setting import Grid
    from simulations.planner.suggestion import Suggestion

_KNOWN = "What is known of machines and links"
_MEASURE = "Measure what is not known"
_SYNCERS = "Machine of the syncers: needing more than it has is refused"
_SUGGEST = "Suggest"


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("plan")(plan)


def plan(
    run_file: RunFile,
    json_target: JsonTarget = "",
    overrides: Overrides = None,
    plot: Annotated[
        str, typer.Option(metavar="PATH", help="Draw the schedule, as .png, .svg or .pdf.")
    ] = "",
    step_time: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[ISLAND=]TIME",
            help="Of an inner step: eu=0.8s, or 0.8s of all others; repeatable.",
            rich_help_panel=_KNOWN,
        ),
    ] = None,
    link: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[ISLAND=]PROFILE",
            help="Of configs/links, in place of transport.link; repeatable.",
            rich_help_panel=_KNOWN,
        ),
    ] = None,
    bandwidth: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[ISLAND=]RATE",
            help="Both ways, in place of the profile's: 200Mbit/s; repeatable.",
            rich_help_panel=_KNOWN,
        ),
    ] = None,
    rtt: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[ISLAND=]TIME",
            help="Round trip, in place of the profile's: 80ms; repeatable.",
            rich_help_panel=_KNOWN,
        ),
    ] = None,
    syncer_link: Annotated[
        str,
        typer.Option(
            metavar="PROFILE",
            help="Line of the syncers' site, which islands share; left out: no bottleneck.",
            rich_help_panel=_KNOWN,
        ),
    ] = "",
    tcp_loss: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            min=0.0,
            max=0.999,
            help="Packets lost, which bound a connection of TCP (Mathis); 0: no bound.",
            rich_help_panel=_KNOWN,
        ),
    ] = 0.0,
    tcp_window: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Most that a connection has on its way: 4MiB; left out: no bound.",
            rich_help_panel=_KNOWN,
        ),
    ] = "",
    device: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Whose peak an estimated step has: H100, A100, cpu ...; left out: H100 for "
            "islands.NAME.device = cuda, else cpu.",
            rich_help_panel=_KNOWN,
        ),
    ] = "",
    mfu: Annotated[
        float,
        typer.Option(
            metavar="SHARE", help="Of that peak which is reached.", rich_help_panel=_KNOWN
        ),
    ] = 0.4,
    inside_bandwidth: Annotated[
        str,
        typer.Option(
            metavar="RATE",
            help="Of a rank inside its island, for all-reduces; left out: no bottleneck.",
            rich_help_panel=_KNOWN,
        ),
    ] = "",
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Time real inner steps here, of every island without --step-time.",
            rich_help_panel=_MEASURE,
        ),
    ] = False,
    coordinator: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="With --measure: time the round trip from here to there.",
            rich_help_panel=_MEASURE,
        ),
    ] = "",
    probe: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="With --measure: time the rate from here to a receiver there, started as "
            'python -m diloco.bench.wan_end \'{"do": "receive", "kind": "grpc", "host": '
            '"0.0.0.0"}\'; it answers everybody, so stop it afterwards.',
            rich_help_panel=_MEASURE,
        ),
    ] = "",
    syncer_cores: Annotated[
        int,
        typer.Option(metavar="N", min=0, help="CPU cores; 0: any.", rich_help_panel=_SYNCERS),
    ] = 0,
    syncer_memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Such as 64GiB.", rich_help_panel=_SYNCERS)
    ] = "",
    syncer_disk: Annotated[
        str, typer.Option(metavar="SIZE", help="Such as 2TB.", rich_help_panel=_SYNCERS)
    ] = "",
    syncer_network: Annotated[
        str, typer.Option(metavar="RATE", help="Such as 10Gbit/s.", rich_help_panel=_SYNCERS)
    ] = "",
    suggest: Annotated[
        bool,
        typer.Option(
            "--suggest",
            help="Search H, P, tau, codec and lanes for the earliest end.",
            rich_help_panel=_SUGGEST,
        ),
    ] = False,
    max_loss: Annotated[
        str,
        typer.Option(
            metavar="PERCENT",
            help="Most that settings may cost of the loss.",
            rich_help_panel=_SUGGEST,
        ),
    ] = "1%",
    lab: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="RESULT.json",
            help="Losses of your own model, which go before others': a list points of h, m, "
            "codec, tau, loss; repeatable.",
            rich_help_panel=_SUGGEST,
        ),
    ] = None,
    inner_steps_per_round: Annotated[
        str,
        typer.Option(
            metavar="H,H", help="Values to try; left out: a grid.", rich_help_panel=_SUGGEST
        ),
    ] = "",
    num_fragments: Annotated[
        str, typer.Option(metavar="P,P", help="Values to try.", rich_help_panel=_SUGGEST)
    ] = "",
    overlap_steps: Annotated[
        str, typer.Option(metavar="TAU,TAU", help="Values to try.", rich_help_panel=_SUGGEST)
    ] = "",
    codecs: Annotated[
        str,
        typer.Option(metavar="NAME,NAME", help="To try, both ways.", rich_help_panel=_SUGGEST),
    ] = "",
    num_lanes: Annotated[
        str, typer.Option(metavar="N,N", help="Values to try.", rich_help_panel=_SUGGEST)
    ] = "",
) -> None:
    """Show what a run will do, take and last, and what would be better. Nothing is started.

    Fragments, lanes, schedule, traffic, memory and disk follow from the file alone. Its time does
    from inner steps and links, which are told, measured, or estimated as the plan says: the run is
    simulated, the real schedule, rounds and codecs under a virtual clock. Beside it stand
    all-reduces of gradients on the same links, as diloco baseline makes them.

    Read "utilised": share of the time in inner steps; "mean" and "peak": bandwidth of payloads over
    the run, and while something moves; "cores": what a syncer merges for, of every second.

    --suggest tries other settings and prints the --set to type: the earliest end among those that
    cost at most --max-loss, by what papers and your laboratory measured, then what decides: the
    input that changes most if it is 20 % off.

    Text and warm start are opened as far as they are on this machine, and what is wrong with them
    is said below the plan.
    """
    from rich.console import Console

    from diloco.cli.plan_predicted import show_planned, show_suggestion
    from diloco.cli.plan_tables import show_forecast
    from diloco.cli.progress import waiting
    from diloco.config.load import load_config
    from diloco.errors import ConfigError
    from diloco.launch.disk import insist_on_directories
    from diloco.launch.forecast import forecast
    from diloco.launch.inputs import open_inputs
    from diloco.sync.layout import build_schedule
    from simulations.planner.assumptions import Told
    from simulations.planner.capacity import Capacity, insist_on_capacity
    from simulations.planner.planned import assume, plan_run
    from simulations.planner.plot import insist_on_format, write_plot
    from simulations.planner.setting import Grid

    if plot:
        insist_on_format(plot)
    if (coordinator or probe) and not measure:
        raise ConfigError("--coordinator and --probe say what --measure measures: give it, too")
    told = Told(
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
    capacity = Capacity.read(syncer_cores, syncer_memory, syncer_disk, syncer_network)
    grid = Grid.read(inner_steps_per_round, num_fragments, overlap_steps, codecs, num_lanes)

    def load(more: Sequence[str]) -> Config:
        return load_config(run_file, [*(overrides or ()), *more])

    config = load(())
    insist_on_directories(config)
    foreseen = forecast(config)
    notes = bench_console(json_target)
    steps = _measured_steps(config, foreseen, told, notes) if measure else {}
    path = _measured_path(coordinator, probe, notes) if coordinator or probe else None
    console = Console(highlight=False, soft_wrap=True, quiet=json_target == "-")
    show_forecast(console, foreseen)
    assumed = assume(config, foreseen, told, steps=steps, path=path)
    planned = plan_run(config, foreseen, assumed)
    show_planned(console, planned, foreseen)
    if suggest:
        if planned.prediction is None:
            raise ConfigError(f"--suggest: no time is predicted: {planned.why_not}")
        most = _share("--max-loss", max_loss)
        suggestion = _suggested(load, assumed, grid, most, lab or (), notes)
        planned = replace(planned, suggestion=suggestion)
        show_suggestion(console, suggestion, str(run_file))
    if plot:
        schedule = build_schedule(config.outer, config.run.inner_steps)
        write_plot(config.run.name, schedule, planned.prediction, Path(plot))
        console.print(f"\npicture: {plot}", markup=False)
    write_json({**foreseen.as_dict(), **planned.as_dict()}, json_target)
    if planned.prediction is not None:
        insist_on_capacity(config, planned.prediction.syncers, capacity)
    with waiting(Console(stderr=True), "opening text and warm start"):
        lines = open_inputs(config, may_download=False)
    for line in lines:
        typer.echo(line, err=json_target == "-")


def _measured_steps(
    config: Config, foreseen: Forecast, told: Told, notes: Console
) -> dict[str, MeasuredStep]:
    """Time inner steps of the islands of which nothing was told, one after the other."""
    from diloco.cli.progress import waiting
    from diloco.launch.ending import Interrupted, heeding_signals
    from simulations.planner.assumptions import told_steps
    from simulations.planner.measure import measure_step

    steps = {}
    try:
        with heeding_signals() as request:
            for island in sorted(config.islands.keys() - told_steps(config, told)):
                with waiting(notes, f"timing inner steps of island {island}"):
                    planned = foreseen.ranks[island]
                    steps[island] = measure_step(config, island, planned, request.check)
    except Interrupted as interrupted:
        raise typer.Exit(interrupted.exit_code) from None
    return steps


def _measured_path(coordinator: str, probe: str, notes: Console) -> MeasuredPath:
    """Time the way to the coordinator, or to the receiver at its site."""
    from diloco.cli.progress import waiting
    from simulations.planner.measure import measure_rate_bps, measure_rtt_s
    from simulations.planner.planned import MeasuredPath

    with waiting(notes, f"timing the way to {coordinator or probe}"):
        rtt_s = measure_rtt_s(coordinator or probe)
        return MeasuredPath(rtt_s, measure_rate_bps(probe) if probe else 0.0)


def _suggested(
    load: Callable[[Sequence[str]], Config],
    assumed: Assumptions,
    grid: Grid,
    most_penalty: float,
    lab: Sequence[Path],
    notes: Console,
) -> Suggestion:
    from diloco.cli.progress import counting
    from simulations.planner.penalties import load_penalties
    from simulations.planner.suggestion import Search

    penalties = load_penalties(lab)
    with counting(notes) as show:
        return Search(load, assumed, grid).suggest(
            penalties, most_penalty, lambda done, total: show("settings", done, total)
        )


def _share(option: str, text: str) -> float:
    """Read a percentage, over 0."""
    from diloco.errors import ConfigError

    try:
        value = float(text.removesuffix("%")) / 100 if text.endswith("%") else -1.0
    except ValueError:
        value = -1.0
    if not 0 < value < 1:
        raise ConfigError(f"{option} {text}: give a percentage over 0, such as 0.5%")
    return value
