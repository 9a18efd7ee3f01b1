"""The server: handlers served over gRPC, as generic byte streams in checksummed chunks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NoReturn, TypeAlias, cast
from urllib.parse import unquote
from weakref import WeakValueDictionary

import grpc
import grpc.aio

from diloco.transport.addresses import is_loopback, is_own, split_address
from diloco.transport.calls.limits import Limits, Lines, Refusals, Turnstile
from diloco.transport.calls.serving import Answer, ArrivingCall, Attempt
from diloco.transport.contracts import Handlers, IncomingCall, Reply
from diloco.transport.deadlines import Movement
from diloco.transport.errors import (
    DamagedFrame,
    DeadlineExceeded,
    TransportError,
    Unauthorised,
)
from diloco.transport.framing import DEFAULT_CHUNK_BYTES, FrameReader, check_chunk_bytes
from diloco.transport.grpc.listener import GrpcListener
from diloco.transport.grpc.wire import (
    ACCEPTED_METADATA,
    ISSUE_METHOD,
    SERVICE,
    TOKEN_METADATA,
)
from diloco.transport.identity import Identity, Role
from diloco.transport.security.tls import Tls
from diloco.transport.security.tokens import TokenTable
from diloco.transport.shaping.pacing import Pacer
from diloco.transport.shaping.packing import Packers
from diloco.transport.transfer import TransferTable

_Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"

_log = logging.getLogger(__name__)


class GrpcServer:
    """A listening end on one address."""

    def __init__(
        self,
        bind: str,
        handlers: Handlers,
        *,
        tls: Tls | None = None,
        tokens: TokenTable | None = None,
        insecure: bool = False,
        limits: Limits | None = None,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        pacer: Pacer | None = None,
    ) -> None:
        """Keep where to listen and what to serve; nothing is bound before `start`.

        Args:
            bind: ``host:port``; port 0 draws a free one at every `start`.
            handlers: Coroutines by method name. A handler is cancelled when its caller goes away.
            tls: What this process shows, and whom it believes; None: plaintext.
            tokens: What every call must carry; None: no token is asked for.
            insecure: Allow an address that other machines can reach, without encryption.
            limits: What is borne from callers; None: the usual limits.
            chunk_bytes: Chunk size of replies, at most.
            pacer: Of this process; None: one without a rate.

        Raises:
            ValueError: If `bind` is not ``host:port``, or reached by other machines without TLS
                and `insecure` is false.
        """
        host, _ = split_address(bind)
        if not (tls or insecure or is_loopback(host)):
            raise ValueError(
                f"bind = {bind!r} can be reached from other machines and there are no "
                "certificates: make some (diloco certs init), bind to 127.0.0.1, or set "
                "insecure = true on a network that you trust"
            )
        check_chunk_bytes(chunk_bytes)
        self._bind = bind
        self._handlers = dict(handlers)
        if tls is not None and tls.identity.role is Role.COORDINATOR:
            self._handlers[ISSUE_METHOD] = self._issue
        self._tls = tls
        self._tokens = tokens
        self._limits = limits or Limits()
        self._turnstile = Turnstile(self._limits)
        self._refusals = Refusals(self._limits)
        self._failures = Lines(self._limits.refusals_logged_per_s)
        self._transfers = TransferTable(
            kept_bytes=self._limits.kept_bytes, kept_s=self._limits.kept_s
        )
        self._chunk_bytes = chunk_bytes
        self._packers = Packers(pacer or Pacer())
        #: By connection.
        self._movements: WeakValueDictionary[str, Movement] = WeakValueDictionary()
        self._address = ""
        self._listener: GrpcListener | None = None

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
        router = cast("grpc.GenericRpcHandler[bytes, bytes]", _Router(self._serve))
        listener = GrpcListener(self._bind, router, tls=self._tls, limits=self._limits)
        self._address = await listener.start()
        self._listener = listener
        _log.info("listening address=%s", self._address)

    async def stop(self, drain_timeout_s: float) -> None:
        """Accept nothing new, let calls finish for `drain_timeout_s`, then cancel the rest."""
        listener, self._listener = self._listener, None
        if listener is not None:
            await listener.stop(drain_timeout_s)

    async def _serve(self, method: str, context: _Context) -> None:
        await context.send_initial_metadata((ACCEPTED_METADATA,))
        try:
            async with asyncio.timeout(self._limits.call_s):
                await self._answer(method, context)
        except TimeoutError:
            # It does not read its reply, or sends without end: nothing that is said reaches it, and
            # a status would wait behind what was not read, as long as the connection lasts.
            _log.warning("call ended by its limit method=%.100s peer=%s", method, context.peer())
            raise asyncio.CancelledError from None

    async def _answer(self, method: str, context: _Context) -> None:
        movement = self._movements.setdefault(context.peer(), Movement())
        stream = _Stream(context, movement, self._limits.silence_s)
        try:
            caller = self._identify(context)
            key = caller.uri if caller else context.peer()
            self._turnstile.enter(key, method, asyncio.get_running_loop().time())
            if self._listener is not None:
                self._listener.called(stream.peer)
        except TransportError as error:
            await self._refuse(error, method, stream)
            return
        held_bytes = 0
        try:
            try:
                frames = FrameReader(await stream.first())
                held_bytes = self._turnstile.hold(key, frames.held_bytes)
            except TransportError as error:
                await self._refuse(error, method, stream)
                return
            # A connection that broke had another port: without identities, names must do.
            attempt = Attempt(self._transfers, caller.uri if caller else "", frames, stream)
            try:
                call = _GrpcCall(method, attempt, stream.peer, caller)
                answer = await attempt.answer(self._handlers, call, self._failures)
                packer = self._packers.of(key, method if method in self._handlers else "")
                await answer.send(stream.write, self._chunk_bytes, packer)
                if attempt.may_read_more:
                    await stream.read_rest()
                attempt.is_sent = True
            finally:
                attempt.close()
        finally:
            self._turnstile.leave(key, method, held_bytes)

    async def _refuse(self, error: TransportError, method: str, stream: _Stream) -> None:
        """Tell a caller why it is not served, unless too many are being told."""
        self._refusals.log(method, stream.peer, error, asyncio.get_running_loop().time())
        if not self._refusals.enter():
            await stream.abort("too many calls are being refused")
        try:
            packer = self._packers.of("", "")
            await Answer.failure(error).send(stream.write, self._chunk_bytes, packer)
            await stream.read_rest()
        finally:
            self._refusals.leave()

    async def _issue(self, call: IncomingCall) -> Reply:
        assert self._tls is not None
        assert call.caller is not None
        return Reply(self._tls.issue(call.header, call.caller))

    def _identify(self, context: _Context) -> Identity | None:
        """Say who calls, by certificate and token.

        Raises:
            Unauthorised: If one of them is asked for and not valid, or they are of two identities.
        """
        certified = named = None
        if self._tls is not None:
            pems = context.auth_context().get("x509_pem_cert", ())
            certified = self._tls.identify(b"".join(pems))
        if self._tokens is not None:
            tokens = [v for k, v in context.invocation_metadata() or () if k == TOKEN_METADATA]
            named = self._tokens.identify(str(tokens[0]) if len(tokens) == 1 else "")
        if certified and named and certified != named:
            raise Unauthorised(
                f"the certificate is that of {certified.short}, the token that of {named.short}"
            )
        return certified or named


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


class _Stream:
    """What a caller sends and is sent, message by message, none waited for without end."""

    def __init__(self, context: _Context, movement: Movement, silence_s: float) -> None:
        self.peer = context.peer()
        self._movement = movement
        self._context = context
        self._silence_s = silence_s

    async def first(self) -> bytes:
        message = await self.read()
        if message is None:
            raise DamagedFrame("the call ended before its first message")
        return message

    async def read(self) -> bytes | None:
        """Return the next message; None at the end, which gRPC says by another type."""
        try:
            async with self._movement.within(self._silence_s):
                message = await self._context.read()
        except TimeoutError:
            raise DeadlineExceeded(f"the caller sent nothing for {self._silence_s:g} s") from None
        return message if isinstance(message, bytes) else None

    async def write(self, message: bytes) -> None:
        async with self._movement.within(self._silence_s):
            await self._context.write(message)

    async def abort(self, reason: str) -> NoReturn:
        await self._context.abort(grpc.StatusCode.UNAVAILABLE, reason)
        raise AssertionError("gRPC's abort never returns")

    async def read_rest(self) -> None:
        """Read what else the caller sends.

        Ending the call while it is still sending could cost it the reply. It stops as soon as it
        has the reply, so what is thrown away here is what was on its way.
        """
        async with asyncio.timeout(self._silence_s):
            while isinstance(await self._context.read(), bytes):
                pass


class _GrpcCall(ArrivingCall):
    """A call over gRPC."""

    @property
    def is_local(self) -> bool:
        # gRPC writes ipv4:127.0.0.1:4711, and ipv6:%5B::1%5D:4711
        host, _, _ = unquote(self.peer).partition(":")[2].rpartition(":")
        return is_own(host)
