"""`model.family = "hf"`: what is taken from config.json, what is refused, what must agree."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from diloco.config.classes import fingerprint, identity_difference, identity_json
from diloco.config.hugging_face import check_version, installed_version
from diloco.config.load import load_config, resolved_toml
from diloco.config.schema import Config
from diloco.errors import ConfigError
from tests.run_files import of_transformers, write_run

CONTENT: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "intermediate_size": 96,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0",
}


def load(directory: Path, *overrides: str, **changes: Any) -> Config:
    """Load a run of a model whose config.json is `CONTENT` with changes; None leaves a key out."""
    model = directory / "model"
    model.mkdir(parents=True, exist_ok=True)
    content = {key: value for key, value in (CONTENT | changes).items() if value != "absent"}
    (model / "config.json").write_text(json.dumps(content))
    run_file = of_transformers(write_run(directory, {"east": "", "west": ""}), model)
    return load_config(run_file, overrides)


def refusal(directory: Path, *overrides: str, **changes: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        load(directory, *overrides, **changes)
    return str(refused.value)


def test_sizes_are_those_of_config_json(tmp_path: Path) -> None:
    model = load(tmp_path).model

    assert (model.dim, model.num_layers, model.num_heads, model.num_kv_heads) == (48, 2, 3, 1)
    assert (model.ffn_dim, model.head_dim, model.max_sequence_length) == (96, 8, 64)


def test_the_resolved_file_needs_no_config_json(tmp_path: Path) -> None:
    config = load(tmp_path)
    (tmp_path / "model" / "config.json").unlink()
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(resolved_toml(config))

    again = load_config(resolved)

    assert again == config
    assert json.loads(again.model.hf_config["rope_parameters"]) == CONTENT["rope_parameters"]
    assert again.model.hf_config["pad_token_id"] == "null"


def test_islands_with_other_models_differ_in_the_first_key_that_does(tmp_path: Path) -> None:
    here, there = load(tmp_path / "a"), load(tmp_path / "b", rms_norm_eps=1e-6)

    found = identity_difference(identity_json(here), identity_json(there))

    assert found == ['model.hf_config.rms_norm_eps: absent here, "1e-06" there']


def test_where_a_model_lies_and_who_wrote_it_is_a_sites_own(tmp_path: Path) -> None:
    here = load(tmp_path / "a")
    there = load(tmp_path / "b", torch_dtype="float32", transformers_version="5.23.0")

    assert fingerprint(here) == fingerprint(there)
    assert here.model.name != there.model.name


def test_another_version_of_transformers_may_be_another_model(tmp_path: Path) -> None:
    here, there = load(tmp_path / "a"), load(tmp_path / "b", "model.transformers=4.40.0")

    (found,) = identity_difference(identity_json(here), identity_json(there))

    assert found == f'model.transformers: "{installed_version()}" here, "4.40.0" there'
    check_version(here.model.transformers)
    with pytest.raises(ConfigError, match=r"= \"4\.40\.0\", and .*transformers==4\.40\.0"):
        check_version(there.model.transformers)


def test_a_key_of_config_json_may_be_another(tmp_path: Path) -> None:
    config = load(tmp_path, "model.hf_config.attention_dropout=0.0", attention_dropout=0.1)

    assert config.model.hf_config["attention_dropout"] == "0.0"


@pytest.mark.parametrize(
    ("overrides", "changes", "part"),
    [
        ((), {"attention_dropout": 0.1}, "set model.hf_config.attention_dropout = 0.0"),
        ((), {"num_local_experts": 8}, "hf_config.num_local_experts = 8: experts of transformers"),
        ((), {"quantization_config": {"bits": 4}}, "quantization_config is set"),
        ((), {"auto_map": {"AutoModel": "x.py"}}, "its own code, which is never run"),
        ((), {"is_encoder_decoder": True}, "only causal models"),
        ((), {"is_causal": False}, "see those after them; set model.hf_config.is_causal = true"),
        ((), {"use_bidirectional_attention": "all"}, "use_bidirectional_attention = false"),
        ((), {"hidden_size": "absent"}, "no number called hidden_size or n_embd or d_model"),
        ((), {"model_type": "absent"}, "hf_config lacks model_type"),
        (("model.dim=64",), {}, "dim = 64, but the model's config.json says 48: leave it out"),
        (("model.qk_norm=true",), {}, 'qk_norm = True has no meaning with family = "hf"'),
        (("model.name=nowhere",), {}, "model.name: 'nowhere': there is no such directory"),
        (("model.name=",), {}, "needs the model's directory, which holds config.json"),
        (("data.sequence_length=128",), {}, "at most model.max_sequence_length = 64"),
        (
            ("model.family=llama", "model.preset=tiny"),
            {},
            'name is of family = "hf", and this is "llama"',
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_by_its_key(
    tmp_path: Path, overrides: tuple[str, ...], changes: dict[str, Any], part: str
) -> None:
    assert part in refusal(tmp_path, *overrides, **changes)


@pytest.mark.parametrize(
    ("axis", "island"),
    [
        ("pp", "ranks=2 mesh={pp=2} micro_batches=2"),
        ("cp", "ranks=2 mesh={cp=2}"),
        ("ep", "ranks=2 mesh={dp_shard=2,ep=2}"),
    ],
)
def test_axes_that_it_has_not_are_refused_by_name(tmp_path: Path, axis: str, island: str) -> None:
    overrides = [f"islands.east.{text}" for text in island.split()]

    told = refusal(tmp_path, *overrides)

    assert f'islands.east.mesh.{axis}: 2: is not for model.family = "hf": set it to 1' in told


def test_without_transformers_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)

    assert "pip install 'diloco[hf]'" in refusal(tmp_path)
