"""Rows of the table of layouts, trained with lanes written in between, and whole values kept.

`run_rows` trains some of one number of ranks in one process group, one after the other, and
`alone` trains what they have in common on one rank.
"""

import contextlib
import hashlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from diloco.island.lanes.parameters import canonical_parameters, tensor_specs
from diloco.island.lanes.shards import LaneShards
from diloco.outer.fragments import make_plan
from diloco.trainer.parallel.mesh import IslandMesh, make_mesh
from diloco.trainer.trainer import InnerTrainer
from tests.distributed import run_ranks
from tests.trainer.collectives import Collectives
from tests.trainer.layout_case import INNER_STEPS, Case
from tests.trainer.layouts import case_of
from tests.trainer.small_island import CPU, Array, one_rank, whole_parameters


@cache
def run_rows(rows: tuple[str, ...]) -> list[dict[str, Any]]:
    """Train rows of one number of ranks; returns, by rank, the results by name."""
    num_ranks, loads = case_of(rows[0]).num_ranks, case_of(rows[0]).loads
    seconds = 140 if loads == "compiler" else 60
    return run_ranks(_train_rows, num_ranks, list(rows), timeout_s=seconds * num_ranks)


def _train_rows(island_rank: int, rows: list[str]) -> dict[str, Any]:
    cases = map(case_of, rows)
    return {
        case.name: train(case, make_mesh(CPU, case.mesh, is_cast=case.compute.is_cast))
        for case in cases
    }


def alone(case: Case) -> dict[str, Any]:
    """Train on one rank what a row trains on several."""
    if case.what not in _ALONE:
        _ALONE[case.what] = train(case.alone, one_rank())
    return _ALONE[case.what]


_ALONE: dict[str, dict[str, Any]] = {}


def train(case: Case, mesh: IslandMesh) -> dict[str, Any]:
    """Train some steps; then write halves through the lanes, as the outer loop does, and go on."""
    trainer = case.make_trainer(mesh)
    lanes = _Lanes(trainer)
    initial = lanes.digest()
    evaluations = [trainer.evaluate()]
    metrics = [trainer.inner_step(step).read() for step in range(INNER_STEPS)]
    evaluations.append(trainer.evaluate())
    trained = whole_parameters(trainer.model)
    lanes.write(lambda values: values * 0.5)
    written = whole_parameters(trainer.model)
    evaluations.append(trainer.evaluate())
    collectives = Collectives()
    # Nothing is compiled under a dispatch mode.
    with contextlib.nullcontext() if case.is_compiled else collectives:
        metrics.append(trainer.inner_step(INNER_STEPS).read())
    return {
        "initial": initial,
        "metrics": metrics,
        "evaluations": evaluations,
        "trained": _of_all_stages(trained, mesh),
        "dtypes": {str(p.dtype) for p in canonical_parameters(trainer.model).values()},
        "halved": all(_same(written[name], value * 0.5) for name, value in trained.items()),
        "collectives": dict(collectives.counts),
    }


def _of_all_stages(values: dict[str, Array], mesh: IslandMesh) -> dict[str, Array]:
    """Put together what the ranks of a pipeline have; copies must agree."""
    if mesh.pp_group is None:
        return values
    stages = [values] * mesh.size("pp")
    dist.all_gather_object(stages, values, group=mesh.pp_group)
    merged: dict[str, Array] = {}
    for stage in stages:
        assert all(_same(merged[name], stage[name]) for name in merged.keys() & stage.keys())
        merged |= stage
    return dict(sorted(merged.items()))


class _Lanes:
    """The lanes of a trainer's parameters, as an island of any layout exchanges them."""

    def __init__(self, trainer: InnerTrainer) -> None:
        parameters = canonical_parameters(trainer.model)
        group = dist.group.WORLD if dist.is_initialized() else None
        plan = make_plan(tensor_specs(parameters, group=group), num_fragments=2, num_lanes=4)
        self._fragments = plan.fragments
        self._shards = LaneShards(plan, parameters, group=group)

    def digest(self) -> str:
        """Hash the canonical vectors of all fragments; collective, equal on all ranks."""
        content: dict[tuple[int, int], bytes] = {}
        for fragment in self._fragments:
            mine = self._shards.collect(fragment.fragment_id)
            for lane_id, lane in mine.items():
                content[fragment.fragment_id, lane_id] = lane.numpy().tobytes()
        everybody = [content]
        if dist.is_initialized():
            everybody = [content] * dist.get_world_size()
            dist.all_gather_object(everybody, content)
        whole = sorted(item for part in everybody for item in part.items())
        return hashlib.sha256(b"".join(values for _, values in whole)).hexdigest()

    def write(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for fragment in self._fragments:
            lanes = self._shards.collect(fragment.fragment_id)
            changed = {lane_id: change(lane) for lane_id, lane in lanes.items()}
            self._shards.distribute(fragment.fragment_id, changed, 0.0)


def _same(ours: Array, theirs: Array) -> bool:
    return ours.tobytes() == theirs.tobytes()
