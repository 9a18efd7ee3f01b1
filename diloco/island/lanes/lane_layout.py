"""Which rank of an island stores which box of each parameter, and which carries each lane.

All ranks find out together, and check that they were given one plan and that their boxes are a
partition of each parameter. From it come the two routes of a fragment (`routes`).
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from diloco.errors import PlanMismatch
from diloco.island.lanes.boxes import Box, are_disjoint, boxes_of_range, stored_box, whole_shape
from diloco.island.lanes.carriers import carriers_of, hosts_first
from diloco.island.lanes.parameters import dtype_problems, gathered
from diloco.island.lanes.routes import Copy, Route, dot, strides_of
from diloco.outer.fragments import Fragment, Plan, TensorSpec


@dataclass(frozen=True, slots=True)
class LaneLayout:
    """What each rank stores and carries; the same on all ranks.

    Attributes:
        specs: Of the plan's parameters, by name.
        holders: By parameter, the box of every rank that stores a part of it.
        carriers: Fragment and lane -> the island rank that carries it.
    """

    specs: Mapping[str, TensorSpec]
    holders: Mapping[str, Mapping[int, Box]]
    carriers: Mapping[tuple[int, int], int]

    @classmethod
    def agreed(
        cls,
        plan: Plan,
        parameters: Mapping[str, Tensor],
        *,
        group: dist.ProcessGroup | None,
        carrier_hosts: int,
    ) -> LaneLayout:
        """Exchange boxes with the other ranks, and check them; collective.

        Args and errors are those of `LaneShards`.
        """
        specs = {spec.name: spec for spec in plan.tensors}
        mismatches = _plan_problems(specs, parameters)
        problems = dtype_problems(parameters)
        boxes = {name: stored_box(parameter) for name, parameter in parameters.items()}
        host = socket.gethostname()
        mine = (plan.fingerprint(), carrier_hosts, mismatches, problems, host, boxes)
        ranks = gathered(mine, group)
        for rank, (fingerprint, carriers, mismatches, problems, *_) in enumerate(ranks):
            if fingerprint != ranks[0][0] or carriers != ranks[0][1]:
                mismatches = ["its plan or its carriers are not those of island rank 0"]
            if mismatches or problems:
                error = PlanMismatch if mismatches else ValueError
                details = "; ".join([*mismatches, *problems])
                raise error(f"cannot lay out the lanes of island rank {rank}: {details}")
        if missing := sorted(specs.keys() - {name for r in ranks for name in r[-1]}):
            raise PlanMismatch(
                f"cannot lay out the lanes: of the plan's parameters no rank of the island stores "
                f"{missing}"
            )
        in_turn = hosts_first([host for *_, host, _ in ranks], carrier_hosts)
        holders = {
            name: {
                rank: boxes[name]
                for rank, (*_, boxes) in enumerate(ranks)
                if name in boxes and boxes[name].numel
            }
            for name in specs
        }
        _check_cover(specs, holders)
        return cls(specs, holders, carriers_of(plan.fragments, in_turn))

    def routes(self, fragment: Fragment, island_rank: int, num_ranks: int) -> tuple[Route, Route]:
        """Return a fragment's two routes (`LaneShards`), as a rank takes part in them.

        Lanes, tensors and ranks are walked in one order, the same on all ranks.
        """
        collect, distribute = Route(num_ranks), Route(num_ranks)
        for lane, entry in itertools.product(fragment.lanes, fragment.entries):
            origin = entry.offset - entry.start - lane.start  # of the tensor in the lane
            start, end = max(entry.start, -origin), min(entry.end, lane.numel - origin)
            if start >= end:
                continue
            carrier = self.carriers[fragment.fragment_id, lane.lane_id]
            shape = self.specs[entry.name].shape
            strides = strides_of(shape)
            regions = boxes_of_range(shape, start, end)
            owned: set[Box] = set()
            for rank, box in self.holders[entry.name].items():
                is_owner = box not in owned
                owned.add(box)
                if island_rank not in (rank, carrier):
                    continue
                parts = filter(None, (box.intersect(region) for region in regions))
                copies = [
                    Copy(
                        entry.name,
                        lane.lane_id,
                        part.shifted(-offset for offset in box.offsets),
                        strides,
                        origin + dot(part.offsets, strides),
                    )
                    for part in parts
                ]
                for route in (collect, distribute) if is_owner else (distribute,):
                    if rank == island_rank:
                        route.held[carrier] += copies
                    if carrier == island_rank:
                        route.carried[rank] += copies
        return collect, distribute


def _check_cover(specs: Mapping[str, TensorSpec], holders: Mapping[str, Mapping[int, Box]]) -> None:
    """Require that the distinct boxes of every parameter are its exact partition."""
    checked: set[tuple[tuple[int, ...], frozenset[Box]]] = set()
    for name, spec in specs.items():
        boxes = frozenset(holders[name].values())
        if (spec.shape, boxes) in checked:
            continue
        covered = sum(box.numel for box in boxes)
        overlaps = len(boxes) > 1 and not are_disjoint(boxes)
        if covered != spec.numel or overlaps:
            raise ValueError(
                f"the island's ranks must store each of the {spec.numel} elements of parameter "
                f"{name!r} {list(spec.shape)} once, replicas aside; they store {covered}"
                f"{', some in differing shards' if overlaps else ''}: {dict(holders[name])}; place "
                "it by Shard and Replicate, alike on all ranks"
            )
        checked.add((spec.shape, boxes))


def _plan_problems(specs: Mapping[str, TensorSpec], parameters: Mapping[str, Tensor]) -> list[str]:
    unknown = sorted(parameters.keys() - specs.keys())
    shapes = [
        f"{name!r} has the shape {list(whole_shape(parameters[name]))}, in the plan "
        f"{list(spec.shape)}"
        for name, spec in specs.items()
        if name in parameters and whole_shape(parameters[name]) != spec.shape
    ]
    return [
        *([f"it has parameters that the plan lacks: {unknown}"] if unknown else []),
        *shapes,
    ]
