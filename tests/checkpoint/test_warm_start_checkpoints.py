"""Warm start from an island's checkpoint: what it gives, whose it is, and which ones do not do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from diloco.checkpoint.checkpoint_writer import CheckpointWriter
from diloco.checkpoint.warm_start import find_warm_start
from diloco.config.load import load_config
from diloco.outer.fragments import TensorSpec, make_plan
from tests.launch.stored_run import random_parameters
from tests.launch.warm_run import WarmRun

DATA_STATE = {"inner_step": 4, "samples": 16}


@pytest.fixture
def run(tmp_path: Path) -> WarmRun:
    return WarmRun(tmp_path)


class Checkpoints:
    """Checkpoints of a run of another number of fragments than the new one."""

    def __init__(self, directory: Path, run: WarmRun) -> None:
        self.directory = directory
        self._specs = [TensorSpec(name, tuple(v.shape)) for name, v in run.parameters.items()]
        self._run = run

    def write(self, island: str, step: int) -> dict[str, dict[str, Tensor]]:
        """Write one and return its sections; each holds other values."""
        plan = make_plan(self._specs, num_fragments=3)
        names = ("model", "exp_avg", "exp_avg_sq", "anchor")
        sections = {
            section: random_parameters(self._run.shape, 100 * step + n)
            for n, section in enumerate(names)
        }
        anchor = sections["anchor"]
        lanes: dict[str, Tensor] = {}
        for fragment in plan.fragments:
            vector = torch.zeros(fragment.padded_numel)
            for entry in fragment.entries:
                numel = entry.end - entry.start
                vector[entry.offset : entry.offset + numel] = anchor[entry.name].view(-1)
            for lane in fragment.lanes:
                key = f"anchor/{fragment.fragment_id}/{lane.lane_id}"
                lanes[key] = vector[lane.start : lane.end].clone()
        CheckpointWriter(self.directory, island, plan, group=None).write(
            step,
            training={name: sections[name] for name in ("model", "exp_avg", "exp_avg_sq")},
            outer=lanes,
            about={
                "data": DATA_STATE,
                "inner_optimizer": "adamw",
                "optimizer_step": step - 1,
                "model": load_config(self._run.run_file).model.model_dump(),
            },
        )
        return sections


@pytest.fixture
def checkpoints(run: WarmRun, tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", run)


def test_a_checkpoint_gives_published_parameters_moments_and_position(
    run: WarmRun, checkpoints: Checkpoints
) -> None:
    written = checkpoints.write("east", 4)

    found = run.find(checkpoints.directory)

    run.assert_holds(found, written["anchor"])
    for section in ("exp_avg", "exp_avg_sq"):
        for name, value in written[section].items():
            assert torch.equal(found.read(section, name), value), (section, name)
    assert (found.start_step, found.has_optimizer, found.data_state) == (4, True, DATA_STATE)
    assert found.optimizer_step == 3


@pytest.mark.parametrize(
    ("below", "step"),
    [("", 6), ("east", 6), ("east/step-000000000004", 4)],
    ids=["all-islands", "island", "step"],
)
def test_a_checkpoint_is_named_at_any_level(
    run: WarmRun, checkpoints: Checkpoints, below: str, step: int
) -> None:
    written = {n: checkpoints.write("east", n) for n in (4, 6)}

    found = run.find(checkpoints.directory / below)

    assert found.start_step == step
    assert f"island east at inner step {step}" in found.source
    run.assert_holds(found, written[step]["anchor"])


@pytest.mark.parametrize(
    ("island", "taken"), [("east", "east"), ("west", "west"), ("north", "alone")]
)
def test_an_island_takes_its_own_checkpoint_or_else_says_whose(
    run: WarmRun,
    checkpoints: Checkpoints,
    caplog: pytest.LogCaptureFixture,
    island: str,
    taken: str,
) -> None:
    written = {name: checkpoints.write(name, 4) for name in ("alone", "west", "east")}
    caplog.set_level("WARNING")

    found = find_warm_start(
        run.config(checkpoints.directory).model_copy(update={"island_id": island})
    )

    assert found is not None
    run.assert_holds(found, written[taken]["anchor"])
    assert ("no checkpoint of island north" in caplog.text) is (island == "north")


def test_a_torn_newest_checkpoint_is_skipped_with_a_warning(
    run: WarmRun, checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (4, 6):
        checkpoints.write("east", step)
    path = checkpoints.directory / "east" / "step-000000000006"
    (torn,) = path.rglob("rank-00000-of-00001.safetensors")
    torn.write_bytes(torn.read_bytes()[:-1])

    assert run.find(checkpoints.directory).start_step == 4
    assert str(torn) in caplog.text


def test_islands_without_a_whole_checkpoint_are_refused(
    run: WarmRun, checkpoints: Checkpoints
) -> None:
    checkpoints.write("east", 4)
    (checkpoints.directory / "east" / "step-000000000004" / "manifest.json").unlink()

    assert "no checkpoint of island east" in run.refusal(checkpoints.directory)


@pytest.mark.parametrize("inner_steps", [3, 4])
def test_a_checkpoint_at_which_the_run_has_ended_is_refused_with_both_steps(
    run: WarmRun, checkpoints: Checkpoints, inner_steps: int
) -> None:
    checkpoints.write("east", 4)

    refusal = run.refusal(checkpoints.directory, f"run.inner_steps={inner_steps}")

    assert f"run.inner_steps = {inner_steps}" in refusal
    assert "inner step 4" in refusal


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.ffn_dim=64", "ffn_dim = 96 (here 64)"),
        ("model.rope_theta=5e5", "rope_theta = 10000.0 (here 500000.0)"),
    ],
    ids=["size", "same-tensors"],
)
def test_a_checkpoint_of_another_model_is_refused_key_by_key(
    run: WarmRun, checkpoints: Checkpoints, override: str, words: str
) -> None:
    checkpoints.write("east", 4)

    assert words in run.refusal(checkpoints.directory, override)
