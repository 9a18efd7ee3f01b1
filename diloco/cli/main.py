"""`diloco`: the command line. Commands live next to this module, one file a subject."""

from __future__ import annotations

import inspect
import logging
import shlex
import signal
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

import diloco
from diloco.cli.operate import operate, repair, replay
from diloco.cli.research import baseline, bench, chaos, conformance, emulate, lab, sim
from diloco.cli.run import (
    certs,
    configuration,
    control,
    doctor,
    export,
    init,
    island,
    local,
    plan,
    report,
)
from diloco.errors import DilocoError
from diloco.extras import EXTRA_OF, missing
from diloco.launch.process.logs import log_to
from diloco.state_dir import directory_in_place

app = typer.Typer(
    name="diloco",
    help="Train one language model on islands (datacenters, clusters, boxes) far apart.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _show_version(is_asked: bool) -> None:
    """Print which diloco, Python and torch these are; torch is not loaded for it."""
    if is_asked:
        python = ".".join(map(str, sys.version_info[:3]))
        typer.echo(f"diloco {diloco.__version__} (Python {python}, torch {version('torch')})")
        raise typer.Exit


@app.callback()
def _options(
    log_level: Annotated[
        str, typer.Option(help="Least severe log message shown: debug, info, warning or error.")
    ] = "warning",
    is_version_asked: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            help="Show the version, also of Python and torch.",
        ),
    ] = False,
) -> None:
    """Train one language model on islands (datacenters, clusters, boxes) far apart.

    Begin with `diloco init DIR` (a new run), `diloco plan RUN.toml` (nothing is started), then
    `diloco local RUN.toml` (everything on this machine).
    """
    levels = logging.getLevelNamesMapping()
    if log_level.upper() not in levels:
        raise typer.BadParameter(f"{log_level!r}: choose debug, info, warning or error")
    if not logging.getLogger().handlers:
        log_to(None, levels[log_level.upper()])


#: Every command in the panel of its group, in the order in which help shows them.
_PANELS: dict[str, dict[str, Callable[..., None] | typer.Typer]] = {
    "Run": {
        "init": init.init,
        "plan": plan.plan,
        "coordinator": control.coordinator,
        "island": island.island,
        "local": local.local,
        "status": control.status,
        "report": report.report,
        "export": export.export,
        "doctor": doctor.doctor,
        "certs": certs.certs,
        "config": configuration.config,
    },
    "Operate": {
        "pause": operate.pause,
        "unpause": operate.unpause,
        "drain": operate.drain,
        "kick": operate.kick,
        "set": operate.set_,
        "stop": operate.stop,
        "backup": operate.backup,
        "repair": repair.repair,
        "replay": replay.replay,
    },
    "Research": {
        "sim": sim.sim,
        "lab": lab.lab,
        "emulate": emulate.emulate,
        "chaos": chaos.chaos,
        "bench": bench.bench,
        "conformance": conformance.conformance,
        "baseline": baseline.baseline,
    },
}
for panel, commands in _PANELS.items():
    for name, body in commands.items():
        if isinstance(body, typer.Typer):
            app.add_typer(body, name=name, rich_help_panel=panel)
        else:
            app.command(name, rich_help_panel=panel)(body)

