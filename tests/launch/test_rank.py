"""Ranks as processes: what they refuse before they join, and what a configured link costs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.data.corpus import TextCorpus
from tests.run_files import run_to_end, write_run

pytestmark = pytest.mark.timeout(120)

NOBODY = "127.0.0.1:9"
#: Of the profile thin-5M-60ms, each way.
RATE_BPS = 5e6
ROUND_TRIP_S = 0.06


def test_more_held_out_sequences_than_there_are_is_refused_before_joining(tmp_path: Path) -> None:
    arguments = ["island", str(write_run(tmp_path, {"east": ""})), "--island", "east"]
    arguments += ["--coordinator", NOBODY, "--output", str(tmp_path / "out")]
    arguments += ["--set", "evaluation.num_sequences=1000000000"]

    # Whoever tried to join would wait for the coordinator for 120 s.
    process = subprocess.run(
        [sys.executable, "-m", "diloco", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert process.returncode == 2, process.stderr
    available = (len(TextCorpus.from_stdlib().held_out) - 1) // 32
    assert (
        f"evaluation.num_sequences = 1000000000: the held-out text has {available} sequences of "
        f"32 tokens; use 1 to {available}"
    ) in (tmp_path / "out" / "east-0.log").read_text()


def test_a_configured_link_takes_its_time(tmp_path: Path) -> None:
    run_file = write_run(
        tmp_path,
        {"east": "", "west": ""},
        inner_steps=4,
        inner_steps_per_round=2,
        num_fragments=1,
        overlap_steps=0,
        codec="float32",
        ffn_dim=1024,
    )

    run = run_to_end(run_file, ["transport.link=thin-5M-60ms"])

    # One round after inner step 2 and the flush: up, then down, nothing meanwhile (tau = 0).
    payload_bytes = 2 * 4 * sum(lane.numel for lane in run.plan.fragments[0].lanes)
    bound_s = 2 * 8 * payload_bytes / RATE_BPS + 2 * ROUND_TRIP_S
    assert bound_s > 5.0
    for island in ("east", "west"):
        (ended,) = run.of_kind(island, "island_ended")
        assert ended["bytes_up"] >= payload_bytes
        assert ended["bytes_down"] >= payload_bytes
        assert ended["wall_s"] - ended["inner_s"] >= bound_s
