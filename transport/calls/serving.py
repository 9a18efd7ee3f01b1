"""Receives a call and sends its reply, both resumable, for every kind of server.

A stream is the caller's connection for one attempt; see `transfer` for what is kept between two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from diloco.transport.calls.dispatch import as_peer_error, dispatch
from diloco.transport.calls.limits import Lines
from diloco.transport.contracts import Buffer, Handlers, IncomingCall, Reply
from diloco.transport.errors import (
    DamagedFrame,
    HandlerFailed,
    MessageTooLarge,
    PeerReset,
    TransportError,
)
from diloco.transport.framing import (
    WHOLE_BYTES,
    FrameReader,
    Resumption,
    frame_failure,
    frame_opening,
    frame_position,
    frame_whole,
)
from diloco.transport.identity import Identity
from diloco.transport.shaping.packing import Packer
from diloco.transport.transfer import NAME_BYTES, NO_NAME, Kept, TransferTable


class AttemptStream(Protocol):
    """One attempt's connection with its caller."""

    async def read(self) -> bytes | None:
        """Return the next message; None at the end."""

    async def write(self, message: bytes) -> None:
        """Send a message."""


class Attempt:
    """One attempt of a call: what it brought, and what earlier ones left."""

    def __init__(
        self, table: TransferTable, caller: str, frames: FrameReader, stream: AttemptStream
    ) -> None:
        """Go on with the call, or begin it; `close` must follow."""
        self.frames = frames
        self.stream = stream
        self._table = table
        self.is_sent = False  # all of the answer, and the caller was heard out
        self._is_half_way = False  # through the payload: what has come is for the next attempt
        #: Neither is all here, nor does the caller wait until it is told to send.
        self.may_read_more = not (frames.is_whole or frames.resumption.is_resuming)
        self._reading: asyncio.Task[object] | None = None
        self._is_woken = False
        name = frames.resumption.transfer
        self._kept: Kept | None = None
        if name != NO_NAME:
            now = asyncio.get_running_loop().time()
            self._kept = table.enter(caller, name, stream, now, self._wake)

    def close(self) -> None:
        """Leave what there is to the next attempt."""
        if self._kept is not None:
            now = asyncio.get_running_loop().time()
            self._table.leave(self._kept, self.stream, now, is_sent=self.is_sent)

    async def read_payload(self, *, has_end: bool) -> Buffer:
        """Receive what is missing of the payload; see `contracts.IncomingCall`.

        Args:
            has_end: Whether the stream tells its end, which is then waited for.

        Raises:
            PeerReset: If another attempt of the same call has taken over, or the caller cannot be
                told where to go on: never an OSError, which a handler takes for its own disk's.
            TransportError: As the stream and the frames do.
        """
        frames, kept = self.frames, self._kept
        self._check_current()  # a handler may have waited for room first
        self._is_half_way = True
        partial = frames.accept(frames.payload_bytes, kept.partial if kept else None)
        if kept is not None and not frames.is_whole:  # which is sent again, not gone on with
            kept.partial = partial
        if frames.resumption.is_resuming:
            self.may_read_more = True
            try:
                await self.stream.write(frame_position(partial.filled))
            except OSError as error:
                raise PeerReset(f"the caller takes no position: {error!r}") from error
        while not frames.is_complete:
            message = await self._read()
            self._check_current()
            if message is None:
                raise frames.truncated()
            frames.feed(message)
        if has_end and not frames.is_whole and await self._read() is not None:
            raise DamagedFrame(
                f"the caller sent more than the {self.frames.payload_bytes} bytes declared"
            )
        self._is_half_way = False
        return frames.payload

    async def _read(self) -> bytes | None:
        """Read a message, as long as this attempt is the newest.

        Until a dead connection is found out, its handler may hold what the newest one waits for.
        """
        task = self._reading = asyncio.current_task()
        try:
            return await self.stream.read()
        except asyncio.CancelledError:
            if task and self._is_woken and not task.uncancel():
                self._check_current()
            raise
        finally:
            self._reading = None

    def _wake(self) -> None:
        if self._reading is not None and not self._is_woken:
            self._is_woken = True
            self._reading.cancel()

    def _check_current(self) -> None:
        if self._kept is not None and self._kept.stream is not self.stream:
            raise PeerReset("a newer attempt of this call goes on with it")

    async def answer(self, handlers: Handlers, call: IncomingCall, lines: Lines) -> Answer:
        """Ask the handler, unless it has answered an earlier attempt; failures are answers.

        `lines` bounds what is logged of them.
        """
        kept = self._kept
        try:
            if kept is not None and kept.reply is not None:
                return self._going_on(kept.reply, kept.reply_name)
            reply = await dispatch(handlers, call, lines)
            size = memoryview(reply.payload).nbytes
            if size and self.frames.resumption.takes_none:
                raise MessageTooLarge(f"the reply has a payload of {size} bytes; 0 are allowed")
            if kept is not None and kept.stream is self.stream:
                if reply.digest:
                    self._table.drop(kept, self.stream)
                    return self._going_on(reply, reply.digest[:NAME_BYTES])
                kept.answered(reply)
                return self._going_on(reply, kept.reply_name)
            asked = self.frames.resumption
            return Answer(reply, Resumption(is_bulk=asked.is_bulk, takes_small=asked.takes_small))
        except TransportError as error:
            if kept is not None and isinstance(error, HandlerFailed) and not self._is_half_way:
                self._table.drop(kept, self.stream)
            return Answer.failure(error)

    def _going_on(self, reply: Reply, name: bytes) -> Answer:
        asked = self.frames.resumption
        size = memoryview(reply.payload).nbytes
        is_known = asked.reply == name and asked.offset <= size
        named = Resumption(
            reply=name,
            offset=asked.offset if is_known else 0,
            is_bulk=asked.is_bulk,
            takes_small=asked.takes_small,
        )
        return Answer(reply, named)


