"""The loops that diloco/integrations/README.md shows, run as they stand there by two islands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

import diloco.integrations
from tests.test_readme import start
from tests.waiting import said_by

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

PAGE = Path(diloco.integrations.__file__).with_name("README.md")
ISLANDS = ("eu-west", "us-east")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("number", range(2), ids=["trainer", "accelerate"])
def test_the_loop_of_the_page_trains_two_islands_to_the_same_model(
    tmp_path: Path, number: int
) -> None:
    (run_file,), scripts = blocks("toml"), blocks("python")
    assert len(scripts) == 3  # the last one needs torchtitan and GPUs
    (tmp_path / "run.toml").write_text(run_file)
    for island in ISLANDS:
        (tmp_path / f"{island}.py").write_text(scripts[number].replace("eu-west", island))

    coordinator = start(tmp_path, "-m", "diloco", "coordinator", "run.toml")
    processes = [coordinator]
    try:
        assert coordinator.stdout is not None
        line = coordinator.stdout.readline()
        assert "listens on" in line, line + said_by(coordinator, 20)[0]
        processes += [start(tmp_path, f"{island}.py") for island in ISLANDS]
        for process in reversed(processes):
            output, _ = said_by(process, 240)
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()
            process.communicate()

    saved = [load_file(tmp_path / island / "model.safetensors") for island in ISLANDS]
    assert saved[0].keys() == saved[1].keys()
    assert all(saved[0][name].equal(saved[1][name]) for name in saved[0])
    for island in ISLANDS:
        checkpoints = sorted(path.name for path in (tmp_path / island).glob("checkpoint-*"))
        assert checkpoints == ["checkpoint-16", "checkpoint-8"]
