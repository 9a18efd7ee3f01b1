"""The client of calls over gRPC, as generic byte streams in checksummed chunks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import TypeAlias
from weakref import WeakKeyDictionary

import grpc
import grpc.aio

from diloco.transport.addresses import split_address, split_candidates
from diloco.transport.calls.requesting import Request
from diloco.transport.channels import Channels, LossMeter
from diloco.transport.contracts import Buffer, Reply
from diloco.transport.deadlines import Movement
from diloco.transport.errors import (
    ConnectError,
    DeadlineExceeded,
    PeerReset,
    TransportClosed,
    TransportError,
)
from diloco.transport.framing import DEFAULT_CHUNK_BYTES, check_call, check_chunk_bytes
from diloco.transport.grpc.wire import (
    ACCEPTED_METADATA,
    CANDIDATE_TIMEOUT_MS,
    CHANNEL_OPTIONS,
    SERVICE,
    STATUS_ERRORS,
    TOKEN_METADATA,
)
from diloco.transport.identity import Role, server_name
from diloco.transport.security.tls import Tls
from diloco.transport.shaping.pacing import Pacer
from diloco.transport.shaping.packing import Packers
from diloco.transport.shaping.turns import LineTurns, UnderWay
from diloco.transport.tcp_counters import BytesMoved, can_count, segment_counts
from diloco.transport.transfer import Transfer

_log = logging.getLogger(__name__)

_Call: TypeAlias = (
    "grpc.aio.StreamStreamCall[bytes, bytes] | grpc.aio.UnaryStreamCall[bytes, bytes]"
    " | grpc.aio.UnaryUnaryCall[bytes, bytes]"
)

#: Seconds for which calls in progress may go on over the connection of replaced certificates: as
#: long as a server bears a call.
_RETIRE_S = 7200.0
#: Seconds of silence after which a connection is replaced as a call over it reaches its deadline.
#: Less throws away what still waits in the sockets of a thin uplink that many processes share.
_SILENT_S = 180.0
#: Seconds between two looks at what was lost.
_LOOK_S = 1.0
#: gRPC's words where TLS had not begun: no certificate is at fault.
_NOBODY_LISTENS = "Failed to connect to remote host"


class GrpcTransport:
    """A way to one peer over long-lived connections of its own: one, unless told otherwise.

    Each is opened by its first call and reopened by itself; calls fail at once while
    the peer cannot be reached, so that `retry` decides what to do. It belongs to the event loop
    of its first call. Loops in several threads work side by side, but gRPC logs an error when
    one of them is closed while another handles its last events.

    A connection over which nothing came for three deadlines, or `_SILENT_S`, is replaced: a flipped
    bit in the length of an HTTP/2 frame makes either end take all that follows for that frame's
    content, and gRPC's keepalive does not see it, as the other direction lives.

    A call that never arrived is made again at the next address, in order; the one that answered
    is the first that the next call tries, or the one behind it if a call got no answer in time.
    Names are resolved again at every reconnection.

    Under TLS a new connection is made when this process shows another certificate (`tls`).
    """

    def __init__(
        self,
        address: str,
        *,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        tls: Tls | None = None,
        expects: Role = Role.COORDINATOR,
        token: str = "",
        proxy: str = "",
        channels: int = 1,
        pacer: Pacer | None = None,
    ) -> None:
        """Keep where the peer is and how it is spoken to.

        Args:
            address: ``host:port`` of the peer; several, separated by commas, are tried in order.
            chunk_bytes: Chunk size of requests.
            tls: What this process shows and believes; None: plaintext.
            expects: Whom the peer's certificate must name, wherever the peer is.
            token: Sent with every call; empty: none.
            proxy: ``http://[user:password@]host:port`` of a proxy that is asked to CONNECT.
            channels: Connections among which calls are dealt; 0: as many as the loss that is
                measured asks for.
            pacer: Of this process; None: one without a rate.

        Raises:
            ValueError: If `address` is none or `chunk_bytes` is out of range, or `channels` is
                negative, or 0 where the system does not count losses.
        """
        check_chunk_bytes(chunk_bytes)
        if channels < 0 or (channels == 0 and not can_count()):
            raise ValueError(
                f"channels = {channels}: must be 1 or more here (0, chosen by the loss that is "
                f"measured, needs Linux)"
            )
        self._address = address
        self._candidates = split_candidates(address)
        self._first = 0
        self._chunk_bytes = chunk_bytes
        self._tls = tls
        self._leaves = tls if expects is not Role.COORDINATOR else None
        self._expects = expects
        self._metadata = ((TOKEN_METADATA, token),) if token else ()
        self._proxy = proxy
        self._packers = Packers(pacer or Pacer())
        self._turns = LineTurns(chunk_bytes)
        self._proxied = proxy.removeprefix("http://").rstrip("/").rpartition("@")[2]
        self._places = {split_address(at) for at in (*self._candidates, self._proxied) if at}
        bytes_moved = BytesMoved()
        self._movement = (
            Movement(has_moved=lambda: bytes_moved.have(self._places))
            if can_count()
            else Movement()
        )
        self._moved_at = float("-inf")
        self._dealt = Channels(channels or 1)
        self._meter = None if channels else LossMeter()
        self._looked_at = float("-inf")
        self._channels: dict[tuple[str, int], grpc.aio.Channel] = {}
        #: When something came over a connection last, or it was opened.
        self._answered_at: WeakKeyDictionary[grpc.aio.Channel, float] = WeakKeyDictionary()
        self._stamp: object = None
        self._retiring: dict[asyncio.Task[None], grpc.aio.Channel] = {}
        self._is_closed = False

    @property
    def peer(self) -> str:
        """The peer's ``host:port``, or several."""
        return self._address

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
        """Call `method`; see `contracts.Transport`."""
        check_call(header, deadline_s=deadline_s, max_reply_bytes=max_reply_bytes)
        self._check_open(method)
        first = self._first
        size, is_bulk = memoryview(payload).nbytes, bool(transfer and transfer.is_bulk)
        async with self._turns.turn(size, max_reply_bytes, is_bulk=is_bulk) as under_way:
            self._check_open(method)
            request = Request(
                header,
                payload,
                transfer,
                max_reply_bytes=max_reply_bytes,
                chunk_bytes=self._chunk_bytes,
                packer=self._packers.of("", method),
                under_way=under_way,
            )
            try:
                async with self._within(deadline_s, under_way if transfer else None):
                    message = await request.whole() if request.is_whole else b""
                    self._check_open(method)
                    # This end keeps the deadline; the one that travels only lets the server give
                    # up too, if it is that of the whole call.
                    timeout = None if transfer else deadline_s + 1.0
                    return await self._call_any(
                        method, request, message, size + max_reply_bytes, timeout
                    )
            except TimeoutError:
                if self._first == first:  # no other call has found that out
                    self._first = (first + 1) % len(self._candidates)
                self._replace_silent(max(deadline_s, min(3 * deadline_s, _SILENT_S)))
                late = self._error(DeadlineExceeded, f"no answer within {deadline_s:g} s", method)
                request.failed(late)
                raise late from None
            except TransportError as error:
                request.failed(error)
                raise
            finally:
                request.close()

    @contextlib.asynccontextmanager
    async def _within(self, deadline_s: float, under_way: UnderWay | None) -> AsyncIterator[None]:
        """Give a call its deadline; payloads that go on where they broke, one of silence."""
        if under_way is None:
            async with asyncio.timeout(deadline_s):
                yield
            return
        now = asyncio.get_running_loop().time()
        if now >= self._moved_at + _LOOK_S:
            self._moved_at = now
            self._movement.has_moved()  # what has crossed so far is not of this call
        async with self._movement.within(deadline_s) as moved:
            under_way.on_moved(moved)
            yield

    async def _call_any(
        self,
        method: str,
        request: Request,
        message: bytes,
        num_bytes: int,
        timeout: float | None,
    ) -> Reply:
        """Call the peer at the first of its addresses that answers."""
        if self._leaves is not None:
            try:
                await self._leaves.ready()
            except TransportError as error:
                raise self._error(type(error), str(error), method) from error
            self._check_open(method)
        num_candidates, first = len(self._candidates), self._first
        dealt = self._deal(num_bytes)
        try:
            for n in range(num_candidates):
                index = (first + n) % num_candidates
                channel = self._channel(self._candidates[index], dealt)
                try:
                    reply = await self._call(channel, method, request, message, timeout)
                except ConnectError as error:
                    if n == num_candidates - 1:
                        if self._leaves is not None and _NOBODY_LISTENS not in str(error):
                            self._leaves.doubt()
                        raise
                else:
                    self._first = index
                    return reply
        finally:
            self._dealt.leave(dealt, num_bytes)
        raise AssertionError("a peer has at least one address")

    async def close(self) -> None:
        """Release the connection; calls in flight raise `TransportClosed`."""
        self._is_closed = True
        channels, self._channels = self._channels, {}
        retiring, self._retiring = self._retiring, {}
        for task in retiring:
            task.cancel()
        await asyncio.gather(*retiring, return_exceptions=True)
        for channel in (*channels.values(), *retiring.values()):
            await channel.close(None)

    async def _call(
        self,
        channel: grpc.aio.Channel,
        method: str,
        request: Request,
        message: bytes,
        timeout: float | None,
    ) -> Reply:
        """Call the peer at one of its addresses."""
        call = _begin(channel, method, request, message, timeout, self._metadata)
        try:
            if ACCEPTED_METADATA in tuple(await call.initial_metadata()):
                request.arrived()
            self._answered(channel)
            return await self._read_reply(channel, call, request)
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
            request.left()  # gRPC ends what takes the messages only where the call still goes on

    def _deal(self, num_bytes: int) -> int:
        """Choose a connection for a call that moves so many bytes, at most."""
        now = asyncio.get_running_loop().time()
        if self._meter is not None and num_bytes and now >= self._looked_at + _LOOK_S:
            self._looked_at = now
            # Sockets that were not found are not gone: they would be counted twice later.
            if found := segment_counts(self._places):
                self._meter.count(found)
            meter, before = self._meter, self._dealt.num_channels
            wanted = meter.wanted
            if wanted != before:
                _log.info(
                    "connections for payloads peer=%s channels=%d before=%d loss=%.5f back=%.5f",
                    self._address, wanted, before, meter.sent_loss, meter.received_loss,
                )  # fmt: skip
                self._dealt.num_channels = wanted
        return self._dealt.enter(num_bytes)

    def _channel(self, candidate: str, dealt: int) -> grpc.aio.Channel:
        """Return the connection to an address, a new one after a change of certificates."""
        stamp = self._tls.stamp if self._tls else None
        if stamp != self._stamp:
            self._stamp = stamp
            for key in list(self._channels):
                self._retire(key)
        key = candidate, dealt
        if key not in self._channels:
            self._channels[key] = self._open(candidate)
            self._answered(self._channels[key])
        return self._channels[key]

    def _answered(self, channel: grpc.aio.Channel) -> None:
        self._answered_at[channel] = asyncio.get_running_loop().time()

    def _replace_silent(self, silence_s: float) -> None:
        """Have the next calls open new connections in place of those that were silent so long."""
        since = asyncio.get_running_loop().time() - silence_s
        for key, channel in list(self._channels.items()):
            if self._answered_at[channel] <= since:
                _log.info("connection replaced, silent for %g s, peer=%s", silence_s, key[0])
                self._retire(key)

    def _retire(self, key: tuple[str, int]) -> None:
        """Close a connection once the calls in progress over it have ended."""
        channel = self._channels.pop(key)
        task = asyncio.get_running_loop().create_task(channel.close(_RETIRE_S))
        self._retiring[task] = channel
        task.add_done_callback(self._retired)

    def _retired(self, task: asyncio.Task[None]) -> None:
        self._retiring.pop(task, None)

    def _open(self, candidate: str) -> grpc.aio.Channel:
        options: dict[str, int | str] = dict(CHANNEL_OPTIONS)
        if len(self._candidates) > 1:
            options["grpc.min_reconnect_backoff_ms"] = CANDIDATE_TIMEOUT_MS
        if self._proxy:
            options |= {"grpc.enable_http_proxy": 1, "grpc.http_proxy": self._proxy}
        if self._tls is None:
            return grpc.aio.insecure_channel(candidate, options=tuple(options.items()))
        options["grpc.ssl_target_name_override"] = server_name(self._expects)
        credentials = self._tls.client_credentials(self._expects)
        return grpc.aio.secure_channel(candidate, credentials, options=tuple(options.items()))

    async def _read_reply(self, channel: grpc.aio.Channel, call: _Call, request: Request) -> Reply:
        async def read() -> bytes | None:
            message = await _read(call)
            self._answered(channel)
            return message

        reply = await request.read_reply(read)
        # The reply is whole. A refused request need not be sent to its end; any other call ends
        # in good order, without a reset, whatever its status.
        if request.is_sent:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await _read(call)
        return reply

    async def _translate(
        self, error: grpc.aio.AioRpcError, call: _Call, method: str
    ) -> TransportError:
        self._check_open(method)
        code = error.code()
        kind = STATUS_ERRORS.get(code, PeerReset)
        if kind is PeerReset and ACCEPTED_METADATA not in tuple(await call.initial_metadata()):
            kind = ConnectError
        hint = ""
        if kind is ConnectError and self._tls is not None:
            hint = _tls_hint(str(error.details()), self._tls.days_left)
        elif kind is ConnectError and _NOBODY_LISTENS not in str(error.details()):
            hint = "; if the peer asks for certificates, give them: --certs, or transport.certs"
        if kind is ConnectError and self._proxy:
            hint += f"; it was asked for through the proxy {self._proxied} (grpc_proxy)"
        return self._error(kind, f"{error.details()} ({code.name}){hint}", method)

    def _check_open(self, method: str) -> None:
        if self._is_closed:
            raise self._error(TransportClosed, "this transport was closed", method)

    def _error(self, kind: type[TransportError], message: str, method: str) -> TransportError:
        return kind(message, peer=self._address, method=method)


