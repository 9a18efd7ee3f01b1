"""An island of two real ranks against a real syncer over gRPC: agreement, cuts, failures, resume.

One tensor-parallel pair of parameters: a sharded matrix and a replicated norm, in two lanes, one
on each rank (or both on one). Rank 0 also hosts the syncer, in a thread of its own.
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from diloco.errors import AggregationError, CodecError, DilocoError, IslandFailed
from diloco.io_thread import IoThread
from diloco.island.agreement import Agreement
from diloco.island.exchange.calls import ExchangeRules
from diloco.island.exchange.exchange import Exchange, SyncerConnection
from diloco.island.lanes.parameters import canonical_parameters, tensor_specs
from diloco.island.lanes.shards import LaneShards
from diloco.island.outer_loop import OuterLoop
from diloco.island.outer_state import LoopParts
from diloco.outer.fragments import Plan, make_plan
from diloco.outer.optimizer import OuterOptimizer
from diloco.outer.schedule import Schedule
from diloco.protocol.rounds.timing import TimingRules
from diloco.syncer.rules import SyncerRules
from diloco.syncer.syncer import Syncer
from diloco.syncer.worker import Workers
from diloco.telemetry.events import Event, FragmentSent, PublishedTaken
from diloco.transport.contracts import Buffer, Reply
from diloco.transport.errors import ConnectError
from diloco.transport.grpc.client import GrpcTransport
from diloco.transport.grpc.server import GrpcServer
from diloco.transport.retry import RetryPolicy
from diloco.transport.transfer import Transfer
from diloco.versions.pins import restore
from diloco.versions.publication import PublicationRules
from diloco.versions.store import FragmentStore
from tests.distributed import run_ranks
from tests.virtual_run import RUN, InlineWorker, MemoryIncarnations, grant
from tests.waiting import wait_until

ROWS, COLUMNS = 300, 128
COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all",
    "all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "gather", "irecv",
    "isend", "recv", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "send",
)  # fmt: skip


class CutWire:
    """A gRPC transport that can be cut, one method or all of them."""

    def __init__(self, address: str) -> None:
        self._inner = GrpcTransport(address)
        self.cut: str | None = None
        self.num_calls = 0

    @property
    def peer(self) -> str:
        return self._inner.peer

    async def call(
        self,
        method: str,
        header: bytes,
        payload: Buffer = b"",
        *,
        deadline_s: float,
        max_reply_bytes: int = 0,
        transfer: Transfer | None = None,
    ) -> Reply:
        if self.cut == method:
            raise ConnectError("cut", peer=self.peer, method=method)
        self.num_calls += 1
        return await self._inner.call(
            method,
            header,
            payload,
            deadline_s=deadline_s,
            max_reply_bytes=max_reply_bytes,
            transfer=transfer,
        )

    async def close(self) -> None:
        await self._inner.close()


@dataclass(frozen=True)
class Kept:
    """A checkpoint of the whole island: the union of its ranks' outer states."""

    inner_step: int
    whole: dict[str, Tensor]
    outer: dict[str, Tensor]


@dataclass
class Rank:
    """One rank of the island, ready to train."""

    session: OuterLoop
    exchange: Exchange
    io: IoThread
    control: CutWire
    data: CutWire
    parameters: dict[str, Tensor]
    events: list[Event]

    @property
    def norm(self) -> Tensor:
        norm = self.parameters["norm"]
        assert isinstance(norm, DTensor)
        return norm.to_local().detach()

    def whole(self) -> dict[str, Tensor]:
        """All parameters unsharded; collective."""
        return {
            name: (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter)
            .detach()
            .clone()
            for name, parameter in self.parameters.items()
        }

    def train(self, inner_steps: int) -> None:
        """Make inner steps that move every element by an amount of its own."""
        for _ in range(inner_steps):
            inner_step = self.session.inner_step + 1
            generator = torch.Generator().manual_seed(inner_step)
            with torch.no_grad():
                for name in sorted(self.parameters):
                    parameter = self.parameters[name]
                    move = torch.randn(parameter.shape, generator=generator) * 0.01
                    if isinstance(parameter, DTensor):
                        move = distribute_tensor(move, parameter.device_mesh, parameter.placements)
                    parameter.sub_(move)
            self.io.drive(self.session.stepping(100))


