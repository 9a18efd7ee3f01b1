"""Lanes of an island: between the parameters that its ranks store and a fragment's flat lanes.

The only module that knows DTensor layouts. Every rank stores one box of each parameter (FSDP2 and
TP: its shard; a TP norm or an HSDP copy: the same box as other ranks; a plain tensor: the whole).
From all ranks' boxes and the plan, two routes a fragment are made, once:

    collect      the one owner of each element (the lowest island rank that stores it) -> carrier
    distribute   carrier -> every rank that stores the element

A route is a list of box copies: rows and columns of a stored box, and offset and strides of the
same elements in a lane. Lanes cut tensors anywhere, so a flat range becomes at most 2 ndim - 1
boxes (part of the first row, full rows, part of the last row), never one a row or an element.
Routes are executed by all-to-all on a CPU group in slabs of at most ``SLAB_BYTES`` a rank.

It computes nothing: pseudo-gradients, codecs and anchors belong to callers, keyed by lane.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from diloco.compression.lanes import padding_of
from diloco.errors import PlanMismatch
from diloco.outer.fragments import Fragment, Plan, TensorSpec
from diloco.outer.merge import merge_

SLAB_BYTES = 256 * 2**20  # most that a rank sends, and most that it receives, in one collective
_ITEM_BYTES = 4
_WRAPPER_ATTRIBUTES = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


@dataclass(frozen=True, slots=True)
class _Box:
    """Elements [offset, offset + size) of every dim of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def shifted(self, by: Iterable[int]) -> _Box:
        return _Box(tuple(a + b for a, b in zip(self.offsets, by, strict=True)), self.sizes)

    def intersect(self, other: _Box) -> _Box | None:
        """Return the common elements, None where there are none."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        dims = zip(offsets, self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        sizes = tuple(min(a + m, b + n) - offset for offset, a, m, b, n in dims)
        return _Box(offsets, sizes) if min(sizes, default=1) > 0 else None


@dataclass(frozen=True, slots=True)
class _Copy:
    """One box of the tensor that a rank stores, and the same elements, strided, in a lane."""

    name: str
    lane_id: int
    box: _Box
    strides: tuple[int, ...]  # of the unsharded tensor, hence of its elements in the lane
    lane_offset: int

    def part(self, start: int, end: int) -> list[_Copy]:
        """Return the copies of elements [start, end) of the flattened box."""
        return [
            _Copy(
                self.name,
                self.lane_id,
                box.shifted(self.box.offsets),
                self.strides,
                self.lane_offset + _dot(box.offsets, self.strides),
            )
            for box in _boxes_of_range(self.box.sizes, start, end)
        ]

    def in_lane(self, lane: Tensor) -> Tensor:
        """Return the view of the elements in the lane, in the shape of the box."""
        offset = lane.storage_offset() + self.lane_offset
        return lane.as_strided(self.box.sizes, self.strides, offset)


@dataclass(frozen=True, slots=True)
class _Slab:
    """This rank's end of one all-to-all: copies in the order of their peers, elements a peer."""

    copies: list[_Copy]
    splits: list[int]


