"""Sends a call and receives its reply, for every kind of client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from diloco.transport.contracts import Buffer, Reply
from diloco.transport.errors import (
    DamagedFrame,
    DeadlineExceeded,
    FrameError,
    PeerReset,
    TransportError,
)
from diloco.transport.framing import (
    WHOLE_BYTES,
    FrameReader,
    Resumption,
    frame_opening,
    frame_whole,
    read_position,
)
from diloco.transport.shaping.packing import Packer
from diloco.transport.shaping.turns import UnderWay
from diloco.transport.transfer import NO_NAME, Transfer


class Request:
    """A call's messages, and what comes back; where one address fails, again for the next.

    Attributes:
        is_sent: Whether all messages have been taken.
        is_whole: Whether there is but one, `whole`; sent again, not gone on with, if it breaks.
        takes_none: Whether the reply must be without a payload, which makes it one message.
    """

    def __init__(
        self,
        header: bytes,
        payload: Buffer,
        transfer: Transfer | None,
        *,
        max_reply_bytes: int,
        chunk_bytes: int,
        packer: Packer,
        under_way: UnderWay,
    ) -> None:
        """Keep what is to be said, and how large a reply may be held; `close` must follow.

        `under_way` hears of each message of the payloads that has moved.
        """
        self._under_way = under_way
        self.is_sent = False
        self.takes_none = max_reply_bytes == 0
        self._max_reply_bytes = max_reply_bytes
        self._header = header
        self._payload = memoryview(payload).cast("B")
        self._transfer = transfer or Transfer(name=NO_NAME)
        self._packer = packer
        self._pacer = packer.pacer
        self._chunk_bytes = self._pacer.chunk_bytes(
            chunk_bytes,
            len(self._payload),
            is_bulk=self._transfer.is_bulk,
            is_small=self._transfer.num_broken > 0,
        )
        is_small = len(self._payload) <= min(WHOLE_BYTES, self._chunk_bytes)
        self.is_whole = is_small and not (self._payload and self._transfer.asks_first)
        self._is_resuming = False
        self._position: asyncio.Future[int]
        self._sender: asyncio.Task[object] | None = None
        self._moving = contextlib.ExitStack()

    def close(self) -> None:
        """End the call: what was sent is sent."""
        self._moving.close()

    def left(self) -> None:
        """Have nothing more taken of `messages`: the call has ended at this address.

        Who takes them may wait for what does not come any more, such as where the peer goes on.
        """
        if self._sender is not None:
            self._sender.cancel()
            self._sender = None

    async def messages(self) -> AsyncIterator[bytes]:
        """Give the messages, each when it may leave, to a task of their own."""
        self._sender = asyncio.current_task()
        if self.is_whole:
            yield await self.whole()
            self._moving.close()
            return
        transfer, is_bulk = self._transfer, self._transfer.is_bulk
        sending = self._under_way.sending
        size = len(self._payload)
        self.is_sent = False
        is_resuming = self._is_resuming = transfer.asks_first
        # Of this address: what another one says is not waited for here.
        position = self._position = asyncio.get_running_loop().create_future()
        yield frame_opening(self._header, size, self._chunk_bytes, self._resumption())
        offset = await position if is_resuming else 0
        self._moving.enter_context(self._pacer.moving(is_bulk=is_bulk))
        packer = self._packer
        for chunk in packer.chunks(self._payload, self._chunk_bytes, offset, is_bulk=is_bulk):
            await self._pacer.admit(len(chunk), is_bulk=is_bulk)
            num_bytes = min(self._chunk_bytes, size - offset)
            offset += num_bytes
            transfer.asks_first = True
            transfer.sent_bytes += num_bytes
            sending.begin()
            with packer.waiting(chunk):
                yield chunk
            sending.moved(num_bytes)
        self._moving.close()
        sending.give()
        self.is_sent = True

    async def whole(self) -> bytes:
        """Give the only message, when it may leave; its payload is moving until `close`."""
        if num_bytes := len(self._payload):
            is_bulk = self._transfer.is_bulk
            self._moving.enter_context(self._pacer.moving(is_bulk=is_bulk))
            await self._pacer.admit(num_bytes, is_bulk=is_bulk)
            self._under_way.sending.begin()
        self.is_sent = True
        return frame_whole(self._header, self._payload, self._resumption())

    def failed(self, error: TransportError) -> None:
        """Note how the attempt ended: over a bad line, the next one moves in small chunks."""
        is_cut = isinstance(error, PeerReset | DeadlineExceeded)
        self._transfer.num_broken += error.is_damage or is_cut

    def arrived(self) -> None:
        """Note that the peer has taken the call: a whole payload has left; chunks count alone."""
        if self.is_whole:
            self._transfer.sent_bytes += len(self._payload)

    async def read_reply(self, read: Callable[[], Awaitable[bytes | None]]) -> Reply:
        """Receive the reply, or what is missing of it.

        Args:
            read: Gives the next message; None at the end.

        Raises:
            TransportError: The failure that the peer sent instead, or what is wrong with it.
        """
        transfer, receiving = self._transfer, self._under_way.receiving
        if self._max_reply_bytes <= WHOLE_BYTES:
            receiving.begin()  # nothing of it is heard of before all of it is here
        first = await self._first(read)
        if self.is_whole:
            self._under_way.sending.moved(len(self._payload))
        if self._is_resuming:
            position = read_position(first, len(self._payload))
            if position is not None:
                transfer.acknowledged_bytes = position
                self._position.set_result(position)
                first = await self._first(read)
        frames = FrameReader(first)
        del first  # with its header, it may be a megabyte
        named = frames.resumption
        is_known = transfer.reply is not None and named.reply == transfer.reply_name
        partial = frames.accept(
            self._max_reply_bytes, transfer.reply if is_known and named.offset else None
        )
        here = 0 if frames.is_whole else partial.filled
        if here != named.offset:
            raise FrameError(f"the reply goes on at byte {named.offset}, {here} are here")
        if frames.is_whole:
            transfer.received_bytes += partial.filled
            receiving.moved(partial.filled)
        transfer.reply, transfer.reply_name = partial, named.reply
        while not frames.is_complete:
            receiving.begin()
            message = await read()
            if message is None:
                raise frames.truncated()
            num_bytes = frames.feed(message)
            transfer.received_bytes += num_bytes
            receiving.moved(num_bytes)
        receiving.give()
        transfer.acknowledged_bytes = len(self._payload)
        return Reply(frames.header, frames.payload)

    def _resumption(self) -> Resumption:
        transfer = self._transfer
        return Resumption(
            transfer=transfer.name,
            is_resuming=self._is_resuming,
            is_bulk=transfer.is_bulk,
            takes_none=self.takes_none,
            takes_small=transfer.num_broken > 0,
            reply=transfer.reply_name,
            offset=transfer.reply.filled if transfer.reply else 0,
        )

    async def _first(self, read: Callable[[], Awaitable[bytes | None]]) -> bytes:
        message = await read()
        if message is None:
            raise DamagedFrame("the reply ended before its first message")
        return message
