"""First parameters from elsewhere: every kind of source, to the bit, and every misfit by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from diloco.checkpoint.export import export_run
from diloco.checkpoint.warm_start import find_warm_start
from diloco.config.load import load_config
from diloco.errors import ConfigError
from diloco.trainer.models.hugging_face import config_json, stored_tensors
from diloco.trainer.models.model import Llama, LlamaShape
from diloco.trainer.state import load_parameters_
from tests.launch.stored_run import random_parameters, store_run, tiny_run
from tests.launch.warm_run import WarmRun


@pytest.fixture
def run(tmp_path: Path) -> WarmRun:
    return WarmRun(tmp_path)


def test_without_a_source_a_run_starts_from_its_seed(run: WarmRun) -> None:
    assert find_warm_start(run.config("")) is None


# -- models ----------------------------------------------------------------------------------------


def write_model(
    directory: Path,
    shape: LlamaShape,
    parameters: Mapping[str, Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    content: Mapping[str, Any] | None = None,
) -> Path:
    """Write a Llama as one file under Hugging Face's names."""
    directory.mkdir()
    names = {ours: t.name for ours, (t,) in stored_tensors(shape).items()}
    tensors = {names[name]: value.to(dtype) for name, value in parameters.items()}
    save_file(tensors, directory / "model.safetensors")
    described = config_json(shape, max_sequence_length=64) | dict(content or {})
    (directory / "config.json").write_text(json.dumps(described))
    return directory