@contextmanager
def serving(
    island_rank: int,
    plan: Plan,
    directory: str,
    *,
    timeline: int,
    num_ranks: int,
    total_tokens: int = 0,
) -> Iterator[str]:
    """Let rank 0 serve; gives its address to all ranks. With tokens, a run on arrival."""
    address: list[str | None] = [None]
    thread = IoThread()

    async def serve() -> tuple[Syncer, GrpcServer]:
        syncer = Syncer(
            plan,
            SyncerRules(
                timeline,
                ("island",),
                PublicationRules("int4", "int4", OuterOptimizer("nesterov", 0.7, 0.9, 0), seed=0),
                60.0,
                1,
                min_members=1 if total_tokens else None,
                timing=TimingRules(6, 2, 0.5, 10.0, 60.0) if total_tokens else None,
                total_tokens=total_tokens,
            ),
            [FragmentStore(Path(directory), fragment, 4) for fragment in plan.fragments],
            syncer_epoch=1,
            incarnations=MemoryIncarnations(),
            is_granted=lambda held: held.run == RUN,
            workers=Workers.all_by(InlineWorker()),
            on_record=lambda header: None,
            on_change=lambda: None,
        )
        await syncer.start()
        server = GrpcServer("127.0.0.1:0", syncer.handlers)
        await server.start()
        address[0] = server.address
        return syncer, server

    if island_rank == 0:
        thread.start()
        syncer, server = thread.run(serve())
    if num_ranks > 1:
        dist.broadcast_object_list(address, src=0)
    assert address[0] is not None
    try:
        yield address[0]
        if num_ranks > 1:
            dist.barrier()  # nobody stops the syncer while the other rank still needs it
    finally:
        if island_rank == 0:
            thread.run(server.stop(0.0))
            thread.run(syncer.stop())
            thread.stop()


