"""A run typed by hand, one command a site: a supervised island and one under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.run_files import write_run
from tests.waiting import said_by

pytestmark = pytest.mark.timeout(300)

TRAINED_S = 120.0


@contextmanager
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    try:
        yield started
    finally:
        for process in started:
            process.terminate()
            try:
                process.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


def start(
    started: list[subprocess.Popen[str]], *arguments: str, launcher: tuple[str, ...] = ()
) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, *launcher, "-m", "diloco", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    started.append(process)
    return process


def end(process: subprocess.Popen[str], within_s: float = TRAINED_S) -> tuple[int, str]:
    output, _ = said_by(process, within_s)
    return process.returncode, output


def events(directory: Path, island: str, island_rank: int) -> list[dict[str, Any]]:
    path = directory / f"events-{island}-{island_rank}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_two_sites_train_one_model_and_a_third_that_differs_is_refused(tmp_path: Path) -> None:
    run_file = str(write_run(tmp_path, {"east": "", "west": "dp_shard = 2"}))
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1")

    with processes() as started:
        policy = ("--set", "evaluation.every_inner_steps=4")
        coordinator = start(started, "coordinator", run_file, *policy)
        assert coordinator.stdout is not None
        assert "listens on" in coordinator.stdout.readline()
        island = ("island", run_file, "--island")
        refused = start(started, *island, "east", "--set", "outer.local_mix=0.5")
        refusal = end(refused)
        # Policy is the coordinator's: its 8 inner steps win over this site's 99.
        east = start(started, *island, "east", "--set", "run.inner_steps=99")
        west = start(started, *island, "west", launcher=(*torchrun, "--nproc-per-node", "2"))
        ends = {"east": end(east), "west": end(west), "coordinator": end(coordinator, 30)}

    assert refusal[0] == 10
    assert "outer.local_mix" in refusal[1]
    assert {name: code for name, (code, _) in ends.items()} == dict.fromkeys(ends, 0), ends
    output = tmp_path / "state" / "telemetry"
    told = {
        (island, rank): events(output, island, rank)
        for island, rank in (("east", 0), ("west", 0), ("west", 1))
    }
    ended = [e for lines in told.values() for e in lines if e["kind"] == "island_ended"]
    assert [e["inner_step"] for e in ended] == [8, 8, 8]
    assert len({tuple(e["digests"]) for e in ended}) == 1
    assert len([e for e in told["west", 0] if e["kind"] == "inner_step"]) == 8
    assert not [e for e in told["west", 1] if e["kind"] == "inner_step"]
    assert [
        (e["inner_step"], e["parameters"]) for e in told["west", 1] if e["kind"] == "evaluated"
    ] == [(4, "published"), (8, "local"), (8, "published")]
    evaluated = {
        who: {e["parameters"]: e["nats_per_byte"] for e in lines if e["kind"] == "evaluated"}
        for who, lines in told.items()
    }
    # The same bytes on the same text; one rank and FSDP add in another order: float32 rounding.
    assert evaluated["east", 0]["published"] == pytest.approx(
        evaluated["west", 0]["published"], abs=5e-6
    )
    assert evaluated["west", 0] == evaluated["west", 1]
    assert evaluated["east", 0]["local"] != evaluated["west", 0]["local"]
    manifest = json.loads((output / "manifest-west.json").read_text())
    assert (manifest["island_slot"], manifest["incarnation"]) == (1, 1)
