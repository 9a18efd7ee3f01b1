"""`diloco launch`: what Slurm, Kubernetes and SkyPilot run, made from a run file."""

from __future__ import annotations

import importlib
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from diloco.cli.terminal.options import Overrides, RunFile, flag, option, with_options
from diloco.errors import ConfigError

if TYPE_CHECKING:  # commands import what they need when they run
    from diloco.launch.engines.jobs import Job, Jobs
    from diloco.launch.engines.templates import Written

launch = typer.Typer(
    no_args_is_help=True,
    help="Write what Slurm, Kubernetes or SkyPilot runs for a run file, and submit it.",
)

#: An option of settings by job, what was typed of it, and what else the engine's files are made of.
Own: TypeAlias = tuple[str, list[str] | None, dict[str, str]]


@dataclass(frozen=True, slots=True)
class _Shared:
    """Options of every engine."""

    ranks_per_host: Annotated[
        list[str] | None,
        option(
            "Ranks of a host; repeatable. Left out: 8 with device cuda, all ranks on CPUs.",
            "[ISLAND=]N",
            "--ranks-per-host",
        ),
    ] = None
    only: Annotated[
        list[str] | None,
        option(
            "Only this job: coordinator, syncer-NAME, or an island; repeatable. Where not all "
            "sites are here.",
            "JOB",
            "--only",
        ),
    ] = None
    out: Annotated[
        Path | None,
        option("Where the files go; left out: the folder launch next to the run file.", "DIR"),
    ] = None
    force: Annotated[bool, flag("Overwrite files that are there and differ.", "--force")] = False
    submit: Annotated[bool, flag("Submit them, and show what the engine says.", "--submit")] = False
    overrides: Overrides = None


def _engine(declared: Callable[..., Own]) -> None:
    """Make a command of an engine's function, which says its own options and its help."""

    def command(run_file: Path, **given: Any) -> None:  # options of several types, hence `Any`
        from diloco.config.island import read_ranks_per_host
        from diloco.config.load import load_config
        from diloco.launch.engines.jobs import Jobs, read_settings

        shared = _Shared(**{each.name: given.pop(each.name) for each in fields(_Shared)})
        option_name, texts, more = declared(run_file, **given)
        engine = importlib.import_module(f"diloco.launch.engines.{declared.__name__}")
        overrides = shared.overrides or ()
        config = load_config(run_file, overrides)
        jobs = Jobs.of(
            config,
            str(run_file),
            str(shared.out or run_file.parent / "launch"),
            ranks_per_host=read_ranks_per_host(shared.ranks_per_host or (), config.islands),
            overrides=overrides,
        )
        settings = read_settings(option_name, texts or (), jobs)
        engine.check(jobs, settings)
        chosen = jobs.chosen(shared.only or ())
        files = engine.files(jobs, settings, **more)
        lines = [line for job in chosen for line in engine.commands(jobs, job)]
        _note(jobs, chosen, is_submitted=shared.submit)
        _write(jobs, files, chosen, force=shared.force)
        _go_on(list(dict.fromkeys(lines)), submit=shared.submit)

    launch.command(declared.__name__)(with_options(command, declared, _Shared))


@_engine
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
) -> Own:
    """Write an sbatch script for the coordinator, and one for each island and syncers.NAME.

    Jobs start in the directory where this is typed, on storage that all their nodes see. They take
    GPUs if islands.NAME.device is cuda. Before the end of a job's time the islands write a
    checkpoint and leave, and the jobs go back into the queue.

    Example: diloco launch slurm RUN.toml --sbatch partition=h100 --sbatch account=me
    """
    return "--sbatch", sbatch, {}


@_engine
def kubernetes(
    run_file: RunFile,
    image: Annotated[
        str, option("Of every container: one that Containerfile describes.", "NAME", "--image")
    ],
    storage: Annotated[
        str,
        option(
            "Of each volume; left out: 100Gi, of servers what a plan foresees.", "SIZE", "--storage"
        ),
    ] = "",
    pod: Annotated[
        list[str] | None,
        option(
            'Field of the pods, as JSON, such as nodeSelector=\'{"gpu": "h100"}\', or of one '
            "job: coordinator:serviceAccountName=trainer; repeatable.",
            "[JOB:]KEY=VALUE",
        ),
    ] = None,
) -> Own:
    """Write a Job, a Service and a volume for the coordinator, each island and syncers.NAME.

    The run file becomes a ConfigMap, and the certificates of each job a Secret of its own; a run
    without certificates is refused. A secret such as far-coordinator-env, far-syncer-eu-env or
    far-island-east-env is the environment of that job of the run far, if there is one: credentials
    of buckets, for example.

    Example: diloco launch kubernetes RUN.toml --image registry.example/diloco:1
    """
    return "--pod", pod, {"image": image, "storage": storage}


@_engine
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
        str,
        option(
            "What pip installs there: a name, a git+https or wheel URL; left out: diloco with the "
            "extras that the run needs.",
            "PACKAGE",
        ),
    ] = "",
) -> Own:
    """Write a SkyPilot task for the coordinator's machine, each syncers.NAME and island.

    The run file and the certificates of each job are brought to its machines; a run without
    certificates is refused. The addresses of coordinator and syncers in the run file must lead to
    their machines, which `sky status --ip` shows.

    Example: diloco launch skypilot RUN.toml --resource accelerators=H100
    """
    return "--resource", resource, {"package": package}


def _note(jobs: Jobs, chosen: Iterable[Job], *, is_submitted: bool) -> None:
    """Say what is to be corrected before the jobs are submitted.

    Raises:
        ConfigError: If they are about to be, and could not start.
    """
    for name, island in jobs.config.islands.items():
        if island.device == "auto":
            typer.echo(
                f"note: islands.{name}.device is auto, so no GPUs are asked for: set it to cuda "
                f"for them, else to cpu",
                err=True,
            )
    paths = {path for job in chosen for path in jobs.certificates(job)}
    if lacking := sorted(path for path in paths if not Path(path).is_file()):
        said = (
            f"{', '.join(lacking)}: not here; bring them, or make them: "
            f"{jobs.certificates_made_by(lacking)}"
        )
        if is_submitted:
            raise ConfigError(f"--submit: {said}; nothing is written")
        typer.echo(f"note: before the jobs are submitted: {said}", err=True)


def _write(jobs: Jobs, files: Iterable[Written], chosen: Iterable[Job], *, force: bool) -> None:
    """Write the files of the chosen jobs; none if one of them is there and differs."""
    from diloco.init.files import write

    wanted = {"", *(job.name for job in chosen)}
    made = [each for each in files if each.job in wanted]
    directory = Path(jobs.directory)
    try:
        for each in made:
            path = directory / each.path
            if path.exists() and path.read_bytes() != each.text.encode() and not force:
                raise ConfigError(
                    f"{path} is there, and differs from what would be written; nothing was "
                    f"written. --force overwrites it, --out DIR writes elsewhere"
                )
        for each in made:
            typer.echo(f"written: {write(directory, each)}")
    except OSError as error:
        raise ConfigError(
            f"the files of the jobs cannot be written to {directory}: {error}. Give a directory in "
            f"which this user may write: --out DIR"
        ) from error


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
            f"--submit: there is no {program} on this machine's PATH; the files are written. Where "
            f"it is, type, in this directory:\n  " + "\n  ".join(lines)
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
