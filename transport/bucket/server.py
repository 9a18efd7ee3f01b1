"""Answers calls whose payloads travel by an object store, for the handlers of any server.

A handler sees an ordinary call. It is asked without the payload at first; where it reads one, the
caller gets addresses to write it at, and calls again. So what a handler refuses unread is
written nowhere, and what has no room yet waits at the caller. A reply's payload is written once,
however many callers take it, and each gets an address. Addresses are signed by this server: a
caller has no credentials, reads what it was given, and writes what it was asked for.

Objects are removed once they were read, or nobody has called about them for twice as long as an
address is valid; at addresses that are still valid they are removed once more when these end.

Source: PROTOCOL.md, "Payloads by object store".
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

import blake3

from diloco.protos.payload_pb2 import ObjectCall, ObjectReply
from diloco.transport.calls.dispatch import handler_of
from diloco.transport.contracts import Buffer, Handlers, IncomingCall, Reply
from diloco.transport.errors import ChecksumMismatch, FrameError, NotYet
from diloco.transport.framing import WHOLE_BYTES
from diloco.transport.identity import Identity

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

METHOD = "payload.call"
#: Seconds for which an address is valid.
VALID_S = 3600.0
#: Bytes of an object that a caller writes, more where that would be more than `_MOST_PIECES`.
PIECE_BYTES = 8 << 20
_MOST_PIECES = 16
#: Of one caller: payloads that it was told to write, and replies of which it has not said that they
#: have arrived. Of all: replies that are in the store.
_MOST_AWAITED, _MOST_SENT, _MOST_GIVEN = 1 << 16, 1 << 12, 1 << 16
#: Payloads that were read and whose addresses are valid still; what is written at those of more
#: stays until the server starts again.
_MOST_TAKEN = 1 << 20
#: Seconds between two looks for what is to be removed, between the first two copies of a payload
#: that is there (then twice as long each time), and between two words that the store is away.
_LOOK_S = 60.0
#: Seconds for which names are collected that one request then removes; that removing at the end
#: lasts.
_COLLECTED_S, _END_S = 5.0, 10.0
_THREADS, _QUICK_THREADS = 16, 4


class Shelf(Protocol):
    """The objects of one server, by name; any thread may use it.

    What it does raises OSError while the store is away.
    """

    def put_urls(self, names: Sequence[str]) -> list[str]:
        """Sign addresses at which objects can be written, for `VALID_S`."""

    def get_url(self, name: str) -> str:
        """Sign an address at which an object can be read, for `VALID_S`."""

    def write(self, name: str, payload: Buffer) -> None:
        """Write an object."""

    def take(self, method: str, objects: Mapping[str, int], digest: bytes) -> Buffer:
        """Read the payload of a call, which callers have written; they still can write there.

        Args:
            method: Of the call.
            objects: Bytes of each object, by name.
            digest: blake3 of all of them, one after the other.

        Raises:
            PayloadLacking: If one is not there, or has fewer bytes.
            ChecksumMismatch: If they are not that.
        """

    def size(self, name: str) -> int | None:
        """Look how many bytes an object has; None: it is not there."""

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects; one that is not there is no error."""

    def clear(self) -> None:
        """Remove the objects of earlier servers."""


@dataclass(slots=True)
class _Given:
    """A reply's payload, of which callers were told.

    `copied_at`: from when on it is written once more for a caller that says that it is damaged.
    """

    name: str
    writing: asyncio.Task[None]
    began: float
    copied_at: float
    until: float


@dataclass(slots=True)
class _Awaited:
    """A payload that a caller was told to write, and that is not read yet.

    `told_until`: when the last address ends; `until`: when its objects are removed.
    """

    objects: Mapping[str, int]
    told_until: float
    until: float


