"""An export is whole or not there: files, index, manifest, what it refuses to replace."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blake3
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from diloco.checkpoint import export
from diloco.checkpoint.export import export_run, find_run
from diloco.config.load import load_config, resolved_toml
from diloco.errors import ConfigError
from diloco.state_dir import StateDir
from diloco.trainer.models.hugging_face import read_shape, stored_tensors
from diloco.trainer.models.model import LlamaShape
from diloco.versions.pins import pin_directory
from tests.launch.stored_run import random_parameters, store_run, tiny_run


class Stored:
    """A run that can be exported."""

    def __init__(self, directory: Path, *, tied: bool = False) -> None:
        self.run_file = tiny_run(directory, tied=tied)
        self.shape = LlamaShape.from_config(load_config(self.run_file).model)
        parameters = random_parameters(self.shape, 1)
        self.state = store_run(self.run_file, parameters)
        names = {ours: t.name for ours, (t,) in stored_tensors(self.shape).items()}
        self.tensors = {names[name]: value for name, value in parameters.items()}


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    return Stored(tmp_path / "run")


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_small_model_is_one_file_under_llamas_names(tmp_path: Path, tied: bool) -> None:
    stored = Stored(tmp_path / "run", tied=tied)

    export_run(stored.state, tmp_path / "deep" / "out")

    out = tmp_path / "deep" / "out"
    assert_equal(load_file(out / "model.safetensors"), stored.tensors)
    assert ("lm_head.weight" in stored.tensors) is not tied
    assert read_shape(read(out / "config.json"), "") == stored.shape
    assert read(out / "config.json")["max_position_embeddings"] == 2048
    names = {"config.json", "diloco.json", "model.safetensors"}
    assert {path.name for path in out.iterdir()} == names
    # Readable like every other file here, not for its owner alone.
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1


def test_large_model_is_cut_between_tensors_with_an_index(stored: Stored, tmp_path: Path) -> None:
    out = tmp_path / "out"

    made = export_run(stored.state, out, max_file_bytes=40_000)

    files = {name: load_file(out / name) for name in made.files}
    assert sorted(files)[0] == f"model-00001-of-{len(files):05d}.safetensors"
    for tensors in files.values():
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 40_000
    assert_equal({k: v for tensors in files.values() for k, v in tensors.items()}, stored.tensors)
    index = read(out / "model.safetensors.index.json")
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    assert index["weight_map"] == weight_map
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in stored.tensors.values())


def test_manifest_tells_versions_and_digests(stored: Stored, tmp_path: Path) -> None:
    out = tmp_path / "out"

    made = export_run(stored.state, out)

    manifest = read(out / "diloco.json")
    assert manifest["run"] == made.run == "test"
    assert manifest["checkpoint_step"] is None
    assert manifest["is_final"] is made.is_final is False
    assert [f["version"] for f in manifest["fragments"]] == [3, 2]
    assert manifest["num_parameters"] == sum(t.numel() for t in stored.tensors.values())
    data = (out / "model.safetensors").read_bytes()
    expected = {"bytes": len(data), "blake3": blake3.blake3(data).hexdigest()}
    assert manifest["files"] == {"model.safetensors": expected}


def test_equal_parameters_are_equal_files(stored: Stored, tmp_path: Path) -> None:
    first = export_run(stored.state, tmp_path / "first", max_file_bytes=40_000)
    second = export_run(stored.state, tmp_path / "second", max_file_bytes=40_000)

    assert first.files == second.files


def test_checkpoint_is_exported_from_its_pins(stored: Stored, tmp_path: Path) -> None:
    pinned = random_parameters(stored.shape, 2)
    store_run(stored.run_file, pinned, (2, 1), store=pin_directory(stored.state.store, 20))

    export_run(stored.state, tmp_path / "out", at_step=20)

    names = {ours: t.name for ours, (t,) in stored_tensors(stored.shape).items()}
    expected = {names[name]: value for name, value in pinned.items()}
    assert_equal(load_file(tmp_path / "out" / "model.safetensors"), expected)
    assert read(tmp_path / "out" / "diloco.json")["checkpoint_step"] == 20


def test_progress_of_both_phases_ends_at_everything(stored: Stored, tmp_path: Path) -> None:
    told: dict[str, list[tuple[int, int]]] = {"reading": [], "writing": []}

    export_run(
        stored.state,
        tmp_path / "out",
        max_file_bytes=40_000,
        on_progress=lambda phase, done, total: told[phase].append((done, total)),
    )

    for steps in told.values():
        assert len(steps) > 1
        assert steps == sorted(steps)
        assert steps[-1][0] == steps[-1][1]


def earlier_export(stored: Stored, out: Path) -> None:
    export_run(stored.state, out, max_file_bytes=40_000)


def somebodys_files(stored: Stored, out: Path) -> None:
    out.mkdir()
    (out / "thesis.txt").write_text("all of it")


def a_file(stored: Stored, out: Path) -> None:
    out.write_text("all of it")


@pytest.mark.parametrize(
    ("prepare", "overwrite", "words"),
    [
        (earlier_export, False, "--force"),
        (somebodys_files, False, "is not an export"),
        (somebodys_files, True, "is not an export"),
        (a_file, True, "is not an export"),
    ],
    ids=["export", "files", "files-force", "file-force"],
)
def test_what_is_there_already_is_not_touched(
    stored: Stored,
    tmp_path: Path,
    prepare: Callable[[Stored, Path], None],
    overwrite: bool,
    words: str,
) -> None:
    out = tmp_path / "out"
    prepare(stored, out)
    before = {p: p.read_bytes() for p in [out, *out.rglob("*")] if p.is_file()}

    with pytest.raises(ConfigError, match=words):
        export_run(stored.state, out, overwrite=overwrite)

    assert {p: p.read_bytes() for p in [out, *out.rglob("*")] if p.is_file()} == before


def test_force_replaces_an_earlier_export_whole(stored: Stored, tmp_path: Path) -> None:
    out = tmp_path / "out"
    earlier_export(stored, out)

    export_run(stored.state, out, overwrite=True)

    assert {p.name for p in out.glob("*.safetensors*")} == {"model.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == {"run", "out"}


def test_an_empty_directory_is_used(stored: Stored, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()

    export_run(stored.state, tmp_path / "out")

    assert (tmp_path / "out" / "diloco.json").is_file()


def test_a_disk_that_is_full_leaves_the_earlier_export(
    stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    earlier_export(stored, out)
    before = {path: path.read_bytes() for path in out.iterdir()}
    room = [True, False]

    def save(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        if not room.pop(0):
            raise OSError(28, "No space left on device")
        save_file(tensors, path, metadata)

    monkeypatch.setattr(export, "save_file", save)

    with pytest.raises(ConfigError, match=r"No space left on device.*--out"):
        export_run(stored.state, out, overwrite=True, max_file_bytes=40_000)

    assert {path: path.read_bytes() for path in out.iterdir()} == before
    assert {path.name for path in tmp_path.iterdir()} == {"run", "out"}


def test_what_a_killed_export_left_is_no_part_of_the_next(stored: Stored, tmp_path: Path) -> None:
    leftover = tmp_path / "out.tmp"
    leftover.mkdir()
    (leftover / "model-00001-of-00009.safetensors").write_bytes(b"torn")

    export_run(stored.state, tmp_path / "out")

    assert {p.name for p in (tmp_path / "out").glob("*.safetensors")} == {"model.safetensors"}
    assert not leftover.exists()


def test_run_is_found_by_its_file_and_by_its_directory(stored: Stored) -> None:
    assert find_run(stored.run_file) == find_run(stored.state.root) == StateDir(stored.state.root)


def test_a_run_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.toml does not exist"):
        find_run(tmp_path / "run.toml")


def with_tokenizer(stored: Stored, tokenizer: str) -> None:
    """Let the stored run have been trained on files with this tokenizer."""
    text = stored.run_file.read_text().replace("[data]", f'[data]\ntokenizer = "{tokenizer}"')
    stored.run_file.write_text(text + '\n[data.sources.books]\nfiles = "books.txt"\n')
    stored.state.resolved.write_text(resolved_toml(load_config(stored.run_file)))


@pytest.mark.parametrize("by_file", [True, False], ids=["file", "directory"])
def test_a_tokenizer_that_is_here_goes_along(stored: Stored, tmp_path: Path, by_file: bool) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    file = tokenizer / ("mine.json" if by_file else "tokenizer.json")
    file.write_text('{"model": {}}')
    (tokenizer / "tokenizer_config.json").write_text("{}")
    (tokenizer / "model.safetensors").write_text("not a tokenizer's")
    with_tokenizer(stored, str(file if by_file else tokenizer))

    made = export_run(stored.state, tmp_path / "out")

    assert made.absent_tokenizer == ""
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"model": {}}'
    assert (tmp_path / "out" / "tokenizer_config.json").is_file()
    assert len(load_file(tmp_path / "out" / "model.safetensors")) == len(stored.tensors)


def test_a_tokenizer_that_is_elsewhere_is_named(stored: Stored, tmp_path: Path) -> None:
    with_tokenizer(stored, "somebody/tokenizer")

    assert export_run(stored.state, tmp_path / "out").absent_tokenizer == "somebody/tokenizer"
