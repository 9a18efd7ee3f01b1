import struct

import pytest
import torch

from diloco.compression.float32 import Float32Codec
from diloco.errors import CodecError


def test_the_wire_is_raw_little_endian_values() -> None:
    payload = Float32Codec().encode(torch.tensor([1.0, -0.0, 1e-45]))

    assert bytes(payload.tolist()) == bytes.fromhex("0000803f 00000080 01000000")


def test_every_bit_survives() -> None:
    values = torch.tensor([-0.0, 1e-45, 3.4e38, 0.1])

    decoded = Float32Codec().decode(Float32Codec().encode(values), 4)

    assert decoded.view(torch.int32).tolist() == values.view(torch.int32).tolist()


def test_a_received_value_that_is_not_finite_is_refused() -> None:
    payload = torch.tensor(list(struct.pack("<3f", 1.0, 2.0, float("nan"))), dtype=torch.uint8)

    with pytest.raises(CodecError, match="float32 met nan at element 2 of 3"):
        Float32Codec().decode(payload, 3)
