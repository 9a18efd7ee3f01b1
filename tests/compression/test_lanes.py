"""Codecs by name of the tensor: which runs of a lane have which, and what they are together."""

import pytest
import torch

from diloco.compression import lanes
from diloco.compression.added import AddedCodec
from diloco.compression.error_feedback import encode_with_feedback
from diloco.compression.lanes import check_patterns, lane_codec, lane_part
from diloco.compression.registry import CODECS, get_codec
from diloco.errors import CodecError, ConfigError
from diloco.outer.fragments import TensorSpec, make_plan

#: Offsets 0, 128, 16640, 16896; 33280 values.
FRAGMENT = make_plan(
    [
        TensorSpec("a.norm.weight", (100,)),
        TensorSpec("a.weight", (129, 128)),
        TensorSpec("b.bias", (200,)),
        TensorSpec("b.weight", (128, 128)),
    ],
    num_fragments=1,
    num_lanes=2,
).fragments[0]
NAME = "int4 *norm.weight=float32 *.bias=bfloat16"


def values(lane_id: int, seed: int = 0) -> torch.Tensor:
    numel = FRAGMENT.lanes[lane_id].numel
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def test_a_lane_is_the_runs_of_its_tensors_in_order() -> None:
    first, second = (lane_codec(NAME, FRAGMENT, lane_id) for lane_id in (0, 1))
    x = values(0)

    # Lanes are 16,640 values each: 128 of the norm, then a.weight; the bias, padded, and b.weight.
    assert [lane.numel for lane in FRAGMENT.lanes] == [16640, 16640]
    assert first.wire_bytes(16640) == 4 * 128 + 129 * 66
    assert second.wire_bytes(16640) == 2 * 256 + 128 * 66
    expected = (get_codec("float32").encode(x[:128]), get_codec("int4").encode(x[128:]))
    assert torch.equal(first.encode(x), torch.cat(expected))
    decoded = first.decode(first.encode(x), 16640)
    assert torch.equal(decoded[:128], x[:128])
    assert torch.equal(decoded[128:], get_codec("int4").decode(expected[1], 16512))


@pytest.mark.parametrize("name", ["", "  "])
def test_a_name_without_a_codec_is_refused_as_one_that_there_is_not(name: str) -> None:
    with pytest.raises(ConfigError, match=f"codec '{name}' of fragment 0 names no codec"):
        lane_codec(name, FRAGMENT, 0)


def test_the_first_pattern_that_matches_counts() -> None:
    codec = lane_codec("int4 a.norm*=float16 *norm*=float32", FRAGMENT, 0)

    assert codec.wire_bytes(16640) == 2 * 128 + 129 * 66


@pytest.mark.parametrize("name", ["int4", "int4 c.*=float32", "int4 *=int4", "float32 *=int4"])
def test_a_lane_of_one_codec_is_that_codec(name: str) -> None:
    assert lane_codec(name, FRAGMENT, 0) is get_codec("int4")


def test_a_bracket_in_a_pattern_is_a_bracket() -> None:
    specs = [TensorSpec("a[0].w", (128,)), TensorSpec("a0.w", (128,))]
    fragment = make_plan(specs, num_fragments=1, num_lanes=1).fragments[0]

    codec = lane_codec("int4 a[0].*=float32", fragment, 0)

    assert [entry.name for entry in fragment.entries] == ["a0.w", "a[0].w"]
    assert codec.wire_bytes(256) == 66 + 4 * 128
    assert torch.equal(codec.decode(codec.encode(x := torch.randn(256)), 256)[128:], x[128:])
    with pytest.raises(ConfigError, match="matches no parameter"):
        check_patterns("int4 [ab]0*=float32", ["a0.w"])


@pytest.mark.parametrize("name", ["int2", "int4 *norm*=int2 *bias=int2", "int2 *norm*=float32"])
@pytest.mark.parametrize("lane_id", [0, 1])
def test_padding_stays_zero_whatever_the_codec(name: str, lane_id: int) -> None:
    codec, lane = lane_codec(name, FRAGMENT, lane_id), FRAGMENT.lanes[lane_id]
    is_padding = torch.ones(FRAGMENT.padded_numel, dtype=torch.bool)
    for entry in FRAGMENT.entries:
        is_padding[entry.offset : entry.offset + entry.end - entry.start] = False
    is_padding = is_padding[lane.start : lane.end]
    x = values(lane_id).masked_fill_(is_padding, 0.0)

    decoded = codec.decode(codec.encode(x), lane.numel)

    assert is_padding.any()
    assert not decoded[is_padding].any()
    assert decoded[~is_padding].count_nonzero() > 0.8 * (~is_padding).sum()


