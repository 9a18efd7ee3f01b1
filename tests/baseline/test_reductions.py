"""Two islands of two ranks: what all-reduce and local SGD make of sums, losses and parameters.

Real processes, gRPC between islands, gloo inside; all cases in one process group.
"""

import asyncio
from functools import cache

import pytest
import torch
import torch.distributed as dist

from diloco.baseline.exchange import Bounds, ValueExchange
from diloco.baseline.gradients import GradientSum, ParameterMean
from diloco.baseline.group import BaselineGroup, BaselineMember
from diloco.baseline.hops import GroupHop, TransportHop
from diloco.baseline.reduction import (
    FlatReduction,
    HierarchicalReduction,
    Inside,
    all_reduce,
    padded_numel,
)
from diloco.compression.registry import get_codec
from diloco.config.inner import InnerConfig, InnerOptimizerConfig
from diloco.config.mesh import MeshConfig
from diloco.io_thread import IoThread
from diloco.trainer.parallel.mesh import IslandMesh
from diloco.trainer.trainer import InnerTrainer
from diloco.transport.grpc.client import GrpcTransport
from diloco.transport.grpc.server import GrpcServer
from tests.distributed import run_ranks
from tests.trainer.small_island import (
    BATCH_SIZE,
    CPU,
    INNER_STEPS,
    make_model,
    small_data,
    whole_parameters,
)

ISLANDS = {"east": 2, "west": 2}
CODECS = ("float32", "bfloat16", "int8")
NUMEL, CHUNK_NUMEL = 10_007, 2_048
#: Of gradients: a million values in some chunks, the last one not full.
GRADIENT_CHUNK_NUMEL = 1 << 17
H, FIRST = 3, 2
ALONE = IslandMesh(CPU, MeshConfig())  # a member holds the whole model
# Sums in another order, as between layouts of an island (tests/trainer/test_layouts.py).
LOSS_TOLERANCE = 5e-6
PARAMETER_TOLERANCE = 1e-4


