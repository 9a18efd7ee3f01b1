"""How a plan travels: small, and no larger in memory than it may be."""

from __future__ import annotations

import pytest
import zstandard

from diloco.outer.fragments import TensorSpec, make_plan
from diloco.protocol.run.plan_bytes import MOST_PLAN_BYTES, packed, unpacked


def test_the_plan_of_a_model_of_many_experts_goes_into_a_join() -> None:
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{kind}.weight"
        for layer in range(60)
        for expert in range(128)
        for kind in ("gate_proj", "up_proj", "down_proj")
    ]
    plan = make_plan([TensorSpec(name, (768, 2048)) for name in names], num_fragments=24)

    content = packed(text := plan.to_json())

    assert len(text) > 3 << 20 and len(content) < MOST_PLAN_BYTES / 4
    assert unpacked(content) == text
    assert packed("") == b"" and unpacked(b"") == ""


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{}", "it is not of zstandard"),
        (zstandard.ZstdCompressor().compress(bytes(1 << 30)), "it unpacks to 1073741824 bytes"),
        (packed("[]," * 10_000), "it unpacks to 30000 bytes"),
        (zstandard.ZstdCompressor(write_content_size=False).compress(b"{}"), "unpacks to -1 bytes"),
        (packed("x" * 1000)[:-3], "it is not of zstandard"),
        (b"x" * (MOST_PLAN_BYTES + 1), "it has 917505 bytes; 917504 are allowed"),
        (zstandard.ZstdCompressor().compress(b"\xff\xfe"), "can't decode byte"),
    ],
    ids=["no-zstandard", "bomb", "a-bomb-of-lists", "no-size", "torn", "long", "no-text"],
)
def test_what_is_no_plan_is_refused(content: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        unpacked(content)
