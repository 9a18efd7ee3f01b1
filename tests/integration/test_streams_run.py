"""An island that runs out of text; runs that do not are those of test_stop_and_resume.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.data.text_files import write_jsonl
from tests.run_files import all_logs, with_text, write_run
from tests.waiting import run_command

pytestmark = pytest.mark.timeout(300)


@pytest.mark.slow
def test_a_run_that_has_no_more_text_ends_with_the_remedy(tmp_path: Path) -> None:
    # 26 documents of 341 tokens: 277 sequences of 32, 4 a step.
    write_jsonl(tmp_path / "text.jsonl", ["a piece of text, " * 20] * 30)
    run_file = with_text(write_run(tmp_path, {"east": ""}), tmp_path / "text.jsonl")
    overrides = ["run.inner_steps=80", "outer.inner_steps_per_round=80"]

    process = run_command(
        [
            *(sys.executable, "-m", "diloco", "local", str(run_file)),
            *(argument for override in overrides for argument in ("--set", override)),
        ],
        200,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )

    told = process.stdout + process.stderr + all_logs(tmp_path)
    assert process.returncode == 2, told
    assert "after inner step 69: data.sources.code ended: slot 0 of 1 was" in told
    assert "set data.sources.code.repeat = true" in told
