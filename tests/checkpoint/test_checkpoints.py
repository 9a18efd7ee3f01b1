"""Checkpoints of an island on disk: what is whole, what is torn, what stays."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.checkpoint import checkpoint_writer
from diloco.checkpoint.checkpoints import (
    MANIFEST,
    PLAN,
    Checkpoint,
    abandon_later,
    rank_file,
    remove_old,
    step_directory,
    valid_steps,
    verify,
)
from diloco.errors import ConfigError
from diloco.trainer.state import load_moments_, load_parameters_, training_tensors
from tests.checkpoint.small_checkpoint import ISLAND, Trained, make_optimizer

RANK_FILE = rank_file(0, 1)
PARTS = "parts-0001"
SEED = 5


def test_what_was_written_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    trained = Trained()
    num_bytes = trained.write(tmp_path, 120)

    checkpoint = Checkpoint.open(tmp_path, ISLAND, 120)

    path = tmp_path / ISLAND / "step-000000000120"
    assert sorted(file.name for file in path.iterdir()) == [MANIFEST, PARTS]
    assert sorted(file.name for file in (path / PARTS).iterdir()) == [PLAN, RANK_FILE]
    manifest = checkpoint.manifest
    assert manifest["inner_step"] == 120
    assert manifest["optimizer_step"] == 2
    assert manifest["data"] == {"step": 120}
    assert manifest["plan_fingerprint"] == trained.plan().fingerprint()
    assert sum(file["bytes"] for file in manifest["files"].values()) == num_bytes
    assert checkpoint.plan == trained.plan()
    for section, tensors in training_tensors(trained.model, trained.optimizer).items():
        for name, values in tensors.items():
            assert torch.equal(checkpoint.read(section, name), values), (section, name)
    outer = trained.outer(120)
    read = checkpoint.outer_state([*outer, "residual/0/0"])
    assert read.keys() == outer.keys()
    assert all(torch.equal(read[name], outer[name]) for name in outer)


def test_a_checkpoint_of_another_island_step_or_run_is_not_ones_own(tmp_path: Path) -> None:
    Trained().write(tmp_path, 120)
    own = Checkpoint.open(tmp_path, ISLAND, 120)
    run = str(own.manifest.get("run", "test"))
    own.check_owner(run, ISLAND)
    shutil.copytree(tmp_path / ISLAND, tmp_path / "west")
    shutil.copytree(step_directory(tmp_path, ISLAND, 120), step_directory(tmp_path, ISLAND, 140))

    for island, step in (("west", 120), (ISLAND, 140)):
        with pytest.raises(
            ConfigError, match=rf"is not the .* written as that of 120 of .*{ISLAND}"
        ):
            Checkpoint.open(tmp_path, island, step).check_owner(run, island)
    manifest = step_directory(tmp_path, ISLAND, 120) / MANIFEST
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "run": "other"}))
    with pytest.raises(ConfigError, match="in run 'other'"):
        Checkpoint.open(tmp_path, ISLAND, 120).check_owner("test", ISLAND)
    manifest.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="is damaged: maximum recursion"):
        Checkpoint.open(tmp_path, ISLAND, 120)


def test_anchors_are_read_as_parameters(tmp_path: Path) -> None:
    trained = Trained()
    trained.write(tmp_path, 1)
    checkpoint = Checkpoint.open(tmp_path, ISLAND, 1)

    for fragment in trained.plan().fragments:
        for entry in fragment.entries:
            expected = torch.arange(entry.offset, entry.offset + entry.end) + 0.5
            assert torch.equal(checkpoint.read("anchor", entry.name).flatten(), expected)


def test_training_goes_on_from_a_checkpoint_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    trained = Trained()
    trained.write(tmp_path, 2)
    other = Trained(seed=2, num_steps=0)
    other.optimizer = make_optimizer(other.model)
    checkpoint = Checkpoint.open(tmp_path, ISLAND, 2)

    load_parameters_(other.model, checkpoint.read)
    load_moments_(
        other.model, other.optimizer, checkpoint.read, step=checkpoint.manifest["optimizer_step"]
    )
    for _ in range(3):
        trained.step()
        other.step()

    pairs = zip(trained.model.parameters(), other.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


# -- damage --------------------------------------------------------------------------------------


def halve(path: Path) -> None:
    with (path / PARTS / RANK_FILE).open("r+b") as file:
        file.truncate((path / PARTS / RANK_FILE).stat().st_size // 2)


def flip(path: Path) -> None:
    with (path / PARTS / RANK_FILE).open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


#: Of a file that a manifest names.
SOME = {"bytes": 1, "blake3": ""}


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def as_link(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


def edit(path: Path, **changes: object) -> None:
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps(manifest | changes))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (halve, f"{RANK_FILE} has .* bytes, not"),
        (flip, f"{RANK_FILE} is damaged: its digest is not that of the manifest"),
        (
            lambda path: (path / PARTS / RANK_FILE).unlink(),
            f"{RANK_FILE} cannot be read: No such file",
        ),
        (lambda path: (path / PARTS / PLAN).write_text("{}"), f"{PLAN} has 2 bytes, not"),
        (lambda path: (path / MANIFEST).unlink(), f"has no {MANIFEST}: it was not completed"),
        (lambda path: (path / MANIFEST).write_text('{"for'), f"{MANIFEST} is damaged"),
        (lambda path: edit(path, files=3), f"{MANIFEST} is damaged"),
        (lambda path: edit(path, files={PLAN: 3}), f"{MANIFEST} is damaged"),
        (lambda path: edit(path, files={}), "does not name the plan and the files of all"),
        (lambda path: edit(path, files={PLAN: SOME}), "does not name the plan and the files of"),
        (lambda path: edit(path, files={PLAN: {**SOME, "bytes": 1e999}}), "is damaged: cannot con"),
        (lambda path: edit(path, files={"../x": SOME}), "names '../x', which is no plain name"),
        (lambda path: edit(path, files={"a\0": SOME}), r"names 'a.*x00', which is no plain"),
        (lambda path: edit(path, parts="../.."), "names '../..', which is no plain name"),
        (lambda path: as_pipe(path / MANIFEST), "is damaged: it is no regular file"),
        (lambda path: as_pipe(path / PARTS / RANK_FILE), "is damaged: it is no regular file"),
        (lambda path: edit(path, inner_step=None), "not all of its steps and versions are whole"),
        (lambda path: edit(path, versions=[1, "2"]), "not all of its steps and versions are who"),
        (lambda path: edit(path, versions=3), "is damaged: .* iterable"),
        (lambda path: as_link(path / MANIFEST, "/dev/zero"), "is damaged: it is no regular file"),
        (lambda path: edit(path, format=1), "is of another version of diloco"),
    ],
)
def test_a_torn_newest_checkpoint_is_skipped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None], told: str
) -> None:
    trained = Trained()
    for step in (5, 10):
        trained.write(tmp_path, step)
    damage(step_directory(tmp_path, ISLAND, 10))

    assert valid_steps(tmp_path, ISLAND) == [5]
    assert "checkpoint skipped, island=east step=10" in caplog.text
    with pytest.raises(ConfigError, match=rf"its checkpoint of inner step 10: .*{told}"):
        Checkpoint.open(tmp_path, ISLAND, 10)


@pytest.mark.parametrize("share", [(0, 2), (1, 2)], ids=["whose-share-it-is", "another"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda plan: plan.unlink(),
        lambda plan: plan.write_bytes(plan.read_bytes()[:-20]),
        lambda plan: plan.write_bytes(plan.read_bytes()[:-1] + b"\xff"),
    ],
    ids=["missing", "torn", "flipped"],
)
def test_a_damaged_plan_is_the_same_error_in_any_share(
    tmp_path: Path, damage: Callable[[Path], None], share: tuple[int, int]
) -> None:
    Trained().write(tmp_path, 5)
    damage(step_directory(tmp_path, ISLAND, 5) / PARTS / PLAN)

    with pytest.raises(ConfigError, match=rf"its checkpoint of inner step 5: .*{PLAN} "):
        Checkpoint.open(tmp_path, ISLAND, 5, share=share)


def test_a_manifest_that_cannot_be_read_now_costs_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Trained()
    trained.write(tmp_path, 5)
    really_open = Path.open

    def out_of_files(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == MANIFEST:
            raise OSError(24, "Too many open files")
        return really_open(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", out_of_files)
        with pytest.raises(OSError, match=r"rank 0: .*: Too many open files"):
            trained.write(tmp_path, 5)
        with pytest.raises(ConfigError, match=f"{MANIFEST} cannot be read: Too many open files"):
            Checkpoint.open(tmp_path, ISLAND, 5)

    assert valid_steps(tmp_path, ISLAND) == [5]


@pytest.mark.parametrize("text", ["", "{", "[1]", "{}"])
def test_what_a_damaged_manifest_names_makes_room_for_the_next_write(
    tmp_path: Path, text: str
) -> None:
    trained = Trained()
    trained.write(tmp_path, 5)
    (step_directory(tmp_path, ISLAND, 5) / MANIFEST).write_text(text)

    trained.write(tmp_path, 5)

    assert valid_steps(tmp_path, ISLAND) == [5]
    assert len(list(tmp_path.rglob("parts-*"))) == 1


def test_a_full_disk_leaves_the_older_checkpoints_and_the_next_write_mends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Trained()
    trained.write(tmp_path, 5)
    write = checkpoint_writer.write_durably

    def fill(path: Path, pieces: object, **options: object) -> None:
        if path.name == RANK_FILE:
            next(iter(pieces))  # type: ignore[call-overload]
            raise OSError(28, "No space left on device")
        write(path, pieces, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoint_writer, "write_durably", fill)
    with pytest.raises(OSError, match=rf"rank 0: .*{RANK_FILE}: No space left on device"):
        trained.write(tmp_path, 10)
    assert valid_steps(tmp_path, ISLAND) == [5]
    # Over one that is whole: that one stays, and the room that was taken is given back.
    with pytest.raises(OSError, match="No space left"):
        trained.write(tmp_path, 5)
    assert valid_steps(tmp_path, ISLAND) == [5]
    assert [path.name for path in tmp_path.rglob("parts-*")] == [PARTS]

    monkeypatch.undo()
    trained.write(tmp_path, 15)
    remove_old(tmp_path, ISLAND, newest=15, needed=(), num_unsure=1)
    assert os.listdir(tmp_path / ISLAND) == ["step-000000000015"]


class Killed(BaseException):
    """The process ends here."""


def killed_at(monkeypatch: pytest.MonkeyPatch, num_changes: int) -> None:
    """Let the process die before its n-th change of the disk; what is open is dropped."""
    done = []

    def dying(change: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            if len(done) == num_changes:
                raise Killed
            done.append(change)
            return change(*arguments, **options)

        return call

    for place, name in [(os, "replace"), (os, "fsync"), (Path, "mkdir"), (Path, "unlink")]:
        monkeypatch.setattr(place, name, dying(getattr(place, name)))
    monkeypatch.setattr(shutil, "rmtree", dying(shutil.rmtree))


@pytest.mark.parametrize("step", [5, 7], ids=["over-a-whole-one", "besides-it"])
def test_a_writer_killed_at_any_change_of_the_disk_leaves_the_old_checkpoint_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    old, new = Trained(seed=1), Trained(seed=2)

    def is_new(directory: Path, step: int) -> bool:
        read = Checkpoint.open(directory, ISLAND, step).read("model", "0.weight")
        (was_new,) = (trained is new for trained in (old, new) if trained.holds(read))
        return was_new

    seen: list[bool] = []  # after how many changes the new one is there
    is_finished = False
    while not is_finished:
        directory = tmp_path / str(len(seen))
        old.write(directory, 5)
        with monkeypatch.context() as patch:
            killed_at(patch, len(seen))
            try:
                new.write(directory, step)
                is_finished = True
            except Killed:
                pass

        steps = valid_steps(directory, ISLAND)
        assert steps[0] == 5, "the old one was lost"
        seen.append(steps[-1] == step and is_new(directory, step))

        new.write(directory, step)  # of the next start: goes on, and leaves nothing behind
        assert is_new(directory, step)
        assert len(list(directory.rglob("parts-*"))) == len(valid_steps(directory, ISLAND))
    assert seen == sorted(seen) and seen.index(True) > 8


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_writers_leave_whole_checkpoints_or_none(tmp_path: Path) -> None:
    draws = random.Random(SEED)
    for number, awaited in enumerate(["*/rank-*", "*/rank-*", MANIFEST, MANIFEST]):
        directory = tmp_path / str(number)
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.checkpoint.small_checkpoint", str(directory)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        began = time.monotonic()
        while not any((directory / ISLAND).glob(f"*/{awaited}")):
            assert time.monotonic() - began < 40
            time.sleep(0.01)
        time.sleep(draws.uniform(0.0, 0.1))
        process.kill()
        process.wait()

        steps = valid_steps(directory, ISLAND)
        assert steps or awaited != MANIFEST
        for step in steps:
            checkpoint = Checkpoint.open(directory, ISLAND, step)
            assert int(checkpoint.outer_state(["meta"])["meta"][-1]) == step


# -- retention -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_unsure", "needed", "kept"),
    [
        pytest.param(1, (), [40], id="nothing-complete-yet"),
        pytest.param(2, (10,), [10, 30, 40], id="newest-of-those-that-may-become-complete"),
        pytest.param(9, (), [10, 20, 30, 40], id="others-are-far-behind"),
        pytest.param(9, (20, 30), [20, 30, 40], id="older-than-complete-ones"),
        pytest.param(9, (40,), [40], id="newest-is-complete"),
    ],
)
def test_retention_keeps_what_is_complete_and_what_may_become_so(
    tmp_path: Path, num_unsure: int, needed: tuple[int, ...], kept: list[int]
) -> None:
    trained = Trained()
    for step in (10, 20, 30, 40, 50):
        trained.write(tmp_path, step)
    leftover = step_directory(tmp_path, ISLAND, 25)
    leftover.mkdir()

    left = remove_old(tmp_path, ISLAND, newest=40, needed=needed, num_unsure=num_unsure)

    assert left == kept
    assert valid_steps(tmp_path, ISLAND) == [*kept, 50], "50 is of another history"
    assert not leftover.exists()


def test_what_a_resume_abandons_is_moved_aside(tmp_path: Path) -> None:
    trained = Trained()
    for step in (10, 20, 30):
        trained.write(tmp_path, step)

    abandon_later(tmp_path, ISLAND, step=10, timeline=1)
    trained.write(tmp_path, 20)
    abandon_later(tmp_path, ISLAND, step=10, timeline=1)

    assert valid_steps(tmp_path, ISLAND) == [10]
    (aside,) = (tmp_path / ISLAND).glob("abandoned-*")
    assert aside.name == "abandoned-before-timeline-0001-after-000000000010"
    assert sorted(os.listdir(aside)) == ["step-000000000020", "step-000000000030"]

    trained.write(tmp_path, 15)
    abandon_later(tmp_path, ISLAND, step=10, timeline=2)

    (aside,) = (tmp_path / ISLAND).glob("abandoned-*")
    assert aside.name == "abandoned-before-timeline-0002-after-000000000010"
    assert os.listdir(aside) == ["step-000000000015"], "what the resume before abandoned is gone"


@pytest.mark.parametrize(("needed", "num_left"), [((), 1), ((10,), 1), ((10, 15), 0)])
def test_what_was_abandoned_goes_when_a_later_checkpoint_is_complete(
    tmp_path: Path, needed: tuple[int, ...], num_left: int
) -> None:
    trained = Trained()
    for step in (10, 20):
        trained.write(tmp_path, step)
    abandon_later(tmp_path, ISLAND, step=10, timeline=1)
    trained.write(tmp_path, 15)

    remove_old(tmp_path, ISLAND, newest=15, needed=needed, num_unsure=2)

    assert len(list((tmp_path / ISLAND).glob("abandoned-*"))) == num_left
    assert valid_steps(tmp_path, ISLAND) == [10, 15]


# -- who verifies --------------------------------------------------------------------------------


def test_ranks_that_share_the_verification_read_every_file_once(tmp_path: Path) -> None:
    path = step_directory(tmp_path, ISLAND, 5)
    Trained().write(tmp_path, 5)
    total = sum(file.stat().st_size for file in (path / PARTS).iterdir())
    read: list[tuple[int, int]] = []

    for rank in range(3):
        verify(path, share=(rank, 3), on_progress=lambda *seen: read.append(seen))

    assert sum(done for done, _ in read) == sum(of for _, of in read) == total
    flip(path)
    verify(path, share=(0, 2))  # the plan; the other rank finds it
    with pytest.raises(ConfigError, match="is damaged"):
        verify(path, share=(1, 2))


def test_a_timeline_keeps_its_own_checkpoints_when_it_is_resumed_once_more(tmp_path: Path) -> None:
    trained = Trained()
    for step in (10, 20, 30):
        trained.write(tmp_path, step)
    manifest = step_directory(tmp_path, ISLAND, 20) / MANIFEST
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "timeline": 1}))

    abandon_later(tmp_path, ISLAND, step=10, timeline=1)

    assert valid_steps(tmp_path, ISLAND) == [10, 20]
