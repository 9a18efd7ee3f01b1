"""Warm start: where a run's first parameters come from when not from its seed.

    model directory or hub name    safetensors and config.json: weights
    state_dir of a run             its newest published parameters: weights
    checkpoint of an island        published parameters, inner optimizer, learning-rate and data
                                   position: the run goes on at the checkpoint's inner step

Outer momentum and residuals are zero in every case. Parameters are found by their canonical names,
so the plan of the run that they come from does not matter. Nothing is ever unpickled.

Source: protocol.md section 9.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from diloco.config.model import ModelConfig
from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.inner.hugging_face import read_ours, read_shape, stored_tensors
from diloco.inner.model import LlamaShape
from diloco.inner.state import INNER_OPTIMIZER
from diloco.launch.checkpoints import Checkpoint, valid_steps
from diloco.launch.published import read_published
from diloco.launch.state_dir import StateDir

logger = logging.getLogger(__name__)

_STEP = re.compile(r"(?:step|cut)-(\d+)")
_INDEX = "model.safetensors.index.json"
_DTYPES = frozenset({"F32", "BF16", "F16"})
#: Old Llama checkpoints store these frequencies; they follow from rope_theta.
_IGNORED = ".rotary_emb.inv_freq"
_SHOWN_PROBLEMS = 8

_Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class WarmStart:
    """Where training begins.

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
    shape = LlamaShape.from_config(config.model)
    path = Path(named)
    if not path.exists():
        if not is_hub_model(named):
            raise ConfigError(
                f"run.warm_start = {named!r}: there is no such directory. Give an export (diloco "
                f"export), a Hugging Face model, a run's state_dir or one of its checkpoints, or a "
                f"hub name, OWNER/MODEL"
            )
        found = _from_model(_download(named), f"{named} of Hugging Face's hub", shape)
    elif (path / StateDir(path).resolved.name).is_file():
        found = _from_run(path, config, shape)
    elif (path / "config.json").is_file():
        found = _from_model(path, f"the model in {path}", shape)
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
    from huggingface_hub import snapshot_download  # slow, and seldom needed

    try:
        return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json"]))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"run.warm_start = {name!r} is no directory here, and Hugging Face's hub does not give "
            f"it: {error}"
        ) from error


def _from_model(directory: Path, source: str, shape: LlamaShape) -> WarmStart:
    path = directory / "config.json"
    _insist_on_shape(read_shape(_read_json(path), str(path)), shape, source)
    weights = _Weights(directory)
    stored = stored_tensors(shape)
    expected = {tensor.name: tensor.shape for part in stored.values() for tensor in part}
    found = {name: size for name, size in weights.shapes.items() if not name.endswith(_IGNORED)}
    if shape.tie_embeddings:
        _drop_tied_head(found, weights, source)
    _insist_on_tensors(found, expected, source)

    def read(section: str, name: str) -> Tensor:
        return read_ours(stored[name], weights.read)

    return WarmStart(source, 0, False, "", 0, None, read)


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


def _from_run(path: Path, config: Config, shape: LlamaShape) -> WarmStart:
    if path.resolve() == Path(config.coordinator.state_dir).resolve():
        raise ConfigError(
            f"run.warm_start = {str(path)!r} is the state_dir of this very run: name another one; "
            "to go on with the run: diloco coordinator RUN.toml --resume"
        )
    published = read_published(StateDir(path))
    versions = ", ".join(str(fragment.version) for fragment in published.fragments)
    source = f"run {published.config.run.name} in {path} (published versions {versions})"
    _insist_on_shape(published.shape, shape, source)
    return WarmStart(source, 0, False, "", 0, None, lambda section, name: published.read(name))


def _from_checkpoint(path: Path, island_id: str, shape: LlamaShape) -> WarmStart:
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
    found = LlamaShape.from_config(ModelConfig.model_validate(manifest["model"]))
    _insist_on_shape(found, shape, source)

    def read(section: str, name: str) -> Tensor:
        return checkpoint.read("anchor" if section == "model" else section, name)

    name, age = manifest[INNER_OPTIMIZER], manifest["optimizer_step"]
    return WarmStart(source, step, True, name, age, manifest["data"], read)


def _locate(path: Path, island_id: str) -> tuple[Path, str, int]:
    """Give (directory of all islands, island, step) for any of the three levels of checkpoints."""
    path = path.resolve()
    if match := _STEP.fullmatch(path.name):
        return path.parent.parent, path.parent.name, int(match[1])
    if _has_steps(path):
        directory, islands = path.parent, [path.name]
    else:
        directory, islands = path, sorted(p.name for p in path.glob("*/") if _has_steps(p))
    if not islands:
        raise ConfigError(
            f"run.warm_start = {str(path)!r} is none of these: a model (config.json and "
            "*.safetensors), the state_dir of a run, a directory of checkpoints; an export is a "
            "model: diloco export RUN --out DIR"
        )
    island = island_id if island_id in islands else islands[0]
    steps = valid_steps(directory, island)
    if not steps:
        raise ConfigError(
            f"no checkpoint of island {island} in {directory} is whole: choose another warm start"
        )
    return directory, island, steps[-1]


def _has_steps(path: Path) -> bool:
    return path.is_dir() and any(_STEP.fullmatch(child.name) for child in path.iterdir())


# -- fit -------------------------------------------------------------------------------------------


def _insist_on_shape(found: LlamaShape, shape: LlamaShape, source: str) -> None:
    """Refuse a model whose function is another one than that of [model]."""
    differences = [
        f"{field.name} = {getattr(found, field.name)!r} (here {getattr(shape, field.name)!r})"
        for field in fields(shape)
        if getattr(found, field.name) != getattr(shape, field.name)
    ]
    if differences:
        raise ConfigError(
            f"warm start from {source}: it is another model than [model]; set there what it has: "
            f"{', '.join(differences)}"
        )


def _insist_on_tensors(found: _Shapes, expected: _Shapes, source: str) -> None:
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
