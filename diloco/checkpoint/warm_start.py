"""Warm start: where a run's first parameters come from when not from its seed.

    model directory or hub name    safetensors and config.json: weights
    directory of PyTorch's DCP     a Llama that torchtitan or anybody has saved: weights
    state_dir of a run             its newest published parameters: weights
    checkpoint of an island        published parameters, inner optimizer, learning-rate and data
                                   position: the run goes on at the checkpoint's inner step

Outer momentum and residuals are zero in every case. Parameters are found by their canonical names,
so the plan of the run that they come from does not matter. No pickle makes anything but the records
of DCP's metadata (`diloco.checkpoint.dcp`).

Source: PROTOCOL.md, "Version 0".
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from diloco.checkpoint.checkpoints import Checkpoint, step_of, valid_steps
from diloco.checkpoint.published import read_published
from diloco.config.hugging_face import content_of, differences
from diloco.config.model import ModelConfig
from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.extras import require
from diloco.state_dir import StateDir
from diloco.trainer.models.families import Shape, build_model, parameter_shapes, shape_of
from diloco.trainer.models.hugging_face import StoredTensor, read_ours, read_shape, stored_tensors
from diloco.trainer.models.model import LlamaShape
from diloco.trainer.models.torchtitan import from_torchtitan, torchtitan_names
from diloco.trainer.models.transformers_model import (
    TransformersModel,
    TransformersShape,
    filled_content,
)
from diloco.trainer.state import INNER_OPTIMIZER

logger = logging.getLogger(__name__)

_DCP = ".metadata"
_INDEX = "model.safetensors.index.json"
_DTYPES = frozenset({"F32", "BF16", "F16"})
#: Old checkpoints store these frequencies; they follow from rope_theta.
_IGNORED = (".rotary_emb.inv_freq", "freqs_cis")
_SHOWN_PROBLEMS = 8
#: What else is saved with a model's weights, by torchtitan and others.
_NO_WEIGHTS = ("optimizer", "optim.", "lr_scheduler", "dataloader", "train_state", "rng", "outer.")
#: Names of the head, where it is stored though it repeats the embedding.
_HEADS = tuple(f"{prefix}{name}.weight" for prefix in ("", "model.")
               for name in ("head", "lm_head", "output"))  # fmt: skip

_Shapes = Mapping[str, tuple[int, ...]]
_Stored = Mapping[str, tuple[StoredTensor, ...]]


@dataclass(frozen=True, slots=True)
class WarmStart:
    """The parameters, optimizer and data position that training begins with.

    Attributes:
        source: What was found, in words.
        start_step: Inner step at which the run begins; 0 unless it is a checkpoint's.
        has_optimizer: Whether `read` knows the sections "exp_avg" and "exp_avg_sq" too.
        inner_optimizer: Name of the optimizer that they are of; empty without them.
        optimizer_step: Age of these moments, in optimizer steps; 0 without them.
        data_state: Data cursor of the checkpoint; None without one.
        read: (section, canonical name) -> full tensor, float32, CPU; section "model" always.
    """

    source: str
    start_step: int
    has_optimizer: bool
    inner_optimizer: str
    optimizer_step: int
    data_state: dict[str, Any] | None
    read: Callable[[str, str], Tensor]


def find_warm_start(config: Config) -> WarmStart | None:
    """Find what `run.warm_start` names, check that it fits [model], and open it.

    Returns:
        None when the run starts from its seed.

    Raises:
        ConfigError: If nothing of a known kind is there, it is not whole, it is of another model,
            or it begins where this run has ended.
    """
    named = config.run.warm_start
    if not named:
        return None
    shape = shape_of(config.model)
    path = Path(named)
    if not path.exists():
        if not is_hub_model(named):
            raise ConfigError(
                f"run.warm_start = {named!r}: there is no such directory. Give an export (diloco "
                f"export), a Hugging Face model, a directory of torch.distributed.checkpoint, a "
                f"run's state_dir or one of its checkpoints, or a hub name, OWNER/MODEL"
            )
        found = _from_model(_download(named), f"{named} of Hugging Face's hub", shape)
    elif (path / StateDir(path).resolved.name).is_file():
        found = _from_run(path, config, shape)
    elif (path / "config.json").is_file():
        found = _from_model(path, f"the model in {path}", shape)
    elif (path / _DCP).is_file():
        found = _from_dcp(path, shape)
    else:
        found = _from_checkpoint(path, config.island_id, shape)
    if config.run.inner_steps <= found.start_step:
        raise ConfigError(
            f"run.inner_steps = {config.run.inner_steps}, but the run would begin at inner step "
            f"{found.start_step} of {found.source}: set run.inner_steps above it"
        )
    logger.info("warm start from %s, start_step=%d", found.source, found.start_step)
    return found


def is_hub_model(named: str) -> bool:
    """Whether `run.warm_start` is asked for at the hub: OWNER/MODEL, no path that is here."""
    is_name = not named.startswith(("/", ".", "~")) and named.count("/") == 1
    return is_name and not Path(named).exists()


# -- models ----------------------------------------------------------------------------------------


def _download(name: str) -> Path:
    require(f"run.warm_start = {name!r}, a name of the hub,", "huggingface_hub")
    from huggingface_hub import snapshot_download  # slow, and seldom needed

    try:
        return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json"]))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"run.warm_start = {name!r} is no directory here, and Hugging Face's hub does not give "
            f"it: {error}"
        ) from error


def _from_model(directory: Path, source: str, shape: Shape) -> WarmStart:
    path = directory / "config.json"
    if not isinstance(shape, LlamaShape):
        return _from_same_model(directory, source, shape)
    _check_shape(read_shape(_read_json(path), str(path)), shape, source)
    weights = _Weights(directory)
    stored = stored_tensors(shape)
    expected = {tensor.name: tensor.shape for tensor in _parts(stored)}
    found = {name: size for name, size in weights.shapes.items() if not name.endswith(_IGNORED)}
    if shape.tie_embeddings:
        _drop_tied_head(found, weights, source)
    _check_tensors(found, expected, source)

    def read(section: str, name: str) -> Tensor:
        return read_ours(stored[name], weights.read)

    return WarmStart(source, 0, False, "", 0, None, read)


def _from_same_model(directory: Path, source: str, shape: TransformersShape) -> WarmStart:
    """Read a model of transformers into itself: names are the same, but for the base's prefix."""
    path = directory / "config.json"
    # Filled in by one transformers, so that a default which one of them leaves out counts, too.
    ours, theirs = content_of(dict(shape.hf_config)), _read_json(path)
    try:
        problems = differences(*map(filled_content, (ours, {"model_type": "", **theirs})))
    except ConfigError as error:
        raise ConfigError(f"warm start from {source}, {path}: {error}") from error
    if problems:
        raise ConfigError(
            f"warm start from {source}: it is another model than [model]; set there what it has, "
            f"by model.name or model.hf_config: {', '.join(problems)}"
        )
    weights, expected, model = _Weights(directory), parameter_shapes(shape), build_model(shape)
    assert isinstance(model, TransformersModel)
    buffers = {name.removeprefix("decoder.") for name, _ in model.named_buffers()}
    stored: dict[str, str] = {}  # name in transformers -> the one in the files
    for name in weights.shapes:
        prefixed = f"{model.decoder.base_model_prefix}.{name}"
        is_short = prefixed in expected or prefixed in model.tied_parameters
        known = prefixed if is_short else name
        if not name.endswith(_IGNORED) and known not in buffers:
            stored[known] = name
    names: dict[str, str] = {}  # our name -> the one in the files
    for known, name in stored.items():
        own = model.tied_parameters.get(known, known)
        if own == known or own not in stored:
            names[own] = name
        elif not torch.equal(weights.read(name), weights.read(stored[own])):
            raise ConfigError(
                f"{source}: {name} differs from {stored[own]}, and config.json says that they are "
                "one: correct its tie_word_embeddings, and take model.hf_config from it"
            )
    found = {own: weights.shapes[name] for own, name in names.items()}
    _check_tensors(found, expected, source)
    return WarmStart(source, 0, False, "", 0, None, lambda section, name: weights.read(names[name]))


