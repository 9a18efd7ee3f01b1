"""The loop that README.md shows, run as it stands there by two islands against a coordinator."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.waiting import said_by

README = Path(__file__).resolve().parents[1] / "README.md"
ISLANDS = ("eu-west", "us-east")

pytestmark = pytest.mark.timeout(300)


def blocks(language: str) -> list[str]:
    """Return the fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)


def start(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_the_loop_of_the_readme_trains(tmp_path: Path, number: int) -> None:
    (run_file,) = (block for block in blocks("toml") if "[islands.eu-west]" in block)
    (tmp_path / "run.toml").write_text(run_file)
    script = blocks("python")[number]
    assert 'island="eu-west"' in script
    for island in ISLANDS:
        (tmp_path / f"{island}.py").write_text(script.replace("eu-west", island))

    coordinator = start(tmp_path, "-m", "diloco", "coordinator", "run.toml")
    processes = [coordinator]
    try:
        assert coordinator.stdout is not None
        assert "listens on" in coordinator.stdout.readline()
        processes += [start(tmp_path, f"{island}.py") for island in ISLANDS]
        for process in reversed(processes):
            output, _ = said_by(process, 120)
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()
            process.communicate()

    east, west = (torch.load(tmp_path / f"{island}-model.pt") for island in ISLANDS)
    assert all(torch.equal(east[name], west[name]) for name in east)
    for island in ISLANDS:
        assert sorted(path.name for path in tmp_path.glob(f"{island}-[0-9]*.pt")) == [
            f"{island}-20.pt",
            f"{island}-40.pt",
        ]


def test_the_readme_shows_a_loop() -> None:
    assert blocks("python")
