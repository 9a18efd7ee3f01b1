"""An inner optimizer given from a checkpoint's files over a real syncer, at any layout of ranks."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import safetensors.torch
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from diloco.checkpoint.checkpoints import Checkpoint, step_directory
from diloco.checkpoint.state_transfer import StateReceiver, StateSource, unpacked
from diloco.errors import DilocoError, PayloadRefused
from diloco.io_thread import IoThread
from diloco.island.exchange.calls import SyncerCalls
from diloco.island.exchange.state_transfer import NotTransferred, TransferReports
from diloco.island.groups import make_groups
from diloco.outer.fragments import Plan
from diloco.protos import fragment_pb2 as wire
from diloco.protos.control_pb2 import Grant, ReportReply, StateTransfer, TransferAnswer
from diloco.syncer.syncer import Syncer
from diloco.syncer.worker import Workers
from diloco.trainer.state import MOMENTS, moments, optimizer_step
from diloco.transport.grpc.client import GrpcTransport
from diloco.transport.grpc.server import GrpcServer
from diloco.transport.retry import RetryPolicy
from diloco.versions.store import FragmentStore
from tests.checkpoint.small_checkpoint import ISLAND, Trained, make_optimizer
from tests.distributed import run_ranks
from tests.virtual_run import InlineWorker, MemoryIncarnations, Setting, grant

pytestmark = pytest.mark.timeout(120)

#: Nothing is waited for so long where all is well; on a loaded machine it may be.
_ALWAYS_S = 900.0

CUT, INNER_STEP, AGE = 7, 40, 3


@pytest.fixture(autouse=True)
def islands_end() -> Iterator[None]:
    yield
    while Island.made:
        Island.made.pop().close()


class SyncerRoutes:
    """One way to one syncer, for all fragments."""

    failure: DilocoError | None = None

    def __init__(self, address: str, of: Grant) -> None:
        self.transport = GrpcTransport(address)
        self._calls = SyncerCalls(
            self.transport,
            self.transport,
            of,
            rpc_deadline_s=10.0,
            policy=RetryPolicy(max_wait_s=0.2, budget_s=20.0),
            rng=random.Random(1),
        )

    def calls_of(self, fragment_id: int) -> SyncerCalls:
        return self._calls


@contextlib.contextmanager
def served(directory: Path, plan: Plan) -> Iterator[str]:
    """A syncer behind gRPC in a thread of this process; gives its address."""
    thread = IoThread()

    async def start() -> tuple[Syncer, GrpcServer]:
        setting = Setting({"w": [0.0]}, lambda *_: None, directory, 8, islands=(ISLAND, "west"))
        syncer = Syncer(
            plan,
            setting.rules(),
            [FragmentStore(directory, fragment, 4) for fragment in plan.fragments],
            syncer_epoch=1,
            incarnations=MemoryIncarnations(),
            is_granted=lambda grant: True,
            workers=Workers.all_by(InlineWorker()),
            on_record=lambda header: None,
            on_change=lambda: None,
        )
        await syncer.start()
        islands = (ISLAND, "west")
        syncer.set_transfers(
            [
                StateTransfer(source=source, island=island, checkpoint=checkpoint)
                for source, island in itertools.product(islands, repeat=2)
                for checkpoint in range(100)
            ]
        )
        server = GrpcServer("127.0.0.1:0", syncer.handlers)
        await server.start()
        return syncer, server

    thread.start()
    syncer, server = thread.run(start())
    try:
        yield server.address
    finally:
        thread.run(server.stop(0.0))
        thread.run(syncer.stop())
        thread.stop()


class Island:
    """The network of one rank, and what its leader is told; no coordinator."""

    made: ClassVar[list[Island]] = []

    def __init__(self, address: str, name: str, give: Callable[[int], Any] | None = None) -> None:
        self.io = IoThread()
        self.io.start()
        self.grant = grant(name)

        async def connect() -> SyncerRoutes:
            return SyncerRoutes(address, self.grant)

        self.routes = self.io.run(connect())

        async def nothing(number: int) -> None:
            raise AssertionError

        self.reports = TransferReports(give or nothing)
        self.made.append(self)

    def close(self) -> None:
        self.io.run(self.routes.transport.close())
        self.io.stop()

    def source(self, directory: Path, plan: Plan) -> StateSource:
        return StateSource(directory, self.grant, plan, self.routes)

    def told(self, source: str = "", refusal: str = "", checkpoint: int = CUT) -> None:
        """Take an answer to the request, as often as one would be reported."""

        def hear() -> None:
            answer = TransferAnswer(source=source, checkpoint=checkpoint, refusal=refusal)
            self.reports.set_answer(ReportReply(transfer=answer))

        self.io.post(hear)

    def receiver(self, plan: Plan, at_most_s: float) -> StateReceiver:
        groups = make_groups(None, patience_s=30.0)
        return StateReceiver(
            self.io, self.routes, self.grant, plan, self.reports, groups,
            at_most_s=at_most_s, carrier_hosts=0,
        )  # fmt: skip


def transfer(
    island: Island,
    trained: Trained,
    at_most_s: float = 20.0,
    *answers: tuple[float | threading.Event, dict[str, Any]],
) -> Any:
    """Ask; each of the answers comes after some seconds, or when something has happened.

    It is told again and again, as with every report, until the next one or the end.
    """
    is_over = threading.Event()

    def answer() -> None:
        last: dict[str, Any] = {}
        for after, said in answers or ((0.2, {"source": ISLAND}),):
            if isinstance(after, threading.Event):
                while not after.wait(0.2):
                    island.told(**last)
            else:
                time.sleep(after)
            island.told(**(last := said))
        while not is_over.wait(0.2):
            island.told(**last)

    telling = threading.Thread(target=answer)
    telling.start()
    try:
        return island.receiver(trained.plan(), at_most_s).take_(trained.model, trained.optimizer)
    finally:
        is_over.set()
        telling.join()


def of_checkpoint(directory: Path) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint.open(directory, ISLAND, CUT)
    names = [spec.name for spec in checkpoint.plan.tensors]
    return {
        f"{moment} {name}": checkpoint.read(moment, name) for moment in MOMENTS for name in names
    }


def of_optimizer(trained: Trained) -> dict[str, torch.Tensor]:
    return {
        f"{moment} {name}": values.full_tensor() if isinstance(values, DTensor) else values
        for moment, tensors in moments(trained.model, trained.optimizer).items()
        for name, values in tensors.items()
    }


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert all(values.any() for values in one.values()), "else nothing is compared"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Checkpoints of the island `ISLAND`, of which there is one, of a cut."""
    trained = Trained(num_steps=AGE)
    trained.write(tmp_path / "checkpoints", INNER_STEP, CUT)
    return with_versions(tmp_path / "checkpoints")


