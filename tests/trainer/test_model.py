"""The decoder against a plain float64 reference, and initial values that no layout changes."""

import dataclasses
import hashlib
import math

import pytest
import torch

from diloco.config.model import ModelConfig
from diloco.trainer.models.model import Llama, LlamaShape, build_model, initialise_
from tests.trainer.small_island import debug_shape, make_model, one_rank

TINY = LlamaShape(
    vocab_size=17,
    dim=24,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    ffn_dim=20,
    rope_theta=50.0,
    norm_eps=1e-2,
    tie_embeddings=False,
)


def reference_logits(weights, tokens, positions, shape):
    """Llama in float64, head by head and position by position; rotations as complex numbers."""

    def norm(x, name):
        return x / (x.square().mean(-1, keepdim=True) + shape.norm_eps).sqrt() * weights[name]

    def rotate(x, position):
        half = len(x) // 2
        angles = [position * shape.rope_theta ** (-i / half) for i in range(half)]
        turned = torch.complex(x[:half], x[half:]) * torch.polar(
            torch.ones(half, dtype=torch.float64), torch.tensor(angles, dtype=torch.float64)
        )
        return torch.cat((turned.real, turned.imag))

    x = weights["embed.weight"][tokens]
    width = shape.dim // shape.num_heads
    for n in range(shape.num_layers):
        part = f"layers.{n}.attention."
        h = norm(x, f"layers.{n}.attention_norm.weight")
        q, k, v = (h @ weights[f"{part}{name}.weight"].T for name in "qkv")
        out = torch.zeros_like(q)
        for head in range(shape.num_heads):
            mine = slice(head * width, (head + 1) * width)
            shared = head // (shape.num_heads // shape.num_kv_heads)
            theirs = slice(shared * width, (shared + 1) * width)
            keys = torch.stack([rotate(k[s, theirs], positions[s]) for s in range(len(tokens))])
            for s in range(len(tokens)):
                scores = keys[: s + 1] @ rotate(q[s, mine], positions[s]) / math.sqrt(width)
                out[s, mine] = scores.softmax(0) @ v[: s + 1, theirs]
        x = x + out @ weights[f"{part}o.weight"].T
        h = norm(x, f"layers.{n}.ffn_norm.weight")
        gate, up = (h @ weights[f"layers.{n}.feed_forward.{m}.weight"].T for m in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ weights[f"layers.{n}.feed_forward.down.weight"].T
    return norm(x, "norm.weight") @ weights["head.weight"].T


@pytest.mark.parametrize("first_position", [0, 1000])
def test_logits_are_those_of_the_reference(first_position):
    generator = torch.Generator().manual_seed(3)
    model = Llama(TINY)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4, generator=generator)
    tokens = torch.randint(0, 17, (2, 9), generator=generator)
    positions = torch.arange(first_position, first_position + 9)

    logits = model(tokens, positions)

    weights = {name: p.detach().double() for name, p in model.named_parameters()}
    for row, ours in zip(tokens, logits, strict=True):
        expected = reference_logits(weights, row, positions.tolist(), TINY)
        # Angles near 1,000 rad have an error of about 1000 * 2^-24 in float32.
        torch.testing.assert_close(ours.double(), expected, rtol=2e-4, atol=2e-4)


def test_debug_model_has_0_9_million_parameters_under_the_canonical_names():
    names = {name: p.numel() for name, p in build_model(debug_shape()).named_parameters()}

    assert sum(names.values()) == 902_272
    assert sorted(names)[:2] == ["embed.weight", "head.weight"]
    block = {name.removeprefix("layers.3.") for name in names if name.startswith("layers.3.")}
    assert block == {
        "attention_norm.weight",
        "ffn_norm.weight",
        *(f"attention.{name}.weight" for name in "qkvo"),
        *(f"feed_forward.{name}.weight" for name in ("gate", "up", "down")),
    }
    assert set(names) >= {"embed.weight", "norm.weight", "head.weight"}


def test_shape_is_taken_from_the_configuration():
    config = ModelConfig.model_validate({"preset": "debug", "tie_embeddings": True})

    assert LlamaShape.from_config(config) == debug_shape(is_tied=True)


def test_tied_model_lists_its_matrix_once_under_the_embedding():
    model = make_model(one_rank(), debug_shape(is_tied=True))

    names = [name for name, _ in model.named_parameters()]
    assert "embed.weight" in names
    assert "head.weight" not in names
    assert model.head.weight is model.embed.weight


def test_lost_tying_is_noticed():
    model = make_model(one_rank(), debug_shape(is_tied=True))
    model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())

    with pytest.raises(AssertionError, match="tying was lost"):
        model.assert_tied()


@pytest.mark.parametrize("is_tied", [False, True])
def test_stages_one_after_another_compute_what_the_whole_model_does(is_tied):
    shape = dataclasses.replace(TINY, num_layers=5, tie_embeddings=is_tied)
    whole = Llama(shape)
    stages = [Llama(shape, layers) for layers in (range(2), range(2, 4), range(4, 5))]
    for model in (whole, *stages):
        initialise_(model, 5)
    tokens, positions = torch.arange(12).view(2, 6), torch.arange(6)

    x = tokens
    for stage in stages:
        stage.assert_tied()
        x = stage(x, positions)

    assert torch.equal(x, whole(tokens, positions))
    names = [set(stage.state_dict()) for stage in stages]
    assert set.union(*names) == set(whole.state_dict())
    assert sum(map(len, names)) == len(whole.state_dict())
    assert [stage.embed is None for stage in stages] == [False, True, True]
    assert [stage.head is None for stage in stages] == [True, True, False]


def digest(model):
    data = b"".join(p.detach().numpy().tobytes() for _, p in sorted(model.named_parameters()))
    return hashlib.sha256(data).hexdigest()


def test_initial_values_are_pinned_to_the_bit():
    model = Llama(TINY)
    initialise_(model, 1234)

    assert digest(model) == "9141d1559affee951a328f9b0e9ca1bfb5fa9b69cbb73e8b8de0e0d431d37034"


def test_initial_values_depend_on_seed_and_name_not_on_the_global_generator():
    first, same, other = Llama(TINY), Llama(TINY), Llama(TINY)
    initialise_(first, 1)
    torch.rand(5)
    initialise_(same, 1)
    initialise_(other, 2)

    assert digest(first) == digest(same) != digest(other)
    q = [layer.attention.q.weight for layer in first.blocks]
    assert not torch.equal(*q)


def test_initial_values_are_scaled_by_role():
    model = make_model(one_rank())

    # 2^14 to 53,248 draws each: the sample deviation is within 2 % (over 3 standard errors).
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == 1).all(), name
            continue
        is_residual = name.endswith(("attention.o.weight", "feed_forward.down.weight"))
        expected = 0.02 / math.sqrt(8) if is_residual else 0.02
        assert parameter.std().item() == pytest.approx(expected, rel=0.02), name
        assert abs(parameter.mean().item()) < 0.04 * expected, name
        assert parameter.abs().max() < 3.5 * expected, name
