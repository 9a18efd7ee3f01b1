"""A rank that hangs: the others name it, its island starts again, the run ends as undisturbed."""

from __future__ import annotations

import gzip
import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from diloco.config.load import load_config
from diloco.faults.process import STEP_VARIABLE
from diloco.launch.local import LocalRun
from tests.faults.ranks import pid_of_rank
from tests.run_files import FinishedRun, all_logs, write_run

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

#: What the training thread and the IO thread do in the traced steps, of which two are due.
PHASES = {
    *(f"diloco/inner/{name}" for name in ("batch", "forward", "backward", "clip", "optimizer")),
    *(f"diloco/{name}" for name in ("collect", "encode", "agree")),
    *(f"diloco/{name}" for name in ("decode", "merge", "distribute")),
}
INNER_STEPS, H = 24, 4
#: Python runs it in every process of the run: the signal has the training thread sleep for ever.
SLEEPER = "import signal, time\nsignal.signal(signal.SIGUSR1, lambda *_: time.sleep(1e6))\n"
SETTINGS = [
    "islands.west.collective_timeout=3s",
    "islands.west.restart_wait=100ms",
    f"checkpoint.every_inner_steps={H}",
    "telemetry.profile.start_step=2",
    "telemetry.profile.num_steps=6",
    "telemetry.profile.memory=true",
]


def started(directory: Path, environment: Mapping[str, str], device: str = "cpu") -> LocalRun:
    """Make a run whose island, where it returns, has exactly what it had at its last merge."""
    shape = {"num_fragments": 1, "overlap_steps": 0, "inner_steps_per_round": H}
    run_file = write_run(
        directory, {"west": "dp_shard = 2"}, inner_steps=INNER_STEPS, codec="float32", **shape
    )
    config = load_config(run_file, [*SETTINGS, f"islands.west.device={device}"])
    return LocalRun(config, environment=environment)


def events(path: Path, kind: str) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return [event for event in found if event["kind"] == kind]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> set[tuple[str, ...]]:
    with started(tmp_path_factory.mktemp("undisturbed"), {}) as run:
        run.start()
        assert run.wait(lambda: None) == 0, all_logs(run.state.root)
        run.wait_for_coordinator()
    return FinishedRun(run).ending_digests()


@pytest.mark.parametrize(
    ("number", "island_rank"),
    [(signal.SIGSTOP, 0), (signal.SIGSTOP, 1), (signal.SIGUSR1, 1)],
    ids=["frozen-and-it-serves-the-store", "frozen", "asleep"],
)
def test_a_rank_that_hangs_is_named_and_the_run_ends_as_if_it_had_not(
    tmp_path: Path, undisturbed: set[tuple[str, ...]], number: signal.Signals, island_rank: int
) -> None:
    run = check_hang(tmp_path, number, island_rank=island_rank)

    assert run.ending_digests() == undisturbed
    for rank in (0, 1):
        written = events(tmp_path / f"state/telemetry/events-west-{rank}.jsonl", "profile_written")
        assert (written[0]["first_step"], written[0]["inner_step"]) == (3, 8)
        with gzip.open(written[0]["path"], "rt") as trace:
            names = [event.get("name") for event in json.load(trace)["traceEvents"]]
        assert set(names) >= PHASES
        assert names.count("diloco/inner/optimizer") == 6
    steps = run.of_kind("west", "inner_step")
    assert all(step["tflops_per_s"] > 0 and step["mfu"] == 0 for step in steps), "a CPU has no peak"


def check_hang(
    tmp_path: Path, number: signal.Signals, *, island_rank: int, device: str = "cpu"
) -> FinishedRun:
    """Let a rank of two hang within a round, by a signal, and check that it is named in time."""
    (tmp_path / "sitecustomize.py").write_text(SLEEPER)
    environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    hung: list[float] = []

    with started(tmp_path, {**environment, STEP_VARIABLE: "0.2"}, device) as run:
        files = [run.config.telemetry_dir / f"events-west-{rank}.jsonl" for rank in (0, 1)]

        def hang_within_a_round() -> None:
            steps = events(files[0], "inner_step")
            step = steps[-1]["inner_step"] if steps else 0
            manifest = run.config.checkpoint_dir / f"west/step-{step // H * H:012d}/manifest.json"
            if not hung and step > 2 * H and step % H in (1, 2) and manifest.exists():
                os.kill(pid_of_rank(run.islands["west"].pid, island_rank), number)
                hung.append(time.time())

        run.start()
        code = run.wait(hang_within_a_round)
        run.wait_for_coordinator()
    logs = all_logs(run.state.root)

    assert code == 0, logs
    (lost,) = events(files[1 - island_rank], "rank_lost")
    assert lost["ranks"] == [island_rank], logs
    assert lost["unix_s"] - hung[0] < 3 + 30
    backend = "nccl" if device == "cuda" else "gloo"
    assert f"{backend}:" in lost["collective"]
    dump = json.loads(Path(lost["dump"]).read_text())[backend]
    assert any(entry["profiling_name"].startswith(f"{backend}:") for entry in dump["entries"])
    said = (run.state.root / "island-west.log").read_text()
    where = "no sign of life" if number is signal.SIGSTOP else "it lives, and comes to no coll"
    parts = (
        f"lost rank {island_rank}: ",
        where,
        lost["collective"],
        lost["dump"],
        "after inner st",
    )
    assert all(part in said for part in (*parts, "collective_timeout = 3s")), said
    if number is not signal.SIGSTOP:
        stacks = (run.config.telemetry_dir / f"west-{island_rank}.log").read_text()
        assert "sitecustomize.py" in stacks
    return FinishedRun(run)
