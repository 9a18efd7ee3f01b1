"""Models of transformers in the trainer: loss, names, initial values, and plans that do not fit."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco.config.inner import InnerOptimizerConfig
from diloco.config.mesh import MeshConfig
from diloco.config.model import ModelConfig
from diloco.errors import ConfigError
from diloco.island.lanes.parameters import canonical_parameters, tensor_specs
from diloco.outer.fragments import TensorSpec, make_plan
from diloco.trainer.flops import flops_per_token
from diloco.trainer.models.cross_entropy import token_losses
from diloco.trainer.models.families import (
    build_model,
    check_mesh,
    check_optimizer_names,
    initialise_,
    shape_of,
)
from diloco.trainer.models.model import LlamaShape
from diloco.trainer.models.transformers_model import TransformersModel, TransformersShape
from tests.trainer.layouts import HF_GPT2, HF_LLAMA, HF_QWEN3, HF_TIED

MODELS = {"llama": HF_LLAMA, "tied": HF_TIED, "qwen3": HF_QWEN3, "gpt2": HF_GPT2}


def shape(model: dict[str, Any], **changes: Any) -> TransformersShape:
    table = {**model, "hf_config": {**model["hf_config"], **changes}}
    found = shape_of(ModelConfig.model_validate(table))
    assert isinstance(found, TransformersShape)
    return found


def built(model: dict[str, Any], seed: int = 3) -> TransformersModel:
    made = build_model(shape(model))
    assert isinstance(made, TransformersModel)
    made.to_empty(device="cpu").tie_()
    initialise_(made, seed)
    return made


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (3, 17), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_is_that_of_transformers(name: str) -> None:
    model, batch_BS1 = built(MODELS[name]), tokens()

    logits_BSV = model(batch_BS1[:, :-1], torch.arange(16))
    losses_N, _ = token_losses(
        logits_BSV.flatten(0, 1), batch_BS1[:, 1:].flatten(), group=None, z_loss=0.0
    )

    # Two of float32's steps near 5.5 are 1e-6.
    theirs = model.decoder(input_ids=batch_BS1, labels=batch_BS1).loss
    assert losses_N.mean().item() == pytest.approx(theirs.item(), abs=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_buffers_and_function_are_those_of_a_model_made_by_transformers(name: str) -> None:
    ours = built(MODELS[name])
    transformers = importlib.import_module("transformers")
    theirs = transformers.AutoModelForCausalLM.from_config(ours.decoder.config).float()
    theirs.load_state_dict(ours.decoder.state_dict())

    assert dict(ours.decoder.named_buffers()).keys() == dict(theirs.named_buffers()).keys()
    for buffer, expected in zip(ours.decoder.buffers(), theirs.buffers(), strict=True):
        assert torch.equal(buffer, expected)
    positions = torch.arange(17)
    assert torch.equal(ours(tokens(), positions), theirs(input_ids=tokens()).logits)


def test_initial_values_follow_the_models_own_rule_and_the_seed() -> None:
    first, again, other = built(HF_GPT2), built(HF_GPT2), built(HF_GPT2, seed=4)
    named, same, changed = map(canonical_parameters, (first, again, other))

    assert all(torch.equal(named[name], same[name]) for name in named)
    of_block = {n.removeprefix("transformer.h.0."): p for n, p in named.items() if ".h.0." in n}
    for name, expected in (("mlp.c_fc", 0.02), ("mlp.c_proj", 0.02 / math.sqrt(2 * 4))):
        # 13,440 values: their deviation is within 2.5 % of its own, four times its standard error.
        assert of_block[f"{name}.weight"].std().item() == pytest.approx(expected, rel=0.025)
        assert not torch.equal(
            of_block[f"{name}.weight"], changed[f"transformer.h.0.{name}.weight"]
        )
    assert of_block["ln_1.weight"].eq(1).all()
    assert of_block["ln_1.bias"].eq(0).all()


def test_a_tied_head_is_called_by_its_embedding_and_counted_once() -> None:
    tied, untied = (built(model) for model in (HF_TIED, HF_LLAMA))
    names = canonical_parameters(tied)

    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert not any("inv_freq" in name for name in names)
    assert len(canonical_parameters(untied)) == len(names) + 1


@pytest.mark.parametrize(
    ("model", "layers", "top"),
    [(HF_TIED, "model.layers", "model.embed_tokens"), (HF_GPT2, "transformer.h", "transformer.w")],
    ids=["llama", "gpt2"],
)
def test_fragments_find_layers_and_embedding(model: dict[str, Any], layers: str, top: str) -> None:
    specs = tensor_specs(canonical_parameters(build_model(shape(model))))

    plan = make_plan(specs, num_fragments=5, pattern="sequential", embedding_alone=True)

    *of_layers, of_top = [[entry.name for entry in f.entries] for f in plan.fragments]
    assert all(name.startswith(top) for name in of_top)
    found = [{n.removeprefix(f"{layers}.").split(".")[0] for n in names} for names in of_layers]
    assert [sorted(each)[0] for each in found] == ["0", "1", "2", "3"]


def test_layers_of_the_built_in_decoder_are_found_as_ever() -> None:
    specs = [TensorSpec(f"layers.{n}.w", (2,)) for n in range(2)] + [TensorSpec("embed.w", (2,))]

    plan = make_plan(specs, num_fragments=3, pattern="strided")

    assert [f.entries[0].name for f in plan.fragments] == ["layers.0.w", "layers.1.w", "embed.w"]


def test_operations_are_those_of_the_built_in_decoder_of_the_same_sizes() -> None:
    own = LlamaShape(256, 64, 4, 4, 2, 210, tie_embeddings=True)
    untied = LlamaShape(256, 64, 4, 4, 2, 210)

    assert flops_per_token(shape(HF_TIED), 32) == flops_per_token(own, 32)
    assert flops_per_token(shape(HF_LLAMA), 32) == flops_per_token(untied, 32)
    # GPT-2's tables of positions are looked up in; its matrices are two a layer in place of three.
    matrices = 64 * 192 + 64 * 64 + 2 * 64 * 210
    assert flops_per_token(shape(HF_GPT2), 32) == 6 * (4 * matrices + 256 * 64) + 12 * 4 * 64 * 32


@pytest.mark.parametrize(
    ("model", "changes", "mesh", "part"),
    [
        (HF_GPT2, {}, {"tp": 2}, "GPT2LMHeadModel of transformers has no tensor-parallel plan"),
        (HF_LLAMA, {}, {"tp": 4}, "mesh.tp = 4 must divide num_kv_heads = 2"),
        (
            HF_TIED,
            {"vocab_size": 257},
            {"tp": 2},
            "must divide model.embed_tokens.weight = 257 of LlamaForCausalLM; set it to 1",
        ),
        (
            HF_LLAMA,
            {"model_type": "phi3", "pad_token_id": 0},
            {"tp": 2},
            'has the style "rowwise_split_input" for model.layers.0.self_attn.o_proj',
        ),
        (
            HF_LLAMA,
            {"model_type": "lfm2", "layer_types": ["conv"] * 4},
            {"tp": 2},
            "has the convolution model.layers.0.conv.conv",
        ),
    ],
    ids=["no-plan", "heads", "vocabulary", "unknown-style", "convolution"],
)
def test_a_mesh_that_the_models_plan_is_not_for_is_refused(
    model: dict[str, Any], changes: dict[str, Any], mesh: dict[str, int], part: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        check_mesh(shape(model, **changes), MeshConfig(**mesh))

    assert part in str(refused.value)


def test_muon_is_kept_from_tables_whatever_they_are_called() -> None:
    muon = InnerOptimizerConfig(name="muon", lr=0.02)

    for model in (HF_TIED, HF_GPT2):
        check_optimizer_names(shape(model), muon)
    fewer = InnerOptimizerConfig(name="muon", lr=0.02, adamw_by_name=["*norm*"])
    with pytest.raises(ConfigError, match=r"leaves model\.embed_tokens\.weight to muon"):
        check_optimizer_names(shape(HF_TIED), fewer)


def test_dropout_that_only_transformers_knows_of_is_refused_by_its_key() -> None:
    content = {k: v for k, v in HF_GPT2["hf_config"].items() if k != "resid_pdrop"}
    table = {**HF_GPT2, "hf_config": content}

    with pytest.raises(ConfigError, match=r"model\.hf_config\.resid_pdrop = 0\.1: dropout"):
        build_model(shape_of(ModelConfig.model_validate(table)))


def test_a_model_that_sees_later_tokens_unless_told_is_refused() -> None:
    no_dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    ernie = {"model_type": "ernie", "pad_token_id": 0, **no_dropout}

    with pytest.raises(ConfigError, match=r"set model\.hf_config\.is_decoder = true"):
        build_model(shape(HF_LLAMA, **ernie))
    build_model(shape(HF_LLAMA, **ernie, is_decoder=True))
    build_model(shape(HF_LLAMA, model_type="gpt_neox"))  # is_decoder is false there, too


def test_sizes_that_transformers_validates_itself_are_refused_as_a_mistake() -> None:
    with pytest.raises(ConfigError, match="makes no causal model of it"):
        build_model(shape(HF_LLAMA, hidden_size=66))


def test_values_that_the_models_rule_leaves_out_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = build_model(shape(HF_LLAMA))
    assert isinstance(made, TransformersModel)
    made.to_empty(device="cpu")
    rule = type(made.decoder)._init_weights

    def forgetful(self: Any, module: Any) -> None:
        if "Norm" not in type(module).__name__:
            rule(self, module)

    monkeypatch.setattr(type(made.decoder), "_init_weights", forgetful)

    with pytest.raises(
        ConfigError, match=r"no initial values of model\.layers\.0\.input_layernorm"
    ):
        initialise_(made, 3)


def test_what_is_no_causal_model_is_refused_by_its_type() -> None:
    with pytest.raises(ConfigError, match='model_type = "lama" is unknown to transformers'):
        build_model(shape(HF_LLAMA, model_type="lama"))
