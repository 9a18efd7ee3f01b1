import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from diloco.compression import int4
from diloco.compression.int4 import Int4Codec, can_compile, compiled, dequantise, quantise
from diloco.errors import CodecError

CODEC = Int4Codec()
LARGEST = torch.finfo(torch.float32).max
#: The largest float32 that makes a zero block.
BELOW = float(np.nextafter(np.float32(2.0**-100), np.float32(0)))


def block(**values: float) -> Tensor:
    """128 zeros, except x0 = ..., x64 = ..."""
    result = torch.zeros(128)
    for name, value in values.items():
        result[int(name[1:])] = value
    return result


def test_the_bytes_of_a_block_are_the_golden_ones() -> None:
    values = torch.cat((block(x0=7.0, x1=-7.0, x64=1.0, x127=-3.0), block(x2=-0.07)))
    codes = bytearray([0x88] * 128)
    codes[0] = 0x9F  # value 0 is 7 (15 in the low half), value 64 is 1 (9 in the high half)
    codes[1] = 0x81  # value 1 is -7 (1)
    codes[63] = 0x58  # value 127 is -3 (5)
    codes[64 + 2] = 0x81  # value 130 is -7
    # The scales are 1 and 0.07 / 7 = 0.01, in bf16 0x3F80 and 0x3C24 (0.010009765625).
    expected = bytes.fromhex("803f 243c") + bytes(codes)

    payload = CODEC.encode(values)

    assert bytes(payload.tolist()) == expected
    decoded = CODEC.decode(payload, 256)
    assert decoded[[0, 1, 64, 127]].tolist() == [7.0, -7.0, 1.0, -3.0]
    assert decoded[130].item() == -7 * 0.010009765625
    assert decoded.count_nonzero() == 5


def test_ties_are_rounded_to_even() -> None:
    values = block(x0=7.0, x1=0.5, x2=1.5, x3=2.5, x4=-0.5, x5=-1.5, x6=-2.5, x7=6.5, x8=5.5)

    decoded = CODEC.decode(CODEC.encode(values), 128)

    assert decoded[:9].tolist() == [7, 0, 2, 2, 0, -2, -2, 6, 6]


@pytest.mark.parametrize(
    ("largest", "scale_bits"),
    [
        pytest.param(2.0**-100, 0x0C12, id="smallest that counts"),  # 146 * 2^-110
        pytest.param(BELOW, 0x3F80, id="zero block"),
        pytest.param(1e-45, 0x3F80, id="denormal"),
        pytest.param(0.0, 0x3F80, id="zero"),
        pytest.param(LARGEST, 0x7E12, id="largest"),  # 146 * 2^118
    ],
)
def test_scales_at_the_borders(largest: float, scale_bits: int) -> None:
    payload = CODEC.encode(block(x5=-largest))

    assert payload[:2].view(torch.int16).item() == scale_bits
    code = 0 if scale_bits == 0x3F80 else -7
    scale = payload[:2].view(torch.bfloat16).item()
    assert CODEC.decode(payload, 128)[5].item() == code * scale


def test_a_payload_is_at_most_0_56_bytes_a_parameter() -> None:
    # Only a block begun and not filled can cost more than 66 / 128 = 0.516.
    assert max(CODEC.wire_bytes(n) / n for n in range(128, 100_000, 128)) == 66 / 128
    assert all(CODEC.wire_bytes(n) / n <= 0.56 for n in range(16 * 128, 50_000))


def adversarial() -> Tensor:
    """Blocks at which formulas differ if anything does: [num_blocks, 128], all finite."""
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(128, generator=generator) * 2 - 1
    rows = [
        torch.zeros(128),
        -torch.zeros(128),
        torch.full((128,), 0.1),
        torch.full((128,), LARGEST),
        uniform.sign() * LARGEST,
        uniform * LARGEST,
        uniform * 1e-38,
        uniform * 1e-42,
        torch.full((128,), 1e-45),
        block(x0=1.0, x1=1e-45, x2=-1e-40, x64=1e-38),
        block(x0=LARGEST, x1=1e-45, x2=1.0),
        torch.full((128,), 2.0**-100),
        torch.full((128,), BELOW),
        torch.arange(128) / 9 - 7,
    ]
    # Every tie k + 0.5, for scales of all exponents and some significands.
    ties = (torch.arange(128) % 14 - 6.5).clamp(-6.5, 6.5)
    ties[0] = 7.0
    for exponent in range(-103, 125):
        for significand in (1.0, 1.0078125, 1.140625, 1.3359375, 1.9921875):
            rows.append(ties * min(significand * 2.0**exponent, 146 * 2.0**118))
    fixed = torch.stack(rows)
    # Every bf16 scale of one exponent, approached by largest magnitudes between them.
    sweep = torch.linspace(1.0, 2.0, 1025)[:, None] * 7 * ties / 7
    noise = torch.randn(3000, 128, generator=generator) * torch.logspace(-37, 37, 3000)[:, None]
    wide = torch.randint(-(2**31), 2**31 - 1, (3000, 128), generator=generator, dtype=torch.int64)
    raw = wide.to(torch.int32).view(torch.float32)
    raw = torch.where(raw.isfinite(), raw, 0.0)
    return torch.cat((fixed, sweep, noise, raw))


