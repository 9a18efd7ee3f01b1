"""What every codec must do; a new codec joins by being registered."""

import pytest
import torch
from torch import Tensor

from diloco.compression.base import Codec, from_bytes, to_bytes
from diloco.compression.registry import CODECS
from diloco.errors import CodecError

BLOCK = 128
SIZES = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 1000]
LARGEST = torch.finfo(torch.float32).max

#: Bytes on the wire by codec, for each of SIZES.
WIRE_BYTES = {
    "float32": [0, 4, 508, 512, 516, 4000],
    "int4": [0, 66, 66, 66, 132, 528],
}

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(params=CODECS.values(), ids=CODECS)
def codec(request: pytest.FixtureRequest) -> Codec:
    return request.param


def vectors(numel: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(numel)
    normal = torch.randn(numel, generator=generator)
    return {
        "normal": normal,
        "zeros": torch.zeros(numel),
        "negative zeros": -torch.zeros(numel),
        "constant": torch.full((numel,), -0.3),
        "tiny": normal * 1e-20,
        "denormal": torch.full((numel,), 1e-42) * normal,
        "one denormal beside ones": torch.cat((torch.ones(numel)[1:], torch.full((1,), 1e-45)))[
            :numel
        ],
        "huge": normal.sign() * LARGEST,
        "wide": normal * 10 ** (30 * torch.rand(numel, generator=generator)),
    }


@pytest.mark.parametrize("numel", SIZES)
def test_wire_size_is_the_formula(codec: Codec, numel: int) -> None:
    assert codec.wire_bytes(numel) == WIRE_BYTES[codec.name][SIZES.index(numel)]
    for values in vectors(numel).values():
        payload = codec.encode(values)

        assert payload.dtype == torch.uint8
        assert payload.shape == (codec.wire_bytes(numel),)


@pytest.mark.parametrize("numel", SIZES)
def test_decoded_values_are_finite_float32_of_the_same_number(codec: Codec, numel: int) -> None:
    for values in vectors(numel).values():
        decoded = codec.decode(codec.encode(values), numel)

        assert decoded.dtype == torch.float32
        assert decoded.shape == (numel,)
        assert decoded.isfinite().all()


@pytest.mark.parametrize("numel", SIZES)
def test_decoded_values_are_decoded_to_themselves(codec: Codec, numel: int) -> None:
    for values in vectors(numel).values():
        once = codec.decode(codec.encode(values), numel)

        assert torch.equal(codec.decode(codec.encode(once), numel), once)


@pytest.mark.parametrize("numel", SIZES)
def test_zeros_are_exact(codec: Codec, numel: int) -> None:
    assert not codec.decode(codec.encode(torch.zeros(numel)), numel).any()


@pytest.mark.parametrize("numel", SIZES)
def test_encoding_is_deterministic_and_leaves_its_input_alone(codec: Codec, numel: int) -> None:
    for values in vectors(numel).values():
        before = values.clone()
        first = codec.encode(values)
        kept = first.clone()
        decoded = codec.decode(first, numel)

        assert torch.equal(codec.encode(values), first)
        assert values.view(torch.int32).tolist() == before.view(torch.int32).tolist()

        values.fill_(1.0)
        assert torch.equal(first, kept)

        decoded_before = decoded.clone()
        first.zero_()
        assert torch.equal(decoded, decoded_before)


def test_a_strided_view_is_encoded_as_its_copy(codec: Codec) -> None:
    values = torch.randn(2000, generator=torch.Generator().manual_seed(1))

    assert torch.equal(codec.encode(values[::2]), codec.encode(values[::2].clone()))
    assert torch.equal(codec.encode(values.requires_grad_()), codec.encode(values.detach()))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("numel", "index"), [(1, 0), (129, 128), (1000, 517)])
def test_nan_and_infinity_are_refused_with_their_index(
    codec: Codec, value: float, numel: int, index: int
) -> None:
    values = torch.ones(numel)
    values[index] = value

    with pytest.raises(
        CodecError, match=rf"{codec.name} met {value} at element {index} of {numel}"
    ):
        codec.encode(values)


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(torch.zeros(2, 2), id="matrix"),
        pytest.param(torch.zeros(2, dtype=torch.float64), id="float64"),
        pytest.param(torch.zeros(2, dtype=torch.bfloat16), id="bfloat16"),
    ],
)
def test_only_flat_float32_is_encoded(codec: Codec, values: Tensor) -> None:
    with pytest.raises(CodecError, match="encodes flat float32 vectors"):
        codec.encode(values)


@pytest.mark.parametrize("change", [-1, 1], ids=["short", "long"])
@pytest.mark.parametrize("numel", SIZES[1:])
def test_a_payload_of_another_size_is_refused(codec: Codec, numel: int, change: int) -> None:
    payload = torch.zeros(codec.wire_bytes(numel) + change, dtype=torch.uint8)

    with pytest.raises(CodecError, match=f"{numel} values must be {codec.wire_bytes(numel)} bytes"):
        codec.decode(payload, numel)


def test_a_payload_of_another_dtype_is_refused(codec: Codec) -> None:
    with pytest.raises(CodecError, match="must be"):
        codec.decode(torch.zeros(codec.wire_bytes(128), dtype=torch.int8), 128)


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_a_payload_is_read_from_any_place_in_received_bytes(codec: Codec, offset: int) -> None:
    values = vectors(1000)["normal"]
    payload = codec.encode(values)
    received = bytes(offset) + to_bytes(payload).tobytes()

    decoded = codec.decode(from_bytes(memoryview(received)[offset:]), 1000)

    assert torch.equal(decoded, codec.decode(payload, 1000))


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=needs_gpu)])
def test_a_gpu_gives_the_same_bytes_and_values(codec: Codec, numel: int, device: str) -> None:
    for values in vectors(numel).values():
        payload = codec.encode(values)

        on_device = codec.encode(values.to(device))
        decoded = codec.decode(payload.to(device), numel)

        assert on_device.device.type == decoded.device.type == device
        assert torch.equal(on_device.cpu(), payload)
        assert torch.equal(decoded.cpu(), codec.decode(payload, numel))
