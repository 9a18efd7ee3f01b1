"""`diloco launch`: what it writes from a run file, what it refuses, what it submits.

The templates are those of `diloco init`, whose tests are in tests/init/test_launch_files.py.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner, Result

from diloco.cli.main import app
from diloco.config.island import read_ranks_per_host
from diloco.config.load import load_config
from diloco.errors import ConfigError
from diloco.launch.engines.jobs import Jobs
from tests.run_files import write_run
from tests.waiting import run_command

AT = (
    "coordinator.listen=0.0.0.0:4711",
    "coordinator.syncer_listen=0.0.0.0:4712",
    "coordinator.address=head:4711",
    "transport.certs=certs",
)
#: Fields of a SkyPilot task, and of its resources: docs.skypilot.co, "SkyPilot YAML".
TASK = {"name", "num_nodes", "resources", "file_mounts", "setup", "run"}
RESOURCES = {"cpus", "memory", "disk_size", "ports", "accelerators", "infra", "use_spot"}


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a run of an island on GPUs and one on CPUs, and go to its directory."""
    path = write_run(tmp_path, {"eu": "dp_shard = 16", "us": "dp_shard = 4"})
    text = path.read_text().replace("[islands.eu]", '[islands.eu]\ndevice = "cuda"')
    text = text.replace("[islands.us]", '[islands.us]\ndevice = "cpu"\nthreads = 2')
    path.write_text(text.replace("= 128", "= 512"))
    monkeypatch.chdir(tmp_path)
    return "run.toml"


def launch(engine: str, *words: str, sets: tuple[str, ...] = AT) -> Result:
    typed = [word for each in sets for word in ("--set", each)]
    image = ["--image", "registry.example/diloco:1"] if engine == "kubernetes" else []
    kind = ["--resource", "accelerators=H100"] if engine == "skypilot" else []
    return CliRunner().invoke(app, ["launch", engine, "run.toml", *typed, *image, *kind, *words])


def written(engine: str, job: str, ending: str) -> str:
    return Path("launch", engine, f"{job}.{ending}").read_text()


def options(script: str) -> dict[str, str]:
    found = re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", script, re.M)
    assert len(found) == len(dict(found)), "an option is written twice"
    return dict(found)


def make_certificates(*jobs: str) -> None:
    """Make files of the names that `diloco certs init` gives them."""
    for each in ("ca", *jobs):
        path = Path("certs", f"{each}.pem")
        path.parent.mkdir(exist_ok=True)
        path.touch()


def refusal(result: Result) -> str:
    assert isinstance(result.exception, ConfigError), (result.output, result.exception)
    return str(result.exception)


def test_slurm_gets_what_the_run_file_says_and_options_over_it(run_file: str) -> None:
    made = launch(
        "slurm",
        *("--sbatch", "time=12:00:00", "--sbatch", "eu:partition=h100", "--sbatch", "exclusive"),
        *("--sbatch", "partition=any", "--sbatch", "coordinator:nodelist="),
        *("--sbatch", "comment=ours # all"),
    )

    assert made.exit_code == 0, (made.output, made.exception)
    coordinator, eu, us = (
        options(written("slurm", job, "sbatch"))
        for job in ("coordinator", "island-eu", "island-us")
    )
    assert (eu["nodes"], eu["gpus-per-node"], eu["cpus-per-task"]) == ("2", "8", "64")
    assert (us["nodes"], us["cpus-per-task"], "gpus-per-node" in us) == ("1", "8", False)
    assert (eu["partition"], us["partition"]) == ("h100", "any")
    for each in (coordinator, eu, us):
        assert (each["time"], each["comment"]) == ("12:00:00", "'ours # all'")
        assert (each["requeue"], each["exclusive"]) == ("", "")
        assert each["signal"] == "B:USR1@1200"
    assert "nodelist" not in coordinator
    lines = [f"sbatch launch/slurm/{job}.sbatch" for job in ("coordinator", "island-eu")]
    assert all(f"  {line}\n" in made.output for line in lines)


