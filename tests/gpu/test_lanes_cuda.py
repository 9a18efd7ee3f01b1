"""Lanes computed on CUDA, kept there or in pinned memory: streams, reuse, and a CPU's bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from diloco.compression.base import from_bytes, to_bytes
from diloco.compression.error_feedback import encode_with_feedback
from diloco.compression.registry import get_codec
from diloco.device_thread import DeviceThread, launched, take_stream
from diloco.io_thread import IoThread
from diloco.island.lanes.parameters import tensor_specs
from diloco.island.lanes.place import LanePlace
from diloco.island.lanes.shards import LaneShards
from diloco.outer.pseudo_gradient import pseudo_gradient_
from diloco.versions.publication import apply_payload
from tests.island.test_shards import awkward_plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

NUM_ROUNDS = 10
#: Cycles of a device that has nothing else to do for about a second.
LONG = 2_000_000_000
CODEC = get_codec("int4")


class Sender:
    """What an IO thread does with lanes: encodes their change, and takes it as published."""

    def __init__(self, anchor: dict[int, Tensor], place: LanePlace) -> None:
        self.place = place
        self.anchor = {i: place.copied(lane) for i, lane in anchor.items()}
        self.residual = {i: place.copied(torch.zeros_like(lane)) for i, lane in anchor.items()}
        self.sent: list[memoryview] = []
        self.copies: list[bytes] = []

    def send(self, local: dict[int, Tensor]) -> None:
        for lane_id, lane in local.items():
            anchor, residual = map(self.place.there, (self.anchor[lane_id], self.residual[lane_id]))
            delta = pseudo_gradient_(lane, anchor)
            encoded, after = encode_with_feedback(CODEC, delta, residual, 7)
            assert after is not None
            self.residual[lane_id] = self.place.kept(after)
            self.sent.append(to_bytes(encoded))
            self.copies.append(bytes(self.sent[-1]))
            payload = from_bytes(self.copies[-1]).to(lane.device)
            published = self.place.kept(apply_payload(CODEC, payload, anchor))
            self.anchor = {**self.anchor, lane_id: published}


def train(
    place: Callable[[Tensor], Tensor], *, is_apart: bool = False
) -> tuple[list[bytes], list[Tensor], bool]:
    """Send and merge while the training thread keeps its stream busy.

    Returns:
        Payloads as they were made; parameters; whether nobody wrote over a payload since.
    """
    generator = torch.Generator().manual_seed(3)
    values = {
        "a": torch.randn(300, generator=generator),
        "b": torch.randn(70, 1100, generator=generator),
    }
    parameters = {name: place(value).requires_grad_() for name, value in values.items()}
    plan = awkward_plan(tensor_specs(parameters))
    shards = LaneShards(plan, parameters, group=None)
    shards.find_room(4)
    if is_apart:
        shards.place = LanePlace(shards.device, is_apart=True, thread=DeviceThread("apart"))
    senders = {}
    for fragment in plan.fragments:
        lanes = shards.collect(fragment.fragment_id)
        senders[fragment.fragment_id] = Sender(lanes, shards.place)
        shards.reuse(lanes)
    busy = place(torch.randn(1024, 1024))
    io = IoThread()
    io.start()
    try:
        io.post(take_stream, shards.device)
        for number in range(NUM_ROUNDS):
            sending = []
            for p, sender in senders.items():
                for _ in range(number % 4):
                    busy = torch.tanh(busy @ busy)
                with torch.no_grad():
                    for parameter in parameters.values():
                        parameter.mul_(1.01).add_(0.003)
                local = shards.collect(p)
                io.post(launched(shards.device))
                send = functools.partial(sender.send, local)
                sending.append((local, io.begin(shards.place.run(send))))
            for local, sent in sending:
                sent.result()
                shards.reuse(local)
            for p, sender in senders.items():
                if (number + p) % 2:
                    shards.prefetch(p, sender.anchor)
                shards.distribute(p, sender.anchor, 0.5)
    finally:
        io.stop()
    sent = [bytes(payload) for sender in senders.values() for payload in sender.sent]
    kept = [payload for sender in senders.values() for payload in sender.copies]
    is_intact = sent == kept
    return kept, [parameter.detach().cpu() for parameter in parameters.values()], is_intact


@pytest.mark.parametrize("is_apart", [False, True], ids=["kept-there", "kept-on-the-host"])
def test_lanes_computed_on_cuda_give_the_bytes_and_values_of_a_cpu(is_apart: bool) -> None:
    expected, values, _ = train(torch.clone)

    payloads, ours, is_intact = train(lambda value: value.cuda(), is_apart=is_apart)

    assert is_intact, "a later send wrote over bytes that somebody still reads"
    assert payloads == expected
    assert all(torch.equal(a, b) for a, b in zip(ours, values, strict=True))


def test_lanes_are_where_the_parameters_are_as_far_as_there_is_room() -> None:
    parameters = {"a": torch.zeros(300, device="cuda").requires_grad_()}
    shards = LaneShards(awkward_plan(tensor_specs(parameters)), parameters, group=None)
    assert shards.device.type == "cpu"

    for num_vectors, is_apart in ((4, False), (1 << 40, True)):
        shards.find_room(num_vectors)
        assert (shards.device, shards.place.is_apart) == (parameters["a"].device, is_apart)


def test_lanes_in_pinned_memory_are_merged_without_waiting_for_the_device() -> None:
    parameters = {"a": torch.zeros(1 << 20, device="cuda").requires_grad_()}
    plan = awkward_plan(tensor_specs(parameters))
    shards = LaneShards(plan, parameters, group=None)
    shards.place = LanePlace(parameters["a"].device, is_apart=True)
    lanes = {
        lane.lane_id: shards.place.copied(torch.full((lane.numel,), 3.0))
        for lane in plan.fragments[0].lanes
    }
    assert all(lane.is_pinned() for lane in lanes.values())
    numels = {lane.data_ptr(): lane.numel() for lane in lanes.values()}
    shards.distribute(0, lanes, 0.5)  # takes what memory it needs

    torch.cuda._sleep(LONG)
    with torch.cuda.stream(shards._side._stream):  # else lanes are copied before they are dropped
        torch.cuda._sleep(LONG)
    shards.prefetch(0, lanes)
    shards.distribute(0, lanes, 0.0)
    lanes.clear()
    others = [shards.place.copied(torch.zeros(numel)) for numel in numels.values()]

    assert not torch.cuda.current_stream().query(), "the training thread has waited"
    assert numels.keys().isdisjoint(each.data_ptr() for each in others), "used before it is copied"
    assert set(parameters["a"].tolist()) == {0.0, 3.0}
