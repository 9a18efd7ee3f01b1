"""Puts a link's bandwidth and delay around any transport, call by call.

The request crosses the up link, then the inner call is made, then its reply crosses the down
link. Time is the running loop's, so it is exact under the virtual clock and close under the real
one.
"""

from __future__ import annotations

import asyncio

from diloco.transport.contracts import Buffer, Reply, Transport
from diloco.transport.deadlines import Deadlines, seconds_left
from diloco.transport.framing import check_call
from diloco.transport.shaping.link import LinkQueue
from diloco.transport.transfer import Transfer

#: Calls that share a link take turns at this size.
TURN_BYTES = 64 << 10


class ShapedTransport:
    """A transport as it would be at the far end of a link.

    Give the same `LinkQueue` to every transport that shares the path: lanes, control and data.
    """

    def __init__(self, inner: Transport, up: LinkQueue, down: LinkQueue) -> None:
        """Wrap `inner`; requests go over `up`, replies over `down`."""
        self._inner = inner
        self._up = up
        self._down = down
        self._deadlines = Deadlines(inner.peer)

    @property
    def peer(self) -> str:
        """Address of the peer."""
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
        """Call `method` across the link; see `contracts.Transport`.

        The deadline covers both crossings. Headers count; what fails inside fails without the
        way back.
        """
        check_call(header, deadline_s=deadline_s, max_reply_bytes=max_reply_bytes)
        async with self._deadlines.within(method, deadline_s) as scope:
            await _cross(self._up, len(header) + memoryview(payload).nbytes)
            reply = await self._inner.call(
                method,
                header,
                payload,
                deadline_s=seconds_left(scope),
                max_reply_bytes=max_reply_bytes,
                transfer=transfer,
            )
            await _cross(self._down, len(reply.header) + memoryview(reply.payload).nbytes)
            return reply

    async def close(self) -> None:
        """Close the inner transport; calls in flight raise `TransportClosed`."""
        self._deadlines.close()
        await self._inner.close()


async def _cross(link: LinkQueue, num_bytes: int) -> None:
    """Reserve the link turn by turn and wait until the last byte has arrived.

    All bytes are there from the start, so a turn is ready when the one before has left, however
    late this task wakes up.
    """
    ready = asyncio.get_running_loop().time()
    while True:
        ready, delivery = link.reserve(ready, min(num_bytes, TURN_BYTES))
        num_bytes -= TURN_BYTES
        if num_bytes <= 0:
            break
        await _sleep_until(ready)
    await _sleep_until(delivery)


async def _sleep_until(when: float) -> None:
    wait_s = when - asyncio.get_running_loop().time()
    if wait_s > 0:
        await asyncio.sleep(wait_s)
