"""Buffers that modules declare: part of the plan, averaged in float32, never stepped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from diloco.island.lanes.parameters import canonical_parameters, tensor_specs
from diloco.outer.fragments import Plan, TensorSpec, buffer_runs, make_plan
from diloco.outer.optimizer import OuterOptimizer
from diloco.transport.calls.loopback import run_virtual
from tests.virtual_run import Setting, VirtualRun

BIAS = "layers.1.router.bias"
#: What each island adds to every bias at an inner step; sums of it are exact in float32.
DRIFT = {"a": torch.tensor([1.0, -0.5, 0.25]), "b": torch.tensor([-2.0, 0.125, 0.5])}
TOKENS = {"a": 1, "b": 3}


class Router(nn.Module):
    synchronised_buffers = ("bias",)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 2))
        self.register_buffer("bias", torch.zeros(4))
        self.register_buffer("counter", torch.zeros(4))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Router() for _ in range(2))


def test_declared_buffers_are_synchronised_and_others_are_not() -> None:
    model = Model()
    model.layers[1] = torch.compile(model.layers[1], backend="eager")

    found = canonical_parameters(model)

    assert list(found) == [f"layers.{n}.{name}" for n in range(2) for name in ("bias", "weight")]
    assert found["layers.1.bias"].data_ptr() == model.layers[1].bias.data_ptr()
    assert [spec.is_buffer for spec in tensor_specs(found)] == [True, False] * 2


def test_a_declared_name_that_is_no_buffer_is_refused() -> None:
    model = Model()
    del model.layers[0].bias

    with pytest.raises(ValueError, match=r"Router at 'layers\.0' declares 'bias'"):
        canonical_parameters(model)


SPECS = [
    TensorSpec("embed.weight", (40, 8)),
    *(TensorSpec(f"layers.{n}.attention.weight", (8, 90 - n)) for n in range(3)),
    *(TensorSpec(f"layers.{n}.router.weight", (4, 8)) for n in range(3)),
]
WITH_BUFFERS = [*SPECS, *(TensorSpec(f"layers.{n}.router.bias", (4,), True) for n in range(3))]


@pytest.mark.parametrize("pattern", ["strided", "sequential", "balanced"])
def test_a_buffer_goes_with_the_fragment_of_its_neighbour(pattern: str) -> None:
    def fragments_of(plan: Plan) -> dict[str, int]:
        return {e.name: f.fragment_id for f in plan.fragments for e in f.entries}

    plan = make_plan(WITH_BUFFERS, num_fragments=3, pattern=pattern)  # type: ignore[arg-type]
    without = make_plan(SPECS, num_fragments=3, pattern=pattern)  # type: ignore[arg-type]

    placed = fragments_of(plan)
    for n in range(3):
        assert placed[f"layers.{n}.router.bias"] == placed[f"layers.{n}.router.weight"]
    assert {name: p for name, p in placed.items() if "bias" not in name} == fragments_of(without)
    assert Plan.from_json(plan.to_json()) == plan
    assert "buffer" not in without.to_json()


def test_lanes_are_cut_into_buffers_and_parameters() -> None:
    specs = [TensorSpec("a", (130,)), TensorSpec("b", (3,), True), TensorSpec("c", (5,))]
    fragment = make_plan(specs, num_fragments=1).fragments[0]

    assert buffer_runs(fragment, 0) == (
        (slice(0, 256), False),
        (slice(256, 384), True),
        (slice(384, 512), False),
    )


def drift(island: str, inner_step: int, parameters: dict[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        if name == BIAS:
            parameter.add_(DRIFT[island])
        else:
            parameter.sub_(torch.linspace(0.01, DRIFT[island][0].item(), parameter.numel()))


@pytest.mark.parametrize("optimizer", ["nesterov", "adam"])
def test_islands_hold_the_plain_mean_of_a_buffer_after_every_round(
    tmp_path: Path, optimizer: str
) -> None:
    setting = Setting(
        {BIAS: [0.0] * 3, "layers.1.router.weight": [1.0] * 300, "layers.0.weight": [0.5] * 150},
        drift,
        tmp_path,
        inner_steps=12,
        tokens=TOKENS,
        flush=True,
        optimizer=OuterOptimizer(optimizer, 0.7, 0.9, 0),  # type: ignore[arg-type]
        uplink_codec="int4",
        downlink_codec="int4",
        buffers=(BIAS,),
    )

    islands = run_virtual(VirtualRun(setting).run())

    a, b = islands["a"], islands["b"]
    # A round is 4 steps: each adds 4 (1 * DRIFT[a] + 3 * DRIFT[b]) / 4, whatever the optimizer.
    mean = DRIFT["a"] + 3 * DRIFT["b"]
    for step in (4, 8):
        assert a.local[step - 1][BIAS] == (step // 4 * mean).tolist()
    assert a.values() == b.values()
    assert a.values()[BIAS] == (3 * mean).tolist()
