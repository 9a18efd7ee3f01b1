"""A run of islands of every shape with int4: trained, taken away by the command, started from."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.checkpoint.export import export_run
from diloco.checkpoint.warm_start import WarmStart, find_warm_start
from diloco.config.load import load_config
from tests.data.text_files import write_stdlib
from tests.run_files import (
    FFN_DIM_OF_LANES,
    FinishedRun,
    assert_all_ranks_carry_lanes,
    run_to_end,
    with_text,
    write_run,
)

pytestmark = pytest.mark.timeout(300)

ISLANDS = {"east": "", "north": "dp_shard = 2", "west": "tp = 2"}
MODEL: dict[str, Any] = {"tied": True, "ffn_dim": FFN_DIM_OF_LANES}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, FinishedRun]:
    directory = tmp_path_factory.mktemp("trained")
    run_file = write_run(directory, ISLANDS, **MODEL)
    with_text(run_file, write_stdlib(directory / "text.jsonl"))
    return run_file, run_to_end(run_file, ["checkpoint.every_inner_steps=4"])


@pytest.fixture(scope="module")
def exported(trained: tuple[Path, FinishedRun], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "model"
    command = [sys.executable, "-m", "diloco", "export", str(trained[0]), "--out", str(out)]

    result = subprocess.run(command, capture_output=True, text=True, check=False)

    assert result.returncode == 0, result.stderr
    assert "final parameters" in result.stdout
    return out


def assert_founded_from(run: FinishedRun, found: WarmStart) -> None:
    """Version 0 of every fragment holds what was found, to the bit."""
    for store, fragment in zip(run.stores, run.plan.fragments, strict=True):
        founded = torch.cat([lane.published for lane in store.load(0).lanes])
        for entry in fragment.entries:
            values = founded[entry.offset : entry.offset + entry.end - entry.start]
            assert torch.equal(values, found.read("model", entry.name).view(-1)), entry.name


def test_islands_of_every_shape_hold_the_same_bytes(trained: tuple[Path, FinishedRun]) -> None:
    run = trained[1]

    assert_all_ranks_carry_lanes(run, ("north", "west"))
    assert run.ending_digests() == {tuple(r.digest.hex() for r in run.last_records())}


def test_islands_of_every_shape_train_on_their_shares_of_a_file(
    trained: tuple[Path, FinishedRun],
) -> None:
    run = trained[1]
    losses = [run.losses(island) for island in ISLANDS]

    assert [len(each) for each in losses] == [8, 8, 8]
    assert len(set(map(tuple, losses))) == len(ISLANDS)
    evaluated = [e["nats_per_byte"] for i in ISLANDS for e in run.of_kind(i, "evaluated")]
    assert all(0 < loss < 6 for loss in evaluated)  # ln 256 = 5.5


def test_a_trained_run_is_exported_at_its_flush(
    trained: tuple[Path, FinishedRun], exported: Path
) -> None:
    records = trained[1].last_records()

    manifest = json.loads((exported / "diloco.json").read_text())

    assert manifest["is_final"]
    digests = [fragment["digest"] for fragment in manifest["fragments"]]
    assert digests == [record.digest.hex() for record in records]
    assert {tuple(digests)} == trained[1].ending_digests()


@pytest.mark.slow
def test_what_was_exported_is_version_0_of_a_run_that_starts_from_it(
    trained: tuple[Path, FinishedRun], exported: Path, tmp_path: Path
) -> None:
    run_file = write_run(tmp_path, {"alone": ""}, num_fragments=3, **MODEL)
    with_text(run_file, trained[0].with_name("text.jsonl"))
    found = find_warm_start(load_config(run_file, [f"run.warm_start={exported}"]))
    assert found is not None

    later = run_to_end(run_file, [f"run.warm_start={exported}"])

    assert_founded_from(later, found)
    # It goes on from what the first run had learned.
    assert later.losses("alone")[0] < trained[1].losses("east")[0]


@pytest.mark.slow
def test_a_run_goes_on_where_a_checkpoint_of_other_islands_was_made(
    trained: tuple[Path, FinishedRun], tmp_path: Path
) -> None:
    source = f"run.warm_start={trained[1].state.root / 'checkpoints'}/east/step-000000000004"
    run_file = write_run(tmp_path, {"alone": ""}, num_fragments=3, **MODEL)
    with_text(run_file, trained[0].with_name("text.jsonl"))
    found = find_warm_start(load_config(run_file, [source]))
    assert found is not None

    later = run_to_end(run_file, [source])

    assert_founded_from(later, found)
    steps = later.of_kind("alone", "inner_step")
    assert [event["inner_step"] for event in steps] == [5, 6, 7, 8]
    rates = {e["inner_step"]: e["learning_rate"] for e in trained[1].of_kind("east", "inner_step")}
    assert [event["learning_rate"] for event in steps] == [rates[step] for step in (5, 6, 7, 8)]


def test_a_checkpoint_is_exported_as_the_islands_had_merged_it(
    trained: tuple[Path, FinishedRun], tmp_path: Path
) -> None:
    export_run(trained[1].state, tmp_path / "out", at_step=4)

    checkpoints = trained[1].state.root / "checkpoints"
    run_file = write_run(tmp_path / "new", ISLANDS, **MODEL)
    of_export, *of_islands = (
        find_warm_start(load_config(run_file, [f"run.warm_start={source}"]))
        for source in (
            tmp_path / "out",
            *(checkpoints / island / "step-000000000004" for island in ISLANDS),
        )
    )
    assert of_export is not None
    for spec in trained[1].plan.tensors:
        exported = of_export.read("model", spec.name)
        for of_island in of_islands:
            assert of_island is not None
            assert torch.equal(of_island.read("model", spec.name), exported), spec.name
