"""The config.json of a model of transformers, as a run file holds it: `model.hf_config`.

Every value is a text of JSON, since TOML has no null. Whole, it needs no file any more: a run's
`resolved.toml` says all of the model. Keys that do not change the function are left out, so that
sites whose transformers wrote them differently train together. What a config.json leaves out, and
the code that computes, are those of a version of transformers: `model.transformers`. Imports
neither torch nor transformers.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from diloco.errors import ConfigError
from diloco.extras import require

FAMILY = "hf"
#: A key of a config.json; what is none could not be written as a bare key of TOML.
_KEY = re.compile(r"[A-Za-z0-9_-]+")
#: They say where a model came from, how its values were stored, or what generation returns.
_NEUTRAL = frozenset(
    {
        "_attn_implementation", "_name_or_path", "architectures", "dtype", "id2label", "label2id",
        "output_attentions", "output_hidden_states", "problem_type", "return_dict", "torch_dtype",
        "transformers_version", "use_cache",
    }
)  # fmt: skip
#: ModelConfig's sizes -> the words of transformers for them, the first that is there.
_SIZES = {
    "vocab_size": ("vocab_size",),
    "dim": ("hidden_size", "n_embd", "d_model"),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "num_heads": ("num_attention_heads", "n_head"),
    "num_kv_heads": ("num_key_value_heads",),
    "ffn_dim": ("intermediate_size", "n_inner", "ffn_dim"),
    "head_dim": ("head_dim",),
    "max_sequence_length": ("max_position_embeddings", "n_positions"),
}
_OPTIONAL = ("head_dim", "max_sequence_length")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_NO_CODE = "its own code, which is never run: take a model that transformers has"


def with_config_json(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Lay `model.hf_config` over the config.json that `model.name` leads to.

    A table that has a model_type is whole, and nothing is read. Only config.json is downloaded for
    a hub name. `model.transformers` is the version here, unless the table says one.

    Args:
        raw: A run file's tables, not validated.

    Returns:
        The tables; of another family, or malformed, the same ones.

    Raises:
        ConfigError: If transformers is not installed, or the file cannot be had or read.
    """
    model = raw.get("model")
    if not isinstance(model, Mapping) or model.get("family") != FAMILY:
        return raw
    require('model.family = "hf"', "transformers")
    model = {"transformers": installed_version(), **model}
    name, given = model.get("name", ""), model.get("hf_config", {})
    if not isinstance(given, Mapping) or "model_type" in given or not isinstance(name, str):
        return {**raw, "model": model}
    if not name:
        raise ConfigError(
            'model.name: "": model.family = "hf" needs the model\'s directory, which holds '
            "config.json, or its hub name, OWNER/MODEL"
        )
    content = {key: _text(value) for key, value in _read(_find(name)).items()}
    kept = {key: value for key, value in content.items() if key not in _NEUTRAL}
    return {**raw, "model": {**model, "hf_config": {**kept, **given}}}


def installed_version() -> str:
    """Return the version of transformers that is installed, which is not imported for it."""
    return importlib.metadata.version("transformers")


def check_version(recorded: str) -> None:
    """Refuse to compute with another transformers than the one that a run was begun with.

    Args:
        recorded: `model.transformers`; empty: the model is not one of transformers.

    Raises:
        ConfigError: With both versions.
    """
    if recorded and recorded != (installed := installed_version()):
        raise ConfigError(
            f'model.transformers = "{recorded}", and {installed} is installed here: defaults and '
            f"code of another version may be another model; pip install transformers=={recorded}"
        )


