"""An all-reduce over libp2p: the run file says transport.kind = "hivemind" and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco.config.load import load_config
from diloco.launch.local import LocalRun
from tests.faults.test_kill_allreduce import Killer, check_same_bytes, has_staged, of_island
from tests.run_files import all_logs, write_run

pytestmark = [pytest.mark.timeout(480), pytest.mark.slow]

ISLANDS = ("east", "west")
OVERRIDES = ["outer.exchange=allreduce", "transport.kind=hivemind"]


def test_islands_reduce_over_libp2p_and_one_of_them_dies(tmp_path: Path) -> None:
    killer = Killer(of_island("west"), has_staged("west"))
    config = load_config(write_run(tmp_path, dict.fromkeys(ISLANDS, ""), inner_steps=16), OVERRIDES)

    with LocalRun(config) as run:
        with killer.at_work(run.state):
            run.start()
            code = run.wait(lambda: None)
        run.wait_for_coordinator()

    assert code == 0, all_logs(run.state.root)
    assert killer.num_done, "the run was over before anybody was killed"
    check_same_bytes(run.state, ISLANDS)
