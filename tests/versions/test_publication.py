"""From contributions to the next published version: exact, ordered, and never half done."""

from __future__ import annotations

from itertools import pairwise

import blake3
import pytest
import torch
from torch import Tensor

from diloco.compression.base import to_bytes
from diloco.compression.registry import get_codec
from diloco.errors import AggregationError, CodecError
from diloco.outer.combination import mean_of
from diloco.outer.fragments import Fragment, TensorSpec, make_plan
from diloco.outer.optimizer import OuterOptimizer
from diloco.protocol.rounds.terms import RoundKey
from diloco.versions.publication import (
    LanePublication,
    LaneState,
    PublicationRules,
    apply_payload,
    decoder_of,
    lane_blake3,
    part_decoder_of,
)
from diloco.versions.value_digest import lane_digest
from tests.remaking import publish_lane

NUMEL = 300


def fragment_of(numel: int) -> Fragment:
    """A fragment without padding."""
    return make_plan([TensorSpec("w", (numel,))], num_fragments=1, block_numel=numel).fragments[0]


NESTEROV = OuterOptimizer("nesterov", 0.7, 0.9, 0)
SGD = OuterOptimizer("sgd", 1.0, 0.0, 0)


def values(seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed)) * scale


def state(seed: int = 0) -> LaneState:
    """A lane whose theta and published differ, as they do under every codec but float32."""
    theta = values(seed)
    return LaneState(theta, theta + values(seed + 1, 1e-3), values(seed + 2, 0.1))


def encoded(codec: str, vector: Tensor) -> memoryview:
    return to_bytes(get_codec(codec).encode(vector))


def publish(
    lane: LaneState,
    deltas: list[Tensor],
    *,
    up: str = "float32",
    down: str = "float32",
    weights: list[int] | None = None,
    optimizer: OuterOptimizer = NESTEROV,
    is_flush: bool = False,
    attempt: int = 0,
) -> LanePublication:
    return publish_lane(
        lane,
        [encoded(up, delta) for delta in deltas],
        mean_of(weights or [1] * len(deltas), fragment_of(NUMEL).padded_numel),
        PublicationRules(up, down, optimizer, seed=0),
        fragment=fragment_of(lane.theta.numel()),
        lane_id=0,
        key=RoundKey(0, 0, 3, attempt),
        is_flush=is_flush,
    )


def test_theta_takes_the_outer_step_on_the_weighted_mean() -> None:
    lane = LaneState(torch.full((4,), 16.0), torch.full((4,), 16.0), torch.zeros(4))

    made = publish(lane, [torch.full((4,), 4.0), torch.full((4,), 12.0)], weights=[3, 1],
                   optimizer=OuterOptimizer("nesterov", 0.5, 0.5, 0))  # fmt: skip

    # Mean (3 * 4 + 12) / 4 = 6; buf 6; step 0.5 (6 + 0.5 * 6) = 4.5.
    assert made.state.theta.tolist() == [11.5] * 4
    assert made.state.momentum.tolist() == [6.0] * 4


def test_float32_publishes_theta_itself() -> None:
    made = publish(state(), [values(5)])

    assert made.payload == bytes(encoded("float32", made.state.theta))
    assert torch.equal(made.state.published, made.state.theta)


def test_int4_publishes_differences_and_theta_keeps_what_they_lost() -> None:
    lane = state()

    made = publish(lane, [values(5)], up="int4", down="int4")

    difference = made.state.theta - lane.published
    assert made.payload == bytes(encoded("int4", difference))
    decoded = get_codec("int4").decode(get_codec("int4").encode(difference), NUMEL)
    assert torch.equal(made.state.published, lane.published + decoded)
    assert not torch.equal(made.state.published, made.state.theta)


@pytest.mark.parametrize("codec", ["float32", "int4"])
def test_an_island_that_applies_the_payload_holds_the_published_bytes(codec: str) -> None:
    lane = state()
    made = publish(lane, [values(5)], down=codec)

    payload = torch.frombuffer(bytearray(made.payload), dtype=torch.uint8)
    staged = apply_payload(get_codec(codec), payload, lane.published)

    assert lane_digest(staged) == made.digest == lane_digest(made.state.published)


def test_what_quantisation_lost_is_in_the_next_difference() -> None:
    lane, zero = state(), torch.zeros(NUMEL)
    error = []
    for _ in range(3):
        lane = publish(lane, [zero], down="int4", optimizer=SGD).state
        error.append(float((lane.theta - lane.published).abs().max()))

    # Each publication is within half a scale of what was missing, a 14th of it (13: the scale is
    # rounded to 8 bits), and theta, below 4, is rounded to 2^-22 when the two are added.
    assert all(after <= before / 13 + 2**-22 for before, after in pairwise(error))


