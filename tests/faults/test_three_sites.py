"""Three sites on an emulated network, payloads by bucket, each machine lost once with its disk.

Needs root, as `diloco emulate` does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.bench.network.emulating import network_toml
from diloco.checkpoint.published import read_published
from diloco.report.summary import event_lines
from diloco.state_dir import StateDir
from tests.three_sites import MACHINES, SITES

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_every_machine_is_lost_once_and_nothing_with_it(tmp_path: Path) -> None:
    network = tmp_path / "wan.toml"
    network.write_text(network_toml("200Mbit/s", 15.0, MACHINES))
    command = [sys.executable, "-m", "diloco", "emulate", str(network), "--"]

    ended = subprocess.run(
        [*command, sys.executable, "-m", "tests.three_sites", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )

    logs = sorted(tmp_path.glob("*.log"))
    said = "\n".join(f"== {log}\n{log.read_text()[-2000:]}" for log in logs)
    assert ended.returncode == 0, f"{ended.stdout}{ended.stderr[-3000:]}\n{said}"
    copy = StateDir(tmp_path / "copy")
    published = [each.digest for each in read_published(copy).fragments]
    for site in SITES:
        files = (tmp_path / "disks" / site / "telemetry").glob("**/events-*.jsonl")
        events = [event for path in files for event in event_lines(path)]
        (last,) = [event for event in events if event["kind"] == "island_ended"]
        assert last["digests"] == published
    replayed = [sys.executable, "-m", "diloco", "replay", str(copy.root)]
    subprocess.run(replayed, check=True)