class ArrivingCall:
    """A call whose payload still sits in the stream; a server adds `is_local`."""

    #: Whether the stream tells its end, which is then waited for.
    has_end = True

    def __init__(self, method: str, attempt: Attempt, peer: str, caller: Identity | None) -> None:
        """Take what the first message says."""
        self.method = method
        self.header = attempt.frames.header
        self.payload_bytes = attempt.frames.payload_bytes
        self.has_asked = attempt.frames.resumption.is_resuming
        self.peer = peer
        self.caller = caller
        self._attempt: Attempt | None = attempt

    async def read_payload(self) -> Buffer:
        """Receive the payload; see `contracts.IncomingCall`."""
        attempt, self._attempt = self._attempt, None
        assert attempt is not None, "read_payload called twice"
        return await attempt.read_payload(has_end=self.has_end)


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply, or a part of one, or a failure, to be sent."""

    reply: Reply
    resumption: Resumption
    failed: bytes = b""

    @classmethod
    def failure(cls, error: TransportError) -> Answer:
        """Make one that says what went wrong."""
        return cls(Reply(b""), Resumption(), failed=frame_failure(as_peer_error(error)))

    async def send(
        self, write: Callable[[bytes], Awaitable[None]], chunk_bytes: int, packer: Packer
    ) -> None:
        """Write it, the chunks as fast as the pacer lets them; then tell the reply so."""
        await self._write(write, chunk_bytes, packer)
        self.reply.on_sent()

    async def _write(
        self, write: Callable[[bytes], Awaitable[None]], chunk_bytes: int, packer: Packer
    ) -> None:
        pacer = packer.pacer
        payload, is_bulk = self.reply.payload, self.resumption.is_bulk
        payload_bytes = memoryview(payload).nbytes
        header, named = self.reply.header, self.resumption
        chunk_bytes = pacer.chunk_bytes(
            chunk_bytes, payload_bytes, is_bulk=is_bulk, is_small=named.takes_small
        )
        if not payload_bytes:
            await write(self.failed or frame_whole(header, payload, named))
            return
        with pacer.moving(is_bulk=is_bulk):
            if payload_bytes <= min(WHOLE_BYTES, chunk_bytes) and not named.offset:
                await pacer.admit(payload_bytes, is_bulk=is_bulk)
                await write(frame_whole(header, payload, named))
                return
            await write(frame_opening(header, payload_bytes, chunk_bytes, named))
            for chunk in packer.chunks(payload, chunk_bytes, named.offset, is_bulk=is_bulk):
                await pacer.admit(len(chunk), is_bulk=is_bulk)
                with packer.waiting(chunk):
                    await write(chunk)
