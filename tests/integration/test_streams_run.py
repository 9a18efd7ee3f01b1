"""Two islands of different shape train on a JSON lines file of real text, and run out of it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.data.text_files import write_jsonl
from tests.run_files import all_logs, run_to_end, write_run

pytestmark = pytest.mark.timeout(300)


def write_stream_run(directory: Path, islands: dict[str, str], texts: list[str]) -> Path:
    write_jsonl(directory / "text.jsonl", texts)
    path = write_run(directory, islands)
    data = f'held_out_documents = 4\nsources.code.files = "{directory}/*.jsonl"\n'
    path.write_text(path.read_text().replace("[data]\n", f"[data]\n{data}"))
    return path


def test_islands_of_two_shapes_train_on_their_shares(tmp_path: Path) -> None:
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]
    texts = [path.read_text() for path in sources]

    run = run_to_end(write_stream_run(tmp_path, {"east": "", "west": "dp_shard = 2"}, texts))

    assert len(run.ending_digests()) == 1
    assert len(run.losses("east")) == len(run.losses("west")) == 8
    assert run.losses("east") != run.losses("west")
    evaluated = {
        island: {event["nats_per_byte"] for event in run.of_kind(island, "evaluated")}
        for island in ("east", "west")
    }
    assert all(0 < loss < 6 for losses in evaluated.values() for loss in losses)  # ln 256 = 5.5


@pytest.mark.slow
def test_a_run_that_has_no_more_text_ends_with_the_remedy(tmp_path: Path) -> None:
    # 26 documents of 341 tokens: 277 sequences of 32, 4 a step.
    run_file = write_stream_run(tmp_path, {"east": ""}, ["a piece of text, " * 20] * 30)
    overrides = ["run.inner_steps=80", "outer.inner_steps_per_round=80"]

    process = subprocess.run(
        [
            *(sys.executable, "-m", "diloco", "local", str(run_file)),
            *(argument for override in overrides for argument in ("--set", override)),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )

    told = process.stdout + process.stderr + all_logs(tmp_path)
    assert process.returncode == 2, told
    assert "after inner step 69: data.sources.code ended: island slot" in told
    assert "set data.sources.code.repeat = true" in told
