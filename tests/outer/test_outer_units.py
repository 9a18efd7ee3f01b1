"""What a merge rule treats on its own: tensors, pieces of them, experts."""

from __future__ import annotations

import json

import pytest

from diloco.errors import ConfigError
from diloco.outer.fragments import Plan, TensorSpec, make_plan
from diloco.outer.patterns import check_match
from diloco.outer.units import Unit, merge_units

MODEL = [
    TensorSpec("embed.weight", (10, 20)),
    TensorSpec("layers.0.experts.w", (3, 5, 30)),
    TensorSpec("layers.0.experts.bias", (3, 30)),
    TensorSpec("layers.0.norm", (64,)),
]


def plan() -> Plan:
    return make_plan(MODEL, num_fragments=1)


def test_a_unit_is_a_tensor_with_its_padding() -> None:
    # Sorted: embed 200 -> 256; bias 90 -> 128; experts.w 450 -> 512; norm 64 -> 128.
    assert merge_units(plan(), 0) == tuple(Unit(end, False) for end in (256, 384, 896, 1024))


def test_experts_are_units_one_by_one_and_embeddings_are_plain() -> None:
    units = merge_units(plan(), 0, plain_mean=("*embed*",), experts=("*experts*",))

    # The bias has two dims: its rows are no matrices of experts, and it is one unit.
    assert units == (
        Unit(256, True),
        Unit(384, False),
        *(Unit(384 + border, False) for border in (150, 300, 512)),
        Unit(1024, False),
    )


def test_a_cut_tensor_has_a_unit_in_each_fragment() -> None:
    content = json.loads(
        make_plan([TensorSpec("x.experts", (4, 10, 10))], num_fragments=1).to_json()
    )
    first = content["fragments"][0]
    entries = [[["x.experts", 0, 150, 0]], [["x.experts", 150, 400, 0]]]
    content["fragments"] = [
        {**first, "fragment_id": p, "entries": e, "padded_numel": 256, "lanes": [[0, 256]]}
        for p, e in enumerate(entries)
    ]
    cut = Plan.from_json(json.dumps(content))

    ends = [[u.end for u in merge_units(cut, p, experts=("*experts",))] for p in range(2)]

    # Experts of 100 values; the second is in both fragments, 50 of it in each.
    assert ends == [[100, 256], [50, 150, 256]]
    assert [[u.end for u in merge_units(cut, p)] for p in range(2)] == [[256], [256]]


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    names = [spec.name for spec in MODEL]

    check_match("outer.experts", "*experts*", "*experts*", names)
    with pytest.raises(ConfigError, match=r"outer\.experts: 'wte' matches no parameter .*embed"):
        check_match("outer.experts", "wte", "wte", names)
