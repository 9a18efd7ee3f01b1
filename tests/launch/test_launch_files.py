"""`configs/launch`: the scripts are run with recorders for `diloco`, `srun` and `ssh`.

Whatever they would type is then parsed by the real command line, and their overrides by the real
schema, so that no flag and no key can rot.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from diloco.cli.main import app
from diloco.config.load import load_config
from diloco.errors import ConfigError, Fenced, FingerprintMismatch, PlanMismatch
from diloco.launch.host_position import HostPosition
from tests.run_files import write_run
from tests.waiting import wait_until

LAUNCH = Path(__file__).parents[2] / "configs" / "launch"
COORDINATOR = "head.example.org:4711"


class Recorder:
    """A PATH on which `diloco` only notes what it was given, and clusters are this machine."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.notes = root / "notes"
        self.notes.mkdir()
        (root / "bin").mkdir()
        (root / "diloco").mkdir()  # the directory of ssh.sh, below the home of every host
        self.command(
            "diloco", f"printf '%s\\0' \"$@\" > {root}/part.$$; mv {root}/part.$$ {self.notes}/$$"
        )
        self.command("ssh", f'cd {root}; echo "$1" >> {root}/hosts; exec bash -c "$2"')
        self.command("srun", 'for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@" || exit; done')
        self.command("scontrol", "echo node7; echo node8")
        self.command("sleep", "")

    def command(self, name: str, script: str) -> None:
        path = self.root / "bin" / name
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)

    def run(self, *arguments: str, **environ: str) -> None:
        path = f"{self.root / 'bin'}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, **environ}
        subprocess.run(arguments, env=environment, check=True, cwd=self.root)

    def noted(self, number: int) -> list[list[str]]:
        """Wait for so many notes; return the arguments, sorted."""
        wait_until(lambda: len(list(self.notes.iterdir())) >= number)
        return sorted(note.read_text().split("\0")[:-1] for note in self.notes.iterdir())


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(tmp_path)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", {"eu-west": "dp_shard = 2", "us-east": ""})


def parsed(arguments: Sequence[str]) -> dict[str, Any]:
    """Parse a command line as `diloco` does, and run nothing."""
    group: Any = typer.main.get_command(app)  # of click, in typer's own copy
    name, *rest = arguments
    return dict(group.commands[name].make_context(name, list(rest)).params)


def position(options: Mapping[str, Any], num_ranks: int) -> HostPosition:
    return HostPosition.of(
        num_ranks, nnodes=options["nnodes"], node_rank=options["node_rank"], rdzv=options["rdzv"]
    )


def test_every_shell_script_is_bash() -> None:
    for script in (LAUNCH / "slurm.sbatch", LAUNCH / "ssh.sh"):
        subprocess.run(["bash", "-n", script], check=True)


def test_commands_in_comments_are_commands() -> None:
    for path in sorted(LAUNCH.iterdir()):
        for command in re.findall(r"^\s*# +diloco (.*)$", path.read_text(), re.MULTILINE):
            parsed(shlex.split(command.replace("$run", "run.toml")))


def test_slurm_starts_a_coordinator(recorder: Recorder) -> None:
    recorder.run("bash", str(LAUNCH / "slurm.sbatch"), "coordinator", "run.toml")

    (arguments,) = recorder.noted(1)
    assert arguments == ["coordinator", "run.toml"]
    parsed(arguments)


def test_slurm_starts_an_island_of_two_hosts(recorder: Recorder) -> None:
    script = str(LAUNCH / "slurm.sbatch")
    slurm = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_NUM_NODES": "2"}

    recorder.run("bash", script, "island", "run.toml", "eu-west", COORDINATOR, **slurm)

    hosts = [parsed(arguments) for arguments in recorder.noted(2)]
    assert [position(host, 2) for host in hosts] == [
        HostPosition(2, i, "node7:29400") for i in range(2)
    ]
    assert {(h["name"], h["coordinator"]) for h in hosts} == {("eu-west", COORDINATOR)}


