"""`diloco init`: the files of a new run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from diloco.cli.terminal.options import flag, option
from diloco.cli.terminal.section_flags import is_typed
from diloco.errors import ConfigError
from diloco.extras import require
from diloco.transport.units import format_bandwidth, format_duration, parse_duration
from diloco.transport.units import parse_bandwidth as parse_rate

if TYPE_CHECKING:  # commands import what they need when they run
    from diloco.config.schema import Config
    from diloco.init.answers import Answers, Launcher, Preset

_LAUNCHERS = ("kubernetes", "slurm", "ssh", "systemd")
_PRESETS = ("streaming", "decoupled")
_TWO = ("east", "west")


def init(
    context: typer.Context,
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory of the run; made if missing.")
    ],
    yes: Annotated[bool, flag("Ask nothing; take defaults.", "--yes")] = False,
    detect: Annotated[
        bool, flag("Look at this machine: its accelerators and cores become defaults.", "--detect")
    ] = False,
    name: Annotated[str, typer.Option(help="Of the run; left out: the last part of DIR.")] = "",
    islands: Annotated[
        list[str] | None,
        option(
            "An island and its hosts; repeatable. Without hosts: on this machine.",
            "NAME[=HOST,HOST]",
            "--island",
        ),
    ] = None,
    gpus: Annotated[
        list[str] | None, option("Accelerators of each host; 0: CPUs. Repeatable.", "[ISLAND=]N")
    ] = None,
    coordinator: Annotated[
        str,
        option(
            "Where the coordinator will be, as islands reach it; left out: the first host.",
            "HOST[:PORT]",
        ),
    ] = "",
    bandwidth: Annotated[
        str, option("Of an island's link, each way: H and tau fit it.", "RATE")
    ] = "",
    rtt: Annotated[str, option("Round trip of that link.", "TIME")] = "100ms",
    model: Annotated[
        str,
        typer.Option(
            help="tiny, debug, 10M, 150M, 1B, llama3-8B, llama3-70B, llama3-405B; or a directory "
            "or hub name of transformers, whose weights the run then begins with."
        ),
    ] = "debug",
    data: Annotated[
        list[str] | None,
        option(
            "Text, JSON lines or Parquet at every site; left out: Python's own sources.",
            "GLOB|hub:OWNER/NAME",
        ),
    ] = None,
    tokenizer: Annotated[
        str, typer.Option(help="Of that text: a directory or hub name; left out: bytes.")
    ] = "",
    steps: Annotated[int, typer.Option(min=1, help="Inner steps of every island.")] = 2000,
    preset: Annotated[
        str,
        typer.Option(help="streaming: islands of like speed; decoupled: none waits for another."),
    ] = "streaming",
    launchers: Annotated[
        list[str] | None,
        typer.Option(
            "--launcher", help="ssh, systemd, slurm or kubernetes; repeatable. Left out: by hand."
        ),
    ] = None,
) -> None:
    """Write the files of a new run: run file, certificates, launch files, and what to type next.

    DIR/run.toml describes the run for all sites. DIR/certs has a certificate for every site if the
    run leaves this machine. DIR/launch has a script, units, jobs or objects that start each site,
    with GPUs, restarts and a graceful stop. DIR/NEXT.md says what to type, in order.

    What is not given is asked, unless there is --yes. Nothing is started, and nothing that is there
    is overwritten. Values such as the batch and the learning rate are a start that fits the model:
    `diloco plan` says what the run takes before it runs.

    Example: diloco init my-run --island eu=gpu1.eu.example --island us=gpu1.us.example --gpus 8
    """
    from diloco.config.load import config_of
    from diloco.init.answers import (
        Answers,
        check,
        read_coordinator,
        read_sites,
        shortest_period,
    )
    from diloco.init.files import NEXT_STEPS, RUN_FILE, all_files, write

    if (directory / RUN_FILE).exists():
        raise ConfigError(f"{directory / RUN_FILE} is there: edit it, or name another directory")
    _check_choices("--launcher", launchers or (), _LAUNCHERS)
    _check_choices("--preset", [preset], _PRESETS)
    usual_devices, threads = 0, 1
    if detect:
        from diloco.init.machine import look_around

        machine = look_around()
        for line in machine.lines():
            typer.echo(line)
        usual_devices, threads = len(machine.devices), machine.cores
    ask = _asking(context, yes=yes)
    islands = ask("islands", "Islands, as NAME or NAME=HOST,HOST", islands or list(_TWO))
    has_hosts = any("=" in text for text in islands)
    gpus = ask("gpus", "Accelerators of each host", gpus or [str(usual_devices)])
    if has_hosts:
        coordinator = ask("coordinator", "Coordinator, as islands reach it", [coordinator])[0]
        bandwidth = ask("bandwidth", "Bandwidth of an island's link", [bandwidth])[0]
        launchers = ask("launchers", f"Launchers, of {', '.join(_LAUNCHERS)}", launchers or [])
        _check_choices("--launcher", launchers, _LAUNCHERS)
    model = ask("model", "Model", [model])[0]
    data = ask("data", "Text: globs, or hub:OWNER/NAME; none: Python's own", data or [])
    sites = read_sites(
        islands,
        gpus,
        usual_devices=usual_devices,
        threads=threads if has_hosts else max(1, threads // len(islands)),
    )
    answers = Answers(
        name=name or directory.absolute().name,
        sites=sites,
        coordinator=read_coordinator(coordinator, sites),
        model=model,
        data=tuple(data),
        tokenizer=tokenizer,
        inner_steps=steps,
        preset=cast("Preset", preset),
        launchers=cast("tuple[Launcher, ...]", tuple(launchers or ())),
    )
    check(answers)
    period = shortest_period(answers.defaults.num_fragments)
    answers = replace(answers, inner_steps_per_round=period)
    config = config_of(_values(answers), "these answers make no run")
    if bandwidth:
        answers = _fitted(answers, config, bandwidth, rtt)
        config = config_of(_values(answers), "these answers make no run")
    written = [write(directory, each) for each in list(all_files(answers, config))]
    if not answers.is_local:
        from diloco.cli.run.certs import issue_all

        issue_all(answers.name, config.islands, directory / "certs")
        written.append(directory / "certs")
    for path in written:
        typer.echo(f"written: {path}")
    typer.echo(f"what to type next: {directory / NEXT_STEPS}")


def is_terminal() -> bool:
    """Whether somebody is there to answer."""
    return sys.stdin.isatty()


def _asking(context: typer.Context, *, yes: bool) -> Callable[[str, str, list[str]], list[str]]:
    """Give what asks for values, separated by spaces, of options that were not typed."""
    if not yes and not is_terminal():
        raise ConfigError("nobody is here to be asked: add --yes, which takes defaults")

    def ask(option: str, question: str, usual: list[str]) -> list[str]:
        if yes or is_typed(context, option):
            return usual
        shown = " ".join(usual)
        answer: str = typer.prompt(question, default=shown, show_default=bool(shown))
        return answer.split() or [""] * len(usual)

    return ask


def _check_choices(option: str, given: list[str] | tuple[()], known: tuple[str, ...]) -> None:
    for text in given:
        if text not in known:
            raise ConfigError(f"{option} {text}: choose {', '.join(known)}")


def _values(answers: Answers) -> dict[str, object]:
    """Read the run file that would be written."""
    import tomllib

    from diloco.init.files import run_file

    return tomllib.loads(run_file(answers).text)


def _fitted(answers: Answers, config: Config, bandwidth: str, rtt: str) -> Answers:
    """Choose H and tau for the link, by the time that inner steps are estimated to take."""
    from diloco.forecast.forecast import forecast
    from diloco.init.answers import fitting_schedule

    require("--bandwidth", "simpy", "leave it out: H and tau are then a usual start")
    from diloco.simulations.planner.assumptions import PlanOptions, estimated_step, parsed

    bandwidth_bps = parsed("--bandwidth", bandwidth, parse_rate)
    rtt_s = parsed("--rtt", rtt, parse_duration)
    foreseen = forecast(config)
    step_s = min(
        estimated_step(config, name, foreseen.ranks[name], PlanOptions())[0]
        for name in config.islands
    )
    period, overlap = fitting_schedule(
        round_bits=4.25 * foreseen.parameters,
        bandwidth_bps=bandwidth_bps,
        rtt_s=rtt_s,
        step_s=step_s,
        num_fragments=answers.defaults.num_fragments,
    )
    typer.echo(
        f"inner steps of the fastest island are estimated to take {format_duration(step_s)}; for "
        f"{format_bandwidth(bandwidth_bps)} and {format_duration(rtt_s)}: H = {period}, tau = "
        f"{overlap}"
    )
    return replace(
        answers,
        inner_steps_per_round=period,
        overlap_steps=overlap,
        rate=format_bandwidth(0.95 * bandwidth_bps).replace(" ", ""),
    )
