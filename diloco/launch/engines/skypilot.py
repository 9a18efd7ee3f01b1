"""SkyPilot: a task for the machine of the coordinator, of each syncer, and of each island. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from diloco.errors import ConfigError
from diloco.launch.engines.jobs import IslandJob, Job, Jobs, read_values
from diloco.launch.engines.templates import Written, render

#: With the system, Python and torch.
_LEAST_DISK_GIB = 100


def check(jobs: Jobs, settings: Mapping[str, Mapping[str, str]]) -> None:
    """Require what its tasks cannot be without.

    Raises:
        ConfigError: If nothing protects the traffic, the state would be on no machine, something
            would have no name there, or an island's accelerators are not named.
    """
    jobs.check_is_protected("skypilot")
    for island in jobs.islands:
        if island.devices and "accelerators" not in settings[island.name]:
            raise ConfigError(
                f'islands.{island.name}.device = "cuda": SkyPilot must know which accelerators: '
                f"--resource accelerators=H100, or {island.name}:accelerators=H100 for this one "
                f"(sky show-gpus lists them)"
            )


def files(
    jobs: Jobs, settings: Mapping[str, Mapping[str, str]], *, package: str = ""
) -> Iterator[Written]:
    """Write the tasks.

    Args:
        jobs: Of the run.
        settings: Fields of the tasks' `resources` by job, their values as JSON. Accelerators are
            named alone: their number is that of a host's ranks.
        package: What pip installs on the machines; empty: this package, with the run's extras.
    """
    for job in jobs.each:
        given = read_values(settings[job.name])
        resources: dict[str, object] = {"cpus": f"{job.cpus}+"}
        devices = job.devices if isinstance(job, IslandJob) else 0
        if not devices:
            given.pop("accelerators", None)
        else:
            resources = {}
            if isinstance(kind := given["accelerators"], str) and ":" not in kind:
                given["accelerators"] = f"{kind}:{devices}"
        if not isinstance(job, IslandJob):
            resources["ports"] = list(job.ports)
            if job.memory_gib:
                resources["memory"] = f"{job.memory_gib}+"
                resources["disk_size"] = max(_LEAST_DISK_GIB, job.disk_gib)
        text = render(
            "sky.yaml",
            run=jobs,
            site=job,
            is_island=isinstance(job, IslandJob),
            command=commands(jobs, job)[0],
            resources={**resources, **given},
            package=package or f"diloco[{jobs.extras}]",
        )
        yield Written(_task_of(job), text, job=job.name)


def commands(jobs: Jobs, job: Job) -> list[str]:
    """Give what starts a job, and leaves it running."""
    path = shlex.quote(f"{jobs.directory}/{_task_of(job)}")
    return [f"sky launch --yes --detach-run --cluster {jobs.name}-{job.name} {path}"]


def _task_of(job: Job) -> str:
    """Give the path of a job's task below the directory of all of them."""
    return f"skypilot/{job.stem}.yaml"
