"""Lanes that stay on CUDA: streams of two threads, reused memory, and the bytes of a CPU."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from diloco.compression.base import from_bytes, to_bytes
from diloco.compression.error_feedback import encode_with_feedback
from diloco.compression.registry import get_codec
from diloco.device_thread import launched, take_stream
from diloco.io_thread import IoThread
from diloco.island.lanes.parameters import tensor_specs
from diloco.island.lanes.shards import LaneShards
from diloco.outer.pseudo_gradient import pseudo_gradient_
from diloco.versions.publication import apply_payload
from tests.island.test_shards import awkward_plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

NUM_ROUNDS = 10
CODEC = get_codec("int4")


class Sender:
    """What an IO thread does with lanes: encodes their change, and takes it as published."""

    def __init__(self, anchor: dict[int, Tensor]) -> None:
        self.anchor = anchor
        self.residual = {lane_id: torch.zeros_like(lane) for lane_id, lane in anchor.items()}
        self.sent: list[memoryview] = []
        self.copies: list[bytes] = []

    def send(self, local: dict[int, Tensor]) -> None:
        for lane_id, lane in local.items():
            delta = pseudo_gradient_(lane, self.anchor[lane_id])
            encoded, after = encode_with_feedback(CODEC, delta, self.residual[lane_id], 7)
            assert after is not None
            self.residual[lane_id] = after
            self.sent.append(to_bytes(encoded))
            self.copies.append(bytes(self.sent[-1]))
            payload = from_bytes(self.copies[-1]).to(lane.device)
            self.anchor[lane_id] = apply_payload(CODEC, payload, self.anchor[lane_id])
            to_bytes(self.anchor[lane_id])  # as for its digest: then the device has done it


def train(place: Callable[[Tensor], Tensor]) -> tuple[list[bytes], list[Tensor], bool]:
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
    shards.stay_with_parameters(4)
    senders = {}
    for fragment in plan.fragments:
        lanes = shards.collect(fragment.fragment_id)
        senders[fragment.fragment_id] = Sender({i: lane.clone() for i, lane in lanes.items()})
        shards.reuse(lanes)
    busy = place(torch.randn(1024, 1024))
    io = IoThread()
    io.start()
    try:
        io.post(take_stream, shards.device)
        for number in range(NUM_ROUNDS):
            for p, sender in senders.items():
                for _ in range(number % 4):
                    busy = torch.tanh(busy @ busy)
                with torch.no_grad():
                    for parameter in parameters.values():
                        parameter.mul_(1.01).add_(0.003)
                local = shards.collect(p)
                io.post(launched(shards.device))
                io.post(sender.send, local)
                io.post(shards.reuse, local)
            io.run(asyncio.sleep(0))  # after what was posted
            for p, sender in senders.items():
                shards.distribute(p, sender.anchor, 0.5)
    finally:
        io.stop()
    sent = [bytes(payload) for sender in senders.values() for payload in sender.sent]
    kept = [payload for sender in senders.values() for payload in sender.copies]
    is_intact = sent == kept
    return kept, [parameter.detach().cpu() for parameter in parameters.values()], is_intact


def test_lanes_that_stay_on_cuda_give_the_bytes_and_values_of_a_cpu() -> None:
    expected, values, _ = train(torch.clone)

    payloads, ours, is_intact = train(lambda value: value.cuda())

    assert is_intact, "a later send wrote over bytes that somebody still reads"
    assert payloads == expected
    assert all(torch.equal(a, b) for a, b in zip(ours, values, strict=True))


def test_lanes_stay_where_the_parameters_are_if_there_is_room() -> None:
    parameters = {"a": torch.zeros(300, device="cuda").requires_grad_()}
    shards = LaneShards(awkward_plan(tensor_specs(parameters)), parameters, group=None)
    assert shards.device.type == "cpu"

    shards.stay_with_parameters(4)
    assert shards.device == parameters["a"].device

    shards.stay_with_parameters(1 << 40)
    assert shards.device.type == "cpu"
