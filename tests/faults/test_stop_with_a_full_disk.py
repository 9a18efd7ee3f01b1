"""An island fails at the step of a graceful stop and returns: nobody has left meanwhile."""

import signal
from pathlib import Path

import pytest

from diloco.checkpoint.checkpoints import valid_steps
from diloco.checkpoint.run_checkpoints import open_journal, read_membership
from diloco.config.load import load_config
from diloco.launch.local import LocalRun
from tests.run_files import all_logs, write_run

pytestmark = pytest.mark.timeout(300)


@pytest.mark.slow
def test_a_stop_ends_with_an_island_whose_disk_was_full(tmp_path: Path) -> None:
    run_file = write_run(tmp_path, {"east": "", "west": ""}, inner_steps=100_000)
    config = load_config(run_file, ["islands.west.restart_wait=100ms"])
    in_the_way = config.checkpoint_dir / "west"
    in_the_way.parent.mkdir(parents=True)
    in_the_way.write_text("as a full disk is")

    with LocalRun(config) as run:

        def look() -> None:
            west = config.telemetry_dir / "events-west-0.jsonl"
            text = west.read_text() if west.exists() else ""
            if "fragment_merged" in text and not run.request.number:
                run.request.note(signal.SIGTERM)
            if "checkpoint_failed" in text and in_the_way.is_file():
                in_the_way.unlink()

        run.start()
        code = run.wait(look)
        run.wait_for_coordinator()
    logs = all_logs(run.state.root)

    assert (code, run.is_stopped) == (0, True), logs
    with open_journal(run.state.journal) as journal:
        membership = read_membership(config, journal)
    assert membership.is_stopped, logs
    # West sent in vain or not, so the stop stays or moves: all have the checkpoint of where it is.
    newest = [valid_steps(config.checkpoint_dir, island)[-1] for island in ("east", "west")]
    assert newest == [membership.stop_step] * 2, logs
    assert membership.checkpoints[-1] == membership.stop_step
    assert membership.members["west"].incarnation == 2, "it failed at the first attempt"
