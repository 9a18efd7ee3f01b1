"""Copies that are made while training goes on hold the step that they were asked at."""

from __future__ import annotations

import json
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from diloco.checkpoint.checkpoint_writer import CheckpointWriter
from diloco.checkpoint.checkpoints import MANIFEST, step_directory
from diloco.island.lanes.parameters import canonical_parameters, tensor_specs
from diloco.outer.fragments import make_plan
from diloco.trainer.parallel.mesh import make_mesh
from diloco.trainer.state import kept_tensors, optimizer_step, training_tensors
from tests.checkpoint.late_copies import late_copier
from tests.checkpoint.small_checkpoint import ISLAND, Trained
from tests.distributed import run_ranks
from tests.trainer.layouts import case_of
from tests.trainer.small_island import CPU

#: Two ranks each: parts and copies, copies of all, stages with tied ends, experts and parts.
LAYOUTS = ("tp-muon", "replicated-muon", "gpipe-tied", "ep-muon")


def manifest(directory: Path, step: int) -> dict[str, Any]:
    path = step_directory(directory, ISLAND, step) / MANIFEST
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def save_twice(island_rank: int, root: Path) -> None:
    """Write a checkpoint that is waited for, take one of the same step, and train on."""
    thread_group = dist.new_group(backend="gloo")
    for name in LAYOUTS:
        case = case_of(name)
        trainer: Any = case.make_trainer(make_mesh(CPU, case.mesh))
        specs = tensor_specs(canonical_parameters(trainer.model), group=dist.group.WORLD)
        plan = make_plan(specs, num_fragments=3)
        awaited, behind = (
            CheckpointWriter(root / name / kind, ISLAND, plan, group=dist.group.WORLD)
            for kind in ("awaited", "behind")
        )
        copier = late_copier(trainer.optimizer)
        trainer.inner_step(0)
        for step in (1, 2):  # the second time into the same memory
            age = {"optimizer_step": optimizer_step(trainer.optimizer)}
            training = training_tensors(trainer.model, trainer.optimizer)
            outer = {"meta": torch.tensor([step])}
            awaited.write(step, training=training, outer=outer, about=age)
            kept = kept_tensors(trainer.model, trainer.optimizer)
            part = behind.take(kept, outer, copier=copier, group=thread_group)
            trainer.inner_step(step)
            behind.save(step, part, about={}, cut=0)


def test_of_all_layouts_what_is_copied_while_training_goes_on_is_what_a_stop_would_write() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        run_ranks(save_twice, 2, root)
        for name in LAYOUTS:
            for step in (1, 2):
                assert manifest(root / name / "behind", step) == manifest(
                    root / name / "awaited", step
                ), name
            first, second = (manifest(root / name / "behind", step) for step in (1, 2))
            assert first["files"] != second["files"]
            assert (first["optimizer_step"], second["optimizer_step"]) == (1, 2)


class Launches:
    """A device's side stream: work is launched at once, and done when it is waited for."""

    def submit(self, work: Callable[[], object]) -> Callable[[], None]:
        work()
        return lambda: None


def test_what_nobody_else_holds_lives_until_it_is_copied() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3))])
    source, target = torch.ones(3), torch.zeros(3)
    held = weakref.ref(source)

    copied = late_copier(optimizer, Launches()).copy([(source, target)])
    del source

    assert held() is not None, "its memory would be another's before the device has read it"
    assert copied.wait("a copy") == 0 and held() is None


def test_a_file_is_the_same_in_whatever_pieces_it_was_copied_from_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Trained()
    trained.write(tmp_path / "whole", 1)
    monkeypatch.setattr("diloco.checkpoint.checkpoint_writer._PIECE_BYTES", 1001)
    trained.write(tmp_path / "in pieces", 1)

    assert manifest(tmp_path / "in pieces", 1) == manifest(tmp_path / "whole", 1)
