"""Handlers served over gRPC, as generic byte streams in checksummed chunks."""

from __future__ import annotations

import errno
import logging
from collections.abc import Awaitable, Callable
from typing import TypeAlias, cast

import grpc
import grpc.aio

from transport.addresses import is_loopback, split_address
from transport.contracts import Buffer, Handlers
from transport.dispatch import as_peer_error, dispatch
from transport.errors import FrameError, TransportError
from transport.framing import (
    DEFAULT_CHUNK_BYTES,
    FrameReader,
    check_chunk_bytes,
    frame_failure,
    frame_messages,
)
from transport.grpc_wire import ACCEPTED_METADATA, SERVER_OPTIONS, SERVICE

_Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"

_log = logging.getLogger(__name__)


class GrpcServer:
    """A listening end on one address."""

    def __init__(
        self,
        bind: str,
        handlers: Handlers,
        *,
        insecure: bool = False,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    ) -> None:
        """Keep where to listen and what to serve; nothing is bound before `start`.

        Args:
            bind: ``host:port``; port 0 draws a free one at every `start`.
            handlers: Coroutines by method name. A handler is cancelled when its caller goes away.
            insecure: Allow an address that other machines can reach, without encryption.
            chunk_bytes: Chunk size of replies.

        Raises:
            ValueError: If `bind` is not ``host:port``, or not loopback and `insecure` is false.
        """
        host, _ = split_address(bind)
        if not (insecure or is_loopback(host)):
            raise ValueError(
                f"bind = {bind!r} can be reached from other machines and TLS is not there yet: "
                "bind to 127.0.0.1, or set insecure = true on a network that you trust"
            )
        check_chunk_bytes(chunk_bytes)
        self._bind = bind
        self._host = host
        self._handlers = handlers
        self._chunk_bytes = chunk_bytes
        self._address = ""
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        """``host:port`` really bound; only after `start`."""
        assert self._address, "address asked for before start"
        return self._address

    async def start(self) -> None:
        """Bind and accept calls.

        Raises:
            OSError: If the address cannot be bound, another process using it included.
        """
        server = grpc.aio.server(options=SERVER_OPTIONS)
        router = cast("grpc.GenericRpcHandler[bytes, bytes]", _Router(self._serve))
        server.add_generic_rpc_handlers((router,))
        try:
            port = server.add_insecure_port(self._bind)
        except RuntimeError as error:
            raise OSError(
                errno.EADDRINUSE,
                f"cannot listen on {self._bind}: is another process using it? ({error})",
            ) from error
        await server.start()
        self._server = server
        self._address = f"{self._host}:{port}"
        _log.info("listening address=%s", self._address)

    async def stop(self, drain_timeout_s: float) -> None:
        """Accept nothing new, let calls finish for `drain_timeout_s`, then cancel the rest."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(drain_timeout_s)

    async def _serve(self, method: str, context: _Context) -> None:
        await context.send_initial_metadata((ACCEPTED_METADATA,))
        try:
            first = await context.read()
            if not isinstance(first, bytes):  # the end of the stream is another type
                raise FrameError("the call ended before its first message")
            reply = await dispatch(self._handlers, _GrpcCall(method, FrameReader(first), context))
            messages = frame_messages(reply.header, reply.payload, self._chunk_bytes)
        except TransportError as error:
            messages = iter((frame_failure(as_peer_error(error)),))
        for message in messages:
            await context.write(message)
        # Ending the call while the caller is still sending could cost it the reply. It stops as
        # soon as it has the reply, so what is thrown away here is what was on its way.
        while isinstance(await context.read(), bytes):
            pass


class _Router:
    """Hands every method of the service to one coroutine, unknown ones included.

    gRPC's own handler would end those calls with an early status.
    """

    def __init__(self, serve: Callable[[str, _Context], Awaitable[None]]) -> None:
        self._serve = serve

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        service, _, method = handler_call_details.method.lstrip("/").partition("/")
        if service != SERVICE:
            return None

        async def serve(_: object, context: _Context) -> None:
            await self._serve(method, context)

        return grpc.stream_stream_rpc_method_handler(serve)


class _GrpcCall:
    """A call whose payload still sits in the stream."""

    def __init__(self, method: str, reader: FrameReader, context: _Context) -> None:
        self.method = method
        self.header = reader.header
        self.payload_bytes = reader.payload_bytes
        self.peer = context.peer()
        self._reader: FrameReader | None = reader
        self._context = context

    async def read_payload(self) -> Buffer:
        reader, self._reader = self._reader, None
        assert reader is not None, "read_payload called twice"
        reader.accept(reader.payload_bytes)
        while not reader.is_complete:
            message = await self._context.read()
            if not isinstance(message, bytes):
                raise reader.truncated()
            reader.feed(message)
        if isinstance(await self._context.read(), bytes):
            raise FrameError(f"the caller sent more than the {reader.payload_bytes} bytes declared")
        return reader.payload
