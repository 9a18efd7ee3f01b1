"""Answers calls whose payloads travel by an object store, for the handlers of any server.

A handler sees an ordinary call. It is asked without the payload at first; where it reads one, the
caller is told at which addresses to write it, and calls again. So what a handler refuses unread is
written nowhere, and what has no room yet waits at the caller. A reply's payload is written once,
however many callers take it, and each is told an address. Addresses are signed by this server: a
caller has no credentials, reads what it was given, and writes what it was asked for.

Objects are removed once they were read, or nobody was told of them for as long as addresses are
valid.

Source: PROTOCOL.md, "Payloads by object store".
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

import blake3

from diloco.protos.payload_pb2 import ObjectCall, ObjectReply
from diloco.transport.calls.dispatch import handler_of
from diloco.transport.contracts import Buffer, Handlers, IncomingCall, Reply
from diloco.transport.errors import ChecksumMismatch, NotYet, Overloaded
from diloco.transport.framing import WHOLE_BYTES
from diloco.transport.identity import Identity

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

METHOD = "payload.call"
#: Seconds for which an address is valid, and what is at it kept after the last one was told.
VALID_S = 3600.0
#: Bytes of an object that a caller writes, more where that would be more than `_MOST_PIECES`.
PIECE_BYTES = 8 << 20
_MOST_PIECES = 256
#: Payloads that one caller may have been told to write, and has not called again about.
_MOST_UNREAD = 1 << 16
#: Seconds between two looks for what is to be removed, and between two copies of one payload.
_LOOK_S = 60.0
_THREADS = 16


class Shelf(Protocol):
    """The objects of one server, by name; any thread may use it.

    What it does raises OSError while the store is away.
    """

    def put_url(self, name: str) -> str:
        """Sign an address at which an object can be written, for `VALID_S`."""

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
            ChecksumMismatch: If they are not that.
        """

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects; one that is not there is no error."""

    def clear(self) -> None:
        """Remove the objects of earlier servers."""


@dataclass(slots=True)
class _Given:
    """A reply's payload, of which callers were told."""

    name: str
    writing: asyncio.Task[None]
    began: float
    until: float


@dataclass(slots=True)
class _Awaited:
    """A payload that a caller was told to write."""

    names: Sequence[str]
    until: float