def _begin(
    channel: grpc.aio.Channel,
    method: str,
    request: Request,
    message: bytes,
    timeout: float | None,
    metadata: tuple[tuple[str, str | bytes], ...],
) -> _Call:
    """Start a call as the cheapest kind that can carry it; to the server, all are byte streams."""
    path = f"/{SERVICE}/{method}"
    if not request.is_whole:
        messages = request.messages()
        return channel.stream_stream(path, None, None)(messages, timeout=timeout, metadata=metadata)
    if request.takes_none:
        return channel.unary_unary(path, None, None)(message, timeout=timeout, metadata=metadata)
    return channel.unary_stream(path, None, None)(message, timeout=timeout, metadata=metadata)


async def _read(call: _Call) -> bytes | None:
    """Return a call's next message; None at the end, which gRPC says by another type."""
    message = await (call if isinstance(call, grpc.aio.UnaryUnaryCall) else call.read())
    return message if isinstance(message, bytes) else None


def _tls_hint(details: str, days_left: float) -> str:
    """Say what a broken handshake means; the peer tells only its own log why it hangs up."""
    if days_left < 0:
        return f"; the certificate of this process expired {-days_left:.1f} days ago"
    if "Hostname Verification" in details:
        return "; the peer's certificate is of another role: is this the right address?"
    if "not yet valid" in details or "has expired" in details:
        return "; by the clock of this machine: is one wrong, here or there? diloco doctor RUN.toml"
    if "CERTIFICATE_VERIFY_FAILED" in details or "BAD_SIGNATURE" in details:
        return "; the peer's certificate is not valid for this run: diloco certs show, at its site"
    if "Socket closed" in details or "handshake" in details.lower():
        return (
            "; the peer hung up before TLS was agreed: it does not speak TLS, or does not accept "
            "this process's certificate (its log says why; diloco certs show)"
        )
    return ""


def _is_own_task_cancelled() -> bool:
    """Whether the running task was asked to end, rather than only the call that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
