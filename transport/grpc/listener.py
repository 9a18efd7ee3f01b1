"""Listening sockets of a gRPC server: opened, replaced when certificates change, never overrun.

gRPC can be given new certificates under way (`dynamic_ssl_server_credentials`), and then frees what
handshakes in progress still use (grpc/grpc#36693): a burst of connections at that instant ends the
process, without any certificate. So what one gRPC server listens with never changes. When the files
change, a second one listens at the same port (SO_REUSEPORT) and the first takes no new connection;
calls in progress end on it. Not more often than once in `_BETWEEN_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import socket

import grpc
import grpc.aio

from diloco.transport.addresses import split_address
from diloco.transport.calls.limits import Limits
from diloco.transport.errors import TransportError
from diloco.transport.grpc.wire import SERVER_OPTIONS
from diloco.transport.security.connection_limits import ConnectionLimits
from diloco.transport.security.tls import Tls

_log = logging.getLogger(__name__)

#: Seconds between two looks at files and connections; while connections are being closed less.
_LOOK_S = 1.0
_ATTACKED_LOOK_S = 0.1
#: Seconds between two replacements, at least.
_BETWEEN_S = 5.0
#: Files, pipes and connections to others need descriptors, too.
_SHARE_OF_DESCRIPTORS = 0.5


class GrpcListener:
    """One port, and the gRPC servers that listen at it: one, and those that end after it."""

    def __init__(
        self, bind: str, router: grpc.GenericRpcHandler[bytes, bytes], *, tls: Tls | None,
        limits: Limits,
    ) -> None:  # fmt: skip
        """Assign only.

        Args:
            bind: ``host:port``; port 0 draws a free one at every `start`.
            router: Finds the handler of a call.
            tls: What this process shows, and whom it believes; None: plaintext.
            limits: How many connections are borne, and how long a call may last.
        """
        self._bind = bind
        self._host = split_address(bind)[0]
        self._router = router
        self._tls = tls
        self._limits = limits
        self._connection_limits = ConnectionLimits(
            per_address=limits.strangers_per_address, in_all=limits.connections // 4
        )
        self._server: grpc.aio.Server | None = None
        self._port = 0
        self._stamp: object = None
        self._draining: dict[asyncio.Task[None], grpc.aio.Server] = {}
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Listen; returns ``host:port`` really bound.

        Raises:
            OSError: If the address cannot be bound, another process using it included.
        """
        _require_free(self._bind)
        if self._tls is not None:
            await self._tls.ready()
        self._server, self._port = await self._open(self._bind)
        self._watching = asyncio.get_running_loop().create_task(self._watch())
        self._watching.add_done_callback(self._watched)
        try:
            await asyncio.sleep(0)  # a task that has not begun would not close anything
        except asyncio.CancelledError:
            await self.stop(0.0)
            raise
        return f"{self._host}:{self._port}"

    async def stop(self, drain_timeout_s: float) -> None:
        """Accept nothing new, let calls finish for `drain_timeout_s`, then cancel the rest."""
        watching, self._watching = self._watching, None
        server, self._server = self._server, None
        if server is not None:
            await server.stop(drain_timeout_s)
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    def called(self, peer: str) -> None:
        """Note that a caller was let in over a connection, which is no stranger's then."""
        self._connection_limits.called(peer)

    async def _open(self, bind: str) -> tuple[grpc.aio.Server, int]:
        options = (
            *SERVER_OPTIONS,
            # Two servers on one port would split the calls between them in silence: only ours may.
            ("grpc.so_reuseport", int(self._tls is not None)),
            ("grpc.max_allowed_incoming_connections", self._most_connections()),
        )
        server = grpc.aio.server(options=options)
        server.add_generic_rpc_handlers((self._router,))
        try:
            if self._tls is None:
                port = server.add_insecure_port(bind)
            else:
                self._stamp = self._tls.stamp
                port = server.add_secure_port(bind, self._tls.server_credentials())
        except RuntimeError as error:
            raise OSError(
                errno.EADDRINUSE,
                f"cannot listen on {bind}: is another process using it? ({error})",
            ) from error
        starting = asyncio.ensure_future(server.start())
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:  # it serves all the same, and nobody would stop it
            await starting
            await server.stop(None)
            raise
        return server, port

    def _most_connections(self) -> int:
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if descriptors == resource.RLIM_INFINITY:
            return self._limits.connections
        return min(self._limits.connections, int(descriptors * _SHARE_OF_DESCRIPTORS))

    async def _watch(self) -> None:
        """Follow the files and bound strangers, for ever."""
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._limit_connections())
                if self._tls is not None:
                    both.create_task(self._follow(self._tls))
        except asyncio.CancelledError:  # by `stop`, or as the loop ends without it
            await self._end()
            raise

    async def _end(self) -> None:
        """Close what is open: gRPC's servers outlive their loop, and block the process then."""
        draining = dict(self._draining)
        for task in draining:
            task.cancel()
        await asyncio.gather(*draining, return_exceptions=True)
        server, self._server = self._server, None
        for left in (*draining.values(), *([server] if server else [])):
            await left.stop(None)  # a wait that was cancelled leaves calls open

    async def _limit_connections(self) -> None:
        loop = asyncio.get_running_loop()
        wait_s = _LOOK_S
        while True:
            await asyncio.sleep(wait_s)
            look = self._connection_limits.close_excess
            closed = await asyncio.to_thread(look, self._port, loop.time())
            wait_s = _ATTACKED_LOOK_S if closed else _LOOK_S

    async def _follow(self, tls: Tls) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            with contextlib.suppress(TransportError):  # it is logged, and tried again
                await tls.ready()
            if self._server and tls.stamp != self._stamp:
                await self._replace()
                await asyncio.sleep(_BETWEEN_S)

    async def _replace(self) -> None:
        """Listen with the new files, and let calls in progress end with the old ones."""
        try:
            server, _ = await self._open(f"{self._host}:{self._port}")
        except OSError as error:
            _log.error("cannot listen with the new certificates, the old ones stay: %s", error)
            return
        if self._server is None:  # stopped meanwhile
            await server.stop(None)
            return
        old, self._server = self._server, server
        task = asyncio.get_running_loop().create_task(old.stop(self._limits.call_s))
        self._draining[task] = old
        task.add_done_callback(self._drained)
        _log.info("listening with new certificates address=%s:%d", self._host, self._port)

    def _drained(self, task: asyncio.Task[None]) -> None:
        self._draining.pop(task, None)

    def _watched(self, watching: asyncio.Task[None]) -> None:
        if not watching.cancelled() and (error := watching.exception()) is not None:
            _log.error(
                "certificates are not followed any more, nor strangers bounded, port=%d: start "
                "this process again",
                self._port,
                exc_info=error,
            )


def _require_free(bind: str) -> None:
    """Refuse a port that another process has: gRPC itself fills the log with every attempt.

    Raises:
        OSError: If it is taken; what else is wrong with an address is gRPC's to find.
    """
    host, port = split_address(bind)
    with contextlib.suppress(socket.gaierror):
        for family, _, _, _, place in socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM
        ):
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(place)
                except OSError as error:
                    if error.errno == errno.EADDRINUSE:
                        raise OSError(
                            error.errno,
                            f"cannot listen on {bind}: is another process using it? "
                            f"({error.strerror})",
                        ) from error