def _drop_tied_head(found: dict[str, tuple[int, ...]], weights: _Weights, source: str) -> None:
    """Leave out a head that repeats the embedding, as some writers store it."""
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if head not in found or embedding not in found:
        return
    if not torch.equal(weights.read(head), weights.read(embedding)):
        raise ConfigError(
            f"{source}: tie_word_embeddings is true, but {head} differs from {embedding}: correct "
            "its config.json and set model.tie_embeddings = false"
        )
    del found[head]


def _from_dcp(directory: Path, shape: Shape) -> WarmStart:
    """Find the model under our names, Hugging Face's or torchtitan's, whatever else was saved."""
    if not isinstance(shape, LlamaShape):
        raise ConfigError(
            f"run.warm_start = {str(directory)!r} is a checkpoint of PyTorch, which is read for "
            'model.family = "llama" only: give a directory of safetensors (`save_pretrained`)'
        )
    from diloco.checkpoint.dcp import DcpDirectory  # slow, and seldom needed

    saved, source = DcpDirectory(directory), f"the checkpoint of PyTorch in {directory}"
    found = {
        name: size
        for name, size in saved.shapes.items()
        if not name.startswith(_NO_WEIGHTS) and not name.endswith(_IGNORED)
    }
    ours = parameter_shapes(shape)

    def as_it_is(names: Mapping[str, str]) -> _Stored:
        return {name: (StoredTensor(theirs, ours[name]),) for name, theirs in names.items()}

    namings: list[_Stored] = [as_it_is({name: name for name in ours}), stored_tensors(shape)]
    with contextlib.suppress(ConfigError):  # a model that torchtitan's Llama is not
        namings.append(as_it_is(torchtitan_names(shape)))
    choices = [
        {name: tuple(replace(t, name=prefix + t.name) for t in part) for name, part in each.items()}
        for each in namings
        for prefix in ("", "model.")
    ]
    stored = max(choices, key=lambda choice: sum(t.name in found for t in _parts(choice)))
    embedding = stored["embed.weight"][0].name
    is_titans = embedding.endswith("tok_embeddings.weight")
    if shape.tie_embeddings:
        for head in (name for name in _HEADS if name in found):
            if not torch.equal(saved.read(head), saved.read(embedding)):
                raise ConfigError(
                    f"{source}: model.tie_embeddings = true, but {head} differs from {embedding}: "
                    "set model.tie_embeddings = false"
                )
            del found[head]
    _check_tensors(found, {t.name: t.shape for t in _parts(stored)}, source)

    def read(section: str, name: str) -> Tensor:
        values = read_ours(stored[name], saved.read)
        return from_torchtitan(shape, name, values) if is_titans else values

    return WarmStart(source, 0, False, "", 0, None, read)


