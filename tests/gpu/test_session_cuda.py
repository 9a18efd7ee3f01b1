"""`DiLoCo` on parameters of an accelerator: read and written where they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import diloco
from diloco.island.lanes.parameters import tensor_specs
from diloco.island.lanes.shards import LaneShards
from tests.island.test_session import INNER_STEPS, TOKENS, make_model, make_optimizer
from tests.island.test_shards import awkward_plan
from tests.served_run import ServedRun

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_parameters_on_cuda_hold_what_was_published(tmp_path: Path) -> None:
    model = make_model().cuda()
    optimizer = make_optimizer(model)
    with ServedRun(tmp_path, {"east": ""}, inner_steps=INNER_STEPS) as served:
        config = served.island("east")
        with diloco.connect(config, served.address) as connection:
            outer = diloco.DiLoCo(model, config.outer, transport=connection)
            for _ in range(INNER_STEPS):
                model(torch.randn(16, 8, device="cuda")).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                outer.step(num_tokens=TOKENS)
            outer.finish()
            flushed = [parameter.detach().clone() for parameter in model.parameters()]
            with outer.global_parameters():
                pairs = zip(model.parameters(), flushed, strict=True)
                assert all(a.is_cuda and torch.equal(a, b) for a, b in pairs)
    assert outer.versions == (3, 2)


def test_what_was_prefetched_is_merged_as_what_was_not() -> None:
    here = {"a": torch.randn(300).requires_grad_(), "b": torch.randn(7, 110).requires_grad_()}
    there = {name: value.detach().cuda().requires_grad_() for name, value in here.items()}
    plan = awkward_plan(tensor_specs(here))
    streamed, ahead = (LaneShards(plan, each, group=None) for each in (here, there))

    for fragment in plan.fragments:
        lanes = {lane.lane_id: torch.randn(lane.numel) for lane in fragment.lanes}
        streamed.distribute(fragment.fragment_id, lanes, 0.5)
        ahead.prefetch(fragment.fragment_id, lanes)
        busy = torch.randn(512, 512, device="cuda") @ torch.randn(512, 512, device="cuda")
        ahead.distribute(fragment.fragment_id, lanes, 0.5)

    assert busy.is_cuda
    for name, value in here.items():
        assert torch.equal(there[name].cpu(), value)
