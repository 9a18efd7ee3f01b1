"""What a server bears: pure counts, and the refusals of a real one."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.transport.calls.limits import Limits, Refusals, Turnstile
from diloco.transport.contracts import IncomingCall, Reply
from diloco.transport.errors import Overloaded
from diloco.transport.grpc.client import GrpcTransport
from diloco.transport.grpc.server import GrpcServer

DEADLINE_S = 30.0


def test_a_large_run_has_room_for_all_its_processes() -> None:
    limits = Limits().for_processes(512, 20)
    assert limits.calls_per_s >= 2 * 512, "each asks every second while no inner step was timed"

    assert (limits.calls, limits.calls_per_caller) == (4 * 512 * 20, 4 * 512)
    assert limits.connections == 8 * 512 * 20
    joins = Limits(concurrent={"join": 32}).for_processes(1, 1000).concurrent
    assert joins == {"join": 1000}, "all islands join when a run starts"
    assert Limits(concurrent={"join": 32}).for_processes(1, 4).concurrent == {"join": 32}
    assert Limits().for_processes(0, 1000) == Limits(), "how large islands are is not known"
    assert Limits().for_processes(512, 20, 10_000).calls_per_caller == 4 * 512 + 10_000


def test_each_limit_is_named_when_it_is_reached() -> None:
    limits = Limits(calls=4, calls_per_caller=3, concurrent={"join": 1})
    turnstile = Turnstile(limits)

    turnstile.enter("a", "join", 0.0)
    with pytest.raises(Overloaded, match="1 calls of join are in progress, 1 are allowed"):
        turnstile.enter("b", "join", 0.0)
    turnstile.enter("a", "poll", 0.0)
    turnstile.enter("a", "poll", 0.0)
    with pytest.raises(Overloaded, match="3 calls of this caller"):
        turnstile.enter("a", "poll", 0.0)
    turnstile.enter("b", "poll", 0.0)
    with pytest.raises(Overloaded, match="4 calls are in progress"):
        turnstile.enter("c", "poll", 0.0)

    turnstile.leave("a", "join")
    turnstile.enter("c", "join", 0.0)


def test_a_rate_is_allowed_in_the_long_run_and_a_burst_after_a_pause() -> None:
    turnstile = Turnstile(Limits(calls_per_s=10, burst=5))

    def entered(now: float) -> bool:
        try:
            turnstile.enter("a", "poll", now)
        except Overloaded:
            return False
        turnstile.leave("a", "poll")
        return True

    assert [entered(0.0) for _ in range(6)] == [True] * 5 + [False]
    assert [entered(0.1 * n) for n in range(1, 20)] == [True] * 19
    assert [entered(100.0) for _ in range(6)] == [True] * 5 + [False]


def test_a_method_of_its_own_rate_leaves_the_others_alone() -> None:
    turnstile = Turnstile(Limits(rates={"join": 0.5}))

    def entered(caller: str, method: str, now: float) -> bool:
        try:
            turnstile.enter(caller, method, now)
        except Overloaded:
            return False
        turnstile.leave(caller, method)
        return True

    assert [entered("a", "join", 0.0) for _ in range(6)] == [True] * 5 + [False]
    with pytest.raises(Overloaded, match=r"more than 0\.5 calls a second, after 5 at once"):
        turnstile.enter("a", "join", 0.0)
    assert entered("a", "poll", 0.0)
    assert entered("b", "join", 0.0)
    assert [entered("a", "join", now) for now in (2.0, 3.0, 4.0)] == [True, False, True]


def test_large_headers_of_a_caller_hold_a_bounded_memory() -> None:
    turnstile = Turnstile(Limits(header_bytes_per_caller=1 << 20))
    for caller in "aaaab":
        turnstile.enter(caller, "poll", 0.0)

    assert turnstile.hold("a", 16 << 10) == 0, "small ones are bounded by the number of calls"
    held = [turnstile.hold("a", 512 << 10), turnstile.hold("a", 500 << 10)]
    with pytest.raises(
        Overloaded, match=r"more than 1036288 bytes of headers .* 1048576 are allow"
    ):
        turnstile.hold("a", 20 << 10)
    assert turnstile.hold("b", 1 << 20) == 1 << 20, "each caller has its own"
    turnstile.leave("a", "poll", held[0])
    assert turnstile.hold("a", 512 << 10) == 512 << 10


def test_a_server_bears_large_headers_of_one_caller_up_to_their_bound() -> None:
    async def run() -> None:
        num_held, may_end = 0, asyncio.Event()

        async def hold(call: IncomingCall) -> Reply:
            nonlocal num_held
            num_held += 1
            await may_end.wait()
            return Reply(b"held")

        limits = Limits(header_bytes_per_caller=256 << 10)
        server = GrpcServer("127.0.0.1:0", {"hold": hold}, limits=limits)
        await server.start()
        greedy, modest = GrpcTransport(server.address), GrpcTransport(server.address)
        large = bytes(100 << 10)
        calls = [
            asyncio.create_task(greedy.call("hold", large, deadline_s=DEADLINE_S)),
            asyncio.create_task(greedy.call("hold", b"", large, deadline_s=DEADLINE_S)),
            asyncio.create_task(greedy.call("hold", b"", deadline_s=DEADLINE_S)),
            asyncio.create_task(modest.call("hold", large, deadline_s=DEADLINE_S)),
        ]
        async with asyncio.timeout(DEADLINE_S):
            while num_held < len(calls):
                await asyncio.sleep(0.01)
        with pytest.raises(Overloaded, match="bytes of headers of this caller's calls") as caught:
            await greedy.call("hold", large, deadline_s=DEADLINE_S)
        assert caught.value.is_retryable
        may_end.set()
        assert [(await call).header for call in calls] == [b"held"] * len(calls)
        assert (await greedy.call("hold", large, deadline_s=DEADLINE_S)).header == b"held"
        await greedy.close()
        await modest.close()
        await server.stop(0.0)

    asyncio.run(run())


def test_refusals_cost_a_bounded_number_of_calls_and_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refusals = Refusals(Limits(refused=2, refusals_logged_per_s=0.1))

    assert [refusals.enter() for _ in range(3)] == [True, True, False]
    refusals.leave()
    assert refusals.enter()
    for now in (0.0, 1.0, 2.0, 10.0):
        refusals.log("join", "a", Overloaded("too many"), now)
    first, second = (record.getMessage() for record in caplog.records)
    assert "unsaid" not in first and "(2 more were refused before, unsaid)" in second


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20_000), st.floats(0, 0.01)), max_size=300))
def test_what_is_remembered_is_bounded(calls: list[tuple[int, float]]) -> None:
    turnstile = Turnstile(Limits())
    now = 0.0
    for n in range(5000):
        turnstile.enter(f"first-{n}", "poll", now)
        turnstile.leave(f"first-{n}", "poll")
    for caller, wait_s in calls:
        now += wait_s
        turnstile.enter(str(caller), "poll", now)
        turnstile.leave(str(caller), "poll")

    assert turnstile.num_callers <= 4096


def test_one_caller_that_asks_too_much_does_not_slow_another() -> None:
    async def run() -> None:
        started, may_end = asyncio.Event(), asyncio.Event()

        async def hold(call: IncomingCall) -> Reply:
            started.set()
            await may_end.wait()
            return Reply(b"held")

        server = GrpcServer("127.0.0.1:0", {"hold": hold}, limits=Limits(calls_per_caller=1))
        await server.start()
        greedy, modest = GrpcTransport(server.address), GrpcTransport(server.address)
        first = asyncio.create_task(greedy.call("hold", b"", deadline_s=DEADLINE_S))
        await started.wait()
        with pytest.raises(Overloaded, match="calls of this caller are in progress") as caught:
            await greedy.call("hold", b"", bytes(4 << 20), deadline_s=DEADLINE_S)
        assert caught.value.is_retryable
        other = asyncio.create_task(modest.call("hold", b"", deadline_s=DEADLINE_S))
        await asyncio.sleep(0)
        may_end.set()
        assert [(await call).header for call in (first, other)] == [b"held"] * 2
        assert (await greedy.call("hold", b"", deadline_s=DEADLINE_S)).header == b"held"
        await greedy.close()
        await modest.close()
        await server.stop(0.0)

    asyncio.run(run())