@contextmanager
def island(
    island_rank: int,
    *,
    local_mix: float = 0.0,
    unreachable_s: float = 40.0,
    error_feedback: bool = False,
    num_ranks: int = 2,
    directory: str | None = None,
    kept: Kept | None = None,
    total_tokens: int = 0,
    carrier_hosts: int = 0,
) -> Iterator[Rank]:
    """H = 6, tau = 2; version 0 founded, or gone on from what was `kept`.

    With `total_tokens` it sends and merges on arrival until they are merged.
    """
    timeline = 0 if kept is None else 1
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)) if num_ranks == 2 else None
    model = nn.Module()
    generator = torch.Generator().manual_seed(1)
    for name, shape, placement in (
        ("matrix", (ROWS, COLUMNS), Shard(0)),
        ("norm", (COLUMNS,), Replicate()),
    ):
        values = torch.randn(shape, generator=generator)
        if kept is not None:
            values = kept.whole[name]
        stored = values.clone() if mesh is None else distribute_tensor(values, mesh, [placement])
        setattr(model, name, nn.Parameter(stored))
    parameters = canonical_parameters(model)
    plan = make_plan(tensor_specs(parameters), num_fragments=1)
    assert len(plan.fragments[0].lanes) == 2
    events: list[Event] = []
    io = IoThread()
    io.start()
    if kept is not None and island_rank == 0:
        assert directory is not None
        restore(Path(directory), plan, step=kept.inner_step, abandoned_timeline=0)
    with (
        tempfile.TemporaryDirectory() as fresh,
        serving(
            island_rank,
            plan,
            directory or fresh,
            timeline=timeline,
            num_ranks=num_ranks,
            total_tokens=total_tokens,
        ) as address,
    ):
        groups: list[dist.ProcessGroup | None] = [None, None]
        if num_ranks == 2:
            groups = [dist.new_group(backend="gloo") for _ in groups]
        with mock.patch("socket.gethostname", lambda: f"host-{island_rank}"):
            shards = LaneShards(plan, parameters, group=groups[0], carrier_hosts=carrier_hosts)
        if not carrier_hosts:
            assert shards.lanes_of(0) == ((island_rank,) if num_ranks == 2 else (0, 1))
        control, data = CutWire(address), CutWire(address)
        exchange = Exchange(
            plan,
            {0: shards.lanes_of(0)},
            connections=[SyncerConnection([0], control, data)],
            grant=grant("island", 1 + timeline, timeline),
            rules=ExchangeRules(
                "int4",
                error_feedback,
                30.0,
                RetryPolicy(max_wait_s=1.0, budget_s=unreachable_s),
                seed=0,
                on_arrival=bool(total_tokens),
            ),
            rng=random.Random(island_rank),
            on_event=events.append,
            is_leader=island_rank == 0,
        )
        session = OuterLoop(LoopParts(
            plan,
            Schedule.make(
                inner_steps_per_round=6, num_fragments=1, overlap_steps=2, inner_steps=100,
                flush=True,
            ),
            shards,
            exchange,
            io,
            Agreement(groups[1]),
            timeline=timeline,
            local_mix=local_mix,
            clock=time.monotonic,
            on_event=events.append,), total_tokens=total_tokens or None,
        )  # fmt: skip
        if kept is None:
            io.drive(session.starting(overwrite_initial=False, last_inner_step=0))
        else:
            io.drive(session.resuming(kept.outer))
        try:
            yield Rank(session, exchange, io, control, data, parameters, events)
        finally:
            io.run(exchange.stop())
            io.stop()