def with_versions(directory: Path, cut: int = CUT) -> Path:
    path = step_directory(directory, ISLAND, cut, is_cut=True) / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "versions": [5, 6]}))
    return directory


def test_moments_arrive_bit_for_bit_as_the_source_checkpoint_has_them(
    tmp_path: Path, source: Path
) -> None:
    plan = Trained().plan()
    with served(tmp_path / "store", plan) as address:
        east, west = Island(address, ISLAND), Island(address, "west")
        east.io.run(east.source(source, plan).give(CUT))
        joiner = Trained(seed=2, num_steps=0)

        taken = transfer(west, joiner)

    assert (taken.source, taken.checkpoint, taken.inner_step) == (ISLAND, CUT, INNER_STEP)
    assert taken.versions == (5, 6)
    assert_equal(of_optimizer(joiner), of_checkpoint(source))
    assert optimizer_step(joiner.optimizer) == AGE
    joiner.step()
    assert optimizer_step(joiner.optimizer) == AGE + 1


def take_as_a_rank(island_rank: int, address: str, second: str = "") -> dict[str, list[float]]:
    """Take what `ISLAND` gives; or the `second`, named when the leader has missed a lane of it."""
    trained = Trained(seed=2, num_steps=0)
    fully_shard(trained.model, mesh=init_device_mesh("cpu", (2,)))
    trained.optimizer = make_optimizer(trained.model)
    island = Island(address, "west")
    if island_rank == 0:
        answers: list[Any] = [(0.1, {"source": ISLAND})]
        if second:
            answers.append((a_lane_was_missed(island), {"source": second}))
        transfer(island, trained, _ALWAYS_S, *answers)
    else:
        island.receiver(trained.plan(), _ALWAYS_S).take_(trained.model, trained.optimizer)
    island.io.stop()
    assert optimizer_step(trained.optimizer) == AGE
    return {name: values.flatten().tolist() for name, values in of_optimizer(trained).items()}


