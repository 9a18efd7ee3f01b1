"""Slurm: an sbatch script for the coordinator, and one for each island. Pure."""

from __future__ import annotations

import ipaddress
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress

from diloco.errors import ConfigError
from diloco.launch.engines.jobs import COORDINATOR, IslandJob, Jobs
from diloco.launch.engines.templates import Written, render
from diloco.transport.addresses import is_loopback

#: Seconds before the end of a job's time: every island's way to its next checkpoint, or an end.
_CHECKPOINT_S, _END_S = 1200, 120


def files(jobs: Jobs, settings: Mapping[str, Mapping[str, str]]) -> Iterator[Written]:
    """Write the scripts.

    Args:
        jobs: Of the run.
        settings: Options of sbatch by job, over those that are written; an empty value: the option
            alone, but for those that are written, which are then left out.
    """
    yield Written(
        script_of(COORDINATOR),
        render(
            "coordinator.sbatch",
            run=jobs,
            script=f"{jobs.directory}/{script_of(COORDINATOR)}",
            options=_laid_over(_coordinator_options(jobs), settings[COORDINATOR]),
        ),
    )
    for island in jobs.islands:
        yield Written(
            script_of(island.name),
            render(
                "island.sbatch",
                run=jobs,
                site=island,
                script=f"{jobs.directory}/{script_of(island.name)}",
                options=_laid_over(_island_options(jobs, island), settings[island.name]),
            ),
        )


def commands(jobs: Jobs, job: str) -> list[str]:
    """Give what submits a job."""
    return [f"sbatch {shlex.quote(f'{jobs.directory}/{script_of(job)}')}"]


def script_of(job: str) -> str:
    """Give the path of a job's script below the directory of all of them."""
    return f"slurm/{job if job == COORDINATOR else f'island-{job}'}.sbatch"


def check(jobs: Jobs, settings: Mapping[str, Mapping[str, str]]) -> None:
    """Require that Slurm can be told where the coordinator is to run.

    Raises:
        ConfigError: If it is known by its IP address only.
    """
    if _is_ip(jobs.host) and not is_loopback(jobs.host) and "nodelist" not in settings[COORDINATOR]:
        raise ConfigError(
            f'coordinator.address = "{jobs.coordinator}": Slurm knows nodes by their names; say '
            f"which one has that address: --sbatch {COORDINATOR}:nodelist=NODE"
        )


def _coordinator_options(jobs: Jobs) -> dict[str, str]:
    # One that is on this machine alone is where islands are: a cluster of one node.
    at = {} if _is_ip(jobs.host) or is_loopback(jobs.host) else {"nodelist": jobs.host}
    return {
        "job-name": f"{jobs.name}-coordinator",
        **at,
        "nodes": "1",
        "ntasks": "1",
        "cpus-per-task": str(2 * len(jobs.ports)),
        **_time_options(_CHECKPOINT_S),
    }


def _island_options(jobs: Jobs, island: IslandJob) -> dict[str, str]:
    devices = {"gpus-per-node": str(island.devices)} if island.devices else {}
    return {
        "job-name": f"{jobs.name}-{island.name}",
        "nodes": str(island.num_hosts),
        "ntasks-per-node": "1",
        **devices,
        "cpus-per-task": str(island.cpus),
        **_time_options(_CHECKPOINT_S if is_scheduled(jobs) else _END_S),
    }


def is_scheduled(jobs: Jobs) -> bool:
    """Whether islands wait for each other, so that the end of one job's time concerns all."""
    return jobs.config.outer.merge == "scheduled"


def _time_options(signal_s: int) -> dict[str, str]:
    return {
        "time": "24:00:00",
        "signal": f"B:USR1@{signal_s}",
        "requeue": "",
        "open-mode": "append",
        "output": "%x.log",
    }


def _laid_over(written: Mapping[str, str], given: Mapping[str, str]) -> list[str]:
    """Give the text of all options, in order."""
    left_out = {key for key, value in given.items() if not value and key in written}
    merged = {key: value for key, value in {**written, **given}.items() if key not in left_out}
    return [f"--{key}={value}" if value else f"--{key}" for key, value in merged.items()]


def _is_ip(host: str) -> bool:
    with suppress(ValueError):
        ipaddress.ip_address(host.strip("[]"))
        return True
    return False
