"""The same model in transformers: what we export computes the same there, and the other way round.

One module for all, since importing transformers takes seconds.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco.checkpoint.export import export_run
from diloco.checkpoint.warm_start import find_warm_start
from diloco.config.classes import Section
from diloco.config.load import load_config
from diloco.trainer.models.hugging_face import read_shape
from diloco.trainer.models.model import Llama, LlamaShape, parameter_shapes
from tests.launch.stored_run import model_of, random_parameters, store_run, tiny_run


@pytest.fixture(scope="module")
def transformers() -> Any:
    """The package, imported when a test needs it and not when tests are collected."""
    import transformers

    return transformers


def logits_of(model: Llama, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(tokens, torch.arange(tokens.shape[1]))
    return logits


def assert_same_function(ours: Llama, theirs: Any, vocab_size: int) -> None:
    tokens = torch.randint(0, vocab_size, (2, 100), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = theirs(tokens).logits

    logits = logits_of(ours, tokens)

    # The same float32 operations in the same order: equal to the bit where both call the same
    # kernels. Others sum in another order: each of the about 20 sums in a row, of up to 100 terms,
    # is then off by at most 100 * 2^-24 of its largest term, 1e-4 in all, relative.
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_export_is_the_same_function_in_transformers(
    transformers: Any, tmp_path: Path, tied: bool
) -> None:
    run_file = tiny_run(tmp_path / "run", tied=tied)
    shape = LlamaShape.from_config(load_config(run_file).model)
    parameters = random_parameters(shape, 3)
    state = store_run(run_file, parameters)
    # Tied: one file; untied: several, which only the index holds together.
    export_run(state, tmp_path / "out", max_file_bytes=10**9 if tied else 40_000)

    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")

    assert theirs.dtype == torch.float32
    assert theirs.config.num_key_value_heads == 2 < theirs.config.num_attention_heads
    assert_same_function(model_of(shape, parameters), theirs, shape.vocab_size)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_model_of_transformers_is_the_same_function_as_warm_start(
    transformers: Any, tmp_path: Path, tied: bool
) -> None:
    made = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        rms_norm_eps=1e-4,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        initializer_range=0.1,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(3)
    theirs = transformers.LlamaForCausalLM(made).eval()
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="5MB" if tied else "50KB")
    shape = read_shape(json.loads((tmp_path / "theirs" / "config.json").read_text()), "theirs")
    plain = {f.name: getattr(shape, f.name) for f in fields(shape)}
    sizes = [
        f"model.{name}={json.dumps(v)}" for name, v in plain.items() if not isinstance(v, Section)
    ]
    overrides = [*sizes, "model.preset=custom", f"run.warm_start={tmp_path / 'theirs'}"]

    found = find_warm_start(load_config(tiny_run(tmp_path / "run"), overrides))

    assert found is not None
    parameters = {name: found.read("model", name) for name in parameter_shapes(shape)}
    assert_same_function(model_of(shape, parameters), theirs, shape.vocab_size)
