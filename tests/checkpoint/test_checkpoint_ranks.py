"""Checkpoints of islands of two real ranks: read at another layout, and one rank's full disk."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from diloco.checkpoint import checkpoint_writer, island_checkpoints
from diloco.checkpoint.checkpoint_writer import CheckpointWriter
from diloco.checkpoint.checkpoints import PLAN, Checkpoint, rank_file, step_directory, valid_steps
from diloco.checkpoint.island_checkpoints import IslandCheckpoints
from diloco.errors import ConfigError
from diloco.island.lanes.parameters import canonical_parameters, tensor_specs
from diloco.outer.fragments import make_plan
from diloco.trainer.parallel.mesh import make_mesh
from diloco.trainer.state import (
    INNER_OPTIMIZER,
    load_moments_,
    load_parameters_,
    optimizer_step,
    training_tensors,
)
from tests.checkpoint.small_checkpoint import ISLAND, Trained, make_optimizer
from tests.distributed import run_ranks
from tests.trainer.layouts import MUON, case_of
from tests.trainer.small_island import CPU, one_rank


def sharded(seed: int, num_steps: int) -> Trained:
    trained = Trained(seed, num_steps=0)
    fully_shard(trained.model, mesh=init_device_mesh("cpu", (2,)))
    trained.optimizer = make_optimizer(trained.model)
    for _ in range(num_steps):
        trained.step()
    return trained


def write(trained: Trained, directory: Path, step: int, island_rank: int) -> None:
    writer = CheckpointWriter(directory, ISLAND, trained.plan(), group=dist.group.WORLD)
    writer.write(
        step,
        training=training_tensors(trained.model, trained.optimizer),
        outer={"meta": torch.tensor([step]), f"anchor/9/{island_rank}": torch.ones(3)},
        about={INNER_OPTIMIZER: "adamw", "optimizer_step": optimizer_step(trained.optimizer)},
    )


def whole(trained: Trained) -> dict[str, list[float]]:
    sections = training_tensors(trained.model, trained.optimizer)
    return {
        f"{section} {name}": values.full_tensor().flatten().tolist()
        for section, tensors in sections.items()
        for name, values in tensors.items()
        if isinstance(values, DTensor)
    }


def load(trained: Trained, directory: Path, step: int) -> Trained:
    checkpoint = Checkpoint.open(directory, ISLAND, step)
    load_parameters_(trained.model, checkpoint.read)
    age = checkpoint.manifest["optimizer_step"]
    load_moments_(trained.model, trained.optimizer, checkpoint.read, step=age)
    return trained


def write_at_two_ranks(island_rank: int, directory: Path) -> dict[str, Any]:
    trained = sharded(seed=1, num_steps=2)
    write(trained, directory, 2, island_rank)
    other = load(sharded(seed=2, num_steps=0), directory, 2)
    for each in (trained, other):
        each.step()
    seen: dict[str, Any] = {"equal": whole(other) == whole(trained)}

    # One rank's disk is full: both hear of it, at once, and train on.
    real = checkpoint_writer.write_durably

    def fill(path: Path, pieces: Any, **options: Any) -> None:
        if island_rank == 1:
            next(iter(pieces))
            raise OSError(28, "No space left on device")
        real(path, pieces, **options)

    with mock.patch.object(checkpoint_writer, "write_durably", fill):
        try:
            write(trained, directory, 3, island_rank)
        except OSError as error:
            seen["failure"] = str(error)
    seen["valid"] = valid_steps(directory, ISLAND)
    trained.step()
    write(trained, directory, 4, island_rank)
    seen["whole"] = whole(trained)
    return seen


def test_two_ranks_write_what_one_reads_and_share_a_full_disk() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        for seen in run_ranks(write_at_two_ranks, 2, directory):
            assert seen["equal"], "the same layout goes on bit for bit"
            assert "rank 1: " in seen["failure"]
            assert "rank-00001-of-00002.safetensors: No space left" in seen["failure"]
            assert seen["valid"] == [2]

        alone = load(Trained(seed=3, num_steps=0), directory, 4)
        checkpoint = Checkpoint.open(directory, ISLAND, 4)
        assert len(checkpoint.outer_state(["meta", "anchor/9/0", "anchor/9/1"])) == 3
        for section, tensors in training_tensors(alone.model, alone.optimizer).items():
            for name, values in tensors.items():
                assert values.flatten().tolist() == seen["whole"][f"{section} {name}"]


WRITTEN_BY, READ_BY = case_of("fsdp-tp"), case_of("hsdp-accumulated")  # of one model
#: Directory -> optimizer; matrices of Muon have one moment, and owners that follow the layout.
OPTIMIZERS: dict[str, dict[str, Any]] = {"adamw": {}, "muon": MUON}


def full_state(trainer: Any) -> dict[str, list[float]]:
    sections = training_tensors(trainer.model, trainer.optimizer)
    return {
        f"{section} {name}": (v.full_tensor() if isinstance(v, DTensor) else v).flatten().tolist()
        for section, tensors in sections.items()
        for name, v in tensors.items()
    }


def reshard_at_four_ranks(island_rank: int, root: Path) -> dict[str, tuple[Any, float, float]]:
    """Write at FSDP x TP, read at HSDP, and make the next step with both."""
    found = {}
    for name, optimizer in OPTIMIZERS.items():
        writer, reader = (replace(case, optimizer=optimizer) for case in (WRITTEN_BY, READ_BY))
        trainer = writer.make_trainer(make_mesh(CPU, writer.mesh))
        for step in range(2):
            trainer.inner_step(step)
        plan = make_plan(tensor_specs(canonical_parameters(trainer.model)), num_fragments=2)
        CheckpointWriter(root / name, ISLAND, plan, group=dist.group.WORLD).write(
            2,
            training=training_tensors(trainer.model, trainer.optimizer),
            outer={},
            about={"optimizer_step": optimizer_step(trainer.optimizer)},
        )
        written = full_state(trainer)
        other: Any = reader.make_trainer(make_mesh(CPU, reader.mesh))
        load(other, root / name, 2)
        assert full_state(other) == written
        found[name] = written, trainer.inner_step(2).read().loss, other.inner_step(2).read().loss
    return found


def test_what_fsdp_and_tp_wrote_hsdp_and_one_rank_read_to_the_bit_and_train_on() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        results = run_ranks(reshard_at_four_ranks, 4, root)
        for name, optimizer in OPTIMIZERS.items():
            alone: Any = replace(WRITTEN_BY.alone, optimizer=optimizer).make_trainer(one_rank())
            load(alone, root / name, 2)
            state = full_state(alone)
            expected = alone.inner_step(2).read().loss
            for found in results:
                written, loss, other_loss = found[name]
                assert written == state
                # Float32 sums in another order, as between layouts.
                assert abs(loss - expected) <= 5e-6
                assert abs(other_loss - expected) <= 5e-6


def checkpoints_of(trained: Trained, directory: Path, **outer: Any) -> IslandCheckpoints:
    outer_config = SimpleNamespace(is_on_arrival=False)
    config = SimpleNamespace(
        checkpoint_dir=directory,
        island_id=ISLAND,
        outer=outer_config,
        run=SimpleNamespace(name="tiny"),
    )
    site: Any = SimpleNamespace(config=config, report_checkpoints=lambda steps: None)
    joined: Any = SimpleNamespace(plan=trained.plan(), versions=[1], **outer)
    batches: Any = SimpleNamespace(seek=lambda step: None)
    trainer: Any = trained
    return IslandCheckpoints(
        site, joined, trainer, batches, memory=None, on_event=lambda event: None
    )


@contextlib.contextmanager
def noting_what_is_read() -> Iterator[list[Path]]:
    """Note the ranks' files that are opened."""
    read: list[Path] = []
    real = Path.open

    def note(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.suffix == ".safetensors":
            read.append(path)
        return real(path, *arguments, **options)

    with mock.patch.object(Path, "open", note):
        yield read


def open_at_two_ranks(island_rank: int, directory: Path) -> dict[str, Any]:
    """Open a whole checkpoint, then again when a file that only one rank reads is damaged."""
    trained = sharded(seed=1, num_steps=1)
    write(trained, directory, 2, island_rank)
    checkpoints = checkpoints_of(trained, directory)
    with noting_what_is_read() as read:
        checkpoints._open(2)
    seen: dict[str, Any] = {"read": [path.name for path in read]}
    dist.barrier()
    if island_rank == 0:
        (path,) = directory.rglob(rank_file(1, 2))
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    dist.barrier()
    try:
        checkpoints._open(2)
    except ConfigError as error:
        seen["problem"] = str(error)
    return seen


def test_each_file_is_verified_by_one_rank_and_both_hear_of_damage() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        first, second = run_ranks(open_at_two_ranks, 2, Path(temporary))

    assert sorted(first["read"] + second["read"]) == [rank_file(0, 2), rank_file(1, 2)]
    assert f"{rank_file(1, 2)} is damaged" in first["problem"]
    assert first["problem"] == second["problem"]


def take_up_at_two_ranks(island_rank: int, directory: Path) -> dict[str, Any]:
    """Resume from a checkpoint whose plan is torn, then return to the run besides it."""
    trained = sharded(seed=1, num_steps=1)
    write(trained, directory, 2, island_rank)
    trained.step()
    write(trained, directory, 4, island_rank)
    dist.barrier()
    if island_rank == 0:
        (path,) = step_directory(directory, ISLAND, 4).rglob(PLAN)
        path.write_bytes(path.read_bytes()[:-20])
    dist.barrier()
    seen: dict[str, Any] = {}
    with noting_what_is_read() as read:
        try:
            checkpoints_of(trained, directory, resume_step=4).take_up(None)
        except ConfigError as error:
            seen["refused"] = str(error)
    seen["read"] = {path.parent.parent.name for path in read}
    with mock.patch.object(island_checkpoints, "logger") as logger:
        checkpoints_of(trained, directory, resume_step=None, start_step=4).take_up(None)
    seen["warned"] = [str(call.args[-1]) for call in logger.warning.call_args_list]
    seen["optimizer_step"] = optimizer_step(trained.optimizer)
    return seen


def test_a_torn_plan_is_met_by_both_and_both_fall_back() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        first, second = run_ranks(take_up_at_two_ranks, 2, Path(temporary))

    told = "island east cannot load its checkpoint of inner step 4: "
    assert f"rank 0: {told}" in first["refused"] and f"rank 1: {told}" in first["refused"]
    assert first["refused"].endswith(
        f"Others of this island in {temporary}: [2]; to go on from one: diloco coordinator "
        f"RUN.toml --resume --at 2"
    )
    assert first["refused"] == second["refused"]
    for seen in (first, second):
        assert seen["read"] <= {"step-000000000004"}, "the others are listed, not read"
        assert seen["optimizer_step"] == 1, "of inner step 2"
        assert [told in text and "--resume" not in text for text in seen["warned"]] == [True]


def test_a_checkpoint_of_another_model_is_refused_by_its_first_tensor(tmp_path: Path) -> None:
    trained, other = Trained(num_steps=1), Trained(num_steps=0)
    trained.write(tmp_path, 2)
    other.model = torch.nn.Sequential(torch.nn.Linear(128, 200), torch.nn.Linear(200, 64))

    checkpoints = checkpoints_of(other, tmp_path, resume_step=2)
    with pytest.raises(ConfigError) as refusal:
        checkpoints.take_up(None)

    assert "of another model than run 'tiny': 0.bias: [200] here, [300] there; " in str(
        refusal.value
    )
