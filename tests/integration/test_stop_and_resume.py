"""A real run stopped in the middle of its rounds and resumed, against the same run undisturbed.

Two islands, one of two FSDP2 ranks and one of one rank, train on a JSON lines file of real text,
over a link on which a fragment is in flight for a while. Everything is float32 and on the CPU, so
nothing may differ in a single bit. In the default suite islands within one process hold that
(tests/island/test_session_checkpoints.py, test_resume.py), and a run of real processes is stopped
and resumed by command (tests/cli/test_local.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGINT
from typing import Any

import pytest

from diloco.checkpoint.checkpoints import Checkpoint, rank_file, step_directory, valid_steps
from diloco.config.load import load_config
from diloco.config.schema import Config
from diloco.launch.local import LocalRun, find_resume_step
from diloco.report.summary import read_events
from tests.data.text_files import write_stdlib
from tests.run_files import FinishedRun, all_logs, run_to_end, with_text, write_run

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

ISLANDS = {"fsdp": "dp_shard = 2", "one": ""}
INNER_STEPS = 32
#: A round takes longer than its overlap, so islands block now and then.
OVERRIDES = ["transport.link=ocean-100M-150ms", "checkpoint.every_inner_steps=4"]
#: Where a fragment's ledger says that a contribution is in flight.
IN_FLIGHT = 9


def write(directory: Path, text: Path) -> Path:
    run_file = write_run(directory, ISLANDS, inner_steps=INNER_STEPS, overlap_steps=2, ffn_dim=256)
    return with_text(run_file, text)


@dataclass
class Runs:
    """The undisturbed run, and what a stopped one left behind."""

    whole: FinishedRun
    stopped: Path
    stop_step: int
    text: Path


def copy_of(stopped: Path, directory: Path, overrides: Sequence[str] = ()) -> Config:
    shutil.copytree(stopped / "state", directory / "state")
    state_dir = f"coordinator.state_dir={directory / 'state'}"
    return load_config(stopped / "run.toml", [*OVERRIDES, state_dir, *overrides])


def resume(config: Config, step: int) -> FinishedRun:
    with LocalRun(config, resume_step=step) as run:
        run.start()
        code = run.wait(lambda: None)
        run.wait_for_coordinator()
    assert code == 0, f"exit code {code}\n{all_logs(run.state.root)}"
    return FinishedRun(run)


def stop_in_the_middle(run_file: Path) -> int:
    """Run, ask to stop after a few rounds, and return the inner step of the stop."""
    config = load_config(run_file, OVERRIDES)
    with LocalRun(config) as run:

        def look() -> None:
            lines = read_events(config.telemetry_dir, ["one"])["one"]
            if not run.request.number and sum(e["kind"] == "inner_step" for e in lines) > 5:
                run.request.note(SIGINT)

        run.start()
        code = run.wait(look)
        run.wait_for_coordinator()
        assert code == 0 and run.is_stopped, f"exit code {code}\n{all_logs(run.state.root)}"
    steps = {island: valid_steps(config.checkpoint_dir, island) for island in ISLANDS}
    # Older ones go when an island hears that newer ones are whole, at a moment of its own.
    assert steps["fsdp"][-2:] == steps["one"][-2:], all_logs(run.state.root)
    return steps["one"][-1]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    text = write_stdlib(tmp_path_factory.mktemp("text") / "text.jsonl")
    stopped = tmp_path_factory.mktemp("stopped")
    stop_step = stop_in_the_middle(write(stopped, text))
    whole = run_to_end(write(tmp_path_factory.mktemp("whole"), text), OVERRIDES)
    return Runs(whole, stopped, stop_step, text)


def losses(run: FinishedRun, island: str) -> dict[int, float]:
    return {event["inner_step"]: event["loss"] for event in run.of_kind(island, "inner_step")}


def evaluations(run: FinishedRun, island: str) -> list[tuple[Any, ...]]:
    return [
        (e["island_rank"], e["inner_step"], e["parameters"], e["nats_per_byte"])
        for e in run.of_kind(island, "evaluated")
    ]


def published(run: FinishedRun) -> list[bytes]:
    return [
        lane.published.numpy().tobytes() for record in run.last_records() for lane in record.lanes
    ]


def test_resumed_equals_uninterrupted_bit_for_bit(runs: Runs, tmp_path: Path) -> None:
    assert 5 < runs.stop_step < INNER_STEPS
    for island in ISLANDS:
        checkpoint = Checkpoint.open(runs.stopped / "state" / "checkpoints", island, runs.stop_step)
        state = checkpoint.outer_state(["ledger/0", "ledger/1"])
        assert any(int(ledger[IN_FLIGHT]) for ledger in state.values()), "nothing was in flight"

    resumed = resume(copy_of(runs.stopped, tmp_path), runs.stop_step)

    for island in ISLANDS:
        assert losses(resumed, island) == losses(runs.whole, island)
        # A rank that stops does not evaluate first, and who resumes begins with the next step.
        assert evaluations(resumed, island) == [
            found for found in evaluations(runs.whole, island) if found[1] != runs.stop_step
        ]
    assert resumed.ending_digests() == runs.whole.ending_digests()
    assert published(resumed) == published(runs.whole)


def test_a_torn_newest_checkpoint_is_skipped_and_another_shape_resumes_the_one_before(
    runs: Runs, tmp_path: Path
) -> None:
    config = copy_of(runs.stopped, tmp_path, ["islands.fsdp.ranks=1", "islands.fsdp.mesh={}"])
    path = step_directory(config.checkpoint_dir, "fsdp", runs.stop_step)
    (torn,) = path.rglob(rank_file(1, 2))
    with torn.open("r+b") as file:
        file.truncate(torn.stat().st_size // 2)

    told: list[str] = []
    step = find_resume_step(config, None, told.append, start="diloco local RUN.toml")
    assert step < runs.stop_step
    assert f"step {runs.stop_step} is torn, skipped: island fsdp: {torn} has" in "\n".join(told)
    resumed = resume(config, step)

    for island in ISLANDS:
        ours, theirs = losses(resumed, island), losses(runs.whole, island)
        assert ours.keys() == theirs.keys()
        assert max(abs(ours[step] - theirs[step]) for step in ours) <= 1e-3
        # What was abandoned goes when every island has a checkpoint of the new timeline.
        asides = (config.checkpoint_dir / island).glob(f"abandoned-*-after-{step:012d}")
        assert all([kept.name for kept in aside.iterdir()] == [path.name] for aside in asides)
    assert len(resumed.ending_digests()) == 1


def test_a_new_run_warm_starts_from_a_checkpoint_where_it_stood(runs: Runs, tmp_path: Path) -> None:
    checkpoints = runs.stopped / "state" / "checkpoints"

    warm = run_to_end(write(tmp_path, runs.text), [f"run.warm_start={checkpoints}"])

    for island in ISLANDS:
        ours, theirs = losses(warm, island), losses(runs.whole, island)
        assert list(ours) == list(range(runs.stop_step + 1, INNER_STEPS + 1))
        # Local progress since the last merge and outer momentum are gone, what was learned is not.
        first = runs.stop_step + 1
        assert ours[first] < (theirs[1] + theirs[first]) / 2