def values_of(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(NUMEL, generator=generator)


class Site:
    """One member, put together by hand over the default group of all four."""

    def __init__(self, rank):
        self.place = BaselineGroup(BaselineMember(("east", "west")[rank // 2], rank % 2), ISLANDS)
        members = self.place.members
        bounds = Bounds(max_bytes=1 << 20, max_vectors=1000, patience_s=20.0, streams=4)
        self.exchange = ValueExchange(self.place.own, "test", frozenset(members), bounds)
        self.io = IoThread()
        self.io.start()
        self.server = GrpcServer("127.0.0.1:0", self.exchange.handlers)
        self.io.run(self.server.start())
        addresses = [None] * len(members)
        dist.all_gather_object(addresses, self.server.address)
        ways = {m: GrpcTransport(a) for m, a in zip(members, addresses, strict=True)}
        self.exchange.connect(ways)
        pairs = [[dist.new_group(pair) for _ in range(2)] for pair in ([0, 1], [2, 3])]
        self.inside = Inside(*pairs[rank // 2])
        self.column = [dist.new_group(pair) for pair in ([0, 2], [1, 3])][rank % 2]

    def flat(self, codec="float32", numel=CHUNK_NUMEL):
        return FlatReduction(self.place, self.exchange, self.io, get_codec(codec), numel)

    def hierarchical(self, codec="float32", numel=CHUNK_NUMEL, *, only_inside=False):
        hop = TransportHop(self.place, self.exchange, self.io, get_codec(codec))
        hop = None if only_inside else hop
        return HierarchicalReduction(self.place, hop, self.inside, numel)

    def in_groups(self, codec="float32", numel=CHUNK_NUMEL):
        hop = GroupHop(self.place, self.column, get_codec(codec))
        return HierarchicalReduction(self.place, hop, self.inside, numel)

    def close(self):
        dist.barrier()
        self.io.run(self.server.stop(1.0))
        self.io.run(self.exchange.close())
        self.io.stop()


def summed(reduction, values):
    flat = torch.zeros(padded_numel(reduction, NUMEL))
    flat[:NUMEL] = values
    all_reduce(reduction, flat)
    assert not flat[NUMEL:].any()
    return flat[:NUMEL].clone()


class UnionOfIslands:
    """The batches of both islands at a step, one after the other."""

    def __init__(self):
        self._islands = [island_batches(slot) for slot in range(len(ISLANDS))]

    def batch(self, step):
        return torch.cat([batches.batch(step) for batches in self._islands])


def island_batches(slot, rank=0, ranks=1):
    return small_data().batches(
        slots=(slot,),
        num_slots=len(ISLANDS),
        batch_size=BATCH_SIZE,
        dp_coordinate=rank,
        dp_size=ranks,
    )


def make_trainer(batches, batch_size, micro_batches=1, make_hook=None, mesh=ALONE):
    model = make_model(mesh)
    optimizer = InnerOptimizerConfig(lr=2e-3, warmup_steps=2)
    return InnerTrainer(
        model,
        mesh=mesh,
        batches=batches,
        evaluation=small_data().evaluation(4),
        config=InnerConfig(optimizer=optimizer, clip_norm=0.5),
        micro_batches=micro_batches,
        batch_size=batch_size,
        inner_steps=INNER_STEPS,
        clock=iter(range(1_000_000)).__next__,
        gradient_hook=make_hook(list(model.parameters())) if make_hook else None,
    )


def train(site, reduction, micro_batches=1):
    own = site.place.own
    trainer = make_trainer(
        island_batches(sorted(ISLANDS).index(own.island), own.island_rank, 2),
        BATCH_SIZE // 2,
        micro_batches,
        lambda parameters: GradientSum(parameters, reduction, weight=1 / 4),
    )
    metrics = [trainer.inner_step(step).read() for step in range(INNER_STEPS)]
    losses, norms = [m.loss for m in metrics], [m.grad_norm for m in metrics]
    return losses, norms, whole_parameters(trainer.model)


def train_locally(site):
    """Data parallel for the first steps, then an average after every third."""
    own = site.place.own
    everywhere = site.hierarchical(numel=GRADIENT_CHUNK_NUMEL)
    inside = site.hierarchical(numel=GRADIENT_CHUNK_NUMEL, only_inside=True)
    hooks = []

    def make_hook(parameters):
        hooks.append(GradientSum(parameters, everywhere, weight=1 / 4))
        return hooks[0]

    batches = island_batches(sorted(ISLANDS).index(own.island), own.island_rank, 2)
    trainer = make_trainer(batches, BATCH_SIZE // 2, 1, make_hook)
    mean = ParameterMean(trainer.model.parameters(), everywhere, weight=1 / 4)
    for step in range(FIRST + H):
        if step == FIRST:
            hooks[0].over(inside, 1 / 2)
        trainer.inner_step(step)
    apart = whole_parameters(trainer.model)
    mean.average()
    return apart, whole_parameters(trainer.model)


def run_member(rank):
    site = Site(rank)
    own = values_of(rank)
    result = {
        "flat": {codec: summed(site.flat(codec), own).numpy() for codec in CODECS},
        "hierarchical": {codec: summed(site.hierarchical(codec), own).numpy() for codec in CODECS},
        "in-groups": {codec: summed(site.in_groups(codec), own).numpy() for codec in CODECS},
        "bytes": (site.exchange.bytes_up, site.exchange.bytes_down),
        "train-flat": train(site, site.flat(numel=GRADIENT_CHUNK_NUMEL)),
        "train-hierarchical": train(site, site.hierarchical(numel=GRADIENT_CHUNK_NUMEL)),
        "train-in-groups": train(site, site.in_groups(numel=GRADIENT_CHUNK_NUMEL)),
        "train-micro": train(site, site.hierarchical(numel=GRADIENT_CHUNK_NUMEL), micro_batches=2),
        "local": train_locally(site),
    }
    site.close()
    return result


@cache
def all_members():
    return run_ranks(run_member, 4, timeout_s=100)


@cache
def one_process():
    trainer = make_trainer(UnionOfIslands(), 2 * BATCH_SIZE)
    metrics = [trainer.inner_step(step).read() for step in range(INNER_STEPS)]
    return metrics, whole_parameters(trainer.model)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("kind", ["flat", "hierarchical"])
@pytest.mark.timeout(120)
def test_all_members_hold_the_same_bits_of_the_sum(kind, codec):
    first, *others = (member[kind][codec] for member in all_members())
    exact = sum(values_of(number).double() for number in range(4))

    assert all(first.tobytes() == other.tobytes() for other in others)
    # |values| < 5 and sums < 12. float32: 4 additions. 16 bits: 8 significant bits of up to 6 terms
    # that are each below 12. int8: half a step of 1/127 of the largest of a block, as often.
    bound = {"float32": 1e-5, "bfloat16": 6 * 12 / 2**8, "int8": 6 * 12 / 254}[codec]
    assert (torch.from_numpy(first) - exact).abs().max() < bound


@pytest.mark.timeout(120)
def test_hierarchical_sums_are_those_of_islands_in_order():
    east, west = (values_of(0) + values_of(1)), (values_of(2) + values_of(3))

    assert torch.equal(torch.from_numpy(all_members()[0]["hierarchical"]["float32"]), east + west)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.timeout(120)
def test_process_groups_between_islands_give_the_same_bits_as_a_transport(codec):
    for member in all_members():
        assert member["in-groups"][codec].tobytes() == member["hierarchical"][codec].tobytes()


@pytest.mark.parametrize(
    "kind", ["train-flat", "train-hierarchical", "train-in-groups", "train-micro"]
)
@pytest.mark.timeout(120)
def test_data_parallel_over_islands_is_one_process_with_the_union_of_their_batches(kind):
    metrics, parameters = one_process()
    members = [member[kind] for member in all_members()]

    for step, expected in enumerate(metrics):
        losses = [losses[step] for losses, _, _ in members]
        assert sum(losses) / 4 == pytest.approx(expected.loss, abs=LOSS_TOLERANCE)
        assert {norms[step] for _, norms, _ in members} == {members[0][1][step]}
        assert members[0][1][step] == pytest.approx(expected.grad_norm, rel=1e-4)
    for name, value in parameters.items():
        assert abs(members[0][2][name] - value).max() <= PARAMETER_TOLERANCE, name
        assert all((ours[name] == members[0][2][name]).all() for _, _, ours in members), name


@pytest.mark.timeout(120)
def test_local_sgd_averages_what_islands_have_learnt_apart():
    (east, mean), (_, mean_too), (west, _), (_, mean_of_west) = (m["local"] for m in all_members())

    assert max(abs(east[name] - west[name]).max() for name in east) > 1e-3
    for name, value in mean.items():
        assert (value == mean_too[name]).all() and (value == mean_of_west[name]).all()
        # A quarter of each of four: rounded in another order than the mean of two.
        assert abs(value - (east[name] + west[name]) / 2).max() <= 1e-6, name


@pytest.mark.timeout(120)
def test_a_hierarchical_reduction_sends_each_shard_once_each_way():
    # The ring's edges between islands are two of four, and carry 6/4 of the vector; hierarchical
    # every rank carries half of it, in the same three codecs.
    sent = [member["bytes"] for member in all_members()]
    wire = [get_codec(codec).wire_bytes(NUMEL) for codec in CODECS]

    for island in (sent[:2], sent[2:]):
        up, down = (sum(each[way] for each in island) for way in (0, 1))
        assert up == down
        assert up == pytest.approx((1.5 + 1) * sum(wire), rel=0.03)  # the last chunk is padded


def test_a_silent_member_is_named_within_its_deadline():
    east, west = BaselineMember("east", 0), BaselineMember("west", 1)
    bounds = Bounds(max_bytes=100, max_vectors=1, patience_s=0.1, streams=1)
    exchange = ValueExchange(east, "test", frozenset({east, west}), bounds)

    with pytest.raises(Exception, match=r"rank 1 of island west has sent nothing for 1 s, and chu"):
        asyncio.run(exchange.receive(west, (0, 3, 0)))
