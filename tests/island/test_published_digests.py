"""At its end an island reads its parameters back: what they hold must be what was published."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from diloco.errors import IslandFailed
from diloco.island.agreement import Agreement
from diloco.island.groups import make_groups
from diloco.island.lanes.parameters import tensor_specs
from diloco.island.lanes.shards import LaneShards
from diloco.island.published_digests import stored_digests
from diloco.outer.fragments import make_plan
from diloco.transport.calls.loopback import run_virtual
from diloco.versions.store import FragmentStore
from tests.distributed import run_ranks
from tests.virtual_run import Setting, VirtualIsland, VirtualRun


def diverge(island: str, inner_step: int, parameters: dict[str, Tensor]) -> None:
    parameters["w"].sub_(1.0 if island == "a" else 2.0 + inner_step)


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(
        {"w": [10.0, 20.0]}, diverge, tmp_path, inner_steps=8, overlap_steps=1, flush=True
    )


async def started(run: VirtualRun) -> tuple[VirtualIsland, VirtualIsland]:
    await run.start_syncer()
    return run.island("a"), run.island("b")


@pytest.mark.parametrize("flush", [True, False], ids=["flush", "no flush"])
@pytest.mark.parametrize("codec", ["float32", "int4"])
def test_digests_are_those_of_the_records(setting: Setting, flush: bool, codec: str) -> None:
    run = VirtualRun(replace(setting, flush=flush, downlink_codec=codec, local_mix=0.5))

    islands = run_virtual(run.run())

    store = FragmentStore(setting.directory, setting.plan().fragments[0], 4)
    found = store.recover()
    assert found is not None and found.record.version > 0
    for island in islands.values():
        assert island.session.digests == (found.record.digest.hex(),)


@pytest.mark.parametrize("flush", [True, False], ids=["flush", "no flush"])
def test_island_whose_merges_do_not_reach_the_model_ends_with_an_error(
    setting: Setting, flush: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        run = VirtualRun(replace(setting, flush=flush))
        a, b = await started(run)
        monkeypatch.setattr(b.session._parts.shards, "distribute", lambda *_: None)
        ends = await asyncio.gather(a.run(), b.run(), return_exceptions=True)

        assert ends[0] is None and len(a.session.digests) == 1
        assert isinstance(ends[1], IslandFailed)
        assert "are not the published ones: fragments [0]" in str(ends[1])
        assert a.session.digests[0] in str(ends[1])
        assert b.session.digests == ()

    run_virtual(scenario())


def with_a_copy_that_differs(island_rank: int) -> list[Any]:
    """A TP pair: a sharded matrix, and a norm of which both ranks hold a copy."""
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(1)
    parameters: dict[str, Tensor] = {
        "matrix": distribute_tensor(torch.randn(300, 128, generator=generator), mesh, [Shard(0)]),
        "norm": distribute_tensor(torch.randn(64, generator=generator), mesh, [Replicate()]),
    }
    for parameter in parameters.values():
        parameter.requires_grad_()
    plan = make_plan(tensor_specs(parameters), num_fragments=2)
    groups = make_groups(None, patience_s=1.0)
    shards = LaneShards(plan, parameters, group=groups.shards)
    agreement = Agreement(groups.agreement)
    before = stored_digests(plan, shards, agreement)
    if island_rank == 1:
        norm = parameters["norm"]
        assert isinstance(norm, DTensor)
        with torch.no_grad():
            norm.to_local()[7] *= -1
    return [before, stored_digests(plan, shards, agreement)]


def test_a_copy_that_differs_on_one_rank_is_found_on_all() -> None:
    first, second = run_ranks(with_a_copy_that_differs, 2)

    assert first == second
    before, after = first
    assert all(before)
    assert after.count(None) == 1
    p = after.index(None)
    assert [digest for i, digest in enumerate(after) if i != p] == [
        digest for i, digest in enumerate(before) if i != p
    ]
