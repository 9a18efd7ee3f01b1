"""Lanes against the canonical vector of `full_tensor()`, on real gloo ranks of every layout."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import blake3
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from diloco.errors import PlanMismatch
from diloco.island.lanes import routes
from diloco.island.lanes.boxes import Box, are_disjoint, boxes_of_range, declare_part, stored_box
from diloco.island.lanes.parameters import canonical_parameters, tensor_specs
from diloco.island.lanes.shards import LaneShards
from diloco.outer.fragments import Entry, Fragment, Lane, Plan, TensorSpec
from diloco.outer.merge import merge_
from tests.distributed import run_ranks

BLOCK = 128


class Layer(nn.Module):
    """One parameter of every kind; dim 0 divides neither by 2 nor by 3 where it may not."""

    def __init__(self) -> None:
        super().__init__()
        self.colwise = nn.Parameter(torch.empty(14, 70))
        self.rowwise = nn.Parameter(torch.empty(11, 70))
        self.conv = nn.Parameter(torch.empty(5, 6, 11))
        self.norm = nn.Parameter(torch.empty(70))
        self.gate = nn.Parameter(torch.empty(1))
        self.experts = nn.Parameter(torch.empty(5, 6, 9))


class Model(nn.Module):
    def __init__(self, *, is_tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 50)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(50, 13, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        for name, parameter in self.named_parameters():
            parameter.data.copy_(global_values(name, tuple(parameter.shape), 0))

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(tokens))
        return logits


def global_values(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Values that depend on the name only, never on the layout."""
    digest = int.from_bytes(blake3.blake3(f"{seed} {name}".encode()).digest()[:6], "little")
    return torch.randn(shape, generator=torch.Generator().manual_seed(digest))


