"""An island that stays away: it exits 40, the others wait three deadlines and exit 50."""

import os
import signal
from pathlib import Path

import pytest

from diloco.config.load import load_config
from diloco.launch.local import LocalRun
from tests.faults.ranks import pid_of_rank
from tests.run_files import all_logs, write_run

pytestmark = pytest.mark.timeout(300)


@pytest.mark.slow
def test_lost_island_ends_the_run_naming_it_and_the_command(tmp_path: Path) -> None:
    run_file = write_run(
        tmp_path, {"east": "", "west": "dp_shard = 2"}, inner_steps=4000, round_deadline="1s"
    )
    config = load_config(run_file, ["islands.west.max_restarts=0"])
    killed: list[int] = []

    with LocalRun(config) as run:

        def kill_one_rank_after_a_merge() -> None:
            events = config.telemetry_dir / "events-west-1.jsonl"
            if killed or not events.exists() or "fragment_merged" not in events.read_text():
                return
            killed.append(pid_of_rank(run.islands["west"].pid, island_rank=1))
            os.kill(killed[0], signal.SIGKILL)

        run.start()
        run.wait(kill_one_rank_after_a_merge)
        run.wait_for_coordinator()
        assert run.coordinator is not None
        codes = {name: process.returncode for name, process in run.islands.items()}
        codes["coordinator"] = run.coordinator.returncode
    logs = all_logs(run.state.root)

    assert codes == {"west": 40, "east": 50, "coordinator": 50}, logs
    log = (config.telemetry_dir / "east-0.log").read_text()
    assert "missing: west" in log, log
    assert "diloco island RUN.toml --island west" in log, log
    events = (config.telemetry_dir / "events-east-0.jsonl").read_text()
    assert events.count('"round_expired"') >= 2
