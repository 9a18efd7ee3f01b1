"""Kubernetes: objects for the coordinator, and for each island. Pure.

A run ends, so all of it are Jobs: a StatefulSet starts its pods again whatever they end with. An
island is an Indexed Job whose pods are its hosts, and a Service without an address of its own
gives them the names at which they meet.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from diloco.errors import ConfigError
from diloco.launch.engines.jobs import COORDINATOR, Jobs, read_value
from diloco.launch.engines.templates import Written, render

IMAGE, STORAGE = "example.org/diloco:latest", "100Gi"
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


def files(
    jobs: Jobs,
    settings: Mapping[str, Mapping[str, str]],
    *,
    image: str = IMAGE,
    storage: str = STORAGE,
) -> Iterator[Written]:
    """Write the objects, and the container file of their image.

    Args:
        jobs: Of the run.
        settings: Fields of the pods by job, their values as JSON.
        image: Of every container.
        storage: Of each volume.

    Raises:
        ConfigError: If nothing protects the traffic, or the state would be on no volume, or a
            field is given that is written here.
    """
    jobs.check_is_protected("kubernetes")
    if jobs.config.run.state.startswith("file:"):
        raise ConfigError(
            f'run.state = "{jobs.config.run.state}": a pod has no such directory; give a bucket, '
            f"or leave it out: a PersistentVolumeClaim then has the state"
        )
    for job, given in settings.items():
        if own := sorted(_OWN_FIELDS & given.keys()):
            raise ConfigError(f"--pod {job}:{own[0]}: is written here; edit the file afterwards")
    yield Written("Containerfile", render("Containerfile", run=jobs))
    shared = {"run": jobs, "image": image, "storage": storage}
    for job in jobs.names:
        site = next((island for island in jobs.islands if island.name == job), None)
        template = "coordinator.yaml" if site is None else "island.yaml"
        pod = {key: read_value(value) for key, value in settings[job].items()}
        text = render(template, **shared, site=site, pod=pod, objects=objects_of(job))
        yield Written(objects_of(job), text)


def commands(jobs: Jobs, job: str) -> list[str]:
    """Give what submits a job: its run file, its certificates, and its objects."""
    name = f"{jobs.name}-{job if job == COORDINATOR else f'island-{job}'}"
    own = "coordinator.pem" if job == COORDINATOR else f"island-{job}.pem"
    certs = [f"--from-file={jobs.config.transport.certs}/{file}" for file in ("ca.pem", own)]
    made = "--dry-run=client --output=yaml | kubectl apply -f -"
    return [
        f"kubectl create configmap {jobs.name}-run "
        f"{shlex.quote(f'--from-file=run.toml={jobs.run_file}')} {made}",
        f"kubectl create secret generic {name} {shlex.join(certs)} {made}",
        f"kubectl apply -f {shlex.quote(f'{jobs.directory}/{objects_of(job)}')}",
    ]


def objects_of(job: str) -> str:
    """Give the path of a job's objects below the directory of all of them."""
    return f"kubernetes/{job if job == COORDINATOR else f'island-{job}'}.yaml"
