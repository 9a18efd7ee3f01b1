"""An all-reduce of real processes under certificates and tokens: islands serve each other."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from diloco.config.load import load_config
from diloco.launch.local import LocalRun
from diloco.security.run_ca import RunCa
from tests.faults.test_kill_allreduce import OVERRIDES, check_same_bytes
from tests.run_files import all_logs, write_run

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

SHORTS = ("coordinator", "operator", "island/east", "island/west")


def test_islands_that_prove_who_they_are_come_to_one_truth(tmp_path: Path) -> None:
    run_file, certs = write_run(tmp_path, {"east": "", "west": ""}), tmp_path / "certs"
    ca = RunCa(certs, lambda: datetime.datetime.now(datetime.UTC))
    ca.create("test", 100)
    for short in SHORTS:
        ca.issue(short, 30, again=False)
        ca.make_token(short)
    protected = (f"transport.certs={certs}", f"transport.tokens={certs}")

    with LocalRun(load_config(run_file, (*OVERRIDES, *protected))) as run:
        run.start()
        code = run.wait(lambda: None)
        run.wait_for_coordinator()

    assert code == 0, f"exit code {code}\n{all_logs(run.state.root)}"
    check_same_bytes(run.state, ("east", "west"))
