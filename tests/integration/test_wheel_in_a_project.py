"""The wheel in a project whose own modules have the names of this repository's folders."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.waiting import exit_code, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "configs/examples/2-own-loop/own-loop.toml"
OWN = ("configs", "protos", "simulations", "transport")
LOOP = """
import sys
import configs, protos, simulations, transport
import torch
import diloco
import diloco.protos.fragment_pb2, diloco.simulations.planner.assumptions, diloco.transport.framing

assert {each.OWNER for each in (configs, protos, simulations, transport)} == {"the project"}
assert diloco.__file__.startswith(sys.prefix), diloco.__file__
island = sys.argv[1]
config = diloco.load_config("own-loop.toml", island=island)
torch.manual_seed(config.run.seed)
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
with diloco.connect(config) as connection:
    outer = diloco.DiLoCo(model, config.outer, transport=connection)
    for inner_step in range(outer.start_step, outer.inner_steps):
        model(torch.randn(32, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        outer.step(num_tokens=512)
    outer.finish()
print("trained to the end")
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter in whose environment the wheel is installed, and nothing of this tree is."""
    directory = tmp_path_factory.mktemp("environment")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", directory, ROOT]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = directory.glob("*.whl")
    venv.create(directory / "venv", with_pip=True)
    python = directory / "venv" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True, capture_output=True)
    # What it needs is read from where the tests run, without that place's own hooks.
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True)
    needed = Path(packages.stdout.strip()) / "needed.pth"
    needed.write_text(sysconfig.get_path("purelib"))
    return python


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in OWN[:2]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text('OWNER = "the project"\n')
    for name in OWN[2:]:
        (tmp_path / f"{name}.py").write_text('OWNER = "the project"\n')
    (tmp_path / "own-loop.toml").write_text(EXAMPLE.read_text())
    (tmp_path / "loop.py").write_text(LOOP)
    return tmp_path


def test_the_projects_loops_train_by_the_wheel_with_the_projects_own_modules(
    python: Path, project: Path
) -> None:
    environment = {
        **{key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        "PYTHONUNBUFFERED": "1",
    }
    processes = {}

    def start(name: str, *arguments: str) -> None:
        with (project / f"{name}.log").open("wb") as log:
            processes[name] = subprocess.Popen(
                [python, *arguments], cwd=project, env=environment, stdout=log, stderr=log
            )

    def said(name: str) -> str:
        return (project / f"{name}.log").read_text()

    try:
        start("coordinator", "-m", "diloco", "coordinator", "own-loop.toml")
        wait_until(
            lambda: "listens on" in said("coordinator"), 60.0, what=lambda: said("coordinator")
        )
        for island in ("eu-west", "us-east"):
            start(island, "loop.py", island)
        codes = {name: exit_code(process, 120.0) for name, process in processes.items()}
    finally:
        for process in processes.values():
            process.kill()
            process.wait()

    assert codes == dict.fromkeys(processes, 0), [said(name) for name in processes]
    assert "trained to the end" in said("eu-west") and "trained to the end" in said("us-east")


def test_a_local_run_and_a_plan_are_made_from_the_projects_directory(
    python: Path, project: Path
) -> None:
    for words in (
        ("init", "run", "--yes", "--model", "tiny", "--steps", "48"),
        ("plan", "run/run.toml", "--step-time", "0.1s"),
        ("local", "--fresh", "run/run.toml"),
    ):
        ended = subprocess.run(
            [python, "-m", "diloco", *words], cwd=project, capture_output=True, text=True
        )
        assert ended.returncode == 0, (words, ended.stdout, ended.stderr)
