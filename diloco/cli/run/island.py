"""`diloco island`: run one site of a run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli.terminal.options import Overrides, RunFile, flag, option
from diloco.cli.terminal.progress import notes, waiting
from diloco.errors import ConfigError, CoordinatorUnavailable

if TYPE_CHECKING:  # commands import what they need when they run
    from diloco.config.schema import Config

_LINE_EVERY_S = 30.0


def island(
    run_file: RunFile,
    name: Annotated[str, option("Which island of the file this is.", "NAME", "--island")],
    coordinator: Annotated[
        str,
        option(
            "Where the coordinator listens; left out: coordinator.address of the file, or "
            "what a coordinator on this machine recorded in state_dir, or over libp2p who proves "
            "to coordinate the run (transport.hivemind.initial_peers).",
            "HOST:PORT",
        ),
    ] = "",
    output: Annotated[
        Path | None, option("Directory of events and logs; left out: telemetry of the file.", "DIR")
    ] = None,
    resume: Annotated[
        bool,
        flag(
            "Check that a valid checkpoint of this island is here, and say which; whether "
            "the run is resumed, and where, is the coordinator's word.",
            "--resume",
        ),
    ] = False,
    nnodes: Annotated[int | None, option("Hosts of this island; left out: this one.", "N")] = None,
    node_rank: Annotated[
        int, option("This one of them, from 0; host 0 has the first ranks.", "I")
    ] = 0,
    rdzv: Annotated[
        str, option("Where the hosts meet: an address of host 0, a free port.", "HOST:PORT")
    ] = "",
    overrides: Overrides = None,
) -> None:
    """Train one island: starts its ranks on this host and ends when the run is over.

    Ranks that fail (exit codes 20, 30 and 40, a crash, a signal) are started again, as often as
    islands.NAME.max_restarts says; the island then returns to the run. So they are whenever the run
    went back to a checkpoint by itself (42). An island of several hosts: the same command on each,
    with --nnodes, --node-rank and --rdzv.

    Ctrl-C or SIGTERM ends the ranks in order, without a checkpoint, and this command with them; a
    second one ends it at once. To stop the whole run with a checkpoint, stop its coordinator.

    Under torchrun or srun (RANK, WORLD_SIZE and MASTER_ADDR are set) it is one rank of that job
    and starts nothing, nor does it restart anything.

    Example: diloco island RUN.toml --island eu-west --coordinator 10.0.0.1:29400
    """
    from diloco.checkpoint.mirror import Mirror
    from diloco.cli.run.doctor import show_at_start
    from diloco.config.load import load_config
    from diloco.launch.host_position import HostPosition
    from diloco.launch.island import run_island
    from diloco.security.address import find_coordinator
    from diloco.security.security import INSECURE_WARNING

    config = load_config(run_file, overrides or (), island=name)
    position = HostPosition.of(config.island.ranks, nnodes=nnodes, node_rank=node_rank, rdzv=rdzv)
    address = find_coordinator(config, coordinator)
    directory = output or config.telemetry_dir
    if config.checkpoint.mirror and os.environ.get("RANK", "0") == "0":
        Mirror(config.checkpoint.mirror, name).probe()
    if resume:
        typer.echo(_found_text(config))
    if config.transport.insecure:
        typer.echo(f"warning: {INSECURE_WARNING}", err=True)
    show_at_start(address)
    typer.echo(f"island {name} goes to the coordinator at {address}; logs and events: {directory}")
    with _showing(config, name, address):
        code = run_island(config, name, address, directory, position)
    if code == 0:
        typer.echo(f"island {name} is done: the run has finished, or was stopped at a checkpoint")
    raise typer.Exit(code)


@contextlib.contextmanager
def _showing(config: Config, name: str, address: str) -> Iterator[None]:
    """Show where the island stands by its last report, while the island lives."""
    from diloco.cli.terminal.tables import island_text
    from diloco.coordinator.status import ask_run_state
    from diloco.io_thread import IoThread
    from diloco.security.security import Security
    from diloco.transport.identity import Role

    if "RANK" in os.environ:  # one rank of a job, whose launcher shows what it wants
        yield
        return
    security = Security.of(config, Role.ISLAND, name).knowing(address)
    transport = security.transport(address, Role.COORDINATOR)
    io = IoThread()

    def tell() -> str:
        try:
            run_state = io.run(ask_run_state(transport, name))
        except CoordinatorUnavailable as error:
            return f"island {name}: {' '.join(str(error).split())}"
        if not run_state.HasField("island"):  # it answers callers elsewhere, whom it cannot know
            return (
                f"island {name}: the run is {run_state.state}; the coordinator says how an island "
                f"stands to callers it knows: diloco status RUN.toml on its machine"
            )
        return f"island {name} {island_text(run_state.island, run_state.inner_steps)}"

    io.start()
    try:
        with waiting(notes(), tell, every_s=_LINE_EVERY_S):
            yield
    finally:
        io.run(transport.close())
        io.stop()


def _found_text(config: Config) -> str:
    """Say which checkpoints of the island are on this machine.

    Raises:
        ConfigError: If there is none.
    """
    from diloco.checkpoint.checkpoints import valid_steps
    from diloco.checkpoint.mirror import Mirror

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
