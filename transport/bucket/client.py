"""Makes calls whose payloads travel by the server's object store; all else over another transport.

What is small travels as ever. A payload is written in pieces at the addresses that the server
tells, the next attempt goes on with the first that is not written; a reply's payload is read from
its first byte that is not here. Both are held against their digests.

The store is reached over HTTPS, by the environment's HTTPS_PROXY and certificates (SSL_CERT_FILE),
without any credentials. Addresses are secrets while they are valid: no message has one.

Source: PROTOCOL.md, "Payloads by object store".
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from urllib.parse import urlsplit

import blake3
import httpx

from diloco.protos.payload_pb2 import ObjectCall, ObjectReply
from diloco.transport.addresses import is_loopback
from diloco.transport.bucket.server import METHOD
from diloco.transport.contracts import PROTOCOL_VERSION, Buffer, Reply, Transport
from diloco.transport.errors import (
    ChecksumMismatch,
    ConnectError,
    DeadlineExceeded,
    FrameError,
    MessageTooLarge,
    Overloaded,
    PeerReset,
    TransportClosed,
    TransportError,
    Unauthorised,
)
from diloco.transport.framing import WHOLE_BYTES
from diloco.transport.shaping.pacing import Pacer
from diloco.transport.transfer import NAME_BYTES, Partial, Transfer

#: Seconds without a byte of a request, or until its connection is there.
_STILL_S, _CONNECT_S = 60.0, 10.0
#: Requests at once; of payloads that let others go first, and where a rate is to be kept: each of
#: them is not still for long then.
_CONNECTIONS, _FEW = 16, 2
_CHUNK_BYTES = 128 << 10
#: Times that one attempt writes a payload of which nothing is there any more, or reads one.
_MOST_LOST = 2
#: Seconds for which a request is made again that the store has refused for now; the first wait.
_MOST_AGAIN_S, _AGAIN_S = 10.0, 0.2
_GONE = (404, 410, 416)
_LATER = (408, 425, 429, 500, 502, 503, 504)


class ObjectTransport:
    """A transport to a server that has an object store for payloads; see `contracts.Transport`."""

    def __init__(self, inner: Transport, *, pacer: Pacer, insecure: bool = False) -> None:
        """Wrap `inner`, over which everything but payloads travels.

        Args:
            inner: To the server.
            pacer: Says how fast payloads are sent.
            insecure: Whether a store beyond this machine may be reached without encryption.
        """
        # At INFO it logs each address, with its signature.
        logging.getLogger("httpx").setLevel(logging.WARNING)
        self._inner = inner
        self._pacer = pacer
        self._insecure = insecure
        limits = httpx.Limits(max_connections=_CONNECTIONS, max_keepalive_connections=_CONNECTIONS)
        timeout = httpx.Timeout(_STILL_S, connect=_CONNECT_S, pool=None)
        self._http = httpx.AsyncClient(limits=limits, timeout=timeout)
        self._sending = asyncio.Semaphore(_FEW if pacer.rate_bps else _CONNECTIONS)
        self._bulk = asyncio.Semaphore(_FEW)
        self._telling: set[asyncio.Task[None]] = set()
        self._damaged: set[bytes] = set()  # transfers that begin again
        self._is_closed = False

    @property
    def peer(self) -> str:
        """Address of the server."""
        return self._inner.peer

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
        """Call `method`; the deadline is that of each message to the server."""
        size = memoryview(payload).nbytes
        if max(size, max_reply_bytes) <= WHOLE_BYTES:
            return await self._inner.call(
                method,
                header,
                payload,
                deadline_s=deadline_s,
                max_reply_bytes=max_reply_bytes,
                transfer=transfer,
            )
        way = transfer or Transfer()
        asked = ObjectCall(
            protocol_version=PROTOCOL_VERSION,
            method=method,
            header=header,
            transfer=way.name,
            payload_bytes=size,
        )
        if way.name in self._damaged:
            self._damaged.discard(way.name)
            way.acknowledged_bytes, way.reply = 0, None
        if size > WHOLE_BYTES:
            asked.digest = await asyncio.to_thread(_digest, payload)
        try:
            reply = await self._answered(asked, payload, deadline_s, max_reply_bytes, way)
        except TransportError as error:
            error.peer, error.method = error.peer or self.peer, error.method or method
            raise
        asked.Clear()
        asked.protocol_version, asked.transfer, asked.is_received = PROTOCOL_VERSION, way.name, True
        if memoryview(reply.payload).nbytes > WHOLE_BYTES:
            self._tell(asked, deadline_s)
        return reply

    async def close(self) -> None:
        """Close the connections; calls in flight raise `TransportClosed`."""
        self._is_closed = True
        for task in self._telling:
            task.cancel()
        await self._inner.close()
        await self._http.aclose()

    async def _answered(
        self,
        asked: ObjectCall,
        payload: Buffer,
        deadline_s: float,
        max_reply_bytes: int,
        way: Transfer,
    ) -> Reply:
        """Call until the handler has answered, and take the payload of its reply."""
        size, num_lost = asked.payload_bytes, 0
        while True:
            asked.is_written = bool(asked.digest) and way.acknowledged_bytes == size
            try:
                reply = await self._inner.call(
                    METHOD,
                    asked.SerializeToString(),
                    b"" if asked.digest else payload,
                    deadline_s=deadline_s,
                    max_reply_bytes=min(max_reply_bytes, WHOLE_BYTES),
                )
            except ChecksumMismatch:
                self._damaged.add(way.name)
                raise
            told = ObjectReply.FromString(reply.header)
            num_lost += told.is_lost
            if told.is_lost:
                way.acknowledged_bytes = 0
            if told.put_urls:
                await self._put(payload, told, way)
            elif told.get_url:
                try:
                    return Reply(told.header, await self._got(told, max_reply_bytes, way))
                except (_Gone, ChecksumMismatch):
                    num_lost += 1
                    if num_lost >= _MOST_LOST:
                        self._damaged.add(way.name)
                        raise
                    asked.lost, way.reply = told.digest, None
            else:
                return Reply(told.header, reply.payload)
            if num_lost > _MOST_LOST:
                raise _Gone(f"{size} bytes were written to the object store and are not there")

    def _tell(self, received: ObjectCall, deadline_s: float) -> None:
        """Let the server know that a reply's payload has arrived, without waiting for it."""

        async def tell() -> None:
            with contextlib.suppress(TransportError):
                header = received.SerializeToString()
                await self._inner.call(METHOD, header, deadline_s=deadline_s)

        task = asyncio.create_task(tell())
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    # -- the store ---------------------------------------------------------------------------------

    async def _put(self, payload: Buffer, told: ObjectReply, way: Transfer) -> None:
        """Write what is not written yet of a payload."""
        whole, piece_bytes = memoryview(payload).cast("B"), told.piece_bytes
        if piece_bytes * len(told.put_urls) < len(whole) or way.acknowledged_bytes == len(whole):
            raise FrameError(
                f"the server asks for {len(whole)} bytes in {len(told.put_urls)} pieces of "
                f"{piece_bytes}, and has been sent {way.acknowledged_bytes}"
            )
        for n, url in enumerate(told.put_urls):
            piece = whole[n * piece_bytes : (n + 1) * piece_bytes]
            if way.acknowledged_bytes >= n * piece_bytes + len(piece):
                continue
            async with self._bulk if way.is_bulk else self._sending:
                if way.is_bulk:  # as a whole: a request that waits half way is ended by a store
                    await self._pacer.admit(len(piece), is_bulk=True)
                await self._again(functools.partial(self._write, piece, url, way))
            way.acknowledged_bytes = n * piece_bytes + len(piece)

    async def _write(self, piece: memoryview, url: str, way: Transfer) -> None:
        headers = {
            "Content-Length": str(len(piece)),
            "x-ms-blob-type": "BlockBlob",  # Azure asks for it, others do not look
        }
        with self._pacer.moving(is_bulk=way.is_bulk), self._reaching(url):
            content = self._paced(piece, way)
            response = await self._http.put(url, content=content, headers=headers)
        self._check(response, url, response.text)

    async def _again(self, request: Callable[[], Awaitable[None]]) -> None:
        """Make a request again while the store has too much to do, for some seconds."""
        began, cap_s = _now(), _AGAIN_S
        while True:
            try:
                await request()
                return
            except Overloaded:
                wait_s = random.uniform(0.0, cap_s)
                if _now() + wait_s > began + _MOST_AGAIN_S:
                    raise
                await asyncio.sleep(wait_s)
                cap_s *= 2

    async def _paced(self, piece: memoryview, way: Transfer) -> AsyncIterator[bytes]:
        for start in range(0, len(piece), _CHUNK_BYTES):
            chunk = bytes(piece[start : start + _CHUNK_BYTES])
            if not way.is_bulk:
                await self._pacer.admit(len(chunk), is_bulk=False)
            way.sent_bytes += len(chunk)
            yield chunk

    async def _got(self, told: ObjectReply, max_reply_bytes: int, way: Transfer) -> Buffer:
        """Read a reply's payload from the first byte on that is not here."""
        size, name = told.payload_bytes, told.digest[:NAME_BYTES]
        if size > max_reply_bytes:
            raise MessageTooLarge(
                f"the reply has a payload of {size} bytes; {max_reply_bytes} are allowed"
            )
        if way.reply is None or way.reply_name != name:
            way.reply, way.reply_name = Partial(bytearray(size)), name
        partial = way.reply
        if partial.filled < size:
            async with self._bulk if way.is_bulk else contextlib.nullcontext():
                await self._again(functools.partial(self._fill, partial, told.get_url, way))
        if partial.filled < size:
            raise PeerReset(f"the object store ended after {partial.filled} of {size} bytes")
        if await asyncio.to_thread(_digest, partial.payload) != told.digest:
            raise ChecksumMismatch(
                f"{size} bytes in the object store are not those that the server wrote"
            )
        return partial.payload

    async def _fill(self, partial: Partial, url: str, way: Transfer) -> None:
        """Read what is not here of an object."""
        size = len(partial.payload)
        headers = {"Range": f"bytes={partial.filled}-{size - 1}", "Accept-Encoding": "identity"}
        with self._reaching(url):
            async with self._http.stream("GET", url, headers=headers) as response:
                if not response.is_success:
                    text = (await response.aread()).decode(errors="replace")
                    self._check(response, url, text)
                if response.status_code != 206:
                    partial.filled = 0  # all of it comes
                async for chunk in response.aiter_raw():
                    chunk = chunk[: size - partial.filled]
                    partial.payload[partial.filled : partial.filled + len(chunk)] = chunk
                    partial.filled += len(chunk)
                    way.received_bytes += len(chunk)

    @contextlib.contextmanager
    def _reaching(self, url: str) -> Iterator[None]:
        """Refuse an address that is not encrypted; say what fails there as of any transport."""
        parts = urlsplit(url)
        where = _where(url)
        if parts.scheme != "https" and not (self._insecure or is_loopback(parts.hostname or "")):
            raise Unauthorised(
                f"{where}, where payloads would not be encrypted: "
                f"give it an https endpoint, or set transport.insecure = true on a network that "
                f"you trust"
            )
        try:
            yield
        except httpx.HTTPError as error:
            if self._is_closed:
                raise TransportClosed(f"closed while {where} was reached") from error
            raise _as_transport_error(error, where) from error
        except httpx.InvalidURL as error:
            raise PeerReset(f"{where}: {error!r}") from error

    def _check(self, response: httpx.Response, url: str, text: str) -> None:
        """Raise what a store's refusal means."""
        if response.is_success:
            return
        said = " ".join(re.findall(r"<(?:Code|Message)>(.*?)</", text)[:2])
        code = response.status_code
        what = f"{_where(url)} answers {code} {said[:200]}"
        if code in _GONE:
            raise _Gone(what)
        raise Overloaded(what) if code in _LATER else PeerReset(what)  # its time may be over


def _where(url: str) -> str:
    """Give an address without its signature, for people."""
    parts = urlsplit(url)
    return f"the object store at {parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


class _Gone(PeerReset):
    """What was written is not in the store any more; it may be written again."""


def _as_transport_error(error: httpx.HTTPError, where: str) -> TransportError:
    """Say of a request what a call that fails so says."""
    said = f"{where} (HTTPS_PROXY, HTTP_PROXY, NO_PROXY of the environment count): {error!r}"
    if isinstance(error, httpx.TimeoutException):
        return DeadlineExceeded(said)
    return ConnectError(said) if isinstance(error, httpx.NetworkError) else PeerReset(said)


def _now() -> float:
    """Read the clock of the running loop."""
    return asyncio.get_running_loop().time()


def _digest(payload: Buffer) -> bytes:
    return blake3.blake3(payload).digest()
