"""`diloco island` and `diloco plan`: run one site of a run; see a run before it starts."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli.options import Overrides, RunFile

if TYPE_CHECKING:  # commands import what they need when they run
    from rich.console import Console
    from rich.table import Table

    from diloco.config.schema import Config
    from diloco.launch.forecast import ArrivalForecast, Forecast

_LINE_EVERY_S = 30.0


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("island")(island)
    app.command("plan")(plan)


def island(
    run_file: RunFile,
    name: Annotated[
        str, typer.Option("--island", metavar="NAME", help="Which island of the file this is.")
    ],
    coordinator: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Where the coordinator listens; left out: coordinator.address of the file, or "
            "what a coordinator on this machine recorded in state_dir.",
        ),
    ] = "",
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Directory of events and logs; left out: telemetry of the file."
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Insist that a valid checkpoint of this island is here, and say which; whether "
            "the run is resumed, and where, is the coordinator's word.",
        ),
    ] = False,
    nnodes: Annotated[
        int | None, typer.Option(metavar="N", help="Hosts of this island; left out: this one.")
    ] = None,
    node_rank: Annotated[
        int, typer.Option(metavar="I", help="This one of them, from 0; host 0 has the first ranks.")
    ] = 0,
    rdzv: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="Where the hosts meet: an address of host 0, a free port."
        ),
    ] = "",
    overrides: Overrides = None,
) -> None:
    """Train one island: starts its ranks on this host and ends when the run is over.

    Ranks that fail (exit codes 20 and 40, a crash, a signal) are started again, as often as
    islands.NAME.max_restarts says; the island then returns to the run. An island of several hosts:
    the same command on each, with --nnodes, --node-rank and --rdzv.

    Ctrl-C or SIGTERM ends the ranks in order, without a checkpoint, and this command with them; a
    second one ends it at once. To stop the whole run with a checkpoint, stop its coordinator.

    Under torchrun or srun (RANK, WORLD_SIZE and MASTER_ADDR are set) it is one rank of that job
    and starts nothing, nor does it restart anything.
    """
    from diloco.cli.doctor import tell_at_start
    from diloco.config.load import load_config
    from diloco.launch.address import find_coordinator
    from diloco.launch.island import run_island
    from diloco.launch.mirror import Mirror
    from diloco.launch.place import Place
    from diloco.launch.security import INSECURE_WARNING

    config = load_config(run_file, overrides or (), island=name)
    place = Place.of(config.island.ranks, nnodes=nnodes, node_rank=node_rank, rdzv=rdzv)
    address = find_coordinator(config, coordinator)
    directory = output or config.telemetry_dir
    if config.checkpoint.mirror and os.environ.get("RANK", "0") == "0":
        Mirror(config.checkpoint.mirror, name).probe()
    if resume:
        typer.echo(_found_text(config))
    if config.transport.insecure:
        typer.echo(f"warning: {INSECURE_WARNING}", err=True)
    tell_at_start(address)
    typer.echo(f"island {name} goes to the coordinator at {address}; logs and events: {directory}")
    with _showing(config, name, address):
        code = run_island(config, name, address, directory, place)
    if code == 0:
        typer.echo(f"island {name} is done: the run has finished, or was stopped at a checkpoint")
    raise typer.Exit(code)


def plan(
    run_file: RunFile,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead, names of the tensors included.")
    ] = False,
    overrides: Overrides = None,
) -> None:
    """Show what a run will do: fragments, lanes, bytes, schedule. Nothing is started.

    Text and warm start are opened as far as they are on this machine, and what is wrong with them
    is said below the plan.
    """
    from rich.console import Console

    from diloco.cli.progress import waiting
    from diloco.config.load import load_config
    from diloco.launch.disk import insist_on_directories
    from diloco.launch.forecast import forecast
    from diloco.launch.inputs import open_inputs

    config = load_config(run_file, overrides or ())
    insist_on_directories(config)
    planned = forecast(config)
    if as_json:
        typer.echo(json.dumps(planned.as_dict(), indent=2))
    else:
        _show(planned)
    with waiting(Console(stderr=True), "opening text and warm start"):
        lines = open_inputs(config, may_download=False)
    for line in lines:
        typer.echo(line, err=as_json)


@contextlib.contextmanager
def _showing(config: Config, name: str, address: str) -> Iterator[None]:
    """Show where the island stands, as the coordinator has heard it, while the island lives."""
    from rich.console import Console

    from diloco.cli.progress import waiting
    from diloco.cli.tables import island_text
    from diloco.errors import CoordinatorUnavailable
    from diloco.launch.security import Security
    from diloco.launch.status import ask_standing
    from diloco.sync.io_thread import IoThread
    from transport.identity import Role

    if "RANK" in os.environ:  # one rank of a job, whose launcher shows what it wants
        yield
        return
    security = Security.of(config, Role.ISLAND, name).knowing(address)
    transport = security.transport(address, Role.COORDINATOR)
    io = IoThread()

    def tell() -> str:
        try:
            standing = io.run(ask_standing(transport, name))
        except CoordinatorUnavailable as error:
            return f"island {name}: {' '.join(str(error).split())}"
        if not standing.HasField("island"):  # it answers callers elsewhere, whom it cannot know
            return (
                f"island {name}: the run is {standing.state}; the coordinator tells how an island "
                f"stands to callers it knows: diloco status RUN.toml on its machine"
            )
        return f"island {name} {island_text(standing.island, standing.inner_steps)}"

    io.start()
    try:
        with waiting(Console(stderr=True), tell, every_s=_LINE_EVERY_S):
            yield
    finally:
        io.run(transport.close())
        io.stop()


def _found_text(config: Config) -> str:
    """Say which checkpoints of the island are on this machine.

    Raises:
        ConfigError: If there is none.
    """
    from diloco.errors import ConfigError
    from diloco.launch.checkpoints import valid_steps
    from diloco.launch.mirror import Mirror

    directory = config.checkpoint_dir / config.island_id
    steps = valid_steps(config.checkpoint_dir, config.island_id)
    if config.checkpoint.mirror and not steps:
        mirror = Mirror(config.checkpoint.mirror, config.island_id)
        if found := ", ".join(map(str, mirror.steps())):
            return f"checkpoints of island {config.island_id} in {mirror.url}: inner steps {found}"
    if not steps:
        raise ConfigError(
            f"--resume: no valid checkpoint of island {config.island_id} in {directory}. Give the "
            f"directory it was written to (--set checkpoint.dir=DIR), or leave --resume out: the "
            f"island then takes its parameters from the run, with a fresh inner optimizer"
        )
    found = ", ".join(map(str, steps))
    return f"valid checkpoints of island {config.island_id} in {directory}: inner steps {found}"


def _show(planned: Forecast) -> None:
    from rich.console import Console

    from transport.units import format_bytes

    console = Console(highlight=False, soft_wrap=True)
    flushed = ", then a flush of every fragment" if planned.is_flushed else ""
    length = f"{planned.inner_steps} inner steps, {planned.num_sends} sends"
    if planned.arrival is not None:
        length = f"until {planned.arrival.total_tokens:,} tokens are merged"
    console.print(
        f"Run [bold]{planned.run}[/]: {planned.parameters:,} parameters in "
        f"{len(planned.fragments)} fragments; {length}{flushed}."
    )
    tokens = ", ".join(f"{name} {number:,}" for name, number in planned.tokens.items())
    console.print(f"Tokens: {tokens}; together {sum(planned.tokens.values()):,}.\n")
    console.print(_table(*_fragment_rows(planned)))
    console.print(
        f"A round of {planned.inner_steps_per_round} inner steps moves "
        f"{format_bytes(planned.round_bytes_up)} up and {format_bytes(planned.round_bytes_down)} "
        f"down an island.\n"
    )
    if planned.arrival is None:
        console.print(_table(*_send_rows(planned)))
    else:
        console.print(_arrival_text(planned, planned.arrival))
    console.print(f"\nOne island's traffic over the run{_link_text(planned)}:\n")
    console.print(_table(*_way_rows(planned)))
    console.print("\nA rank of each island takes, estimated from shapes:\n")
    console.print(_table(*_rank_rows(planned)))
    disk = planned.disk
    console.print(
        f"\nOn disk, at most: {format_bytes(disk.island_bytes)} an island ({disk.num_checkpoints} "
        f"checkpoints of {format_bytes(disk.checkpoint_bytes)}), "
        f"{format_bytes(disk.store_bytes)} "
        f"{'more at each' if planned.exchange == 'allreduce' else 'at the syncer'} "
        f"({disk.num_records} records of "
        f"{format_bytes(disk.record_bytes)})."
    )
    _print_memory_beside(planned, console)
    if len(planned.syncers) > 1:
        console.print(f"\nThere are {len(planned.syncers)} of it, with fragments of their own:\n")
        console.print(_table(*_syncer_rows(planned)))
    for island, num_bytes in planned.kept_bytes.items():
        console.print(
            f"In the memory of island {island}'s hosts: {format_bytes(num_bytes)} for each of the "
            f"hosts that keep a copy of its inner state (islands.{island}.memory_copies, at most "
            f"its hosts)."
        )
    console.print(
        f"\nFingerprints: configuration {planned.config_fingerprint[:16]}, plan "
        f"{planned.plan_fingerprint[:16]}."
    )


def _print_memory_beside(planned: Forecast, console: Console) -> None:
    """Say what comes beside the table for a moment: on devices, and for copies of checkpoints."""
    from diloco.launch.host_memory import available_bytes
    from transport.units import format_bytes

    on_device = max(rank.outer_device_bytes for rank in planned.ranks.values())
    console.print(
        f"On its device, the outer loop takes at most {format_bytes(on_device)} of a rank, while a "
        f"fragment is sent or merged."
    )
    available = available_bytes()
    for island, num_bytes in planned.copied_bytes.items():
        if not num_bytes:
            continue
        console.print(
            f"Checkpoints behind the training copy {format_bytes(num_bytes)} to the memory of "
            f"island {island}'s hosts (checkpoint.asynchronous)."
        )
        if available is not None and num_bytes > available:
            console.print(
                f"This host has {format_bytes(available)} available: on it alone, island {island} "
                f"would be refused; set checkpoint.asynchronous = false, or use more hosts.",
                style="yellow",
            )


def _rank_rows(planned: Forecast) -> tuple[list[str], list[list[str]]]:
    from transport.units import format_bytes

    columns = ["island", "peak", "parameters", "gradients", "optimizer", "gathered", "activations"]
    columns += ["host, outer loop", "operations a step"]
    return columns, [
        [
            name,
            *(
                format_bytes(number)
                for number in (
                    rank.peak_bytes,
                    rank.parameter_bytes,
                    rank.gradient_bytes,
                    rank.optimizer_bytes,
                    rank.gathered_bytes,
                    rank.activation_bytes,
                    rank.outer_host_bytes,
                )
            ),
            f"{rank.flops_per_inner_step:.3g}",
        ]
        for name, rank in planned.ranks.items()
    ]


def _syncer_rows(planned: Forecast) -> tuple[list[str], list[list[str]]]:
    from transport.units import format_bytes

    columns = ["syncer", "parameters", "on disk", "fragments"]
    return columns, [
        [
            str(syncer.syncer_id),
            f"{syncer.parameters:,}",
            format_bytes(syncer.store_bytes),
            ", ".join(map(str, syncer.fragment_ids)),
        ]
        for syncer in planned.syncers
    ]


def _arrival_text(planned: Forecast, arrival: ArrivalForecast) -> str:
    """Say what stands in place of a schedule, and where its grace comes to nothing."""
    from transport.units import format_bytes, format_duration

    text = (
        f"There is no schedule: nobody waits for anybody. A fragment opens at most once in "
        f"{planned.inner_steps_per_round} inner steps of the fastest island, for about "
        f"{arrival.rounds:,} rounds if each counts all islands."
    )
    if arrival.grace != "auto":
        return text
    largest = max(planned.fragments, key=lambda part: part.bytes_up + part.bytes_down)
    up, down = format_bytes(largest.bytes_up), format_bytes(largest.bytes_down)
    here = ""
    if arrival.exchange_s is not None:
        here = f", {format_duration(arrival.exchange_s)} on this link"
    if arrival.least_step_s is not None:
        here += f" (inner steps under {format_duration(arrival.least_step_s)})"
    return (
        f"{text}\nWarning: outer.grace = auto is 0 where tau = {arrival.overlap_steps} inner steps "
        f"of the slowest island take less time than {up} up and {down} down{here}: most rounds "
        f"then count one island. Set outer.grace to a time there."
    )


def _fragment_rows(planned: Forecast) -> tuple[list[str], list[list[str]]]:
    from transport.units import format_bytes

    columns = ["fragment", "parameters", "lanes", "up", "down", "in float32", "tensors"]
    rows = [
        [
            str(fragment.fragment_id),
            f"{fragment.parameters:,}",
            str(fragment.lanes),
            format_bytes(fragment.bytes_up),
            format_bytes(fragment.bytes_down),
            format_bytes(fragment.float32_bytes),
            str(len(fragment.tensors)),
        ]
        for fragment in planned.fragments
    ]
    return columns, rows


def _send_rows(planned: Forecast) -> tuple[list[str], list[list[str]]]:
    columns = ["inner step", "merged after", "sent fragments"]
    rows: list[list[str]] = []
    previous = 0
    for send in planned.sends:
        if send.inner_step - previous > planned.inner_steps_per_round:
            rows.append(["...", "...", "..."])
        fragments = ", ".join(map(str, send.fragment_ids))
        rows.append([str(send.inner_step), str(send.merge_step), fragments])
        previous = send.inner_step
    if planned.is_flushed:
        last = str(planned.inner_steps)
        rows.append([last, last, "all (flush, published in float32)"])
    return columns, rows


def _way_rows(planned: Forecast) -> tuple[list[str], list[list[str]]]:
    from transport.units import format_bytes, format_duration

    columns = ["", "up", "down", "exchanges", "on this link", "times as much"]
    rows = [
        [
            way.name,
            format_bytes(way.bytes_up),
            format_bytes(way.bytes_down),
            f"{way.transfers:,}",
            "-" if way.transfer_s is None else format_duration(way.transfer_s),
            f"{way.times:.1f}",
        ]
        for way in planned.ways
    ]
    return columns, rows


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for index, column in enumerate(columns):
        is_text = index in (0, len(columns) - 1)
        table.add_column(column, justify="left" if is_text else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _link_text(planned: Forecast) -> str:
    if not planned.link:
        return " (no transport.link, so no times)"
    return f", and what it would take on {planned.link} with nothing overlapped"