def reference(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The formula of the module's docstring in numpy: float32 scales, int codes."""
    largest = np.abs(blocks).max(axis=1)
    ratio = torch.from_numpy(largest * np.float32(1 / 7)).bfloat16().float().numpy()
    scales = np.where(largest < np.float32(2.0**-100), np.float32(1), ratio)
    reciprocals = np.float32(1) / scales
    return scales, np.rint(blocks * reciprocals[:, None]).astype(int)


def unpacked(packed: Tensor) -> np.ndarray:
    return torch.cat((packed & 15, packed >> 4), dim=1).numpy().astype(int) - 8


def test_it_is_the_reference_formula() -> None:
    blocks = adversarial()
    scales, codes = reference(blocks.numpy())

    largest, bits, packed = quantise(blocks)

    assert torch.equal(largest, blocks.abs().amax(dim=1))
    assert np.array_equal(bits.view(torch.bfloat16).float().numpy(), scales)
    assert np.array_equal(unpacked(packed), codes)
    assert np.abs(codes).max() == 7
    values = dequantise(torch.from_numpy(scales), packed)
    assert np.array_equal(values.numpy(), scales[:, None] * codes.astype(np.float32))


def test_the_largest_magnitude_of_a_block_is_coded_as_7() -> None:
    blocks = adversarial()
    is_zero = blocks.abs().amax(dim=1) < 2.0**-100

    codes = np.abs(unpacked(quantise(blocks)[2])).max(axis=1)

    assert (codes[is_zero.numpy()] == 0).all()
    assert (codes[~is_zero.numpy()] == 7).all()


def test_no_value_is_off_by_more_than_half_a_scale() -> None:
    blocks = adversarial()
    _, bits, packed = quantise(blocks)
    scales = bits.view(torch.bfloat16).float()

    error = (blocks.double() - dequantise(scales, packed).double()).abs().amax(dim=1)

    # The code is the nearest integer to x * (1 / scale), which two roundings put off by at most
    # 2^-23 of 7 (1 + 2^-8) scales; the product scale * code is exact. Zero blocks lose all.
    is_zero = blocks.abs().amax(dim=1) < 2.0**-100
    bound = torch.where(is_zero, 2.0**-100, scales.double() * (0.5 + 7.03 * 2.0**-23))
    assert (error <= bound).all()


def test_a_product_of_scale_and_code_is_exact() -> None:
    _, bits, packed = quantise(adversarial())
    scales = bits.view(torch.bfloat16).float()

    values = dequantise(scales, packed)

    exact = scales.double()[:, None] * torch.from_numpy(unpacked(packed)).double()
    assert torch.equal(values.double(), exact)
    # So a fused multiply-add onto an anchor rounds once, as does the sum of the rounded product.
    anchor = torch.randn(values.shape, generator=torch.Generator().manual_seed(1))
    assert torch.equal(anchor + values, (anchor.double() + exact).float())


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_any_finite_values_come_back_within_half_a_scale(values: list[float]) -> None:
    x = torch.tensor(values)
    payload = CODEC.encode(x)
    scales = payload[: len(payload) // 33].view(torch.bfloat16).double()

    error = (x.double() - CODEC.decode(payload, len(values)).double()).abs()

    per_value = scales.repeat_interleave(128)[: len(values)]
    assert (error <= torch.maximum(per_value * 0.500001, torch.tensor(2.0**-100))).all()


@pytest.mark.parametrize(
    ("bits", "scale"),
    [
        pytest.param(0x7FC0, "nan", id="NaN"),
        pytest.param(0x7F80, "inf", id="infinity"),
        pytest.param(0xFF80, "-inf", id="minus infinity"),
        pytest.param(0xBF80, "-1.0", id="negative"),
        pytest.param(0x0000, "0.0", id="zero"),
        pytest.param(0x0001, "9.18", id="denormal"),
        pytest.param(0x7E13, "4.88", id="would overflow"),
    ],
)
def test_a_scale_that_no_encoder_gives_is_refused(bits: int, scale: str) -> None:
    payload = CODEC.encode(torch.ones(300))
    payload[2:4] = torch.tensor([bits & 255, bits >> 8], dtype=torch.uint8)

    with pytest.raises(CodecError, match=f"int4 payload has the scale {scale}.* in block 1"):
        CODEC.decode(payload, 300)


@pytest.mark.parametrize("byte", [0x08, 0x80, 0x00], ids=["high half", "low half", "both"])
def test_a_code_of_minus_8_is_refused(byte: int) -> None:
    payload = CODEC.encode(torch.ones(128))
    payload[40] = byte

    with pytest.raises(CodecError, match="code of -8"):
        CODEC.decode(payload, 128)


# Inductor's own imports use deprecated parts of torch.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.timeout(120)
@pytest.mark.skipif(not can_compile(), reason="no C++ compiler or no Python headers")
def test_compiled_formulas_give_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = adversarial()
    monkeypatch.setattr(int4, "COMPILE_NUMEL", 2 * 128)

    for part in (blocks, blocks[5:8], blocks[100:2000]):
        largest, bits, packed = quantise(part)
        scales = bits.view(torch.bfloat16).float()

        for got, expected in zip(compiled(quantise)(part), (largest, bits, packed), strict=True):
            assert torch.equal(got, expected)
        assert torch.equal(compiled(dequantise)(scales, packed), dequantise(scales, packed))

    # The same through the codec, with a partial block and from an odd address.
    values = blocks.flatten()[:-3]
    payload = CODEC.encode(values)
    shifted = torch.cat((payload[:1], payload))[1:]
    with monkeypatch.context() as eager:
        eager.setattr(int4, "COMPILE_NUMEL", 1 << 60)
        assert torch.equal(payload, CODEC.encode(values))
        assert torch.equal(CODEC.decode(payload, len(values)), dequantise_eagerly(payload, values))
    assert torch.equal(CODEC.decode(shifted, len(values)), dequantise_eagerly(payload, values))

    values[1000] = float("nan")
    with pytest.raises(CodecError, match="met nan at element 1000"):
        CODEC.encode(values)


def dequantise_eagerly(payload: Tensor, values: Tensor) -> Tensor:
    num_blocks = len(payload) // 66
    scales = payload[: 2 * num_blocks].view(torch.bfloat16).float()
    packed = payload[2 * num_blocks :].view(num_blocks, 64)
    return dequantise(scales, packed).flatten()[: len(values)]


@pytest.mark.parametrize(
    ("numel", "has_compiler", "is_compiled"),
    [
        pytest.param(4 << 20, True, True, id="large"),
        pytest.param((4 << 20) - 128, True, False, id="small"),
        pytest.param(4 << 20, False, False, id="no compiler"),
    ],
)
def test_large_vectors_are_compiled_where_a_compiler_is_there(
    monkeypatch: pytest.MonkeyPatch, numel: int, has_compiler: bool, is_compiled: bool
) -> None:
    used = []
    monkeypatch.setattr(int4, "can_compile", lambda: has_compiler)
    monkeypatch.setattr(int4, "compiled", lambda formula: used.append(formula) or formula)

    CODEC.decode(CODEC.encode(torch.zeros(numel)), numel)

    assert used == ([quantise, dequantise] if is_compiled else [])


def test_without_a_compiler_it_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(int4.shutil, "which", lambda name: None)
    fresh = can_compile.__wrapped__

    with caplog.at_level("INFO", logger="diloco.compression.int4"):
        assert not fresh()

    assert "eagerly" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.timeout(120)
def test_a_gpu_gives_the_same_bytes_eager_and_compiled() -> None:
    blocks = adversarial()
    expected = quantise(blocks)
    scales = expected[1].view(torch.bfloat16).float()
    values = dequantise(scales, expected[2])

    for encode, decode in (
        (quantise, dequantise),
        (compiled(quantise), compiled(dequantise)),
    ):
        for got, wanted in zip(encode(blocks.cuda()), expected, strict=True):
            assert torch.equal(got.cpu(), wanted)
        assert torch.equal(decode(scales.cuda(), expected[2].cuda()).cpu(), values)
