"""A rank that starts again in a run under way: what it needs no more, and what it must still have.

One real coordinator; the only rank of the island is killed and started again by hand.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco.checkpoint.export import export_run
from diloco.config.load import load_config
from diloco.state_dir import StateDir, read_endpoint, stop_syncer
from tests.data.text_files import pieces, write_jsonl
from tests.launch.stored_run import random_parameters, store_run, tiny_run
from tests.launch.warm_run import WarmRun
from tests.run_files import write_run
from tests.waiting import exit_code, wait_until

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """A long run of one island on a text of its own, warm-started from an export."""
    model = WarmRun(tmp_path / "shape")
    parameters = random_parameters(model.shape, 1)
    export_run(store_run(tiny_run(tmp_path / "old"), parameters), tmp_path / "export")
    write_jsonl(tmp_path / "text.jsonl", pieces(60))
    path = write_run(tmp_path, {"east": ""}, inner_steps=100_000)
    text = path.read_text().replace("[run]\n", f'[run]\nwarm_start = "{tmp_path}/export"\n')
    own = f'held_out_documents = 30\nsources.own = {{ files = "{tmp_path}/text.jsonl", '
    path.write_text(text.replace("[data]\n", f"[data]\n{own}repeat = true }}\n"))
    return path


@pytest.fixture
def state(run_file: Path) -> Iterator[StateDir]:
    """State directory of the run, whose coordinator lives."""
    found = StateDir(Path(load_config(run_file).coordinator.state_dir))
    coordinator = subprocess.Popen(
        [sys.executable, "-m", "diloco", "coordinator", str(run_file)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: read_endpoint(found.coordinator) is not None)
        yield found
    finally:
        coordinator.kill()
        coordinator.wait()
        stop_syncer(found)


def start(run_file: Path, state: StateDir, output: Path) -> subprocess.Popen[str]:
    endpoint = read_endpoint(state.coordinator)
    assert endpoint is not None
    arguments = ["--config", str(run_file), "--island", "east"]
    arguments += ["--coordinator", endpoint.address, "--output", str(output)]
    return subprocess.Popen(
        [sys.executable, "-m", "diloco.launch.rank", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "RANK": "0", "WORLD_SIZE": "1"},
        text=True,
    )


@pytest.mark.slow
def test_changed_text_is_named_and_a_warm_start_that_is_gone_is_not_missed(
    run_file: Path, state: StateDir, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    events, log = output / "events-east-0.jsonl", output / "east-0.log"
    first = start(run_file, state, output)
    wait_until(lambda: events.exists() and '"version": 2' in events.read_text())
    first.kill()
    first.wait()

    write_jsonl(tmp_path / "text.jsonl", [*pieces(59), "another piece of text"])
    shutil.rmtree(tmp_path / "export")
    changed = exit_code(start(run_file, state, output), 120)
    told = log.read_text()
    write_jsonl(tmp_path / "text.jsonl", pieces(60))
    again = start(run_file, state, output)
    wait_until(lambda: '"island_rejoined"' in events.read_text() or again.poll() is not None)
    code = again.poll()
    again.kill()
    again.wait()

    assert changed == 10, told
    assert "data.sources.own is not what the run was trained on: part 1 was text.jsonl (" in told
    assert "put it back" in told
    assert code is None, log.read_text()
