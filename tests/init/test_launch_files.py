"""What `diloco init` writes to start a run: linted, and run with recorders for what it types.

Whatever it would type is then parsed by the real command line, and its overrides by the real
schema, so that no flag and no key can rot.
"""

from __future__ import annotations

import configparser
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml
from typer.testing import CliRunner

from diloco.cli.main import app
from diloco.config.load import load_config
from diloco.errors import FINAL_EXIT_CODES
from diloco.launch.host_position import HostPosition
from tests.waiting import exit_code, run_command, wait_until

BIN = Path(sys.executable).parent
HEAD, COORDINATOR = "head.example.org", "head.example.org:4711"
MEETING = "gpu1.eu.example.org:29400"
HOSTS = {
    "eu-west": ("gpu1.eu.example.org", "gpu2.eu.example.org"),
    "us-east": ("me@gpu1.us.example.org",),
}
KUBERNETES = "1.37"


class Recorder:
    """A PATH on which `diloco` only notes what it was given, and clusters are this machine."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.notes = root / "notes"
        self.notes.mkdir()
        (root / "bin").mkdir()
        self.command(
            "diloco", f"printf '%s\\0' \"$@\" > {root}/part.$$; mv {root}/part.$$ {self.notes}/$$"
        )
        self.command("ssh", f'cd {root}; echo "$1" >> {root}/hosts; exec bash -c "$2"')
        self.command("srun", 'for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@" || exit; done')
        self.command(
            "scontrol",
            f'if [[ $1 == requeue ]]; then echo "$2" >> {root}/requeued-jobs; '
            f"else echo node7; echo node8; fi",
        )

    def command(self, name: str, script: str) -> None:
        path = self.root / "bin" / name
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)

    def start(self, *arguments: str, **environ: str) -> subprocess.Popen[str]:
        path = f"{self.root / 'bin'}:{os.environ['PATH']}"
        slurm = {"SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "n[7-8]", "SLURM_JOB_NUM_NODES": "2"}
        environment = {**os.environ, **slurm, "PATH": path, **environ}
        return subprocess.Popen(arguments, env=environment, cwd=self.root, text=True)

    def run(self, *arguments: str, **environ: str) -> int:
        return exit_code(self.start(*arguments, **environ), 60)

    def noted(self, number: int) -> list[list[str]]:
        """Wait for so many notes; return the arguments, sorted."""
        wait_until(lambda: len(list(self.notes.iterdir())) >= number)
        return sorted(note.read_text().split("\0")[:-1] for note in self.notes.iterdir())

    @property
    def is_requeued(self) -> bool:
        return (self.root / "requeued-jobs").exists()


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(tmp_path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "far"
    words = ["init", str(directory), "--yes", "--coordinator", HEAD, "--gpus", "8"]
    words += ["--gpus", "us-east=1", "--model", "150M"]
    for name, hosts in HOSTS.items():
        words += ["--island", f"{name}={','.join(hosts)}"]
    for launcher in ("ssh", "systemd", "slurm", "kubernetes"):
        words += ["--launcher", launcher]
    written = CliRunner().invoke(app, words, catch_exceptions=False)
    assert written.exit_code == 0, written.output
    return directory


def objects(run: Path, name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((run / "launch" / "kubernetes" / f"{name}.yaml").read_text()))


def job(run: Path, name: str) -> dict[str, Any]:
    (spec,) = (each["spec"] for each in objects(run, name) if each["kind"] == "Job")
    return dict(spec)


def container(run: Path, name: str) -> dict[str, Any]:
    (found,) = job(run, name)["template"]["spec"]["containers"]
    return dict(found)


def parsed(arguments: Sequence[str]) -> dict[str, Any]:
    """Parse a command line as `diloco` does, and run nothing."""
    group: Any = typer.main.get_command(app)  # of click, in typer's own copy
    name, *rest = arguments
    command = group.commands[name]
    while hasattr(command, "commands"):
        command = command.commands[rest.pop(0)]
    return dict(command.make_context(name, list(rest)).params)


def position(options: Mapping[str, Any], num_ranks: int) -> HostPosition:
    return HostPosition.of(
        num_ranks, nnodes=options["nnodes"], node_rank=options["node_rank"], rdzv=options["rdzv"]
    )


# -- what they are --------------------------------------------------------------------------------


def test_shell_scripts_are_without_a_finding(run: Path) -> None:
    scripts = [run / "launch" / "ssh.sh", *sorted(run.glob("launch/slurm/*.sbatch"))]
    assert len(scripts) == 4

    checked = run_command([str(BIN / "shellcheck"), *map(str, scripts)], 60)

    assert checked.returncode == 0, checked.stdout


def test_the_container_file_is_without_a_finding(run: Path) -> None:
    checked = run_command([str(BIN / "hadolint"), str(run / "launch" / "Containerfile")], 60)

    assert checked.returncode == 0, checked.stdout


def test_kubernetes_takes_the_objects(run: Path) -> None:
    files = ("coordinator", "island-eu-west", "island-us-east")
    kinds = []
    for each in (one for name in files for one in objects(run, name)):
        kubernetes_validate.validate(each, KUBERNETES, strict=True)
        kinds.append(each["kind"])

    assert kinds.count("Job") == 3


def test_every_command_of_a_page_and_comment_is_a_command(run: Path) -> None:
    commands = []
    for path in (run / "NEXT.md", *run.glob("launch/**/*.*")):
        found = re.findall(
            r"^(?:# +)?(?:[\w/]+/)?diloco ([a-z].*?)(?:  .*)?$", path.read_text(), re.M
        )
        commands += [shlex.split(line, comments=True) for line in found]

    assert len(commands) >= 4
    for words in commands:
        parsed(words)


# -- what they type -------------------------------------------------------------------------------


def check_islands(arguments: Sequence[Sequence[str]]) -> None:
    """Check that these start every host of both islands."""
    options = [parsed(words) for words in arguments]
    assert [o["name"] for o in options] == ["eu-west", "eu-west", "us-east"]
    assert {o["coordinator"] for o in options} == {COORDINATOR}
    assert [position(o, 16) for o in options] == [
        HostPosition(2, 0, MEETING),
        HostPosition(2, 1, MEETING),
        HostPosition(),
    ]


def test_ssh_starts_the_coordinator_and_every_host_and_shows_the_run(
    run: Path, recorder: Recorder
) -> None:
    (recorder.root / "diloco-far").mkdir()  # the directory on every host, below its home

    assert recorder.run("bash", str(run / "launch" / "ssh.sh"), "start") == 0

    coordinator, *islands, status = recorder.noted(5)
    assert parsed(coordinator)["resume_stopped"]
    check_islands(islands)
    assert parsed(status)["address"] == COORDINATOR
    assert parsed(status)["certs"] == "certs"
    said = (recorder.root / "hosts").read_text().split()
    assert said == [HEAD, *HOSTS["eu-west"], *HOSTS["us-east"]]


def test_ssh_gives_each_host_its_certificate_and_no_other(run: Path, recorder: Recorder) -> None:
    recorder.command(
        "ssh", f'mkdir -p {recorder.root}/"$1"; cd {recorder.root}/"$1"; exec bash -c "$2"'
    )

    assert recorder.run("bash", str(run / "launch" / "ssh.sh"), "copy") == 0

    for host, name in (
        (HEAD, "coordinator"),
        *((h, f"island-{n}") for n in HOSTS for h in HOSTS[n]),
    ):
        given = recorder.root / host / "diloco-far"
        assert {path.name for path in (given / "certs").iterdir()} == {"ca.pem", f"{name}.pem"}
        assert (given / "certs" / f"{name}.pem").stat().st_mode & 0o777 == 0o600
        load_config(given / "run.toml")


def test_ssh_stops_the_coordinator_and_waits_for_its_end(run: Path, recorder: Recorder) -> None:
    (recorder.root / "diloco-far").mkdir()
    victim = subprocess.Popen(["/bin/sleep", "60"])
    (recorder.root / "diloco-far" / "coordinator.pid").write_text(f"{victim.pid}\n")
    (recorder.root / "diloco-far" / "coordinator.log").write_text("the run is stopped\n")

    stopping = recorder.start("bash", str(run / "launch" / "ssh.sh"), "stop")

    assert exit_code(victim, 30) == -signal.SIGTERM
    assert exit_code(stopping, 30) == 0


def test_units_start_what_they_should_and_nothing_again_that_ends_the_same_way(run: Path) -> None:
    commands = []
    for path in sorted((run / "launch" / "systemd").iterdir()):
        unit = configparser.RawConfigParser(strict=True)
        unit.optionxform = str  # type: ignore[assignment, method-assign]
        unit.read_string(path.read_text().replace("\\\n", " "))
        service = unit["Service"]
        program, *words = shlex.split(service["ExecStart"])
        assert program == "/opt/diloco/bin/diloco"
        commands.append(words)
        assert {*map(int, service["RestartPreventExitStatus"].split())} == FINAL_EXIT_CODES
        assert service["SuccessExitStatus"] == "129 130 143"
        assert (service["Restart"], service["KillMode"]) == ("on-failure", "mixed")

    coordinator, *islands = commands
    assert parsed(coordinator)["resume_stopped"]
    check_islands(islands)


def test_pods_type_what_is_understood(run: Path) -> None:
    coordinator = parsed(container(run, "coordinator")["args"])
    islands = []
    for name in HOSTS:
        for index in range(job(run, f"island-{name}")["completions"]):
            words = container(run, f"island-{name}")["args"]
            islands.append([w.replace("$(JOB_COMPLETION_INDEX)", str(index)) for w in words])

    given = [o.replace("=/certs", f"={run / 'certs'}") for o in coordinator["overrides"]]
    config = load_config(run / "run.toml", given)
    ports = {port["port"] for port in objects(run, "coordinator")[0]["spec"]["ports"]}
    listening = (config.coordinator.listen, config.coordinator.syncer_listen)
    assert {int(address.rpartition(":")[2]) for address in listening} == ports
    options = [parsed(words) for words in islands]
    assert [position(o, 16) for o in options] == [
        *(HostPosition(2, i, "far-eu-west-0.far-eu-west:29400") for i in range(2)),
        HostPosition(),
    ]
    for each in options:
        load_config(run / "run.toml", each["overrides"], island=each["name"])


def test_pods_have_devices_shared_memory_certificates_and_what_they_name(run: Path) -> None:
    for name in ("coordinator", *(f"island-{name}" for name in HOSTS)):
        template = job(run, name)["template"]
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        mounts = {m["mountPath"]: volumes[m["name"]] for m in container(run, name)["volumeMounts"]}
        assert len(mounts) == len(volumes)
        assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
        assert mounts["/certs"]["secret"]["secretName"] == f"far-{name}-certs"
        assert mounts["/certs"]["secret"]["defaultMode"] == 0o440  # nobody else reads the key
        claims = {o["metadata"]["name"] for o in objects(run, name) if "Claim" in o["kind"]}
        used = {
            v["persistentVolumeClaim"]["claimName"] for v in mounts.values() if "pers" in str(v)
        }
        assert used == claims
        (service,) = (o for o in objects(run, name) if o["kind"] == "Service")
        assert service["spec"]["selector"] == template["metadata"]["labels"]
    devices = [container(run, f"island-{name}")["resources"]["limits"] for name in HOSTS]
    assert devices == [{"nvidia.com/gpu": 8}, {"nvidia.com/gpu": 1}]
    assert "livenessProbe" in container(run, "coordinator")


def test_pods_that_would_end_the_same_way_are_not_made_again(run: Path) -> None:
    for name in ("coordinator", *(f"island-{name}" for name in HOSTS)):
        disrupted, final = job(run, name)["podFailurePolicy"]["rules"]
        # Kubernetes refuses the policy with any other.
        assert job(run, name)["template"]["spec"]["restartPolicy"] == "Never"
        assert (disrupted["action"], final["action"]) == ("Ignore", "FailJob")
        asked = {129, 130, 143} if name == "coordinator" else set()
        assert {*final["onExitCodes"]["values"]} == FINAL_EXIT_CODES | asked
        assert final["onExitCodes"]["containerName"] == container(run, name)["name"]


# -- jobs of Slurm --------------------------------------------------------------------------------


def sbatch(run: Path, name: str) -> tuple[str, str]:
    return "bash", str(run / "launch" / "slurm" / f"{name}.sbatch")


def test_slurm_starts_the_coordinator_and_an_island_of_two_hosts(
    run: Path, recorder: Recorder
) -> None:
    assert recorder.run(*sbatch(run, "coordinator")) == 0
    assert recorder.run(*sbatch(run, "island-eu-west")) == 0

    coordinator, *islands = recorder.noted(3)
    assert parsed(coordinator)["resume_stopped"]
    hosts = [parsed(arguments) for arguments in islands]
    assert [position(host, 16) for host in hosts] == [
        HostPosition(2, i, "node7:29400") for i in range(2)
    ]
    assert {(h["name"], h["coordinator"]) for h in hosts} == {("eu-west", COORDINATOR)}
    assert not recorder.is_requeued


@pytest.mark.parametrize("code", [0, 1, 2, 20, 30, 31, 40, 41, 50, 137, 143])
def test_slurm_puts_a_job_back_only_where_another_start_may_help(
    run: Path, recorder: Recorder, code: int
) -> None:
    recorder.command("diloco", f"exit {code}")

    assert recorder.run(*sbatch(run, "coordinator")) == code

    assert recorder.is_requeued == (code in (1, 30, 40, 137))


def test_an_island_that_is_stopped_stays_out_of_the_queue(run: Path, recorder: Recorder) -> None:
    ready = recorder.root / "ready"
    # Srun ends with 137 where tasks did not end in time: by itself that is worth another start.
    recorder.command("srun", f"trap 'exit 137' TERM; touch {ready}; while :; do sleep 0.05; done")
    running = recorder.start(*sbatch(run, "island-us-east"))
    wait_until(ready.exists)

    running.send_signal(signal.SIGTERM)

    assert exit_code(running, 30) == 137
    assert not recorder.is_requeued


@pytest.mark.parametrize("is_there", [True, False], ids=["coordinator-here", "elsewhere"])
def test_near_the_end_of_its_time_an_island_has_all_write_a_checkpoint(
    run: Path, recorder: Recorder, is_there: bool
) -> None:
    ready, asked = recorder.root / "ready", recorder.root / "asked"
    recorder.command("squeue", "echo 77" if is_there else "")
    recorder.command("scancel", f'[[ $1 == --batch ]] && echo "$@" > {asked}')
    # Whom the coordinator stops gracefully ends with 0; the signal of this test ends with 143.
    recorder.command(
        "srun",
        f"trap 'exit 143' TERM; touch {ready}; "
        f"until [[ -e {asked} ]]; do sleep 0.05; done; touch .requeued-far",
    )
    running = recorder.start(*sbatch(run, "island-us-east"))
    wait_until(ready.exists)

    running.send_signal(signal.SIGUSR1)

    assert exit_code(running, 30) == (0 if is_there else 143)
    assert asked.exists() == is_there
    if is_there:
        assert asked.read_text().split() == ["--batch", "--signal=USR1", "77"]
    assert recorder.is_requeued


@pytest.mark.parametrize("name", [signal.SIGUSR1, signal.SIGTERM])
def test_slurm_passes_a_signal_on_once_and_goes_back_only_at_the_end_of_its_time(
    run: Path, recorder: Recorder, name: signal.Signals
) -> None:
    ready = recorder.root / "ready"
    recorder.command(
        "diloco",
        f"trap 'echo x >> {recorder.root}/terms; sleep 0.5; exit 143' TERM; touch {ready}; "
        f"while :; do sleep 0.05; done",
    )
    running = recorder.start(*sbatch(run, "coordinator"))
    wait_until(ready.exists)

    running.send_signal(name)
    wait_until((recorder.root / "terms").exists)
    running.send_signal(signal.SIGTERM)  # it is not asked twice: that would end it at once

    assert exit_code(running, 30) == 143
    assert (recorder.root / "terms").read_text() == "x\n"
    assert recorder.is_requeued == (name is signal.SIGUSR1)
    assert (recorder.root / ".requeued-far").exists() == recorder.is_requeued


def test_slurm_loses_no_signal_that_comes_before_there_is_a_process(
    run: Path, recorder: Recorder
) -> None:
    script = (run / "launch" / "slurm" / "coordinator.sbatch").read_text()
    early = script.replace("\nrun diloco", "\nkill -USR1 $$\nrun diloco", 1)
    assert early != script

    assert recorder.run("bash", "-c", early) == 143

    assert recorder.is_requeued
    assert not list(recorder.notes.iterdir())


def test_an_island_goes_back_into_the_queue_with_the_coordinator(
    run: Path, recorder: Recorder
) -> None:
    recorder.command("srun", "sleep 1.1; touch .requeued-far")  # the coordinator's job, meanwhile

    assert recorder.run(*sbatch(run, "island-us-east")) == 0

    assert recorder.is_requeued
