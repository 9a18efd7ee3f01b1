"""What every codec must do; a new codec joins by being registered."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from diloco.compression.base import Codec, from_bytes, to_bytes
from diloco.compression.registry import CODECS
from diloco.errors import CodecError

BLOCK = 128
CHUNK = 4096
SIZES = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 1000, CHUNK - 1, CHUNK, CHUNK + 1]
FOUR_BITS = [0, 66, 66, 66, 132, 528, 2112, 2112, 2178]

#: Bytes on the wire by codec, for each of SIZES.
WIRE_BYTES = {
    "float32": [0, 4, 508, 512, 516, 4000, 16380, 16384, 16388],
    "float16": [0, 2, 254, 256, 258, 2000, 8190, 8192, 8194],
    "bfloat16": [0, 2, 254, 256, 258, 2000, 8190, 8192, 8194],
    "int8": [0, 130, 130, 130, 260, 1040, 4160, 4160, 4290],
    "int4": FOUR_BITS,
    "int4-stochastic": FOUR_BITS,
    "e2m1": FOUR_BITS,
    "e2m1-stochastic": FOUR_BITS,
    "e3m0": FOUR_BITS,
    "e3m0-stochastic": FOUR_BITS,
    "int2": [0, 34, 34, 34, 68, 272, 1088, 1088, 1122],
    "topk64": [0, 116, 116, 116, 116, 116, 116, 116, 232],
    "topk128": [0, 228, 228, 228, 228, 228, 228, 228, 456],
}

#: The largest value that a codec can send; more is refused.
LARGEST = dict.fromkeys(WIRE_BYTES, torch.finfo(torch.float32).max) | {
    "float16": torch.finfo(torch.float16).max,
    "bfloat16": torch.finfo(torch.bfloat16).max,
}
#: Relative error of a normal vector (square root of energies), at most.
ERROR = {
    "float32": 0.0,
    "float16": 2.2e-4,
    "bfloat16": 2e-3,
    "int8": 0.007,
    "int4": 0.12,
    "int4-stochastic": 0.17,
    "e2m1": 0.115,
    "e2m1-stochastic": 0.165,
    "e3m0": 0.2,
    "e3m0-stochastic": 0.29,
    "int2": 0.57,
    "topk64": 0.95,
    "topk128": 0.91,
}

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def name_of(codec: Codec) -> str:
    return codec.name


def is_stochastic(codec: Codec) -> bool:
    return codec.name.endswith("-stochastic")


@pytest.fixture(params=CODECS.values(), ids=CODECS)
def codec(request: pytest.FixtureRequest) -> Codec:
    return request.param


def vectors(codec: Codec, numel: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(numel)
    normal = torch.randn(numel, generator=generator)
    largest = LARGEST[codec.name]
    wide = normal * 10 ** (30 * torch.rand(numel, generator=generator))
    return {
        "normal": normal,
        "zeros": torch.zeros(numel),
        "negative zeros": -torch.zeros(numel),
        "constant": torch.full((numel,), -0.3),
        "tiny": normal * 1e-20,
        "denormal": torch.full((numel,), 1e-42) * normal,
        "one denormal besides ones": torch.cat((torch.ones(numel)[1:], torch.full((1,), 1e-45)))[
            :numel
        ],
        "huge": normal.sign() * largest,
        "wide": wide.clamp(-largest, largest),
    }


@pytest.mark.parametrize("numel", SIZES)
def test_wire_size_is_the_formula(codec: Codec, numel: int) -> None:
    assert codec.wire_bytes(numel) == WIRE_BYTES[codec.name][SIZES.index(numel)]
    for values in vectors(codec, numel).values():
        payload = codec.encode(values)

        assert payload.dtype == torch.uint8
        assert payload.shape == (codec.wire_bytes(numel),)


@pytest.mark.parametrize("numel", SIZES)
def test_decoded_values_are_finite_float32_of_the_same_number(codec: Codec, numel: int) -> None:
    for values in vectors(codec, numel).values():
        decoded = codec.decode(codec.encode(values), numel)

        assert decoded.dtype == torch.float32
        assert decoded.shape == (numel,)
        assert decoded.isfinite().all()


@pytest.mark.parametrize("numel", SIZES)
# The scale of a stochastic codec depends on what the largest value was rounded to.
@pytest.mark.parametrize("codec", [c for c in CODECS.values() if not is_stochastic(c)], ids=name_of)
def test_decoded_values_are_decoded_to_themselves(codec: Codec, numel: int) -> None:
    for values in vectors(codec, numel).values():
        once = codec.decode(codec.encode(values), numel)

        assert torch.equal(codec.decode(codec.encode(once), numel), once)


@pytest.mark.parametrize("numel", SIZES)
def test_zeros_are_exact(codec: Codec, numel: int) -> None:
    assert not codec.decode(codec.encode(torch.zeros(numel)), numel).any()


def test_a_normal_vector_comes_back_as_well_as_it_should(codec: Codec) -> None:
    values = torch.randn(32 * CHUNK, generator=torch.Generator().manual_seed(1))

    decoded = codec.decode(codec.encode(values), len(values))

    error = ((decoded - values).norm() / values.norm()).item()
    assert 0.7 * ERROR[codec.name] <= error <= ERROR[codec.name]


def test_only_stochastic_codecs_hear_the_key(codec: Codec) -> None:
    values = vectors(codec, 1000)["normal"]

    payloads = [codec.encode(values, key) for key in (0, 1, 1 << 63, (1 << 64) - 1)]

    num_different = len({to_bytes(payload).tobytes() for payload in payloads})
    assert num_different == (4 if is_stochastic(codec) else 1)
    assert torch.equal(codec.encode(values, 1), payloads[1])


@pytest.mark.parametrize("numel", SIZES)
def test_encoding_is_deterministic_and_leaves_its_input_alone(codec: Codec, numel: int) -> None:
    for values in vectors(codec, numel).values():
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


def test_hosts_that_flush_denormals_send_and_read_the_same(codec: Codec) -> None:
    for values in vectors(codec, 2 * CHUNK).values():
        payload = codec.encode(values, 5)
        decoded = codec.decode(payload, len(values))
        try:
            assert torch.set_flush_denormal(True)
            flushed = codec.encode(values, 5), codec.decode(payload, len(values))
        finally:
            torch.set_flush_denormal(False)

        assert torch.equal(flushed[0], payload)
        assert torch.equal(flushed[1], decoded)


@pytest.mark.parametrize("numel", [0, 1, BLOCK + 1, CHUNK + 1])
@pytest.mark.parametrize("offset", [0, 1])
def test_check_refuses_what_decode_refuses(codec: Codec, numel: int, offset: int) -> None:
    generator = torch.Generator().manual_seed(1)
    sound = codec.encode(torch.randn(numel, generator=generator))
    for _ in range(60):
        place = torch.zeros(len(sound) + offset, dtype=torch.uint8)
        payload = place[offset:]
        payload.copy_(sound)
        if len(sound):
            index = int(torch.randint(len(sound), (), generator=generator))
            byte = int(torch.randint(256, (), generator=generator))
            payload[index : index + 2] = (0, 0x08, 0x80, 0xFF, byte)[byte % 5]

        assert refusal(codec.check, payload, numel) == refusal(codec.decode, payload, numel)


def test_check_refuses_another_size(codec: Codec) -> None:
    payload = codec.encode(torch.zeros(BLOCK))

    assert refusal(codec.check, payload[1:], BLOCK) == refusal(codec.decode, payload[1:], BLOCK)
    assert refusal(codec.check, payload[1:], BLOCK)


def refusal(read: Callable[[Tensor, int], object], payload: Tensor, numel: int) -> str:
    try:
        read(payload, numel)
    except CodecError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_a_payload_is_read_from_any_place_in_received_bytes(codec: Codec, offset: int) -> None:
    values = vectors(codec, 1000)["normal"]
    payload = codec.encode(values)
    received = bytes(offset) + to_bytes(payload).tobytes()

    decoded = codec.decode(from_bytes(memoryview(received)[offset:]), 1000)

    assert torch.equal(decoded, codec.decode(payload, 1000))


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=needs_gpu)])
def test_a_gpu_gives_the_same_bytes_and_values(codec: Codec, numel: int, device: str) -> None:
    for values in vectors(codec, numel).values():
        payload = codec.encode(values)

        on_device = codec.encode(values.to(device))
        decoded = codec.decode(payload.to(device), numel)

        assert on_device.device.type == decoded.device.type == device
        assert torch.equal(on_device.cpu(), payload)
        assert torch.equal(decoded.cpu(), codec.decode(payload, numel))