class ObjectCalls:
    """Answers `METHOD` by the handlers of a server; `close` it at the end."""

    def __init__(self, shelf: Shelf) -> None:
        """Begin with an empty shelf."""
        self._handlers: Handlers = {}
        self._shelf = shelf
        self._pool = ThreadPoolExecutor(_THREADS, "payloads")
        self._soon(shelf.clear)
        self._awaited: dict[str, dict[bytes, _Awaited]] = {}  # by caller and transfer
        self._given: dict[bytes, _Given] = {}  # by digest
        #: What to call once a caller has its reply's payload.
        self._sent: dict[tuple[str, bytes], tuple[Callable[[], None], float]] = {}
        self._num_given = 0
        self._looked_at = float("-inf")

    def around(self, handlers: Handlers) -> Handlers:
        """Answer by these, which have their rules of access before them; gives a handler more."""
        self._handlers = handlers
        return {METHOD: self.answer}

    async def answer(self, call: IncomingCall) -> Reply:
        """Answer one call.

        Raises:
            NotYet: If the store does not answer.
            ChecksumMismatch: If what was written is not what was sent: it is to be written again.
            TransportError: What the handler raises.
        """
        asked = ObjectCall.FromString(call.header)
        caller = call.caller.uri if call.caller is not None else ""
        key = caller, bytes(asked.transfer)
        self._remove_expired(asyncio.get_running_loop().time())
        if asked.is_received:
            on_sent, _ = self._sent.pop(key, (_nothing, 0.0))
            on_sent()
            return Reply.of(ObjectReply())
        handler = handler_of(self._handlers, asked.method)
        try:
            reply = await handler(_Call(call, asked, functools.partial(self._read, caller, asked)))
        except _Unwritten:
            return await self._ask(caller, asked)
        if awaited := self._awaited.get(caller, {}).pop(key[1], None):
            self._remove(awaited.names)
        size = memoryview(reply.payload).nbytes
        told = ObjectReply(header=reply.header)
        if size <= WHOLE_BYTES:
            return Reply(told.SerializeToString(), reply.payload, reply.on_sent, reply.digest)
        told.digest, told.payload_bytes = await self._run(_digest, reply.payload), size
        told.get_url = await self._give(told.digest, reply.payload, is_lost=asked.lost)
        self._sent[key] = reply.on_sent, asyncio.get_running_loop().time() + VALID_S
        return Reply.of(told)

    def close(self) -> None:
        """Remove what is left, in a thread, and answer no more."""
        names = [each.name for each in self._given.values()]
        for of_caller in self._awaited.values():
            names += [name for awaited in of_caller.values() for name in awaited.names]
        self._remove(names)
        self._pool.shutdown(wait=False)

    # -- what a caller writes ----------------------------------------------------------------------

    async def _ask(self, caller: str, asked: ObjectCall) -> Reply:
        """Tell a caller where to write a payload that a handler wants."""
        of_caller = self._awaited.setdefault(caller, {})
        if len(of_caller) >= _MOST_UNREAD:
            raise Overloaded(f"{len(of_caller)} payloads of this caller are not written yet")
        names = [*(objects := _objects(caller, asked))]
        until = asyncio.get_running_loop().time() + VALID_S
        of_caller[bytes(asked.transfer)] = _Awaited(names, until)
        urls = await self._run(lambda: [self._shelf.put_url(name) for name in names])
        return Reply.of(ObjectReply(put_urls=urls, piece_bytes=objects[names[0]]))

    async def _read(self, caller: str, asked: ObjectCall) -> Buffer:
        """Read the payload that a caller has written."""
        if not asked.is_written:
            raise _Unwritten
        objects = _objects(caller, asked)
        return await self._run(self._shelf.take, asked.method, objects, asked.digest)

    # -- what callers read -------------------------------------------------------------------------

    async def _give(self, digest: bytes, payload: Buffer, *, is_lost: bytes) -> str:
        """Have a payload in the store, written once, and sign an address of it."""
        now = asyncio.get_running_loop().time()
        given = self._given.get(digest)
        if given is not None and is_lost == digest and now >= given.began + _LOOK_S:
            given = None  # somebody has removed it; the rest of it goes, too
            self._remove([self._given.pop(digest).name])
        if given is None:
            self._num_given += 1
            name = f"given-{self._num_given}"
            writing = asyncio.ensure_future(self._run(self._shelf.write, name, payload))
            given = self._given[digest] = _Given(name, writing, now, now)
        given.until = now + VALID_S
        try:
            await asyncio.shield(given.writing)
        except BaseException:
            if given.writing.done() and self._given.get(digest) is given:
                del self._given[digest]
            raise
        return await self._run(self._shelf.get_url, given.name)

    # -- the store ---------------------------------------------------------------------------------

    async def _run(self, work: Callable[..., _T], *arguments: object) -> _T:
        """Do what waits for the store, or takes long, in a thread.

        Raises:
            NotYet: If the store does not answer; an OSError would be taken for the handler's own.
        """
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._pool, work, *arguments)
        except OSError as error:
            raise NotYet(f"the object store of payloads does not answer: {error}") from error

    def _remove_expired(self, now: float) -> None:
        if now < self._looked_at + _LOOK_S:
            return
        self._looked_at = now
        names: list[str] = []
        for digest in [d for d, given in self._given.items() if given.until < now]:
            names.append(self._given.pop(digest).name)
        for caller, of_caller in list(self._awaited.items()):
            for transfer in [t for t, awaited in of_caller.items() if awaited.until < now]:
                names += of_caller.pop(transfer).names
            if not of_caller:
                del self._awaited[caller]
        for key in [key for key, (_, until) in self._sent.items() if until < now]:
            del self._sent[key]
        self._remove(names)

    def _remove(self, names: Iterable[str]) -> None:
        """Remove objects soon; what stays goes when the server starts again."""
        if each := list(names):
            self._soon(lambda: self._shelf.delete(each))

    def _soon(self, work: Callable[[], None]) -> None:
        def do() -> None:
            try:
                work()
            except OSError as error:
                _log.warning("objects of payloads stay until the next start: %s", error)

        self._pool.submit(do)


class _Unwritten(Exception):
    """A handler reads a payload that is not in the store yet."""


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
        ChecksumMismatch: If they are not those of its digest.
    """
    payload, at = bytearray(num_bytes), 0
    for piece in pieces:
        payload[at : at + len(piece)] = piece
        at += len(piece)
    if at != num_bytes or _digest(payload) != digest:
        raise ChecksumMismatch(
            f"{at} of {num_bytes} bytes of a payload are in the object store, or they are not "
            f"those that were sent: they are asked for again"
        )
    return payload


def _digest(payload: Buffer) -> bytes:
    return blake3.blake3(payload).digest()


def _nothing() -> None:
    """Do nothing."""
