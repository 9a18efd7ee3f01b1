"""Lanes of an island: between the parameters that its ranks store and a fragment's flat lanes.

Every rank stores one box of each of its parameters (`boxes`), and may store nothing of others: the
layers of other pipeline stages, say. From all ranks' boxes and the plan, two routes a fragment are
made, once (`lane_layout`):

    collect      the one owner of each element (the lowest island rank that stores it) -> carrier
    distribute   carrier -> every rank that stores the element

Lanes cut tensors anywhere, so a flat range becomes at most 2 ndim - 1 boxes (part of the first row,
full rows, part of the last row), never one a row or an element. Routes are executed by all-to-all
where the lanes are, slab by slab (`routes`).

Lanes are passed where the parameters are if there is room (`find_room`), and then nothing here
waits for the device; else in host memory. From there, and from where they are kept (`place`), what
is merged next may be copied to the device before its step (`prefetch`).

It computes nothing: pseudo-gradients, codecs and anchors belong to callers, keyed by lane.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from copy import copy as shallow_copy
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from diloco.compression.lanes import padding_of
from diloco.device_thread import DeviceThread, SideStream
from diloco.island.lanes.boxes import stored
from diloco.island.lanes.lane_layout import LaneLayout
from diloco.island.lanes.place import LanePlace
from diloco.island.lanes.routes import PASSING, Copy, Slab
from diloco.outer.fragments import Plan
from diloco.outer.merge import merge_
from diloco.pinned_memory import PinnedRooms
from diloco.transport.units import format_bytes

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_ITEM_BYTES = 4
#: Bytes a stored parameter that training may be yet to take: a gradient and AdamW's two moments.
_TRAINED_BYTES = 12


@dataclass(frozen=True, slots=True)
class _Ahead:
    """Lanes, and what goes to the device for them: themselves, or what ranks received of them."""

    lanes: Mapping[int, Tensor]
    uploads: deque[Tensor]


class LaneShards:
    """Collects the lanes that this rank carries, and distributes them to all who store them.

    Making one is collective on ``group``, and so are ``collect`` and ``distribute``: every rank of
    the island calls them in the same order, from its training thread. Parameters are read and
    written where they are; between an accelerator and lanes in host memory, one box of a tensor is
    copied after the other, but for the fragment of a `prefetch`, which is there as a whole.

    Attributes:
        place: Where the lanes of `collect` are, and where they are kept.

    Args:
        plan: Fragments and lanes; equal on all ranks.
        parameters: Canonical name -> parameter, float32: those that this rank stores any part of.
        group: Of all ranks of the island, for CPU tensors (gloo), and for those of an accelerator
            where lanes are to stay there; None for an island of one rank.
        carrier_hosts: Hosts whose ranks carry lanes, the first so many; 0: all; equal on all ranks.

    Raises:
        PlanMismatch: On all ranks, if the names or shapes of some rank's parameters are not the
            plan's, no rank stores one of the plan's, or ranks were given different plans or
            carriers.
        ValueError: On all ranks, if a parameter is not float32, or the boxes that ranks store do
            not cover a parameter exactly once.
    """

    def __init__(
        self,
        plan: Plan,
        parameters: Mapping[str, Tensor],
        *,
        group: dist.ProcessGroup | None,
        carrier_hosts: int = 0,
    ) -> None:
        """Exchange boxes with the other ranks, check them, and make the two routes."""
        self._parameters = dict(parameters)
        self.place = LanePlace()
        devices = {parameter.device for parameter in self._parameters.values()}
        self._parameters_device = next(iter(devices)) if len(devices) == 1 else _CPU
        self._pinned = PinnedRooms(self._parameters_device)
        self._side = SideStream(self._parameters_device)
        self._ahead: _Ahead | None = None
        self._num_without_room = 0
        self._rooms: list[Tensor] = []  # each for what is carried of any fragment, nobody's now
        self._slabs: dict[bool, Tensor] = {}  # by whether they are sent
        self._group = group
        self._island_rank = 0 if group is None else dist.get_rank(group)
        self._num_ranks = 1 if group is None else dist.get_world_size(group)
        self._fragments = {fragment.fragment_id: fragment for fragment in plan.fragments}
        self._padding = {
            (fragment.fragment_id, lane.lane_id): padding_of(fragment, lane.lane_id)
            for fragment in plan.fragments
            for lane in fragment.lanes
        }
        self._layout = LaneLayout.agreed(
            plan, self._parameters, group=group, carrier_hosts=carrier_hosts
        )
        routes = {
            i: self._layout.routes(fragment, self._island_rank, self._num_ranks)
            for i, fragment in self._fragments.items()
        }
        is_away = any(parameter.device.type != "cpu" for parameter in self._parameters.values())
        num_slabs = [[c.num_slabs(), d.num_slabs()] for c, d in routes.values()]
        largest = torch.tensor([*num_slabs, [is_away, is_away]])
        if group is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        *most_slabs, (self._is_away, _) = largest.tolist()
        counts = dict(zip(routes, most_slabs, strict=True))
        self._collect = {i: collect.slabs(counts[i][0]) for i, (collect, _) in routes.items()}
        self._distribute = {i: route.slabs(counts[i][1]) for i, (_, route) in routes.items()}
        self._most_carried = max(sum(self._lane_numels(i).values()) for i in self._fragments)

    @property
    def device(self) -> torch.device:
        """Where the lanes of `collect` are, and those that are merged are passed."""
        return self.place.device

    def find_room(self, num_vectors: int, step_bytes: int = 0) -> None:
        """Have lanes where the parameters are, as far as every rank has room there; collective.

        They may take half of what the first inner steps, which are yet to come, will leave free:
        a measured peak would come after anchors have their place. The other half is for what a
        forecast leaves out: gaps of the allocator, buffers of collectives, longer batches of an
        evaluation. Where only what comes and goes finds room, lanes are computed there and kept in
        host memory. Work on them is done by a thread from now on.

        Args:
            num_vectors: Vectors of each lane that the callers keep.
            step_bytes: That inner steps take of the device besides parameters, at their peak; 0:
                not known, gradients and two moments are left room.
        """
        thread = DeviceThread("diloco-lanes")
        if not self._is_away:
            self.place = LanePlace(thread=thread)
            return
        device = self._parameters_device
        carried = sum(sum(self._lane_numels(i).values()) for i in self._fragments)
        passing = _ITEM_BYTES * PASSING * self._most_carried
        needed = _ITEM_BYTES * num_vectors * carried + passing
        stored_numel = sum(stored(parameter).numel() for parameter in self._parameters.values())
        taken = step_bytes or _TRAINED_BYTES * stored_numel
        free = self._free_bytes(device) if self._reaches(device) else None
        room = -1 if free is None else max(0, free - taken) // 2
        has_room = torch.tensor([passing <= room, needed <= room], dtype=torch.int64)
        if self._group is not None:
            dist.all_reduce(has_room, dist.ReduceOp.MIN, group=self._group)
        passes, keeps = map(bool, has_room.tolist())
        self.place = LanePlace(
            device if passes else _CPU, is_apart=passes and not keeps, thread=thread
        )
        logger.info(
            "lanes are computed on %s and kept %s, needed_bytes=%d passing_bytes=%d room_bytes=%d "
            "step_bytes=%d device=%s",
            self.device, "in pinned host memory" if self.place.is_apart else "there",
            needed, passing, room, taken, device,
        )  # fmt: skip
        if self.device == _CPU and device != _CPU and not self._island_rank:
            logger.warning(
                "training waits for its sends, which go through host memory: this rank's lanes "
                "need %s of the device while they are sent or merged, and may take half of what "
                "inner steps leave free: they are expected to take %s, and %s are free; more "
                "fragments (outer.num_fragments) or more lanes (outer.num_lanes, up to one a rank) "
                "make lanes smaller, full activation checkpointing or more micro-batches the steps",
                format_bytes(passing), format_bytes(taken),
                "an unknown number of bytes" if free is None else format_bytes(free),
            )  # fmt: skip

    def _free_bytes(self, device: torch.device) -> int | None:
        """Return what is free of a device now; None where that is not known."""
        if device.type != "cuda":
            return None
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)

    def _reaches(self, device: torch.device) -> bool:
        """Whether ranks can exchange what lies on such devices."""
        return self._group is None or f"{device.type}:nccl" in dist.get_backend_config(self._group)

    def carrier(self, fragment_id: int, lane_id: int) -> int:
        """Return the island rank that carries a lane."""
        return self._layout.carriers[fragment_id, lane_id]

    def owned(self) -> frozenset[str]:
        """Return what `collect` reads here: of ranks that store the same part the first has it."""
        mine = self._island_rank
        return frozenset(
            name
            for name, holders in self._layout.holders.items()
            if mine in holders and mine == min(r for r in holders if holders[r] == holders[mine])
        )

    def over(self, tensors: Mapping[str, Tensor], *, group: dist.ProcessGroup | None) -> LaneShards:
        """Return one for other tensors, stored as the parameters are; no communication.

        They share what `collect` writes into, so one of them is used at a time.

        Args:
            tensors: As the parameters.
            group: Of the same ranks in the same order.
        """
        other = shallow_copy(self)
        other._parameters, other._group = dict(tensors), group
        return other

    def release(self) -> None:
        """Give back the memory that is kept for the next `collect`."""
        self._rooms.clear()
        self._slabs.clear()

    def lanes_of(self, fragment_id: int) -> tuple[int, ...]:
        """Return the ids of the lanes that this rank carries, ascending; may be empty."""
        return tuple(self._lane_numels(fragment_id))

    @torch.no_grad()
    def collect(self, fragment_id: int) -> dict[int, Tensor]:
        """Read the fragment's current local values into lanes; collective.

        Returns:
            Lane id -> values, for the lanes that this rank carries; each [lane.numel], float32, on
            `device`, zero in the padding between tensors, in memory that is the caller's until
            `reuse`.
        """
        numels = self._lane_numels(fragment_id)
        if not numels:
            room = torch.empty(0, device=self.device)
        elif self._rooms:
            room = self._rooms.pop()
        else:
            room = torch.empty(self._most_carried, device=self.device)
        parts = torch.split(room[: sum(numels.values())], list(numels.values()))
        lanes = dict(zip(numels, parts, strict=True))
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
        """Have a later `collect` write into what one returned; they may not be read any more.

        For fresh memory costs the training thread as much as the copy. Any thread may call it; what
        one has had a device do with them must be done, but for the training thread's own.
        """
        for lane in lanes.values():
            assert lane._base is not None, "it is no lane of a room"
            self._rooms.append(lane._base)
            break  # they share it

    @torch.no_grad()
    def prefetch(self, fragment_id: int, lanes: Mapping[int, Tensor]) -> None:
        """Begin to copy to the parameters' device what a `distribute` will merge; collective.

        It finds them there if it is given these very lanes, and writes the same bits. The stream of
        the copies does not wait for what training has launched. Until then they take as much room
        on the device as the fragment's lanes or parameters here, of one fragment: the last one
        asked for; what finds no room is merged from where it is. Where lanes are kept with the
        parameters, nothing happens, as with lanes that are on their way.

        Args:
            fragment_id: Fragment of the plan.
            lanes: As `distribute` takes them, and there; not written to before that.
        """
        is_there = self._ahead is not None and self._ahead.lanes is lanes
        is_passed_on_host = self._is_away and self.device == _CPU
        if is_there or not (self.place.is_apart or is_passed_on_host):
            return
        self._check_lanes(fragment_id, lanes)
        self._ahead = None  # gives room before more is taken
        uploads: deque[Tensor] = deque()
        with record_function("diloco/prefetch"):
            parts = [*lanes.values()] if self.place.is_apart else self._received(fragment_id, lanes)
            self._side.submit(lambda: uploads.extend(map(self._uploaded, parts)), at_once=True)
        self._ahead = _Ahead(lanes, uploads)

    def _received(self, fragment_id: int, lanes: Mapping[int, Tensor]) -> list[Tensor]:
        """Pass lanes in host memory; returns what this rank receives, a slab each, pinned."""
        slabs = []
        for held, carried in self._distribute[fragment_id]:
            slabs.append(self._pinned.take(sum(held.splits)))
            sources = (copy.in_lane(lanes[copy.lane_id]) for copy in carried.copies)
            self._exchange(carried, sources, held, kept=slabs[-1])
        return slabs

    def _uploaded(self, values: Tensor) -> Tensor:
        """Copy to the device; where there is no room for it, give what is there: it merges late."""
        try:
            return self.place.there(values, self._parameters_device)
        except torch.OutOfMemoryError:
            self._num_without_room += 1
            return values

    def prefetches_without_room(self) -> int:
        """Return how many parts had no room on the device since the last call."""
        found, self._num_without_room = self._num_without_room, 0
        return found

    @torch.no_grad()
    def distribute(self, fragment_id: int, lanes: Mapping[int, Tensor], local_mix: float) -> None:
        """Merge lanes into the parameters of every rank that stores them; collective.

            local <- local_mix * local + (1 - local_mix) * lane

        Args:
            fragment_id: Fragment of the plan.
            lanes: Lane id -> values, for exactly the lanes that this rank carries; each
                [lane.numel], float32, contiguous, on `device` or the CPU. Padding is ignored.
            local_mix: Weight of the local values, in [0, 1]; 0 copies bit-exactly.

        Raises:
            ValueError: If the lanes are not those; on this rank, before anything is sent.
        """
        self._check_lanes(fragment_id, lanes)
        with record_function("diloco/distribute"):
            for copy, values in self._sent_out(fragment_id, lanes):
                local = self._in_parameter(copy)
                merge_(local, values.to(local.device), local_mix)

    @torch.no_grad()
    def add(self, fragment_id: int, lanes: Mapping[int, Tensor]) -> None:
        """Add lanes to the parameters of every rank that stores them; collective.

        Args and errors are those of `distribute`.
        """
        self._check_lanes(fragment_id, lanes)
        with record_function("diloco/distribute"):
            for copy, values in self._sent_out(fragment_id, lanes):
                local = self._in_parameter(copy)
                local.add_(values.to(local.device))

    @torch.no_grad()
    def num_differing(self, fragment_id: int, lanes: Mapping[int, Tensor]) -> int:
        """Count the elements that this rank stores with other bits than the lanes; collective.

        Args:
            fragment_id: Fragment of the plan.
            lanes: As `distribute` takes them.
        """
        self._check_lanes(fragment_id, lanes)
        num_differing = 0
        for copy, values in self._sent_out(fragment_id, lanes):
            local = self._in_parameter(copy).to(values.device).contiguous().view(torch.int32)
            differs = local != values.contiguous().view(torch.int32)
            num_differing += int(differs.sum())
        return num_differing

    def _sent_out(
        self, fragment_id: int, lanes: Mapping[int, Tensor]
    ) -> Iterator[tuple[Copy, Tensor]]:
        """Yield every box that this rank stores of a fragment, with the lanes' values; collective.

        Values are on `device`, or where the lanes or what was prefetched of them are; theirs until
        the next.
        """
        if self.place.is_apart:
            self.prefetch(fragment_id, lanes)  # on arrival nobody has
        ahead = self._ahead
        if ahead is not None and ahead.lanes is lanes:
            self._ahead = None
            self._side.precede()
            if self.place.is_apart:
                lanes = dict(zip(lanes, ahead.uploads, strict=True))
            else:
                for held, _ in self._distribute[fragment_id]:  # each gives its room when merged
                    slab = ahead.uploads.popleft()
                    yield from held.views(self.place.there(slab, slab.device))
                return
        lanes = self._there(lanes)
        for held, carried in self._distribute[fragment_id]:
            sources = (copy.in_lane(lanes[copy.lane_id]) for copy in carried.copies)
            yield from self._exchange(carried, sources, held)

    def _there(self, lanes: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return lanes where they are passed; no thread waits."""
        return {lane_id: self.place.there(lane) for lane_id, lane in lanes.items()}

    def _lane_numels(self, fragment_id: int) -> dict[int, int]:
        return {
            lane.lane_id: lane.numel
            for lane in self._fragments[fragment_id].lanes
            if self.carrier(fragment_id, lane.lane_id) == self._island_rank
        }

    def _check_lanes(self, fragment_id: int, lanes: Mapping[int, Tensor]) -> None:
        numels = self._lane_numels(fragment_id)
        places = {self.device, _CPU}
        sizes = {i: (n, torch.float32, True, True) for i, n in numels.items()}
        if sizes != {
            i: (*lane.shape, lane.dtype, lane.device in places, lane.is_contiguous())
            for i, lane in lanes.items()
        }:
            got = {i: f"{v.dtype} {list(v.shape)} on {v.device}" for i, v in lanes.items()}
            raise ValueError(
                f"cannot distribute fragment {fragment_id}: island rank {self._island_rank} needs "
                f"contiguous float32 lanes of the sizes {numels} on {self.device} or cpu, got {got}"
            )

    def _in_parameter(self, copy: Copy) -> Tensor:
        return stored(self._parameters[copy.name])[copy.box.slices]

    def _exchange(
        self, sent: Slab, sources: Iterable[Tensor], received: Slab, kept: Tensor | None = None
    ) -> Iterator[tuple[Copy, Tensor]]:
        """Send one slab, and yield every copy of the slab received with its values.

        It is received where it is `kept`, if it is.
        """
        if self._group is None and kept is None:
            # Both ends are this rank and list the same copies in the same order: nothing travels.
            return zip(received.copies, sources, strict=True)
        incoming = self._slab(sum(received.splits), is_sent=False) if kept is None else kept
        outgoing = incoming
        if self._group is not None:
            outgoing = self._slab(sum(sent.splits), is_sent=True)
        for (_, view), source in zip(sent.views(outgoing), sources, strict=True):
            view.copy_(source)
        if self._group is not None:
            splits = received.splits, sent.splits
            dist.all_to_all_single(incoming, outgoing, *splits, group=self._group)
        return received.views(incoming)

    def _slab(self, numel: int, *, is_sent: bool) -> Tensor:
        """Return room for a slab, until the next one."""
        slab = self._slabs.get(is_sent)
        if slab is None or slab.numel() < numel or slab.device != self.device:
            slab = self._slabs[is_sent] = torch.empty(numel, device=self.device)
        return slab[:numel]