def _find(name: str) -> Path:
    path = Path(name)
    if path.is_dir():
        return path / "config.json"
    if name.startswith(("/", ".", "~")) or name.count("/") != 1:
        raise ConfigError(
            f"model.name: {name!r}: there is no such directory: give one that holds config.json, "
            f"counted from {Path.cwd()}, or a hub name, OWNER/MODEL"
        )
    import huggingface_hub  # slow, and seldom needed

    try:
        return Path(huggingface_hub.hf_hub_download(name, "config.json"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.name: {name!r} is no directory here, and Hugging Face's hub does not give it: "
            f"{error}"
        ) from error


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.name: cannot read {path}: {error}; copy it again") from error
    if not isinstance(content, dict):
        raise ConfigError(f"model.name: {path} holds no JSON object: copy it again")
    return content


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def json_text(value: object) -> str:
    """Write a value of a run file as JSON; a string that is JSON already is brought to one form."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return _text(value)
    return _text(value)


def content_of(hf_config: Mapping[str, str]) -> dict[str, Any]:
    """Read the texts of `model.hf_config`: the content of a config.json."""
    return {key: json.loads(text) for key, text in hf_config.items()}


def differences(content: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Name what of `other` is another model than `content`.

    Keys that only one of them has are unknown to transformers. Ids of tokens and dropout are no
    part of what weights fit.

    Args:
        content: Of [model], with all that transformers fills in.
        other: Of the weights, filled in likewise.
    """
    return [
        f"{key} = {_text(other[key])} (here {_text(value)})"
        for key, value in sorted(content.items())
        if key in other and _text(other[key]) != _text(value)
        if key not in _NEUTRAL and not key.endswith("token_id") and "drop" not in key
    ]


def with_sizes(table: Mapping[str, Any]) -> dict[str, Any]:
    """Give a raw [model] table of this family the sizes that its config.json tells.

    Raises:
        ValueError: If it cannot be trained here, lacks a size, or says another one than the table.
    """
    given = table.get("hf_config", {})
    if not isinstance(given, Mapping):
        return dict(table)  # the field's own validation names it
    if odd := [key for key in given if not _KEY.fullmatch(str(key))]:
        raise ValueError(f"hf_config has the key {odd[0]!r}: config.json has no such keys")
    texts = {key: json_text(value) for key, value in sorted(given.items())}
    content = content_of(texts)
    if "model_type" not in content:
        raise ValueError("hf_config lacks model_type: give model.name, whose config.json says it")
    if problems := list(content_problems(content)):
        raise ValueError(problems[0])
    sizes = _sizes(content)
    for name, value in sizes.items():
        if table.get(name, value) != value:
            raise ValueError(
                f"{name} = {table[name]}, but the model's config.json says {value}: leave it out"
            )
    return {**table, **sizes, "hf_config": texts}


def _sizes(content: Mapping[str, Any]) -> dict[str, int]:
    found = {
        name: next((content[key] for key in keys if content.get(key) is not None), None)
        for name, keys in _SIZES.items()
    }
    if found["num_kv_heads"] is None:
        found["num_kv_heads"] = found["num_heads"]
    if found["ffn_dim"] is None and type(found["dim"]) is int:
        found["ffn_dim"] = 4 * found["dim"]
    for name, value in found.items():
        if type(value) is not int and not (value is None and name in _OPTIONAL):
            raise ValueError(
                f"the model's config.json has no number called {' or '.join(_SIZES[name])}: give "
                f"it as hf_config.{_SIZES[name][0]}"
            )
    return {name: value for name, value in found.items() if type(value) is int}


def content_problems(content: Mapping[str, Any]) -> Iterator[str]:
    """Name what of a config.json cannot be trained here, and what to do.

    Args:
        content: Parsed.
    """
    for key in _EXPERTS:
        if (content.get(key) or 0) > 1:
            yield (
                f"hf_config.{key} = {content[key]}: experts of transformers come later; take a "
                'dense model, or model.family = "llama" with model.experts'
            )
    if content.get("is_encoder_decoder"):
        yield "hf_config.is_encoder_decoder = true: only causal models are trained; take one"
    for key, value in (("is_causal", False), ("use_bidirectional_attention", True)):
        if content.get(key) in (value, "all"):
            yield (
                f"hf_config.{key} = {_text(content[key])}: tokens would see those after them; set "
                f"model.hf_config.{key} = {_text(not value)}"
            )
    if content.get("quantization_config") is not None:
        yield "hf_config.quantization_config is set: take the model before it was quantised"
    if content.get("auto_map") is not None:
        yield f"hf_config.auto_map is set: the model has {_NO_CODE}"
    for key, value in content.items():
        # Heads of classifiers, which no causal model has, have dropout of their own.
        is_share = "drop" in key and not key.startswith(("summary_", "classifier_"))
        if is_share and isinstance(value, int | float) and value > 0:
            yield (
                f"hf_config.{key} = {value}: dropout is not supported, the same values must come "
                f"out on any number of ranks; set model.hf_config.{key} = 0.0"
            )