def a_lane_was_missed(island: Island) -> threading.Event:
    calls = island.routes.calls_of(0)
    get, is_missed = calls.get, threading.Event()

    async def watched(source: str, checkpoint: int, lane: Any, *, max_reply_bytes: int) -> Any:
        reply, payload = await get(source, checkpoint, lane, max_reply_bytes=max_reply_bytes)
        if lane is not None and reply.status != wire.FETCH_STATUS_OK:
            is_missed.set()
        return reply, payload

    calls.get = watched  # type: ignore[method-assign]
    return is_missed


def test_an_island_of_another_layout_takes_the_same(tmp_path: Path, source: Path) -> None:
    plan = Trained().plan()
    with served(tmp_path / "store", plan) as address:
        east = Island(address, ISLAND)
        east.io.run(east.source(source, plan).give(CUT))

        for taken in run_ranks(take_as_a_rank, 2, address):
            of_rank = {name: torch.tensor(values) for name, values in taken.items()}
            expected = {n: values.flatten() for n, values in of_checkpoint(source).items()}
            assert_equal(of_rank, expected)


def test_a_source_that_dies_in_the_middle_leaves_the_joiner_with_a_new_optimizer(
    tmp_path: Path, source: Path
) -> None:
    plan = Trained().plan()
    with served(tmp_path / "store", plan) as address:
        east, west = Island(address, ISLAND), Island(address, "west")
        give_some(east, source, plan, num_lanes=2)
        joiner = Trained(seed=2, num_steps=0)

        with pytest.raises(NotTransferred, match="east: it is away"):
            transfer(
                west, joiner, 60.0,
                (0.1, {"source": ISLAND}), (0.4, {"refusal": "east: it is away"}),
            )  # fmt: skip
        assert not joiner.optimizer.state

        # The same source, started again, gives the rest of it only.
        calls = east.routes.calls_of(0)
        before, _ = calls.moved
        east.io.run(east.source(source, plan).give(CUT))
        whole = sum(8 * lane.numel for fragment in plan.fragments for lane in fragment.lanes)
        assert calls.moved[0] - before < whole
        transfer(west, joiner)
    assert_equal(of_optimizer(joiner), of_checkpoint(source))


def give_some(island: Island, source: Path, plan: Plan, num_lanes: int) -> None:
    """Give the manifest and so many lanes, then no more."""
    calls = island.routes.calls_of(0)
    put, are_put, num_begun, num_put = calls.put, asyncio.Event(), 0, 0

    async def put_some(checkpoint: int, lane: Any, payload: Any) -> Any:
        nonlocal num_begun, num_put
        num_begun += lane is not None
        if num_begun > num_lanes:
            await asyncio.Event().wait()
        ack = await put(checkpoint, lane, payload)
        num_put += lane is not None
        if num_put == num_lanes:
            are_put.set()
        return ack

    async def until_dead() -> None:
        giving = asyncio.ensure_future(island.source(source, plan).give(CUT))
        await asyncio.wait_for(are_put.wait(), 20.0)
        giving.cancel()

    calls.put = put_some  # type: ignore[method-assign]
    try:
        island.io.run(until_dead())
    finally:
        calls.put = put  # type: ignore[method-assign]


