from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch._dynamo.utils
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from diloco.compression import compiled as compiling
from diloco.compression.blocks import BLOCK_NUMEL, BlockCodec
from diloco.compression.compiled import COMPILE_NUMEL, can_compile, compiled
from diloco.compression.levels import E2M1, E3M0, INT2, INT4, INT8, Levels
from diloco.compression.packing import unpack
from diloco.compression.random_bits import key_tensor
from diloco.compression.registry import CODECS
from diloco.errors import CodecError

FORMATS = {"int8": INT8, "int4": INT4, "e2m1": E2M1, "e3m0": E3M0, "int2": INT2}
BLOCK_CODECS = {name: codec for name, codec in CODECS.items() if isinstance(codec, BlockCodec)}
LEVELS = {name: FORMATS[name.removesuffix("-stochastic")] for name in BLOCK_CODECS}
NEAREST = {name: codec for name, codec in BLOCK_CODECS.items() if name in FORMATS}
STOCHASTIC = {name: codec for name, codec in BLOCK_CODECS.items() if name not in FORMATS}
COMPILED_SLOWLY = ("e2m1", "int4-stochastic", "e3m0-stochastic")
each_codec = pytest.mark.parametrize("codec", BLOCK_CODECS.values(), ids=BLOCK_CODECS)
each_nearest = pytest.mark.parametrize("codec", NEAREST.values(), ids=NEAREST)
each_stochastic = pytest.mark.parametrize("codec", STOCHASTIC.values(), ids=STOCHASTIC)

CODEC = BLOCK_CODECS["int4"]
LARGEST = torch.finfo(torch.float32).max
#: The largest float32 that makes a zero block.
BELOW = float(np.nextafter(np.float32(2.0**-100), np.float32(0)))


def key_of(codec: BlockCodec, device: str = "cpu") -> Tensor | None:
    """A key for a codec that wants one."""
    return key_tensor(1 << 63 | 77, torch.device(device)) if codec.name in STOCHASTIC else None


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