class ObjectCalls:
    """Answers `METHOD` by the handlers of a server; `close` it at the end."""

    def __init__(self, shelf: Shelf) -> None:
        """Begin with an empty shelf."""
        self._handlers: Handlers = {}
        self._shelf = shelf
        self._pool = ThreadPoolExecutor(_THREADS, "payloads")
        self._quick = ThreadPoolExecutor(_QUICK_THREADS, "addresses")  # waits for no payload
        self._soon(shelf.clear)
        self._awaited: dict[str, dict[bytes, _Awaited]] = {}  # by caller and transfer
        #: Of payloads that were read: when their last address ends, about in this order, and names.
        self._taken: deque[tuple[float, tuple[str, ...]]] = deque(maxlen=_MOST_TAKEN)
        self._given: dict[bytes, _Given] = {}  # by digest
        #: What to call once a caller has its reply's payload; by caller and transfer.
        self._sent: dict[str, dict[bytes, Callable[[], None]]] = {}
        self._num_given = 0
        self._removed: dict[str, None] = {}  # in order, and found at once
        self._looked_at = self._said_at = float("-inf")

    def around(self, handlers: Handlers) -> Handlers:
        """Answer by these, which have their rules of access before them; gives a handler more."""
        self._handlers = handlers
        return {METHOD: self.answer}

    async def answer(self, call: IncomingCall) -> Reply:
        """Answer one call.

        Raises:
            NotYet: If the store does not answer.
            ChecksumMismatch: If what was written is not what was sent: it is to be written again.
            FrameError: If such a payload does not go by object store.
            TransportError: What the handler raises.
        """
        asked = ObjectCall.FromString(call.header)
        caller = call.caller.uri if call.caller is not None else ""
        transfer, now = bytes(asked.transfer), asyncio.get_running_loop().time()
        awaited = self._awaited.get(caller, {}).get(transfer)
        if awaited is not None:
            awaited.until = now + 2 * VALID_S
        self._remove_expired(now)
        if asked.is_received:
            self._sent.get(caller, {}).pop(transfer, _nothing)()
            return Reply.of(ObjectReply())
        if asked.digest and (asked.payload_bytes <= WHOLE_BYTES or len(asked.digest) != 32):
            raise FrameError(
                f"a payload of {asked.payload_bytes} bytes with a digest of {len(asked.digest)}: "
                f"more than {WHOLE_BYTES}, and 32, go by object store"
            )
        handler = handler_of(self._handlers, asked.method)
        try:
            reply = await handler(_Call(call, asked, functools.partial(self._read, caller, asked)))
        except PayloadLacking:
            return await self._ask(caller, asked)
        of_caller = self._awaited.get(caller, {})
        if awaited is not None and of_caller.get(transfer) is awaited:
            del of_caller[transfer]
            self._taken.append((awaited.told_until, tuple(awaited.objects)))
            self._remove(awaited.objects)
        size = memoryview(reply.payload).nbytes
        told = ObjectReply(header=reply.header)
        if size <= WHOLE_BYTES:
            return Reply(told.SerializeToString(), reply.payload, reply.on_sent, reply.digest)
        told.payload_bytes = size
        told.digest = reply.digest or await self._run(_digest, reply.payload, pool=self._quick)
        told.get_url = await self._give(told.digest, reply.payload, is_lost=asked.lost)
        sent = self._sent.setdefault(caller, {})
        sent[transfer] = reply.on_sent
        if len(sent) > _MOST_SENT:  # of no matter but for a figure
            del sent[next(iter(sent))]
        return Reply.of(told)

    def close(self) -> None:
        """Answer no more, and remove what is left, for some seconds at most."""
        names = [*self._removed, *(each.name for each in self._given.values())]
        names += [name for _, each in self._taken for name in each]
        for of_caller in self._awaited.values():
            names += [name for awaited in of_caller.values() for name in awaited.objects]
        for pool in (self._pool, self._quick):
            pool.shutdown(wait=False, cancel_futures=True)
        removing = threading.Thread(target=self._try, args=[lambda: self._shelf.delete(names)])
        removing.daemon = True
        removing.start()
        removing.join(_END_S)

    # -- what a caller writes ----------------------------------------------------------------------

    async def _ask(self, caller: str, asked: ObjectCall) -> Reply:
        """Tell a caller where to write a payload that a handler wants."""
        of_caller = self._awaited.setdefault(caller, {})
        if len(of_caller) >= _MOST_AWAITED:  # it writes that again, if it has not been read
            self._remove(of_caller.pop(next(iter(of_caller))).objects)
        objects = _objects(caller, asked)
        for name in objects:
            self._removed.pop(name, None)
        until = asyncio.get_running_loop().time() + VALID_S
        of_caller[bytes(asked.transfer)] = _Awaited(objects, until, until + VALID_S)
        urls = await self._run(self._shelf.put_urls, [*objects], pool=self._quick)
        told = ObjectReply(put_urls=urls, piece_bytes=next(iter(objects.values())))
        told.is_lost = asked.is_written
        return Reply.of(told)

    async def _read(self, caller: str, asked: ObjectCall) -> Buffer:
        """Read the payload that a caller has written."""
        if not asked.is_written:
            raise PayloadLacking("it is not written yet")
        objects = _objects(caller, asked)
        try:
            return await self._run(self._shelf.take, asked.method, objects, asked.digest)
        except ChecksumMismatch:  # a caller could say again and again that they are written
            await self._run(self._shelf.delete, [*objects], pool=self._quick)
            raise

    # -- what callers read -------------------------------------------------------------------------

    async def _give(self, digest: bytes, payload: Buffer, *, is_lost: bytes) -> str:
        """Have a payload in the store, written once, and sign an address of it."""
        loop, wait_s = asyncio.get_running_loop(), _LOOK_S
        given = self._given.get(digest)
        if given is not None and is_lost == digest and given.writing.done():
            size = await self._run(self._shelf.size, given.name, pool=self._quick)
            is_there = size == memoryview(payload).nbytes
            if not is_there or loop.time() >= given.copied_at:
                self._forget(digest, given)
                wait_s = 2 * (given.copied_at - given.began)
            given = self._given.get(digest)  # another one may have found it before
        if given is None:
            if len(self._given) >= _MOST_GIVEN:
                oldest = next(iter(self._given))
                self._forget(oldest, self._given[oldest])
            self._num_given += 1
            name = f"given-{self._num_given}"
            writing = asyncio.ensure_future(self._run(self._shelf.write, name, payload))
            now = loop.time()
            given = self._given[digest] = _Given(name, writing, now, now + wait_s, math.inf)
        try:
            await asyncio.shield(given.writing)
        except BaseException:
            if given.writing.done():
                self._forget(digest, given)
            raise
        given.until = loop.time() + 2 * VALID_S
        return await self._run(self._shelf.get_url, given.name, pool=self._quick)

    def _forget(self, digest: bytes, given: _Given) -> None:
        """Give a payload no more as it is in the store."""
        if self._given.get(digest) is given:
            del self._given[digest]
            self._remove([given.name])

    # -- the store ---------------------------------------------------------------------------------

    async def _run(
        self, work: Callable[..., _T], *arguments: object, pool: Executor | None = None
    ) -> _T:
        """Do what waits for the store, or takes long, in a thread.

        Raises:
            NotYet: If the store does not answer; an OSError would be taken for the handler's own.
        """
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(pool or self._pool, work, *arguments)
        except OSError as error:
            said = f"the object store of payloads does not answer: {error}"
            if loop.time() >= self._said_at + _LOOK_S:
                self._said_at = loop.time()
                _log.error("%s. Islands with transport.payloads = bucket wait", said)
            raise NotYet(said) from error

    def _remove_expired(self, now: float) -> None:
        if now < self._looked_at + _LOOK_S:
            return
        self._looked_at = now
        names: list[str] = []
        for digest in [d for d, given in self._given.items() if given.until < now]:
            names.append(self._given.pop(digest).name)
        while self._taken and self._taken[0][0] < now:
            names += self._taken.popleft()[1]
        for caller, of_caller in list(self._awaited.items()):
            for transfer in [t for t, awaited in of_caller.items() if awaited.until < now]:
                names += of_caller.pop(transfer).objects
            if not of_caller:
                del self._awaited[caller]
        self._remove(names)

    def _remove(self, names: Iterable[str]) -> None:
        """Remove objects soon; what stays goes when the server starts again."""
        each = dict.fromkeys(names)
        if each and not self._removed:
            asyncio.get_running_loop().call_later(_COLLECTED_S, self._remove_collected)
        self._removed |= each

    def _remove_collected(self) -> None:
        names, self._removed = [*self._removed], {}
        self._soon(lambda: self._shelf.delete(names))

    def _soon(self, work: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # closed: what is left is removed there
            self._pool.submit(self._try, work)

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as error:
            _log.warning("objects of payloads stay until the next start: %s", error)


class PayloadLacking(Exception):
    """A handler reads a payload that is not in the store, or not all of it."""


class _Call:
    """A call as a handler sees it; see `contracts.IncomingCall`."""

    #: It is never sent before it is asked for.
    has_asked = True

    def __init__(
        self, outer: IncomingCall, asked: ObjectCall, read: Callable[[], Awaitable[Buffer]]
    ) -> None:
        self.method = asked.method
        self.header = asked.header
        self.payload_bytes = asked.payload_bytes if asked.digest else outer.payload_bytes
        self.peer = outer.peer
        self.caller: Identity | None = outer.caller
        self.is_local = outer.is_local
        self._read = read if asked.digest else outer.read_payload

    async def read_payload(self) -> Buffer:
        return await self._read()


def _objects(caller: str, asked: ObjectCall) -> dict[str, int]:
    """Name the objects of a caller's payload, with the bytes of each.

    Nobody else can name them: a transfer is known by a random name.
    """
    of = blake3.blake3(asked.transfer + caller.encode()).hexdigest()[:32]
    size = asked.payload_bytes
    piece_bytes = max(PIECE_BYTES, -(-size // _MOST_PIECES))
    starts = range(0, size, piece_bytes)
    return {f"{of}-{n}": min(piece_bytes, size - start) for n, start in enumerate(starts)}


def joined(pieces: Iterable[bytes], num_bytes: int, digest: bytes) -> bytearray:
    """Join the pieces of a payload.

    Raises:
        PayloadLacking: If they are fewer.
        ChecksumMismatch: If they are not those of its digest.
    """
    payload, at = bytearray(num_bytes), 0
    for piece in pieces:
        payload[at : at + len(piece)] = piece
        at += len(piece)
    if at < num_bytes:
        raise PayloadLacking(f"{at} of {num_bytes} bytes are in the object store")
    if _digest(payload) != digest:
        raise ChecksumMismatch(
            f"{num_bytes} bytes of a payload in the object store are not those that were sent: "
            f"they are asked for again"
        )
    return payload


def _digest(payload: Buffer) -> bytes:
    return blake3.blake3(payload).digest()


def _nothing() -> None:
    """Do nothing."""
