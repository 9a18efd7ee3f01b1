"""`diloco local`: a whole run on this machine, with a live table and a summary at the end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli.options import Overrides, RunFile

if TYPE_CHECKING:  # commands import what they need when they run
    from rich.console import Console

    from diloco.config.schema import Config
    from diloco.launch.local import LocalRun
    from diloco.launch.summary import Summary
    from protos.control_pb2 import StatusReply

_LINE_EVERY_S = 10.0
_SHOWN_LINES = 6


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("local")(local)


def local(
    run_file: RunFile,
    overrides: Overrides = None,
    islands: Annotated[
        int,
        typer.Option(
            metavar="N", help="Dry run: only the first N islands, links not shaped; 0: all."
        ),
    ] = 0,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Move an earlier run in state_dir aside first.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON, and nothing else.")
    ] = False,
) -> None:
    """Run everything on this machine: coordinator, syncer, and all islands.

    Shows a live table, keeps events, logs and records in coordinator.state_dir, and ends with a
    summary in words (summary.json has it too). Ctrl-C stops every process.
    """
    from rich.console import Console

    from diloco.config.load import load_config
    from diloco.launch.ending import Interrupted, heeding_signals
    from diloco.launch.forecast import forecast
    from diloco.launch.local import insist_on_no_events, make_room, without_links

    console = Console(quiet=as_json)
    config = load_config(run_file, overrides or ())
    if islands:
        config = without_links(config, islands)
    forecast(config)  # what only the parameters can tell is refused before anything is touched
    moved = make_room(Path(config.coordinator.state_dir), fresh=fresh)
    insist_on_no_events(config.telemetry_dir)
    if moved is not None:
        console.print(f"the earlier run is now in {moved}", highlight=False)
    try:
        with heeding_signals() as request:
            code = _run(config, console, request.check)
    except Interrupted as interrupted:
        Console(stderr=True).print("stopped: every process of the run has ended")
        raise typer.Exit(interrupted.exit_code) from None
    if code != 0:
        Console(stderr=True).print(_failure_text(config), highlight=False, style="red")
        raise typer.Exit(code)
    with console.status("recomputing the last versions from their contributions"):
        summary = _summary(config)
    path = Path(config.coordinator.state_dir) / "summary.json"
    path.write_text(json.dumps(summary.as_dict(), indent=2) + "\n")
    if as_json:
        typer.echo(path.read_text())
    console.print(summary.as_text(), highlight=False)
    console.print(f"summary: {path}", highlight=False)
    if not (summary.are_digests_equal and summary.are_versions_recomputed):
        raise typer.Exit(1)


def _run(config: Config, console: Console, check: Callable[[], None]) -> int:
    """Run every process to its end; returns the first failure, or 0."""
    from diloco.launch.local import LocalRun

    with LocalRun(config, check) as run:
        run.start()
        console.print(
            f"run {config.run.name}: coordinator at {run.address}; logs and events in "
            f"{config.coordinator.state_dir}",
            highlight=False,
        )
        code = _watch(run, console)
        if code == 0:
            run.wait_for_coordinator()
    return code


def _watch(run: LocalRun, console: Console) -> int:
    """Show the run until it ends: a live table on a terminal, else a line now and then."""
    from rich.live import Live

    from diloco.cli.tables import status_view
    from diloco.sync.io_thread import IoThread

    io = IoThread()
    io.start()
    last_line = time.monotonic()
    try:
        if console.is_terminal:
            with Live(console=console, auto_refresh=False) as live:

                def draw() -> None:
                    if (reply := io.run(_status(run.address))) is not None:
                        live.update(status_view(reply), refresh=True)

                return run.wait(draw)

        def tell() -> None:
            nonlocal last_line
            if time.monotonic() - last_line < _LINE_EVERY_S:
                return
            last_line = time.monotonic()
            if (reply := io.run(_status(run.address))) is not None:
                console.print(_line(reply), highlight=False, soft_wrap=True)

        return run.wait(tell)
    finally:
        io.stop()


async def _status(address: str) -> StatusReply | None:
    """Ask the coordinator; None while it does not answer (it may be starting again)."""
    from diloco.cli.control import ask_status
    from diloco.errors import CoordinatorUnavailable
    from transport.grpc_client import GrpcTransport

    transport = GrpcTransport(address)
    try:
        return await ask_status(transport)
    except CoordinatorUnavailable:
        return None
    finally:
        await transport.close()


def _line(reply: StatusReply) -> str:
    """Say where the run stands in one line."""
    islands = "; ".join(
        f"{i.island} step {i.last_report.inner_step}/{reply.inner_steps} "
        f"loss {i.last_report.loss_nats:.3f} {i.last_report.tokens_per_s:,.0f} tokens/s"
        for i in reply.islands
    )
    versions = ", ".join(str(fragment.version) for fragment in reply.fragments)
    return f"{reply.state}: {islands}; versions {versions or 'none yet'}"


def _failure_text(config: Config) -> str:
    from diloco.launch.logs import tail

    lines = ["The run failed. What the islands said last:"]
    for island in sorted(config.islands):
        log = Path(config.coordinator.state_dir) / f"island-{island}.log"
        said = tail(log, _SHOWN_LINES).splitlines()
        lines += [f"  {island} ({log}):", *(f"    {line}" for line in said)]
    return "\n".join(lines)


def _summary(config: Config) -> Summary:
    from diloco.launch.build import build_publication_rules, build_schedule, link_profile
    from diloco.launch.state_dir import StateDir
    from diloco.launch.summary import read_events, summarise
    from diloco.outer.fragments import Plan
    from diloco.rounds.store import FragmentStore

    state = StateDir(Path(config.coordinator.state_dir))
    plan = Plan.from_json(state.plan.read_text())
    retained = config.outer.retained_versions
    return summarise(
        config,
        plan,
        build_schedule(config),
        build_publication_rules(config),
        stores=[FragmentStore(state.store, fragment, retained) for fragment in plan.fragments],
        events=read_events(config.telemetry_dir, config.islands),
        link=link_profile(config),
    )
