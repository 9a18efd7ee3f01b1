import asyncio
import threading
import time

import pytest

from diloco.transport.calls.loopback import (
    LoopbackNetwork,
    VirtualClockLoop,
    VirtualDeadlock,
    run_virtual,
)
from diloco.transport.contracts import IncomingCall, Reply, Server, Transport
from diloco.transport.errors import ConnectError


async def echo(call: IncomingCall) -> Reply:
    return Reply(call.header, await call.read_payload())


def test_an_hour_of_timers_takes_no_time_and_is_exact() -> None:
    async def wait() -> list[float]:
        loop = asyncio.get_running_loop()
        times = [loop.time()]
        await asyncio.sleep(3600.0)
        times.append(loop.time())
        await asyncio.gather(asyncio.sleep(0.5), asyncio.sleep(0.25))
        return [*times, loop.time()]

    started = time.monotonic()
    assert run_virtual(wait()) == [0.0, 3600.0, 3600.5]
    assert time.monotonic() - started < 60


def test_timers_go_on_after_months() -> None:
    async def wait() -> float:
        for _ in range(100):
            await asyncio.sleep(1e5 + 1e-7)
        return asyncio.get_running_loop().time()

    assert run_virtual(wait()) == pytest.approx(1e7, rel=1e-9)


def test_timeouts_follow_the_virtual_clock() -> None:
    async def wait() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await asyncio.sleep(100.0)
        return asyncio.get_running_loop().time()

    assert run_virtual(wait()) == 5.0


def test_a_wait_that_can_never_end_is_a_named_error() -> None:
    async def wait_for_nobody() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(VirtualDeadlock, match="wait_for_nobody"):
        run_virtual(wait_for_nobody())


def test_executor_work_takes_no_virtual_time() -> None:
    async def work() -> tuple[int, float]:
        loop = asyncio.get_running_loop()
        ticker = asyncio.create_task(asyncio.sleep(1.0))
        release = threading.Event()
        loop.call_soon(release.set)
        value = await loop.run_in_executor(None, lambda: 42 if release.wait(30) else 0)
        at = loop.time()
        await ticker
        return value, at

    assert run_virtual(work()) == (42, 0.0)


def test_other_threads_can_wake_the_loop() -> None:
    async def wait() -> str:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[str] = loop.create_future()
        thread = threading.Thread(
            target=loop.call_soon_threadsafe, args=(future.set_result, "from a thread")
        )
        loop.call_soon(thread.start)
        result = await future
        thread.join()
        return result

    assert run_virtual(wait()) == "from a thread"


def test_two_loops_have_clocks_of_their_own() -> None:
    async def wait() -> float:
        await asyncio.sleep(7.0)
        return asyncio.get_running_loop().time()

    assert [run_virtual(wait()), run_virtual(wait())] == [7.0, 7.0]
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        assert runner.run(wait()) == 7.0


def test_what_is_sent_is_a_copy_in_both_directions() -> None:
    kept: list[bytes] = []
    answer = bytearray(b"answer")

    async def keep(call: IncomingCall) -> Reply:
        await asyncio.sleep(1.0)
        kept.append(bytes(await call.read_payload()))
        return Reply(b"", answer)

    async def exchange() -> bytes:
        network = LoopbackNetwork()
        await network.server("hub", {"keep": keep}).start()
        payload = bytearray(b"payload")
        call = asyncio.create_task(
            network.connect("hub").call("keep", b"", payload, deadline_s=9, max_reply_bytes=9)
        )
        await asyncio.sleep(0.5)
        payload[:] = b"changed"
        reply = await call
        answer[:] = b"ANSWER"
        return bytes(reply.payload)

    assert run_virtual(exchange()) == b"answer"
    assert kept == [b"payload"]


def test_contracts_are_met() -> None:
    network = LoopbackNetwork()
    transport: Transport = network.connect("hub")
    server: Server = network.server("hub", {})

    assert isinstance(transport, Transport)
    assert (transport.peer, server.address) == ("hub", "hub")


def test_a_name_holds_one_running_server_and_can_be_taken_over() -> None:
    async def exchange() -> bytes:
        network = LoopbackNetwork()
        first, second = (network.server("hub", {"echo": echo}) for _ in range(2))
        transport = network.connect("hub")
        await first.start()
        with pytest.raises(OSError, match="hub"):
            await second.start()
        await first.stop(0.0)
        with pytest.raises(ConnectError):
            await transport.call("echo", b"", deadline_s=1.0)
        await second.start()
        await first.stop(0.0)
        return (await transport.call("echo", b"still there", deadline_s=1.0)).header

    assert run_virtual(exchange()) == b"still there"