def test_a_flush_is_the_plain_mean_in_float32_and_leaves_momentum_alone() -> None:
    lane = state()

    made = publish(lane, [values(5), values(6)], up="int4", down="int4", is_flush=True)

    deltas = [get_codec("int4").decode(get_codec("int4").encode(values(i)), NUMEL) for i in (5, 6)]
    assert torch.equal(made.state.theta, lane.theta - (deltas[0] * 0.5 + deltas[1] * 0.5))
    assert torch.equal(made.state.published, made.state.theta)
    assert made.payload == bytes(encoded("float32", made.state.theta))
    assert torch.equal(made.state.momentum, lane.momentum)


def test_a_flush_without_tokens_moves_nothing() -> None:
    lane = state()

    made = publish(lane, [values(5), values(6)], weights=[0, 0], is_flush=True)

    assert torch.equal(made.state.theta, lane.theta)


@pytest.mark.parametrize("optimizer", [NESTEROV, SGD], ids=lambda optimizer: optimizer.name)
@pytest.mark.parametrize("down", ["float32", "int4"])
def test_a_result_that_is_not_finite_is_an_error_and_changes_nothing(
    optimizer: OuterOptimizer, down: str
) -> None:
    huge = torch.full((NUMEL,), 3e38)
    lane = LaneState(-huge, -huge, torch.zeros(NUMEL))

    with pytest.raises(AggregationError, match="not finite"):
        publish(lane, [huge], optimizer=optimizer, down=down)

    assert lane.theta[0] == -huge[0]
    assert lane.momentum[0] == 0


def test_a_difference_that_overflows_is_an_error_of_the_result() -> None:
    # theta is finite, published is finite, their difference is not.
    lane = LaneState(torch.full((4,), 3e38), torch.full((4,), -3e38), torch.zeros(4))

    with pytest.raises(AggregationError, match="change is not finite"):
        publish(lane, [torch.zeros(4)], down="int4", optimizer=SGD)


def test_a_published_value_that_overflows_is_an_error_of_the_result() -> None:
    # The difference is 7 * 2^120 less a 2048th; its scale is rounded up to 2^120, and so published
    # comes out above theta, which is the largest float32.
    largest = torch.finfo(torch.float32).max
    difference = 7 * 2.0**120 * (1 - 2.0**-11)
    lane = LaneState(torch.full((4,), largest), torch.full((4,), largest - difference),
                     torch.zeros(4))  # fmt: skip

    with pytest.raises(AggregationError, match="published is not finite"):
        publish(lane, [torch.zeros(4)], down="int4", optimizer=SGD)


def test_a_difference_beyond_the_downlink_codec_is_an_error_of_the_result() -> None:
    lane = LaneState(torch.full((4,), 1e6), torch.zeros(4), torch.zeros(4))

    with pytest.raises(AggregationError, match=r"from version 3: float16 met 1000000\.0"):
        publish(lane, [torch.zeros(4)], down="float16", optimizer=SGD)


def test_stochastic_rounding_draws_again_for_every_attempt_and_repeats_itself() -> None:
    lane, deltas = state(), [values(5)]

    made, again = (publish(lane, deltas, down="int4-stochastic") for _ in range(2))
    other = publish(lane, deltas, down="int4-stochastic", attempt=1)

    assert made.payload == again.payload
    assert made.payload != other.payload


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_payload_that_decodes_to_no_number_is_refused(value: float) -> None:
    vector = torch.zeros(NUMEL)
    vector[7] = value

    with pytest.raises(CodecError):
        decoder_of("float32", fragment_of(NUMEL), 0)(to_bytes(vector.view(torch.uint8)))


def test_a_payload_of_another_size_is_refused() -> None:
    with pytest.raises(CodecError):
        decoder_of("int4", fragment_of(NUMEL), 0)(bytes(65))


@pytest.mark.parametrize("codec", ["float32", "int2", "topk64"])
def test_a_part_of_a_contribution_is_the_slice_of_the_whole_and_padding_is_zero(codec: str) -> None:
    tensors = [TensorSpec("a", (100,)), TensorSpec("b", (9000,)), TensorSpec("c", (3,))]
    (fragment,) = make_plan(tensors, num_fragments=1, num_lanes=1).fragments
    sent = torch.randn(fragment.padded_numel, generator=torch.Generator().manual_seed(1))
    payload = encoded(codec, sent)
    whole = decoder_of(codec, fragment, 0)(payload)

    for start, end in [(0, 128), (50, 110), (100, 101), (4000, 9217), (9216, 9344)]:
        decode = part_decoder_of(codec, fragment, 0, slice(start, end))
        part = decode(payload.__getitem__)

        assert torch.equal(part, whole[start:end])
        assert part.untyped_storage().nbytes() <= 4 * (end - start) + 4 * 4096, "and no more"
    assert not whole[100:128].any() and not whole[9219:].any()


def test_a_record_has_blake3_of_each_lane_of_little_endian_float32() -> None:
    vector = torch.tensor([1.0, -2.5])

    assert lane_blake3(vector) == blake3.blake3(bytes.fromhex("0000803f000020c0")).digest()
