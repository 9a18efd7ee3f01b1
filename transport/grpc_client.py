"""Calls over gRPC, as generic byte streams in checksummed chunks."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TypeAlias

import grpc
import grpc.aio

from transport.contracts import Buffer, Reply
from transport.errors import (
    ConnectError,
    FrameError,
    HandlerFailed,
    PeerReset,
    TransportClosed,
    TransportError,
)
from transport.framing import (
    DEFAULT_CHUNK_BYTES,
    FrameReader,
    check_call,
    check_chunk_bytes,
    frame_messages,
)
from transport.grpc_wire import ACCEPTED_METADATA, CHANNEL_OPTIONS, SERVICE, STATUS_ERRORS

_Call: TypeAlias = "grpc.aio.StreamStreamCall[bytes, bytes]"


class GrpcTransport:
    """A way to one peer over one long-lived connection of its own.

    The connection is opened by the first call and reopened by itself; calls fail at once while
    the peer cannot be reached, so that `retry` decides what to do.
    """

    def __init__(self, address: str, *, chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> None:
        """Keep the peer's ``host:port``; `chunk_bytes` is the chunk size of requests.

        Raises:
            ValueError: If `chunk_bytes` is out of range.
        """
        check_chunk_bytes(chunk_bytes)
        self._address = address
        self._chunk_bytes = chunk_bytes
        self._channel: grpc.aio.Channel | None = None
        self._is_closed = False

    @property
    def peer(self) -> str:
        """The peer's ``host:port``."""
        return self._address

    async def call(
        self,
        method: str,
        header: bytes,
        payload: Buffer = b"",
        *,
        deadline_s: float,
        max_reply_bytes: int = 0,
    ) -> Reply:
        """Call `method`; see `contracts.Transport`."""
        check_call(header, deadline_s=deadline_s, max_reply_bytes=max_reply_bytes)
        self._check_open(method)
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self._address, options=CHANNEL_OPTIONS)
        stream = self._channel.stream_stream(f"/{SERVICE}/{method}", None, None)
        messages = frame_messages(header, payload, self._chunk_bytes)
        call = stream(messages, timeout=deadline_s)
        try:
            return await self._read_reply(call, max_reply_bytes)
        except grpc.aio.AioRpcError as error:
            raise await self._translate(error, call, method) from error
        except TransportError as error:
            raise self._error(type(error), str(error), method) from error
        except asyncio.CancelledError:
            if _is_own_task_cancelled():
                raise
            self._check_open(method)
            raise self._error(PeerReset, "the gRPC runtime ended the call", method) from None
        finally:
            call.cancel()

    async def close(self) -> None:
        """Release the connection; calls in flight raise `TransportClosed`."""
        self._is_closed = True
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(None)

    async def _read_reply(self, call: _Call, max_reply_bytes: int) -> Reply:
        first = await call.read()
        if not isinstance(first, bytes):  # the end of the stream is another type
            raise FrameError("the reply ended before its first message")
        reader = FrameReader(first)
        reader.accept(max_reply_bytes)
        while not reader.is_complete:
            message = await call.read()
            if not isinstance(message, bytes):
                raise reader.truncated()
            reader.feed(message)
        # The reply is whole; what is left is the status, which lets the call end without a reset.
        with contextlib.suppress(grpc.aio.AioRpcError):
            if isinstance(await call.read(), bytes):
                raise FrameError("the peer sent more than the reply that it declared")
        return Reply(reader.header, reader.payload)

    async def _translate(
        self, error: grpc.aio.AioRpcError, call: _Call, method: str
    ) -> TransportError:
        self._check_open(method)
        code = error.code()
        kind = STATUS_ERRORS.get(code, HandlerFailed)
        if code is grpc.StatusCode.UNAVAILABLE:
            name, value = ACCEPTED_METADATA
            accepted = (name, value) in tuple(await call.initial_metadata() or ())
            kind = kind if accepted else ConnectError
        return self._error(kind, f"{error.details()} ({code.name})", method)

    def _check_open(self, method: str) -> None:
        if self._is_closed:
            raise self._error(TransportClosed, "this transport was closed", method)

    def _error(self, kind: type[TransportError], message: str, method: str) -> TransportError:
        return kind(message, peer=self._address, method=method)


def _is_own_task_cancelled() -> bool:
    """Whether the running task was asked to end, rather than only the call that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