class _Route:
    """What this rank exchanges with every peer, as holder of boxes and as carrier of lanes.

    Both ends of a pair list the same copies in the same order, so they may cut them alike.
    """

    def __init__(self, num_ranks: int) -> None:
        self.limit = max(1, SLAB_BYTES // _ITEM_BYTES // num_ranks)  # elements a peer and slab
        self.held: list[list[_Copy]] = [[] for _ in range(num_ranks)]
        self.carried: list[list[_Copy]] = [[] for _ in range(num_ranks)]

    def num_slabs(self) -> int:
        """Return the number of slabs that this rank needs; the island does the most of any."""
        totals = (sum(c.box.numel for c in copies) for copies in self.held + self.carried)
        return max(-(-total // self.limit) for total in totals)

    def slabs(self, num_slabs: int) -> list[tuple[_Slab, _Slab]]:
        """Return (held, carried) of every all-to-all."""
        ends = [
            [self._cut(copies, num_slabs) for copies in end] for end in (self.held, self.carried)
        ]
        held, carried = (
            [
                _Slab(
                    [copy for pieces in end for copy in pieces[i]],
                    [sum(copy.box.numel for copy in pieces[i]) for pieces in end],
                )
                for i in range(num_slabs)
            ]
            for end in ends
        )
        return list(zip(held, carried, strict=True))

    def _cut(self, copies: list[_Copy], num_slabs: int) -> list[list[_Copy]]:
        pieces: list[list[_Copy]] = [[] for _ in range(num_slabs)]
        position = 0
        for copy in copies:
            done = 0
            while done < copy.box.numel:
                take = min(copy.box.numel - done, self.limit - position % self.limit)
                pieces[position // self.limit] += copy.part(done, done + take)
                done += take
                position += take
        return pieces


class LaneShards:
    """Collects the lanes that this rank carries, and distributes them to all who store them.

    Making one is collective on ``group``, and so are ``collect`` and ``distribute``: every rank of
    the island calls them in the same order, from its training thread. Parameters are read and
    written where they are; those on an accelerator are copied through the CPU.

    Args:
        plan: Fragments and lanes; equal on all ranks.
        parameters: Canonical name -> parameter, float32, on every rank the names of the plan.
        group: CPU (gloo) group of all ranks of the island; None for an island of one rank.
        carriers: Island ranks that lanes are dealt to in turn, hosts first; equal on all ranks;
            default all ranks in order. ``[0]`` is the gateway mode.

    Raises:
        PlanMismatch: On all ranks, if the names or shapes of some rank's parameters are not the
            plan's, or ranks were given different plans or carriers.
        ValueError: On all ranks, if a parameter is not float32, a carrier is not an island rank,
            or the boxes that ranks store do not cover a parameter exactly once.
    """

    def __init__(
        self,
        plan: Plan,
        parameters: Mapping[str, Tensor],
        *,
        group: dist.ProcessGroup | None,
        carriers: Sequence[int] | None = None,
    ) -> None:
        """Exchange boxes with the other ranks, check them, and make the two routes."""
        self._parameters = dict(parameters)
        self._spare: Tensor | None = None
        self._group = group
        self._island_rank = 0 if group is None else dist.get_rank(group)
        self._num_ranks = 1 if group is None else dist.get_world_size(group)
        self._carriers = tuple(range(self._num_ranks) if carriers is None else carriers)
        self._fragments = {fragment.fragment_id: fragment for fragment in plan.fragments}
        self._padding = {
            (fragment.fragment_id, lane.lane_id): padding_of(fragment, lane.lane_id)
            for fragment in plan.fragments
            for lane in fragment.lanes
        }
        self._specs = {spec.name: spec for spec in plan.tensors}
        self._holders = self._exchange_boxes(plan)
        routes = {i: self._routes(fragment) for i, fragment in self._fragments.items()}
        num_slabs = torch.tensor([[c.num_slabs(), d.num_slabs()] for c, d in routes.values()])
        if group is not None:
            dist.all_reduce(num_slabs, dist.ReduceOp.MAX, group=group)
        counts = dict(zip(routes, num_slabs.tolist(), strict=True))
        self._collect = {i: collect.slabs(counts[i][0]) for i, (collect, _) in routes.items()}
        self._distribute = {i: route.slabs(counts[i][1]) for i, (_, route) in routes.items()}

    def carrier(self, fragment_id: int, lane_id: int) -> int:
        """Return the island rank that carries a lane; fragments start at different carriers."""
        return self._carriers[(fragment_id + lane_id) % len(self._carriers)]

    def lanes_of(self, fragment_id: int) -> tuple[int, ...]:
        """Return the ids of the lanes that this rank carries, ascending; may be empty."""
        return tuple(self._lane_numels(fragment_id))

    @torch.no_grad()
    def collect(self, fragment_id: int) -> dict[int, Tensor]:
        """Read the fragment's current local values into lanes; collective.

        Returns:
            Lane id -> values, for the lanes that this rank carries; each [lane.numel], float32,
            CPU, zero in the padding between tensors, in memory that is the caller's until `reuse`.
        """
        numels = self._lane_numels(fragment_id)
        rooms = torch.split(self._room(sum(numels.values())), list(numels.values()))
        lanes = dict(zip(numels, rooms, strict=True))
        with record_function("diloco/collect"):
            for lane_id, lane in lanes.items():
                for padding in self._padding[fragment_id, lane_id]:
                    lane[padding] = 0.0
            for held, carried in self._collect[fragment_id]:
                sources = (self._in_parameter(copy) for copy in held.copies)
                for copy, values in self._exchange(held, sources, carried):
                    copy.in_lane(lanes[copy.lane_id]).copy_(values)
        return lanes

    def reuse(self, lanes: Mapping[int, Tensor]) -> None:
        """Have a later `collect` write into what one returned; nobody may read it any more.

        For fresh memory costs the training thread as much as the copy. Any thread may call it.
        """
        for lane in lanes.values():
            room = lane.new_empty(0).set_(lane.untyped_storage())
            spare = self._spare  # once: the training thread may take it meanwhile
            if spare is None or room.numel() > spare.numel():
                self._spare = room
            break  # they share it

    def _room(self, numel: int) -> Tensor:
        spare, self._spare = self._spare, None
        return torch.empty(numel) if spare is None or spare.numel() < numel else spare[:numel]

    @torch.no_grad()
    def distribute(self, fragment_id: int, lanes: Mapping[int, Tensor], local_mix: float) -> None:
        """Merge lanes into the parameters of every rank that stores them; collective.

            local <- local_mix * local + (1 - local_mix) * lane

        Args:
            fragment_id: Fragment of the plan.
            lanes: Lane id -> values, for exactly the lanes that this rank carries; each
                [lane.numel], float32, CPU, contiguous. Padding is ignored.
            local_mix: Weight of the local values, in [0, 1]; 0 copies bit-exactly.

        Raises:
            ValueError: If the lanes are not those; on this rank, before anything is sent.
        """
        self._check_lanes(fragment_id, lanes)
        with record_function("diloco/distribute"):
            for held, carried in self._distribute[fragment_id]:
                sources = (copy.in_lane(lanes[copy.lane_id]) for copy in carried.copies)
                for copy, values in self._exchange(carried, sources, held):
                    local = self._in_parameter(copy)
                    merge_(local, values.to(local.device), local_mix)

    @torch.no_grad()
    def num_differing(self, fragment_id: int, lanes: Mapping[int, Tensor]) -> int:
        """Count the elements that this rank stores with other bits than the lanes; collective.

        Args:
            fragment_id: Fragment of the plan.
            lanes: As `distribute` takes them.
        """
        self._check_lanes(fragment_id, lanes)
        num_differing = 0
        for held, carried in self._distribute[fragment_id]:
            sources = (copy.in_lane(lanes[copy.lane_id]) for copy in carried.copies)
            for copy, values in self._exchange(carried, sources, held):
                local = self._in_parameter(copy).to("cpu").contiguous().view(torch.int32)
                differs = local != values.contiguous().view(torch.int32)
                num_differing += int(differs.sum())
        return num_differing

    def _lane_numels(self, fragment_id: int) -> dict[int, int]:
        return {
            lane.lane_id: lane.numel
            for lane in self._fragments[fragment_id].lanes
            if self.carrier(fragment_id, lane.lane_id) == self._island_rank
        }

    def _check_lanes(self, fragment_id: int, lanes: Mapping[int, Tensor]) -> None:
        numels = self._lane_numels(fragment_id)
        sizes = {i: (n, torch.float32, "cpu", True) for i, n in numels.items()}
        if sizes != {
            i: (*lane.shape, lane.dtype, lane.device.type, lane.is_contiguous())
            for i, lane in lanes.items()
        }:
            got = {i: f"{v.dtype} {list(v.shape)} on {v.device}" for i, v in lanes.items()}
            raise ValueError(
                f"cannot distribute fragment {fragment_id}: island rank {self._island_rank} needs "
                f"contiguous CPU float32 lanes of the sizes {numels}, got {got}"
            )

    def _exchange_boxes(self, plan: Plan) -> dict[str, dict[int, _Box]]:
        """Return, by parameter, the box of every rank that stores a part of it."""
        mismatches = _plan_problems(self._specs, self._parameters)
        problems = _dtype_problems(self._parameters)
        boxes = {name: _local_box(parameter) for name, parameter in self._parameters.items()}
        mine = (plan.fingerprint(), self._carriers, mismatches, problems, boxes)
        ranks = [mine] * self._num_ranks
        if self._group is not None:
            dist.all_gather_object(ranks, mine, group=self._group)
        for rank, (fingerprint, carriers, mismatches, problems, _) in enumerate(ranks):
            if fingerprint != ranks[0][0] or carriers != ranks[0][1]:
                mismatches = ["its plan or its carriers are not those of island rank 0"]
            if mismatches or problems:
                error = PlanMismatch if mismatches else ValueError
                details = "; ".join([*mismatches, *problems])
                raise error(f"cannot lay out the lanes of island rank {rank}: {details}")
        if not set(self._carriers) <= set(range(self._num_ranks)) or not self._carriers:
            raise ValueError(
                f"carriers = {list(self._carriers)}: give at least one island rank, each in "
                f"[0, {self._num_ranks - 1}]"
            )
        holders = {
            name: {rank: r[-1][name] for rank, r in enumerate(ranks) if r[-1][name].numel}
            for name in self._specs
        }
        _check_cover(self._specs, holders)
        return holders

    def _routes(self, fragment: Fragment) -> tuple[_Route, _Route]:
        """Walk lanes, tensors and ranks in one order, the same on all ranks."""
        collect, distribute = _Route(self._num_ranks), _Route(self._num_ranks)
        for lane, entry in itertools.product(fragment.lanes, fragment.entries):
            origin = entry.offset - entry.start - lane.start  # of the tensor in the lane
            start, end = max(entry.start, -origin), min(entry.end, lane.numel - origin)
            if start >= end:
                continue
            carrier = self.carrier(fragment.fragment_id, lane.lane_id)
            shape = self._specs[entry.name].shape
            strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
            regions = _boxes_of_range(shape, start, end)
            owned: set[_Box] = set()
            for rank, box in self._holders[entry.name].items():
                is_owner = box not in owned
                owned.add(box)
                if self._island_rank not in (rank, carrier):
                    continue
                parts = filter(None, (box.intersect(region) for region in regions))
                copies = [
                    _Copy(
                        entry.name,
                        lane.lane_id,
                        part.shifted(-offset for offset in box.offsets),
                        strides,
                        origin + _dot(part.offsets, strides),
                    )
                    for part in parts
                ]
                for route in (collect, distribute) if is_owner else (distribute,):
                    if rank == self._island_rank:
                        route.held[carrier] += copies
                    if carrier == self._island_rank:
                        route.carried[rank] += copies
        return collect, distribute

    def _in_parameter(self, copy: _Copy) -> Tensor:
        parameter = self._parameters[copy.name]
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
        dims = zip(copy.box.offsets, copy.box.sizes, strict=True)
        return local[tuple(slice(offset, offset + size) for offset, size in dims)]

    def _exchange(
        self, sent: _Slab, sources: Iterable[Tensor], received: _Slab
    ) -> Iterator[tuple[_Copy, Tensor]]:
        """Send one slab, and yield every copy of the slab received with its values."""
        if self._group is None:
            # Both ends are this rank and list the same copies in the same order: nothing travels.
            return zip(received.copies, sources, strict=True)
        outgoing = torch.empty(sum(sent.splits))
        for (_, view), source in zip(_views(outgoing, sent), sources, strict=True):
            view.copy_(source)
        incoming = torch.empty(sum(received.splits))
        dist.all_to_all_single(incoming, outgoing, received.splits, sent.splits, group=self._group)
        return _views(incoming, received)


def _views(buffer: Tensor, slab: _Slab) -> Iterator[tuple[_Copy, Tensor]]:
    pieces = torch.split(buffer, [copy.box.numel for copy in slab.copies])
    for copy, values in zip(slab.copies, pieces, strict=True):
        yield copy, values.view(copy.box.sizes)


def _dot(a: Iterable[int], b: Iterable[int]) -> int:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _boxes_of_range(shape: tuple[int, ...], start: int, end: int) -> list[_Box]:
    """Cut elements [start, end) of a flattened row-major tensor into at most 2 ndim - 1 boxes."""
    if start >= end:
        return []
    if not shape:
        return [_Box((), ())]
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row  # full rows are [first, last)
    if first > last:
        partial = [(last, start - last * row, end - last * row)]
    else:
        partial = [(first - 1, start - (first - 1) * row, row), (last, 0, end - last * row)]
    boxes = [
        _Box((index, *box.offsets), (1, *box.sizes))
        for index, row_start, row_end in partial
        for box in _boxes_of_range(shape[1:], row_start, row_end)
    ]
    if first < last:
        boxes.append(_Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    return boxes


def _local_box(parameter: Tensor) -> _Box:
    """Return the box that this rank stores; the only use of DTensor's private hook."""
    if not isinstance(parameter, DTensor):
        return _Box((0,) * parameter.ndim, tuple(parameter.shape))
    (chunk,) = parameter.__create_chunk_list__()  # type: ignore[no-untyped-call]
    assert tuple(chunk.sizes) == tuple(parameter.to_local().shape)
    return _Box(tuple(chunk.offsets), tuple(chunk.sizes))


def _check_cover(
    specs: Mapping[str, TensorSpec], holders: Mapping[str, Mapping[int, _Box]]
) -> None:
    """Require that the distinct boxes of every parameter are its exact partition."""
    checked: set[tuple[tuple[int, ...], frozenset[_Box]]] = set()
    for name, spec in specs.items():
        boxes = frozenset(holders[name].values())
        if (spec.shape, boxes) in checked:
            continue
        covered = sum(box.numel for box in boxes)
        overlaps = any(a.intersect(b) for a, b in itertools.combinations(boxes, 2))
        if covered != spec.numel or overlaps:
            raise ValueError(
                f"the island's ranks must store each of the {spec.numel} elements of parameter "
                f"{name!r} {list(spec.shape)} once, replicas aside; they store {covered}"
                f"{', some in differing shards' if overlaps else ''}: {dict(holders[name])}; place "
                "it by Shard and Replicate, alike on all ranks"
            )
        checked.add((spec.shape, boxes))


def _plan_problems(specs: Mapping[str, TensorSpec], parameters: Mapping[str, Tensor]) -> list[str]:
    missing = sorted(specs.keys() - parameters.keys())
    unknown = sorted(parameters.keys() - specs.keys())
    shapes = [
        f"{name!r} has the shape {list(parameters[name].shape)}, in the plan {list(spec.shape)}"
        for name, spec in specs.items()
        if name in parameters and tuple(parameters[name].shape) != spec.shape
    ]
    return [
        *([f"of the plan's parameters it lacks {missing}"] if missing else []),
        *([f"it has parameters that the plan lacks: {unknown}"] if unknown else []),
        *shapes,
    ]


def _dtype_problems(parameters: Mapping[str, Tensor]) -> list[str]:
    return [
        f"parameter {name!r} is {parameter.dtype}; islands need float32 masters: keep the model in "
        "float32 and compute in 16 bits by autocast or FSDP's MixedPrecisionPolicy"
        for name, parameter in parameters.items()
        if parameter.dtype != torch.float32
    ]


def tensor_specs(parameters: Mapping[str, Tensor]) -> list[TensorSpec]:
    """Return name and unsharded shape of every parameter, by sorted name: the plan's input."""
    return [TensorSpec(name, tuple(parameters[name].shape)) for name in sorted(parameters)]


def canonical_parameters(
    modules: nn.Module | Iterable[nn.Module] | Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return the trained parameters under the names that every island uses for them.

    Names lose what wrappers add: ``_orig_mod.`` (compile), ``_checkpoint_wrapped_module.``
    (activation checkpointing) and the ``module.`` of DataParallel classes. A parameter reachable
    under several names (tied) comes once, under the first in sorted order.

    Args:
        modules: The model; or its parts (pipeline stages, say) with disjoint names; or the
            parameters themselves by name, which stays as it is.

    Returns:
        Canonical name -> parameter, sorted by name; those with ``requires_grad`` only.

    Raises:
        ValueError: If a parameter is not float32, two different ones share a name, or there are
            none.
    """
    parameters: dict[str, Tensor] = {}
    for name, parameter in _named_parameters(modules):
        if parameters.setdefault(name, parameter) is not parameter:
            raise ValueError(
                f"two different parameters are called {name!r}: give the modules distinct "
                "names, by passing their common parent or a mapping from name to parameter"
            )
    first_names: dict[int, str] = {}
    for name in sorted(parameters):
        first_names.setdefault(id(parameters[name]), name)
    canonical = {name: parameters[name] for name in first_names.values()}
    if not canonical:
        raise ValueError(
            "there is no parameter with requires_grad: nothing to train; freeze fewer parameters, "
            "or pass the model's modules themselves"
        )
    if problems := _dtype_problems(canonical):
        raise ValueError("; ".join(problems))
    return canonical


def reshard_(modules: Iterable[nn.Module | FSDPModule]) -> None:
    """Let FSDP2 modules show their sharded parameters, so that they may be read and written.

    After a forward without a backward (an evaluation) the root keeps its gathered copies, and the
    next forward would compute with them whatever was written to the shards meanwhile.
    """
    for module in modules:
        if isinstance(module, FSDPModule):
            module.reshard()


def _named_parameters(
    modules: nn.Module | Iterable[nn.Module] | Mapping[str, Tensor],
) -> Iterator[tuple[str, Tensor]]:
    if isinstance(modules, Mapping):
        yield from ((name, value) for name, value in modules.items() if value.requires_grad)
        return
    for module in [modules] if isinstance(modules, nn.Module) else modules:
        yield from _stripped_parameters(module)


def _stripped_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield trained parameters, tied ones repeatedly, by name without what wrappers added."""
    reshard_(module.modules())
    wrapped = {
        f"{path}.module".removeprefix(".")
        for path, child in module.named_modules(remove_duplicate=False)
        if isinstance(child, DistributedDataParallel | nn.DataParallel)
    }
    for path, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            parts = path.split(".")
            kept = (
                part
                for i, part in enumerate(parts)
                if part not in _WRAPPER_ATTRIBUTES and ".".join(parts[: i + 1]) not in wrapped
            )
            yield ".".join(kept), parameter