#: What is typed for example, at the end of each command's help.
EXAMPLES = {
    "init": "diloco init my-run --island eu=gpu1.eu.example --island us=gpu1.us.example --gpus 8",
    "plan": "diloco plan configs/runs/demo.toml --step-time 0.2s --link thin-5M-60ms --suggest",
    "coordinator": "diloco coordinator configs/runs/two-islands.toml",
    "island": "diloco island RUN.toml --island eu-west --coordinator 10.0.0.1:29400",
    "local": "diloco local configs/runs/demo.toml --set run.inner_steps=100",
    "status": "diloco status 127.0.0.1:29400 --watch",
    "report": "diloco report RUN.toml",
    "export": "diloco export runs/demo --out model",
    "doctor": "diloco doctor RUN.toml --island eu-west --coordinator 10.0.0.1:29400",
    "certs init": "diloco certs init RUN.toml --dir certs",
    "certs issue": "diloco certs issue island/asia-south --dir certs",
    "certs rotate": "diloco certs rotate island/eu-west --dir certs",
    "certs revoke": "diloco certs revoke island/eu-west 10.0.0.1:29400 --dir certs",
    "certs token": "diloco certs token operator --dir certs",
    "certs show": "diloco certs show --dir certs",
    "config": "diloco config configs/runs/demo.toml --set outer.num_fragments=4",
    "pause": "diloco pause 127.0.0.1:29400",
    "unpause": "diloco unpause 127.0.0.1:29400",
    "drain": "diloco drain 10.0.0.1:29400 eu-west --certs certs",
    "kick": 'diloco kick 10.0.0.1:29400 eu-west --reason "disk broken" --certs certs',
    "set": "diloco set 127.0.0.1:29400 outer.optimizer.lr=0.5",
    "stop": "diloco stop 127.0.0.1:29400",
    "backup": "diloco backup 127.0.0.1:29400 /backups/demo",
    "repair": "diloco repair runs/demo",
    "replay": "diloco replay runs/demo --fragment 0 --from 3",
    "sim goodput": "diloco sim goodput configs/simulations/goodput/2.4M-chips.toml --learners 16",
    "sim check": "diloco sim check --target T4",
    "sim utilization": "diloco sim utilization --method overlap --bandwidth 1Gbit/s",
    "sim bandwidth": "diloco sim bandwidth --method 4-bit --rtt 100ms",
    "sim trace": "diloco sim trace configs/runs/demo.toml --step-time 200ms --plot timeline.png",
    "sim validate": "diloco sim validate --quick",
    "lab run": "diloco lab run configs/simulations/lab.toml --seeds 1,2,3 --plot lab.png",
    "lab suite": "diloco lab suite overlap quorum",
    "emulate": "diloco emulate configs/wan/star-100M-60ms.toml --check -- diloco local RUN.toml",
    "chaos": "diloco chaos configs/chaos/quick.toml --require",
    "bench overhead": "diloco bench overhead --require",
    "bench utilisation": "diloco bench utilisation --require",
    "bench codec": "diloco bench codec --rows int4 --rows 'topk*'",
    "bench syncer": "diloco bench syncer --require",
    "bench wan": "diloco bench wan --json wan.json",
    "bench guard": "diloco bench guard --full",
    "bench plain": "diloco bench plain --require",
    "bench memory": "diloco bench memory --require",
    "bench allreduce": "diloco bench allreduce --json -",
    "bench race": "diloco bench race --quick --plot race.png",
    "bench scaling": "diloco bench scaling --json scaling.json",
    "conformance": "diloco conformance --json conformance.json",
    "baseline": "diloco baseline configs/runs/demo.toml --name flat",
}


def _complete(group: typer.Typer, path: str = "") -> None:
    """Let help pages wrap paragraphs by the terminal's width, and end them with an example."""
    for command in group.registered_commands:
        assert command.callback is not None
        text = inspect.cleandoc(command.help or command.callback.__doc__ or "")
        command.help = "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))
        name = command.name or command.callback.__name__.replace("_", "-")
        if example := EXAMPLES.get(f"{path}{name}"):
            command.epilog = f"Example: {escape(example)}"
    for below in group.registered_groups:
        assert below.typer_instance is not None
        _complete(below.typer_instance, f"{below.name} ")


_complete(app)


def main() -> None:
    """Run the command line; an error of the product ends in its exit code and one message.

    An optional package that is not installed is such an error, whichever command needs it. Anyone
    who reads may have enough (`| head`): that ends it as SIGPIPE ends other programs.
    """
    try:
        app()
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):  # which typer and rich end with 1
            raise
        sys.exit(128 + signal.SIGPIPE)
    except (DilocoError, IsADirectoryError) as problem:
        _end_with(directory_in_place(problem) if isinstance(problem, OSError) else problem)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA_OF:
            raise
        _end_with(missing(shlex.join(["diloco", *sys.argv[1:]]), package))


def _end_with(error: DilocoError) -> NoReturn:
    message = Text.assemble(("error: ", "bold red"), str(error))
    Console(stderr=True).print(message, soft_wrap=True)
    sys.exit(error.exit_code)
