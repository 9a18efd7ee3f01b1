"""A run over libp2p: `transport.kind` says so, and nothing else does."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from diloco.config.load import load_config
from diloco.launch.local import LocalRun
from diloco.state_dir import read_endpoint
from diloco.transport.libp2p.address import is_peer_address
from tests.faults.ranks import pid_of_rank
from tests.run_files import FinishedRun, all_logs, write_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

INNER_STEPS = 24


def test_a_killed_island_returns_to_a_run_over_libp2p(tmp_path: Path) -> None:
    run_file = write_run(tmp_path, {"east": "", "west": ""}, inner_steps=INNER_STEPS)
    config = load_config(
        run_file,
        [
            "transport.kind=hivemind",
            "checkpoint.every_inner_steps=4",
            "islands.west.restart_wait=100ms",
        ],
    )
    killed: list[int] = []

    with LocalRun(config) as run:

        def kill_a_rank_after_its_first_checkpoint() -> None:
            if not killed and list(config.checkpoint_dir.glob("west/step-*/manifest.json")):
                killed.append(pid_of_rank(run.islands["west"].pid, island_rank=0))
                os.kill(killed[0], signal.SIGKILL)

        run.start()
        assert is_peer_address(run.address)
        code = run.wait(kill_a_rank_after_its_first_checkpoint)
        syncer = read_endpoint(run.state.syncer)
        run.wait_for_coordinator()
    logs = all_logs(run.state.root)

    assert code == 0, logs
    assert syncer is None or is_peer_address(syncer.address)
    finished = FinishedRun(run)
    records = finished.last_records()
    assert finished.ending_digests() == {tuple(record.digest.hex() for record in records)}, logs
    starts = {
        island: {event["incarnation"] for event in finished.of_kind(island, "island_ended")}
        for island in config.islands
    }
    assert starts["east"] == {1}, "the others do not notice"
    assert len(killed) == 1
    for island in config.islands:
        steps = [event["inner_step"] for event in finished.of_kind(island, "inner_step")]
        assert steps == list(range(1, INNER_STEPS + 1)), logs
