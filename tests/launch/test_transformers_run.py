"""A run of a model of transformers: planned, begun from its weights, exported, and trained."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from diloco.checkpoint.export import export_run
from diloco.checkpoint.warm_start import find_warm_start
from diloco.config.load import load_config
from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.forecast.forecast import forecast
from diloco.launch.rank.inputs import open_inputs
from diloco.simulations.runs.run_model import run_plan
from diloco.trainer.models.families import parameter_shapes, shape_of
from tests.launch.stored_run import random_parameters, store_run
from tests.run_files import of_transformers, run_to_end, write_run

LLAMA: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
GPT2: dict[str, Any] = {
    "vocab_size": 256,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    **dict.fromkeys(("bos_token_id", "eos_token_id"), 0),
}
KINDS = {"llama": LLAMA, "gpt2": GPT2}


def model(kind: str, seed: int = 0, **changes: Any) -> Any:
    transformers = importlib.import_module("transformers")
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(kind, **KINDS[kind], **changes)
    return transformers.AutoModelForCausalLM.from_config(config)


def write(directory: Path, kind: str, meshes: dict[str, str] | None = None) -> Path:
    """Write a model with weights, and a run file of it; returns the file."""
    model(kind).save_pretrained(directory / "model")
    run_file = write_run(directory, meshes or {"east": "", "west": ""})
    return of_transformers(run_file, directory / "model")


def logits(directory: Path) -> Tensor:
    transformers = importlib.import_module("transformers")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(directory)
    found: Tensor = loaded(input_ids=torch.arange(32)[None] * 7 % 256).logits
    return found


def refusal(run_file: Path, source: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        find_warm_start(load_config(run_file, [f"run.warm_start={source}"]))
    return str(refused.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_counts_parameters_from_config_json_alone(tmp_path: Path, kind: str) -> None:
    run_file = write(tmp_path, kind)
    (tmp_path / "model" / "model.safetensors").unlink()

    planned = forecast(load_config(run_file, ["inner.optimizer.name=adamw"]))

    assert planned.parameters == model(kind).num_parameters()
    rank = planned.ranks["east"]
    assert rank.parameter_bytes == 4 * planned.parameters
    assert rank.optimizer_bytes == 8 * planned.parameters


@pytest.mark.parametrize(
    "ask", [forecast, lambda config: open_inputs(config, may_download=False)], ids=["plan", "start"]
)
def test_a_mesh_without_a_tp_plan_is_refused_before_any_process(
    tmp_path: Path, ask: Callable[[Config], Any]
) -> None:
    config = load_config(write(tmp_path, "gpt2", {"east": "tp = 2"}))

    with pytest.raises(ConfigError, match=r"mesh\.tp = 2: .*no tensor-parallel plan; set mesh\.tp"):
        ask(config)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_read_into_the_model_that_has_them(tmp_path: Path, kind: str) -> None:
    run_file = write(tmp_path, kind)
    config = load_config(run_file, [f"run.warm_start={tmp_path / 'model'}"])

    found = find_warm_start(config)

    assert found is not None
    held = model(kind).state_dict()
    for name in parameter_shapes(shape_of(config.model)):
        assert torch.equal(found.read("model", name), held[name]), name


def test_weights_without_the_prefix_of_the_base_model_are_read(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "gpt2"), [f"run.warm_start={tmp_path / 'model'}"])
    file = tmp_path / "model" / "model.safetensors"
    held = load_file(file)
    save_file({name.removeprefix("transformer."): value for name, value in held.items()}, file)

    found = find_warm_start(config)

    assert found is not None
    for name, value in held.items():
        assert torch.equal(found.read("model", name), value)


def test_a_tied_head_without_the_prefix_is_held_against_its_embedding(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "llama"), [f"run.warm_start={tmp_path / 'model'}"])
    file = tmp_path / "model" / "model.safetensors"
    held = {name.removeprefix("model."): value for name, value in load_file(file).items()}
    embedding = held["embed_tokens.weight"].clone()

    save_file({**held, "lm_head.weight": embedding}, file)
    found = find_warm_start(config)
    assert found is not None
    assert torch.equal(found.read("model", "model.embed_tokens.weight"), embedding)
    save_file({**held, "lm_head.weight": embedding + 1}, tmp_path / "model" / "other.safetensors")
    file.unlink()
    with pytest.raises(ConfigError, match=r"lm_head\.weight differs from embed_tokens\.weight"):
        find_warm_start(config)


def test_weights_of_another_model_are_refused_by_the_key_and_by_the_tensor(tmp_path: Path) -> None:
    run_file = write(tmp_path, "llama")
    model("llama", rms_norm_eps=1e-5).save_pretrained(tmp_path / "other")
    file = tmp_path / "model" / "model.safetensors"
    held = load_file(file)
    save_file({name: value for name, value in held.items() if name != "model.norm.weight"}, file)

    assert "rms_norm_eps = 1e-05 (here 1e-06)" in refusal(run_file, tmp_path / "other")
    told = refusal(run_file, tmp_path / "model")
    assert "model.norm.weight is missing, must be (32,)" in told


def test_weights_of_another_function_are_refused_where_a_default_or_an_old_key_says_it(
    tmp_path: Path,
) -> None:
    run_file, other = write(tmp_path, "llama"), tmp_path / "other"
    model("llama", rms_norm_eps=1e-5).save_pretrained(other)
    content = json.loads((tmp_path / "model" / "config.json").read_text())
    kept = {key: value for key, value in content.items() if key != "rms_norm_eps"}

    (tmp_path / "model" / "config.json").write_text(json.dumps(kept))
    assert "rms_norm_eps = 1e-05 (here 1e-06)" in refusal(run_file, other)
    kept.pop("rope_parameters")
    (other / "config.json").write_text(json.dumps({**kept, "rope_theta": 5e5}))
    assert '"rope_theta":500000.0' in refusal(run_file, other)


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_is_what_transformers_loads_and_a_run_begins_from(
    tmp_path: Path, kind: str
) -> None:
    run_file = write(tmp_path, kind)
    parameters = random_parameters(shape_of(load_config(run_file).model), 5)
    state, run = store_run(run_file, parameters), tmp_path / "exported"
    (tmp_path / "model" / "config.json").unlink()  # the state directory says all of the model

    made = export_run(state, run)

    expected = model(kind)
    expected.load_state_dict(parameters, strict=False)
    expected.tie_weights()
    assert torch.equal(logits(run), expected(torch.arange(32)[None] * 7 % 256).logits)
    assert made.num_parameters == expected.num_parameters()
    told = json.loads((run / "config.json").read_text())
    assert told["architectures"] == [type(expected).__name__]
    again = of_transformers(write_run(tmp_path / "next", {"east": ""}), run)
    found = find_warm_start(load_config(again, [f"run.warm_start={run}"]))
    assert found is not None
    assert all(torch.equal(found.read("model", n), value) for n, value in parameters.items())


def test_an_export_for_torchtitan_is_refused(tmp_path: Path) -> None:
    run_file = write(tmp_path, "llama")
    parameters = random_parameters(shape_of(load_config(run_file).model), 5)

    with pytest.raises(ConfigError, match="torchtitan has no names for this model"):
        export_run(store_run(run_file, parameters), tmp_path / "out", layout="dcp")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_islands_of_two_shapes_train_it_from_its_weights(tmp_path: Path) -> None:
    run_file = write(tmp_path, "llama", {"east": "dp_shard = 2", "west": "tp = 2"})

    run = run_to_end(run_file, [f"run.warm_start={tmp_path / 'model'}"])

    assert len(run.ending_digests()) == 1
    for island in ("east", "west"):
        assert run.losses(island)[-1] < run.losses(island)[0]
    made = export_run(run.state, tmp_path / "out")
    assert made.is_final
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"
    assert logits(tmp_path / "out").isfinite().all()
    assert not torch.equal(logits(tmp_path / "out"), logits(tmp_path / "model"))


def test_what_is_simulated_is_the_model_of_transformers(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "gpt2"))

    tensors = {entry.name for each in run_plan(config).fragments for entry in each.entries}

    assert tensors == set(parameter_shapes(shape_of(config.model)))
