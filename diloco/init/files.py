"""Writes the files of a run from the templates of configs/launch.

    run.toml                       the run, for all sites
    NEXT.md                        what to type now, in order
    launch/ssh.sh                  all hosts over SSH
    launch/systemd/*.service       a unit for the coordinator, and one for each host of an island
    launch/slurm/*.sbatch          a job for the coordinator, and one for each island
    launch/kubernetes/*.yaml       the same, and launch/Containerfile for their image

Certificates are made by the command, as `diloco certs init` makes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from diloco.config.schema import Config
from diloco.durable import write_durably
from diloco.init.answers import Answers, Site
from diloco.launch.engines import kubernetes, slurm
from diloco.launch.engines.jobs import Jobs, read_settings
from diloco.launch.engines.templates import Written, render

RUN_FILE, NEXT_STEPS, _LAUNCH = "run.toml", "NEXT.md", "launch"
#: What starts a run by itself, as `diloco launch` writes it too.
_ENGINES = {"slurm": slurm, "kubernetes": kubernetes}


def run_file(answers: Answers) -> Written:
    """Write the run file alone."""
    return Written(RUN_FILE, _render("run.toml", answers))


def all_files(answers: Answers, config: Config) -> Iterator[Written]:
    """Write every file but certificates.

    Args:
        answers: What the run is made from.
        config: What the run file says.
    """
    yield run_file(answers)
    engines = {name: each for name, each in _ENGINES.items() if name in answers.launchers}
    commands: dict[str, list[str]] = {}
    if engines:
        per_host = {site.name: site.ranks_per_host for site in answers.sites}
        jobs = Jobs.of(config, RUN_FILE, _LAUNCH, ranks_per_host=per_host)
        for name, engine in engines.items():
            lines = [line for job in jobs.each for line in engine.commands(jobs, job)]
            commands[name] = list(dict.fromkeys(lines))
            settings = read_settings("", (), jobs)
            engine.check(jobs, settings)
            for each in engine.files(jobs, settings):
                yield replace(each, path=f"{_LAUNCH}/{each.path}")
    yield Written(NEXT_STEPS, _render(NEXT_STEPS, answers, commands=commands))
    if "ssh" in answers.launchers:
        yield Written("launch/ssh.sh", _render("ssh.sh", answers), is_script=True)
    if "systemd" in answers.launchers:
        yield Written(
            f"launch/systemd/{answers.name}-coordinator.service",
            _render("coordinator.service", answers),
        )
        for site in answers.sites:
            for index, host in enumerate(site.hosts):
                yield Written(
                    f"launch/systemd/{unit_of(answers, site, index)}.service",
                    _render("island.service", answers, site=site, index=index, host=host),
                )


def write(directory: Path, written: Written) -> Path:
    """Write one file; returns where it is."""
    path = directory / written.path
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = 0o755 if written.is_script else 0o644
    write_durably(path, [written.text.encode()], mode=mode)
    return path


def unit_of(answers: Answers, site: Site, index: int) -> str:
    """Name the systemd unit of a host of an island."""
    number = f"-{index}" if site.num_hosts > 1 else ""
    return f"{answers.name}-island-{site.name}{number}"


def _render(template: str, answers: Answers, **more: Any) -> str:
    """Fill a template; what it is given are values of several types, hence `Any`."""
    return render(template, run=answers, unit_of=unit_of, **more)