def test_scripts_of_any_run_are_without_a_finding(run_file: str) -> None:
    """A value that a shell would read as more than one word, and a run whose islands never wait."""
    odd = ("run.name=a.B_c", "transport.certs=my certs; it's &")
    others = ("outer.preset=decoupled", "run.state=s3://b/p")
    placed = (*others, 'syncers={eu={listen="0.0.0.0:1",address="x:1"}}')
    placed += ("coordinator.syncer_listen=127.0.0.1:0",)
    for number, sets in enumerate(((), odd, others, placed)):
        (run := Path("run.toml")).write_text(run.read_text().replace('"streaming"', '"decoupled"'))
        made = launch("slurm", "--out", str(number), sets=(*AT, *sets))
        assert made.exit_code == 0, (made.output, made.exception)

    checker = Path(sys.executable).parent / "shellcheck"
    checked = run_command([str(checker), *map(str, Path().rglob("*.sbatch"))], 60)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize(
    "more", [(), ("run.state=s3://b/p", "coordinator.num_syncers=2")], ids=["volume", "bucket"]
)
def test_kubernetes_takes_the_objects_of_a_run_file(run_file: str, more: tuple[str, ...]) -> None:
    pod = ("--pod", 'nodeSelector={"gpu": "h100"}', "--pod", "coordinator:serviceAccountName=me")

    made = launch("kubernetes", *pod, sets=(*AT, *more))

    assert made.exit_code == 0, (made.output, made.exception)
    found: dict[str, list[Any]] = {}
    for path in Path("launch/kubernetes").glob("*.yaml"):
        for each in yaml.safe_load_all(path.read_text()):
            kubernetes_validate.validate(each, "1.37", strict=True)
            found.setdefault(each["kind"], []).append(each)
    pods = [job["spec"]["template"]["spec"] for job in found["Job"]]
    assert all(each["nodeSelector"] == {"gpu": "h100"} for each in pods)
    by_name = {pod["containers"][0]["name"]: pod for pod in pods}
    assert by_name["coordinator"]["serviceAccountName"] == "me"
    assert all(pod["containers"][0]["image"] == "registry.example/diloco:1" for pod in pods)
    (volume,) = (v for v in by_name["coordinator"]["volumes"] if v["name"] == "state")
    assert ("ephemeral" in volume) == bool(more)
    assert len(found["PersistentVolumeClaim"]) == (2 if more else 3)
    balancer = next(s for s in found["Service"] if s["spec"].get("type") == "LoadBalancer")
    ports = [port["port"] for port in balancer["spec"]["ports"]]
    assert ports == [4711, 4712, 4713][: 3 if more else 2]


def test_skypilot_gets_documented_fields_and_a_task_for_each_job(run_file: str) -> None:
    made = launch("skypilot", "--resource", "eu:use_spot=true", "--resource", "eu:infra=aws")

    assert made.exit_code == 0, (made.output, made.exception)
    coordinator, eu, us = (
        yaml.safe_load(written("skypilot", job, "yaml"))
        for job in ("coordinator", "island-eu", "island-us")
    )
    for task, nodes in ((coordinator, 1), (eu, 2), (us, 1)):
        assert set(task) == TASK and set(task["resources"]) <= RESOURCES
        assert task["num_nodes"] == nodes
    assert coordinator["resources"] == {
        "cpus": "4+", "memory": "5+", "disk_size": 100, "ports": [4711, 4712]
    }  # fmt: skip
    assert eu["resources"] == {"accelerators": "H100:8", "use_spot": True, "infra": "aws"}
    assert us["resources"] == {"cpus": "8+"}
    assert eu["file_mounts"] == {
        "~/diloco/run.toml": "run.toml",
        "~/diloco/certs/ca.pem": "certs/ca.pem",
        "~/diloco/certs/island-eu.pem": "certs/island-eu.pem",
    }
    assert '--rdzv "$(head -n1 <<<"$SKYPILOT_NODE_IPS"):29400"' in eu["run"]


