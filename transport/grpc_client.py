"""Calls over gRPC, as generic byte streams in checksummed chunks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import TypeAlias

import grpc
import grpc.aio
from grpc import ChannelConnectivity

from transport.addresses import split_candidates
from transport.certificates import CertificateError
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
from transport.grpc_wire import (
    ACCEPTED_METADATA,
    CANDIDATE_TIMEOUT_MS,
    CHALLENGE_METADATA,
    CHANNEL_OPTIONS,
    PROOF_METADATA,
    PROVE_METHOD,
    REVOKED_METADATA,
    SERVICE,
    STATUS_ERRORS,
    TOKEN_METADATA,
)
from transport.identity import Role, server_name
from transport.tls import ClientEnd, Tls

_Call: TypeAlias = "grpc.aio.StreamStreamCall[bytes, bytes]"

#: Seconds for which calls in progress may go on over the connection of replaced certificates.
_RETIRE_S = 300.0


class GrpcTransport:
    """A way to one peer over one long-lived connection of its own.

    The connection is opened by the first call and reopened by itself; calls fail at once while
    the peer cannot be reached, so that `retry` decides what to do. It belongs to the event loop
    of its first call. Loops in several threads work side by side, but gRPC logs an error when
    one of them is closed while another handles its last events.

    A call that never arrived is made again at the next address, in order; the one that answered
    is the first that the next call tries. Names are resolved again at every reconnection.

    Under TLS the server proves (`proof`) that its certificate is valid and not revoked: before
    anything is sent over a new connection, and again before any reply is believed.
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
    ) -> None:
        """Keep where the peer is and how it is spoken to.

        Args:
            address: ``host:port`` of the peer; several, separated by commas, are tried in order.
            chunk_bytes: Chunk size of requests.
            tls: What this process shows and believes; None: plaintext.
            expects: Whom the peer's certificate must name, wherever the peer is.
            token: Sent with every call; empty: none.
            proxy: ``http://[user:password@]host:port`` of a proxy that is asked to CONNECT.

        Raises:
            ValueError: If `address` is none or `chunk_bytes` is out of range.
        """
        check_chunk_bytes(chunk_bytes)
        self._address = address
        self._candidates = split_candidates(address)
        self._first = 0
        self._chunk_bytes = chunk_bytes
        self._tls = tls
        self._expects = expects
        self._metadata = ((TOKEN_METADATA, token),) if token else ()
        self._proxy = proxy
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._ends: dict[grpc.aio.Channel, ClientEnd] = {}
        self._stamp: object = None
        self._retiring: set[asyncio.Task[None]] = set()
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
    ) -> Reply:
        """Call `method`; see `contracts.Transport`."""
        check_call(header, deadline_s=deadline_s, max_reply_bytes=max_reply_bytes)
        self._check_open(method)
        num_candidates, first = len(self._candidates), self._first
        try:
            async with asyncio.timeout(deadline_s) as scope:
                for n in range(num_candidates):
                    index = (first + n) % num_candidates
                    messages = frame_messages(header, payload, self._chunk_bytes)
                    until = scope.when()
                    assert until is not None
                    try:
                        reply = await self._call(index, method, messages, until, max_reply_bytes)
                    except ConnectError:
                        if n == num_candidates - 1:
                            raise
                    else:
                        self._first = index
                        return reply
        except TimeoutError:
            message = f"no answer within {deadline_s:g} s"
            raise self._error(DeadlineExceeded, message, method) from None
        raise AssertionError("a peer has at least one address")

    async def close(self) -> None:
        """Release the connection; calls in flight raise `TransportClosed`."""
        self._is_closed = True
        channels, self._channels = self._channels, {}
        retiring, self._retiring = self._retiring, set()
        for task in retiring:
            task.cancel()
        for channel in channels.values():
            await channel.close(None)
        await asyncio.gather(*retiring, return_exceptions=True)

    async def _call(
        self,
        index: int,
        method: str,
        messages: Iterator[bytes],
        until: float,
        max_reply_bytes: int,
    ) -> Reply:
        """Call the peer at one of its addresses."""
        channel = self._channel(self._candidates[index])
        end = self._ends.get(channel)
        if end and not (end.is_proved and channel.get_state() is ChannelConnectivity.READY):
            await self._prove(channel, end, method)
        stream = channel.stream_stream(f"/{SERVICE}/{method}", None, None)
        request = _Request(messages)
        # This end keeps the deadline; the one that travels only lets the server give up too.
        left_s = until - asyncio.get_running_loop().time()
        challenge = end.challenge() if end else b""
        asked = ((CHALLENGE_METADATA, challenge),) if end else ()
        metadata = (*self._metadata, *asked)
        call = stream(request, timeout=max(left_s, 0.0) + 1.0, metadata=metadata)
        async with self._translated(call, method):
            if end:
                await self._insist_on_proof(call, end, challenge)
            return await self._read_reply(call, request, max_reply_bytes)

    @contextlib.asynccontextmanager
    async def _translated(self, call: _Call, method: str) -> AsyncIterator[None]:
        """End a call, and say what went wrong with it in our own words."""
        try:
            yield
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

    async def _prove(self, channel: grpc.aio.Channel, end: ClientEnd, method: str) -> None:
        """Have the server of a new connection prove itself, before it is sent anything."""
        challenge = end.challenge()
        metadata = ((CHALLENGE_METADATA, challenge),)
        call = channel.stream_stream(f"/{SERVICE}/{PROVE_METHOD}", None, None)(metadata=metadata)
        async with self._translated(call, method):
            await self._insist_on_proof(call, end, challenge)

    async def _insist_on_proof(self, call: _Call, end: ClientEnd, challenge: bytes) -> None:
        """Wait for the server's proof.

        Raises:
            ConnectError: If it is not good: this is not the peer that was called.
        """
        metadata = dict(await call.initial_metadata())
        if ACCEPTED_METADATA[0] not in metadata:
            await call.read()  # raises what went wrong
        proof, revocations = metadata.get(PROOF_METADATA), metadata.get(REVOKED_METADATA)
        try:
            end.insist_on_proof(
                challenge,
                proof if isinstance(proof, bytes) else b"",
                revocations if isinstance(revocations, bytes) else b"",
                self._expects,
            )
        except CertificateError as error:
            end.is_proved = False
            raise ConnectError(f"the server is not believed: {error}") from error
        end.is_proved = True

    def _channel(self, candidate: str) -> grpc.aio.Channel:
        """Return the connection to an address, a new one after a change of certificates."""
        stamp = self._tls.stamp if self._tls else None
        if stamp != self._stamp:
            retired, self._channels, self._stamp = self._channels, {}, stamp
            self._ends.clear()
            for channel in retired.values():
                task = asyncio.get_running_loop().create_task(_retire(channel))
                self._retiring.add(task)
                task.add_done_callback(self._retiring.discard)
        if candidate not in self._channels:
            self._channels[candidate] = self._open(candidate)
        return self._channels[candidate]

    def _open(self, candidate: str) -> grpc.aio.Channel:
        options: dict[str, int | str] = dict(CHANNEL_OPTIONS)
        if len(self._candidates) > 1:
            options["grpc.min_reconnect_backoff_ms"] = CANDIDATE_TIMEOUT_MS
        if self._proxy:
            options |= {"grpc.enable_http_proxy": 1, "grpc.http_proxy": self._proxy}
        if self._tls is None:
            return grpc.aio.insecure_channel(candidate, options=tuple(options.items()))
        options["grpc.ssl_target_name_override"] = server_name(self._expects)
        end = self._tls.client_end()
        channel = grpc.aio.secure_channel(
            candidate, end.credentials(), options=tuple(options.items())
        )
        self._ends[channel] = end
        return channel

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
        hint = ""
        if kind is ConnectError and self._tls is not None:
            hint = _tls_hint(str(error.details()), self._tls.days_left)
        return self._error(kind, f"{error.details()} ({code.name}){hint}", method)

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


async def _retire(channel: grpc.aio.Channel) -> None:
    """Let the calls in progress of a connection end, for some time."""
    try:
        await channel.close(_RETIRE_S)
    except asyncio.CancelledError:
        await channel.close(None)
        raise


def _tls_hint(details: str, days_left: float) -> str:
    """Say what a broken handshake means; the peer tells only its own log why it hangs up."""
    if days_left < 0:
        return f"; the certificate of this process expired {-days_left:.1f} days ago"
    if "Hostname Verification" in details:
        return "; the peer's certificate is of another role: is this the right address?"
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