def reference(levels: Levels, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The formula of the module's docstring in float64 and numpy: float32 scales, float codes."""
    largest = blocks.abs().amax(dim=1)
    quotient = largest.numpy() * np.float32(1 / levels.largest)
    mantissa, exponent = np.frexp(quotient.astype(np.float64))  # in [1/2, 1)
    unit = 2.0**levels.scale_bits
    bound = np.float64(LARGEST) / levels.largest
    rounded = np.ldexp(np.rint(mantissa * unit) / unit, exponent)
    is_over = rounded > bound
    rounded[is_over] = np.ldexp(np.floor(mantissa * unit) / unit, exponent)[is_over]
    rounded = np.minimum(rounded, 2.0**126)  # whose reciprocal is no denormal
    scales = np.where(largest < 2.0**-100, 1.0, rounded).astype(np.float32)
    reciprocals = np.float32(1) / scales
    position = levels.position(torch.from_numpy(blocks.numpy() * reciprocals[:, None]))
    return torch.from_numpy(scales), torch.round(position)


def unpacked(codec: BlockCodec, packed: Tensor) -> Tensor:
    levels = LEVELS[codec.name]
    return unpack(packed, levels.bits).flatten(1).float() - (1 << (levels.bits - 1))


def read_scales(codec: BlockCodec, bits: Tensor) -> Tensor:
    """Scales as they were before the wire; a scale of 0, int2's mark of a zero block, as it is."""
    shift = 24 - LEVELS[codec.name].scale_bits
    return ((bits.to(torch.int32) & 0xFFFF) << shift).view(torch.float32)


@each_nearest
def test_it_is_the_reference_formula(codec: BlockCodec) -> None:
    blocks, levels = adversarial(), LEVELS[codec.name]
    scales, k = reference(levels, blocks)

    largest, bits, packed = codec.quantise(blocks, None)

    assert torch.equal(largest, blocks.abs().amax(dim=1))
    sent = scales if levels.has_zero else torch.where(largest < 2.0**-100, 0.0, scales)
    assert torch.equal(read_scales(codec, bits), sent)
    assert torch.equal(unpacked(codec, packed), k)
    values, smallest = codec.dequantise(sent, packed)
    assert torch.equal(values, sent[:, None] * levels.level(k))
    assert smallest == k.min() == -(1 << (levels.bits - 1)) + levels.has_zero


@each_codec
def test_the_largest_magnitude_of_a_block_has_the_largest_level(codec: BlockCodec) -> None:
    blocks, levels = adversarial(), LEVELS[codec.name]
    is_zero = blocks.abs().amax(dim=1) < 2.0**-100

    _, bits, packed = codec.quantise(blocks, key_of(codec))

    found = levels.level(unpacked(codec, packed)).abs().amax(dim=1)
    if codec.name in NEAREST:
        assert (found[~is_zero] == levels.largest).all()
    if levels.has_zero:
        assert not found[is_zero].any()
    else:
        assert not read_scales(codec, bits)[is_zero].any()


@pytest.mark.parametrize("name", ["int8", "int4", "int2"])
def test_no_value_is_off_by_more_than_half_a_step(name: str) -> None:
    codec, levels, blocks = BLOCK_CODECS[name], LEVELS[name], adversarial()
    _, bits, packed = codec.quantise(blocks, None)
    scales = read_scales(codec, bits)

    error = (blocks.double() - codec.dequantise(scales, packed)[0].double()).abs().amax(dim=1)

    # The level is the nearest to x * (1 / scale), which two roundings, and one more of the
    # position, put off by at most 2^-22 of `largest` (1 + 2^-8) scales; the product is exact. Zero
    # blocks lose all; beyond the largest scale the largest level is short by 2^-7 of it.
    is_zero = blocks.abs().amax(dim=1) < 2.0**-100
    half_a_step = 0.5 if levels.has_zero else 1.0
    bound = scales.double() * (half_a_step + levels.largest * 1.01 * 2.0**-22)
    bound = torch.where(blocks.abs().amax(dim=1) > 0.98 * LARGEST, 1.02 * bound, bound)
    assert (error <= torch.where(is_zero, 2.0**-100, bound)).all()


@each_codec
def test_a_product_of_scale_and_level_is_exact(codec: BlockCodec) -> None:
    _, bits, packed = codec.quantise(adversarial(), key_of(codec))
    scales = read_scales(codec, bits)

    values, _ = codec.dequantise(scales, packed)

    levels = LEVELS[codec.name].level(unpacked(codec, packed))
    exact = scales.double()[:, None] * levels.double()
    assert values.isfinite().all()
    assert torch.equal(values.double(), exact)
    # So a fused multiply-add onto an anchor rounds once, as does the sum of the rounded product.
    anchor = torch.randn(values.shape, generator=torch.Generator().manual_seed(1))
    assert torch.equal(anchor + values, (anchor.double() + exact).float())


@each_stochastic
def test_stochastic_rounding_gives_the_value_on_average(codec: BlockCodec) -> None:
    values = torch.linspace(-1.0, 1.0, 256)
    values[:2] = torch.tensor([-1.0, 1.3])  # what is exact, and a scale of many bits

    total = torch.zeros(256, dtype=torch.float64)
    for key in range(400):
        total += codec.decode(codec.encode(values, key), 256)

    # A value between two levels d apart has a standard deviation of d / 2 at most, d being at most
    # half the largest level; the mean of n one of d / (2 sqrt(n)), and none of 256 is off by five.
    step = 1 / 7 if codec.name == "int4-stochastic" else 1 / 2
    bound = 5 * step * 1.3 * 1.01 / 2 / 400**0.5
    assert (total / 400 - values).abs().max() <= bound


@each_stochastic
def test_stochastic_rounding_takes_the_level_above_or_below(codec: BlockCodec) -> None:
    blocks, levels = adversarial(), LEVELS[codec.name]

    _, bits, packed = codec.quantise(blocks, key_of(codec))

    scales = read_scales(codec, bits)
    kept = (scales > 0) & (blocks.abs().amax(dim=1) < 0.98 * LARGEST)
    position = levels.position(blocks[kept] / scales[kept, None])
    borders = levels.position(torch.tensor([-levels.largest, levels.largest]))
    assert borders[0] - 1e-5 <= position.min() <= position.max() <= borders[1] + 1e-5
    assert ((unpacked(codec, packed)[kept] - position).abs() < 1 + 1e-5).all()


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


@pytest.mark.parametrize(
    ("name", "byte"),
    [("int8", 0x00), ("e2m1", 0x08), ("e3m0", 0x80), ("int4-stochastic", 0x00)],
)
def test_a_code_without_a_level_is_refused(name: str, byte: int) -> None:
    codec = BLOCK_CODECS[name]
    payload = codec.encode(torch.ones(128))
    payload[40] = byte

    with pytest.raises(CodecError, match=f"{name} payload has a code of -(8|128)"):
        codec.decode(payload, 128)


def test_a_scale_of_zero_is_int2s_mark_of_a_zero_block_only() -> None:
    for name, codec in BLOCK_CODECS.items():
        payload = codec.encode(torch.ones(128))
        payload[:2] = 0
        if name == "int2":
            assert not codec.decode(payload, 128).any()
        else:
            with pytest.raises(CodecError, match=r"the scale 0\.0"):
                codec.decode(payload, 128)


# Inductor's own imports use deprecated parts of torch.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.timeout(180)
@pytest.mark.skipif(not can_compile(), reason="no C++ compiler or no Python headers")
@pytest.mark.parametrize(
    "codec",
    [
        # Every format, and both roundings, in the default suite: each compiles for seconds.
        pytest.param(codec, marks=[pytest.mark.slow] if name in COMPILED_SLOWLY else [], id=name)
        for name, codec in BLOCK_CODECS.items()
    ],
)
def test_compiled_formulas_give_the_same_bytes(
    codec: BlockCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, key = adversarial(), key_of(codec)
    torch._dynamo.utils.counters.clear()

    for part in (blocks, blocks[5:8], blocks[100:2000]):
        largest, bits, packed = codec.quantise(part, key)
        scales = read_scales(codec, bits)

        fast = compiled(codec.quantise)(part, key)
        for got, expected in zip(fast, (largest, bits, packed), strict=True):
            assert torch.equal(got, expected)
        again = compiled(codec.dequantise)(scales, packed)
        for got, expected in zip(again, codec.dequantise(scales, packed), strict=True):
            assert torch.equal(got, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert not torch._dynamo.utils.counters["graph_break"], "each formula is one graph"

    # The same through the codec, with a partial block and from an odd address.
    values = blocks.flatten()[:-3]
    payload = codec.encode(values, 5)
    decoded = codec.decode(payload, len(values))
    prepared = {(f, "cpu"): compiled(f) for f in (codec.quantise, codec.dequantise)}
    monkeypatch.setattr(compiling, "_prepared", prepared)
    monkeypatch.setattr(compiling, "COMPILE_NUMEL", 2 * 128)
    shifted = torch.cat((payload[:1], payload))[1:]
    assert torch.equal(codec.encode(values, 5), payload)
    assert torch.equal(codec.decode(payload, len(values)), decoded)
    assert torch.equal(codec.decode(shifted, len(values)), decoded)

    payload[-10] = 0
    if LEVELS[codec.name].has_zero:
        with pytest.raises(CodecError, match="a code of -"):
            codec.decode(payload, len(values))
    values[1000] = float("nan")
    with pytest.raises(CodecError, match="met nan at element 1000"):
        codec.encode(values)


@pytest.mark.parametrize(
    ("numel", "is_warm", "is_compiled"),
    [
        pytest.param(COMPILE_NUMEL, True, True, id="large"),
        pytest.param(COMPILE_NUMEL - 128, True, False, id="small"),
        pytest.param(COMPILE_NUMEL, False, False, id="not warmed up"),
    ],
)
def test_large_vectors_are_compiled_once_warmed_up(
    monkeypatch: pytest.MonkeyPatch, numel: int, is_warm: bool, is_compiled: bool
) -> None:
    used = []

    def compiled_(formula: Callable[..., object]) -> Callable[..., object]:
        return lambda *operands: used.append(formula) or formula(*operands)

    monkeypatch.setattr(compiling, "_prepared", {})
    monkeypatch.setattr(compiling, "compiled", compiled_)
    if is_warm:
        assert CODEC.warm_up()
    assert CODEC.is_warm() == is_warm
    used.clear()

    CODEC.decode(CODEC.encode(torch.zeros(numel)), numel)

    assert used == ([CODEC.quantise, CODEC.dequantise] if is_compiled else [])


def test_a_compiler_that_fails_leaves_codecs_eager_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*operands: Tensor) -> None:
        raise RuntimeError("g++ was killed\nand more")

    monkeypatch.setattr(compiling, "_prepared", {})
    monkeypatch.setattr(compiling, "compiled", lambda formula: broken)
    values = torch.linspace(-1, 1, COMPILE_NUMEL)
    expected = CODEC.encode(values)

    assert not CODEC.warm_up()

    assert "compiling failed: g++ was killed; mend" in caplog.text
    assert CODEC.is_warm()  # it is not tried again
    assert torch.equal(CODEC.encode(values), expected)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_a_compiler_it_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, device: str
) -> None:
    monkeypatch.setattr(compiling.shutil, "which", lambda name: None)
    monkeypatch.setattr(compiling, "has_triton", lambda: True)
    fresh = can_compile.__wrapped__

    with caplog.at_level("INFO", logger="diloco.compression.compiled"):
        assert not fresh(device)

    assert "eagerly" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not can_compile("cuda"), reason="no CUDA device, or nothing compiles for it")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.timeout(120)
