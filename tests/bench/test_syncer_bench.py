"""The bench of a syncer: a real one on one CPU, its rows, and what is judged."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import select
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.bench.syncer.control_plane import SyncerProcess, serving
from diloco.bench.syncer.merge_memory import MergeMemorySetting
from diloco.bench.syncer.publish import PublishSetting, _receive
from diloco.bench.syncer.syncer import SETTING, SyncerSetting, run
from diloco.errors import CoordinatorUnavailable, DilocoError
from diloco.state_dir import StateDir


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_rows_say_what_a_syncer_spends_and_holds() -> None:
    heard: list[tuple[str, int, int]] = []
    setting = SyncerSetting(
        numel=70_000,
        num_islands=(2,),
        small_spool_memory="1KiB",
        num_sending=1,
        num_rounds=2,
        flatness=1.0,
        memory=1e9,
    )

    report = run(lambda *told: heard.append(told), ["2*"], setting=setting)

    in_memory, encrypted, on_disk = report.rows
    assert (in_memory["spool_memory"], on_disk["spool_memory"]) == ("1GiB", "1KiB")
    assert [row["security"] for row in report.rows] == ["plain", "mTLS", "plain"]
    # Of the small spool's row nobody but the syncer bounds what is on its way.
    assert [row["at_once"] for row in report.rows] == [1, 1, 2]
    for row in report.rows:
        assert row["num_islands"] == 2
        assert row["tensors"] + row["loop"] + row["wire"] + row["tls"] == pytest.approx(1)
        assert (row["tls"] > 0) <= (row is encrypted)
        assert 0 < row["nanoseconds"] == pytest.approx(1e3 / row["millions_per_s"])
        assert row["others_ms"] > 0
        assert row["peak_mib"] > row["baseline_mib"] > 0
        state_mib = 12 * setting.numel / 2**20
        parts = ("baseline", "held", "in_flight", "extra")
        accounted = sum(row[f"{part}_mib"] for part in parts)
        assert accounted + state_mib == pytest.approx(row["peak_mib"])
    assert in_memory["held_mib"] == 2 * in_memory["in_flight_mib"]
    assert on_disk["held_mib"] == 1 / 1024
    assert on_disk["in_flight_mib"] == in_memory["held_mib"], "of both at once"
    assert heard == [("rounds", done, 9) for done in range(1, 10)]
    flatness, memory, over_tls = report.requirements
    assert flatness.is_met
    assert flatness.figure == 1
    assert memory.figure == max(row["extra_of_state"] for row in (in_memory, on_disk))
    assert over_tls.figure == encrypted["extra_of_state"]
    assert not any(requirement.is_stretch for requirement in report.requirements)
    assert json.dumps(report.as_dict())


def test_a_syncer_that_does_not_start_is_quoted(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    state.create()

    with (
        pytest.raises(CoordinatorUnavailable, match=r"(?s)with code [0-9]+.*resolved\.toml"),
        serving(state),
    ):
        pass


BUSY = """
import sys, subprocess
sys.stdin.readline()
work = "import time; until = time.process_time() + 0.5\\nwhile time.process_time() < until: pass"
subprocess.run([sys.executable, "-c", work], check=True)
print("done", flush=True)
sys.stdin.readline()
"""


def test_a_syncer_is_at_rest_once_it_and_its_children_spend_nothing() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin and process.stdout
        process.stdin.write("go\n")
        process.stdin.flush()
        syncer = SyncerProcess(process.pid)
        with pytest.raises(DilocoError, match=f"process {process.pid}.* had work to do for 0 s"):
            asyncio.run(syncer.settle(within_s=0.0))

        asyncio.run(syncer.settle())

        assert select.select([process.stdout], [], [], 0.0)[0], "its child has ended"
        process.kill()


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_rounds_are_timed_with_their_parts_and_the_first_row_is_judged() -> None:
    heard: list[tuple[str, int, int]] = []
    publish = PublishSetting(numel=70_000, num_rounds=1, bar=1e9)

    report = run(
        lambda *told: heard.append(told), ["publish"], setting=SyncerSetting(publish=publish)
    )

    alone, off, stored = report.rows
    assert alone["of_codecs"] == 1
    assert alone["commit_ms"] is None
    for row in (off, stored):
        parts = ("encode_ms", "arrive_ms", "merge_ms", "commit_ms", "announce_ms")
        assert sum(row[part] for part in parts) == pytest.approx(row["total_ms"])
        assert row["of_codecs"] == row["total_ms"] / alone["total_ms"]
    assert stored["commit_ms"] > off["commit_ms"], "the other's store is off the clock"
    (requirement,) = report.requirements
    assert requirement.is_met
    assert requirement.figure == off["of_codecs"]
    assert heard == [("rounds to publish", 0, 2), ("rounds to publish", 1, 2)]
    assert json.dumps(report.as_dict())
    assert not multiprocessing.active_children()


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_memory_of_merges_is_told_by_rule_and_judged() -> None:
    heard: list[tuple[str, int, int]] = []
    memory = MergeMemorySetting(numel=1 << 20, contributions=(2, 3), bar=1e9)

    report = run(
        lambda *told: heard.append(told), ["merge-*"], setting=SyncerSetting(merge_memory=memory)
    )

    assert [(row["rule"], row["contributions"]) for row in report.rows] == [
        (rule, num) for rule in ("mean", "clipped mean", "radial-directional") for num in (2, 3)
    ]
    for row in report.rows:
        assert row["merge_bytes"] > 12, "theta, published, momentum"
        assert 0 < row["repair_bytes"] < row["merge_bytes"] < row["replay_bytes"]
    assert [requirement.is_met for requirement in report.requirements] == [True] * 3
    assert set(heard) == {("merges", done, 6) for done in range(6)}
    assert json.dumps(report.as_dict())
    assert not multiprocessing.active_children()


def test_a_process_that_ended_is_named_as_the_reason() -> None:
    here, there = multiprocessing.Pipe()
    there.close()

    with pytest.raises(DilocoError, match="a process of the bench ended"):
        _receive(here)


def test_the_setting_is_what_was_asked_for() -> None:
    publish = SETTING.publish
    assert (publish.numel, publish.codec, publish.num_islands) == (25_000_000, "int4", 2)
    assert publish.bar == 1.5
    assert (SETTING.merge_memory.contributions, SETTING.merge_memory.bar) == ((2, 8, 32, 64), 1.2)
    assert (min(SETTING.num_islands), max(SETTING.num_islands)) == (4, 64)
    assert (SETTING.flatness, SETTING.memory) == (1.2, 1.25)
    assert [row.num_islands for row in SETTING.rows] == [4, 8, 16, 32, 64, 64, 64]
    assert [row.has_tls for row in SETTING.rows] == [False] * 5 + [True, False]
    assert SETTING.rows[-1].num_sending == 0
