"""A rank that hangs: the others name it, with the collective; a trace of the steps before it."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.ranks import pid_of_rank
from tests.run_files import all_logs
from tests.served_run import ServedRun
from tests.waiting import said_by, wait_until

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

#: What the training thread and the IO thread do in the traced steps, of which two are due.
PHASES = {
    *(f"diloco/inner/{name}" for name in ("batch", "forward", "backward", "clip", "optimizer")),
    *(f"diloco/{name}" for name in ("collect", "encode", "agree")),
    *(f"diloco/{name}" for name in ("decode", "merge", "distribute")),
}


def events(path: Path, kind: str) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return [event for event in found if event["kind"] == kind]


def start_island(served: ServedRun, output: Path) -> subprocess.Popen[str]:
    settings = {
        "islands.west.collective_timeout": "2s",
        "islands.west.max_restarts": "0",
        "telemetry.profile.start_step": "2",
        "telemetry.profile.num_steps": "6",
        "telemetry.profile.memory": "true",
    }
    arguments = ["island", str(served.run_file), "--island", "west"]
    arguments += ["--coordinator", served.address, "--output", str(output)]
    for name, value in settings.items():
        arguments += ["--set", f"{name}={value}"]
    return subprocess.Popen(
        [sys.executable, "-m", "diloco", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_rank_that_hangs_is_named_with_the_collective_and_its_steps_are_traced(
    tmp_path: Path,
) -> None:
    output, islands = tmp_path / "out", {"west": "dp_shard = 2"}
    with ServedRun(tmp_path, islands, inner_steps=100_000) as served:
        supervisor = start_island(served, output)
        try:
            files = [output / f"events-west-{rank}.jsonl" for rank in (0, 1)]

            def is_traced() -> bool:
                assert supervisor.poll() is None, all_logs(output)
                return all(events(file, "profile_written") for file in files)

            wait_until(is_traced, 60)
            os.kill(pid_of_rank(supervisor.pid, 1), signal.SIGSTOP)
            said, _ = said_by(supervisor, 40)
        finally:
            supervisor.kill()
            supervisor.wait()

    assert supervisor.returncode == 40, said
    (lost,) = events(files[0], "rank_lost")
    assert lost["ranks"] == [1]
    assert "gloo:" in lost["collective"]
    dump = json.loads(Path(lost["dump"]).read_text())
    assert any(entry["profiling_name"].startswith("gloo:") for entry in dump["entries"])
    for part in ("lost rank 1", lost["collective"], lost["dump"], "collective_timeout = 2s"):
        assert part in said
    for file in files:
        (written,) = events(file, "profile_written")
        assert (written["first_step"], written["inner_step"]) == (3, 8)
        with gzip.open(written["path"], "rt") as trace:
            names = [event.get("name") for event in json.load(trace)["traceEvents"]]
        assert set(names) >= PHASES
        assert names.count("diloco/inner/optimizer") == 6
    steps = events(files[0], "inner_step")
    assert all(step["tflops_per_s"] > 0 and step["mfu"] == 0 for step in steps), "a CPU has no peak"
