import struct

import pytest
import torch

from diloco.compression.registry import get_codec
from diloco.errors import CodecError


@pytest.mark.parametrize(
    ("name", "expected"),
    [("float16", "003c 0080 0100 0140"), ("bfloat16", "803f 0080 8033 0040")],
)
def test_the_wire_is_little_endian_16_bit_values_rounded_half_to_even(
    name: str, expected: str
) -> None:
    # 2^-24 is the smallest float16; 2 + 2^-9 + 2^-11 is rounded to 11 bits, or to 8.
    payload = get_codec(name).encode(torch.tensor([1.0, -0.0, 2.0**-24, 2 + 2.0**-9]))

    assert bytes(payload.tolist()) == bytes.fromhex(expected)


@pytest.mark.parametrize(
    ("name", "largest", "beyond"),
    [("float16", 65519.99, 65520.0), ("bfloat16", 3.3961e38, 3.4e38)],
)
def test_what_would_become_infinite_is_refused_with_the_remedy(
    name: str, largest: float, beyond: float
) -> None:
    codec = get_codec(name)
    values = torch.zeros(300)

    values[7] = -largest
    assert codec.decode(codec.encode(values), 300).isfinite().all()

    values[7] = -beyond
    with pytest.raises(
        CodecError, match=rf"{name} met -.* at element 7 of 300, beyond its largest"
    ):
        codec.encode(values)


def test_small_float16_values_lose_bits_and_then_vanish() -> None:
    values = torch.tensor([6.1e-5, 1e-6, 2.0**-24, 2.0**-25])
    codec = get_codec("float16")

    decoded = codec.decode(codec.encode(values), 4)

    assert (decoded - values).abs().max() <= 2.0**-25
    assert decoded[3] == 0


def test_a_received_value_that_is_not_finite_is_refused() -> None:
    payload = torch.tensor(list(struct.pack("<3e", 1.0, 2.0, float("inf"))), dtype=torch.uint8)

    with pytest.raises(CodecError, match="float16 met inf at element 2 of 3"):
        get_codec("float16").decode(payload, 3)


def test_the_wire_of_float32_is_raw_little_endian_values() -> None:
    payload = get_codec("float32").encode(torch.tensor([1.0, -0.0, 1e-45]))

    assert bytes(payload.tolist()) == bytes.fromhex("0000803f 00000080 01000000")


def test_every_bit_of_a_float32_survives() -> None:
    values = torch.tensor([-0.0, 1e-45, 3.4e38, 0.1])

    decoded = get_codec("float32").decode(get_codec("float32").encode(values), 4)

    assert decoded.view(torch.int32).tolist() == values.view(torch.int32).tolist()


def test_a_received_float32_that_is_not_finite_is_refused() -> None:
    payload = torch.tensor(list(struct.pack("<3f", 1.0, 2.0, float("nan"))), dtype=torch.uint8)

    with pytest.raises(CodecError, match="float32 met nan at element 2 of 3"):
        get_codec("float32").decode(payload, 3)
