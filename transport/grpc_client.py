"""Calls over gRPC, as generic byte streams in checksummed chunks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import TypeAlias

import grpc
import grpc.aio

from transport.contracts import Buffer, Reply
from transport.errors import (
    ConnectError,
    DeadlineExceeded,
    FrameError,
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
    the peer cannot be reached, so that `retry` decides what to do. It belongs to the event loop
    of its first call. Loops in several threads work side by side, but gRPC logs an error when
    one of them is closed while another handles its last events.
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
        request = _Request(frame_messages(header, payload, self._chunk_bytes))
        # This end keeps the deadline; the one that travels only lets the server give up too.
        call = stream(request, timeout=deadline_s + 1.0)
        try:
            async with asyncio.timeout(deadline_s):
                return await self._read_reply(call, request, max_reply_bytes)
        except TimeoutError:
            message = f"no answer within {deadline_s:g} s"
            raise self._error(DeadlineExceeded, message, method) from None
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

    async def _read_reply(self, call: _Call, request: _Request, max_reply_bytes: int) -> Reply:
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
        # The reply is whole. A refused request need not be sent to its end; any other call ends
        # in good order, without a reset, whatever its status.
        if request.is_sent:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await call.read()
        return Reply(reader.header, reader.payload)

    async def _translate(
        self, error: grpc.aio.AioRpcError, call: _Call, method: str
    ) -> TransportError:
        self._check_open(method)
        code = error.code()
        kind = STATUS_ERRORS.get(code, PeerReset)
        if kind is PeerReset and ACCEPTED_METADATA not in tuple(await call.initial_metadata()):
            kind = ConnectError
        return self._error(kind, f"{error.details()} ({code.name})", method)

    def _check_open(self, method: str) -> None:
        if self._is_closed:
            raise self._error(TransportClosed, "this transport was closed", method)

    def _error(self, kind: type[TransportError], message: str, method: str) -> TransportError:
        return kind(message, peer=self._address, method=method)


class _Request(Iterator[bytes]):
    """The messages of a request, and whether all of them have been taken."""

    def __init__(self, messages: Iterator[bytes]) -> None:
        self._messages = messages
        self.is_sent = False

    def __next__(self) -> bytes:
        try:
            return next(self._messages)
        except StopIteration:
            self.is_sent = True
            raise


def _is_own_task_cancelled() -> bool:
    """Whether the running task was asked to end, rather than only the call that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
