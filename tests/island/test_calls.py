"""A carrier's calls to a syncer that does not answer, or hardly, on a virtual clock."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from diloco.errors import CoordinatorUnavailable
from diloco.island.exchange.calls import ExchangeRules, SyncerCalls
from diloco.island.exchange.exchange import Exchange, SyncerConnection
from diloco.protocol.island.ledger import Outstanding
from diloco.protos import fragment_pb2 as wire
from diloco.protos.fragment_pb2 import Ack
from diloco.syncer.spool import Spool
from diloco.transport.calls.loopback import LoopbackNetwork, run_virtual
from diloco.transport.contracts import Buffer, IncomingCall, Reply
from diloco.transport.errors import ConnectError, DeadlineExceeded, PeerReset
from diloco.transport.framing import WHOLE_BYTES, frame_whole
from diloco.transport.grpc.client import GrpcTransport
from diloco.transport.grpc.wire import ACCEPTED_METADATA
from diloco.transport.retry import RetryPolicy
from diloco.transport.transfer import Transfer
from tests.raw_island import KEY
from tests.virtual_run import Setting, grant


class Silent:
    """A transport to nobody, and when it was asked."""

    peer = "nobody"

    def __init__(self) -> None:
        self.asked_at: list[float] = []

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
        self.asked_at.append(asyncio.get_running_loop().time())
        raise ConnectError("nobody listens", peer=self.peer, method=method)

    async def close(self) -> None:
        pass


class Longest(random.Random):
    """Draws the longest wait each time."""

    def uniform(self, a: float, b: float) -> float:
        return b


def test_waits_between_calls_are_those_of_the_rules(tmp_path: Path) -> None:
    setting = Setting({"w": [16.0]}, lambda *_: None, tmp_path, inner_steps=1)
    policy = RetryPolicy(first_wait_s=1.0, max_wait_s=4.0, budget_s=20.0)
    rules = ExchangeRules("float32", False, 60.0, policy, seed=0)
    silent = Silent()

    async def ask() -> float:
        exchange = Exchange(
            setting.plan(),
            {0: (0,)},
            connections=[SyncerConnection([0], silent, Silent())],
            grant=grant("a"),
            rules=rules,
            rng=Longest(0),
            on_event=lambda event: None,
        )
        began = asyncio.get_running_loop().time()
        exchange.enter({0: {}})
        await exchange.wait_until_entered(60.0)
        assert isinstance(exchange.failure, CoordinatorUnavailable)
        assert "fragment.poll for 20 s" in str(exchange.failure)
        await exchange.stop()
        return began

    began = run_virtual(ask())

    # 1, 2, then 4 s at a time; a wait that would end at 20 s or later is not begun.
    assert [at - began for at in silent.asked_at] == [0, 1, 3, 7, 11, 15, 19]


class Thin:
    """A link of 1 Mbit/s behind which one lane moves at a time; attempts end at their deadline."""

    peer = "thin"

    def __init__(self, cut_s: float) -> None:
        self._cut_s = cut_s
        self._line = asyncio.Lock()
        self._arrived: dict[bytes, int] = {}
        self.most_at_once = self._num_at_once = 0

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
        assert transfer is not None
        num_bytes = memoryview(payload).nbytes
        self._num_at_once += 1
        self.most_at_once = max(self.most_at_once, self._num_at_once)
        try:
            async with asyncio.timeout(min(deadline_s, self._cut_s)), self._line:
                arrived = self._arrived.setdefault(transfer.name, 0)
                if transfer.asks_first:
                    transfer.acknowledged_bytes = arrived
                transfer.asks_first = True
                while self._arrived[transfer.name] < num_bytes:
                    await asyncio.sleep(8.0)
                    self._arrived[transfer.name] += 1_000_000
                    transfer.sent_bytes += 1_000_000
        except TimeoutError:
            raise DeadlineExceeded("no answer", peer=self.peer, method=method) from None
        finally:
            self._num_at_once -= 1
        return Reply(Ack(is_accepted=True).SerializeToString())

    async def close(self) -> None:
        pass


def uploads(data: Silent | Thin, num_lanes: int, lane: Buffer) -> list[object]:
    async def run() -> list[object]:
        calls = SyncerCalls(
            Silent(),
            data,
            grant("a"),
            rpc_deadline_s=60.0,
            policy=RetryPolicy(budget_s=600.0),
            rng=random.Random(0),
        )
        given = (calls.upload(0, lane_id, lane) for lane_id in range(num_lanes))
        return await asyncio.gather(*given, return_exceptions=True)

    return run_virtual(run())


def test_a_lane_whose_connection_breaks_late_goes_on() -> None:
    (ack,) = uploads(Thin(cut_s=700.0), 1, bytes(100_000_000))  # takes 800 s; the budget is 600 s
    assert ack == Ack(is_accepted=True)


def test_lanes_that_wait_for_their_turn_do_not_give_up_while_others_move() -> None:
    thin = Thin(cut_s=200.0)

    acks = uploads(thin, 64, bytes(5_000_000))  # takes 2560 s in all

    assert acks == [Ack(is_accepted=True)] * 64
    assert thin.most_at_once == 16


def test_what_is_sent_and_never_arrives_is_no_progress() -> None:
    class Hole(Silent):
        async def call(self, *args: object, transfer: Transfer | None = None, **rest: Any) -> Reply:
            self.asked_at.append(asyncio.get_running_loop().time())
            assert transfer is not None
            await asyncio.sleep(50.0)
            transfer.sent_bytes += 1000
            raise PeerReset("cut", peer=self.peer)

    hole = Hole()
    (error,) = uploads(hole, 1, bytes(100_000))
    assert isinstance(error, CoordinatorUnavailable)
    assert hole.asked_at[-1] < 50.0 + 600.0


def test_payloads_ask_first_once_the_syncer_has_said_so() -> None:
    class Crowded(Silent):
        def __init__(self) -> None:
            self.asked_first: list[bool] = []

        async def call(self, method: str, *_: object, **rest: Any) -> Reply:
            if method == "fragment.poll":
                return Reply(wire.PollReply(asks_first=True).SerializeToString())
            self.asked_first.append(rest["transfer"].asks_first)
            return Reply(Ack(is_accepted=True).SerializeToString())

    async def run() -> list[bool]:
        crowded = Crowded()
        calls = SyncerCalls(
            crowded,
            crowded,
            grant("a"),
            rpc_deadline_s=60.0,
            policy=RetryPolicy(budget_s=600.0),
            rng=random.Random(0),
        )
        await calls.upload(0, 0, b"lane")
        await calls.poll([], [])
        await calls.upload(0, 0, b"lane")
        return crowded.asked_first

    assert run_virtual(run()) == [False, True]


def test_who_waits_for_its_turn_longer_than_any_budget_is_served_in_its_turn(
    tmp_path: Path,
) -> None:
    """Room for one of a hundred ranks: the last waits for five times the budget."""
    served: list[int] = []

    async def run() -> float:
        spool, network = Spool(tmp_path, 1), LoopbackNetwork()

        async def upload(call: IncomingCall) -> Reply:
            lane_id = wire.UploadHeader.FromString(call.header).lane_id
            async with spool.arrival(lane_id, 1 << 40, has_asked=call.has_asked):
                await call.read_payload()
                await asyncio.sleep(30.0)
                served.append(lane_id)
            return Reply(Ack(is_accepted=True).SerializeToString())

        server = network.server("syncer", {"fragment.upload": upload})
        await server.start()

        async def rank(number: int) -> None:
            calls = SyncerCalls(
                network.connect("syncer"),
                network.connect("syncer"),
                grant("a"),
                rpc_deadline_s=60.0,
                policy=RetryPolicy(budget_s=600.0),
                rng=random.Random(number),
            )
            await calls.upload(0, number, b"lane")

        await asyncio.gather(*map(rank, range(100)))
        return asyncio.get_running_loop().time()

    assert run_virtual(run()) < 100 * 30.5, "the room is empty between two for a moment"
    assert sorted(served) == list(range(100))


#: Where a first message has its flags, and the one of whole models (`diloco.transport.framing`).
FLAGS_AT, IS_BULK = 32, 2


class Noting(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Answers every call with nothing, and keeps the flags of its first message."""

    def __init__(self) -> None:
        self.flags: list[tuple[str, int]] = []

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[bytes, bytes]:
        method = handler_call_details.method.rpartition("/")[2]

        async def answer(_: object, context: Any) -> None:  # gRPC's own type is generic
            await context.send_initial_metadata((ACCEPTED_METADATA,))
            first = await context.read()
            self.flags.append((method, first[FLAGS_AT] & IS_BULK))
            await context.write(frame_whole(b"", b""))

        return grpc.stream_stream_rpc_method_handler(answer)


def test_whole_models_say_on_the_wire_that_rounds_go_first() -> None:
    noting = Noting()

    async def run() -> None:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((noting,))
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        calls = SyncerCalls(
            GrpcTransport(address),
            GrpcTransport(address),
            grant("a"),
            rpc_deadline_s=30.0,
            policy=RetryPolicy(budget_s=30.0),
            rng=random.Random(0),
        )
        for size in (1000, WHOLE_BYTES + 1):
            await calls.upload(0, 0, bytes(size))
            sent = Outstanding(KEY, 1, 1, 1, is_flush=False)
            await calls.submit(sent, 0, codec="int4", digest=b"", payload=bytes(size))
        for kind in (wire.FETCH_KIND_DENSE, wire.FETCH_KIND_PAYLOAD):
            await calls.fetch(0, 1, [0], kind, max_reply_bytes=10)
        await calls.close()
        await server.stop(0.0)

    asyncio.run(run())
    rounds = [("fragment.upload", IS_BULK), ("fragment.submit", 0)]
    fetches = [("fragment.fetch", IS_BULK), ("fragment.fetch", 0)]
    assert noting.flags == [*rounds, *rounds, *fetches]
