"""The IO thread: posted work in order, generators driven, nothing left behind."""

import asyncio
import os
import sys
import threading
from collections.abc import Coroutine, Generator, Iterator
from typing import Any

import pytest

from diloco.io_thread import IoThread


@pytest.fixture
def io() -> Iterator[IoThread]:
    thread = IoThread()
    thread.start()
    yield thread
    thread.stop()


def test_posted_actions_run_in_order_before_what_is_run_next(io: IoThread) -> None:
    seen: list[int] = []

    async def last() -> list[int]:
        return [*seen, threading.get_ident()]

    for number in range(5):
        io.post(seen.append, number)
    *numbers, thread_id = io.run(last())

    assert numbers == [0, 1, 2, 3, 4]
    assert thread_id != threading.get_ident()


def test_generator_goes_on_after_each_of_its_waits_and_gives_its_value(io: IoThread) -> None:
    seen: list[str] = []

    async def wait(name: str) -> None:
        await asyncio.sleep(0)
        seen.append(name)

    def waits() -> Generator[Coroutine[Any, Any, None], None, int]:
        yield wait("first")
        seen.append("between")
        yield wait("second")
        seen.append("after")
        return 7

    assert io.drive(waits()) == 7
    assert seen == ["first", "between", "second", "after"]


def test_error_in_the_loop_reaches_the_training_thread(io: IoThread) -> None:
    async def fail() -> None:
        raise ValueError("the cause")

    def waits() -> Generator[Coroutine[Any, Any, None], None, None]:
        yield fail()

    with pytest.raises(ValueError, match="the cause"):
        io.drive(waits())


def test_stop_cancels_what_is_under_way_and_lets_it_clean_up() -> None:
    io, seen = IoThread(), []

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            seen.append("cleaned up")

    async def spawn() -> None:
        spawned.append(asyncio.create_task(endless()))
        await asyncio.sleep(0)

    spawned: list[asyncio.Task[None]] = []
    io.start()
    io.run(spawn())
    io.stop()

    assert seen == ["cleaned up"]


def test_error_of_a_posted_action_is_raised_by_the_next_run_once(io: IoThread) -> None:
    async def nothing() -> None: ...

    io.post(int, "not a number")

    with pytest.raises(RuntimeError, match=r"failed: ValueError: .*not a number") as raised:
        io.run(nothing())
    assert isinstance(raised.value.__cause__, ValueError)
    io.run(nothing())


def test_stop_ends_the_threads_of_the_loop() -> None:
    io = IoThread()
    io.start()
    besides = io.run(asyncio.to_thread(threading.current_thread))
    assert besides.is_alive()

    io.stop()

    assert not besides.is_alive()


@pytest.mark.skipif(sys.platform != "linux", reason="priorities are of processes there")
def test_it_lets_training_go_first() -> None:
    io = IoThread()
    io.start()

    async def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert io.run(niceness()) == min(own + 5, 19)
    io.stop()
