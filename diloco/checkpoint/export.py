"""Export of a run's published parameters as a Hugging Face model, or in PyTorch's DCP.

    OUT/model.safetensors                    float32, Hugging Face's names; above a size cut into
    OUT/model-00001-of-00003.safetensors     several, with model.safetensors.index.json
    OUT/config.json                          LlamaConfig, say
    OUT/.metadata, OUT/__0_0.distcp, ...     instead of these with format "dcp": torchtitan's names
    OUT/diloco.json                          which versions these are, digests of the files
    OUT/tokenizer.json, ...                  if the run has a tokenizer and its files are here

A directory of that name is there whole or not at all: it is written under another name, fsynced,
and renamed.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import blake3
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from diloco.checkpoint.published import PublishedFragment, PublishedVectors, read_published
from diloco.config.classes import fingerprint
from diloco.config.hugging_face import content_of
from diloco.config.load import load_config
from diloco.durable import sync_directory, write_durably
from diloco.errors import ConfigError
from diloco.state_dir import StateDir
from diloco.trainer.models.families import build_model, parameter_shapes
from diloco.trainer.models.hugging_face import StoredTensor, config_json, stored_tensors
from diloco.trainer.models.model import LlamaShape
from diloco.trainer.models.torchtitan import to_torchtitan, torchtitan_names
from diloco.trainer.models.transformers_model import TransformersModel

#: How an export is laid out.
Layout: TypeAlias = Literal["hf", "dcp"]

#: A larger model is cut into files of at most this size (a tensor is never cut).
MAX_FILE_BYTES = 5 * 10**9
MANIFEST = "diloco.json"
_FORMAT = 1
_ITEM_BYTES = 4
#: Of a tokenizer's directory; only the first is always there.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


@dataclass(frozen=True, slots=True)
class Export:
    """An export: its place and its versions.

    `files` tells size and digest of each weight file; `absent_tokenizer` is the run's tokenizer if
    it is to be added by hand, else empty.
    """

    directory: Path
    run: str
    fragments: tuple[PublishedFragment, ...]
    is_final: bool
    num_parameters: int
    files: Mapping[str, Mapping[str, Any]]
    absent_tokenizer: str


def find_run(run: Path) -> StateDir:
    """Find a run by its run file or its state directory.

    Raises:
        ConfigError: If there is neither, or the run file is not valid.
    """
    if run.is_dir():
        return StateDir(run)
    if not run.exists():
        raise ConfigError(
            f"{run} does not exist: give a run file, or the coordinator.state_dir of a run"
        )
    return StateDir(Path(load_config(run).coordinator.state_dir))


def export_run(
    state: StateDir,
    out: Path,
    *,
    at_step: int | None = None,
    overwrite: bool = False,
    layout: Layout = "hf",
    max_file_bytes: int = MAX_FILE_BYTES,
    on_progress: Callable[[str, int, int], None] = lambda phase, done, total: None,
) -> Export:
    """Write the published parameters of a run to a directory.

    Args:
        state: The run's state directory; only read, so the run may be under way.
        out: Directory to make, with its parents.
        at_step: Inner step of a run checkpoint; None takes the newest published versions.
        overwrite: Whether an earlier export may be replaced; nothing else ever is.
        layout: "hf": safetensors and config.json; "dcp": what `torch.distributed.checkpoint` and
            torchtitan load.
        max_file_bytes: Size above which the model is cut into several files; with "hf" only.
        on_progress: Told (phase, values done, values to do); the phases are "reading", "writing".

    Raises:
        ConfigError: If there is nothing to export, `out` is in the way or cannot be written, or the
            layout has no word for the model.
    """
    _check_room(out, overwrite=overwrite)
    published = read_published(
        state, at_step=at_step, on_progress=lambda done, total: on_progress("reading", done, total)
    )
    temporary = out.with_name(out.name + ".tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)  # of an export that was killed
        temporary.mkdir(parents=True)
        if layout == "hf":
            files = _write_weights(published, temporary, max_file_bytes, on_progress)
            _write_json(temporary / "config.json", _model_config(published))
        else:
            files = _write_dcp(published, temporary, on_progress)
        export = Export(
            out,
            published.config.run.name,
            published.fragments,
            published.is_final,
            sum(spec.numel for spec in published.plan.tensors),
            files,
            _copy_tokenizer(published.config.data.tokenizer, temporary),
        )
        _write_json(temporary / MANIFEST, _manifest(export, published, at_step))
        _replace(temporary, out)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"cannot write the export to {out}: {error}; choose another --out"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return export


def _check_room(out: Path, *, overwrite: bool) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / MANIFEST).is_file():
        raise ConfigError(f"{out} is there and is not an export: choose another --out")
    if not overwrite:
        raise ConfigError(
            f"{out} holds an earlier export: choose another --out, or replace it with --force"
        )


def _write_weights(
    published: PublishedVectors,
    directory: Path,
    max_file_bytes: int,
    on_progress: Callable[[str, int, int], None],
) -> dict[str, dict[str, Any]]:
    """Write all tensors, and the index if there are several files; returns what each file is."""
    stored = _stored(published)
    groups = _groups(parameter_shapes(published.shape), max_file_bytes)
    total = sum(spec.numel for spec in published.plan.tensors)
    done = 0
    files = {}
    weight_map: dict[str, str] = {}
    for n, group in enumerate(groups, 1):
        file = f"model-{n:05d}-of-{len(groups):05d}.safetensors"
        path = directory / (file if len(groups) > 1 else "model.safetensors")
        tensors: dict[str, Tensor] = {}
        for name in group:
            values = published.read(name)
            tensors |= {tensor.name: tensor.from_ours(values) for tensor in stored[name]}
        save_file(tensors, path, metadata={"format": "pt"})
        path.chmod(directory.stat().st_mode & 0o666)  # safetensors lets nobody else read it
        _sync(path)
        done += sum(tensor.numel() for tensor in tensors.values())
        on_progress("writing", done, total)
        files[path.name] = _described(path)
        weight_map |= dict.fromkeys(tensors, path.name)
    if len(groups) > 1:
        index = {"metadata": {"total_size": _ITEM_BYTES * total}, "weight_map": weight_map}
        _write_json(directory / "model.safetensors.index.json", index)
    return files


def _stored(published: PublishedVectors) -> Mapping[str, tuple[StoredTensor, ...]]:
    shape = published.shape
    if isinstance(shape, LlamaShape):
        return stored_tensors(shape)
    return {name: (StoredTensor(name, size),) for name, size in parameter_shapes(shape).items()}


def _write_dcp(
    published: PublishedVectors, directory: Path, on_progress: Callable[[str, int, int], None]
) -> dict[str, dict[str, Any]]:
    """Write all tensors under torchtitan's names; returns what each file is."""
    from diloco.checkpoint.dcp import write_dcp  # slow, and seldom needed

    shape = published.shape
    if not isinstance(shape, LlamaShape):
        raise ConfigError(
            'model.family = "hf": torchtitan has no names for this model; export it as "hf"'
        )
    shapes = parameter_shapes(shape)
    names = {theirs: ours for ours, theirs in torchtitan_names(shape).items()}
    total, done = sum(map(math.prod, shapes.values())), 0

    def read(name: str) -> Tensor:
        nonlocal done
        values = to_torchtitan(shape, names[name], published.read(names[name]))
        done += values.numel()
        on_progress("writing", done, total)
        return values

    write_dcp(directory, {theirs: tuple(shapes[ours]) for theirs, ours in names.items()}, read)
    return {path.name: _described(path) for path in sorted(directory.iterdir())}


