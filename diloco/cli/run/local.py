"""`diloco local`: a whole run on this machine, with a live table and a summary at the end."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from diloco.cli.terminal.options import (
    AsJson,
    Overrides,
    PageOptions,
    RunFile,
    WithPage,
    flag,
    option,
)
from diloco.cli.terminal.progress import answering, notes, output, waiting
from diloco.errors import ConfigError, CoordinatorUnavailable
from diloco.launch.process.ending import Interrupted, note_signals

if TYPE_CHECKING:  # commands import what they need when they run
    from diloco.config.schema import Config
    from diloco.launch.local import LocalRun
    from diloco.launch.page_process import PageProcess
    from diloco.launch.process.emulated import Emulated
    from diloco.launch.process.ending import StopRequest

_LINE_EVERY_S = 10.0
_SHOWN_LINES = 6
_STOPPING = (
    "asked to stop: every island goes on to one inner step and writes its checkpoint, while a "
    "fragment is damaged only after its repair; a second signal ends every process at once"
)

_FINISHED_BEFORE = "The run finished before the step at which it would have stopped."


def local(
    run_file: RunFile,
    overrides: Overrides = None,
    islands: Annotated[
        int, option("Dry run: only the first N islands, links not shaped; 0: all.", "N")
    ] = 0,
    fresh: Annotated[
        bool, flag("Move an earlier run in state_dir aside first.", "--fresh")
    ] = False,
    resume: Annotated[
        bool,
        flag("Go on, from the newest whole checkpoint if there is one.", "--resume"),
    ] = False,
    at: Annotated[int | None, option("With --resume: from that checkpoint.", "STEP", min=0)] = None,
    page: WithPage = False,
    page_options: PageOptions = "",
    as_json: AsJson = False,
) -> None:
    """Run everything on this machine: coordinator, syncer, and all islands.

    Shows a live table, keeps events, logs and records in coordinator.state_dir, and ends with a
    summary in words (summary.json has it too) and plots. Ctrl-C stops the run: the islands go on to
    one inner step and write a checkpoint, from which --resume goes on. A second Ctrl-C ends every
    process at once.

    Under `diloco emulate WAN.toml --` each island is in a network namespace of its own, and
    transport.link shapes nothing.

    Example: diloco local configs/runs/demo.toml --set run.inner_steps=100
    """
    from diloco.cli.run.page import page_process
    from diloco.cli.run.report import show_report
    from diloco.config.load import load_config
    from diloco.launch.local import without_links
    from diloco.launch.process.emulated import Emulated

    console = output("-" if as_json else "")
    config = load_config(run_file, overrides or ())
    if islands:
        config = without_links(config, islands)
    if (emulated := Emulated.surrounding(os.environ)) is not None:
        config = emulated.placed(config)
    command = _command(run_file, overrides or (), islands)
    shown = page_process(config, page, page_options, console.print)
    step = _prepare(config, console, command, fresh=fresh, resume=resume, at=at)
    with note_signals(num_graceful=1) as request:
        try:
            ended, code, is_stopped = _run(config, console, request, step, emulated, shown)
        except Interrupted:
            ended, code, is_stopped = {}, 0, True
    if is_stopped:
        notes().print(_stopped_text(config, command))
        raise typer.Exit(request.exit_code)
    if code != 0:
        notes().print(_failure_text(config, command, ended), style="red")
        raise typer.Exit(code if code > 0 else 128 - code)  # as shells have it
    if request.number:
        console.print(_FINISHED_BEFORE)
    extra = {} if emulated is None else {"emulation": emulated.description}
    try:
        show_report(config, console, extra, as_json=as_json)
    except KeyboardInterrupt:
        resolved = shlex.quote(str(Path(config.coordinator.state_dir) / "resolved.toml"))
        notes().print(f"the run is complete, its summary was not shown: diloco report {resolved}")
        raise


def _prepare(
    config: Config, console: Console, command: str, *, fresh: bool, resume: bool, at: int | None
) -> int | None:
    """Refuse what cannot be before anything is touched, and make room for the run.

    Returns:
        Inner step of the checkpoint to resume from; None for a new run.
    """
    from diloco.forecast.disk import check_room
    from diloco.launch.local import check_no_events, check_place, find_resume_step, make_room

    if at is not None and not resume:
        raise ConfigError(f"--at {at} says where to resume: add --resume, or leave it out")
    if fresh and resume:
        raise ConfigError("--fresh begins a new run, --resume goes on with one: give one of them")
    state_dir = Path(config.coordinator.state_dir)
    step = None
    if resume:
        step = find_resume_step(config, at, console.print, start=command)
    else:
        check_place(state_dir, fresh=fresh)
        check_no_events(config)

    def open_all() -> None:
        from diloco.forecast.forecast import forecast  # torch takes seconds to load
        from diloco.launch.rank.inputs import check_added, open_inputs

        check_added(config)
        planned = forecast(config)
        check_room(config, planned.parameters, islands=config.islands, is_new=not resume)
        open_inputs(config, resume_step=step, may_download=True)

    with waiting(console, "opening text and warm start"):
        answering(open_all)
    if not resume:
        moved = make_room(state_dir)
        if moved is not None:
            console.print(f"the earlier run is now in {moved}")
    return step


def _command(run_file: Path, overrides: Sequence[str], islands: int) -> str:
    """Write the command that was typed, without what only its first start needed."""
    words = ["diloco", "local", str(run_file)]
    words += [word for override in overrides for word in ("--set", override)]
    words += ["--islands", str(islands)] if islands else []
    return shlex.join(words)


def _run(
    config: Config,
    console: Console,
    request: StopRequest,
    resume_step: int | None,
    emulated: Emulated | None,
    page: PageProcess | None,
) -> tuple[dict[str, int], int, bool]:
    """Run every process to its end.

    Returns:
        How islands ended, in that order, the first failure or 0, and whether it was stopped.
    """
    from diloco.launch.local import LocalRun

    with LocalRun(config, request, resume_step, emulated, page) as run:
        reading = "" if resume_step is None else ", which reads the whole checkpoint"
        with waiting(console, f"waiting for the coordinator{reading}"):
            run.start()
        console.print(
            f"run {config.run.name}: coordinator at {run.address}; logs and events in "
            f"{config.coordinator.state_dir}; to see it: diloco page {run.address} or diloco watch "
            f"{run.address}"
        )
        code = _watch(run, console)
        if code == 0:
            with waiting(console, "waiting for coordinator and syncer to end"):
                run.wait_for_coordinator()
        return run.ended, code, code == 0 and run.is_stopped


def _watch(run: LocalRun, console: Console) -> int:
    """Show the run until it ends: a live table on a terminal, else a line now and then."""
    from rich.live import Live

    from diloco.cli.terminal.tables import run_text, status_view
    from diloco.coordinator.status import ask_status
    from diloco.io_thread import IoThread
    from diloco.security.security import Security
    from diloco.transport.identity import Role

    security = Security.of(run.config, Role.OPERATOR)
    transport = security.transport(run.address, Role.COORDINATOR)
    io = IoThread()
    io.start()
    last_line = time.monotonic()
    is_told = False

    def show_stop() -> None:
        nonlocal is_told
        if run.request.number and not is_told:
            is_told = True
            console.print(_STOPPING)

    def line() -> None:
        nonlocal last_line
        show_stop()
        if time.monotonic() - last_line < _LINE_EVERY_S:
            return
        last_line = time.monotonic()
        console.print(run_text(io.run(ask_status(transport))))

    def draw() -> None:
        show_stop()
        live.update(status_view(io.run(ask_status(transport))), refresh=True)

    def look() -> None:
        # The coordinator may be starting again; a terminal may have been closed: no reason to fail.
        with contextlib.suppress(OSError, CoordinatorUnavailable):
            show()

    live = Live(console=console, auto_refresh=False)
    show, shown = (draw, live) if console.is_terminal else (line, contextlib.nullcontext())
    try:
        with shown:
            return run.wait(look)
    finally:
        io.run(transport.close())
        io.stop()


def _failure_text(config: Config, command: str, ended: dict[str, int]) -> str:
    from diloco.checkpoint.run_checkpoints import membership_of, take_published
    from diloco.launch.process.logs import tail
    from diloco.state_dir import StateDir

    state_dir = Path(config.coordinator.state_dir)
    membership = membership_of(config)
    known = "" if membership is None else membership.fatal_reason
    first = next(name for name, code in ended.items() if code)
    lines = [
        f"The run failed{known and f': {known}'}. Island {first} failed first, with exit code "
        f"{ended[first]}. What the islands said last:"
    ]
    for island in sorted(config.islands, key=lambda name: (name != first, name)):
        log = state_dir / f"island-{island}.log"
        said = tail(log, _SHOWN_LINES).splitlines()
        lines += [f"  {island} ({log}):", *(f"    {line}" for line in said)]
    if membership is not None and membership.checkpoints:
        name = membership.checkpoint_name(membership.to_resume)
        lines.append(f"Once the cause is removed, go on from {name}: {command} --resume")
    elif known:
        lines.append(f"There is no checkpoint. {take_published(StateDir(state_dir))}")
    elif membership is not None:
        lines.append(f"Once the cause is removed, go on where it was: {command} --resume")
    return "\n".join(lines)


def _stopped_text(config: Config, command: str) -> str:
    """Say where a run stands that was asked to stop, and what to type next."""
    from diloco.checkpoint.run_checkpoints import membership_of

    membership = membership_of(config)
    if membership is not None and membership.is_finished:
        root = config.coordinator.state_dir
        return f"{_FINISHED_BEFORE} Take its parameters: diloco export {shlex.quote(root)}"
    if membership is not None and membership.is_stopped:
        of = "" if config.outer.is_on_arrival else f" of {config.run.inner_steps}"
        return (
            f"stopped {membership.stop_name}{of}, every island with a checkpoint in "
            f"{config.checkpoint_dir}. Go on: {command} --resume"
        )
    if membership is not None and membership.checkpoints:
        return (
            f"stopped: every process has ended, without a checkpoint of this moment. Go on from "
            f"{membership.checkpoint_name(membership.to_resume)}: {command} --resume"
        )
    if membership is None:
        return f"stopped: every process has ended, before the run began. Start it again: {command}"
    return (
        f"stopped: every process has ended; there is no checkpoint yet. Go on where it was: "
        f"{command} --resume"
    )
