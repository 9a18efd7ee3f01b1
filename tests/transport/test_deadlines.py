"""Whose deadline it was."""

import asyncio
import errno

import pytest

from diloco.transport.deadlines import Deadlines
from diloco.transport.errors import DeadlineExceeded, TransportClosed


def test_the_end_of_the_scope_is_deadline_exceeded() -> None:
    async def run() -> None:
        with pytest.raises(DeadlineExceeded, match=r"within 0\.01 s"):
            async with Deadlines("peer").within("method", 0.01):
                await asyncio.sleep(1e6)

    asyncio.run(run())


def test_a_timeout_of_the_kernel_is_not_taken_for_the_deadline() -> None:
    async def run() -> None:
        with pytest.raises(OSError, match="ETIMEDOUT") as caught:
            async with Deadlines("peer").within("method", 1e6):
                raise OSError(errno.ETIMEDOUT, "ETIMEDOUT")
        assert type(caught.value) is TimeoutError

    asyncio.run(run())


def test_closing_ends_what_is_in_progress() -> None:
    async def run() -> None:
        deadlines = Deadlines("peer")
        asyncio.get_running_loop().call_soon(deadlines.close)
        with pytest.raises(TransportClosed):
            async with deadlines.within("method", 1e6):
                await asyncio.sleep(1e6)

    asyncio.run(run())