def _described(path: Path) -> dict[str, Any]:
    digest = blake3.blake3().update_mmap(path).hexdigest()
    return {"bytes": path.stat().st_size, "blake3": digest}


def _groups(shapes: Mapping[str, Sequence[int]], max_file_bytes: int) -> list[list[str]]:
    """Deal the tensors, in order, to files of at most that size; one tensor at least each."""
    groups: list[list[str]] = []
    size = max_file_bytes
    for name, shape in shapes.items():
        num_bytes = _ITEM_BYTES * math.prod(shape)
        if not groups or size + num_bytes > max_file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += num_bytes
    return groups


def _copy_tokenizer(tokenizer: str, directory: Path) -> str:
    """Copy the files of a tokenizer; returns its name if there are none on this machine."""
    if tokenizer == "bytes":
        return ""
    path = Path(tokenizer)
    parent = path.parent if path.is_file() else path
    files = {name: parent / name for name in _TOKENIZER_FILES}
    if path.is_file():
        files["tokenizer.json"] = path
    found = {name: file for name, file in files.items() if file.is_file()}
    for name, file in found.items():
        write_durably(directory / name, [file.read_bytes()])
    return "" if found else tokenizer


def _model_config(published: PublishedVectors) -> dict[str, Any]:
    shape, model = published.shape, published.config.model
    if isinstance(shape, LlamaShape):
        return config_json(shape, max_sequence_length=model.max_sequence_length)
    built = build_model(shape)
    assert isinstance(built, TransformersModel)
    kind = type(built.decoder).__name__  # which servers choose the code by
    return {**content_of(model.hf_config), "architectures": [kind], "dtype": "float32"}


def _manifest(export: Export, published: PublishedVectors, at_step: int | None) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "run": export.run,
        "checkpoint_step": at_step,
        "is_final": export.is_final,
        "num_parameters": export.num_parameters,
        "config_fingerprint": fingerprint(published.config),
        "plan_fingerprint": published.plan.fingerprint(),
        "fragments": [asdict(fragment) for fragment in export.fragments],
        "files": export.files,
    }


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_durably(path, [json.dumps(value, indent=2).encode() + b"\n"])


def _replace(temporary: Path, out: Path) -> None:
    """Put the finished directory in place; an earlier export is removed last."""
    earlier = out.with_name(out.name + ".earlier")
    shutil.rmtree(earlier, ignore_errors=True)
    if out.exists():
        os.replace(out, earlier)
    os.replace(temporary, out)
    sync_directory(out.parent)
    shutil.rmtree(earlier, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