def besides(work: Callable[[], None]) -> threading.Thread:
    """Run something while the training thread is in a step."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


# -- the cut stream ------------------------------------------------------------------------------


def merge_with_a_cut_stream(island_rank: int) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    store = dist.distributed_c10d._get_default_store()
    with island(island_rank) as rank:
        rank.train(6)
        if island_rank == 1:
            rank.data.cut = "fragment.fetch"
        rank.train(1)
        before = rank.norm.clone()

        def watch() -> None:
            """Rank 0 has staged and rank 1 has not, for 1.5 s in which nobody may merge."""
            if island_rank == 0:
                wait_until(lambda: rank.exchange.view(0).staged_version == 1)
                time.sleep(1.5)
                store.set("rank 0 has staged", "yes")
            store.wait(["rank 0 has staged"])
            seen["staged"] = rank.exchange.view(0).staged_version
            seen["version"] = rank.session.state.ledgers[0].version
            rank.data.cut = None

        watcher = besides(watch)
        rank.train(1)
        watcher.join()

        seen["merged"] = rank.session.state.ledgers[0].version
        seen["blocked"] = rank.session.blocked_s > 1.4
        seen["norm moved"] = not torch.equal(before, rank.norm)
        seen["whole"] = rank.whole()
        seen["anchor"] = {i: lane.clone() for i, lane in rank.session.state.anchors[0].items()}
        return seen


def test_with_one_stream_cut_no_rank_merges_and_both_do_when_it_is_back() -> None:
    first, second = run_ranks(merge_with_a_cut_stream, 2)

    assert (first["staged"], first["version"]) == (1, 0)
    assert (second["staged"], second["version"]) == (-1, 0)
    for rank in (first, second):
        assert (rank["merged"], rank["blocked"], rank["norm moved"]) == (1, True, True)
    # alpha = 0: both hold what was published, lane 0 in rank 0's hands, lane 1 in rank 1's.
    published = torch.cat([first["anchor"][0], second["anchor"][1]])
    for rank in (first, second):
        matrix = rank["whole"]["matrix"].flatten()
        assert torch.equal(published[: ROWS * COLUMNS], matrix)
        assert torch.equal(published[ROWS * COLUMNS :], rank["whole"]["norm"])


# -- on arrival ----------------------------------------------------------------------------------


def arrive_with_a_cut_stream(island_rank: int) -> dict[str, Any]:
    store = dist.distributed_c10d._get_default_store()
    with island(island_rank, total_tokens=3000) as rank:
        if island_rank == 1:
            rank.data.cut = "fragment.fetch"

        def until_staged() -> None:
            if island_rank == 0:
                wait_until(lambda: rank.exchange.view(0).staged_version == 1)
                store.set("rank 0 has staged", "yes")

        watcher = besides(until_staged)
        if island_rank == 0:
            rank.io.post(rank.exchange.coordinator_answered)
        num_apart = 0
        while num_apart < 10:  # both leave at the same step: rank 0's word is shared
            time.sleep(0.01)
            rank.train(1)
            num_apart += is_known(rank, store)
        watcher.join()
        apart = rank.session.versions
        rank.data.cut = None
        while not rank.session.is_over:
            time.sleep(0.005)
            rank.train(1)
        rank.io.drive(rank.session.finishing())
        events = [
            e.as_dict() for e in rank.events if e.kind in ("fragment_merged", "fragment_sent")
        ]
        keys = ("kind", "inner_step", "version")
        return {
            "apart": apart,
            "when": [tuple(event[key] for key in keys) for event in events],
            "heard": rank.exchange.num_heard,
            "blocked": rank.session.blocked_s,
            "over at": rank.session.inner_step,
            "step": rank.session.schedule_step,
            "digests": rank.session.digests,
        }


def follow_nothing(island_rank: int, total_tokens: int, carrier_hosts: int) -> dict[str, Any]:
    with island(island_rank, total_tokens=total_tokens, carrier_hosts=carrier_hosts) as rank:
        store = dist.distributed_c10d._get_default_store()
        if not total_tokens:
            rank.train(20)
        while total_tokens and not rank.session.is_over:
            time.sleep(0.005)
            rank.train(1)
        outer = rank.io.drive(rank.session.capturing())
        rank.io.drive(rank.session.finishing())
        store.set(f"calls of {island_rank}", str(rank.control.num_calls + rank.data.num_calls))
        moves = [e.as_dict() for e in rank.events if e.kind == "fragment_merged"]
        return {
            "merged": [(e["inner_step"], e["version"], e["outcome"]) for e in moves],
            "lanes": sorted(name for name in outer if name.startswith("anchor/")),
            "digests": rank.session.digests,
            "calls": [int(store.get(f"calls of {i}")) for i in range(2)],
        }


@pytest.mark.parametrize("total_tokens", [0, 30_000], ids=["scheduled", "on arrival"])
def test_a_rank_without_lanes_merges_with_the_others_and_makes_no_calls(total_tokens: int) -> None:
    first, second = run_ranks(follow_nothing, 2, total_tokens, 1)

    assert first["merged"] == second["merged"] and len(first["merged"]) > 1
    assert first["digests"] == second["digests"]
    assert [bool(rank["lanes"]) for rank in (first, second)] == [True, False]
    assert [num > 0 for num in first["calls"]] == [True, False]


def is_known(rank: Rank, store: Any) -> bool:
    """Whether rank 0 has staged, as both ranks say at once."""
    known = store.check(["rank 0 has staged"])
    return bool(rank.session._agreement.smallest([int(known)])[0])


def test_on_arrival_all_ranks_send_and_merge_at_the_same_steps_and_wait_for_no_stream() -> None:
    first, second = run_ranks(arrive_with_a_cut_stream, 2)

    assert first == second
    assert first["apart"] == (0,), "ten steps were made while one rank had not staged"
    assert first["blocked"] == 0.0
    assert first["heard"] == 1, "rank 1 hears with the others' word that the leader was answered"
    assert first["digests"] and first["step"] == 100
    assert [what for what, *_ in first["when"][:4]] == ["fragment_sent", "fragment_merged"] * 2


# -- replicated parameters -----------------------------------------------------------------------


def merge_and_flush(island_rank: int) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    with island(island_rank, local_mix=0.5) as rank:
        norms = []
        for _ in range(2):
            rank.train(6)
            rank.train(2)
            norms.append(rank.norm.clone())
        rank.io.drive(rank.session.finishing())
        norms.append(rank.norm.clone())
        seen["norms"] = norms
        seen["merged"] = [
            (event["version"], event["outcome"], event["is_flush"])
            for event in (event.as_dict() for event in rank.events)
            if event["kind"] == "fragment_merged"
        ]
        seen["digests"] = rank.session.digests
        return seen


def test_replicated_norms_are_equal_on_both_ranks_after_every_merge() -> None:
    first, second = run_ranks(merge_and_flush, 2)

    for one, other in zip(first["norms"], second["norms"], strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(first["norms"][0], first["norms"][1])
    expected = [(1, "included", False), (2, "included", False), (3, "included", True)]
    assert first["merged"] == second["merged"] == expected
    assert first["digests"] == second["digests"]


# -- collectives ---------------------------------------------------------------------------------


def count_collectives(island_rank: int) -> list[dict[str, int]]:
    counts: Counter[str] = Counter()
    a_step: list[dict[str, int]] = []

    def counted(name: str) -> Callable[..., Any]:
        real = getattr(dist, name)

        def call(*arguments: Any, **named: Any) -> Any:
            counts[name] += 1
            return real(*arguments, **named)

        return call

    with (
        island(island_rank) as rank,
        mock.patch.multiple(dist, **{name: counted(name) for name in COLLECTIVES}),
    ):
        for inner_step in range(1, 14):
            rank.session.state.inner_step = inner_step - 1
            if inner_step == 8:
                # So that the blocking step finds everything there.
                wait_until(lambda: rank.exchange.view(0).has_ended)
            counts.clear()
            rank.io.drive(rank.session.stepping(100))
            a_step.append(dict(counts))
    return a_step


def test_nothing_outstanding_means_no_collective() -> None:
    for steps in run_ranks(count_collectives, 2):
        quiet = steps[:5] + steps[8:11]
        assert quiet == [{}] * 8
        # Step 6 sends (agrees whether it is tried first, collects, then the first agreement is
        # started), step 7 reads and starts one.
        assert steps[5]["all_reduce"] == 2
        assert set(steps[5]) == {"all_reduce", "all_to_all_single"}
        assert steps[6] == {"all_reduce": 1}
        # Step 8 reads, agrees again as often as what comes is late, and distributes.
        assert steps[7]["all_to_all_single"] >= 1


# -- failures ------------------------------------------------------------------------------------


def fail_while_blocked(island_rank: int) -> tuple[str, int, str]:
    with island(island_rank) as rank:
        rank.train(6)
        if island_rank == 1:
            rank.data.cut = "fragment.fetch"

        def fail() -> None:
            time.sleep(0.5)
            rank.io.post(rank.exchange.fail, CodecError("a lane is broken"))

        watcher = besides(fail) if island_rank == 1 else None
        with pytest.raises(DilocoError) as caught:
            rank.train(2)
        if watcher is not None:
            watcher.join()
        return type(caught.value).__name__, caught.value.exit_code, str(caught.value)


def test_a_failing_rank_makes_both_raise_with_its_exit_code() -> None:
    first, second = run_ranks(fail_while_blocked, 2)

    assert first[:2] == (IslandFailed.__name__, 20)
    assert first[2] == "rank 1 of this island failed with exit code 20: a lane is broken"
    assert second == (CodecError.__name__, 20, "a lane is broken")


def fail_to_capture(island_rank: int) -> tuple[str, float]:
    with island(island_rank, error_feedback=True) as rank:
        if island_rank == 1:
            rank.exchange._fragments[0].residual = {1: torch.zeros(3, dtype=torch.int8)}
        began = time.monotonic()
        with pytest.raises(DilocoError) as caught:
            rank.io.drive(rank.session.capturing())
        return f"{type(caught.value).__name__}: {caught.value}", time.monotonic() - began


def test_what_breaks_in_one_ranks_thread_at_a_checkpoint_ends_all_at_once_by_name() -> None:
    (first, first_s), (second, second_s) = run_ranks(fail_to_capture, 2)

    reason = "cannot take the state of lanes for a checkpoint: RuntimeError("
    assert second.startswith(f"DilocoError: {reason}")
    code = DilocoError.exit_code
    assert first.startswith(f"IslandFailed: rank 1 of this island failed with exit code {code}: ")
    assert reason in first
    assert max(first_s, second_s) < 10.0, "nobody waits until a collective times out"


def lose_the_syncer(island_rank: int) -> tuple[str, int]:
    with island(island_rank, unreachable_s=1.0) as rank:
        rank.train(6)
        if island_rank == 1:
            rank.data.cut = "fragment.fetch"
        with pytest.raises(DilocoError) as caught:
            rank.train(2)
        return type(caught.value).__name__, caught.value.exit_code


def test_a_stream_that_stays_cut_ends_the_island_with_30_on_both_ranks() -> None:
    assert run_ranks(lose_the_syncer, 2) == [("IslandFailed", 30), ("CoordinatorUnavailable", 30)]


def diverge_on_one_rank(island_rank: int) -> tuple[str, int, list[str]]:
    with island(island_rank) as rank:
        with pytest.raises(DilocoError) as caught:
            for _ in range(8):
                # Rows of the second half are rank 1's lane.
                if island_rank == 1:
                    matrix = rank.parameters["matrix"]
                    assert isinstance(matrix, DTensor)
                    with torch.no_grad():
                        matrix.to_local()[-1].fill_(float("nan"))
                rank.train(3)
        outcomes = [
            event.as_dict()["kind"]
            for event in rank.events
            if event.as_dict()["kind"] in ("round_expired", "fragment_merged")
        ]
        return type(caught.value).__name__, caught.value.exit_code, outcomes


def test_a_lane_that_is_not_finite_on_one_rank_declines_for_the_island_and_ends_it() -> None:
    first, second = run_ranks(diverge_on_one_rank, 2)

    assert first == (IslandFailed.__name__, 20, ["round_expired", "round_expired"])
    assert second == (AggregationError.__name__, 20, ["round_expired", "round_expired"])


def find_worse_on_one_rank(island_rank: int, is_own_doubt: bool) -> dict[str, Any]:
    with island(island_rank) as rank:
        published = rank.whole()
        losses, seen = iter([2.0, 2.1 if island_rank == 1 else 1.9]), list[dict[str, Tensor]]()

        def loss_of() -> float:
            seen.append(rank.whole())
            return next(losses)

        rank.session.loss_of = loss_of
        if is_own_doubt:
            rank.session.check._watch.high = "its own loss is high" if island_rank == 1 else ""
        else:  # as after a version of two opposed islands
            rank.session.state.ledgers[0].asks_trial = True
        rank.train(6)
        local = rank.whole()
        rank.train(1)
        sent, taken = (
            [event for event in rank.events if isinstance(event, kind)]
            for kind in (FragmentSent, PublishedTaken)
        )
        moved = published["matrix"] - local["matrix"]
        return {
            "declined": [event.declined for event in sent],
            "taken": [event.inner_step for event in taken],
            "with nothing": torch.equal(seen[0]["matrix"], published["matrix"]),
            "with half": (published["matrix"] - seen[1]["matrix"] - moved / 2).abs().max().item(),
            "largest": moved.abs().max().item(),
        }


@pytest.mark.parametrize(
    ("is_own_doubt", "because"),
    [
        (False, ["another island's goes against it"] * 2),
        (True, ["another rank's loss is high", "its own loss is high"]),
    ],
)
def test_a_contribution_that_makes_what_is_published_worse_is_declined_by_all_ranks(
    is_own_doubt: bool, because: list[str]
) -> None:
    ranks = run_ranks(find_worse_on_one_rank, 2, is_own_doubt)

    for rank, why in zip(ranks, because, strict=True):
        (declined,) = rank["declined"]
        assert declined.startswith("half of its contribution to fragment 0 takes the held-out")
        assert declined.endswith(f"raised it, and {why}")
        assert rank["taken"] == [7] and rank["with nothing"]
        # int4 rounds to half a step of at most largest / 7, of which half is tried.
        assert rank["with half"] <= rank["largest"] / 7 / 4 * 1.01


# -- run checkpoints -----------------------------------------------------------------------------

STEP, LAST = 13, 20  # one step after a send, in flight until 14


def keep_and_resume(island_rank: int, directory: str) -> list[dict[str, Any]]:
    """With both ranks keep, go on, and resume with one; with one keep, and resume with both."""
    ends: list[dict[str, Any]] = []
    for before, after in ((2, 1), (1, 2)):
        options = {"error_feedback": True, "directory": f"{directory}/from {before}"}
        mine: Kept | None = None
        if island_rank < before:
            with island(island_rank, num_ranks=before, **options) as rank:
                rank.train(STEP)
                rank.io.drive(rank.session.pinning())
                rank.session.state.ledgers[0].asks_trial = True  # no loss is known: it is sent
                outer = rank.io.drive(rank.session.capturing())
                mine = Kept(STEP, rank.whole(), {n: v.clone() for n, v in outer.items()})
                ends.append(to_the_end(rank))
        parts: list[Any] = [None, None]
        dist.all_gather_object(parts, mine)
        parts = parts[:before]
        assert all(f"anchor/0/{i}" in part.outer for i, part in enumerate(parts))
        union = {name: values for part in parts for name, values in part.outer.items()}
        if island_rank < after:
            kept = Kept(STEP, parts[0].whole, union)
            with island(island_rank, num_ranks=after, kept=kept, **options) as rank:
                assert (rank.session.inner_step, rank.session.num_in_flight) == (STEP, 1)
                assert rank.session.state.ledgers[0].asks_trial
                ends.append(to_the_end(rank))
        dist.barrier()
    return ends


def to_the_end(rank: Rank) -> dict[str, Any]:
    rank.train(LAST - rank.session.inner_step)
    rank.io.drive(rank.session.finishing())
    whole = {name: values.numpy().tobytes() for name, values in rank.whole().items()}
    return {"digests": rank.session.digests, **whole}


def test_what_two_ranks_kept_is_resumed_by_one_and_the_reverse(tmp_path: Path) -> None:
    first, second = run_ranks(keep_and_resume, 2, str(tmp_path))

    assert (len(first), len(second)) == (4, 2)
    assert all(end == first[0] for end in first + second)


def resume_with_a_lane_missing(island_rank: int, directory: str) -> str:
    with island(island_rank, directory=directory) as rank:
        rank.io.drive(rank.session.pinning())
        outer = rank.io.drive(rank.session.capturing())
        whole = rank.whole()
    if island_rank == 1:
        del outer["anchor/0/1"]
    with (
        pytest.raises(DilocoError) as caught,
        island(island_rank, directory=directory, kept=Kept(0, whole, outer)),
    ):
        pass
    return f"{type(caught.value).__name__} {caught.value.exit_code}: {caught.value}"


def test_a_lane_that_one_rank_misses_ends_the_resume_on_both(tmp_path: Path) -> None:
    first, second = run_ranks(resume_with_a_lane_missing, 2, str(tmp_path))

    told = "the outer state cannot be resumed: 'anchor/0/1'"
    assert first.startswith(
        f"IslandFailed 2: rank 1 of this island failed with exit code 2: {told}"
    )
    assert second.startswith(f"ConfigError 2: {told}")
