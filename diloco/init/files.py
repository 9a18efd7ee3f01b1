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

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from diloco.durable import write_durably
from diloco.errors import FINAL_EXIT_CODES
from diloco.init.answers import MEETING_PORT, Answers, Site, bare_host

RUN_FILE, NEXT_STEPS = "run.toml", "NEXT.md"


@dataclass(frozen=True, slots=True)
class Written:
    """A file of a run: where it goes below the run's directory, and what is in it."""

    path: str
    text: str
    is_script: bool = False


def run_file(answers: Answers) -> Written:
    """Write the run file alone."""
    return Written(RUN_FILE, _render("run.toml", answers))


def all_files(answers: Answers) -> Iterator[Written]:
    """Write every file but certificates."""
    yield run_file(answers)
    yield Written(NEXT_STEPS, _render(NEXT_STEPS, answers))
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
    if "slurm" in answers.launchers:
        yield Written("launch/slurm/coordinator.sbatch", _render("coordinator.sbatch", answers))
        for site in answers.sites:
            text = _render("island.sbatch", answers, site=site)
            yield Written(f"launch/slurm/island-{site.name}.sbatch", text)
    if "kubernetes" in answers.launchers:
        yield Written("launch/Containerfile", _render("Containerfile", answers))
        yield Written("launch/kubernetes/coordinator.yaml", _render("coordinator.yaml", answers))
        for site in answers.sites:
            text = _render("island.yaml", answers, site=site)
            yield Written(f"launch/kubernetes/island-{site.name}.yaml", text)


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
    found = _templates().get_template(f"{template}.j2")
    return found.render(
        run=answers,
        final_codes=sorted(FINAL_EXIT_CODES),
        asked_to_end=[129, 130, 143],  # 128 + SIGHUP, SIGINT, SIGTERM
        **more,
    )


@functools.cache
def _templates() -> Environment:
    """Give the templates, each compiled once: a run may have units for thousands of hosts."""
    environment = Environment(
        loader=FileSystemLoader(str(files("diloco").joinpath("configs", "launch"))),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        comment_start_string="{##",  # ${#list} is bash's
        comment_end_string="##}",
    )
    environment.filters |= {"toml": _toml, "bare_host": bare_host}
    environment.globals |= {"unit_of": unit_of, "meeting_port": MEETING_PORT}
    return environment


def _toml(value: str | tuple[str, ...]) -> str:
    """Write a text, or an array of them, as TOML, whose escapes are JSON's."""
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
