"""Handlers served over gRPC, as generic byte streams in checksummed chunks."""

from __future__ import annotations

import errno
import ipaddress
import logging
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import grpc
import grpc.aio

from transport.contracts import Buffer, Handler, Handlers
from transport.errors import FrameError, as_peer_error
from transport.framing import DEFAULT_CHUNK_BYTES, FrameReader, check_chunk_bytes, frame_messages
from transport.grpc_wire import ACCEPTED_METADATA, SERVER_OPTIONS, SERVICE, status_of

_Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"

_log = logging.getLogger(__name__)

#: gRPC carries a status message in a header of limited size.
_MAX_MESSAGE_CHARS = 1000


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
        host, separator, port = bind.rpartition(":")
        if not (separator and host and port.isdecimal() and int(port) < 1 << 16):
            raise ValueError(f"bind = {bind!r}: expected host:port, such as 127.0.0.1:0")
        if not (insecure or _is_loopback(host)):
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
        methods = {
            name: grpc.stream_stream_rpc_method_handler(self._serve(name, handler))
            for name, handler in self._handlers.items()
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
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

    def _serve(
        self, method: str, handler: Handler
    ) -> Callable[[object, _Context], Awaitable[None]]:
        async def serve(_: object, context: _Context) -> None:
            try:
                await context.send_initial_metadata((ACCEPTED_METADATA,))
                first = await context.read()
                if not isinstance(first, bytes):  # the end of the stream is another type
                    raise FrameError("the call ended before its first message")
                call = _GrpcCall(method, FrameReader(first), context)
                reply = await handler(call)
                messages = frame_messages(reply.header, reply.payload, self._chunk_bytes)
                for message in messages:
                    await context.write(message)
            except Exception as error:
                _log.warning(
                    "handler failed method=%s peer=%s", method, context.peer(), exc_info=error
                )
                told = as_peer_error(error)
            else:
                return
            await context.abort(status_of(told), str(told)[:_MAX_MESSAGE_CHARS])

        return serve


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
        return reader.payload


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
