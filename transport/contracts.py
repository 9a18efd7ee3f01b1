"""Defines a transport: one kind of call, from a client to a handler, over any wire.

A call carries a small header (a serialised protobuf, opaque here) and a payload (raw bytes, may
be empty and may be gigabytes); the reply carries the same two. Payloads travel in checksummed
chunks (`framing`), are never parsed, and are only allocated by a receiver that has agreed to
their declared size.

Times are seconds of the running event loop's clock (`loop.time()`), so the same code runs under
the real clock and under the virtual one of `loopback`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from diloco.transport.identity import Identity
from diloco.transport.transfer import Transfer

if TYPE_CHECKING:
    from google.protobuf.message import Message

Buffer: TypeAlias = bytes | bytearray | memoryview

#: Version of the wire protocol; every header carries it.
PROTOCOL_VERSION = 5


def _nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer to a call: a header and a payload (possibly empty).

    A server calls `on_sent` when it has handed the last byte to the network: only what the windows
    of the way hold is under way then. Where an attempt is repeated it may be called again.

    A reply with a `digest`, blake3 of its payload, is not kept for its caller: after a break the
    handler is asked again, and an equal payload goes on.
    """

    header: bytes
    payload: Buffer = b""
    on_sent: Callable[[], None] = field(default=_nothing, repr=False, compare=False)
    digest: bytes = field(default=b"", compare=False)

    @classmethod
    def of(cls, message: Message) -> Reply:
        """Answer with a message alone."""
        return cls(message.SerializeToString())


class IncomingCall(Protocol):
    """A call as its handler sees it: the header is here, the payload is still on its way."""

    @property
    def method(self) -> str:
        """Name of the method, such as ``fragment.submit``."""

    @property
    def header(self) -> bytes:
        """Serialised header, complete."""

    @property
    def payload_bytes(self) -> int:
        """Declared size of the payload in bytes.

        Nothing has been allocated for it yet, unless it came with the header: of a whole payload
        (`framing.WHOLE_BYTES` at most) the message is held from the call's begin.
        """

    @property
    def has_asked(self) -> bool:
        """Whether nothing of a payload is sent before `read_payload`: `Transfer.asks_first`.

        An honest caller's word; of one that sends all the same its stream holds what gRPC's
        windows take.
        """

    @property
    def peer(self) -> str:
        """Where the call came from, for messages only."""

    @property
    def caller(self) -> Identity | None:
        """Who calls, by certificate or token; None where the transport asks for neither."""

    @property
    def is_local(self) -> bool:
        """Whether the call certainly came from this machine."""

    async def read_payload(self) -> Buffer:
        """Receive the whole payload, verified chunk by chunk.

        Call it at most once, and only after `payload_bytes` was found acceptable. A handler that
        answers without reading refuses the payload unread.

        Raises:
            FrameError: If more or fewer bytes arrive than declared.
            ChecksumMismatch: If a chunk arrived damaged.
            PeerReset: If the caller went away.
        """


#: Answers one call; cancelled when its caller goes away or the call's deadline passes.
Handler: TypeAlias = Callable[[IncomingCall], Awaitable[Reply]]
Handlers: TypeAlias = Mapping[str, Handler]


@runtime_checkable
class Transport(Protocol):
    """A client's connection to one peer.

    Safe for concurrent calls from one event loop. Closing cancels what is in flight.
    """

    @property
    def peer(self) -> str:
        """Address of the peer, ``host:port`` or a loopback name."""

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
        """Call `method` and wait for the complete reply.

        Args:
            method: Name under which the peer registered a handler.
            header: Serialised header, at most `framing.MAX_HEADER_BYTES`.
            payload: Raw bytes; not copied as a whole.
            deadline_s: Seconds from now for the whole call, reply included; must be > 0. With a
                `transfer`, a network's transport counts them from the last message of the payloads
                that moved, up to `deadlines.STILL` times while others do, or (gRPC on Linux) bytes
                cross the connection, and not before the call's turn has come (`turns`).
            max_reply_bytes: Largest reply payload the caller is ready to hold; 0 allows none.
            transfer: Given to every attempt of one call, with the same method, header and payload,
                it makes each go on where the one before it broke, and has the peer answer once; a
                payload of at most `framing.WHOLE_BYTES` is sent again. None: a call begins again.

        Raises:
            TransportError: One of the leaves in `errors`; `TransportClosed` after `close`.
            ValueError: If `deadline_s`, `max_reply_bytes` or the header's size is impossible.
        """

    async def close(self) -> None:
        """Release the connection. Closing twice is harmless."""


class TransportKind(Protocol):
    """Both ends of a kind of transport that another package adds, under a name of its own.

    The coordinator and each syncer serve at a HOST:PORT of the run file; what that is, is the
    kind's own choice, as long as `Server.address` gives one back that `connect` takes. What it
    protects is its own affair, too: beyond one machine a run needs `transport.insecure`.
    """

    def connect(self, address: str, *, chunk_bytes: int) -> Transport:
        """Make the way to a server; nothing is opened before the first call."""

    def serve(self, bind: str, handlers: Handlers, *, chunk_bytes: int) -> Server:
        """Make a server, not started yet; port 0 of `bind` draws a free one."""


class Server(Protocol):
    """A listening end; `handlers` maps method names to coroutines."""

    @property
    def address(self) -> str:
        """``host:port`` really bound (after `start`), or the loopback name."""

    async def start(self) -> None:
        """Bind and accept calls."""

    async def stop(self, drain_timeout_s: float) -> None:
        """Accept nothing new, let calls finish for `drain_timeout_s`, then cancel the rest."""
