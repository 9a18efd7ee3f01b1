"""Ranks as processes: what they refuse before they join, and what a configured link costs them."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from diloco.config.load import load_config
from diloco.data.corpus import TextCorpus
from diloco.errors import DilocoError, IslandFailed, RunStopped
from diloco.launch.rank.connect import connect
from diloco.launch.rank.job import Job
from diloco.launch.rank.main import _Rank, find_beginning, run_rank
from diloco.protos.control_pb2 import RunStateReply
from diloco.transport.contracts import IncomingCall, Reply
from tests.distributed import run_ranks
from tests.guarded_server import serving
from tests.run_files import run_to_end, write_run
from tests.transport.pki import COORDINATOR, EAST, Pki
from tests.waiting import run_command

pytestmark = pytest.mark.timeout(120)

NOBODY = "127.0.0.1:9"
#: Of the profile thin-5M-60ms, each way.
RATE_BPS = 5e6
ROUND_TRIP_S = 0.06


def test_more_held_out_sequences_than_there_are_is_refused_before_joining(tmp_path: Path) -> None:
    arguments = ["island", str(write_run(tmp_path, {"east": ""})), "--island", "east"]
    arguments += ["--coordinator", NOBODY, "--output", str(tmp_path / "out")]
    arguments += ["--set", "evaluation.num_sequences=1000000000"]

    # Anyone who tried to join would wait for the coordinator for 120 s.
    process = run_command(
        [sys.executable, "-m", "diloco", *arguments],
        60,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )

    assert process.returncode == 2, process.stderr
    available = (len(TextCorpus.from_stdlib().held_out) - 1) // 32
    assert (
        f"evaluation.num_sequences = 1000000000: the held-out text has {available} sequences of "
        f"32 tokens; use 1 to {available}"
    ) in (tmp_path / "out" / "east-0.log").read_text()


def ask_where_the_run_began(island_rank: int, run_file: str) -> tuple[str, int, str]:
    overrides = ["run.warm_start=./export", "transport.unreachable=5s"]
    config = load_config(run_file, overrides, island="east")
    # Shorter than the leader's patience, as it is where transport.unreachable is 600 s.
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), dist.group.WORLD)
    with connect(config, NOBODY) as connection, pytest.raises(DilocoError) as failure:
        find_beginning(config, NOBODY, connection.io)
    return type(failure.value).__name__, failure.value.exit_code, str(failure.value)


def test_all_ranks_wait_for_a_coordinator_that_is_away_and_end_alike(tmp_path: Path) -> None:
    run_file = write_run(tmp_path, {"east": "dp_shard = 2"})

    leader, other = run_ranks(ask_where_the_run_began, 2, str(run_file), timeout_s=110)

    assert leader[:2] == ("CoordinatorUnavailable", 30)
    assert other[:2] == ("IslandFailed", 30)
    assert f"no coordinator answered at {NOBODY}" in other[2]


@pytest.mark.parametrize(
    ("told", "start_step"),
    [
        pytest.param(RunStateReply(start_step=7, has_published=True), 7, id="published"),
        pytest.param(RunStateReply(start_step=9, timeline=1), 9, id="resumed"),
    ],
)
def test_a_warm_start_under_certificates_is_told_where_the_run_began(
    tmp_path: Path, told: RunStateReply, start_step: int
) -> None:
    pki = Pki(tmp_path / "certs")
    pki.issue(EAST)
    overrides = ["run.warm_start=./gone", f"transport.certs={pki.directory}"]
    config = load_config(write_run(tmp_path, {"east": ""}), overrides, island="east")

    async def run_state(call: IncomingCall) -> Reply:
        assert call.caller == EAST
        return Reply(told.SerializeToString())

    with (
        serving({"control.standing": run_state}, pki.tls(COORDINATOR)) as address,
        connect(config, address) as connection,
    ):
        found = find_beginning(config, address, connection.io)

    assert found == (None, start_step)


@pytest.mark.parametrize(
    ("error", "level"), [(RunStopped("it is stopped"), "INFO"), (IslandFailed("it died"), "ERROR")]
)
def test_only_an_end_that_failed_is_logged_as_an_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: DilocoError,
    level: str,
) -> None:
    config = load_config(write_run(tmp_path, {"east": ""}), island="east")
    monkeypatch.setattr("diloco.launch.rank.main.log_to", Mock())  # the root logger is everybody's
    monkeypatch.setattr(_Rank, "run", Mock(side_effect=error))

    with caplog.at_level("INFO"):
        code = run_rank(config, Job(0, 1, ""), coordinator_address=NOBODY, output_dir=tmp_path)

    assert code == error.exit_code
    (told,) = [r for r in caplog.records if r.name == "diloco.launch.rank.main"]
    assert (told.levelname, told.getMessage()) == (
        level,
        f"island stops, exit_code={code}: {error}",
    )


def test_copies_in_memory_are_refused_where_another_launcher_started_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    setting = ["islands.east.memory_checkpoint_steps=5"]
    config = load_config(write_run(tmp_path, {"east": ""}), setting, island="east")
    monkeypatch.setattr("diloco.launch.rank.main.log_to", Mock())

    code = run_rank(config, Job(0, 1, ""), coordinator_address=NOBODY, output_dir=tmp_path)

    assert code == 2
    assert "islands.east.memory_checkpoint_steps = 5: copies in memory outlive the" in caplog.text
    assert "start the island with `diloco island` and without RANK" in caplog.text


@pytest.mark.slow
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
