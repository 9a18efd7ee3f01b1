"""Kubernetes: objects for the coordinator, each syncer of its own, and each island. Pure.

A run ends, so all of it are Jobs: a StatefulSet starts its pods again whatever they end with. An
island is an Indexed Job whose pods are its hosts, and a Service without an address of its own
gives them the names at which they meet.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping

from diloco.errors import ConfigError
from diloco.launch.engines.jobs import IslandJob, Job, Jobs, read_values
from diloco.launch.engines.templates import Written, render

IMAGE, LEAST_GIB = "example.org/diloco:latest", 100
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?([kMGTPE]|[KMGTPE]i)?")
#: Fields of a pod that are written here, and must not be given too.
_OWN_FIELDS = frozenset(
    {
        "containers",
        "restartPolicy",
        "securityContext",
        "subdomain",
        "terminationGracePeriodSeconds",
        "volumes",
    }
)


def check(jobs: Jobs, settings: Mapping[str, Mapping[str, str]]) -> None:
    """Require what its objects cannot be without.

    Raises:
        ConfigError: If nothing protects the traffic, the state would be on no volume, something
            would have no name there, or a field is given that is written here.
    """
    jobs.check_is_protected("kubernetes")
    for job, given in settings.items():
        if own := sorted(_OWN_FIELDS & given.keys()):
            raise ConfigError(f"--pod {job}:{own[0]}: is written here; edit the file afterwards")


def files(
    jobs: Jobs,
    settings: Mapping[str, Mapping[str, str]],
    *,
    image: str = IMAGE,
    storage: str = "",
) -> Iterator[Written]:
    """Write the objects, and the container file of their image.

    Args:
        jobs: Of the run.
        settings: Fields of the pods by job, their values as JSON.
        image: Of every container.
        storage: Of each volume; empty: 100Gi, of servers more where `diloco plan` foresees it.

    Raises:
        ConfigError: If an option is none that Kubernetes reads.
    """
    if not image.strip():
        raise ConfigError("--image: is empty; give the name of an image that Containerfile makes")
    if storage and not _QUANTITY.fullmatch(storage):
        raise ConfigError(f"--storage {storage}: write it as Kubernetes does, such as 100Gi")
    yield Written("Containerfile", render("Containerfile", run=jobs))
    for job in jobs.each:
        text = render(
            "island.yaml" if isinstance(job, IslandJob) else "server.yaml",
            run=jobs,
            site=job,
            image=image,
            storage=storage or f"{max(LEAST_GIB, getattr(job, 'disk_gib', 0))}Gi",
            pod=read_values(settings[job.name]),
        )
        yield Written(_objects_of(job), text, job=job.name)


def commands(jobs: Jobs, job: Job) -> list[str]:
    """Give what submits a job: its run file, its certificates, and its objects."""
    certs = [f"--from-file={path}" for path in jobs.certificates(job)]
    made = "--dry-run=client --output=yaml | kubectl apply -f -"
    return [
        f"kubectl create configmap {jobs.name}-run "
        f"{shlex.quote(f'--from-file=run.toml={jobs.run_file}')} {made}",
        f"kubectl create secret generic {jobs.name}-{job.stem}-certs {shlex.join(certs)} {made}",
        f"kubectl apply -f {shlex.quote(f'{jobs.directory}/{_objects_of(job)}')}",
    ]


def _objects_of(job: Job) -> str:
    """Give the path of a job's objects below the directory of all of them."""
    return f"kubernetes/{job.stem}.yaml"