def test_neighbours_of_one_codec_are_one_run() -> None:
    codec = lane_codec("int4 a.*=topk64", FRAGMENT, 0)

    # One run of 16,640 values has 5 chunks, two of 128 and 16,512 would have 6.
    assert codec.wire_bytes(16640) == 5 * 116


@pytest.mark.parametrize("matrices", CODECS)
@pytest.mark.parametrize("vectors", ["float32", "bfloat16", "topk64"])
def test_error_feedback_and_refusals_work_for_every_mixture(matrices: str, vectors: str) -> None:
    codec = lane_codec(f"{matrices} *norm*={vectors} *bias={vectors}", FRAGMENT, 1)
    x, residual = values(1), values(1, 1) * 0.1

    payload, after = encode_with_feedback(codec, x, residual, key=3)

    assert payload.shape == (codec.wire_bytes(16640),)
    assert after is not None
    assert torch.equal(after, (x + residual) - codec.decode(payload, 16640))
    assert codec.publishes_values == (matrices == vectors == "float32")
    with pytest.raises(CodecError, match=f"16640 values must be {codec.wire_bytes(16640)} bytes"):
        codec.decode(payload[:-1], 16640)
    x[16639] = float("nan")
    with pytest.raises(CodecError, match="met nan at element"):
        codec.encode(x)


PLACES = [(0, 1), (0, 16640), (127, 129), (4095, 12289), (4096, 8192), (16500, 16640), (300, 301)]


@pytest.mark.parametrize("name", [*CODECS, NAME, "topk64 *norm*=int2 a.weight=bfloat16"])
@pytest.mark.parametrize("lane_id", [0, 1])
def test_a_part_decodes_to_the_slice_of_the_whole(name: str, lane_id: int) -> None:
    codec = lane_codec(name, FRAGMENT, lane_id)
    payload = codec.encode(values(lane_id))
    whole = torch.zeros(16640)  # without what is zeroed of padding
    for entry in FRAGMENT.entries:
        begin = max(0, entry.offset - FRAGMENT.lanes[lane_id].start)
        end = entry.offset + entry.end - entry.start - FRAGMENT.lanes[lane_id].start
        whole[begin : max(end, begin)] = codec.decode(payload, 16640)[begin : max(end, begin)]

    for start, end in PLACES:
        part = lane_part(name, FRAGMENT, lane_id, slice(start, end))
        coded = torch.cat([payload[place] for place in part.payload])
        decoded = part.codec.decode(coded, part.values.stop - part.values.start)

        assert part.values.start <= start < end <= part.values.stop
        assert part.values.stop - part.values.start <= end - start + 2 * 4095
        is_value = whole[part.values] != 0
        assert torch.equal(decoded[is_value], whole[part.values][is_value])


def test_a_part_of_another_packages_codec_is_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    added = AddedCodec(get_codec("int4"), "int4 of acme 1.0")
    monkeypatch.setattr(lanes, "get_codec", lambda name: added)

    part = lane_part("acme", FRAGMENT, 0, slice(5, 6))

    assert (part.values, part.payload) == (slice(0, 16640), (slice(0, 130 * 66),))
    assert part.codec is added


def test_runs_of_a_stochastic_codec_draw_apart() -> None:
    codec = lane_codec("int4-stochastic a.weight=float32", FRAGMENT, 0)
    other = lane_codec("float32 *norm*=int4-stochastic", FRAGMENT, 0)
    whole = lane_codec("int4-stochastic", FRAGMENT, 0)
    x = values(0)

    assert torch.equal(codec.encode(x, 1)[:66], other.encode(x, 1)[:66])
    assert not torch.equal(codec.encode(x, 1)[:66], codec.encode(x, 2)[:66])
    assert not torch.equal(codec.encode(x, 1)[:66], whole.encode(x, 1)[:66])


def test_an_unknown_codec_is_refused() -> None:
    for name in ("int3", "int4 *=int3"):
        with pytest.raises(ConfigError, match="codec 'int3' is unknown"):
            lane_codec(name, FRAGMENT, 0)


def test_a_pattern_without_a_parameter_is_refused_with_those_there_are() -> None:
    names = [entry.name for entry in FRAGMENT.entries]
    check_patterns(NAME, names)

    with pytest.raises(
        ConfigError, match=r"'\*nrm\*=float32' matches no parameter.*a.norm.weight,"
    ):
        check_patterns("int4 *nrm*=float32", names)


def test_a_mixture_is_checked_run_by_run() -> None:
    codec = lane_codec(NAME, FRAGMENT, 1)
    payload = codec.encode(values(1))
    codec.check(payload, 16640)
    for place in (0, 2 * 256):  # bits of a bfloat16 and of an int4 scale, each infinite or NaN
        damaged = payload.clone()
        damaged[place : place + 2] = 0xFF
        for refuse in (codec.check, codec.decode):
            with pytest.raises(CodecError):
                refuse(damaged, 16640)
