"""`diloco launch`: what Slurm, Kubernetes and SkyPilot run, made from a run file."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli.terminal.options import Overrides, RunFile, flag, option
from diloco.errors import ConfigError

if TYPE_CHECKING:  # commands import what they need when they run
    from diloco.launch.engines.jobs import Jobs
    from diloco.launch.engines.templates import Written

launch = typer.Typer(
    no_args_is_help=True,
    help="Write what Slurm, Kubernetes or SkyPilot runs for a run file, and submit it.",
)

_Out = Annotated[
    Path | None,
    option("Where the files go; left out: the folder launch next to the run file.", "DIR"),
]
_Force = Annotated[bool, flag("Overwrite files that are there and differ.", "--force")]
_Submit = Annotated[bool, flag("Submit them, and show what the engine says.", "--submit")]
_Only = Annotated[
    list[str] | None,
    option(
        "Only this job: coordinator, or an island; repeatable. Where not all sites are here.",
        "JOB",
        "--only",
    ),
]
_PerHost = Annotated[
    list[str] | None,
    option(
        "Ranks of a host; repeatable. Left out: 8 with device cuda, all ranks on CPUs.",
        "[ISLAND=]N",
        "--ranks-per-host",
    ),
]


@launch.command()
def slurm(
    run_file: RunFile,
    sbatch: Annotated[
        list[str] | None,
        option(
            "Option of sbatch, such as time=12:00:00, or of one job: east:partition=h100; "
            "repeatable. KEY= leaves out one that is written.",
            "[JOB:]KEY=VALUE",
        ),
    ] = None,
    ranks_per_host: _PerHost = None,
    only: _Only = None,
    out: _Out = None,
    force: _Force = False,
    submit: _Submit = False,
    overrides: Overrides = None,
) -> None:
    """Write an sbatch script for the coordinator, and one for each island.

    Jobs start in the directory where this is typed, on storage that all their nodes see. They take
    GPUs if islands.NAME.device is cuda. Before the end of a job's time the islands write a
    checkpoint and leave, and the jobs go back into the queue.

    Example: diloco launch slurm RUN.toml --sbatch partition=h100 --sbatch account=me
    """
    from diloco.launch.engines import slurm as engine
    from diloco.launch.engines.jobs import read_settings

    jobs = _jobs(run_file, out, ranks_per_host, overrides)
    settings = read_settings("--sbatch", sbatch or (), jobs)
    engine.check(jobs, settings)
    chosen = _chosen(jobs, only)
    _write(jobs, engine.files(jobs, settings), engine.script_of, chosen, force=force)
    _go_on([line for job in chosen for line in engine.commands(jobs, job)], submit=submit)


@launch.command()
def kubernetes(
    run_file: RunFile,
    image: Annotated[
        str, option("Of every container: one that Containerfile describes.", "NAME", "--image")
    ],
    storage: Annotated[str, option("Of each volume.", "SIZE", "--storage")] = "100Gi",
    pod: Annotated[
        list[str] | None,
        option(
            'Field of the pods, as JSON, such as nodeSelector=\'{"gpu": "h100"}\', or of one '
            "job: coordinator:serviceAccountName=trainer; repeatable.",
            "[JOB:]KEY=VALUE",
        ),
    ] = None,
    ranks_per_host: _PerHost = None,
    only: _Only = None,
    out: _Out = None,
    force: _Force = False,
    submit: _Submit = False,
    overrides: Overrides = None,
) -> None:
    """Write a Job with its Service and volume for the coordinator, and for each island.

    The run file becomes a ConfigMap, and the certificates of each job a Secret of its own; a run
    without certificates is refused. A secret RUN-JOB-env, such as far-island-east-env, is the
    environment of a job if there is one: credentials of buckets, for example.

    Example: diloco launch kubernetes RUN.toml --image registry.example/diloco:1
    """
    from diloco.launch.engines import kubernetes as engine
    from diloco.launch.engines.jobs import read_settings

    jobs = _jobs(run_file, out, ranks_per_host, overrides)
    settings = read_settings("--pod", pod or (), jobs)
    chosen = _chosen(jobs, only)
    files = engine.files(jobs, settings, image=image, storage=storage)
    _write(jobs, files, engine.objects_of, chosen, force=force)
    lines = [line for job in chosen for line in engine.commands(jobs, job)]
    _go_on(list(dict.fromkeys(lines)), submit=submit)


@launch.command()
def skypilot(
    run_file: RunFile,
    resource: Annotated[
        list[str] | None,
        option(
            "Field of the tasks' resources, as JSON, such as accelerators=H100, or of one job: "
            "east:infra=aws/us-east-1; repeatable.",
            "[JOB:]KEY=VALUE",
        ),
    ] = None,
    package: Annotated[
        str, option("What pip installs there: a name, a git+https or wheel URL.", "PACKAGE")
    ] = "diloco",
    ranks_per_host: _PerHost = None,
    only: _Only = None,
    out: _Out = None,
    force: _Force = False,
    submit: _Submit = False,
    overrides: Overrides = None,
) -> None:
    """Write a SkyPilot task for the coordinator's machine, and one for each island's cluster.

    The run file and the certificates of each job are brought to its machines; a run without
    certificates is refused. coordinator.address must lead to the coordinator's machine, which
    `sky status --ip` shows.

    Example: diloco launch skypilot RUN.toml --resource accelerators=H100
    """
    from diloco.launch.engines import skypilot as engine
    from diloco.launch.engines.jobs import read_settings

    jobs = _jobs(run_file, out, ranks_per_host, overrides)
    settings = read_settings("--resource", resource or (), jobs)
    chosen = _chosen(jobs, only)
    files = engine.files(jobs, settings, package=package)
    _write(jobs, files, engine.task_of, chosen, force=force)
    _go_on([line for job in chosen for line in engine.commands(jobs, job)], submit=submit)


def _jobs(
    run_file: Path, out: Path | None, per_host: list[str] | None, overrides: list[str] | None
) -> Jobs:
    from diloco.config.load import load_config
    from diloco.launch.engines.jobs import Jobs

    numbers = {}
    for text in per_host or ():
        name, _, number = text.rpartition("=")
        if not number.isdecimal() or int(number) < 1:
            raise ConfigError(f"--ranks-per-host {text}: write a number from 1, or ISLAND=NUMBER")
        numbers[name] = int(number)
    directory = out or run_file.parent / "launch"
    config = load_config(run_file, overrides or ())
    jobs = Jobs.of(
        config, str(run_file), str(directory), ranks_per_host=numbers, overrides=overrides or ()
    )
    for name in config.syncers:
        typer.echo(
            f"note: no job is written for syncer {name}: on its machine type diloco syncer "
            f"{run_file} --name {name}",
            err=True,
        )
    for name, island in config.islands.items():
        if island.device == "auto":
            typer.echo(
                f"note: islands.{name}.device is auto, so no GPUs are asked for: set it to cuda "
                f"for them, else to cpu",
                err=True,
            )
    return jobs


def _chosen(jobs: Jobs, only: list[str] | None) -> Sequence[str]:
    for job in only or ():
        if job not in jobs.names:
            raise ConfigError(f"--only {job}: no such job; jobs: {', '.join(jobs.names)}")
    return only or jobs.names


def _write(
    jobs: Jobs,
    files: Iterable[Written],
    path_of: Callable[[str], str],
    chosen: Sequence[str],
    *,
    force: bool,
) -> None:
    """Write the files of the chosen jobs; none if one of them is there and differs."""
    from diloco.init.files import write

    others = {path_of(job) for job in jobs.names if job not in chosen}
    made = [each for each in files if each.path not in others]
    directory = Path(jobs.directory)
    for each in made:
        path = directory / each.path
        if path.exists() and path.read_text(encoding="utf-8") != each.text and not force:
            raise ConfigError(
                f"{path} is there, and differs from what would be written; nothing was written. "
                f"--force overwrites it, --out DIR writes elsewhere"
            )
    for each in made:
        typer.echo(f"written: {write(directory, each)}")


def _go_on(lines: Sequence[str], *, submit: bool) -> None:
    """Say what to type next, or type it."""
    if not submit:
        typer.echo("what to type next, in this directory:")
        for line in lines:
            typer.echo(f"  {line}")
        return
    program = lines[0].split()[0]
    if shutil.which(program) is None:
        raise ConfigError(
            f"--submit: there is no {program} on this machine's PATH; the files are written: type "
            f"where it is: {lines[0]}"
        )
    for line in lines:
        typer.echo(f"+ {line}")
        ended = subprocess.run(
            ["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True, check=False
        )
        typer.echo(ended.stdout, nl=False)
        if ended.returncode:
            raise ConfigError(
                f"--submit: {line}\nended with {ended.returncode}: {ended.stderr.strip()}\nThe "
                f"files are written, and what is listed above is submitted. Correct the cause, "
                f"then type this line and those of the jobs after it, or --submit with --only JOB"
            )