@pytest.fixture
def placed(run_file: str) -> tuple[str, ...]:
    """Give the run a syncer of its own for each island; returns what --set says of it."""
    path = Path(run_file)
    path.write_text(
        path.read_text()
        + "".join(
            f'[syncers.{name}]\nlisten = "0.0.0.0:4800"\naddress = "gate.{name}:480{number}"\n'
            for number, name in enumerate(("eu", "us"))
        )
    )
    return (AT[0], *AT[2:], "run.state=s3://b/p")


def test_a_syncer_of_its_own_is_a_job_of_its_own(placed: tuple[str, ...]) -> None:
    made = launch("slurm", "--sbatch", "syncer-eu:cpus-per-task=64", sets=placed)

    assert made.exit_code == 0, (made.output, made.exception)
    eu = written("slurm", "syncer-eu", "sbatch")
    asked = options(eu)
    assert (asked["job-name"], asked["nodelist"]) == ("test-syncer-eu", "gate.eu")
    assert (asked["cpus-per-task"], asked["requeue"]) == ("64", "")
    assert "gpus-per-node" not in asked
    assert "run diloco syncer run.toml --name eu --standby --set" in eu
    assert "--resume-stopped --standby --set" in written("slurm", "coordinator", "sbatch")
    assert options(written("slurm", "syncer-us", "sbatch"))["nodelist"] == "gate.us"


def test_a_server_asks_for_the_memory_and_disk_that_its_fragments_take(
    placed: tuple[str, ...],
) -> None:
    """8B on two: 12 bytes of state a parameter, payloads, and a merge; records and frames."""
    sets = (*placed, "model.preset=llama3-8B")
    for engine in ("slurm", "kubernetes"):
        made = launch(engine, sets=sets)
        assert made.exit_code == 0, (made.output, made.exception)

    at, eu = (options(written("slurm", job, "sbatch")) for job in ("coordinator", "syncer-eu"))
    _, job = yaml.safe_load_all(written("kubernetes", "syncer-eu", "yaml"))
    pod = job["spec"]["template"]["spec"]
    (state,) = (each["ephemeral"] for each in pod["volumes"] if each["name"] == "state")
    asked = pod["containers"][0]["resources"]["requests"]
    stored = state["volumeClaimTemplate"]["spec"]["resources"]["requests"]["storage"]

    assert at["mem"] == "2G"
    assert 45 < int(eu["mem"].removesuffix("G")) == int(asked["memory"].removesuffix("Gi")) < 110
    assert 100 < int(stored.removesuffix("Gi")) < 1000