def change(directory: Path, **tensors: Tensor | None) -> Path:
    """Replace, add or (None) remove tensors of a written model."""
    held = load_file(directory / "model.safetensors") | tensors
    kept = {name: value for name, value in held.items() if value is not None}
    save_file(kept, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("max_file_bytes", [10**9, 40_000], ids=["one-file", "several-files"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_an_export_is_read_back_to_the_bit(tmp_path: Path, tied: bool, max_file_bytes: int) -> None:
    run = WarmRun(tmp_path, tied=tied)
    state = store_run(tiny_run(tmp_path / "old", tied=tied), run.parameters)
    export_run(state, tmp_path / "out", max_file_bytes=max_file_bytes)

    found = run.find(tmp_path / "out")

    run.assert_holds(found)
    assert (found.start_step, found.has_optimizer, found.data_state) == (0, False, None)
    assert str(tmp_path / "out") in found.source


def test_what_is_read_goes_into_a_model(run: WarmRun, tmp_path: Path) -> None:
    found = run.find(write_model(tmp_path / "model", run.shape, run.parameters))
    model = Llama(run.shape)

    load_parameters_(model, found.read)

    assert all(torch.equal(p, run.parameters[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision_is_widened(run: WarmRun, tmp_path: Path, dtype: torch.dtype) -> None:
    model = write_model(tmp_path / "model", run.shape, run.parameters, dtype=dtype)

    found = run.find(model)

    widened = {name: value.to(dtype).float() for name, value in run.parameters.items()}
    run.assert_holds(found, widened)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8], ids=["float64", "int8"])
def test_other_types_are_refused_by_tensor(
    run: WarmRun, tmp_path: Path, dtype: torch.dtype
) -> None:
    model = write_model(tmp_path / "model", run.shape, run.parameters, dtype=dtype)

    assert "weights must be float32, bfloat16 or float16" in run.refusal(model)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (
            {"model.norm.weight": None, "lm_head.weight": None},
            ["lm_head.weight is missing, must be (256, 32)", "model.norm.weight is missing"],
        ),
        (
            {"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)},
            ["model.layers.0.self_attn.q_proj.bias is (32,), must be absent"],
        ),
        (
            {"model.layers.1.mlp.up_proj.weight": torch.zeros(96, 16)},
            ["model.layers.1.mlp.up_proj.weight is (96, 16), must be (96, 32)"],
        ),
        ({f"extra.{n}": torch.zeros(1) for n in range(20)}, ["extra.0 is", "and 12 more"]),
    ],
    ids=["missing", "unexpected", "shape", "many"],
)
def test_tensors_that_do_not_fit_are_named_with_both_shapes(
    run: WarmRun, tmp_path: Path, tensors: dict[str, Tensor | None], words: list[str]
) -> None:
    model = write_model(tmp_path / "model", run.shape, run.parameters)

    refusal = run.refusal(change(model, **tensors))

    assert all(word in refusal for word in [str(model), *words]), refusal


def test_frequencies_that_old_models_store_are_no_weights(run: WarmRun, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", run.shape, run.parameters)
    change(model, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})

    run.assert_holds(run.find(model))


def test_a_tied_head_may_be_stored_but_not_differ(tmp_path: Path) -> None:
    run = WarmRun(tmp_path, tied=True)
    model = write_model(tmp_path / "model", run.shape, run.parameters)
    embedding = run.parameters["embed.weight"]
    change(model, **{"lm_head.weight": embedding.clone()})

    run.assert_holds(run.find(model))

    change(model, **{"lm_head.weight": embedding + 1})
    assert "lm_head.weight differs from model.embed_tokens.weight" in run.refusal(model)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.ffn_dim=64"], ["ffn_dim = 96 (here 64)"]),
        (["model.rope_theta=1e5"], ["rope_theta = 10000.0 (here 100000.0)"]),
        (["model.norm_eps=1e-6"], ["norm_eps = 1e-05 (here 1e-06)"]),
        (["model.tie_embeddings=true"], ["tie_embeddings = False (here True)"]),
        (["model.num_layers=3", "model.vocab_size=512"], ["num_layers = 2", "vocab_size = 256"]),
    ],
    ids=["size", "rope", "norm", "tied", "several"],
)
def test_another_model_than_that_of_the_run_file_is_refused_key_by_key(
    run: WarmRun, tmp_path: Path, overrides: list[str], words: list[str]
) -> None:
    model = write_model(tmp_path / "model", run.shape, run.parameters)

    refusal = run.refusal(model, *overrides)

    assert all(word in refusal for word in ["than [model]", *words]), refusal


def no_weights(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


def torn_weights(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])


def absent_file(model: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def no_json(model: Path) -> None:
    (model / "config.json").write_text("{")


def no_object(model: Path) -> None:
    (model / "config.json").write_text("[]")


def with_bias(model: Path) -> None:
    content = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(content | {"attention_bias": True}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (no_weights, "no *.safetensors"),
        (torn_weights, "model.safetensors"),
        (absent_file, "model-00001-of-00002.safetensors"),
        (no_json, "config.json"),
        (no_object, "no JSON object"),
        (with_bias, "attention_bias"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_model_that_cannot_be_read_is_refused(
    run: WarmRun, tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    model = write_model(tmp_path / "model", run.shape, run.parameters)
    damage(model)

    refusal = run.refusal(model)

    assert str(model) in refusal
    assert words in refusal


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_values_that_are_not_finite_are_refused_by_tensor(
    run: WarmRun, tmp_path: Path, value: float
) -> None:
    broken = {name: tensor.clone() for name, tensor in run.parameters.items()}
    broken["norm.weight"][3] = value
    found = run.find(write_model(tmp_path / "model", run.shape, broken))

    with pytest.raises(ConfigError, match=r"model.norm.weight holds values that are not finite"):
        found.read("model", "norm.weight")


def test_a_name_that_is_no_path_is_asked_of_the_hub(
    run: WarmRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = write_model(tmp_path / "snapshot", run.shape, run.parameters)
    asked: list[tuple[str, list[str]]] = []

    def download(name: str, *, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)

    found = run.find("somebody/small-llama")

    # No pickles: nothing that is not needed is fetched.
    assert asked == [("somebody/small-llama", ["*.safetensors", "*.json"])]
    run.assert_holds(found)
    assert "somebody/small-llama" in found.source


def test_what_neither_this_machine_nor_the_hub_has_is_refused_with_both_reasons(
    run: WarmRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(name: str, **_: object) -> str:
        raise OSError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)

    refusal = run.refusal("runs/old")

    assert "run.warm_start = 'runs/old' is no directory here" in refusal
    assert "Name or service not known" in refusal


@pytest.mark.parametrize("path", ["/nowhere/model", "./model", "model", "a/b/c"])
def test_a_path_that_is_not_there_is_not_asked_of_the_hub(run: WarmRun, path: str) -> None:
    assert f"run.warm_start = {path!r}: there is no such directory" in run.refusal(path)


# -- runs ------------------------------------------------------------------------------------------


def test_newest_published_parameters_of_a_run_are_taken(run: WarmRun, tmp_path: Path) -> None:
    state = store_run(tiny_run(tmp_path / "old"), run.parameters, (3, 2))

    found = run.find(state.root, "outer.num_fragments=5")

    run.assert_holds(found)
    assert (found.start_step, found.has_optimizer, found.data_state) == (0, False, None)
    assert "versions 3, 2" in found.source


def test_a_run_is_no_warm_start_of_itself(run: WarmRun) -> None:
    state = store_run(run.run_file, run.parameters)

    assert run.refusal(state.root).endswith("diloco coordinator RUN.toml --resume")


def test_a_run_of_another_model_is_refused_key_by_key(run: WarmRun, tmp_path: Path) -> None:
    old = tiny_run(tmp_path / "old", ffn_dim=64)
    shape = LlamaShape.from_config(load_config(old).model)
    state = store_run(old, random_parameters(shape, 1))

    assert "ffn_dim = 64 (here 96)" in run.refusal(state.root)


def test_a_run_that_was_not_founded_is_refused(run: WarmRun, tmp_path: Path) -> None:
    state = store_run(tiny_run(tmp_path / "old"), run.parameters)
    state.plan.unlink()

    assert "no published parameters yet" in run.refusal(state.root)


def a_plain_directory(path: Path) -> None:
    path.mkdir()


def a_plain_file(path: Path) -> None:
    path.write_text("weights")


@pytest.mark.parametrize("prepare", [a_plain_directory, a_plain_file])
def test_what_is_no_source_is_told_what_sources_are(
    run: WarmRun, tmp_path: Path, prepare: Callable[[Path], None]
) -> None:
    prepare(tmp_path / "it")

    refusal = run.refusal(tmp_path / "it")

    assert "config.json" in refusal
    assert "state_dir" in refusal
    assert "diloco export RUN --out DIR" in refusal
