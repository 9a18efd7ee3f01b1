"""An island whose rank is killed in a real run returns by itself, and the run ends as it should."""

import os
import signal
from pathlib import Path

import pytest

from diloco.config.load import load_config
from diloco.launch.local import LocalRun
from diloco.report.summary import read_events
from tests.faults.ranks import pid_of_rank
from tests.run_files import FinishedRun, all_logs, write_run

pytestmark = pytest.mark.timeout(300)

INNER_STEPS = 120


@pytest.mark.slow
def test_killed_island_returns_and_the_run_ends_with_equal_digests(tmp_path: Path) -> None:
    shapes = {"east": "", "west": "dp_shard = 2"}
    run_file = write_run(tmp_path, shapes, inner_steps=INNER_STEPS)
    config = load_config(
        run_file, ["checkpoint.every_inner_steps=10", "islands.west.restart_wait=100ms"]
    )
    killed: list[int] = []

    with LocalRun(config) as run:

        def kill_one_rank_after_its_first_checkpoint() -> None:
            if killed or not list(config.checkpoint_dir.glob("west/step-*/manifest.json")):
                return
            killed.append(pid_of_rank(run.islands["west"].pid, island_rank=1))
            os.kill(killed[0], signal.SIGKILL)

        run.start()
        code = run.wait(kill_one_rank_after_its_first_checkpoint)
        run.wait_for_coordinator()
    logs = all_logs(run.state.root)

    assert code == 0, logs
    assert len(killed) == 1
    finished = FinishedRun(run)
    records = finished.last_records()
    assert finished.ending_digests() == {tuple(record.digest.hex() for record in records)}, logs
    assert all(
        [contributor.island for contributor in record.contributors] == ["east", "west"]
        for record in records
    )
    rejoined = [e for e in finished.of_kind("west", "island_rejoined") if e["island_rank"] == 0]
    assert [event["incarnation"] for event in rejoined] == [2], logs
    assert 0 < rejoined[0]["inner_step"] < INNER_STEPS
    assert rejoined[0]["lost_steps"] >= 0
    for island in shapes:
        steps = [event["inner_step"] for event in finished.of_kind(island, "inner_step")]
        assert steps == list(range(1, INNER_STEPS + 1)), "every inner step stands once"
    supervisor = (run.state.root / "island-west.log").read_text()
    assert "island west starts again, wait_s=0.1, restarts_left=2 of 3: rank 1" in supervisor
    rank = (config.telemetry_dir / "west-0.log").read_text()
    assert "inner optimizer of inner step" in rank, "its own checkpoint gave it"
    assert read_events(config.telemetry_dir, ["east"])["east"][-1]["incarnation"] == 1
