"""A run by Slurm: `diloco launch slurm --submit`, an island preempted, the end of a job's time.

Its syncer is on a machine of its own, so that each of the three scripts takes part.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from diloco.config.load import load_config
from diloco.report.summary import read_events
from tests.launch.slurm_cluster import DAEMONS, SlurmCluster, slurm_cluster
from tests.run_files import write_run
from tests.waiting import wait_until, written

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        not all(map(shutil.which, DAEMONS)), reason=f"needs {', '.join(DAEMONS)} of Slurm"
    ),
]

JOBS = ("test-coordinator", "test-syncer-eu", "test-east", "test-west")
INNER_STEPS = 400


class Site:
    """The directory in which everything is typed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "bin").mkdir()
        (directory / "bin" / "diloco").write_text(
            f'#!/bin/bash\nexec {sys.executable} -m diloco "$@"\n'
        )
        (directory / "bin" / "diloco").chmod(0o755)
        self.environment = {
            **os.environ,
            "PATH": f"{directory / 'bin'}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        }

    def type(self, cluster: SlurmCluster, *words: str) -> str:
        typed = subprocess.run(
            words,
            cwd=self.directory,
            env=cluster.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert typed.returncode == 0, (words, typed.stdout, typed.stderr)
        return typed.stdout

    def logs(self) -> str:
        paths = sorted(self.directory.rglob("*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in paths)


def two_free_ports() -> int:
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first, suppress(OSError):
            port = int(first.getsockname()[1])
            with socket.create_server(("127.0.0.1", port + 1)):
                return port


def test_a_run_outlives_a_preempted_island_and_the_end_of_a_jobs_time(tmp_path: Path) -> None:
    site = Site(tmp_path)
    write_run(tmp_path, {"east": "", "west": "dp_shard = 2"}, inner_steps=INNER_STEPS)
    port = two_free_ports()
    sets = (
        f"coordinator.listen=127.0.0.1:{port}",
        f'syncers={{eu={{listen="127.0.0.1:{port + 1}"}}}}',
        f"run.state=file://{tmp_path / 'objects'}",
        f"coordinator.address=127.0.0.1:{port}",
        "coordinator.state_dir=state",
        "checkpoint.every_inner_steps=20",
        "transport.unreachable=600s",  # a syncer that goes back into the queue is away for long
    )
    words = [word for each in sets for word in ("--set", each)]
    telemetry = tmp_path / load_config(tmp_path / "run.toml", sets).telemetry_dir

    with slurm_cluster(site.environment) as cluster:

        def state(job: str) -> str:
            return cluster.job(job).get("JobState", "")

        def await_states(expected: str) -> None:
            wait_until(
                lambda: {*map(state, JOBS)} == {expected},
                120,
                progress=written(tmp_path),
                what=lambda: f"{[*map(state, JOBS)]}\n{site.logs()}",
                every_s=0.5,
            )

        def await_restarts(expected: dict[str, int]) -> None:
            """Wait until these jobs have started again so many times; none waits in the queue."""

            def have_started() -> bool:
                known = {name: cluster.job(name) for name in expected}
                states = {name: known[name]["JobState"] for name in expected}
                found = {name: int(known[name]["Restarts"]) for name in expected}
                return found == expected and {*states.values()} <= {"RUNNING", "COMPLETED"}

            # A job that goes back into the queue stays there for two minutes. To set its StartTime
            # to now is no way around: it would start while its last start still ends.
            wait_until(have_started, 300, what=site.logs, every_s=1)

        small = ("--sbatch", "cpus-per-task=1", "--sbatch", "time=30", "--submit")
        said = site.type(cluster, "diloco", "launch", "slurm", "run.toml", *words, *small)
        assert said.count("Submitted batch job") == len(JOBS), said
        await_states("RUNNING")
        wait_until(lambda: len(starts(telemetry)) == 2, 120, what=site.logs)

        # West is stopped by hand: in order, and it stays out of the queue.
        cluster.run("scancel", "--batch", "--signal=TERM", cluster.job("test-west")["JobId"])
        wait_until(lambda: state("test-west") == "FAILED", what=site.logs)
        assert cluster.job("test-west")["ExitCode"] == "143:0", site.logs()
        assert "stopping island west, signal=SIGTERM" in (tmp_path / "test-west.log").read_text()
        site.type(cluster, "sbatch", "launch/slurm/island-west.sbatch")
        wait_until(lambda: starts(telemetry).get("west") == 2, 120, what=site.logs)

        # West and the syncer are preempted: west returns to the run, from its last checkpoint, and
        # rounds wait for the syncer's next start.
        for job in ("test-west", "test-syncer-eu"):
            cluster.run("scontrol", "requeue", cluster.job(job)["JobId"])
        await_restarts({"test-west": 1, "test-syncer-eu": 1})
        wait_until(lambda: starts(telemetry).get("west") == 3, 120, what=site.logs)

        # East comes near the end of its time: all write a checkpoint, leave, and go on from it.
        cluster.run("scancel", "--batch", "--signal=USR1", cluster.job("test-east")["JobId"])
        await_restarts({"test-coordinator": 1, "test-syncer-eu": 2, "test-east": 1, "test-west": 2})
        await_states("COMPLETED")
        codes = {job: cluster.job(job)["ExitCode"] for job in JOBS}
    report = site.type(cluster, "diloco", "report", "run.toml", *words)

    logs = site.logs()
    assert codes == dict.fromkeys(JOBS, "0:0"), logs
    events = read_events(telemetry, ["east", "west"])
    ended = [e for lines in events.values() for e in lines if e["kind"] == "island_ended"]
    assert {event["inner_step"] for event in ended[-3:]} == {INNER_STEPS}
    assert len({tuple(event["digests"]) for event in ended if event["digests"]}) == 1
    assert "digests equal on every island" in " ".join(report.split())


def starts(telemetry: Path) -> dict[str, int]:
    """Return the newest start of each island that has merged something."""
    return {
        event["island"]: event["incarnation"]
        for events in read_events(telemetry, ["east", "west"]).values()
        for event in events
        if event["kind"] == "fragment_merged"
    }