@each_codec
def test_a_gpu_gives_the_same_bytes_eager_and_compiled(codec: BlockCodec) -> None:
    blocks = adversarial()
    expected = codec.quantise(blocks, key_of(codec))
    scales = read_scales(codec, expected[1])
    values = codec.dequantise(scales, expected[2])

    for encode, decode in (
        (codec.quantise, codec.dequantise),
        (compiled(codec.quantise), compiled(codec.dequantise)),
    ):
        for got, wanted in zip(encode(blocks.cuda(), key_of(codec, "cuda")), expected, strict=True):
            assert torch.equal(got.cpu(), wanted)
        for got, wanted in zip(decode(scales.cuda(), expected[2].cuda()), values, strict=True):
            assert torch.equal(got.cpu(), wanted)


@each_codec
def test_tiles_of_an_eager_formula_give_the_same_bytes(
    codec: BlockCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.randn(11 * BLOCK_NUMEL + 7, generator=torch.Generator().manual_seed(3))
    whole = codec.encode(values, 2**64 - 5)  # its low half overflows within the vector
    expected = codec.decode(whole, values.numel())

    monkeypatch.setattr("diloco.compression.blocks._TILE", 2)

    assert torch.equal(codec.encode(values, 2**64 - 5), whole)
    assert torch.equal(codec.decode(whole, values.numel()), expected)
    values[5 * BLOCK_NUMEL] = torch.nan
    with pytest.raises(CodecError, match="nan at element 640"):
        codec.encode(values)


@pytest.mark.gpu
@pytest.mark.skipif(not can_compile("cuda"), reason="no CUDA device, or nothing compiles for it")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.timeout(120)
@each_codec
def test_a_warm_codec_sends_the_same_bytes_from_a_gpu(
    codec: BlockCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = adversarial().flatten()[:-3]
    payload = codec.encode(values, 5)
    decoded = codec.decode(payload, len(values))
    monkeypatch.setattr(compiling, "_prepared", {})
    monkeypatch.setattr(compiling, "COMPILE_NUMEL", 2 * 128)

    assert codec.warm_up("cuda")

    assert torch.equal(codec.encode(values.cuda(), 5).cpu(), payload)
    assert torch.equal(codec.decode(payload.cuda(), len(values)).cpu(), decoded)
