"""Slurm: an sbatch script for the coordinator, each syncer of its own, and each island. Pure."""

from __future__ import annotations

import ipaddress
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress

from diloco.errors import ConfigError
from diloco.launch.engines.jobs import IslandJob, Job, Jobs, ServerJob
from diloco.launch.engines.templates import Written, render
from diloco.transport.addresses import is_loopback

#: Seconds before the end of a job's time: every island's way to its next checkpoint, or an end.
_CHECKPOINT_S, _END_S = 1200, 120


def check(jobs: Jobs, settings: Mapping[str, Mapping[str, str]]) -> None:
    """Require that Slurm can be told where coordinator and syncers are to run.

    Raises:
        ConfigError: If one is known by its IP address only.
    """
    for server in jobs.servers:
        is_known = not _is_ip(server.host) or is_loopback(server.host)
        if not is_known and "nodelist" not in settings[server.name]:
            raise ConfigError(
                f'{server.key} = "{server.address}": Slurm knows nodes by their names; give that '
                f"of the node as the address, or say which one has it: diloco launch slurm "
                f"{shlex.quote(jobs.run_file)} --sbatch {server.name}:nodelist=NODE"
            )


def files(jobs: Jobs, settings: Mapping[str, Mapping[str, str]]) -> Iterator[Written]:
    """Write the scripts.

    Args:
        jobs: Of the run.
        settings: Options of sbatch by job, over those that are written; an empty value: the option
            alone, but for those that are written, which are then left out.
    """
    for job in jobs.each:
        if isinstance(job, IslandJob):
            template, options = "island", _island_options(jobs, job)
        else:
            template, options = (
                "syncer" if job.syncer else "coordinator",
                _server_options(jobs, job),
            )
        text = render(
            f"{template}.sbatch",
            run=jobs,
            site=job,
            command=commands(jobs, job)[0],
            options=_laid_over(options, settings[job.name]),
        )
        yield Written(_script_of(job), text, job=job.name)


def commands(jobs: Jobs, job: Job) -> list[str]:
    """Give what submits a job."""
    return [f"sbatch {shlex.quote(f'{jobs.directory}/{_script_of(job)}')}"]


def _script_of(job: Job) -> str:
    """Give the path of a job's script below the directory of all of them."""
    return f"slurm/{job.stem}.sbatch"


def _server_options(jobs: Jobs, server: ServerJob) -> dict[str, str]:
    # One that is on this machine alone is where islands are: a cluster of one node.
    is_anywhere = _is_ip(server.host) or is_loopback(server.host)
    at = {} if is_anywhere else {"nodelist": server.host}
    return {
        "job-name": f"{jobs.name}-{server.name}",
        **at,
        "nodes": "1",
        "ntasks": "1",
        "cpus-per-task": str(server.cpus),
        **({"mem": f"{server.memory_gib}G"} if server.memory_gib else {}),
        **_time_options(_CHECKPOINT_S),
    }


def _island_options(jobs: Jobs, island: IslandJob) -> dict[str, str]:
    devices = {"gpus-per-node": str(island.devices)} if island.devices else {}
    # Where islands wait for each other, the end of one job's time concerns all.
    is_scheduled = jobs.config.outer.merge == "scheduled"
    return {
        "job-name": f"{jobs.name}-{island.name}",
        "nodes": str(island.num_hosts),
        "ntasks-per-node": "1",
        **devices,
        "cpus-per-task": str(island.cpus),
        **_time_options(_CHECKPOINT_S if is_scheduled else _END_S),
    }


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
    return [
        f"--{key}={shlex.quote(value)}" if value else f"--{key}" for key, value in merged.items()
    ]


def _is_ip(host: str) -> bool:
    with suppress(ValueError):
        ipaddress.ip_address(host.strip("[]"))
        return True
    return False