def _parts(stored: _Stored) -> Iterator[StoredTensor]:
    return itertools.chain.from_iterable(stored.values())


class _Weights:
    """The tensors of a directory of safetensors files, one or several."""

    def __init__(self, directory: Path) -> None:
        """Open every file that holds weights and learn the shapes."""
        self._files: dict[str, Any] = {}  # name -> safe_open, which is not typed
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in self._paths(directory):
            try:
                file: Any = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"cannot read {path}: {error}; copy it again") from error
            for name in file.keys():  # noqa: SIM118 - not a mapping
                view = file.get_slice(name)
                if (dtype := view.get_dtype()) not in _DTYPES:
                    raise ConfigError(
                        f"{name} in {path} is of type {dtype}: weights must be float32, bfloat16 "
                        "or float16; save the model in one of these"
                    )
                self._files[name] = file
                self.shapes[name] = tuple(view.get_shape())

    @staticmethod
    def _paths(directory: Path) -> Iterable[Path]:
        index = directory / _INDEX
        if index.is_file():
            files = set(_read_json(index).get("weight_map", {}).values())
            return [directory / name for name in sorted(files)]
        if paths := sorted(directory.glob("*.safetensors")):
            return paths
        raise ConfigError(
            f"{directory} holds no *.safetensors: other formats are not read, save the model with "
            "`save_pretrained` of a present transformers"
        )

    def read(self, name: str) -> Tensor:
        """Read one tensor as float32.

        Raises:
            ConfigError: If a value is not finite.
        """
        values: Tensor = self._files[name].get_tensor(name).to(torch.float32)
        if not values.isfinite().all():
            raise ConfigError(f"{name} holds values that are not finite: the model is broken")
        return values


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}; copy it again") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no JSON object: copy it again")
    return content


# -- runs and checkpoints --------------------------------------------------------------------------


