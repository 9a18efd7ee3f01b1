"""What clients of every kind do alike with one attempt of a call: its payload out, its reply in."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from transport.contracts import Buffer, Reply
from transport.errors import FrameError
from transport.framing import (
    FrameReader,
    Resumption,
    chunk_size,
    frame_chunks,
    frame_opening,
    read_position,
)
from transport.pacing import Pacer
from transport.transfer import NO_NAME, Transfer


class Request:
    """One attempt's messages, and what comes back.

    `is_sent` tells whether all of them have been taken.
    """

    def __init__(
        self,
        header: bytes,
        payload: Buffer,
        transfer: Transfer | None,
        *,
        chunk_bytes: int,
        pacer: Pacer,
    ) -> None:
        """Keep what is to be said; `close` must follow."""
        self.is_sent = False
        self._header = header
        self._payload = memoryview(payload).cast("B")
        self._transfer = transfer or Transfer(name=NO_NAME)
        self._pacer = pacer
        self._chunk_bytes = pacer.chunk_bytes(
            chunk_bytes, len(self._payload), is_bulk=self._transfer.is_bulk
        )
        self._is_resuming = self._transfer.is_begun and len(self._payload) > 0
        self._position = asyncio.get_running_loop().create_future()
        self._moving = contextlib.ExitStack()

    def close(self) -> None:
        """End the attempt: what was sent is sent."""
        self._moving.close()

    async def messages(self) -> AsyncIterator[bytes]:
        """Give the messages, each when it may leave."""
        transfer, is_bulk = self._transfer, self._transfer.is_bulk
        yield self._opening()
        if self._payload:
            offset = await self._position if self._is_resuming else 0
            self._moving.enter_context(self._pacer.moving(is_bulk=is_bulk))
            for chunk in frame_chunks(self._payload, self._chunk_bytes, offset):
                num_bytes = chunk_size(chunk)
                await self._pacer.admit(num_bytes, is_bulk=is_bulk)
                transfer.is_begun = True
                transfer.sent_bytes += num_bytes
                yield chunk
            self._moving.close()
        self.is_sent = True

    async def read_reply(
        self, read: Callable[[], Awaitable[bytes | None]], max_reply_bytes: int
    ) -> Reply:
        """Receive the reply, or what is missing of it.

        Args:
            read: Gives the next message; None at the end.
            max_reply_bytes: What may be held.

        Raises:
            TransportError: The failure that the peer sent instead, or what is wrong with it.
        """
        transfer = self._transfer
        first = await self._first(read)
        if self._is_resuming:
            position = read_position(first, len(self._payload))
            if position is not None:
                transfer.acknowledged_bytes = position
                self._position.set_result(position)
                first = await self._first(read)
        frames = FrameReader(first)
        named = frames.resumption
        is_known = transfer.reply is not None and named.reply == transfer.reply_name
        partial = frames.accept(
            max_reply_bytes, transfer.reply if is_known and named.offset else None
        )
        if partial.filled != named.offset:
            raise FrameError(f"the reply goes on at byte {named.offset}, {partial.filled} are here")
        transfer.reply, transfer.reply_name = partial, named.reply
        while not frames.is_complete:
            message = await read()
            if message is None:
                raise frames.truncated()
            frames.feed(message)
            transfer.received_bytes += chunk_size(message)
        transfer.acknowledged_bytes = len(self._payload)
        return Reply(frames.header, frames.payload)

    def _opening(self) -> bytes:
        transfer = self._transfer
        resumption = Resumption(
            transfer.name,
            self._is_resuming,
            transfer.is_bulk,
            transfer.reply_name,
            transfer.reply.filled if transfer.reply else 0,
        )
        return frame_opening(self._header, len(self._payload), self._chunk_bytes, resumption)

    async def _first(self, read: Callable[[], Awaitable[bytes | None]]) -> bytes:
        message = await read()
        if message is None:
            raise FrameError("the reply ended before its first message")
        return message