def test_another_source_that_is_named_meanwhile_is_taken_from(tmp_path: Path, source: Path) -> None:
    plan = Trained().plan()
    with served(tmp_path / "store", plan) as address:
        east = Island(address, ISLAND)
        north = Island(address, "west")  # gives under its name
        give_some(east, source, plan, num_lanes=1)
        (source / "west").symlink_to(source / ISLAND)
        north.io.run(north.source(source, plan).give(CUT))

        for taken in run_ranks(take_as_a_rank, 2, address, "west"):
            of_rank = {name: torch.tensor(values) for name, values in taken.items()}
            expected = {n: values.flatten() for n, values in of_checkpoint(source).items()}
            assert_equal(of_rank, expected)


def test_a_source_that_is_asked_for_another_checkpoint_is_taken_from(
    tmp_path: Path, source: Path
) -> None:
    trained = Trained(num_steps=AGE + 1)
    trained.write(source, INNER_STEP + 1, CUT + 1)
    with_versions(source, CUT + 1)
    plan = trained.plan()
    with served(tmp_path / "store", plan) as address:
        east, west = Island(address, ISLAND), Island(address, "west")
        give_some(east, source, plan, num_lanes=1)
        east.io.run(east.source(source, plan).give(CUT + 1))
        joiner = Trained(seed=2, num_steps=0)

        second = {"source": ISLAND, "checkpoint": CUT + 1}
        answers = (0.1, {"source": ISLAND}), (a_lane_was_missed(west), second)
        taken = transfer(west, joiner, 10.0, *answers)
    assert taken.checkpoint == CUT + 1
    assert_equal(of_optimizer(joiner), of_optimizer(trained))


def test_nobody_is_waited_for_beyond_the_bound(tmp_path: Path, source: Path) -> None:
    plan = Trained().plan()
    with served(tmp_path / "store", plan) as address:
        east, west = Island(address, ISLAND), Island(address, "west")
        joiner = Trained(seed=2, num_steps=0)
        with pytest.raises(NotTransferred, match="no source was named"):
            transfer(west, joiner, 0.3, (0.0, {}))
        with pytest.raises(NotTransferred, match="east has not begun to give it"):
            transfer(west, joiner, 0.5, (0.1, {"source": ISLAND}))
        give_some(east, source, plan, num_lanes=1)
        with pytest.raises(NotTransferred, match=r"lanes of east did not come"):
            transfer(west, joiner, 2.0)
        assert not joiner.optimizer.state


def test_a_checkpoint_that_is_damaged_or_of_another_plan_is_not_given(
    tmp_path: Path, source: Path
) -> None:
    plan = Trained().plan()
    with served(tmp_path / "store", plan) as address:
        east = Island(address, ISLAND)

        def declined(number: int, own: Plan) -> str:
            reports = TransferReports(StateSource(source, east.grant, own, east.routes).give)

            async def hear() -> None:
                reports.set_answer(ReportReply(provide=number))
                assert reports._giving is not None
                await asyncio.wait([reports._giving], timeout=20.0)

            east.io.run(hear())
            word = reports.report()
            assert word.declined == number
            return word.reason

        other = Plan.from_json(plan.to_json().replace("0.weight", "0.other"))
        assert "of another plan" in declined(CUT, other)
        (file,) = step_directory(source, ISLAND, CUT, is_cut=True).glob("*/rank*.safetensors")
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        assert "is damaged" in declined(CUT, plan)
        assert "cannot load its checkpoint" in declined(CUT + 1, plan)


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ({"exp_avg": torch.zeros(4)}, "not of 4 values"),
        ({"exp_avg": torch.zeros(4), "exp_avg_sq": torch.zeros(5)}, "not of 4 values"),
        ({"exp_avg": torch.zeros(4), "exp_avg_sq": torch.zeros(4).half()}, "not of 4 values"),
        ({"exp_avg": torch.full((4,), torch.nan), "exp_avg_sq": torch.zeros(4)}, "not finite"),
        ({"exp_avg": torch.zeros(4), "exp_avg_sq": -torch.ones(4)}, "negative"),
        (None, "no safetensors"),
    ],
)
def test_a_lane_that_is_no_moments_is_refused(
    tensors: dict[str, torch.Tensor] | None, why: str
) -> None:
    payload = b"\x80\x04pickle" if tensors is None else safetensors.torch.save(tensors)

    with pytest.raises(PayloadRefused, match=why):
        unpacked(payload, 4)