def _from_run(path: Path, config: Config, shape: Shape) -> WarmStart:
    if path.resolve() == Path(config.coordinator.state_dir).resolve():
        raise ConfigError(
            f"run.warm_start = {str(path)!r} is the state_dir of this very run: name another one; "
            "to go on with the run: diloco coordinator RUN.toml --resume"
        )
    published = read_published(StateDir(path))
    versions = ", ".join(str(fragment.version) for fragment in published.fragments)
    source = f"run {published.config.run.name} in {path} (published versions {versions})"
    _check_shape(published.shape, shape, source)
    return WarmStart(source, 0, False, "", 0, None, lambda section, name: published.read(name))


def _from_checkpoint(path: Path, island_id: str, shape: Shape) -> WarmStart:
    directory, island, step = _locate(path, island_id)
    try:
        checkpoint = Checkpoint.open(directory, island, step)
    except ConfigError as error:
        raise ConfigError(f"{error}; choose another warm start") from error
    step = checkpoint.inner_step
    source = f"the checkpoint of island {island} at inner step {step} in {directory}"
    if island_id not in ("", island):
        logger.warning("no checkpoint of island %s there: warm start from %s", island_id, source)
    manifest = checkpoint.manifest
    found = shape_of(ModelConfig.model_validate(manifest["model"]))
    _check_shape(found, shape, source)

    def read(section: str, name: str) -> Tensor:
        return checkpoint.read("anchor" if section == "model" else section, name)

    name, age = manifest[INNER_OPTIMIZER], manifest["optimizer_step"]
    return WarmStart(source, step, True, name, age, manifest["data"], read)


def _locate(path: Path, island_id: str) -> tuple[Path, str, int]:
    """Give (directory of all islands, island, step) for any of the three levels of checkpoints."""
    path = path.resolve()
    if (step := step_of(path.name)) is not None:
        return path.parent.parent, path.parent.name, step
    if _has_steps(path):
        directory, islands = path.parent, [path.name]
    else:
        directory, islands = path, sorted(p.name for p in path.glob("*/") if _has_steps(p))
    if not islands:
        raise ConfigError(
            f"run.warm_start = {str(path)!r} is none of these: a model (config.json and "
            "*.safetensors), a directory of torch.distributed.checkpoint (.metadata), the "
            "state_dir of a run, a directory of checkpoints; an export is a model: diloco export "
            "RUN --out DIR"
        )
    island = island_id if island_id in islands else islands[0]
    steps = valid_steps(directory, island)
    if not steps:
        raise ConfigError(
            f"no checkpoint of island {island} in {directory} is whole: choose another warm start"
        )
    return directory, island, steps[-1]


def _has_steps(path: Path) -> bool:
    return path.is_dir() and any(step_of(child.name) is not None for child in path.iterdir())


# -- fit -------------------------------------------------------------------------------------------


def _check_shape(found: Shape, shape: Shape, source: str) -> None:
    """Refuse a model whose function is another one than that of [model]."""
    is_llama = [isinstance(each, LlamaShape) for each in (found, shape)]
    if is_llama[0] != is_llama[1]:
        there, here = ("llama" if each else "hf" for each in is_llama)
        raise ConfigError(
            f'warm start from {source}: it is of model.family = "{there}", this run of "{here}"; '
            "start from its export, which is a model: diloco export RUN --out DIR"
        )
    problems = [
        f"{field.name} = {getattr(found, field.name)!r} (here {getattr(shape, field.name)!r})"
        for field in fields(shape)
        if getattr(found, field.name) != getattr(shape, field.name)
    ]
    if problems:
        raise ConfigError(
            f"warm start from {source}: it is another model than [model]; set there what it has: "
            f"{', '.join(problems)}"
        )


def _check_tensors(found: _Shapes, expected: _Shapes, source: str) -> None:
    """Refuse missing, unexpected and differently shaped tensors, by name."""
    problems = [
        f"{name} is {found.get(name, 'missing')}, must be {expected.get(name, 'absent')}"
        for name in sorted(found.keys() | expected.keys())
        if found.get(name) != expected.get(name)
    ]
    if len(problems) > _SHOWN_PROBLEMS:
        problems[_SHOWN_PROBLEMS:] = [f"and {len(problems) - _SHOWN_PROBLEMS} more"]
    if problems:
        raise ConfigError(
            "\n  ".join([f"warm start from {source}: its tensors do not fit [model]:", *problems])
        )