@pytest.mark.parametrize("action", ["start", "resume"])
def test_ssh_starts_the_coordinator_and_every_host(recorder: Recorder, action: str) -> None:
    recorder.run("bash", str(LAUNCH / "ssh.sh"), action)

    coordinator, *islands, status = recorder.noted(5)
    assert parsed(coordinator)["resume"] is (action == "resume")
    assert status == ["status", COORDINATOR]
    options = [parsed(arguments) for arguments in islands]
    assert [(o["name"], o["coordinator"]) for o in options] == [
        ("eu-west", COORDINATOR),
        ("eu-west", COORDINATOR),
        ("us-east", COORDINATOR),
    ]
    first = "gpu1.eu.example.org:29400"
    assert [position(o, 2) for o in options] == [
        HostPosition(2, 0, first),
        HostPosition(2, 1, first),
        HostPosition(),
    ]
    assert (recorder.root / "hosts").read_text().split() == [
        "head.example.org",
        "gpu1.eu.example.org",
        "gpu2.eu.example.org",
        "gpu1.us.example.org",
    ]


def test_ssh_stops_the_coordinator_that_it_started(recorder: Recorder) -> None:
    victim = subprocess.Popen(["/bin/sleep", "60"])
    (recorder.root / "diloco" / "coordinator.log.pid").write_text(f"{victim.pid}\n")

    recorder.run("bash", str(LAUNCH / "ssh.sh"), "stop")

    assert victim.wait(20) == -15


def test_kubernetes_objects_name_each_other() -> None:
    objects = list(yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text()))

    by_kind: dict[str, dict[str, Any]] = {}
    for each in objects:
        by_kind.setdefault(each["kind"], {})[each["metadata"]["name"]] = each["spec"]
    assert by_kind.keys() == {"Service", "PersistentVolumeClaim", "Job"}
    for name, job in by_kind["Job"].items():
        template = job["template"]
        assert by_kind["Service"][name]["selector"] == template["metadata"]["labels"]
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        (container,) = template["spec"]["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                assert claim in by_kind["PersistentVolumeClaim"]


def test_kubernetes_starts_no_island_again_that_would_end_the_same_way() -> None:
    objects = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    (island,) = (
        each["spec"]
        for each in objects
        if each["kind"] == "Job" and each["metadata"]["name"] != "diloco-coordinator"
    )

    (rule,) = island["podFailurePolicy"]["rules"]
    (container,) = island["template"]["spec"]["containers"]
    final = {kind.exit_code for kind in (ConfigError, PlanMismatch, FingerprintMismatch, Fenced)}
    assert rule == {
        "action": "FailJob",
        "onExitCodes": {
            "containerName": container["name"],
            "operator": "In",
            "values": sorted(final),
        },
    }
    # Kubernetes refuses the policy with any other.
    assert island["template"]["spec"]["restartPolicy"] == "Never"


def test_kubernetes_pods_type_what_is_understood(recorder: Recorder, run_file: Path) -> None:
    objects = list(yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text()))
    jobs = {each["metadata"]["name"]: each["spec"] for each in objects if each["kind"] == "Job"}
    for job in jobs.values():
        (container,) = job["template"]["spec"]["containers"]
        for index in range(job.get("completions", 1)):
            words = [*container["command"], *container["args"]]
            recorder.run(*words, JOB_COMPLETION_INDEX=str(index))

    coordinator, *islands = [parsed(arguments) for arguments in recorder.noted(3)]

    config = load_config(run_file, coordinator["overrides"])
    ports = {port["port"] for port in objects[0]["spec"]["ports"]}
    listening = (config.coordinator.listen, config.coordinator.syncer_listen)
    assert {int(address.rpartition(":")[2]) for address in listening} == ports
    meeting = "diloco-eu-west-0.diloco-eu-west:29400"
    assert [position(o, 2) for o in islands] == [HostPosition(2, i, meeting) for i in range(2)]
    for options in islands:
        assert options["coordinator"] == config.coordinator.address
        load_config(run_file, options["overrides"], island=options["name"])
