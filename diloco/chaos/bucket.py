"""The object store of a run under chaos: an S3 server of this machine, behind a proxy that breaks.

A request is read whole, then done by the server, then answered; what a fault does to it, it does in
between. So a request that is late arrives once nobody waits for it, and one whose answer is cut off
was done.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from diloco.bench.network.s3_server import environment_at, s3_server, serving
from diloco.chaos.plan import Kind, TimedFault
from diloco.objects.store import ObjectStore

_CHUNK_BYTES = 16 << 10
_BITS = 8
#: What is answered in place of what was asked for: status, code.
_ERRORS = ((500, "InternalError"), (503, "SlowDown"), (429, "TooManyRequests"))
_REFUSALS = {
    Kind.READ_ONLY: (403, "AccessDenied"),
    Kind.CLOCK: (403, "RequestTimeTooSkewed"),
}
#: Kinds that meet a share of the requests.
_PARTIAL = frozenset({Kind.ERRORS, Kind.CORRUPT, Kind.CUT_REQUESTS, Kind.CUT_REPLIES})
#: What has become of an object that was removed.
WRITTEN_AGAIN, NOT_NEEDED = "written again", "not needed any more"
_WRITES = frozenset({"PUT", "POST", "DELETE"})


@dataclass(frozen=True, slots=True)
class _Request:
    """The head of a request, as it came."""

    method: str
    target: str
    num_bytes: int
    head: bytes

    @classmethod
    def of(cls, head: bytes) -> _Request:
        method, target, _ = head.decode("latin-1").split(" ", 2)
        length = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
        # One request a connection: its end is that of the answer.
        alone = re.sub(rb"(?i)\r\nconnection:[^\r]*", b"", head[:-4]) + b"\r\nConnection: close"
        return cls(method, target, int(length[1]) if length else 0, alone + b"\r\n\r\n")

    @property
    def name(self) -> str:
        """Bucket and name of the object that it is about."""
        return urlsplit(self.target).path

    @property
    def reads_object(self) -> bool:
        return self.method == "GET" and "list-type" not in urlsplit(self.target).query


class Bucket:
    """The store, and what happens to requests; its caller's thread is not the proxy's.

    Attributes:
        num_met: Requests that the fault under way has met.
        lost: Name of the object that was removed; empty: none.
        lost_is: What has become of it; empty: nothing.
    """

    def __init__(self, server_port: int) -> None:
        """Serve nothing yet."""
        self._server_port = server_port
        self.port = 0
        self._fault: TimedFault | None = None
        self._draw = random.Random()
        self._open: set[asyncio.StreamWriter] = set()
        self._free_at = 0.0
        self._newest = ""
        self.num_met = 0
        self.lost = self.lost_is = ""

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables with which a process reaches it, through the proxy."""
        return environment_at(self.port)

    def begin(self, fault: TimedFault) -> bool:
        """Let a fault happen to requests; false if there is nothing that it can be done to."""
        if fault.kind is Kind.LOSE_OBJECT and not self._lose_newest():
            return False
        self.num_met, self._draw, self._fault = 0, random.Random(fault.seed), fault
        return True

    def end(self) -> None:
        """Let nothing happen to requests."""
        self._fault = None

    def _lose_newest(self) -> bool:
        """Remove the object that was written last for a file of a chain."""
        self.lost, self.lost_is = self._newest, ""
        if self.lost:
            where, _, name = self.lost.lstrip("/").partition("/")
            store = ObjectStore(f"s3://{where}", environment=environment_at(self._server_port))
            store.delete([name])
        return bool(self.lost)

    # -- the proxy, in its thread ------------------------------------------------------------------

    async def join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the request of one connection."""
        self._open.add(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            try:
                await self._answer(reader, writer)
            finally:
                self._open.discard(writer)
                writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (fault := self._fault) is not None and fault.kind is Kind.CUT:
            self.num_met += 1
            for each in self._open:
                each.transport.abort()
            return
        request = _Request.of(await reader.readuntil(b"\r\n\r\n"))
        if fault is not None and not self._meets(fault, request):
            fault = None
        kind = None if fault is None else fault.kind
        if kind is Kind.CUT_REQUESTS:
            await reader.readexactly(request.num_bytes // 2)
            writer.transport.abort()
            return
        rate_bps = fault.strength.bandwidth.bps if fault and kind is Kind.THROTTLE else 0.0
        body = b""
        while left := request.num_bytes - len(body):
            body += await reader.readexactly(min(left, _CHUNK_BYTES))
            await self._paced(rate_bps)
        if fault and kind is Kind.DELAY:
            await asyncio.sleep(fault.strength.delay.seconds)
        if kind is Kind.ERRORS:
            reply = _refusal(request, *self._draw.choice(_ERRORS))
        elif kind in _REFUSALS:
            reply = _refusal(request, *_REFUSALS[kind])
        else:
            reply = await self._done(request, body)
        if kind is Kind.CUT_REPLIES:
            writer.transport.abort()
            return
        if kind is Kind.CORRUPT:
            reply = self._flipped(reply)
        for start in range(0, len(reply), _CHUNK_BYTES):
            writer.write(reply[start : start + _CHUNK_BYTES])
            await writer.drain()
            await self._paced(rate_bps)

    def _meets(self, fault: TimedFault, request: _Request) -> bool:
        """Whether a fault happens to a request; if so it is counted."""
        kind = fault.kind
        if kind in _PARTIAL and self._draw.random() >= fault.strength.share:
            return False
        if (
            kind is Kind.LOSE_OBJECT
            or (kind is Kind.READ_ONLY and request.method not in _WRITES)
            or (kind is Kind.CORRUPT and not request.reads_object)
            or (kind is Kind.CUT_REQUESTS and not request.num_bytes)
        ):
            return False
        self.num_met += 1
        return True

    async def _paced(self, rate_bps: float) -> None:
        """Wait for a piece's turn on a line that all requests share."""
        if rate_bps:
            now = asyncio.get_running_loop().time()
            self._free_at = max(self._free_at, now) + _CHUNK_BYTES * _BITS / rate_bps
            await asyncio.sleep(self._free_at - now)

    async def _done(self, request: _Request, body: bytes) -> bytes:
        """Have the server do a request; returns its whole answer."""
        there, back = await asyncio.open_connection("127.0.0.1", self._server_port)
        try:
            back.write(request.head + body)
            reply = await there.read()
        finally:
            back.close()
        if reply.split(b" ", 2)[1][:1] == b"2":
            self._note(request, body)
        return reply

    def _note(self, request: _Request, body: bytes) -> None:
        """Know which object of a chain is the newest, and what becomes of the one that is lost."""
        if request.method == "PUT" and "/data/" in request.name:
            self._newest = request.name
            if request.name == self.lost:
                self._settle(WRITTEN_AGAIN)
        elif request.method == "POST":
            gone = tuple(f"/{key}" for key in re.findall(r"<Key>(.*?)</Key>", body.decode()))
            if self._newest.endswith(gone):
                self._newest = ""
            if self.lost.endswith(gone):
                self._settle(NOT_NEEDED)

    def _settle(self, what: str) -> None:
        if not self.lost_is:
            self.lost_is = what
            self.num_met += 1

    def _flipped(self, reply: bytes) -> bytes:
        start = reply.index(b"\r\n\r\n") + 4
        if start == len(reply):
            return reply
        broken = bytearray(reply)
        broken[self._draw.randrange(start, len(reply))] ^= 1 << self._draw.randrange(_BITS)
        return bytes(broken)


def _refusal(request: _Request, status: int, code: str) -> bytes:
    body = f"<Error><Code>{code}</Code><Message>on purpose</Message></Error>".encode()
    head = f"HTTP/1.1 {status} {code}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + (b"" if request.method == "HEAD" else body)


@contextlib.contextmanager
def serving_bucket(name: str, log: Path) -> Iterator[Bucket]:
    """Serve an empty bucket of that name while the context lasts.

    Raises:
        ConfigError: If moto is not installed.
        CoordinatorUnavailable: If its server does not start.
    """
    with s3_server(log, bucket=name) as server:
        there = Bucket(server.port)
        with serving(there.join) as there.port:
            yield there