def test_pods_of_syncers_wait_for_the_one_before_and_lose_nothing(placed: tuple[str, ...]) -> None:
    made = launch("kubernetes", "--pod", "syncer-us:serviceAccountName=s3", sets=placed)

    assert made.exit_code == 0, (made.output, made.exception)
    text = written("kubernetes", "syncer-us", "yaml")
    service, job = yaml.safe_load_all(text)
    for each in (service, job):
        kubernetes_validate.validate(each, "1.37", strict=True)
    assert service["metadata"]["name"] == "test-syncer-us"
    assert service["spec"]["ports"] == [{"name": "data", "port": 4801, "targetPort": 4800}]
    rules = job["spec"]["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["Ignore", "FailJob"]
    assert 143 not in rules[1]["onExitCodes"]["values"]  # a pod that is drained is made again
    pod = job["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == "s3"
    (container,) = pod["containers"]
    assert container["args"][:4] == ["syncer", "/run-file/run.toml", "--name=us", "--standby"]
    assert not any("insecure" in word for word in container["args"])
    assert container["readinessProbe"]["tcpSocket"]["port"] == 4800
    (env,) = container["envFrom"]
    assert env["secretRef"]["name"] == "test-syncer-us-env"
    assert "kubectl create secret generic test-syncer-us-env --from-literal=AWS_" in text
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert "ephemeral" in volumes["state"]
    assert volumes["certs"]["secret"]["secretName"] == "test-syncer-us-certs"
    made_of = next(line for line in made.output.splitlines() if "test-syncer-us-certs" in line)
    assert "certs/ca.pem" in made_of and "certs/coordinator.pem" in made_of
    coordinator = written("kubernetes", "coordinator", "yaml")
    assert "- --standby" in coordinator and "failureThreshold: 17280" in coordinator
    assert '"/sources[hf,state]"' in Path("launch/Containerfile").read_text()


def test_machines_of_syncers_have_the_port_and_certificate_of_theirs(
    placed: tuple[str, ...],
) -> None:
    made = launch("skypilot", "--resource", "syncer-eu:cpus=64+", sets=placed)

    assert made.exit_code == 0, (made.output, made.exception)
    task = yaml.safe_load(written("skypilot", "syncer-eu", "yaml"))
    assert set(task) == TASK and task["num_nodes"] == 1
    assert task["resources"] == {
        "cpus": "64+", "memory": "5+", "disk_size": 100, "ports": [4800]
    }  # fmt: skip
    assert task["file_mounts"] == {
        "~/diloco/run.toml": "run.toml",
        "~/diloco/certs/ca.pem": "certs/ca.pem",
        "~/diloco/certs/coordinator.pem": "certs/coordinator.pem",
    }
    assert "venv/bin/diloco syncer run.toml --name eu --standby \\\n" in task["run"]
    assert "'diloco[hf,state]'" in task["setup"]


@pytest.mark.parametrize(
    ("engine", "more", "said"),
    [
        ("slurm", ("syncers.us.listen=127.0.0.1:0",), 'syncers.us.listen = "127.0.0.1:0"'),
        ("slurm", ("syncers.us.address=",), "syncers.us.address is not set"),
        ("slurm", ("syncers.us.address=10.0.0.1:1",), "--sbatch syncer-us:nodelist=NODE"),
        ("kubernetes", ("run.state=file:///tmp/x",), "give a bucket, s3://BUCKET/PREFIX"),
        ("skypilot", ("run.state=file:///tmp/x",), "give a bucket, s3://BUCKET/PREFIX"),
        ("slurm", ("run.state=",), '1 problem\n  syncers.eu: "eu, us": needs run.state'),
        ("slurm", ("syncers.us.address=gate.eu:4800",), "is that of syncer-eu, too"),
    ],
)
def test_a_syncer_that_nobody_would_reach_is_refused(
    placed: tuple[str, ...], engine: str, more: tuple[str, ...], said: str
) -> None:
    assert said in refusal(launch(engine, sets=(*placed, *more)))
    assert not Path("launch").exists()


@pytest.mark.parametrize(
    ("engine", "sets", "words", "said"),
    [
        ("slurm", (*AT[:2], AT[3]), (), "coordinator.address is not set"),
        ("slurm", AT[1:], (), 'coordinator.listen = "127.0.0.1:0"'),
        ("slurm", (*AT, "coordinator.address=10.0.0.1:1"), (), "--sbatch coordinator:nodelist="),
        ("slurm", AT, ("--sbatch", "ap:time=1"), "jobs: coordinator, eu, us"),
        ("slurm", AT, ("--ranks-per-host", "eu=5"), "must be a multiple"),
        ("slurm", AT, ("--ranks-per-host", "ap=5"), "--ranks-per-host ap=5: not in the run file"),
        ("slurm", AT, ("--only", "ap"), "--only ap: no such job"),
        ("kubernetes", (*AT[:3], "transport.insecure=true"), (), "diloco certs init run.toml"),
        ("kubernetes", (*AT, "run.name=a_b"), (), "small letters, digits"),
        ("kubernetes", (*AT, "run.state=file:///x"), (), "give a bucket"),
        ("kubernetes", AT, ("--pod", "eu:volumes=[]"), "--pod eu:volumes: is written here"),
        ("kubernetes", AT, ("--pod", "nodeSelector={"), "nodeSelector={: is no JSON"),
        ("kubernetes", AT, ("--storage", "1TB"), "such as 100Gi"),
        ("kubernetes", (*AT, "transport.tokens=t"), (), "brought to no machine"),
        ("kubernetes", (*AT, "run.name=7b"), (), "a letter first"),
        ("slurm", (*AT, "run.name=a\n"), (), "run.name"),
        ("slurm", (*AT, "telemetry.dir=a\nb"), (), "give a text of one line"),
        ("slurm", AT, ("--out", "run.toml"), "--out DIR"),
        ("skypilot", (*AT[:3], "transport.insecure=true"), (), "diloco certs init run.toml"),
    ],
)
def test_what_cannot_be_started_is_refused_and_nothing_is_written(
    run_file: str, engine: str, sets: tuple[str, ...], words: tuple[str, ...], said: str
) -> None:
    assert said in refusal(launch(engine, *words, sets=sets))
    assert not Path("launch").exists()


def test_accelerators_without_a_name_are_asked_for(run_file: str) -> None:
    typed = [word for each in AT for word in ("--set", each)]

    refused = CliRunner().invoke(app, ["launch", "skypilot", "run.toml", *typed])

    assert "--resource accelerators=H100" in refusal(refused)


def test_nothing_that_differs_is_overwritten_without_force(run_file: str) -> None:
    launch("slurm")
    edited = Path("launch/slurm/island-eu.sbatch")
    edited.write_text(edited.read_text() + "# mine\n")

    refused = launch("slurm", "--sbatch", "coordinator:comment=x")

    assert "island-eu.sbatch is there, and differs" in refusal(launch("slurm"))
    assert "nothing was written" in refusal(refused)
    assert "comment" not in written("slurm", "coordinator", "sbatch")
    assert launch("slurm", "--only", "us").exit_code == 0
    assert launch("slurm", "--force").exit_code == 0
    assert "# mine" not in edited.read_text()


def test_what_an_engine_says_is_shown_and_a_failure_names_the_command(
    run_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "sbatch").write_text(
        '#!/bin/bash\n[[ $1 == *island-us* ]] && { echo "no partition" >&2; exit 3; }\n'
        'echo "Submitted batch job for $1"\n'
    )
    (tmp_path / "sbatch").chmod(0o755)

    lacking = launch("slurm", "--submit")
    make_certificates("coordinator", "island-eu")
    one = refusal(launch("slurm", "--submit"))
    make_certificates("island-us")
    made = launch("slurm", "--submit")

    assert "certs/coordinator.pem, " in refusal(lacking)
    assert "diloco certs init run.toml --dir certs" in refusal(lacking)
    assert "make them: diloco certs issue island/us --dir certs; nothing is written" in one
    assert "Submitted batch job for launch/slurm/island-eu.sbatch" in made.output
    said = refusal(made)
    assert "sbatch launch/slurm/island-us.sbatch\nended with 3: no partition" in said
    monkeypatch.setenv("PATH", str(tmp_path))
    absent = refusal(launch("skypilot", "--submit"))
    assert "there is no sky on this machine's PATH" in absent
    assert absent.endswith("--cluster test-us launch/skypilot/island-us.yaml")


def test_commands_are_those_of_the_job_and_its_certificate_alone(run_file: str) -> None:
    said = launch("kubernetes", "--only", "us").output

    lines = [line.strip() for line in said.splitlines() if line.startswith("  kubectl")]
    assert [shlex.split(line)[1:4] for line in lines] == [
        ["create", "configmap", "test-run"],
        ["create", "secret", "generic"],
        ["apply", "-f", "launch/kubernetes/island-us.yaml"],
    ]
    assert "island-us.pem" in lines[1] and "ca.pem" in lines[1] and "ca.key" not in said


def test_ranks_fill_hosts_of_equal_size(run_file: str) -> None:
    def spread(ranks: int, *told: str) -> tuple[int, int]:
        sets = (*AT, f"islands.eu.ranks={ranks}", f"islands.eu.mesh={{dp_shard={ranks}}}")
        config = load_config("run.toml", (*sets, f"islands.eu.tokens_per_inner_step={32 * ranks}"))
        per_host = read_ranks_per_host(told, config.islands)
        eu = Jobs.of(config, "run.toml", "launch", ranks_per_host=per_host).islands[0]
        return eu.num_hosts, eu.ranks_per_host

    assert [spread(16), spread(12), spread(4), spread(1)] == [(2, 8), (2, 6), (1, 4), (1, 1)]
    assert spread(16, "eu=4") == spread(16, "4") == (4, 4)
