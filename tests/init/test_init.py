"""`diloco init`: the run files that it writes, what it refuses, and what it asks."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from diloco.cli.main import app
from diloco.cli.run import init as command
from diloco.config.load import load_config
from diloco.errors import ConfigError
from diloco.init.answers import fitting_schedule
from diloco.init.machine import look_around
from diloco.protos.control_pb2 import StatusReply
from diloco.security.run_ca import site_certificates
from diloco.security.security import Security
from diloco.transport.contracts import IncomingCall, Reply
from diloco.transport.identity import Role
from tests.guarded_server import serving

ROOT = Path(__file__).resolve().parents[2]
FAR = ("--island", "eu=gpu1.eu.example", "--island", "us=gpu1.us.example")


def init(directory: Path, *words: str, typed: str = "") -> Result:
    return CliRunner().invoke(app, ["init", str(directory), *words], input=typed)


def test_two_islands_of_this_machine_need_no_certificates(tmp_path: Path) -> None:
    made = init(tmp_path / "mine", "--yes")

    assert made.exit_code == 0, made.output
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == ["NEXT.md", "run.toml"]
    config = load_config(tmp_path / "mine" / "run.toml")
    assert config.run.name == "mine"
    assert sorted(config.islands) == ["east", "west"]
    assert {island.device for island in config.islands.values()} == {"cpu"}
    assert "diloco local run.toml" in (tmp_path / "mine" / "NEXT.md").read_text()


def test_a_run_of_two_sites_has_certificates_and_a_short_file(tmp_path: Path) -> None:
    words = (*FAR, "--gpus", "8", "--model", "150M", "--data", "/text/*.jsonl", "--bandwidth")

    made = init(tmp_path / "far", "--yes", *words, "200Mbit/s", "--tokenizer", "/text/tokenizer")

    assert made.exit_code == 0, made.output
    text = (tmp_path / "far" / "run.toml").read_text()
    assert len(text.splitlines()) <= 25
    config = load_config(tmp_path / "far" / "run.toml", island="eu")
    assert (config.island.ranks, config.island.device) == (8, "cuda")
    assert config.island.precision == "bfloat16"
    assert config.coordinator.address == "gpu1.eu.example:4711"
    assert config.data.sources["text"].files == ("/text/*.jsonl",)
    assert config.transport.rate.bps == 190e6
    certs = tmp_path / "far" / "certs"
    names = {path.stem for path in certs.glob("*.pem")}
    assert names == {"ca", "coordinator", "operator", "island-eu", "island-us"}
    assert (certs / "ca.key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "words",
    [
        ("--preset", "decoupled"),
        ("--model", "tiny", "--steps", "5"),
        ("--data", "hub:owner/name"),
        (*FAR, "--model", "llama3-8B", "--gpus", "eu=8"),
        (*FAR, "--model", "llama3-405B", "--gpus", "64"),
        ("--island", "a", "--island", "b", "--island", "c", "--model", "10M"),
    ],
    ids=["decoupled", "tiny", "hub", "8B", "405B", "three"],
)
def test_every_choice_makes_a_run_file_that_loads(tmp_path: Path, words: tuple[str, ...]) -> None:
    made = init(tmp_path / "run", "--yes", *words)

    assert made.exit_code == 0, (made.output, made.exception)
    outer = load_config(tmp_path / "run" / "run.toml").outer
    assert outer.num_fragments <= outer.inner_steps_per_round, "each leaves at a step of its own"


def test_a_model_of_transformers_is_what_the_run_begins_with(tmp_path: Path) -> None:
    sizes = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = json.dumps({"model_type": "llama", "intermediate_size": 192, **sizes})
    (tmp_path / "config.json").write_text(text)

    made = init(tmp_path / "run", "--yes", "--model", str(tmp_path))

    assert made.exit_code == 0, (made.output, made.exception)
    config = load_config(tmp_path / "run" / "run.toml")
    assert (config.model.family, config.model.name) == ("hf", str(tmp_path))
    assert config.run.warm_start == str(tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--launcher", "ssh"), "--launcher ssh: says how hosts are started"),
        (("--launcher", "pbs", *FAR), "--launcher pbs: choose kubernetes, slurm, ssh, systemd"),
        (("--preset", "fast"), "--preset fast: choose streaming, decoupled"),
        (("--island", "eu", "--island", "eu"), "give each island another name"),
        (("--island", "eu=h", "--island", "us"), "--island us: give it a host"),
        (("--island", "eu=a b"), "is not [USER@]HOST"),
        (("--island", "eu=$(id)"), "is not [USER@]HOST"),
        (("--island", "E;u"), "small letters, digits"),
        (("--gpus", "ap=2"), "--gpus ap=2: write a number"),
        ((*FAR, "--coordinator", "localhost"), "is reached from its own machine only"),
        ((*FAR, "--coordinator", "h:x"), "--coordinator h:x"),
        ((*FAR, "--coordinator", "h:65535"), "the next is the syncer's"),
        ((*FAR, "--bandwidth", "fast"), "--bandwidth"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    refused = init(tmp_path / "run", "--yes", *words)

    assert isinstance(refused.exception, ConfigError)
    assert said in str(refused.exception)
    assert not (tmp_path / "run").exists()


def test_without_the_simulators_package_a_link_cannot_be_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco.extras.is_installed", lambda package: package != "simpy")

    refused = init(tmp_path / "run", "--yes", *FAR, "--bandwidth", "200Mbit/s")

    assert "--bandwidth needs the package simpy" in str(refused.exception)
    assert "pip install 'diloco[sim]', or leave it out" in str(refused.exception)
    assert not (tmp_path / "run").exists()


def test_the_lesson_of_a_cluster_has_the_run_file_that_its_command_writes(tmp_path: Path) -> None:
    lesson = ROOT / "configs" / "examples" / "7-cluster"
    page = (lesson / "README.md").read_text().replace("\\\n", " ")
    words = next(line for line in page.splitlines() if line.startswith("diloco init cluster --yes"))

    made = init(tmp_path / "cluster", *shlex.split(words)[3:])

    assert made.exit_code == 0, (made.output, made.exception)
    written = (tmp_path / "cluster" / "run.toml").read_text()
    assert written == (lesson / "run.toml").read_text()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    init(tmp_path / "run", "--yes")

    again = init(tmp_path / "run", "--yes")

    assert isinstance(again.exception, ConfigError)
    assert "run.toml is there: edit it" in str(again.exception)


def test_where_nobody_can_be_asked_it_says_so(tmp_path: Path) -> None:
    refused = init(tmp_path / "run")

    assert "nobody is here to be asked: add --yes" in str(refused.exception)


def test_what_was_not_typed_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "is_terminal", lambda: True)

    # Accelerators, coordinator, bandwidth, launchers, model and text are asked; islands were typed.
    made = init(tmp_path / "far", *FAR, typed="4\nhead.example:5000\n\nssh\n150M\n/text/*.txt\n")

    assert made.exit_code == 0, (made.output, made.exception)
    config = load_config(tmp_path / "far" / "run.toml")
    assert config.islands["us"].ranks == 4
    assert config.coordinator.address == "head.example:5000"
    assert config.coordinator.syncer_listen == "0.0.0.0:5001"
    assert (tmp_path / "far" / "launch" / "ssh.sh").stat().st_mode & 0o111


def test_the_machine_gives_defaults(tmp_path: Path) -> None:
    machine = look_around(lambda: ("H100", "H100"))

    assert machine.cores >= 1
    first, second = machine.lines()
    assert "2 x H100" in first and f"{machine.cores} cores" in first
    assert second.startswith("jobs are started here with: ")


def test_a_slow_link_gets_a_long_round_and_a_fragment_its_time() -> None:
    def fitted(bandwidth_bps: float, rtt_s: float = 0.1, num_fragments: int = 4) -> tuple[int, int]:
        return fitting_schedule(
            round_bits=1e9,
            bandwidth_bps=bandwidth_bps,
            rtt_s=rtt_s,
            step_s=0.1,
            num_fragments=num_fragments,
        )

    # 1e9 bits at 1 Gbit/s are one second, half of a round of 20 steps: 24. A fragment takes two
    # quarters of a second and two round trips: 7 steps, but the next one leaves after 6.
    assert fitted(1e9) == (24, 5)
    assert fitted(1e9, rtt_s=0.0) == (24, 5)
    assert fitted(math.inf, rtt_s=0.0) == (24, 2)
    # Each of many fragments leaves at a step of its own.
    assert fitted(math.inf, num_fragments=42) == (48, 2)
    # At 100 Mbit/s ten seconds: 200 steps, in steps of 24.
    assert fitted(1e8) == (216, 52)
    assert fitted(1e3)[0] == 480


def test_an_operator_is_let_in_by_the_certificates_that_were_written(
    tmp_path: Path,
) -> None:
    init(tmp_path / "far", "--yes", *FAR)
    certs = tmp_path / "far" / "certs"

    async def status(_: IncomingCall) -> Reply:
        return Reply(StatusReply(run="far", state="running").SerializeToString())

    config = load_config(tmp_path / "far" / "run.toml", [f"transport.certs={certs}"])
    tls = Security.of(config, Role.COORDINATOR).tls
    with serving({"control.status": status}, tls) as address:
        shown = CliRunner().invoke(app, ["status", address, "--certs", str(certs)])

    assert shown.exit_code == 0, shown.output
    assert "far" in shown.output and "running" in shown.output


def test_certificates_of_a_site_can_be_used(tmp_path: Path) -> None:
    import datetime

    init(tmp_path / "far", "--yes", *FAR)

    found = site_certificates(tmp_path / "far" / "certs", datetime.datetime.now(datetime.UTC))

    assert found and all(state.startswith("valid") for state in found.values())