def awkward_plan(specs: list[TensorSpec]) -> Plan:
    """Two fragments, tensors dealt in turn, the longest cut in the middle of a row into ranges of
    both; lanes of 1, 2, 3, 1, ... blocks, so that they cut tensors anywhere, and one of 12.
    """
    longest = max(specs, key=lambda spec: spec.numel)
    parts: list[list[tuple[str, int, int]]] = [[], []]
    for i, spec in enumerate(specs):
        cut = spec.numel * 2 // 5 if spec is longest else spec.numel
        parts[i % 2].append((spec.name, 0, cut))
        if cut < spec.numel:
            parts[1 - i % 2].append((spec.name, cut, spec.numel))
    fragments = []
    for fragment_id, ranges in enumerate(parts):
        entries, lanes, end = [], [], 0
        for name, start, stop in ranges:
            entries.append(Entry(name, start, stop, end))
            end += -(-(stop - start) // BLOCK) * BLOCK
        border, widths = 0, itertools.chain([12], itertools.cycle([1, 2, 3]))
        while border < end:
            width = next(widths) * BLOCK
            lanes.append(Lane(len(lanes), border, min(border + width, end)))
            border += width
        fragments.append(Fragment(fragment_id, tuple(entries), end, tuple(lanes)))
    return Plan(tuple(specs), tuple(fragments), BLOCK, 99)


def vector(fragment: Fragment, values: Callable[[str], Tensor]) -> Tensor:
    """Write the canonical vector of a fragment without any of the code under test."""
    result = torch.zeros(fragment.padded_numel)
    for entry in fragment.entries:
        part = values(entry.name).reshape(-1)[entry.start : entry.end]
        result[entry.offset : entry.offset + part.numel()] = part
    return result


def full_values(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gather the unsharded values as this rank's replicas see them; of parts, what is there."""
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in parameters.items()
    }


def island_values(parameters: dict[str, Tensor], plan: Plan) -> dict[str, Tensor]:
    """Put together what all ranks see, each by its own replicas, which must agree.

    Where every rank sees the whole (that is alike on all), only what this one does.
    """
    is_part = any(hasattr(parameter, "_diloco_part") for parameter in parameters.values())
    if not is_part and len(parameters) == len(plan.tensors):
        return full_values(parameters)
    mine = {
        name: (value, getattr(parameters[name], "_diloco_part", (tuple(value.shape), None)))
        for name, value in full_values(parameters).items()
    }
    ranks: list[dict[str, tuple[Tensor, tuple[tuple[int, ...], tuple[int, ...] | None]]]] = [{}]
    ranks *= dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    values: dict[str, Tensor] = {}
    for name, (value, (shape, offsets)) in [item for rank in ranks for item in rank.items()]:
        whole = values.setdefault(name, torch.full(shape, torch.nan))
        where = zip(offsets or (0,) * value.ndim, value.shape, strict=True)
        part = whole[tuple(slice(a, a + n) for a, n in where)]
        assert torch.equal(torch.where(part.isnan(), value, part), value), f"{name}: copies differ"
        part.copy_(value)
    return dict(sorted(values.items()))


# Layouts: each builds the same global values, placed differently.


def plain() -> dict[str, Tensor]:
    return canonical_parameters(Model())


def fsdp(**options: object) -> dict[str, Tensor]:
    model = Model()
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return canonical_parameters(model)


def fsdp_last_dim() -> dict[str, Tensor]:
    return fsdp(shard_placement_fn=lambda p: Shard(1) if p.shape[-1] == 70 and p.ndim > 1 else None)


def hsdp() -> dict[str, Tensor]:
    return fsdp(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def placed_model(mesh: object) -> Model:
    """TP as parallelize_module does it: matrices sharded, norms replicated, some left plain."""
    model = Model()
    for layer in model.layers:
        for name, placement in {
            "colwise": Shard(0),
            "rowwise": Shard(1),
            "conv": Shard(1),
            "norm": Replicate(),
        }.items():
            placed = distribute_tensor(getattr(layer, name).detach(), mesh, [placement])
            setattr(layer, name, nn.Parameter(placed))
    return model


def tp() -> dict[str, Tensor]:
    return canonical_parameters(placed_model(init_device_mesh("cpu", (dist.get_world_size(),))))


def fsdp_tp() -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = placed_model(mesh["tp"])
    model.embed.weight = nn.Parameter(
        distribute_tensor(model.embed.weight.detach(), mesh["tp"], [Shard(0)])
    )
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    parameters = canonical_parameters(model)
    assert any(isinstance(p, _StridedShard) for p in parameters["layers.0.colwise"].placements)
    return parameters


def tied_fsdp() -> dict[str, Tensor]:
    model = Model(is_tied=True)
    fully_shard(model)
    parameters = canonical_parameters(model)
    assert model.embed.weight is model.head.weight is parameters["embed.weight"]
    assert "head.weight" not in parameters
    return parameters


class Stage(nn.Module):
    """One of two pipeline stages: its own part of the model, by the names of the whole."""

    def __init__(self, index: int, *, is_tied: bool = False) -> None:
        super().__init__()
        whole = Model()  # in which tied parameters have values of their own
        self.layers = nn.ModuleDict({str(index): whole.layers[index]})
        if index == 0:
            self.embed = whole.embed
        else:
            self.head = whole.head
        if is_tied and index == 1:
            self.tied_parameters = {"head.weight": "embed.weight"}
            self.head.weight.data.copy_(Model(is_tied=True).head.weight)


def stages() -> dict[str, Tensor]:
    return canonical_parameters(Stage(dist.get_rank()))


def tied_stages() -> dict[str, Tensor]:
    parameters = canonical_parameters(torch.compile(Stage(dist.get_rank(), is_tied=True)))
    assert "embed.weight" in parameters and "head.weight" not in parameters
    return parameters


def tied_fsdp_stages() -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = Stage(mesh.get_local_rank("pp"), is_tied=True)
    fully_shard(stage, mesh=mesh["dp"])
    return canonical_parameters([stage])


def uneven_experts(mesh: object) -> tuple[Tensor, list[int], list[int]]:
    """This rank's experts of the first layer: 3 or 2 of 5."""
    whole = Model().layers[0].experts.detach()
    first, last = ((0, 3), (3, 5))[mesh.get_local_rank("ep")]
    return whole[first:last].clone(), list(whole.shape), [first, 0, 0]


def experts() -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    model = Model()
    part, shape, offsets = uneven_experts(mesh)
    model.layers[0].experts = declare_part(nn.Parameter(part), shape, offsets)
    model.layers[1].experts = nn.Parameter(
        distribute_tensor(model.layers[1].experts.detach(), mesh, [Shard(0)])
    )
    return canonical_parameters(model)


def fsdp_experts() -> dict[str, Tensor]:
    """Experts over ep, as parts and as DTensors, and over dp by FSDP; the rest over all ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    model = Model()
    part, shape, offsets = uneven_experts(mesh)
    model.layers[0].experts = nn.Parameter(part)
    model.layers[1].experts = nn.Parameter(
        distribute_tensor(model.layers[1].experts.detach(), mesh["ep"], [Shard(0)])
    )
    holders = [nn.ParameterDict({"experts": layer.experts}) for layer in model.layers]
    for holder, layer in zip(holders, model.layers, strict=True):
        del layer.experts
        fully_shard(holder, mesh=mesh["dp"], shard_placement_fn=lambda p: Shard(1))
    fully_shard(model, mesh=mesh._flatten("all"))
    declare_part(holders[0].experts, shape, offsets)
    named = {f"layers.{i}.experts": holder.experts for i, holder in enumerate(holders)}
    return canonical_parameters({**named, **dict(model.named_parameters())})


# Checks: what every rank runs for every layout.


def check_hook(parameters: dict[str, Tensor]) -> None:
    for name, full in full_values(parameters).items():
        box = stored_box(parameters[name])
        if part := getattr(parameters[name], "_diloco_part", None):
            box = box.shifted(-offset for offset in part[1])
        where = zip(box.offsets, box.sizes, strict=True)
        local = parameters[name]
        local = local.to_local() if isinstance(local, DTensor) else local
        assert torch.equal(local, full[tuple(slice(a, a + n) for a, n in where)]), name


def check_collect(shards_: LaneShards, plan: Plan, full: dict[str, Tensor]) -> str:
    """Collected lanes are the canonical vector, each on its carrier; returns their digest."""
    digest = blake3.blake3()
    for fragment in plan.fragments:
        mine = shards_.collect(fragment.fragment_id)
        assert tuple(mine) == shards_.lanes_of(fragment.fragment_id)
        everybody: list[dict[int, Tensor]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everybody, mine)
        expected = vector(fragment, full.__getitem__)
        for lane in fragment.lanes:
            carrier = shards_.carrier(fragment.fragment_id, lane.lane_id)
            lane_values = everybody[carrier][lane.lane_id]
            assert torch.equal(lane_values, expected[lane.start : lane.end]), (fragment, lane)
            digest.update(lane_values.numpy().tobytes())
        assert sum(map(len, everybody)) == len(fragment.lanes)
        # Only owners send: what travels is the fragment once, however many replicas there are.
        route = shards_._collect[fragment.fragment_id]
        sent = torch.tensor(sum(sum(held.splits) for held, _ in route))
        dist.all_reduce(sent)
        assert sent == fragment.numel
    return digest.hexdigest()


def check_distribute(
    shards_: LaneShards, plan: Plan, parameters: dict[str, Tensor], local_mix: float | None
) -> None:
    """Every rank's own copies hold the mixture, None: the sum, and nothing else has changed."""
    for fragment in plan.fragments:
        before = island_values(parameters, plan)
        news = {n: global_values(n, tuple(v.shape), 1) for n, v in before.items()}
        published = vector(fragment, news.__getitem__)
        published_lanes = {
            lane.lane_id: published[lane.start : lane.end]
            for lane in fragment.lanes
            if lane.lane_id in shards_.lanes_of(fragment.fragment_id)
        }

        if local_mix is None:
            shards_.add(fragment.fragment_id, published_lanes)
        else:
            shards_.distribute(fragment.fragment_id, published_lanes, local_mix)

        expected = {name: value.clone() for name, value in before.items()}
        for entry in fragment.entries:
            span = slice(entry.start, entry.end)
            held, new = (v[entry.name].view(-1)[span] for v in (expected, news))
            if local_mix is None:
                held.add_(new)
            else:
                merge_(held, new, local_mix)
        # full_tensor() reads this rank's own replica: over all ranks it covers every copy.
        after = island_values(parameters, plan)
        for name, value in expected.items():
            assert torch.equal(after[name], value), (name, fragment.fragment_id)


@contextmanager
def slabs_of(num_bytes: int) -> Iterator[None]:
    default, routes.SLAB_BYTES = routes.SLAB_BYTES, num_bytes
    try:
        yield
    finally:
        routes.SLAB_BYTES = default


def check_layouts(island_rank: int, names: list[str]) -> dict[str, str]:
    """Run all checks; returns the digest of the initial values by layout."""
    digests = {}
    num_ranks = dist.get_world_size()
    for name in names:
        for slab_bytes, hosts in [(2**28, 0), (1200 * num_ranks, 0), (4000, 1)]:
            parameters = globals()[name]()
            plan = awkward_plan(tensor_specs(parameters, group=dist.group.WORLD))
            own_host = mock.patch("socket.gethostname", lambda: f"host-{island_rank}")
            with slabs_of(slab_bytes), own_host:
                lane_shards = LaneShards(
                    plan, parameters, group=dist.group.WORLD, carrier_hosts=hosts
                )
            if hosts:
                assert {*lane_shards._layout.carriers.values()} == {0}
            num_slabs = len(lane_shards._collect[0])
            assert (num_slabs == 1) if slab_bytes == 2**28 else (num_slabs > 1), num_slabs
            try:
                check_hook(parameters)
                digest = check_collect(lane_shards, plan, island_values(parameters, plan))
                assert digests.setdefault(name, digest) == digest
                check_distribute(lane_shards, plan, parameters, 0.5)
                check_distribute(lane_shards, plan, parameters, None)
                check_distribute(lane_shards, plan, parameters, 0.0)
                check_collect(lane_shards, plan, island_values(parameters, plan))
                check_distribute(lane_shards, plan, parameters, 1.0)
            except BaseException as error:
                error.add_note(f"layout={name} slab_bytes={slab_bytes} hosts={hosts}")
                raise
    return digests


def one_rank_digest(parameters: dict[str, Tensor]) -> str:
    plan = awkward_plan(tensor_specs(parameters))
    lane_shards = LaneShards(plan, parameters, group=None)
    digest = blake3.blake3()
    for fragment in plan.fragments:
        for lane in lane_shards.collect(fragment.fragment_id).values():
            digest.update(lane.numpy().tobytes())
    return digest.hexdigest()


def expected_digests(names: list[str]) -> dict[str, str]:
    tied = one_rank_digest(canonical_parameters(Model(is_tied=True)))
    untied = one_rank_digest(plain())
    return {name: tied if name.startswith("tied") else untied for name in names}


@pytest.mark.parametrize(
    ("num_ranks", "names"),
    [
        (2, ["plain", "fsdp", "fsdp_last_dim", "tp", "tied_fsdp"]),
        (2, ["stages", "tied_stages", "experts"]),
        (3, ["fsdp"]),
        (4, ["fsdp", "tp", "fsdp_tp", "hsdp"]),
        pytest.param(4, ["tied_fsdp_stages", "fsdp_experts"], marks=pytest.mark.slow),
    ],
    ids=["2-ranks", "2-ranks-in-parts", "3-ranks", "4-ranks", "4-ranks-in-parts"],
)
def test_lanes_are_the_canonical_vector_on_every_layout(num_ranks: int, names: list[str]) -> None:
    assert run_ranks(check_layouts, num_ranks, names) == [expected_digests(names)] * num_ranks


# Refusals.


def refusals(island_rank: int) -> None:
    group = dist.group.WORLD
    parameters = plain()
    plan = awkward_plan(tensor_specs(parameters))

    def refused(error: type[Exception], words: str, mine: dict[str, Tensor], **options: object):
        with pytest.raises(error, match=words):
            LaneShards(plan, mine, group=group, **options)

    half = {**parameters, "head.weight": nn.Parameter(torch.zeros(13, 50, dtype=torch.bfloat16))}
    words = "island rank 1.*'head.weight' is torch.bfloat16.*float32 masters"
    refused(ValueError, words, half if island_rank == 1 else parameters)

    lacking = {n: p for n, p in parameters.items() if n != "layers.1.norm"}
    refused(PlanMismatch, r"no rank of the island stores \['layers.1.norm'\]", lacking)
    first = {"layers.1.norm": declare_part(torch.zeros(30), [70], [0])}
    refused(ValueError, r"'layers.1.norm' \[70\] once.*they store 30", {**lacking, **first})
    refused(PlanMismatch, r"plan lacks: \['extra'\]", {**parameters, "extra": torch.zeros(1)})
    reshaped = {**parameters, "head.weight": torch.zeros(50, 13)}
    refused(PlanMismatch, r"'head.weight' has the shape \[50, 13\], in the plan", reshaped)

    refused(PlanMismatch, "1: its plan or its carriers", parameters, carrier_hosts=island_rank)

    mixed = dict(parameters)
    mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(parameters["head.weight"].detach(), mesh, [Shard(0)])
    if island_rank == 1:
        mixed["head.weight"] = sharded
    refused(ValueError, r"'head.weight'.*some in differing shards", mixed)

    named = {"w": torch.zeros(2 + island_rank, 3)}
    with pytest.raises(PlanMismatch, match=r"'w' is a .* \[2, 3\] .* rank 0 and .* \[3, 3\]"):
        tensor_specs(named, group=group)
    named, frozen = ({"w": torch.zeros(2)}, []) if island_rank == 0 else ({}, ["w"])
    with pytest.raises(PlanMismatch, match="'w' is trained on island rank 0 and frozen on rank 1"):
        tensor_specs(named, frozen=frozen, group=group)
    with pytest.raises(ValueError, match=r"\[2\] at \[3\] does not lie in .* \[4\]"):
        declare_part(torch.zeros(2), [4], [3])

    lane_shards = LaneShards(plan, parameters, group=group)
    lanes = lane_shards.collect(0)
    lanes.popitem()
    with pytest.raises(ValueError, match=f"fragment 0: island rank {island_rank} needs"):
        lane_shards.distribute(0, lanes, 0.0)


def test_what_cannot_be_laid_out_is_refused_on_all_ranks() -> None:
    run_ranks(refusals, 2)


# One rank, and names.


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_parameters_after_a_forward_alone_are_the_sharded_ones() -> None:
    model = Model()
    fully_shard(model)
    with torch.no_grad():
        model(torch.zeros(1, 2, dtype=torch.int64))
    assert not isinstance(model.head.weight, DTensor)  # FSDP2 leaves its root unsharded

    parameters = canonical_parameters(model)

    assert all(isinstance(parameter, DTensor) for parameter in parameters.values())


def test_one_rank_round_trip_needs_no_group() -> None:
    parameters = {**plain(), "scale": nn.Parameter(torch.tensor(3.0))}
    plan = awkward_plan(tensor_specs(parameters))
    lane_shards = LaneShards(plan, parameters, group=None)
    before = full_values(parameters)

    lanes = {f.fragment_id: lane_shards.collect(f.fragment_id) for f in plan.fragments}
    for parameter in parameters.values():
        parameter.data.zero_()
    for fragment_id, values in lanes.items():
        lane_shards.distribute(fragment_id, values, 0.0)

    assert all(torch.equal(parameters[name], before[name]) for name in before)
    collected = torch.cat(list(lanes[0].values()))
    assert torch.equal(collected, vector(plan.fragments[0], before.__getitem__))


def test_range_of_a_tensor_is_few_boxes_that_hold_exactly_its_elements() -> None:
    for shape in [(), (1,), (7,), (3, 5), (1, 4), (4, 1), (3, 1, 4), (2, 3, 4), (2, 1, 2, 3)]:
        numel = math.prod(shape)
        flat = torch.arange(numel).view(shape)
        for start, end in itertools.combinations_with_replacement(range(numel + 1), 2):
            boxes = boxes_of_range(shape, start, end)
            elements = [
                flat[tuple(slice(a, a + n) for a, n in zip(b.offsets, b.sizes, strict=True))]
                for b in boxes
            ]
            held = sorted(i for part in elements for i in part.reshape(-1).tolist())
            assert held == list(range(start, end)), (shape, start, end)
            assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_copies_of_a_rowwise_shard_are_few_whatever_its_rows() -> None:
    specs = [TensorSpec("w", (4096, 96))]
    numel = 4096 * 96
    entry = Entry("w", 0, numel, 0)
    plan = Plan(tuple(specs), (Fragment(0, (entry,), numel, (Lane(0, 0, numel),)),), BLOCK, 1)
    lane_shards = LaneShards(plan, {"w": torch.zeros(4096, 96)}, group=None)

    layout = replace(lane_shards._layout, holders={"w": {0: Box((0, 32), (4096, 32))}})
    collect, _ = layout.routes(plan.fragments[0], 0, 1)

    assert [copy.box for copy in collect.held[0]] == [Box((0, 0), (4096, 32))]


def wrap(model: nn.Module) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model.layers[0] = checkpoint_wrapper(model.layers[0])
    model.layers[1] = torch.compile(model.layers[1], backend="eager")
    return nn.DataParallel(torch.compile(model, backend="eager"))


def test_names_lose_what_wrappers_add_and_nothing_else() -> None:
    model = Model()
    model.module = nn.Linear(2, 2, bias=False)  # a module of the user's own called so

    names = set(canonical_parameters(wrap(model)))

    assert names == {
        "embed.weight",
        "head.weight",
        "module.weight",
        *(f"layers.{i}.{n}" for i in (0, 1) for n in dict(Layer().named_parameters())),
    }


def test_tied_parameters_come_once_under_the_first_name() -> None:
    parameters = canonical_parameters(Model(is_tied=True))

    assert "embed.weight" in parameters and "head.weight" not in parameters
    assert list(parameters) == sorted(parameters)


def test_parts_of_a_model_give_one_set_of_names() -> None:
    model = Model()
    first = nn.ModuleDict({"embed": model.embed})
    second = nn.ModuleDict({"layers": model.layers, "head": model.head})

    parts = canonical_parameters([first, second])

    assert {n: id(p) for n, p in parts.items()} == {
        n: id(p) for n, p in canonical_parameters(model).items()
    }


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        (lambda: [Model(), Model()], "two different parameters are called 'embed.weight'"),
        (lambda: Model().bfloat16(), "'embed.weight' is torch.bfloat16.*float32 masters"),
        (lambda: Model().requires_grad_(False), "no parameter with requires_grad"),
    ],
    ids=["names-shared", "bfloat16", "all-frozen"],
)
def test_modules_without_clear_float32_masters_are_refused(
    modules: Callable[[], nn.Module], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        canonical_parameters(modules())


def test_memory_that_was_given_back_is_used_again() -> None:
    torch.manual_seed(5)
    parameters = {"a": torch.randn(300, requires_grad=True)}
    parameters["b"] = torch.randn(7, 11, requires_grad=True)
    plan = awkward_plan(tensor_specs(parameters))
    shards = LaneShards(plan, parameters, group=None)
    first = shards.collect(0)
    expected = {lane_id: lane.clone() for lane_id, lane in first.items()}
    second = shards.collect(0)  # the first is still somebody's
    for lane in first.values():
        lane.fill_(torch.nan)  # padding, too
    shards.reuse(first)

    third = shards.collect(0)

    for lane_id, lane in expected.items():
        assert torch.equal(second[lane_id], lane)
        assert torch.equal(third[lane_id], lane)
        assert third[lane_id].data_ptr() == first[lane_id].data_ptr()


@pytest.mark.parametrize("seed", range(200))
def test_boxes_are_disjoint_or_not_as_every_pair_says(seed: int) -> None:
    rng = random.Random(seed)
    ndim, is_regular = rng.randint(1, 3), rng.random() < 0.5
    ends = [sorted({0, 12, *rng.sample(range(1, 12), rng.randint(0, 4))}) for _ in range(ndim)]
    grid = [
        Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell))
        for cell in itertools.product(*(itertools.pairwise(each) for each in ends))
    ]
    boxes = set(rng.sample(grid, rng.randint(1, len(grid))))
    if not is_regular:
        offsets = tuple(rng.randint(0, 11) for _ in range(ndim))
        boxes.add(Box(offsets, tuple(rng.randint(1, 12 - offset) for offset in offsets)))

    expected = not any(a.intersect(b) for a, b in itertools.combinations(boxes, 2))

    assert are_disjoint(boxes) == expected


def test_shards_of_many_ranks_are_compared_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = Counter[str]()
    monkeypatch.setattr(Box, "intersect", lambda *_: counts.update(["pairs"]))

    shards = [Box((8 * row, 16 * column), (8, 16)) for row in range(512) for column in range(8)]

    assert are_disjoint(shards) and not counts
    assert not are_disjoint([*shards, shards[7]])
