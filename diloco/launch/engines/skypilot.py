"""SkyPilot: a task for the coordinator's machine, and one for each island's cluster. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from diloco.errors import ConfigError
from diloco.launch.engines.jobs import COORDINATOR, Jobs, read_value
from diloco.launch.engines.templates import Written, render

PACKAGE = "diloco"


def files(
    jobs: Jobs, settings: Mapping[str, Mapping[str, str]], *, package: str = PACKAGE
) -> Iterator[Written]:
    """Write the tasks.

    Args:
        jobs: Of the run.
        settings: Fields of the tasks' `resources` by job, their values as JSON. Accelerators are
            named alone: their number is that of a host's ranks.
        package: What pip installs on the machines.

    Raises:
        ConfigError: If nothing protects the traffic, or an island's accelerators are not named.
    """
    jobs.check_is_protected("skypilot")
    written: dict[str, dict[str, object]] = {
        COORDINATOR: {"cpus": f"{2 * len(jobs.ports)}+", "ports": list(jobs.ports)}
    }
    for island in jobs.islands:
        if island.devices and "accelerators" not in settings[island.name]:
            raise ConfigError(
                f'islands.{island.name}.device = "cuda": SkyPilot must know which accelerators: '
                f"--resource accelerators=H100, or {island.name}:accelerators=H100 for this one "
                f"(sky show-gpus lists them)"
            )
        written[island.name] = {"cpus": f"{island.cpus}+"} if not island.devices else {}
    for job, resources in written.items():
        site = next((island for island in jobs.islands if island.name == job), None)
        given = {key: read_value(value) for key, value in settings[job].items()}
        if site is None or not site.devices:
            given.pop("accelerators", None)
        elif isinstance(kind := given.get("accelerators"), str) and ":" not in kind:
            given["accelerators"] = f"{kind}:{site.devices}"
        text = render(
            "sky.yaml",
            run=jobs,
            site=site,
            job=job if site is None else f"island-{job}",
            command=commands(jobs, job)[0],
            resources={**resources, **given},
            package=package,
        )
        yield Written(task_of(job), text)


def commands(jobs: Jobs, job: str) -> list[str]:
    """Give what starts a job, and leaves it running."""
    path = shlex.quote(f"{jobs.directory}/{task_of(job)}")
    return [f"sky launch --yes --detach-run --cluster {jobs.name}-{job} {path}"]


def task_of(job: str) -> str:
    """Give the path of a job's task below the directory of all of them."""
    return f"skypilot/{job if job == COORDINATOR else f'island-{job}'}.yaml"
