"""Top-k codecs: which values are sent, as what, and in which bytes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.compression.error_feedback import encode_with_feedback
from diloco.compression.registry import get_codec
from diloco.errors import CodecError

CODEC = get_codec("topk64")


def chunk(values: dict[int, float]) -> Tensor:
    result = torch.zeros(4096)
    for index, value in values.items():
        result[index] = value
    return result


def sent(values: Tensor) -> Tensor:
    return CODEC.decode(CODEC.encode(values), len(values))


def test_the_bytes_of_a_chunk_are_the_golden_ones() -> None:
    # 62 values of magnitude 1 at 0, 1, ..., 61, then 4 at 100 and -4 at 4095 (0xFFF).
    values = chunk(dict.fromkeys(range(62), 1.0) | {100: 4.0, 4095: -4.0, 2000: 0.5})
    values[3] = -1.0
    first, second = list(range(32)), [*range(32, 62), 100, 4095]
    low_bytes = first
    middle = [(i & 15) << 4 for i in second]
    high = [i >> 4 for i in second]
    codes = bytearray(16)  # code i lies in byte i mod 16, bits 2 (i // 16)
    codes[3] = 0b01  # value 3: minus, low
    codes[14] = 0b10 << 6  # value 62: plus, high
    codes[15] = 0b11 << 6  # value 63: minus, high

    payload = CODEC.encode(values)

    expected = bytes.fromhex("803f 8040") + bytes([*low_bytes, *middle, *high]) + bytes(codes)
    assert bytes(payload.tolist()) == expected
    assert torch.equal(sent(values), torch.where(values == 0.5, 0.0, values))


def test_of_equal_magnitudes_the_first_are_sent() -> None:
    values = torch.ones(4096)
    values[::2] = -1.0

    decoded = sent(values)

    assert torch.equal(decoded[:64], values[:64])
    assert not decoded[64:].any()


def test_low_and_high_are_means_of_what_lies_below_and_above_the_mean() -> None:
    # Mean 3; above it 5 and 7, mean 6; 62 values of 2.9 and a bit.
    magnitudes = torch.full((64,), 180.0 / 62)
    magnitudes[[10, 20]] = torch.tensor([5.0, 7.0])
    values = torch.zeros(4096)
    values[100:164] = magnitudes

    decoded = sent(values)[100:164]

    assert decoded[[10, 20]].tolist() == [6.0, 6.0]
    assert decoded[0].item() == torch.tensor(180.0 / 62).bfloat16().item()


@pytest.mark.parametrize("name", ["topk64", "topk128"])
@settings(deadline=None)
@given(data=st.data())
def test_what_is_sent_is_what_is_largest(name: str, data: st.DataObject) -> None:
    codec = get_codec(name)
    count = int(name[4:])
    numel = data.draw(st.integers(1, 9000))
    seed = data.draw(st.integers(0, 1000))
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    values = torch.where(values.abs() < data.draw(st.floats(0, 2)), 0.0, values)

    decoded = codec.decode(codec.encode(values), numel)

    for start in range(0, numel, 4096):
        wanted, got = values[start : start + 4096], decoded[start : start + 4096]
        taken = wanted.abs().topk(min(count, len(wanted))).values
        kept = wanted.abs() > taken[-1]
        assert torch.equal(
            got[kept].sign() * (got[kept] != 0), wanted[kept].sign() * (got[kept] != 0)
        )
        assert got.count_nonzero() <= count
        magnitudes = got.abs().unique()
        assert len(magnitudes[magnitudes > 0]) <= 2
        # Means of two groups of what was taken lose nothing of its sum, but for bf16's 8 bits.
        assert got.abs().sum().item() == pytest.approx(taken.sum().item(), rel=2.0**-8)


@pytest.mark.parametrize("largest", [2.0**-100, torch.finfo(torch.float32).max, 1.0])
def test_extremes_are_finite_and_not_denormal(largest: float) -> None:
    values = chunk({0: largest, 1: 1e-45, 2: -largest, 4095: 1e-38})

    decoded = sent(values)

    assert decoded[0] == -decoded[2] == decoded.abs().max()
    assert decoded[0].item() == pytest.approx(largest, rel=2.0**-7)
    magnitudes = decoded.abs()
    assert ((magnitudes == 0) | (magnitudes >= 2.0**-126)).all()


def test_a_chunk_below_2_to_the_minus_100_is_zero() -> None:
    values = torch.cat((chunk({5: 2.0**-100 * (1 - 2.0**-24)}), chunk({5: 1.0})))

    assert sent(values).nonzero().flatten().tolist() == [4096 + 5]


@pytest.mark.parametrize(
    ("place", "content"),
    [
        pytest.param(0, "8040 803f", id="low above high"),
        pytest.param(0, "803f 807f", id="infinite"),
        pytest.param(0, "c07f c07f", id="NaN"),
        pytest.param(0, "80bf 803f", id="negative"),
        pytest.param(0, "0100 803f", id="denormal"),
        pytest.param(0, "0000 0100", id="zero and a denormal"),
        pytest.param(0, "0080 0080", id="minus zero"),
        pytest.param(0, "0080 803f", id="low minus zero"),
        pytest.param(4, "0100", id="indices out of order"),
        pytest.param(5, "00", id="an index twice"),
    ],
)
def test_what_no_encoder_gives_is_refused(place: int, content: str) -> None:
    payload = CODEC.encode(chunk({i: 1.0 + (i % 2) for i in range(64)}))
    change = torch.tensor(list(bytes.fromhex(content)), dtype=torch.uint8)
    payload[place : place + len(change)] = change

    with pytest.raises(CodecError, match="topk64 payload has magnitudes or indices out of order"):
        CODEC.decode(payload, 4096)


@pytest.mark.parametrize(
    ("numel", "index"),
    [
        pytest.param(100, 100, id="beyond the values"),
        pytest.param(4096 + 100, 4095, id="of a last chunk"),
        pytest.param(10, 64, id="beyond the zeros behind few values"),
    ],
)
def test_an_index_beyond_the_values_is_refused(numel: int, index: int) -> None:
    values = torch.zeros(numel)
    values[-10:] = 1.0
    payload = CODEC.encode(values)
    assert torch.equal(CODEC.decode(payload, numel), values)
    num_chunks = len(payload) // 116
    end = (4 + 96) * num_chunks  # the last index: its low 4 bits, then its high 8
    payload[end - 33] = (payload[end - 33] & 15) | ((index & 15) << 4)
    payload[end - 1] = index >> 4

    last = f"topk64 payload has index {index} in its last chunk, of {numel % 4096} values"
    with pytest.raises(CodecError, match=last):
        CODEC.decode(payload, numel)
    with pytest.raises(CodecError, match=last):
        CODEC.check(payload, numel)


def test_with_error_feedback_everything_is_sent_in_the_end() -> None:
    delta = torch.randn(4096, generator=torch.Generator().manual_seed(1))
    total = torch.zeros(4096)
    residual: Tensor | None = torch.zeros(4096)

    for _ in range(400):
        payload, residual = encode_with_feedback(CODEC, delta, residual)
        total += CODEC.decode(payload, 4096)

    # 64 of 4,096 a round are all of it in 64 rounds, so that a sum of 400 lags by some 64 or more.
    error = ((total / 400 - delta).norm() / delta.norm()).item()
    assert error < 0.35
